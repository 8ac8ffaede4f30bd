"""Factor notation, after einops and Shardy: each dim of each operand and result is one *factor* of the computation.

``"... m k, ... k n -> ... m n"``: a factor of operands that no result has is summed over (``k``); ``[d]`` must be
whole; ``...`` stands for leading dims that broadcast.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from fspmd.errors import ArgumentError

Shape = tuple[int, ...]
Dims = tuple[int | None, ...]  # the factor of each dim; None for a dim of size 1 that broadcasts
_NO: Final[Mapping[Any, int]] = MappingProxyType({})


class Factors(NamedTuple):
    """What the dims of one call are, once its shapes are known."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    summed: frozenset[int] = frozenset()  # sharded, the results are pending sums
    whole: frozenset[int] = frozenset()  # must not be sharded
    added: frozenset[int] = frozenset()  # operands that are added to the sum, not part of it
    places: frozenset[int] = frozenset()  # operands that say where others go, and are no part of any sum
    near: frozenset[int] = (
        frozenset()
    )  # of those that must be whole: where blocks are the same shares no body moves them
    scaled: frozenset[int] = frozenset()  # may have another size in each place, where blocks are the same shares
    pieces: Mapping[int, int] = _NO  # how many equal ones, none of them cut, a factor consists of
    names: Mapping[Any, int] = _NO  # how a sharded body calls them; dims by number have none
    others: tuple[Factors, ...] = ()  # other readings of the same dims, of which one may be cheaper
    products: int = 1  # for each place of the factors


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """A parsed rule: the names of dims, ``...`` among them. `parse` makes one of each."""

    text: str
    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    broadcasts: bool


@functools.cache
def parse(text: str) -> Pattern:
    """Read ``"m k, k n -> m n"``; raises `ArgumentError` for what is no rule."""
    before, arrow, after = text.partition("->")
    sides = [tuple(tuple(part.split()) for part in side.split(",")) for side in (before, after)]
    if not arrow:
        raise ArgumentError(f"the rule {text!r} has no '->'; write operands, '->', results: 'm k, k n -> m n'")
    for name in (name for side in sides for names in side for name in names):
        if name not in ("...", "1") and not _NAME.fullmatch(name):
            raise ArgumentError(
                f"the rule {text!r} has {name!r}; a dim is a name, [name] where it must be whole, 1 or ..."
            )
    known = {name.strip("[]") for names in sides[0] for name in names}
    if unknown := [name for names in sides[1] for name in names if name.strip("[]") not in {*known, "1", "..."}]:
        raise ArgumentError(
            f"the rule {text!r} has a result with {unknown[0]!r}, which no operand has; write 1 for a dim of its own"
        )
    return Pattern(text, sides[0], sides[1], any("..." in names for names in (*sides[0], *sides[1])))


_NAME: Final = re.compile(r"[\w.]+|\[[\w.]+\]")


def match(pattern: Pattern, shapes: Sequence[Shape]) -> Factors:
    """The factors of a call on operands of these shapes (trailing operands may be missing)."""
    if not pattern.broadcasts:  # its names are all there is to know
        return _named(pattern, len(shapes))
    return _matched(pattern, shapes)


@functools.cache
def _named(pattern: Pattern, operands: int) -> Factors:
    return _matched(pattern, [()] * operands)


def _matched(pattern: Pattern, shapes: Sequence[Shape]) -> Factors:
    numbers: dict[str | int, int] = {}
    whole: set[int] = set()

    def number(name: str | int) -> int:
        return numbers.setdefault(name, len(numbers))

    batch = max((len(s) - len(p) + 1 for p, s in zip(pattern.operands, shapes, strict=False) if "..." in p), default=0)
    sizes: list[int] = [1] * batch  # of the broadcast dims, leading first
    for names, shape in zip(pattern.operands, shapes, strict=False):
        if "..." in names:
            at = names.index("...")
            own = shape[at : len(shape) - (len(names) - 1 - at)]
            for i, size in enumerate(reversed(own), 1):
                sizes[-i] = size if sizes[-i] == 1 else sizes[-i]

    def dims(names: tuple[str, ...], shape: Shape | None) -> Dims:
        found: list[int | None] = []
        for at, name in enumerate(names):
            if name == "...":
                own = batch if shape is None else len(shape) - len(names) + 1
                for i in range(batch - own, batch):
                    size = sizes[i] if shape is None else shape[at + i - batch + own]
                    found.append(number(i) if size == sizes[i] else None)
            elif name != "1":
                factor = number(name.strip("[]"))
                if name.startswith("["):
                    whole.add(factor)
                found.append(factor)
            else:
                found.append(None)
        return tuple(found)

    operands = tuple(dims(names, shape) for names, shape in zip(pattern.operands, shapes, strict=False))
    results = tuple(dims(names, None) for names in pattern.results)
    whole |= {f for dims in operands for f in dims if f is not None and dims.count(f) > 1}  # a diagonal
    kept = {factor for result in results for factor in result}
    summed = {factor for operand in operands for factor in operand if factor is not None and factor not in kept}
    return Factors(operands, results, frozenset(summed - whole), frozenset(whole), names=numbers)
