"""The ranks of meshes: the rank map that derived meshes share, and a mesh's ranks as a lazy sequence."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import overload

from fspmd.meshes.layout import Layout

__all__ = ["RankMap", "Ranks", "same_map"]

_SCANS = 16  # look-ups by a scan of the map, before all positions are put into a dict


class RankMap:
    """The global rank at each offset. All meshes derived from one mesh share it."""

    __slots__ = ("_all_known", "_positions", "ranks")

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._positions: dict[int, int] = {}
        self._all_known = False

    def position(self, rank: int) -> int:
        """Return the offset of a rank, or -1 if it has none.

        A process asks only for its own rank, and a simulation for all ranks. So the first look-ups scan the map.
        """
        if not self._all_known and rank not in self._positions:
            if len(self._positions) < _SCANS:
                self._positions[rank] = self.ranks.index(rank) if rank in self.ranks else -1
            else:
                self._positions = {rank: i for i, rank in enumerate(self.ranks)}
                self._all_known = True
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
