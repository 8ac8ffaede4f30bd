"""Axes and ranks of a mesh: checks of the names, sizes and ranks that a user gives; and its ranks as a lazy sequence.

Checks return plain tuples. Derived meshes share a rank map.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from fspmd.errors import MeshError
from fspmd.meshes.layout import Layout


def integers(values: object, call: str, what: str = "sizes") -> tuple[int, ...]:
    """Return the values as plain ints. Integers of NumPy are accepted, too; floats and bools are not."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise MeshError(f"{call}: {what} must be a tuple of integers, such as ({values!r},), not {values!r}")
    numbers = []
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise MeshError(f"{call}: {what} must be integers, but {value!r} is of type {type(value).__name__}")
        numbers.append(operator.index(value))
    return tuple(numbers)


def row_major(place: Iterable[int], sizes: Iterable[int]) -> int:
    """Return the number of a place among all places in row-major order."""
    number = 0
    for index, size in zip(place, sizes, strict=True):
        number = number * size + index
    return number


def place_at(position: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The place of a position in row-major order.

    >>> place_at(5, (2, 3))
    (1, 2)
    """
    place: list[int] = []
    for size in reversed(sizes):
        position, index = divmod(position, size)
        place.insert(0, index)
    return tuple(place)


def check_sizes(shape: object, call: str) -> tuple[int, ...]:
    """Return the shape of a mesh.

    Raises:
        MeshError: It has values other than integers of at least 1.
    """
    sizes = integers(shape, call, "the shape")
    for size in sizes:
        if size < 1:
            raise MeshError(f"{call}: every size in the shape must be at least 1, but one is {size}")
    return sizes


def check_names(names: object, call: str, count: int = 1) -> tuple[str, ...]:
    """Return the names of a mesh's axes. ``count`` is their number in the example of an error.

    Raises:
        MeshError: They are not non-empty strings, all different.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        example = tuple(names) if isinstance(names, str) and len(names) == count else (names,)
        raise MeshError(f"{call}: axis names must be a tuple of strings, such as {example!r}, not {names!r}")
    checked = tuple(names)
    for name in checked:
        if not isinstance(name, str) or not name:
            raise MeshError(f"{call}: axis names must be non-empty strings, but one is {name!r}")
    twice = next((name for i, name in enumerate(checked) if name in checked[:i]), None)
    if twice is not None:
        raise MeshError(f"{call}: the axis names must differ, but {twice!r} would name two axes of {checked}")
    return checked


def infer_sizes(parts: tuple[int, ...], whole: int, call: str) -> tuple[int, ...]:
    """Return sizes that multiply to ``whole``. One of ``parts`` may be -1.

    >>> infer_sizes((2, -1), 8, "unflatten")
    (2, 4)

    Raises:
        MeshError: The sizes cannot multiply to ``whole``.
    """
    if not parts or parts.count(-1) > 1 or any(size < 1 and size != -1 for size in parts):
        raise MeshError(f"{call}: give at least one size, each at least 1 except that one may be -1, not {parts}")
    known = math.prod(size for size in parts if size != -1)
    if -1 not in parts and known != whole:
        raise MeshError(f"{call}: the sizes {parts} multiply to {known}, but the axis has size {whole}")
    if whole % known:
        raise MeshError(f"{call}: the axis has size {whole}, which the given sizes' product {known} does not divide")
    return tuple(whole // known if size == -1 else size for size in parts)


def check_ranks(ranks: Sequence[int], sizes: tuple[int, ...], world_size: int | None, call: str) -> None:
    """Check the ranks of a mesh.

    Raises:
        MeshError: The number of ranks is not that of the places, or a rank is negative, repeated or outside the world.
    """
    count = math.prod(sizes)
    if len(ranks) != count:
        raise MeshError(
            f"{call}: the shape {sizes} has {count} places, but ranks lists {len(ranks)}: give one for each"
        )
    low, high = min(ranks), max(ranks)
    if low < 0:
        raise MeshError(f"{call}: ranks must be at least 0, but one is {low}")
    if world_size is not None and high >= world_size:
        raise MeshError(f"{call}: ranks must be in range({world_size}), the world, but one is {high}")
    check_different(ranks, call)


def check_different(ranks: Sequence[int], call: str) -> None:
    """Check that each rank has one place.

    Raises:
        MeshError: A rank has two places.
    """
    if isinstance(ranks, range) or len(set(ranks)) == len(ranks):
        return
    seen: set[int] = set()
    for rank in ranks:
        if rank in seen:
            raise MeshError(f"{call}: rank {rank} would stand in two places, give each rank one")
        seen.add(rank)


class RankMap:
    """The global rank at each offset. All meshes derived from one mesh share it."""

    __slots__ = ("_positions", "ranks")

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._positions: dict[int, int] = {}

    def position(self, rank: int) -> int:
        """Return the offset of a rank, or -1 if it has none."""
        if not self._positions:
            self._positions = {rank: i for i, rank in enumerate(self.ranks)}
        return self._positions.get(rank, -1)


def same_map(a: RankMap | None, b: RankMap | None) -> bool:
    """Return whether two rank maps are equal. None is the map in which each rank is its offset."""
    return a is b or (a is not None and b is not None and (a.ranks is b.ranks or a.ranks == b.ranks))


class Ranks(Sequence[int]):
    """The global ranks at the offsets of a layout, in row-major order, computed when they are read.

    >>> Ranks(Layout((2, 3), (4, 1)), 8, None)
    Ranks(8, 9, 10, 12, 13, 14)
    >>> 11 in Ranks(Layout((2, 3), (4, 1)), 8, None)
    False
    """

    __slots__ = ("_layout", "_map", "_offset")

    def __init__(self, layout: Layout, offset: int, rank_map: RankMap | None) -> None:
        self._layout, self._offset, self._map = layout, offset, rank_map

    def __len__(self) -> int:
        return self._layout.size

    def __iter__(self) -> Iterator[int]:
        offsets = self._layout.offsets(self._offset)
        return offsets if self._map is None else map(self._map.ranks.__getitem__, offsets)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} ranks")
        offset = self._offset + self._layout(index % len(self))
        return offset if self._map is None else self._map.ranks[offset]

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and self.coordinate(rank) is not None

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the coordinate of a rank, one entry per mode of the layout, or None if it is not in the sequence."""
        offset = rank if self._map is None else self._map.position(rank)
        return self._layout.coordinate(offset - self._offset) if offset >= self._offset else None

    def __repr__(self) -> str:
        shown = [str(rank) for rank in itertools.islice(self, 8)] + ["..."] * (len(self) > 8)
        return f"Ranks({', '.join(shown)})"
