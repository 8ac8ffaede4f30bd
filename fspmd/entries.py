"""An entry of a partition spec: the mesh axes that cut a dim, or the factors of a flat dim, each with its own axes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from fspmd.cache import cached
from fspmd.errors import SpecError
from fspmd.messages import described

T = TypeVar("T")
Axes = tuple[str, ...]
Factors = tuple[tuple[int, Axes], ...]  # sizes, and the axes that cut each, the leading size first


class Flat:
    """The entry of a flat dim: the size and the entry of each dim that was flattened, leading first.

    A block of a flat dim is the block of its dims, flattened. For ``(4, 6)`` under ``P(None, "x")`` it has the columns
    of a rank in each of the four rows. Nothing moves to flatten a tensor, or to view it as it was. Equal values are one
    object.

    >>> Flat((4, None), (6, "x"))
    Flat((4, None), (6, 'x'))
    """

    __slots__ = ("__weakref__", "axes", "factors", "size")
    factors: Factors
    axes: Axes
    size: int

    def __new__(cls, *factors: tuple[int, Any]) -> Flat:
        checked = tuple(_factor(factor) for factor in factors)
        flat = _FLATS.get(checked)
        if flat is None:
            flat = object.__new__(cls)
            axes = tuple(axis for _, factor_axes in checked for axis in factor_axes)
            for slot, value in (("factors", checked), ("axes", axes), ("size", prod(n for n, _ in checked))):
                object.__setattr__(flat, slot, value)
            _FLATS[checked] = flat
        return flat

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


def _factor(pair: object) -> tuple[int, Axes]:
    if isinstance(pair, tuple) and len(pair) == 2 and type(pair[0]) is int and pair[0] >= 0:
        entry = checked_entry(pair[1], "Flat")
        if not isinstance(entry, Flat):
            return pair[0], entry_axes(entry)
    raise SpecError(
        f"Flat got {described(pair)}; give it the size and the entry of each dim, such as Flat((4, None), (6, 'x'))"
    )


def checked_entry(entry: object, what: str) -> Entry:
    """Return an entry in its normal form. ``what`` names the caller in the error.

    Raises:
        SpecError: ``entry`` is not an entry.
    """
    if entry is None or type(entry) is str or isinstance(entry, Flat):
        return entry
    if isinstance(entry, str):
        return plain_name(entry)
    if isinstance(entry, (tuple, list)) and all(isinstance(name, str) for name in entry):
        names = tuple(map(plain_name, entry))
        return None if not names else names[0] if len(names) == 1 else names
    hint = "; a set has no order, so write a tuple" if isinstance(entry, (set, frozenset)) else ""
    raise SpecError(
        f"{what} got {described(entry)} as an entry; an entry is None, an axis name such as 'x', or a tuple of axis "
        f"names such as ('x', 'y'){hint}"
    )


def plain_name(name: str) -> str:
    """Return the name of an axis without a class of its own, such as an enum, whose text may be another."""
    return name if type(name) is str else str.__str__(name)


def entry_axes(entry: Entry) -> Axes:
    """Return the axes of an entry, major first.

    Raises:
        SpecError: The entry is a `Flat`, whose blocks are not consecutive.
    """
    if entry is None:
        return ()
    if isinstance(entry, Flat):
        raise SpecError(
            f"consecutive blocks are needed here, but a dim lies as {entry!r}; move the value first: "
            f"x = reshard(x, P(...)), with {entry_of(entry.axes)!r} or None for that dim"
        )
    return (entry,) if isinstance(entry, str) else entry


@cached
def axes_within(entry: Entry) -> Axes:
    """Return the axes that an entry names, `Flat` or not."""
    return entry.axes if isinstance(entry, Flat) else entry_axes(entry)


def entry_of(axes: Axes) -> Entry:
    """Return the entry of some axes in its normal form."""
    return axes if len(axes) > 1 else axes[0] if axes else None


def without(entry: Entry, axes: Iterable[str]) -> Entry:
    """Return the entry without some axes."""
    gone = set(axes)
    if isinstance(entry, Flat):
        factors = tuple((n, tuple(a for a in factor_axes if a not in gone)) for n, factor_axes in entry.factors)
        return Flat(*factors) if any(factor_axes for _, factor_axes in factors) else None
    return entry_of(tuple(a for a in entry_axes(entry) if a not in gone))


def sized(size: int, axes: Axes) -> str:
    """Return the text of a dim: ``8``, ``8@x``, ``8@(x,y)``."""
    return str(size) + ("" if not axes else f"@{axes[0]}" if len(axes) == 1 else f"@({','.join(axes)})")


@cached
def blocks(size: int, parts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return ``(offset, length)`` of each block of a dim cut by axes of sizes ``parts``, in row-major order.

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


@cached
def uneven_lengths(size: int, parts: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the lengths of `blocks`, or None if all of them have one length.

    >>> uneven_lengths(5, (2, 2)), uneven_lengths(8, (2, 2))
    ((2, 1, 1, 1), None)
    """
    return None if size % prod(parts) == 0 else tuple([length for _, length in blocks(size, parts)])


