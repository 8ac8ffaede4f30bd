"""What a rank holds while a program runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from fspmd.programs.calls import is_wait
from fspmd.programs.program import Program, owner
from fspmd.programs.schedule import made_by


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor of those that are there at the peak: bytes of its block, and the step that made it."""

    nbytes: int
    node: fx.Node

    def __str__(self) -> str:
        return f"{self.nbytes:>16,} B  {self.node.meta['value']}  {_line(self.node)}"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a rank holds: ``given`` to the program throughout, and with its own results at the ``peak``.

    ``holds``: what is there at the peak, the largest first; ``at``: the step that runs then. Memory that a step needs
    for itself alone is not counted, nor what an allocator loses.
    """

    peak: int
    given: int
    at: fx.Node | None
    holds: tuple[Held, ...]

    def __str__(self) -> str:
        rest = self.holds[10:]
        lines = [f"peak {self.peak:,} B, of which {self.given:,} B are arguments"]
        if self.at is not None:
            lines[0] += f"; at {_line(self.at)}"
        lines += map(str, self.holds[:10])
        if rest:
            lines.append(f"{sum(one.nbytes for one in rest):>16,} B  {len(rest)} more")
        return "\n".join(lines)


def _line(node: fx.Node) -> str:
    cause = node.meta.get("cause")
    return f"{cause.text}  ({cause.where})" if cause is not None else "argument"


def memory_of_program(program: Program) -> Memory:
    """From the first step to the last, those that compute gradients of results after the others.

    Arguments are there throughout, and so are results once they are made; all else is let go after its last use.
    """
    steps = [*program.steps, *program.deferred]
    given = [*program.inputs, *program.constants]
    kept = {*given, *program.results, *program.gradients}
    last = _last_uses(steps, {owner(one) for one in kept if one is not None})
    here = {one: one.meta["value"].nbytes for one in given}
    live = sum(here.values())
    argued = live
    peak, at, holds = live, None, dict(here)
    for i, node in enumerate(steps):
        for one in _allocated(node):
            here[one] = one.meta["value"].nbytes
            live += here[one]
        if live > peak:
            peak, at, holds = live, node, dict(here)
        for one in last.get(i, ()):
            live -= here.pop(one, 0)
    held = sorted((Held(nbytes, node) for node, nbytes in holds.items()), key=lambda one: -one.nbytes)
    return Memory(peak, argued, at, tuple(held))


def _allocated(node: fx.Node) -> Iterator[fx.Node]:
    """Whose memory a step begins to use: that of a collective when it begins."""
    if node.meta.get("call") is not None and not node.meta["waits"]:
        return (one for user in node.users if is_wait(user) for one in made_by(user))
    return iter(()) if is_wait(node) else made_by(node)


def _last_uses(steps: list[fx.Node], kept: Iterable[fx.Node]) -> dict[int, list[fx.Node]]:
    """After which step each memory is let go."""
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(steps):
        used = [*node.all_input_nodes, node]
        if is_wait(node):
            used += node.all_input_nodes[0].all_input_nodes  # what is sent
        for one in used:
            if "value" in one.meta:
                last[owner(one)] = i
            else:
                last.update((part, i) for part in made_by(one))
    for one in kept:
        last.pop(one, None)
    found: dict[int, list[fx.Node]] = {}
    for one, i in last.items():
        found.setdefault(i, []).append(one)
    return found
