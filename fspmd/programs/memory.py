"""The memory that a rank holds while a program runs."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import fx

from fspmd.programs.program import Program, owner
from fspmd.programs.schedule import made_by
from fspmd.programs.steps import is_wait
from fspmd.programs.text import given_as, line_of


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that is held at the peak: bytes of its block, and the step that made it.

    ``line``: the user's line, or the name of an argument.
    """

    nbytes: int
    node: fx.Node
    line: str

    def __str__(self) -> str:
        return f"{self.nbytes:>16,} B  {self.node.meta['value']!s:<24}  {self.line}"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a rank holds. Working memory within a step, and losses of the allocator, do not count.

    Attributes:
        peak: the most bytes at once.
        given: the bytes of arguments and constants.
        at: the step that runs at the peak.
        holds: the tensors at the peak, the largest first.
    """

    peak: int
    given: int
    at: fx.Node | None
    holds: tuple[Held, ...]

    def __str__(self) -> str:
        rest = self.holds[10:]
        lines = [f"peak {self.peak:,} B, of which {self.given:,} B are arguments"]
        if self.at is not None:
            lines[0] += f"; at {line_of(self.at)}"
        lines += map(str, self.holds[:10])
        if rest:
            lines.append(f"{sum(one.nbytes for one in rest):>16,} B  {len(rest)} more")
        return "\n".join(lines)


def memory_of_program(program: Program, donated: Collection[fx.Node] = (), arguments: Sequence[str] = ()) -> Memory:
    """The memory of a program, deferred steps last. ``arguments``: the names of its inputs."""
    called = given_as(program, arguments)
    steps, found = (*program.steps, *program.deferred), lives(program, donated)
    held = levels(found, steps)
    given = sum(one.meta["value"].nbytes for one in (*program.inputs, *program.constants))
    at = max(range(len(steps)), key=held.__getitem__, default=0)
    there = [
        Held(one.meta["value"].nbytes, one, called.get(one) or line_of(one))
        for one, (start, end) in found.items()
        if start <= at <= end
    ]
    there.sort(key=lambda one: -one.nbytes)
    return Memory(held[at] if steps else given, given, steps[at] if steps else None, tuple(there))


def lives(program: Program, donated: Collection[fx.Node] = ()) -> dict[fx.Node, tuple[int, int]]:
    """The first and the last step in which each memory is held; deferred steps come last.

    Arguments are held throughout, except ``donated`` ones, and results from the step that makes them to the end. All
    else is freed after its last use.
    """
    steps = (*program.steps, *program.deferred)
    given = (*program.inputs, *program.constants)
    begins = {owner(one): 0 for one in given}
    ends: dict[fx.Node, int] = {}
    places = {node: i for i, node in enumerate(steps)}
    for i, node in enumerate(steps):
        made = places[node.args[0]] if node.target is operator.getitem else i  # type: ignore[index]
        begins.update((one, made) for one in _allocated(node))
        ends.update((one, i) for one in _used(node))
        if (last := _last_taken(node, places)) is not None:
            ends.update((one, last) for one in made_by(node))
    gone = set(donated)
    stays = [one for one in given if one not in gone]
    stays += [one for one in (*program.results, *program.gradients) if one is not None]
    ends.update((owner(one), len(steps) - 1) for one in stays)
    return {one: (i, ends.get(one, i)) for one, i in begins.items()}


def levels(found: dict[fx.Node, tuple[int, int]], steps: Sequence[fx.Node]) -> list[int]:
    """The bytes that are held in each step."""
    changes = [0] * (len(steps) + 2)
    for one, (start, end) in found.items():
        changes[start] += one.meta["value"].nbytes
        changes[max(end, start) + 1] -= one.meta["value"].nbytes
    held, places = list(accumulate(changes))[: len(steps)], {node: i for i, node in enumerate(steps)}
    for i, node in enumerate(steps):
        if "parts" in node.meta and not _gives_views(node):
            taken = {user.args[1] for user in node.users if user.target is operator.getitem}
            lost = sum(nbytes for part, nbytes in enumerate(node.meta["parts"]) if part not in taken)
            for at in range(i, (_last_taken(node, places) or i) + 1):
                held[at] += lost
    return held


def _last_taken(node: fx.Node, places: dict[fx.Node, int]) -> int | None:
    """The step that takes the last of several results: until then all are held."""
    if "parts" not in node.meta:
        return None
    return max((places[user] for user in node.users if user in places), default=None)


def _gives_views(node: fx.Node) -> bool:
    """Whether the results of a function of torch lie in the memory of its operands."""
    schema: Any = getattr(node.target, "_schema", None)
    return schema is not None and any(one.alias_info is not None for one in schema.returns)


def _allocated(node: fx.Node) -> Iterator[fx.Node]:
    """The memory that begins with a step; a collective's begins when the collective does."""
    if node.meta.get("call") is not None and not node.meta["waits"]:
        return (one for user in node.users if is_wait(user) for one in made_by(user))
    return iter(()) if is_wait(node) else made_by(node)


def _used(node: fx.Node) -> Iterator[fx.Node]:
    """The memory that a step needs; a wait needs the operand of its collective."""
    used = [*node.all_input_nodes, node]
    if is_wait(node):
        used += node.all_input_nodes[0].all_input_nodes
    for one in used:
        if "value" in one.meta:
            yield owner(one)
        else:
            yield from made_by(one)
