"""Circles of ranks in which each waits for the next: none of them ever goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wait:
    """The wait of a rank, as it told.

    Attributes:
        group: The name of the group that it waits in.
        count: The number of the collective, among those of the group, that it must leave before it goes on.
        ranks: The ranks of the group.
        counts: By group, how many collectives the rank has come to.
        at: The collective, and its line.
    """

    group: str
    count: int
    ranks: tuple[int, ...]
    counts: Mapping[str, int]
    at: str = ""


def circle(me: int, waits: Mapping[int, Wait]) -> list[int]:
    """Return ranks of which each waits for the next, and the last for the first; [] if ``me`` waits for no such ranks.

    A rank waits for those of its group that have come to fewer collectives of the group. What ranks told may be old: if
    one of a circle had gone on since, the next would have told of a higher count. So a circle is no false alarm.

    >>> x, y = (0, 1), (1, 2)
    >>> first = Wait("x", 5, x, {"x": 5})
    >>> circle(0, {0: first, 1: Wait("y", 7, y, {"x": 4, "y": 7}), 2: Wait("z", 1, (0, 2), {"y": 6, "z": 1})})
    [0, 1, 2]
    >>> circle(0, {0: first, 1: Wait("y", 7, y, {"x": 4, "y": 7})})
    []
    """
    path: list[int] = []
    seen: set[int] = set()

    def search(rank: int) -> list[int]:
        if rank in path:
            return path[path.index(rank) :]
        if rank in seen or rank not in waits:
            return []
        seen.add(rank)
        path.append(rank)
        wait = waits[rank]
        for other in wait.ranks:
            is_late = other in waits and waits[other].counts.get(wait.group, 0) < wait.count
            if is_late and (found := search(other)):
                return found
        path.pop()
        return []

    return search(me)
