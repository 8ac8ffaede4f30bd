"""A function with the options of `jit`, and how a record or a lowered program is made of it.

Processes do not wait for each other to record: a process may have a record that another process lacks. So a function
is recorded on fake tensors, without communication, and all processes run the record.

A lowered program shows the steps of the first rank. Where blocks differ in shape, a simulation has separate steps for
each rank: `shard_of` gives the block of a rank, and `JOINED` joins blocks. A process has the steps for its own
block alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from traceback import clear_frames
from typing import Any, Final

from torch import fx
from torch.fx.node import map_aggregate

from fspmd.errors import ValuesNeededError
from fspmd.messages import described
from fspmd.programs.cache_misses import LISTENING, CallOfKind, report
from fspmd.programs.capture import capture, capture_fake, unwound
from fspmd.programs.donation import NOTHING, Donation, donation
from fspmd.programs.keys import Chosen, Surroundings, mark_static, surroundings, with_static
from fspmd.programs.lower import Compiled, Lowered
from fspmd.programs.passes.table import Pass, transform
from fspmd.programs.program import Program, rebuilt, remember
from fspmd.programs.records import Record, record_of, stale, with_reuse
from fspmd.programs.replay import Maker
from fspmd.programs.steps import CASTS, is_collective
from fspmd.torch_internals import FAKE_TENSOR_ERRORS
from fspmd.transport.local_int import SYMBOLS, LocalInt
from fspmd.transport.local_tensor import JOINED, shard_of


def of_first_rank(program: Program) -> Program:
    """The program without the steps of other ranks, as a process records it; the same program if it has none."""
    if not any(map(_is_simulated, program.graph.nodes)):
        return program
    others = _steps_of_other_ranks(program)
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        if node in others or node.op == "output":
            continue
        if (block := _block(node)) is not None:
            made = known[node] = known[block]
            if "spec" in node.meta:
                made.meta.setdefault("spec", node.meta["spec"])
            made.meta["frame"] = made.meta.get("frame") or node.meta.get("frame")  # passes read it
            continue
        args, kwargs = (_numbers(fx.map_arg(given, known.__getitem__)) for given in (node.args, node.kwargs))
        made = known[node] = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        remember(made, node, known)
    return rebuilt(program, graph, known)


def _is_simulated(node: fx.Node) -> bool:
    call = node.meta.get("call")
    return bool(node.meta.get("frame")) or (call is not None and call.mesh.transport == "simulation")


def _block(node: fx.Node) -> Any:
    """The first rank's value for a step that splits or joins blocks, or casts them; None for other steps."""
    if node.target is JOINED:
        return node.args[0][0]  # type: ignore[index]
    call = node.meta.get("call")
    is_cast = call and call.pair.kernel in CASTS and node.meta["waits"]  # a cast that does not wait has a wait step
    return node.args[0] if node.target is shard_of or is_cast else None


def _numbers(args: Any) -> Any:
    """Arguments in which the first rank's numbers replace numbers that differ from rank to rank."""

    def number(arg: Any) -> Any:
        local = arg.node if type(arg) in SYMBOLS else None
        return local.values[0] if type(local) is LocalInt else arg

    return map_aggregate(args, number)


def _steps_of_other_ranks(program: Program) -> set[fx.Node]:
    """Steps that use or serve only values of other ranks; and idle steps."""
    steps = [*program.steps, *program.deferred]
    meshes = [node.meta["call"].mesh for node in steps if "call" in node.meta]
    first = next(iter(max(meshes, key=lambda mesh: mesh.size).ranks)) if meshes else 0
    others: set[fx.Node] = set()
    per_rank: set[fx.Node] = set()  # steps that a simulation has separately for each rank
    for node in steps:
        used = [_block(node)] if node.target is JOINED else node.all_input_nodes
        if not others.isdisjoint(used) or (node.target is shard_of and node.args[1] != 0):
            others.add(node)
        if node.target is shard_of or (node.target is not JOINED and not per_rank.isdisjoint(used)):
            per_rank.add(node)
    for node in reversed(steps):
        serves_others = node.users and all(user in others or _block(user) not in (None, node) for user in node.users)
        # the first rank joins a collective of its mesh also if other ranks alone use the result
        if serves_others and not (is_collective(node) and node.meta["call"].mesh.coordinate(first) is not None):
            others.add(node)
    return others | _idle(steps, others, per_rank)


