"""`jit(f).lower(...)`: a program that is recorded to be read, priced or compiled, and not run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.errors import ArgumentError, MeshError, RecordError
from fspmd.inspection.communication_log import CommunicationLog
from fspmd.meshes.mesh import Mesh
from fspmd.messages import counted
from fspmd.programs.cache_misses import CallOfKind, differences
from fspmd.programs.capture import Capture
from fspmd.programs.communication import communications
from fspmd.programs.flops import model_flops
from fspmd.programs.keys import key_of, surroundings
from fspmd.programs.memory import Memory, levels, lives, memory_of_program
from fspmd.programs.program import Program
from fspmd.programs.records import Record, meet, replayed, stale
from fspmd.programs.schedule import Event, chrome_trace, end_of, picture, program_text, schedule
from fspmd.programs.steps import moved_by
from fspmd.redistribution.cost import Topology, topology
from fspmd.sharded import is_sharded
from fspmd.torch_internals import FakeTensor
from fspmd.trees import flatten_in_order, parameter_names, paths_of


class Compiled:
    """The result of ``jit(f).lower(...).compile()``: a function of arguments of the kind for which it was lowered.

    Raises:
        ArgumentError: an argument has another kind. The error says which argument, and how it differs.
    """

    def __init__(self, function: Callable[..., Any], record: Record, marked: Callable[..., Any]) -> None:
        self._function, self._record, self._marked = function, record, marked
        self._accepted: set[Any] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        args, kwargs = self._marked(args, kwargs)
        known, values, strides = key_of(args, kwargs)
        if known not in self._accepted or self._record.closed_over or self._record.modules:
            call = CallOfKind(args, kwargs, surroundings())
            if reasons := stale(self._record) or differences(self._function, call, self._record.call):
                raise ArgumentError(
                    f"{self._function.__name__} was lowered for other arguments: {'; '.join(reasons)}; lower it for "
                    "these arguments, or call jit(f), which records it anew"
                )
            self._accepted.add(known)
        meet(self._record, self._function)
        return replayed(self._record, values, strides)


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one run by the cost model. An addition and a multiplication are one FLOP each.

    Attributes:
        time: µs of the run.
        computation: µs of the local steps of a rank.
        communication: µs of the collectives of a rank.
        exposed: µs of communication that computation does not hide.
        flops: FLOPs of a rank; if blocks are uneven, of the first rank, which has the most.
        model_flops: FLOPs of the model. Equal work of several ranks counts once. Repeated work, as of `checkpoint`,
            does not count.
        nbytes: bytes that a rank reads and writes in its memory.
        moved: bytes that a rank sends to other ranks.
        ranks: the number of ranks.
        peak_flops: the most FLOPs that a rank can do in a µs.
    """

    time: float
    computation: float
    communication: float
    exposed: float
    flops: int
    model_flops: int
    nbytes: int
    moved: float
    ranks: int
    peak_flops: float

    @property
    def overlapped(self) -> float:
        """µs of communication that computation hides."""
        return max(0.0, self.communication - self.exposed)  # rounding may make the difference negative

    def utilisation(self, model_flops: float | None = None) -> float:
        """Model FLOPs utilisation: the FLOPs of the model, divided by the most FLOPs of all ranks in this time.

        ``model_flops``: another count for the model, forward and backward, such as 6 * parameters * tokens of a
        transformer (Chowdhery et al., "PaLM", 2022, appendix B).
        """
        return self._share(self.model_flops if model_flops is None else model_flops)

    @property
    def hardware_utilisation(self) -> float:
        """The FLOPs of all ranks, repeated work included, divided by the most FLOPs of all ranks in this time."""
        return self._share(self.flops * self.ranks)

    def _share(self, flops: float) -> float:
        return flops / (self.time * self.peak_flops * self.ranks) if self.time else 0.0

    def __str__(self) -> str:
        return "\n".join(
            (
                f"time           {self.time:,.1f} µs on {counted(self.ranks, 'rank')}",
                f"computation    {self.computation:,.1f} µs a rank: {self.flops:,} FLOPs, {self.nbytes:,} B read and "
                "written",
                f"communication  {self.communication:,.1f} µs a rank: {self.moved:,.0f} B sent; of it "
                f"{self.exposed:,.1f} µs exposed, {self.overlapped:,.1f} µs overlapped",
                f"utilisation    {self.utilisation():.1%} by the {self.model_flops:,} FLOPs of the model, "
                f"{self.hardware_utilisation:.1%} by all FLOPs of the ranks",
            )
        )


