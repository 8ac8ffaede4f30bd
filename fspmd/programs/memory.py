"""The memory that a rank holds while a program runs."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import fx

from fspmd.programs.passes.aliases import made_once
from fspmd.programs.program import Program, owner
from fspmd.programs.schedule import made_by
from fspmd.programs.scratch import scratch_of
from fspmd.programs.steps import is_wait, moved_by
from fspmd.programs.text import caused_by, given_as, line_of


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that a rank holds at the peak.

    Attributes:
        nbytes: bytes of its block.
        node: the step that made it.
        line: the user's line, or the name of an argument.
    """

    nbytes: int
    node: fx.Node
    line: str

    def __str__(self) -> str:
        return f"{self.nbytes:>16,} B  {self.node.meta['value']!s:<24}  {self.line}"


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes that a rank holds. Losses of the allocator do not count.

    On CPUs the bytes of a step include what its kernels allocate while they run (`programs/scratch.py`), which depends
    on the threads of torch in this process.

    Attributes:
        peak: the most bytes at once.
        given: the bytes of arguments and constants.
        at: the step that runs at the peak; None for a program without steps.
        holds: the tensors at the peak, the largest first.
        by_line: for each line of the user, the bytes at each of its steps in turn. "<- " marks its steps in backward.
    """

    peak: int
    given: int
    at: fx.Node | None
    holds: tuple[Held, ...]
    by_line: dict[str, list[int]]

    def __str__(self) -> str:
        rest = self.holds[10:]
        lines = [f"peak {self.peak:,} B, of which {self.given:,} B are arguments"]
        if self.at is not None:
            lines[0] += f"; at {line_of(self.at)}"
        lines += map(str, self.holds[:10])
        if rest:
            lines.append(f"{sum(tensor.nbytes for tensor in rest):>16,} B  {len(rest)} more")
        return "\n".join(lines)


def memory_of_program(
    program: Program, donated: Collection[fx.Node] = (), arguments: Sequence[str] = (), scratch: bool = True
) -> Memory:
    """The memory of a program. Deferred steps run last.

    Args:
        program: the program.
        donated: inputs that are freed after their last use.
        arguments: the names of its inputs.
        scratch: whether the memory within kernels counts. It depends on the machine, so where ranks must come to the
            same decision it may not.
    """
    names = given_as(program, arguments)
    specs = [node.meta["spec"] for node in (*program.inputs, *program.constants) if node.meta.get("spec") is not None]
    scratch = scratch and all(spec.mesh.device_type == "cpu" for spec in specs)  # else planned for a device not here
    steps, spans = (*program.steps, *program.deferred), lives(program, donated)
    nbytes = levels(spans, steps, scratch)
    given = sum(node.meta["value"].nbytes for node in (*program.inputs, *program.constants))
    at = max(range(len(steps)), key=nbytes.__getitem__, default=0)
    tensors = [
        Held(node.meta["value"].nbytes, node, names.get(node) or line_of(node))
        for node, (start, end) in spans.items()
        if start <= at <= end
    ]
    tensors.sort(key=lambda tensor: -tensor.nbytes)
    by_line: dict[str, list[int]] = {}
    for node, held in zip(steps, nbytes, strict=True):
        by_line.setdefault(caused_by(node), []).append(held)
    return Memory(nbytes[at] if steps else given, given, steps[at] if steps else None, tuple(tensors), by_line)


def lives(program: Program, donated: Collection[fx.Node] = ()) -> dict[fx.Node, tuple[int, int]]:
    """The first and the last step in which each memory is held. Deferred steps come last.

    Arguments that are not ``donated`` are held throughout, as are values that are made once. Results are held to the
    end. Every other value is freed after its last use.
    """
    steps = (*program.steps, *program.deferred)
    once = made_once(program.steps, {*program.results, *program.kept}, of_a_rank=True)
    once |= made_once(program.deferred, program.gradients, of_a_rank=True)
    given = (*program.inputs, *program.constants)
    begins = {owner(node): 0 for node in given}
    ends: dict[fx.Node, int] = {}
    places = {node: i for i, node in enumerate(steps)}
    for i, node in enumerate(steps):
        if node in once:
            continue
        begin = places[node.args[0]] if node.target is operator.getitem else i  # type: ignore[index]
        begins.update((memory, begin) for memory in _allocated(node))
        ends.update((memory, i) for memory in _used(node))
        if (last := _last_taken(node, places)) is not None:
            ends.update((memory, last) for memory in made_by(node))
    lasting = [x for x in once if any(user not in once for user in x.users)]
    begins.update((owner(node), 0) for node in lasting)
    freed = set(donated)
    kept = [*lasting, *(node for node in given if node not in freed)]
    kept += [node for node in (*program.results, *program.gradients) if node is not None]
    ends.update((owner(node), len(steps) - 1) for node in kept)
    return {memory: (i, ends.get(memory, i)) for memory, i in begins.items()}


def levels(spans: dict[fx.Node, tuple[int, int]], steps: Sequence[fx.Node], scratch: bool = True) -> list[int]:
    """The bytes that are held in each step. ``spans``: the result of `lives`. ``scratch``: as for the memory."""
    changes = [0] * (len(steps) + 2)
    for memory, (start, end) in spans.items():
        changes[start] += memory.meta["value"].nbytes
        changes[max(end, start) + 1] -= memory.meta["value"].nbytes
    bytes_held, places = list(accumulate(changes))[: len(steps)], {node: i for i, node in enumerate(steps)}
    for i, node in enumerate(steps):
        if "parts" in node.meta and not _gives_views(node):
            taken = {user.args[1] for user in node.users if user.target is operator.getitem}
            unused = sum(nbytes for part, nbytes in enumerate(node.meta["parts"]) if part not in taken)
            for at in range(i, (_last_taken(node, places) or i) + 1):
                bytes_held[at] += unused
        bytes_held[i] += scratch_of(node) if scratch else 0
    return bytes_held


def _last_taken(node: fx.Node, places: dict[fx.Node, int]) -> int | None:
    """The place of the step that takes the last of several results. All of them are held until then."""
    if "parts" not in node.meta:
        return None
    return max((places[user] for user in node.users if user in places), default=None)


def _gives_views(node: fx.Node) -> bool:
    """Whether the results of a function of torch lie in the memory of its operands."""
    schema: Any = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def _allocated(node: fx.Node) -> Iterator[fx.Node]:
    """The memory that a step allocates. A step that begins a collective allocates its result."""
    if moved_by(node) is not None and not node.meta["waits"]:
        return (memory for user in node.users if is_wait(user) for memory in made_by(user))
    return iter(()) if is_wait(node) else made_by(node)


def _used(node: fx.Node) -> Iterator[fx.Node]:
    """The memory that a step needs. A wait needs the operand of its collective."""
    used = [*node.all_input_nodes, node]
    if is_wait(node):
        used += node.all_input_nodes[0].all_input_nodes
    for value in used:
        if "value" in value.meta:
            yield owner(value)
        else:
            yield from made_by(value)
