"""Meshes: named axes over global ranks, as this process sees them.

>>> mesh = make_mesh((2, 4), ("dp", "tp"))
>>> mesh, mesh["tp"], mesh.flatten(("dp", "tp"), "all")
(mesh(dp=2, tp=4), mesh(tp=4), mesh(all=8))
>>> mesh.groups("dp")
[(0, 4), (1, 5), (2, 6), (3, 7)]
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import torch

from fspmd.errors import MeshError
from fspmd.meshes import process_groups, world
from fspmd.meshes.axes import RankMap, Ranks, check_names, check_ranks, check_sizes, integers
from fspmd.meshes.grid import Grid, lay_out
from fspmd.meshes.layout import Layout, concat
from fspmd.torch_internals import has_groups, silent_device_mesh
from fspmd.wrappers import begin

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


_VERSION = 1  # of the pickles
_TRANSPORTS = ("simulation", "process_group", "abstract")


class Mesh(Grid):
    """Named axes over global ranks; immutable.

    Meshes of the same names, shape, ranks, device type and transport are one object.

    Make one with :func:`make_mesh`; derive others by ``mesh["tp"]``, :meth:`flatten`, :meth:`unflatten`, :meth:`split`.

    >>> mesh = make_mesh((2, 4), ("dp", "tp"))
    >>> mesh, mesh.size, dict(mesh.shape), mesh["tp"], mesh.flatten(("dp", "tp"), "all")
    (mesh(dp=2, tp=4), 8, {'dp': 2, 'tp': 4}, mesh(tp=4), mesh(all=8))
    """

    __slots__ = ("device_type", "transport")

    device_type: str
    """The type of the ranks' devices: "cpu", "cuda" ..."""
    transport: str
    """The transport that moves the bytes: "simulation" or "process_group". In an "abstract" mesh nothing moves."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise MeshError('Mesh(...) is not called directly: write make_mesh((2, 4), ("dp", "tp"))')

    @classmethod
    def _make(cls, axes: Mapping[str, Layout], offset: int, rank_map: RankMap | None, kind: tuple[str, str]) -> Self:
        begin()
        made = object.__new__(cls)
        object.__setattr__(made, "device_type", kind[0])
        object.__setattr__(made, "transport", kind[1])
        return made._fill(axes, offset, rank_map)

    def _kind(self) -> tuple[str, str]:
        return self.device_type, self.transport

    def _like(self, axes: Mapping[str, Layout], offset: int, rank_map: RankMap | None) -> Self:
        return self._make(axes, offset, rank_map, self._kind())

    @property
    def device(self) -> torch.device:
        """This process's device: that of LOCAL_RANK for a mesh of GPUs under a launcher, else the current device."""
        return world.local_device(self.device_type)

    def coordinate(self, rank: int | None = None) -> tuple[int, ...] | None:
        """Return the coordinate of a rank, by default of this process, or None if it is not a member.

        On a simulated mesh, code that runs as no particular rank stands at the first.

        >>> mesh = make_mesh((2, 4), ("dp", "tp"))
        >>> mesh.coordinate(6), mesh.coordinate(8), mesh.coordinate()
        ((1, 2), None, (0, 0))
        """
        if rank is not None and not hasattr(rank, "__index__"):
            raise MeshError(f"coordinate({rank!r}): a rank is an int; the place along an axis is coordinate()[i]")
        if rank is None:
            rank = world.process_rank() if self.transport == "process_group" else world.simulated()
        known = self._cache.get(("coordinate", rank), self)  # the mesh itself stands for: not known
        if known is self:
            known = (0,) * len(self.axis_names) if rank is None else self._coordinate_of(rank)
            self._keep(("coordinate", rank), known)
        return known  # type: ignore[no-any-return]

    def __enter__(self) -> NoReturn:
        raise MeshError(f"with {self!r}: a mesh is set for a block by set_mesh: write with set_mesh(mesh):")

    def __exit__(self, *error: object) -> None:
        """Never runs. A context manager must have this method."""

    def __getitem__(self, axes: str | tuple[str, ...]) -> Mesh:
        """The mesh of some axes, in any order: the slice through this process's own coordinate on the others.

        For a process that is no member it is the slice through the first rank, of which it is no member either.

        >>> mesh = make_mesh((2, 4), ("dp", "tp"))
        >>> mesh["tp", "dp"], list(mesh["dp"].ranks)
        (mesh(tp=4, dp=2), [0, 4])
        """
        names = self._names(axes, "mesh[{!r}]")
        if names == self.axis_names:
            return self
        own = self.coordinate() or (0,) * len(self.axis_names)
        part: Mesh | None = self._cache.get(("slice", names, own))
        if part is None:
            part = self._derive(self._layouts(names), self._start(names, own))
            self._keep(("slice", names, own), part)
        return part

    def group_ranks(self, axes: str | tuple[str, ...]) -> tuple[int, ...]:
        """This process's own group over some axes, in the order of :meth:`groups`.

        Raises:
            MeshError: this process is no member of the mesh.
        """
        names = self._names(axes, "group_ranks({!r})")
        own = self.coordinate()
        if own is None:
            raise MeshError(
                f"group_ranks({axes!r}): rank {world.rank()} is no member of {self}: "
                "ask where mesh.coordinate() is not None only"
            )
        ranks: tuple[int, ...] | None = self._cache.get(("group", names, own))
        if ranks is None:
            ranks = tuple(Ranks(concat(*self._layouts(names).values()), self._start(names, own), self._map))
            self._keep(("group", names, own), ranks)
        return ranks

    def process_group(self, axes: str | tuple[str, ...]) -> ProcessGroup:
        """This process's group over some axes, made when first used and shared by all meshes with the same ranks there.

        Ranks within a process group ascend, whatever their order on the axes: :meth:`group_ranks` has that.

        Raises:
            MeshError: the mesh is simulated, or this process is no member of it.
        """
        if self.transport != "process_group":
            raise MeshError(
                f"process_group({axes!r}): {self} has no process groups, its transport is {self.transport!r}: make the "
                "mesh under torchrun for them"
            )
        return process_groups.process_group(self.group_ranks(axes))

    @staticmethod
    def from_device_mesh(dm: DeviceMesh) -> Mesh:
        """The mesh of a torch DeviceMesh, whose process groups it uses instead of making its own.

        Raises:
            MeshError: its dims have no names, or it is a slice of which this process is no member.
        """
        from torch.distributed.device_mesh import DeviceMesh

        if not isinstance(dm, DeviceMesh):
            raise MeshError(f"from_device_mesh takes a torch DeviceMesh, but got {type(dm).__name__}")
        names = dm.mesh_dim_names
        if names is None:
            raise MeshError(
                f"from_device_mesh({dm}): its dims have no names, make it with "
                f"init_device_mesh(..., mesh_dim_names={tuple(f'axis{i}' for i in range(dm.ndim))})"
            )
        try:
            ranks = dm.mesh.flatten().tolist()
        except RuntimeError as error:
            raise MeshError(
                f"from_device_mesh({dm}): this process is not in this slice, so it does not know the ranks of the "
                "slice: convert the whole DeviceMesh and slice the result"
            ) from error
        if has_groups(dm):
            for dim in range(dm.ndim):
                process_groups.adopt_group(dm.get_group(dim))
        kind = (dm.device_type, "process_group" if world.initialised() else "simulation")
        return Mesh._make(*lay_out(dict(zip(names, dm.shape, strict=True)), ranks), kind)

    def to_device_mesh(self) -> DeviceMesh:
        """A torch DeviceMesh of the same names, shape and ranks, over this mesh's own process groups.

        It shares the groups that exist; those of axes not yet used are made now, once, and are this mesh's from then
        on. A simulated mesh gives a DeviceMesh without groups: it tells ranks, and cannot communicate.
        """
        from torch.distributed.device_mesh import DeviceMesh

        grid = torch.tensor(list(self.ranks), dtype=torch.int, device="cpu").view(tuple(self.shape.values()))
        kind = self.device_type, grid
        if self.transport == "process_group" and self.coordinate() is not None:
            groups = [self.process_group(name) for name in self.axis_names]
            return DeviceMesh.from_group(groups, *kind, mesh_dim_names=self.axis_names)
        rank = world.process_rank()
        return silent_device_mesh(*kind, self.axis_names, rank)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        axes = {name: (axis.shape, axis.stride) for name, axis in zip(self.axis_names, self._axes, strict=True)}
        ranks = None if self._map is None else self._map.ranks
        return load_mesh, (_VERSION, axes, self._offset, ranks, self.device_type, self.transport)


