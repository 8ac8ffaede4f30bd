"""Meshes: named axes over a layout and one shared rank map.

A mesh says which global rank stands at each coordinate of a grid with named axes: a :class:`~fspmd.layout.Layout` per axis gives
an offset, and the rank map (shared by every mesh derived from one) the rank at that offset. So slicing, reordering, flattening
and unflattening are arithmetic on a few integers, whatever the number of ranks.

>>> mesh = make_mesh((2, 4), ("dp", "tp"))
>>> mesh, mesh["tp"], mesh.flatten(("dp", "tp"), "all")
(mesh(dp=2, tp=4), mesh(tp=4), mesh(all=8))
>>> mesh.groups("dp")
[(0, 4), (1, 5), (2, 6), (3, 7)]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from fspmd import world
from fspmd.errors import AxisError, MeshError, ShapeError
from fspmd.layout import Layout, compose, concat, fit, row_major

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Mesh", "Ranks", "current_mesh", "make_mesh", "set_mesh"]

Axes = str | tuple[str, ...]
_VERSION = 1
_CACHED_GROUPS = 1 << 12  # groups of larger meshes are listed anew each time they are asked for


class RankMap:
    """The global rank at each offset, one object for all meshes derived from one."""

    __slots__ = ("_positions", "ranks")

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._positions: dict[int, int] = {}

    def position(self, rank: int) -> int:
        """The offset at which a rank stands, -1 when it stands nowhere."""
        if not self._positions and len(self.ranks) <= _CACHED_GROUPS:
            self._positions = {rank: i for i, rank in enumerate(self.ranks)}
        found = self._positions.get(rank)
        if found is None:
            found = self.ranks.index(rank) if rank in self.ranks else -1
            self._positions[rank] = found
        return found


def _same_map(a: RankMap | None, b: RankMap | None) -> bool:
    return a is b or (a is not None and b is not None and (a.ranks is b.ranks or a.ranks == b.ranks))


class Ranks(Sequence[int]):
    """The global ranks of a mesh in row-major order, computed as they are read."""

    __slots__ = ("_layout", "_map", "_offset")

    def __init__(self, layout: Layout, offset: int, rank_map: RankMap | None) -> None:
        self._layout, self._offset, self._map = layout.coalesce(), offset, rank_map

    def __len__(self) -> int:
        return self._layout.size

    def __iter__(self) -> Iterator[int]:
        offsets = self._layout.offsets(self._offset)
        return offsets if self._map is None else map(self._map.ranks.__getitem__, offsets)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} ranks")
        offset = self._offset + self._layout(index % len(self))
        return offset if self._map is None else self._map.ranks[offset]

    def __contains__(self, rank: object) -> bool:
        if not isinstance(rank, int):
            return False
        offset = rank if self._map is None else self._map.position(rank)
        return offset >= 0 and self._layout.coordinate(offset - self._offset) is not None

    def __repr__(self) -> str:
        shown = [str(rank) for rank in itertools.islice(self, 8)] + ["..."] * (len(self) > 8)
        return f"Ranks({', '.join(shown)})"


class Mesh:
    """Named axes over global ranks; immutable, and equal to every mesh of the same names, shape, ranks, device and transport.

    Make one with :func:`make_mesh`; derive others by ``mesh["tp"]``, :meth:`flatten`, :meth:`unflatten`, :meth:`split`.
    Deriving costs a few integers; ranks are listed only by what asks for them (:meth:`groups`, iterating ``ranks``).
    """

    __slots__ = (
        "_axes",
        "_cache",
        "_hash",
        "_layout",
        "_map",
        "_offset",
        "axis_names",
        "device_type",
        "shape",
        "size",
        "transport",
    )

    axis_names: tuple[str, ...]
    shape: Mapping[str, int]
    size: int
    device_type: str
    transport: str
    _axes: tuple[Layout, ...]
    _cache: dict[Any, Any]
    _hash: int
    _layout: Layout
    _map: RankMap | None
    _offset: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise MeshError('Mesh(...) is not called directly: write make_mesh((2, 4), ("dp", "tp"))')

    @classmethod
    def _make(
        cls,
        names: tuple[str, ...],
        axes: Sequence[Layout],
        offset: int,
        rank_map: RankMap | None,
        device_type: str,
        transport: str,
    ) -> Self:
        mesh = object.__new__(cls)
        put = object.__setattr__
        axes = tuple(axis.coalesce() for axis in axes)
        put(mesh, "axis_names", names)
        put(mesh, "shape", MappingProxyType({name: axis.size for name, axis in zip(names, axes, strict=True)}))
        put(mesh, "size", math.prod(mesh.shape.values()))
        put(mesh, "device_type", device_type)
        put(mesh, "transport", transport)
        put(mesh, "_axes", axes)
        put(mesh, "_layout", concat(*axes))
        put(mesh, "_offset", offset)
        put(mesh, "_map", rank_map)
        put(mesh, "_cache", {})
        ends = (mesh.ranks[0], mesh.ranks[-1])
        put(mesh, "_hash", hash((names, tuple(mesh.shape.values()), ends, device_type, transport)))
        return mesh

    @classmethod
    def _of_ranks(
        cls, names: tuple[str, ...], sizes: tuple[int, ...], ranks: Sequence[int], device_type: str, transport: str
    ) -> Self:
        """A mesh with these ranks, row-major; without a rank map where a layout alone tells them."""
        strides, axes = row_major(sizes), []
        for size, stride in zip(sizes, strides, strict=True):
            found = fit(ranks[i * stride] for i in range(size))
            if found is None:
                break
            axes.append(found[1])
        else:
            layout = concat(*axes)
            if layout.is_nested and all(a == b for a, b in zip(layout.offsets(ranks[0]), ranks, strict=True)):
                return cls._make(names, axes, ranks[0], None, device_type, transport)
        dense = [Layout(size, stride) for size, stride in zip(sizes, strides, strict=True)]
        return cls._make(names, dense, 0, RankMap(tuple(ranks)), device_type, transport)

    def _derive(self, names: Sequence[str], axes: Sequence[Layout], offset: int | None = None) -> Self:
        offset = self._offset if offset is None else offset
        return type(self)._make(tuple(names), axes, offset, self._map, self.device_type, self.transport)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a mesh is immutable: cannot set {name!r} on {self}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a mesh is immutable: cannot delete {name!r} of {self}")

    # ------------------------------------------------------------------------------------------------------ ranks

    @property
    def ranks(self) -> Ranks:
        """The global ranks, row-major, as a lazy sequence."""
        return Ranks(self._layout, self._offset, self._map)

    @property
    def device(self) -> torch.device:
        """This process's device: the LOCAL_RANK one for a mesh of GPUs under a launcher."""
        return world.local_device(self.device_type)

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """The global rank at a coordinate, which has one entry per axis."""
        sizes = tuple(self.shape.values())
        coordinate = tuple(coordinate)
        if len(coordinate) != len(sizes) or not all(0 <= i < n for i, n in zip(coordinate, sizes, strict=True)):
            raise MeshError(f"rank_at({coordinate}): expected {len(sizes)} indices within the shape {sizes} of {self}")
        offset = self._offset + sum(axis(i) for axis, i in zip(self._axes, coordinate, strict=True))
        return offset if self._map is None else self._map.ranks[offset]

    def coordinate(self, rank: int | None = None) -> tuple[int, ...] | None:
        """Where a rank stands, by default this process's; None when it is no member.

        On a simulated mesh, code that runs as no particular rank stands at the first.
        """
        if rank is None:
            if self.transport == "simulation":
                rank = world.simulated()
                if rank is None:
                    return (0,) * len(self.axis_names)
            else:
                rank = world.process_rank()
        try:
            return self._cache["coordinate", rank]  # type: ignore[no-any-return]
        except KeyError:
            pass
        found = self._coordinate_of(rank)
        if len(self._cache) < _CACHED_GROUPS:
            self._cache["coordinate", rank] = found
        return found

    def _coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        offset = rank if self._map is None else self._map.position(rank)
        digits = self._layout.coordinate(offset - self._offset) if offset >= 0 else None
        if digits is None:
            return None
        found, taken = [], 0
        for axis in self._axes:
            index = 0
            for size in axis.shape:
                index = index * size + digits[taken]
                taken += 1
            found.append(index)
        return tuple(found)

    # ----------------------------------------------------------------------------------------------- derived meshes

    def _axis(self, name: str, where: str) -> int:
        if name not in self.shape:
            raise AxisError(f"{where}: {self} has no axis {name!r}, its axes are {self.axis_names}")
        return self.axis_names.index(name)

    def _names(self, axes: Axes, where: str) -> tuple[str, ...]:
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        for name in names:
            self._axis(name, where)
        if len(set(names)) != len(names):
            raise AxisError(f"{where}: an axis is named twice, name each axis of {self} at most once")
        return names

    def __getitem__(self, axes: Axes) -> Self:
        """The mesh of some axes, in any order: a slice through this process's own coordinate on the others."""
        names = self._names(axes, f"mesh[{axes!r}]")
        if not names:
            raise AxisError(f"mesh[{axes!r}] names no axis, name at least one of {self.axis_names}")
        if names == self.axis_names:
            return self
        own = self.coordinate() or (0,) * len(self.axis_names)
        offset = self._offset
        for name, axis, i in zip(self.axis_names, self._axes, own, strict=True):
            if name not in names:
                offset += axis(i)
        return self._derive(names, [self._axes[self.axis_names.index(name)] for name in names], offset)

    def flatten(self, axes: Axes, name: str) -> Self:
        """One axis in place of several, adjacent or not; the first of the named axes is the major one and gives the place.

        >>> make_mesh((2, 3, 4), ("a", "b", "c")).flatten(("a", "c"), "ac")
        mesh(ac=8, b=3)
        """
        names = self._names(axes, f"flatten({axes!r}, {name!r})")
        if not names:
            raise AxisError(f"flatten({axes!r}, {name!r}) names no axis, name at least one of {self.axis_names}")
        flat = concat(*(self._axes[self.axis_names.index(n)] for n in names))
        kept: list[tuple[str, Layout]] = []
        for old, axis in zip(self.axis_names, self._axes, strict=True):
            if old == names[0]:
                kept.append((name, flat))
            elif old not in names:
                kept.append((old, axis))
        new_names = _check_names([n for n, _ in kept], f"flatten({axes!r}, {name!r})")
        return self._derive(new_names, [axis for _, axis in kept])

    def unflatten(self, axis: str, sizes: Mapping[str, int]) -> Self:
        """Several axes in place of one, major first; one size may be -1.

        >>> make_mesh((8, 2), ("dp", "tp")).unflatten("dp", {"replica": 2, "shard": -1})
        mesh(replica=2, shard=4, tp=2)
        """
        where = f"unflatten({axis!r}, {sizes!r})"
        at = self._axis(axis, where)
        whole = self.shape[axis]
        parts = _infer(tuple(sizes.values()), whole, where)
        names = _check_names([*self.axis_names[:at], *sizes, *self.axis_names[at + 1 :]], where)
        try:
            axes = [compose(self._axes[at], Layout(n, d)) for n, d in zip(parts, row_major(parts), strict=True)]
        except ShapeError:  # an axis of several modes whose boundaries lie elsewhere
            shape = tuple(self.shape.values())
            shape = (*shape[:at], *parts, *shape[at + 1 :])
            return type(self)._of_ranks(names, shape, tuple(self.ranks), self.device_type, self.transport)
        return self._derive(names, [*self._axes[:at], *axes, *self._axes[at + 1 :]])

    def split(self, axis: str, sizes: Sequence[int]) -> list[Self]:
        """Meshes of the same axis names that share out one axis: ``mesh.split("dp", (3, 5))``."""
        where = f"split({axis!r}, {sizes!r})"
        at = self._axis(axis, where)
        parts = tuple(sizes)
        if not all(type(n) is int and n >= 1 for n in parts) or sum(parts) != self.shape[axis]:
            raise MeshError(f"{where}: sizes must be integers >= 1 that sum to {self.shape[axis]}, the size of {axis!r} in {self}")
        meshes, start = [], 0
        for size in parts:
            meshes.append(self._part(at, start, size))
            start += size
        return meshes

    def _part(self, at: int, start: int, size: int) -> Self:
        window = self._axes[at].window(start, size)
        if window is not None:
            axes = [*self._axes[:at], window[1], *self._axes[at + 1 :]]
            return self._derive(self.axis_names, axes, self._offset + window[0])
        shape = [range(n) for n in self.shape.values()]
        shape[at] = range(start, start + size)
        ranks = [self.rank_at(c) for c in itertools.product(*shape)]
        return type(self)._of_ranks(self.axis_names, tuple(map(len, shape)), ranks, self.device_type, self.transport)

    @classmethod
    def concatenate(cls, meshes: Sequence[Mesh], axis: str) -> Mesh:
        """One mesh of several that differ along one axis: the inverse of :meth:`split`."""
        where = f"Mesh.concatenate({meshes!r}, {axis!r})"
        if not meshes:
            raise MeshError(f"{where}: needs at least one mesh")
        first = meshes[0]
        at = first._axis(axis, where)
        for mesh in meshes[1:]:
            if _but(at, mesh.shape.items()) != _but(at, first.shape.items()) or mesh.axis_names != first.axis_names:
                raise MeshError(f"{where}: all axes but {axis!r} must have the same names and sizes")
            if (mesh.device_type, mesh.transport) != (first.device_type, first.transport):
                raise MeshError(f"{where}: the meshes must have the same device type and transport")
        if all(_same_map(m._map, first._map) and _but(at, m._axes) == _but(at, first._axes) for m in meshes):
            joined = fit(i for m in meshes for i in m._axes[at].offsets(m._offset))
            if joined is not None:
                axes = [*first._axes[:at], joined[1], *first._axes[at + 1 :]]
                if concat(*axes).is_nested:
                    return first._derive(first.axis_names, axes, joined[0])
        sizes = list(first.shape.values())
        sizes[at] = sum(m.shape[axis] for m in meshes)
        inner = math.prod(sizes[at + 1 :])
        rows = [[iter(m.ranks), m.shape[axis] * inner] for m in meshes]
        ranks = [r for _ in range(math.prod(sizes[:at])) for it, n in rows for r in itertools.islice(it, n)]  # type: ignore
        _check_unique(ranks, where)
        return cls._of_ranks(first.axis_names, tuple(sizes), ranks, first.device_type, first.transport)

    # ------------------------------------------------------------------------------------------------------- groups

    def axis_size(self, axes: Axes) -> int:
        """The size of an axis, or the product of several."""
        return math.prod(self.shape[name] for name in self._names(axes, f"axis_size({axes!r})"))

    def groups(self, axes: Axes) -> list[tuple[int, ...]]:
        """The ranks that communicate over some axes: one tuple for each coordinate on the other axes, row-major.

        The order of ``axes`` is the order of ranks within a group, the first named being the major one.

        >>> make_mesh((2, 2), ("a", "b")).groups(("b", "a"))
        [(0, 2, 1, 3)]
        """
        names = self._names(axes, f"groups({axes!r})")
        found = self._cache.get(("groups", names))
        if found is None:
            rest = concat(*(a for n, a in zip(self.axis_names, self._axes, strict=True) if n not in names))
            found = [self._group_from(start, names) for start in rest.offsets(self._offset)]
            if self.size <= _CACHED_GROUPS:
                self._cache["groups", names] = found
        return list(found)

    def _group_from(self, offset: int, names: tuple[str, ...]) -> tuple[int, ...]:
        layout = concat(*(self._axes[self.axis_names.index(name)] for name in names))
        return tuple(Ranks(layout, offset, self._map))

    def group_ranks(self, axes: Axes) -> tuple[int, ...]:
        """This process's own group over some axes, in the order of :meth:`groups`."""
        where = f"group_ranks({axes!r})"
        own = self.coordinate()
        if own is None:
            raise MeshError(f"{where}: rank {world.rank()} is no member of {self}, call this on members only")
        try:
            return self._cache["group", axes, own]  # type: ignore[no-any-return]
        except KeyError:
            pass
        names = self._names(axes, where)
        offset = self._offset
        for name, axis, i in zip(self.axis_names, self._axes, own, strict=True):
            if name not in names:
                offset += axis(i)
        found = self._group_from(offset, names)
        if len(self._cache) < _CACHED_GROUPS:
            self._cache["group", axes, own] = found
        return found

    def process_group(self, axes: Axes) -> ProcessGroup:
        """This process's group over some axes, made when first used; its ranks are in ascending order of global rank."""
        if self.transport != "process_group":
            raise MeshError(f"process_group({axes!r}): {self} is simulated in one process and has no process groups")
        return world.process_group(self.group_ranks(axes))

    def contains(self, other: Mesh) -> bool:
        """True when other is this mesh or a slice of it: the same ranks behind axes that this mesh has too."""
        if other is self:
            return True
        if (other.device_type, other.transport) != (self.device_type, self.transport):
            return False
        if not _same_map(self._map, other._map):
            return self == other
        mine = dict(zip(self.axis_names, self._axes, strict=True))
        if any(mine.get(name) != axis for name, axis in zip(other.axis_names, other._axes, strict=True)):
            return False
        start = self._coordinate_of(other.ranks[0])
        return start is not None and all(
            i == 0 for i, name in zip(start, self.axis_names, strict=True) if name in other.shape
        )

    # -------------------------------------------------------------------------------------------------------- value

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mesh):
            return NotImplemented
        if (
            self._hash != other._hash
            or self.axis_names != other.axis_names
            or tuple(self.shape.values()) != tuple(other.shape.values())
            or self.device_type != other.device_type
            or self.transport != other.transport
        ):
            return False
        if _same_map(self._map, other._map):
            return self._offset == other._offset and self._axes == other._axes
        return all(a == b for a, b in zip(self.ranks, other.ranks, strict=True))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"mesh({', '.join(f'{name}={size}' for name, size in self.shape.items())})"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        axes = tuple((axis.shape, axis.stride) for axis in self._axes)
        ranks = None if self._map is None else self._map.ranks
        return _load, (_VERSION, self.axis_names, axes, self._offset, ranks, self.device_type, self.transport)


