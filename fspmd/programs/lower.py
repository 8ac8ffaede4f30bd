"""`jit(f).lower(...)`: a program that is recorded and not run, to be read and priced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fspmd.meshes.mesh import Mesh
from fspmd.messages import counted
from fspmd.programs.ahead_of_time import Compiled, check_runs
from fspmd.programs.capture import Capture, capture, recording
from fspmd.programs.fakes import fake_mode, stand_ins
from fspmd.programs.flops import model_flops
from fspmd.programs.memory import Memory, levels, lives, memory_of_program
from fspmd.programs.program import Program
from fspmd.programs.schedule import Event, communications, end_of, schedule
from fspmd.programs.text import program_text
from fspmd.programs.timeline import chrome_trace, picture
from fspmd.redistribution.cost import Topology, topology
from fspmd.sharded import is_sharded
from fspmd.torch_internals import FakeTensorMode
from fspmd.trees import flatten_in_order, leaf_paths, parameter_names
from fspmd.watching.communication_log import CommunicationLog


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run costs each rank by the cost model; µs, bytes, and FLOPs as sums and products counted apiece.

    ``time`` is that of the whole, ``computation`` that of its local steps, ``communication`` that of its collectives,
    of which ``exposed`` is the part that computation does not hide. ``nbytes`` are read and written in the rank's own
    memory, ``moved`` are sent to other ranks. ``ranks``: as many run it.

    ``flops`` are those that a rank does, of uneven blocks the first, which does the most; ``model_flops`` those that
    the whole model needs, of whole tensors: what ranks compute alike counts once there, and what is computed again, as
    by `checkpoint`, not at all.
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
        return max(0.0, self.communication - self.exposed)  # differences of sums are rounded

    def utilisation(self, model_flops: float | None = None) -> float:
        """Model FLOPs utilisation: the FLOPs that the model needs, per time, of those that all ranks could do.

        ``model_flops``: of the whole model, forward and backward, as somebody else counts them, such as
        6 * parameters * tokens of a transformer (Chowdhery et al., "PaLM", 2022, appendix B).
        """
        return self._share(self.model_flops if model_flops is None else model_flops)

    @property
    def hardware_utilisation(self) -> float:
        """The same of all FLOPs that ranks do, alike or again."""
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
                f"{self.hardware_utilisation:.1%} by all that ranks do",
            )
        )


class Lowered:
    """One program, as it will run on each rank; of ranks that hold unlike blocks, as on this one.

    On a simulated or abstract mesh that is the first, whose blocks are the largest, so no rank takes longer or holds
    more. A simulation begins each collective alone, where processes pack some of those that stand in a row into one.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        captured: Capture,
        given: tuple[Any, Any],
        donated: Sequence[int],
        compiled: Callable[[], Compiled],
    ) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self.program = captured.program
        self.mesh = _mesh_of(self.program)
        self._arguments = _names(function, *given)
        self._donated = [self.program.inputs[i] for i in donated] if captured.followed is None else []
        self._compiled = compiled

    def __repr__(self) -> str:
        counts = f"{counted(len(self.program.steps), 'step')}, {len(self.program.deferred)} deferred"
        return f"Lowered({self.name}: {counts}, {counted(len(self.collectives()), 'collective')})"

    def as_text(self) -> str:
        """The program: a line for each step, with global types where values have one, and local shapes.

        A collective tells its axes, the bytes that a rank sends and µs, and ``<-`` where it runs in backward; each step
        ends with the user's line that asked for it.
        """
        return program_text(self.name, self.program, self._arguments, self.mesh)

    def collectives(self) -> CommunicationLog:
        """What it communicates, in order: a list of `Communication`, which prints as a table.

        It is what `communication_log` records of the function when it runs.
        """
        return CommunicationLog(communications((*self.program.steps, *self.program.deferred)))

    def schedule(self, links: Topology | None = None) -> list[Event]:
        """When each step runs, by the cost model."""
        return schedule(self.program, links)

    def cost(self, links: Topology | None = None) -> Cost:
        """What a run costs, on the machine of `set_topology` or on another."""
        links = links or topology()
        events = self.schedule(links)
        time = end_of(events)
        computation = sum(one.duration for one in events if one.price is None)
        prices = [one.price for one in events if one.price is not None]
        return Cost(
            time=time,
            computation=computation,
            communication=sum(price.time for price in prices),
            exposed=max(0.0, time - computation),
            flops=sum(one.flops for one in events),
            model_flops=model_flops(self.program),
            nbytes=sum(one.nbytes for one in events),
            moved=sum(price.moved for price in prices),
            ranks=self.mesh.size if self.mesh is not None else 1,
            peak_flops=links.flops,
        )

    def visualize(self, path: str | Path) -> tuple[Path, Path]:
        """Write when each step runs, by the cost model: ``path.json``, a trace for chrome://tracing or Perfetto, and
        ``path.svg``, a picture of it and of the memory that is held.
        """
        base, events = Path(path), self.schedule()
        steps = [*self.program.steps, *self.program.deferred]
        held = levels(lives(self.program, self._donated), steps)
        trace, drawn = base.with_suffix(".json"), base.with_suffix(".svg")
        trace.write_text(chrome_trace(self.name, events))
        drawn.write_text(picture(self.name, events, held, steps))
        return trace, drawn

    def compile(self) -> Compiled:
        """The program as a function of arguments of the kind that it was lowered for: nothing is recorded any more.

        Raises:
            MeshError: the mesh is abstract.
        """
        check_runs(self.program, self.mesh)
        return self._compiled()

    def memory(self) -> Memory:
        """The most bytes that a rank holds at once, and what they are."""
        return memory_of_program(self.program, self._donated, self._arguments)


def without_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, FakeTensorMode]:
    """Arguments by place and by name as fake tensors, and the mode that they are of."""
    mode = fake_mode()
    with torch.inference_mode(False):
        return *stand_ins((args, kwargs), mode), mode


def imagined(function: Callable[..., Any], args: Any, kwargs: Any, mode: FakeTensorMode) -> Capture:
    """Record a function without running it."""
    with recording, mode:
        return capture(function, args, kwargs, imagines=True)


def _names(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """What the user calls each tensor among the arguments."""
    named = [*zip(parameter_names(function, len(args)), args, strict=True), *kwargs.items()]
    found = []
    for name, tree in named:
        leaves, _ = flatten_in_order(tree, is_sharded)
        paths = leaf_paths(tree, name, is_sharded, in_order=True)
        found += [path for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, Tensor)]
    return found


def _mesh_of(program: Program) -> Mesh | None:
    """The largest mesh that a step or an argument speaks of."""
    meshes = {node.meta["spec"].mesh for node in program.graph.nodes if "spec" in node.meta}
    meshes |= {node.meta["call"].mesh for node in program.graph.nodes if "call" in node.meta}
    return max(meshes, key=lambda mesh: mesh.size, default=None)