def groups_along(mesh: Mesh, axes: Collection[str]) -> list[list[int]]:
    """The positions of ranks of a mesh, row-major, in groups that differ along ``axes`` alone."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for position, rank in enumerate(mesh.ranks):
        at = zip(mesh.axis_names, mesh.coordinate(rank) or (), strict=True)
        groups.setdefault(tuple(i for axis, i in at if axis not in axes), []).append(position)
    return list(groups.values())


def mesh_advice(given: object) -> str:
    """Return the call that makes a mesh, as advice for a value given in the place of a mesh.

    >>> mesh_advice(8)
    "make_mesh((4,), ('x',))"
    """
    return "Mesh.from_device_mesh(mesh)" if type(given).__name__ == "DeviceMesh" else "make_mesh((4,), ('x',))"


def _check_saved(layouts: Mapping[str, Layout], offset: Any, ranks: Any, transport: Any) -> None:
    """Raise `MeshError` if a pickle holds no mesh: equal meshes are one object, so it would stand for ours."""
    call = "a saved mesh"
    check_names(layouts, call)
    whole = concat(*layouts.values())
    span, overlap = 1, False
    for size, stride in sorted(whole.modes, key=lambda mode: mode[1]):
        if size > 1:
            span, overlap = size * stride, overlap or stride < span
    if type(offset) is not int or offset < 0 or overlap or transport not in _TRANSPORTS:
        raise MeshError(
            f"{call} has the layouts {whole!r} from {offset!r} on, and the transport {transport!r}: no mesh"
        )
    if ranks is not None:
        listed = integers(ranks, call, "ranks")
        check_ranks(listed, (len(listed),), None, call)
        if offset + whole.cosize > len(listed):
            raise MeshError(f"{call} has {len(listed)} ranks, but places up to {offset + whole.cosize}: no mesh")


def load_mesh(version: int, *state: Any) -> Mesh:
    """Return the mesh of a pickle."""
    if version != _VERSION:
        raise MeshError(f"a mesh was pickled in version {version} of the format, this fspmd reads version {_VERSION}")
    try:
        axes, offset, ranks, device_type, transport = state
        layouts = {name: Layout(shape, stride) for name, (shape, stride) in axes.items()}
        is_device = type(device_type) is str and torch.device(device_type).type == device_type
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise MeshError(f"a saved mesh has the parts {state!r}: no mesh ({error})") from error
    if not is_device:
        raise MeshError(f"a saved mesh has the device {device_type!r}; it must have the type of one")
    _check_saved(layouts, offset, ranks, transport)
    return Mesh._make(layouts, offset, None if ranks is None else RankMap(ranks), (device_type, transport))


def make_mesh(
    shape: Sequence[int],
    axis_names: Sequence[str],
    *,
    ranks: Sequence[int] | None = None,
    device: str | torch.device | None = None,
    transport: str | None = None,
    timeout: float | datetime.timedelta | None = None,
) -> Mesh:
    """A mesh of named axes over global ranks.

    Without a launcher its ranks are simulated in this process. Under ``torchrun``, or when torch.distributed is
    initialised, each rank is a process; torch.distributed is initialised if it is not: NCCL on GPUs, each rank on its
    LOCAL_RANK device, or Gloo on CPUs.

    Args:
        shape: The size of each axis, major first.
        axis_names: A name for each axis.
        ranks: The global rank at each place, row-major; by default 0, 1, 2 ... It may leave out ranks of the world.
        device: "cpu", "cuda" ...; by default "cuda" under a launcher where there are GPUs, else torch's default device.
        transport: "simulation" or "process_group" to force one; "abstract" for ranks that do not exist, and devices
            that need not: for ``jit(f).lower`` and ``auto_spec``. A device that is not here is planned as a CPU.
        timeout: How long a collective may wait for other ranks, in seconds, for all groups of the world. By default the
            time limit of torch.distributed: 30 minutes with Gloo. Simulated ranks do not wait.

    Raises:
        MeshError: bad sizes, names or ranks, a mesh larger than the world, no such device or transport, or a world with
            another time limit.

    >>> make_mesh((2, 2), ("dp", "tp"), ranks=(0, 2, 1, 3)).groups("tp")
    [(0, 2), (1, 3)]
    """
    call = f"make_mesh({shape!r}, {axis_names!r})"
    sizes = check_sizes(shape, call)
    names = check_names(axis_names, call, len(sizes))
    if len(names) != len(sizes):
        raise MeshError(f"{call}: {len(sizes)} sizes but {len(names)} names, give one name for each size")
    if transport not in (None, *_TRANSPORTS):
        raise MeshError(f"{call}: transport={transport!r} is unknown, give one of {_TRANSPORTS}, or none to choose")
    device_type, limit = _device_type(device, call), _limit(timeout, call)
    launched = world.launched() if transport is None else transport == "process_group"
    transport = transport or ("process_group" if launched else "simulation")
    world_size = world.world_size() if launched and world.launched() else None
    listed: Sequence[int] = range(math.prod(sizes))
    if ranks is not None:
        listed = ranks if isinstance(ranks, range) else integers(ranks, call, "ranks")
        check_ranks(listed, sizes, world_size, call)
    elif world_size is not None and len(listed) > world_size:
        raise MeshError(
            f"{call}: {len(listed)} ranks are more than the world has, {world_size}: start {len(listed)} processes "
            f'(torchrun --nproc-per-node {len(listed)}), make a smaller mesh, or pass transport="simulation"'
        )
    if launched:
        device_type = device_type or world.default_device_type()
        process_groups.ensure_initialised(device_type, limit)
    elif transport == "simulation" and device_type not in (None, "meta") and not world.available(device_type):
        raise MeshError(
            f'{call}: device={device_type!r}, but torch finds none here: leave it out, or write device="cpu"'
        )
    device_type = device_type or torch.get_default_device().type
    kind = (device_type, transport)
    return Mesh._make(*lay_out(dict(zip(names, sizes, strict=True)), listed), kind)


def _limit(timeout: float | datetime.timedelta | None, call: str) -> datetime.timedelta | None:
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    if type(seconds) not in (int, float) or not 0 < seconds < math.inf:
        raise MeshError(f"{call}: timeout={timeout!r} is no time, give seconds, such as timeout=60")
    return datetime.timedelta(seconds=seconds)


def _device_type(device: str | torch.device | None, call: str) -> str | None:
    if device is None:
        return None
    try:
        given = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise MeshError(f'{call}: device={device!r} is no device, give a type such as "cpu" or "cuda"') from error
    if given.index is not None:
        raise MeshError(
            f"{call}: device={str(device)!r} names one device, but a mesh takes a type: write "
            f'device="{given.type}"; each process uses the device that LOCAL_RANK names, in simulation the current one'
        )
    return given.type


_ambient: ContextVar[Mesh | None] = ContextVar("fspmd_mesh", default=None)
ambient_mesh: Final = _ambient.get  # `current_mesh`, without a call of Python


def current_mesh() -> Mesh | None:
    """The mesh that :class:`set_mesh` has set, None when there is none.

    >>> with set_mesh(make_mesh((4,), ("x",))):
    ...     current_mesh()
    mesh(x=4)
    """
    return _ambient.get()


class set_mesh:
    """Set the mesh of calls that are given none: for good as a statement, for a block as a context manager.

    >>> with set_mesh(make_mesh((4,), ("x",))) as mesh:
    ...     current_mesh() is mesh
    True
    >>> current_mesh() is None
    True

    Raises:
        MeshError: not a mesh (None unsets it).
    """

    __slots__ = ("_mesh", "_previous")

    def __init__(self, mesh: Mesh | None) -> None:
        if mesh is not None and not isinstance(mesh, Mesh):
            raise MeshError(
                f"set_mesh takes a mesh, or None, but got {type(mesh).__name__}; make one: {mesh_advice(mesh)}"
            )
        self._mesh, self._previous = mesh, _ambient.get()
        _ambient.set(mesh)

    def __enter__(self) -> Mesh | None:
        _ambient.set(self._mesh)
        return self._mesh

    def __exit__(self, *exc: object) -> None:
        _ambient.set(self._previous)