def _load(
    version: int,
    names: tuple[str, ...],
    axes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...],
    offset: int,
    ranks: tuple[int, ...] | None,
    device_type: str,
    transport: str,
) -> Mesh:
    if version != _VERSION:
        raise MeshError(f"a mesh pickled as version {version} cannot be read, this fspmd reads version {_VERSION}")
    layouts = [Layout(shape, stride) for shape, stride in axes]
    return Mesh._make(names, layouts, offset, None if ranks is None else RankMap(ranks), device_type, transport)


def _but(at: int, items: Any) -> list[Any]:
    return [item for i, item in enumerate(items) if i != at]


def _infer(parts: tuple[int, ...], whole: int, where: str) -> tuple[int, ...]:
    known = math.prod(n for n in parts if n != -1)
    if not parts or parts.count(-1) > 1 or not all(type(n) is int and (n >= 1 or n == -1) for n in parts):
        raise MeshError(f"{where}: sizes must be integers >= 1, one of them may be -1")
    if whole % known or (-1 not in parts and known != whole):
        raise MeshError(f"{where}: the sizes multiply to {known}, but the axis has size {whole}")
    return tuple(whole // known if n == -1 else n for n in parts)


def _check_names(names: Sequence[str], where: str) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise MeshError(f'{where}: axis names must be a tuple of non-empty strings such as ("dp", "tp"), not {names!r}')
    if len(set(names)) != len(names):
        raise MeshError(f"{where}: axis names must differ, but they would be {tuple(names)}")
    return tuple(names)


def _check_unique(ranks: Sequence[int], where: str) -> None:
    if len(set(ranks)) != len(ranks):
        seen: set[int] = set()
        twice = next(rank for rank in ranks if rank in seen or seen.add(rank))
        raise MeshError(f"{where}: rank {twice} stands in more than one place, each rank may stand in one")


def make_mesh(
    shape: Sequence[int],
    axis_names: Sequence[str],
    *,
    ranks: Sequence[int] | None = None,
    device: str | torch.device | None = None,
    transport: str | None = None,
) -> Mesh:
    """A mesh of named axes: simulated in this process when no launcher is present, else over process groups."""
    where = f"make_mesh({shape!r}, {axis_names!r})"
    sizes = tuple(shape)
    names = _check_names(axis_names, where)
    if not all(type(n) is int and n >= 1 for n in sizes):
        raise MeshError(f"{where}: sizes must be integers >= 1")
    if len(names) != len(sizes):
        raise MeshError(f"{where}: {len(sizes)} sizes but {len(names)} names, give one name for each size")
    transport = transport or ("process_group" if world.launched() else "simulation")
    device_type = None if device is None else torch.device(device).type
    if transport == "process_group":
        device_type = device_type or world.default_device_type()
        world.ensure_initialised(device_type)
    device_type = device_type or torch.get_default_device().type
    if ranks is None:
        return Mesh._make(
            names, [Layout(n, d) for n, d in zip(sizes, row_major(sizes), strict=True)], 0, None, device_type, transport
        )
    _check_unique(ranks, where)
    return Mesh._of_ranks(names, sizes, tuple(ranks), device_type, transport)


_ambient: ContextVar[Mesh | None] = ContextVar("fspmd_mesh", default=None)


def current_mesh() -> Mesh | None:
    """The mesh that :func:`set_mesh` has set, None when there is none."""
    return _ambient.get()


class set_mesh:  # noqa: N801
    """Set the mesh that calls without ``mesh=`` use, for good as a statement or for a block as a context manager."""

    __slots__ = ("_mesh", "_previous")

    def __init__(self, mesh: Mesh | None) -> None:
        self._mesh, self._previous = mesh, _ambient.get()
        _ambient.set(mesh)

    def __enter__(self) -> Mesh | None:
        _ambient.set(self._mesh)
        return self._mesh

    def __exit__(self, *exc: object) -> None:
        _ambient.set(self._previous)