def _idle(steps: list[fx.Node], others: set[fx.Node], per_rank: set[fx.Node]) -> set[fx.Node]:
    """Steps of the first rank at the end of a repetition that goes on for other ranks; a process stops before them."""
    idle: set[fx.Node] = set()
    is_end = True  # whether no later step of this repetition belongs to the first rank
    for node in reversed(steps):
        if "repeats" not in node.meta:
            is_end = True
        elif node not in others:
            is_end = is_end and node in per_rank and node.users.keys() <= others | idle
            if is_end:
                idle.add(node)
    return idle


Arguments = tuple[tuple[Any, ...], dict[str, Any]]

#: errors of functions that need values. One of torch's occurs because it gives some fake tangents a wrong device
_NEEDS_VALUES: Final[tuple[type[Exception], ...]] = (ValuesNeededError, *FAKE_TENSOR_ERRORS)


@dataclass(frozen=True, slots=True)
class Recordable:
    """The function, its static and donated arguments, the passes over its records, and the maker of their replays."""

    function: Callable[..., Any]
    static: Chosen
    donate: Chosen
    passes: tuple[Pass, ...]
    make: Maker

    @property
    def plain(self) -> Callable[..., Any]:
        """The function, which takes `marked` arguments."""
        return with_static(self.function) if self.static else self.function

    def marked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments, with each static argument as a leaf."""
        return mark_static(self.function, self.static, args, kwargs) if self.static else (args, kwargs)

    def donated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Donation:
        """The donation of a call."""
        return donation(self.function, self.donate, args, kwargs) if self.donate else NOTHING

    @unwound
    def record(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        around: Surroundings,
        others: Iterable[Record],
        last: Record | None,
    ) -> Record:
        """A new record.

        If shapes depend on values, such as the numbers of rows that ranks send each other, the function is recorded
        while it runs on copies of its arguments. All processes then record at once.

        Args:
            args: the positional arguments.
            kwargs: the keyword arguments.
            around: the surroundings of the call.
            others: the other records of the function, for `explain_cache_misses`.
            last: the record with the same key, which is out of date.
        """
        if LISTENING:
            now = CallOfKind(args, kwargs, around)
            report(self.function, now, [record.call for record in others], () if last is None else stale(last))
        donated = self.donated(args, kwargs)
        try:
            captured = capture_fake(self.plain, args, kwargs, as_they_lie=True)
        except _NEEDS_VALUES as error:
            clear_frames(error.__traceback__)  # torch before 2.13 leaves the hooks of a checkpoint there
            captured = capture(self.plain, args, kwargs)
        transform(captured.program, self.passes)
        return record_of(self.function, captured, CallOfKind(*captured.given, around), donated, self.make)

    @unwound
    def lowered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered:
        """The program of a call, which is recorded and not run."""
        try:
            captured = capture_fake(self.plain, *self.marked(args, kwargs))
        except _NEEDS_VALUES as error:
            if isinstance(error, ValuesNeededError):
                raise
            reason = str(error).partition("\n")[0]
            raise ValuesNeededError(
                f"jit(f).lower(...) got {described(self.function)}, which calls a function of torch that needs values "
                f"({type(error).__name__}: {reason}); a lowered program has shapes alone: call jit(f), or lower the "
                "parts before and after it"
            ) from error
        donated, call = self.donated(*captured.given), CallOfKind(*captured.given, surroundings())
        program = of_first_rank(captured.program)
        shown = captured if program is captured.program else replace(captured, program=program)
        for recorded in (captured,) if shown is captured else (shown, captured):
            transform(recorded.program, self.passes)
            written = with_reuse(recorded, donated, self.make)

        def compiled() -> Compiled:
            record = record_of(self.function, captured, call, written, self.make)
            return Compiled(self.function, record, self.marked)

        return Lowered(self.function, shown, donated.places, compiled)