def block_at(size: int, parts: tuple[int, ...], place: Iterable[int]) -> tuple[int, int]:
    """Return the one of `blocks` at a place along each axis. No block is longer than that at place 0 of all.

    >>> block_at(5, (2, 2), (0, 1)), block_at(5, (2, 2), (1, 0))
    ((2, 1), (3, 1))
    """
    offset, length = 0, size
    for n, i in zip(parts, place, strict=True):
        step = -(-length // n)
        start = min(i * step, length)
        offset, length = offset + start, min(step, length - start)
    return offset, length


# --- flat dims --------------------------------------------------------------------------------------------------------


def factors_of(entry: Entry, size: int) -> Factors:
    """Return the factors of a dim. A dim that is not flat has one factor: itself."""
    return entry.factors if isinstance(entry, Flat) else ((size, entry_axes(entry)),)


def joined(factors: Iterable[tuple[int, Axes]], sizes: dict[str, int]) -> Entry:
    """Return the entry of a dim with these factors, on a mesh with axes of ``sizes``: a `Flat` of the fewest factors.

    Neighbours become one factor where their blocks are the consecutive blocks of a dim of the product of their sizes.

    >>> joined([(4, ("x",)), (2, ())], {"x": 2}), joined([(2, ()), (2, ()), (4, ("x",))], {"x": 2})
    ('x', Flat((4, None), (4, 'x')))
    """
    stack: list[tuple[int, Axes]] = []
    for factor in factors:
        stack.append(factor)
        while len(stack) > 1 and _can_join(*(_parts(pair, sizes) for pair in stack[-2:])):
            m, minor = stack.pop()
            n, major = stack.pop()
            stack.append((n * m, (*major, *minor)))
    if len(stack) > 1:
        return Flat(*stack)
    return entry_of(stack[0][1]) if stack else None


def _parts(factor: tuple[int, Axes], sizes: dict[str, int]) -> tuple[int, tuple[int, ...]]:
    return factor[0], tuple(sizes[axis] for axis in factor[1])


@cached
def _can_join(major: tuple[int, tuple[int, ...]], minor: tuple[int, tuple[int, ...]]) -> bool:
    (n, outer), (m, inner) = major, minor
    consecutive = blocks(n * m, (*outer, *inner))
    pairs = itertools.product(blocks(n, outer), blocks(m, inner))
    for (offset, length), ((start, rows), (first, columns)) in zip(consecutive, pairs, strict=True):
        if length != rows * columns or (length and offset != start * m + first):
            return False
        if rows > 1 and 0 < columns < m:
            return False
    return True


def refined(*several: Sequence[int]) -> tuple[int, ...] | None:
    """Return the coarsest common refinement of lists of sizes with one product, or None if there is none.

    Each size of each list is a product of neighbours of the refinement.

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
    """Yield for each size the (finer size, value) pairs whose sizes multiply to it. For a size of 1 there are none."""
    at = 0
    for size in sizes:
        start, product = at, 1
        while product != size:
            product *= finer[at][0]
            at += 1
        yield tuple(finer[start:at])


@cached
def unflattened_axes(
    entry: Entry, sizes: tuple[int, ...], axis_sizes: tuple[tuple[str, int], ...]
) -> tuple[Axes, ...] | None:
    """Return the axes of dims of ``sizes`` as which the blocks of a dim with ``entry`` can be viewed, or None.

    ``entry`` is as `joined` returns it. Axes keep their order. An axis that could cut several dims cuts the first that
    has more than one element.

    >>> unflattened_axes("x", (4, 6), (("x", 2),)), unflattened_axes("x", (3, 4), (("x", 2),))
    ((('x',), ()), None)
    """
    axes, mesh_sizes = axes_within(entry), dict(axis_sizes)
    if not axes:
        return ((),) * len(sizes)
    candidates = itertools.combinations_with_replacement(range(len(sizes)), len(axes))
    for places in sorted(candidates, key=lambda dims: sum(sizes[d] == 1 for d in dims)):
        dim_axes = tuple(tuple(a for a, d in zip(axes, places, strict=True) if d == dim) for dim in range(len(sizes)))
        if joined(zip(sizes, dim_axes, strict=True), mesh_sizes) == entry:
            return dim_axes
    return None
