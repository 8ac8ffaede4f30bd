"""How much is tested: samples of programs, layouts and meshes, or with FSPMD_FULL=1 all of them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Final, TypeVar
from zlib import crc32

FULL: Final = os.environ.get("FSPMD_FULL") == "1"
#: ``2/5``: of the tests those with the numbers 2, 7, 12 and so on, counted from 1. All five parts are all tests.
_PART: Final = os.environ.get("FSPMD_PART", "1/1")


def in_part(number: int) -> bool:
    """Whether the part of FSPMD_PART has the test with a number, counted from 0."""
    part, parts = map(int, _PART.split("/"))
    if not 0 < part <= parts:
        raise ValueError(f"FSPMD_PART={_PART}: of 8 parts write 1/8, 2/8 and so on")
    return number % parts == part - 1


_Case = TypeVar("_Case", bound=tuple)


def sample(cases: Sequence[_Case], count: int, name: str = "") -> Sequence[_Case]:
    """``count`` of the cases, or with FSPMD_FULL=1 all. Samples of another ``name`` have other cases."""
    if FULL:
        return cases
    chosen = spread([f"{name}{case}" for case in cases], [[*fields(case)] for case in cases], count)
    return [cases[i] for i in sorted(chosen)]


def spread(names: Sequence[str], values: Sequence[Sequence[Hashable]], count: int) -> set[int]:
    """The numbers of ``count`` cases, such that each of their values is there about as often as others.

    The names choose among cases that are equally good.
    """
    waiting = sorted(range(len(names)), key=lambda i: crc32(names[i].encode()))[: max(8 * count, 200)]
    times: dict[Hashable, int] = defaultdict(int)
    chosen: set[int] = set()
    while len(chosen) < min(count, len(names)):
        best = min(waiting, key=lambda i: sum(times[value] for value in values[i]))
        waiting.remove(best)
        chosen.add(best)
        for value in values[best]:
            times[value] += 1
    return chosen


def fields(case: tuple) -> Iterator[tuple[int, str]]:
    """The fields of a case that have short texts, by number."""
    return ((i, repr(value)) for i, value in enumerate(case) if isinstance(value, bool | int | float | str | tuple))
