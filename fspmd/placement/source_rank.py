"""The source rank, whose values all other ranks get: it describes them to all ranks, which agree before data moves."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fspmd.errors import ArgumentError, FspmdError, MeshError, ShapeError
from fspmd.inspection.replays import compare_replays, replay_hashes
from fspmd.meshes.axes import row_major
from fspmd.meshes.mesh import Mesh
from fspmd.transport import Options, transport_named


@dataclass(frozen=True, slots=True)
class Source:
    """The source rank of a call. The first rank of the mesh decides it."""

    what: str  # the function that is called
    mesh: Mesh
    rank: int  # the global rank
    position: int  # its position among the ranks of the mesh, row-major
    place: int  # the position of this process
    differs: str  # the error if this process named another source; else ""

    @property
    def here(self) -> bool:
        """Whether this process has the values. In a simulation one process is every rank and has them."""
        return self.place == self.position or self.mesh.transport == "simulation"

    def tell(self, make: Callable[[], Any]) -> Any:
        """Call ``make`` on the source and return its result on all ranks. Its `FspmdError` is raised on all ranks."""
        return _told(make, self.mesh, self.position)

    def agree(self, differs: Callable[[], str]) -> None:
        """Compare all ranks with the source.

        ``differs`` returns the difference of this rank, or "" for none.

        Raises:
            ShapeError: on all ranks, with the difference of the first rank that has one.
        """
        if self.mesh.transport == "simulation":
            return
        difference = self.differs
        if not difference and not self.here:
            try:
                difference = differs()
            except FspmdError as error:
                difference = str(error)
        text = difference and f"rank {self.mesh.ranks[self.place]} passes {difference}"
        if first := transport_named(self.mesh.transport).agree(text, self.mesh):
            raise ShapeError(f"{self.what}: {first}; pass the same src on all ranks, and trees and specs that agree")

    def against(self, mine: str, theirs: str) -> str:
        """The text of a difference between this rank and the source."""
        return f"{mine}, but rank {self.rank} {theirs}"


def source_of(src: Any, mesh: Mesh, what: str) -> Source:
    """The source of a call on all ranks of a mesh.

    Raises:
        ArgumentError, MeshError: on all ranks alike, the first rank names no rank of the mesh.
    """
    position = _told(lambda: _position(mesh, src, what), mesh, 0)
    rank, place = mesh.ranks[position], row_major(mesh.coordinate() or (), mesh.shape.values())
    differs = "" if src == rank and not isinstance(src, bool) else f"src={src!r}, but rank {mesh.ranks[0]} src={rank}"
    return Source(what, mesh, rank, position, place, differs)


def hear_all(make: Callable[[], Any], mesh: Mesh) -> list[Any]:
    """Call ``make`` on each rank and return the results of all, row-major. The first `FspmdError` is raised on all.

    The replays of recorded programs are compared on the way. A simulation is one process, so its list has one result.

    Raises:
        LockstepError: on all ranks, ranks have replayed different records.
    """
    if mesh.transport != "process_group":
        return [make()]
    failure: Exception | None = None
    replays = replay_hashes(mesh)
    try:
        message = pickle.dumps((replays, make()))
    except Exception as error:  # the other ranks wait for this message
        failure = error
        told = error if isinstance(error, FspmdError) else ArgumentError(f"a rank failed: {error!r}")
        message = pickle.dumps((replays, told))
    transport = transport_named(mesh.transport)
    block = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(mesh.device)
    sizes = tuple(layout[1][0] for (layout,) in transport.layouts([block], mesh) if layout is not None)
    messages = transport.gather(block, mesh, mesh.axis_names, Options(sizes=sizes)).wait()
    heard = [pickle.loads(bytes(part.tolist())) for part in messages.cpu().split(sizes)]
    compare_replays([row for row, _ in heard], mesh)
    if failure is not None:
        raise failure
    results = [result for _, result in heard]
    for result in results:
        if isinstance(result, FspmdError):
            raise result
    return results


def _told(make: Callable[[], Any], mesh: Mesh, position: int) -> Any:
    """Call ``make`` on the rank at a position, and return its result or raise its error on all ranks."""
    if mesh.transport == "simulation":
        return make()
    message = b""
    if row_major(mesh.coordinate() or (), mesh.shape.values()) == position:
        try:
            message = pickle.dumps(make())
        except FspmdError as error:
            message = pickle.dumps(error)
    result = pickle.loads(transport_named(mesh.transport).tell(message, mesh, position))
    if isinstance(result, FspmdError):
        raise result
    return result


def _position(mesh: Mesh, src: Any, what: str) -> int:
    """The position of a global rank on the mesh, row-major.

    Raises:
        ArgumentError, MeshError: ``src`` is no rank of the mesh.
    """
    if isinstance(src, bool) or not hasattr(src, "__index__"):
        raise ArgumentError(f"{what} got src={src!r} of type {type(src).__name__}; expected a global rank")
    rank = operator.index(src)
    coordinate = mesh.coordinate(rank) if rank >= 0 else None
    if coordinate is None:
        raise MeshError(f"{what} got src={rank}, which is no rank of {mesh!r}; its ranks are {mesh.ranks!r}")
    return row_major(coordinate, mesh.shape.values())
