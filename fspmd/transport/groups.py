"""Process groups in the order of a mesh, made at their first collective.

c10d ranks a group in the order of global ranks. Where the mesh has another order, blocks are permuted on this side, so
that equal sets of ranks share one group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from fspmd.cache import cached
from fspmd.errors import ShapeError
from fspmd.meshes import process_groups, world
from fspmd.meshes.mesh import Mesh
from fspmd.transport.call import Options
from fspmd.transport.pending import wait_for
from fspmd.transport.rows import Sizes

_met: weakref.WeakSet[Any] = weakref.WeakSet()  # groups whose ranks have met


class Group:
    """This rank's place in the order of a mesh, and the process group, which is made when it is first asked for.

    What communicates nothing asks for places only, for making a group is a rendezvous of its members.
    """

    __slots__ = ("_gloo", "_pg", "back", "index", "order", "ranks", "size")

    def __init__(self, mesh: Mesh, ranks: tuple[int, ...]) -> None:
        ordered = sorted(ranks)
        self.ranks = tuple(ordered)
        self._pg: Callable[[], Any] = _no_group  # torch holds the group, until it is destroyed
        self._gloo: set[str] = set()  # the types of devices whose tensors Gloo moves, once the group is made
        self.size = len(ranks)
        self.index = ranks.index(world.rank())  # our position in the mesh's order
        self.order: list[int] | None = None  # mesh position -> c10d rank; None where they agree
        self.back: list[int] | None = None  # c10d rank -> mesh position
        if ordered != list(ranks):
            self.order = [ordered.index(rank) for rank in ranks]
            self.back = [ranks.index(rank) for rank in ordered]

    @property
    def pg(self) -> Any:
        """The process group."""
        return self._pg() or self._made()

    def _made(self) -> Any:
        pg = process_groups.process_group(self.ranks)
        self._pg = weakref.ref(pg)
        self._gloo = {device for device, backend in world.backends(pg).items() if backend == "gloo"}
        return pg

    def is_on_gloo(self, device: torch.device) -> bool:
        """Return whether Gloo moves a device's values. This makes the group."""
        return self.pg is not None and device.type in self._gloo

    def meet(self, device: torch.device) -> None:
        """Run a first collective, before ranks of the group send to each other.

        NCCL connects all ranks of a group at its first call, so the first call must not leave some ranks out.
        """
        if device.type != "cpu" and self.pg not in _met:
            _met.add(self.pg)
            wait_for((self.pg.allreduce([torch.zeros(1, device=device)]),))

    def peer(self, position: int) -> int:
        """Return the c10d rank of a mesh position."""
        return position if self.order is None else self.order[position]


def _no_group() -> None:
    return None


@cached(maxsize=1024)
def _group(mesh: Mesh, axes: tuple[str, ...], index_groups: tuple[Sizes, ...] | None, default: Any) -> Group:
    ranks = mesh.group_ranks(axes)
    if index_groups is not None:
        mine = ranks.index(world.rank())
        ranks = tuple(ranks[i] for chosen in index_groups if mine in chosen for i in chosen)
    return Group(mesh, ranks)


process_groups.let_go_with_groups(_group.cache_clear)


def group_of(mesh: Mesh, axes: tuple[str, ...], o: Options) -> Group:
    """Return this rank's group along the axes. Nothing is communicated before its ``pg`` is asked for."""
    default = c10d.GroupMember.WORLD
    return _group(mesh, axes, o.index_groups, None if default is None else weakref.ref(default))


def in_c10d_order(mesh: Mesh, axes: tuple[str, ...], what: str) -> Group:
    """Return the group, for the function ``what``, which writes in place.

    Raises:
        ShapeError: The mesh orders the ranks otherwise than the process group, so blocks would need to be permuted.
    """
    group = group_of(mesh, axes, Options())
    if group.order is not None:
        raise ShapeError(
            f"{what} over {axes} of {mesh!r}: the mesh orders these ranks otherwise than the process group does, so "
            f"blocks would have to be copied into place; use {what[:-5]}, or a mesh with ascending ranks"
        )
    return group


def gather_integers(mine: list[int], mesh: Mesh) -> list[list[int]]:
    """Return the integers of every rank, in row-major order of mesh coordinates. All ranks give equally many."""
    group = group_of(mesh, mesh.axis_names, Options())
    sent = torch.tensor(mine, dtype=torch.int64, device=mesh.device)
    if group.size == 1:
        return [mine]
    received = sent.new_empty((group.size * len(mine),))
    wait_for((group.pg._allgather_base(received, sent),))
    rows: list[list[int]] = received.view(group.size, -1).tolist()
    return rows if group.order is None else [rows[i] for i in group.order]
