"""One rank whose values all others get: every rank hears what that rank has, and all agree on it before data moves."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fspmd.errors import ArgumentError, FspmdError, MeshError, ShapeError
from fspmd.meshes.axes import row_major
from fspmd.meshes.mesh import Mesh
from fspmd.transport import Options, transport_of


@dataclass(frozen=True, slots=True)
class Source:
    """The rank that has the values, as the first rank of a mesh names it."""

    what: str  # the function that is called
    mesh: Mesh
    rank: int  # global
    position: int  # among the ranks of the mesh, row-major
    place: int  # position of this process
    differs: str  # what this process named instead

    @property
    def here(self) -> bool:
        """Whether this process has the values; in a simulation, where one process is every rank, always."""
        return self.place == self.position or self.mesh.transport == "simulation"

    def tell(self, make: Callable[[], Any]) -> Any:
        """What ``make`` gives on the source, known to all ranks; an `FspmdError` it raises there, raised on all."""
        return _told(make, self.mesh, self.position)

    def agree(self, differs: Callable[[], str]) -> None:
        """Raise `ShapeError` on all ranks with what the first rank that differs says; "" says that nothing does."""
        if self.mesh.transport == "simulation":
            return
        complaint = self.differs
        if not complaint and not self.here:
            try:
                complaint = differs()
            except FspmdError as error:
                complaint = str(error)
        if found := transport_of(self.mesh).agree(complaint and f"{self._me} passes {complaint}", self.mesh):
            raise ShapeError(f"{self.what}: {found}; pass the same src on all ranks, and trees and specs that agree")

    def against(self, mine: str, theirs: str) -> str:
        """What differs, in words."""
        return f"{mine}, but rank {self.rank} {theirs}"

    @property
    def _me(self) -> str:
        return f"rank {self.mesh.ranks[self.place]}"


def source_of(src: Any, mesh: Mesh, what: str) -> Source:
    """The source of a call on all ranks of a mesh.

    Raises:
        ArgumentError, MeshError: on all ranks alike, where the first rank names no rank of the mesh.
    """
    position = _told(lambda: _position(mesh, src, what), mesh, 0)
    rank, place = mesh.ranks[position], row_major(mesh.coordinate() or (), mesh.shape.values())
    differs = "" if src == rank and not isinstance(src, bool) else f"src={src!r}, but rank {mesh.ranks[0]} src={rank}"
    return Source(what, mesh, rank, position, place, differs)


def hear_all(make: Callable[[], Any], mesh: Mesh) -> list[Any]:
    """What ``make`` gives on each rank, row-major, known to all; the first `FspmdError` among it is raised on all.

    In a simulation, where there is one process, a list of one.
    """
    if mesh.transport != "process_group":
        return [make()]
    failure: Exception | None = None
    try:
        mine = pickle.dumps(make())
    except Exception as error:  # the others wait to hear of it
        failure = error
        mine = pickle.dumps(error if isinstance(error, FspmdError) else ArgumentError(f"a rank failed: {error!r}"))
    transport, sent = transport_of(mesh), torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(mesh.device)
    sizes = tuple(layout[1][0] for (layout,) in transport.layouts([sent], mesh) if layout is not None)
    heard = transport.gather(sent, mesh, mesh.axis_names, Options(sizes=sizes)).wait()
    if failure is not None:
        raise failure
    found = [pickle.loads(bytes(part.tolist())) for part in heard.cpu().split(sizes)]
    for one in found:
        if isinstance(one, FspmdError):
            raise one
    return found


def _told(make: Callable[[], Any], mesh: Mesh, position: int) -> Any:
    if mesh.transport == "simulation":
        return make()
    message = b""
    if row_major(mesh.coordinate() or (), mesh.shape.values()) == position:
        try:
            message = pickle.dumps(make())
        except FspmdError as error:
            message = pickle.dumps(error)
    told = pickle.loads(transport_of(mesh).tell(message, mesh, position))
    if isinstance(told, FspmdError):
        raise told
    return told


def _position(mesh: Mesh, src: Any, what: str) -> int:
    """The place of a global rank on the mesh, row-major; raises `MeshError` where it has none."""
    if isinstance(src, bool) or not hasattr(src, "__index__"):
        raise ArgumentError(f"{what} got src={src!r} of type {type(src).__name__}; expected a global rank")
    rank = operator.index(src)
    at = mesh.coordinate(rank) if rank >= 0 else None
    if at is None:
        raise MeshError(f"{what} got src={rank}, which is no rank of {mesh!r}: its ranks are {mesh.ranks!r}")
    return row_major(at, mesh.shape.values())
