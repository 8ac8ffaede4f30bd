"""What a partition spec says of one dim: the mesh axes that cut it, or the dims it is made of, each with its own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from fspmd.errors import SpecError
from fspmd.messages import described

T = TypeVar("T")
Axes = tuple[str, ...]
Factors = tuple[tuple[int, Axes], ...]  # sizes, and the axes that cut each, the leading one first


class Flat:
    """The entry of a dim that dims were flattened to: their sizes, leading first, and the entry of each.

    A block is that of all of them, flattened: of ``(4, 6)`` under ``P(None, "x")``, flattened, the columns of a rank in
    each of the four rows. Nothing moves to flatten a tensor, nor to view it as it was. Equal values are one object.

    >>> Flat((4, None), (6, "x"))
    Flat((4, None), (6, 'x'))
    """

    __slots__ = ("__weakref__", "axes", "factors", "size")
    factors: Factors
    axes: Axes
    size: int

    def __new__(cls, *factors: tuple[int, Any]) -> Flat:
        found = tuple(_factor(one) for one in factors)
        made = _FLATS.get(found)
        if made is None:
            made = object.__new__(cls)
            axes = tuple(axis for _, own in found for axis in own)
            for slot, value in (("factors", found), ("axes", axes), ("size", prod(n for n, _ in found))):
                object.__setattr__(made, slot, value)
            _FLATS[found] = made
        return made

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Flat is immutable; write a new one instead of setting {name!r}")

    def __repr__(self) -> str:
        return f"Flat({', '.join(f'({n}, {entry_of(axes)!r})' for n, axes in self.factors)})"

    def __str__(self) -> str:
        return "(" + "·".join(sized(n, axes) for n, axes in self.factors) + ")"

    def __reduce__(self) -> tuple[Any, ...]:
        return Flat, self.factors


_FLATS: Final[WeakValueDictionary[Factors, Flat]] = WeakValueDictionary()
Entry = None | str | Axes | Flat


def _factor(given: object) -> tuple[int, Axes]:
    if isinstance(given, tuple) and len(given) == 2 and type(given[0]) is int and given[0] >= 0:
        entry = checked_entry(given[1], "Flat")
        if not isinstance(entry, Flat):
            return given[0], entry_axes(entry)
    raise SpecError(
        f"Flat got {described(given)}; give it the size and the entry of each dim, such as Flat((4, None), (6, 'x'))"
    )


def checked_entry(entry: object, what: str) -> Entry:
    """An entry in its normal form; raises `SpecError` for what is none."""
    if entry is None or isinstance(entry, (str, Flat)):
        return entry
    if isinstance(entry, (tuple, list)) and all(isinstance(name, str) for name in entry):
        return None if not entry else entry[0] if len(entry) == 1 else tuple(entry)
    hint = "; a set has no order, so write a tuple" if isinstance(entry, (set, frozenset)) else ""
    raise SpecError(
        f"{what} got {described(entry)} as an entry; an entry is None, an axis name such as 'x', or a tuple of axis "
        f"names such as ('x', 'y'){hint}"
    )


def checked_entries(entries: Iterable[object]) -> tuple[tuple[Entry, ...], tuple[Axes, ...]]:
    """Those of a ``P`` in their normal form, and the axes that each names."""
    normal = tuple([checked_entry(entry, "P") for entry in entries])
    return normal, tuple(map(axes_within, normal))


def entry_axes(entry: Entry) -> Axes:
    """The axes of one entry, major first; of a `Flat`, which cuts a dim into no consecutive blocks, a `SpecError`."""
    if entry is None:
        return ()
    if isinstance(entry, Flat):
        raise SpecError(
            f"a dim lies as {entry!r}, not in consecutive blocks, which are needed here; move the value first: "
            f"x = reshard(x, P(...)), with {entry_of(entry.axes)!r} or None for that dim"
        )
    return (entry,) if isinstance(entry, str) else entry


def axes_within(entry: Entry) -> Axes:
    """The axes that an entry names, whatever it is."""
    return entry.axes if isinstance(entry, Flat) else entry_axes(entry)


def entry_of(axes: Axes) -> Entry:
    """The entry of some axes, as a P has it."""
    return axes if len(axes) > 1 else axes[0] if axes else None


def without(entry: Entry, axes: Iterable[str]) -> Entry:
    """The entry without some axes."""
    gone = set(axes)
    if isinstance(entry, Flat):
        factors = tuple((n, tuple(a for a in own if a not in gone)) for n, own in entry.factors)
        return Flat(*factors) if any(own for _, own in factors) else None
    return entry_of(tuple(a for a in entry_axes(entry) if a not in gone))


def sized(size: int, axes: Axes) -> str:
    """``8``, ``8@x``, ``8@(x,y)``."""
    return str(size) + ("" if not axes else f"@{axes[0]}" if len(axes) == 1 else f"@({','.join(axes)})")


@functools.lru_cache(maxsize=4096)
def blocks(size: int, parts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """``(offset, length)`` of every block of a dim of ``size`` cut by axes of sizes ``parts``, in row-major order.

    >>> blocks(5, (4,))
    ((0, 2), (2, 2), (4, 1), (5, 0))
    >>> blocks(5, (2, 2))
    ((0, 2), (2, 1), (3, 1), (4, 1))
    """
    cut = [(0, size)]
    for n in parts:
        finer = []
        for offset, length in cut:
            step = -(-length // n)
            for i in range(n):
                start = min(i * step, length)
                finer.append((offset + start, min(step, length - start)))
        cut = finer
    return tuple(cut)


# --- dims that are made of dims ---------------------------------------------------------------------------------------


def factors_of(entry: Entry, size: int) -> Factors:
    """What a dim of that size is made of; one that was not flattened, of itself."""
    return entry.factors if isinstance(entry, Flat) else ((size, entry_axes(entry)),)


def joined(factors: Iterable[tuple[int, Axes]], sizes: dict[str, int]) -> Entry:
    """The entry of a dim made of such factors, on a mesh of such axes: a `Flat` of as few factors as can be.

    Neighbours are one factor where their blocks are the consecutive ones of a dim of their product.

    >>> joined([(4, ("x",)), (2, ())], {"x": 2}), joined([(2, ()), (2, ()), (4, ("x",))], {"x": 2})
    ('x', Flat((4, None), (4, 'x')))
    """
    stack: list[tuple[int, Axes]] = []
    for factor in factors:
        stack.append(factor)
        while len(stack) > 1 and _join(*(_parts(one, sizes) for one in stack[-2:])):
            m, minor = stack.pop()
            n, major = stack.pop()
            stack.append((n * m, (*major, *minor)))
    if len(stack) > 1:
        return Flat(*stack)
    return entry_of(stack[0][1]) if stack else None


def _parts(factor: tuple[int, Axes], sizes: dict[str, int]) -> tuple[int, tuple[int, ...]]:
    return factor[0], tuple(sizes[axis] for axis in factor[1])


@functools.lru_cache(maxsize=4096)
def _join(major: tuple[int, tuple[int, ...]], minor: tuple[int, tuple[int, ...]]) -> bool:
    (n, outer), (m, inner) = major, minor
    whole = blocks(n * m, (*outer, *inner))
    pairs = itertools.product(blocks(n, outer), blocks(m, inner))
    for (offset, length), ((start, rows), (first, columns)) in zip(whole, pairs, strict=True):
        if length != rows * columns or (length and offset != start * m + first):
            return False
        if rows > 1 and 0 < columns < m:
            return False
    return True


def refined(*several: Sequence[int]) -> tuple[int, ...] | None:
    """The coarsest sizes of which all of these, of one product, are products of neighbours; None: there are none.

    >>> refined((4, 6), (8, 3)), refined((6, 4), (8, 3))
    ((4, 2, 3), None)
    """
    places = {1}
    for sizes in several:
        places.update(itertools.accumulate(reversed(sizes), lambda a, b: a * b))
    if 0 in places:
        return None
    ordered = sorted(places, reverse=True)
    steps = [a // b for a, b in itertools.pairwise(ordered) if a % b == 0]
    return tuple(steps) if len(steps) == len(ordered) - 1 else None


def runs(sizes: Iterable[int], finer: Sequence[tuple[int, T]]) -> Iterator[tuple[tuple[int, T], ...]]:
    """For each of some sizes those of finer ones, each with something, that make it up; of a size of 1, none."""
    at = 0
    for size in sizes:
        start, product = at, 1
        while product != size:
            product *= finer[at][0]
            at += 1
        yield tuple(finer[start:at])


@functools.lru_cache(maxsize=4096)
def unflattened_axes(
    entry: Entry, sizes: tuple[int, ...], axis_sizes: tuple[tuple[str, int], ...]
) -> tuple[Axes, ...] | None:
    """The axes of each of some dims, into which the blocks of a dim with that entry can be viewed; None: they cannot.

    ``entry`` is as `joined` gives it. Axes keep their order; those that may stand on several dims stand on the first
    that has more than one element.

    >>> unflattened_axes("x", (4, 6), (("x", 2),)), unflattened_axes("x", (3, 4), (("x", 2),))
    ((('x',), ()), None)
    """
    axes, of_mesh = axes_within(entry), dict(axis_sizes)
    if not axes:
        return ((),) * len(sizes)
    ways = itertools.combinations_with_replacement(range(len(sizes)), len(axes))
    for places in sorted(ways, key=lambda way: sum(sizes[d] == 1 for d in way)):
        found = tuple(tuple(a for a, d in zip(axes, places, strict=True) if d == dim) for dim in range(len(sizes)))
        if joined(zip(sizes, found, strict=True), of_mesh) == entry:
            return found
    return None