class Lowered:
    """A recorded program as each rank runs it; if blocks are uneven, as this rank runs it.

    On a simulated or abstract mesh it is the program of the first rank, whose blocks are the largest: no rank takes
    longer or holds more memory, unless ranks have other steps, as in a pipeline. A simulation begins each collective
    separately. Processes pack some collectives that follow each other.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        captured: Capture,
        donated: Sequence[int],
        compiled: Callable[[], Compiled],
    ) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self.program = captured.program
        self.mesh = _mesh_of(self.program)
        self._arguments = _names(function, *captured.given)
        self._donated = [self.program.inputs[i] for i in donated] if captured.followed is None else []
        self._compiled = compiled
        self._out = captured.out

    def __repr__(self) -> str:
        counts = f"{counted(len(self.program.steps), 'step')}, {len(self.program.deferred)} deferred"
        return f"Lowered({self.name}: {counts}, {counted(len(self.collectives()), 'collective')})"

    def as_text(self) -> str:
        """The program as text: a line for each step, with the local shape, and the global type where it is known.

        A collective shows its axes, the bytes that a rank sends, and µs. ``<-`` marks steps of backward. Each line ends
        with the user's line that caused the step.
        """
        return program_text(self.name, self.program, self._arguments, self.mesh)

    @property
    def out_info(self) -> Any:
        """The result without values: a pytree with a `TensorSpec` for a `Sharded`, and a meta tensor for a tensor.

        >>> from fspmd import P, TensorSpec, jit, make_mesh
        >>> x = TensorSpec(make_mesh((4,), ("x",), transport="abstract"), P("x"), (8, 2), torch.float32)
        >>> jit(lambda x: {"rows": x.sum(1), "all": x.mT}).lower(x).out_info
        {'rows': f32[8@x] on mesh(x=4), 'all': f32[2, 8@x] on mesh(x=4)}
        """
        return optree.tree_map(_without_values, self._out, is_leaf=is_sharded)

    def collectives(self) -> CommunicationLog:
        """The collectives in order: a list of `Communication` that prints as a table.

        `communication_log` gives the same list when the function runs.
        """
        return CommunicationLog(communications((*self.program.steps, *self.program.deferred)))

    def schedule(self, links: Topology | None = None) -> list[Event]:
        """The start and duration of each step by the cost model. ``links``: as in `cost`."""
        return schedule(self.program, links)

    def cost(self, links: Topology | None = None) -> Cost:
        """The cost of a run. ``links``: the machine, by default that of `set_topology`."""
        links = links or topology()
        events = self.schedule(links)
        time = end_of(events)
        computation = sum(event.duration for event in events if event.price is None)
        prices = [event.price for event in events if event.price is not None]
        return Cost(
            time=time,
            computation=computation,
            communication=sum(price.time for price in prices),
            exposed=max(0.0, time - computation),
            flops=sum(event.flops for event in events),
            model_flops=model_flops(self.program),
            nbytes=sum(event.nbytes for event in events),
            moved=sum(price.moved for price in prices),
            ranks=self.mesh.size if self.mesh is not None else 1,
            peak_flops=links.flops,
        )

    def visualize(self, path: str | Path) -> tuple[Path, Path]:
        """Write the schedule: ``path.json``, a trace for chrome://tracing or Perfetto, and ``path.svg``, a picture.

        The picture also shows the memory that a rank holds.
        """
        base, events = Path(path), self.schedule()
        steps = [*self.program.steps, *self.program.deferred]
        memory = levels(lives(self.program, self._donated), steps)
        trace, drawn = base.with_suffix(".json"), base.with_suffix(".svg")
        trace.write_text(chrome_trace(self.name, events))
        drawn.write_text(picture(self.name, events, memory, steps))
        return trace, drawn

    def compile(self) -> Compiled:
        """The program as a function of arguments of the kind for which it was lowered. Records nothing.

        Raises:
            MeshError: the mesh is abstract.
            RecordError: the program closes over a tensor without values.
        """
        if self.mesh is not None and self.mesh.transport == "abstract":
            raise MeshError(
                f"compile() got a program on {self.mesh!r}, which is abstract and has no ranks; lower it for a mesh of "
                'transport="simulation" or "process_group"'
            )
        if any(isinstance(x, FakeTensor) for x in self.program.constants.values()):
            raise RecordError("compile() got a program that closes over a tensor without values; call jit(f) instead")
        return self._compiled()

    def memory(self) -> Memory:
        """The most bytes that a rank holds at once, and the tensors that it then holds."""
        return memory_of_program(self.program, self._donated, self._arguments)


def _names(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The path of each tensor in the arguments. A path begins with the name of the parameter."""
    named = [*zip(parameter_names(function, len(args)), args, strict=True), *kwargs.items()]
    tensor_paths = []
    for name, tree in named:
        leaves, treedef = flatten_in_order(tree, is_sharded)
        rows = zip(paths_of(treedef, name), leaves, strict=True)
        tensor_paths += [path for path, leaf in rows if isinstance(leaf, Tensor)]
    return tensor_paths


def _without_values(x: Any) -> Any:
    if is_sharded(x):
        return x.spec
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def _mesh_of(program: Program) -> Mesh | None:
    """The largest mesh of a step or an argument."""
    meshes = {node.meta["spec"].mesh for node in program.graph.nodes if "spec" in node.meta}
    meshes |= {call.mesh for node in program.graph.nodes if (call := moved_by(node)) is not None}
    return max(meshes, key=lambda mesh: mesh.size, default=None)
