"""The geometry of a mesh: named axes over global ranks, without processes and devices.

A grid says which global rank stands at each coordinate: a :class:`~fspmd.meshes.layout.Layout` per axis gives an
offset, and the rank map (shared by every grid derived from one) the rank at that offset. So slicing, reordering,
flattening and unflattening are arithmetic on a few integers, whatever the number of ranks.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from threading import RLock
from types import MappingProxyType
from typing import Any, Final, Self, TypeVar
from weakref import WeakSet, WeakValueDictionary

from fspmd.cache import forget
from fspmd.errors import AxisError, MeshError, ShapeError
from fspmd.meshes.axes import (
    RankMap,
    Ranks,
    check_different,
    check_names,
    infer_sizes,
    integers,
    row_major,
    same_map,
)
from fspmd.meshes.layout import Layout, compose, concat, fit, row_major_strides

G = TypeVar("G", bound="Grid")
_NEW = 512  # caches are forgotten when so many grids more live than after they were last forgotten


class _Interning:
    """The lock under which grids are made, and the living grids. A forked process gets a new lock."""

    def __init__(self) -> None:
        self.living: WeakSet[Grid] = WeakSet()
        self.limit = _NEW
        self.unlock()
        os.register_at_fork(after_in_child=self.unlock)

    def unlock(self) -> None:
        self.lock = RLock()


_interning: Final = _Interning()
#: part of a grid's value -> the living grids with this part; each of them keeps the set alive
_GRIDS: Final[WeakValueDictionary[Any, WeakSet[Grid]]] = WeakValueDictionary()
_CACHED = 1 << 12  # results kept per grid, and the largest grid whose groups are kept


class Grid:
    """Named axes over global ranks. Immutable. Grids of the same names, shape and ranks are one object.

    A derived grid costs a few integers. Ranks are listed only on demand (:meth:`groups`, ``list(ranks)``). A parameter
    ``axes`` takes a name or a tuple of names.
    """

    __slots__ = (
        "__weakref__",
        "_alike",
        "_axes",
        "_cache",
        "_layout",
        "_map",
        "_offset",
        "axis_names",
        "shape",
        "size",
    )

    axis_names: tuple[str, ...]
    """The names of the axes, major first."""
    shape: Mapping[str, int]
    """Name to size, in the order of the axes; read-only."""
    size: int
    """The number of ranks."""
    _axes: tuple[Layout, ...]
    _cache: dict[Any, Any]
    _layout: Layout
    _map: RankMap | None
    _offset: int

    def _fill(self, axes: Mapping[str, Layout], offset: int, rank_map: RankMap | None) -> Self:
        """Set the slots of a new grid, and return the interned grid of its value."""
        put = object.__setattr__
        names = tuple(axes)
        layouts = tuple(axis.coalesce() for axis in axes.values())
        sizes = tuple(axis.size for axis in layouts)
        put(self, "axis_names", names)
        put(self, "shape", MappingProxyType(dict(zip(names, sizes, strict=True))))
        put(self, "size", math.prod(sizes))
        put(self, "_axes", layouts)
        put(self, "_layout", concat(*layouts))
        put(self, "_offset", offset)
        put(self, "_map", rank_map)
        put(self, "_cache", {})
        return self._interned()

    def _interned(self) -> Self:
        ranks = self.ranks  # equal grids may have different layouts over different maps, but have the same ranks
        key = (type(self), self._kind(), self.axis_names, tuple(self.shape.values()), ranks[0], ranks[-1])
        with _interning.lock:
            alike = _GRIDS.get(key) or WeakSet()
            for known in list(alike):  # a copy, since garbage collection may make or drop grids meanwhile
                if self._has_ranks_of(known):
                    return known  # type: ignore[return-value]
            alike = _GRIDS.get(key) or alike
            alike.add(self)
            _GRIDS[key] = alike
            object.__setattr__(self, "_alike", alike)
            _interning.living.add(self)
            crowded = len(_interning.living) > _interning.limit
        if crowded:  # out of the lock, since what is forgotten may run code of others
            forget()
            _interning.limit = len(_interning.living) + _NEW
        return self

    def _has_ranks_of(self, other: Grid) -> bool:
        """Return whether a grid of the same names and sizes has the same rank at each coordinate."""
        if same_map(self._map, other._map):
            return self._offset == other._offset and self._axes == other._axes
        return all(map(operator.eq, self.ranks, other.ranks))

    def _kind(self) -> tuple[str, ...]:
        """Return the other properties that equal grids have in common."""
        return ()

    def _like(self, axes: Mapping[str, Layout], offset: int, rank_map: RankMap | None) -> Self:
        """Return a grid of the same kind with these layouts."""
        return object.__new__(type(self))._fill(axes, offset, rank_map)

    def _like_ranks(self, shape: Mapping[str, int], ranks: Sequence[int]) -> Self:
        return self._like(*lay_out(shape, ranks))

    def _derive(self, axes: Mapping[str, Layout], offset: int | None = None) -> Self:
        return self._like(axes, self._offset if offset is None else offset, self._map)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a mesh is immutable: cannot set {name!r} of {self}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a mesh is immutable: cannot delete {name!r} of {self}")

    # ----------------------------------------------------------------------------------------------------------- ranks

    @property
    def ranks(self) -> Ranks:
        """The global ranks, row-major, as a lazy sequence."""
        return Ranks(self._layout, self._offset, self._map)

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """The global rank at a coordinate, which has one index per axis.

        >>> from fspmd import make_mesh
        >>> make_mesh((2, 4), ("dp", "tp")).rank_at((1, 2))
        6
        """
        sizes = tuple(self.shape.values())
        coordinate = tuple(coordinate)
        if len(coordinate) != len(sizes) or not all(0 <= i < n for i, n in zip(coordinate, sizes, strict=True)):
            raise MeshError(
                f"rank_at({coordinate}): expected {len(sizes)} indices, one per axis of {self}, "
                "each from 0 to the axis's size - 1"
            )
        offset = self._offset + sum(axis(i) for axis, i in zip(self._axes, coordinate, strict=True))
        return offset if self._map is None else self._map.ranks[offset]

    def _coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        modes = self.ranks.coordinate(rank)
        if modes is None:
            return None
        digits = iter(modes)
        return tuple(row_major(itertools.islice(digits, len(axis.shape)), axis.shape) for axis in self._axes)

    def _keep(self, key: tuple[object, ...], value: object) -> None:
        if len(self._cache) < _CACHED:
            self._cache[key] = value

    # --------------------------------------------------------------------------------------------------- derived grids

    def _names(self, axes: str | Iterable[str], call: str) -> tuple[str, ...]:
        """Check axes and return them as a tuple. ``call`` is the call in messages, with ``{!r}`` for the axes."""
        if isinstance(axes, str) and axes in self.shape:
            return (axes,)
        names = (axes,) if isinstance(axes, str) or not isinstance(axes, Iterable) else tuple(axes)
        if not all(isinstance(name, str) and name in self.shape for name in names) or len(set(names)) != len(names):
            shown = call.replace("{!r}", repr(axes))
            for name in names:
                self._known(name, shown)
            raise AxisError(f"{shown}: name each axis of {self} at most once")
        return names

    def _known(self, name: object, call: str) -> None:
        if not isinstance(name, str) or name not in self.shape:
            raise AxisError(f"{call}: {self} has no axis {name!r}, its axes are {self.axis_names}")

    def _layouts(self, names: Iterable[str]) -> dict[str, Layout]:
        return {name: self._axes[self.axis_names.index(name)] for name in names}

    def ordered(self, axes: Container[str]) -> tuple[str, ...]:
        """Those axes of the mesh that are among ``axes``, in the order of the mesh.

        >>> from fspmd import make_mesh
        >>> make_mesh((2, 4), ("dp", "tp")).ordered({"tp", "dp"})
        ('dp', 'tp')
        """
        return tuple([name for name in self.axis_names if name in axes])

    def _rest(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in self.axis_names if name not in names)

    def _start(self, names: tuple[str, ...], coordinate: tuple[int, ...]) -> int:
        """Return the first offset of the slice of these axes through a coordinate."""
        there = zip(self.axis_names, self._axes, coordinate, strict=True)
        return self._offset + sum(axis(i) for name, axis, i in there if name not in names)

    def flatten(self, axes: str | tuple[str, ...], name: str) -> Self:
        """One axis in place of several, adjacent or not; the first named is the major one and gives the place.

        >>> from fspmd import make_mesh
        >>> mesh = make_mesh((2, 3, 4), ("a", "b", "c"))
        >>> mesh.flatten(("a", "c"), "ac"), mesh.flatten(("c", "a"), "ca")
        (mesh(ac=8, b=3), mesh(b=3, ca=8))

        Raises:
            AxisError: an axis is unknown or repeated, or none is named.
            MeshError: the new name is taken, or no name.
        """
        names = self._names(axes, f"flatten({{!r}}, {name!r})")
        if not names:
            raise AxisError(f"flatten((), {name!r}): name at least one axis of {self.axis_names}")
        flat = concat(*self._layouts(names).values())
        kept = [n for n in self.axis_names if n == names[0] or n not in names]
        new = check_names([name if n == names[0] else n for n in kept], f"flatten({axes!r}, {name!r})")
        return self._derive({n: flat if n == name else self._layouts([n])[n] for n in new})

    def unflatten(self, axis: str, sizes: Mapping[str, int]) -> Self:
        """Several axes in place of one, major first; one size may be -1.

        >>> from fspmd import make_mesh
        >>> make_mesh((8, 2), ("dp", "tp")).unflatten("dp", {"replica": 2, "shard": -1})
        mesh(replica=2, shard=4, tp=2)

        Raises:
            AxisError: the axis is unknown.
            MeshError: sizes that do not multiply to the axis's, or new names that are taken.
        """
        call = f"unflatten({axis!r}, {sizes!r})"
        self._known(axis, call)
        if not isinstance(sizes, Mapping):
            raise MeshError(f'{call}: sizes must be a dict from name to size, such as {{"replica": 2, "shard": -1}}')
        parts = infer_sizes(integers(sizes.values(), call), self.shape[axis], call)
        at = self.axis_names.index(axis)
        new = check_names([*self.axis_names[:at], *sizes, *self.axis_names[at + 1 :]], call)
        whole, strides = self._axes[at], row_major_strides(parts)
        try:
            split = [compose(whole, Layout(n, stride)) for n, stride in zip(parts, strides, strict=True)]
        except ShapeError:  # an axis of several modes whose borders lie elsewhere
            shape = [*self.shape.values()]
            shape[at : at + 1] = parts
            return self._like_ranks(dict(zip(new, shape, strict=True)), tuple(self.ranks))
        layouts = [*self._axes[:at], *split, *self._axes[at + 1 :]]
        return self._derive(dict(zip(new, layouts, strict=True)))

    def split(self, axis: str, sizes: Sequence[int]) -> list[Self]:
        """Meshes of the same axes that share out one: the first takes the first ``sizes[0]`` indices, and so on.

        >>> from fspmd import make_mesh
        >>> make_mesh((8, 2), ("dp", "tp")).split("dp", (3, 5))
        [mesh(dp=3, tp=2), mesh(dp=5, tp=2)]

        Raises:
            AxisError: the axis is unknown.
            MeshError: sizes that do not sum to the axis's.
        """
        call = f"split({axis!r}, {sizes!r})"
        self._known(axis, call)
        parts = integers(sizes, call)
        if not parts or min(parts) < 1 or sum(parts) != self.shape[axis]:
            raise MeshError(f"{call}: sizes must be >= 1 and sum to {self.shape[axis]}, the size of {axis!r} in {self}")
        starts = itertools.accumulate(parts, initial=0)
        return [self._part(axis, start, size) for start, size in zip(starts, parts, strict=False)]

    def _part(self, axis: str, start: int, size: int) -> Self:
        layouts = self._layouts(self.axis_names)
        window = layouts[axis].window(start, size)
        if window is not None:
            return self._derive({**layouts, axis: window[1]}, self._offset + window[0])
        indices = {name: range(n) for name, n in self.shape.items()} | {axis: range(start, start + size)}
        ranks = [self.rank_at(coordinate) for coordinate in itertools.product(*indices.values())]
        return self._like_ranks({**self.shape, axis: size}, ranks)

    @classmethod
    def concatenate(cls, meshes: Sequence[Self], axis: str) -> Self:
        """One mesh of several that differ along one axis: the inverse of :meth:`split`.

        >>> from fspmd import Mesh, make_mesh
        >>> Mesh.concatenate(make_mesh((8, 2), ("dp", "tp")).split("dp", (3, 5)), "dp")
        mesh(dp=8, tp=2)

        Raises:
            AxisError: the axis is unknown.
            MeshError: no mesh, meshes that differ elsewhere, or a rank that stands in two of them.
        """
        call = f"concatenate({meshes!r}, {axis!r})"
        if isinstance(meshes, Grid) or not isinstance(axis, str):
            raise MeshError(f"{call}: give a list of meshes and the axis they differ along: concatenate([a, b], 'x')")
        meshes = list(meshes)
        if not meshes:
            raise MeshError(f"{call}: give at least one mesh")
        first = meshes[0]
        first._known(axis, call)
        for mesh in meshes:
            shape = {**mesh.shape, axis: first.shape[axis]}
            if mesh.axis_names != first.axis_names or shape != first.shape:
                raise MeshError(f"{call}: the names and sizes of all axes but {axis!r} must be the same in all meshes")
            if mesh._kind() != first._kind():
                given = sorted({m._kind() for m in meshes})
                raise MeshError(
                    f"{call}: device type and transport must be the same in all meshes, but they are {given}"
                )
        return _joined(meshes, axis) or _interleaved(meshes, axis, call)

    # ----------------------------------------------------------------------------------------------------------- groups

    def axis_size(self, axes: str | tuple[str, ...]) -> int:
        """The size of an axis, or the product of several.

        >>> from fspmd import make_mesh
        >>> make_mesh((2, 4), ("dp", "tp")).axis_size(("dp", "tp"))
        8
        """
        return math.prod(map(self.shape.__getitem__, self._names(axes, "axis_size({!r})")))

    def groups(self, axes: str | tuple[str, ...]) -> list[tuple[int, ...]]:
        """The ranks that communicate over some axes: one tuple for each coordinate on the other axes, row-major.

        The order of ``axes`` is the order of ranks within a group, the first named being the major one.

        >>> from fspmd import make_mesh
        >>> make_mesh((2, 2), ("a", "b")).groups(("b", "a"))
        [(0, 2, 1, 3)]
        """
        names = self._names(axes, "groups({!r})")
        known: list[tuple[int, ...]] | None = self._cache.get(("groups", names))
        if known is None:
            starts = concat(*self._layouts(self._rest(names)).values()).offsets(self._offset)
            group = concat(*self._layouts(names).values())
            known = [tuple(Ranks(group, start, self._map)) for start in starts]
            if self.size <= _CACHED:
                self._keep(("groups", names), known)
        return list(known)

    def contains(self, other: Grid) -> bool:
        """True when other is this mesh or a slice of it, through whichever coordinate.

        >>> from fspmd import make_mesh
        >>> mesh = make_mesh((2, 4), ("dp", "tp"))
        >>> mesh.contains(mesh["tp"]), mesh["tp"].contains(mesh)
        (True, False)
        """
        if other is self:
            return True
        if any(self.shape.get(name) != size for name, size in other.shape.items()):
            return False
        through = self._coordinate_of(other.ranks[0])
        if through is None:
            return False
        names = other.axis_names
        return self._derive(self._layouts(names), self._start(names, through)) == other

    # ------------------------------------------------------------------------------------------------------------ value

    def __repr__(self) -> str:
        return f"mesh({', '.join(f'{name}={size}' for name, size in self.shape.items())})"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


def lay_out(shape: Mapping[str, int], ranks: Sequence[int]) -> tuple[dict[str, Layout], int, RankMap | None]:
    """Return a layout per axis, the offset and the rank map of ranks in row-major order. No map means offset = rank."""
    strides = row_major_strides(tuple(shape.values()))
    if isinstance(ranks, range) and ranks.step > 0:
        steps = {name: Layout(n, d * ranks.step) for (name, n), d in zip(shape.items(), strides, strict=True)}
        return steps, ranks.start, None
    fits = [fit(ranks[i * stride] for i in range(n)) for n, stride in zip(shape.values(), strides, strict=True)]
    axes = {name: axis_fit[1] for name, axis_fit in zip(shape, fits, strict=True) if axis_fit is not None}
    if len(axes) == len(shape):
        layout = concat(*axes.values())
        if layout.is_nested and all(map(operator.eq, layout.offsets(ranks[0]), ranks)):
            return axes, ranks[0], None
    axes = {name: Layout(n, stride) for (name, n), stride in zip(shape.items(), strides, strict=True)}
    return axes, 0, RankMap(tuple(ranks))


def _joined(meshes: list[G], axis: str) -> G | None:
    """Return the concatenation over the shared rank map of the meshes, or None if no layout describes it."""
    first = meshes[0]
    at, rest = first.axis_names.index(axis), first._layouts(first._rest((axis,)))
    if not all(same_map(m._map, first._map) and m._layouts(rest) == rest for m in meshes):
        return None
    joined = fit(offset for m in meshes for offset in m._axes[at].offsets(m._offset))
    if joined is None:
        return None
    axes = {**first._layouts(first.axis_names), axis: joined[1]}
    return first._derive(axes, joined[0]) if concat(*axes.values()).is_nested else None


def _interleaved(meshes: list[G], axis: str, call: str) -> G:
    """Return the concatenation over a new rank map."""
    first = meshes[0]
    shape = {**first.shape, axis: sum(m.shape[axis] for m in meshes)}
    sizes, at = tuple(shape.values()), first.axis_names.index(axis)
    rows = [(iter(m.ranks), m.shape[axis] * math.prod(sizes[at + 1 :])) for m in meshes]
    ranks = [rank for _ in range(math.prod(sizes[:at])) for each, n in rows for rank in itertools.islice(each, n)]
    check_different(ranks, call)
    return first._like_ranks(shape, ranks)
