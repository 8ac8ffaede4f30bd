"""What is called outside of bodies, on a mesh: which mesh that is, and that no body runs."""

from __future__ import annotations

from fspmd.body import state
from fspmd.errors import ArgumentError, MeshError
from fspmd.meshes.mesh import Mesh, current_mesh, mesh_advice
from fspmd.messages import described
from fspmd.tracing import refuse_traced


def the_mesh(mesh: Mesh | None, what: str) -> Mesh:
    check_outside(what)
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ArgumentError(f"{what} got {described(mesh)} for mesh; make one: {mesh_advice(mesh)}")
    found = mesh or current_mesh()
    if found is None:
        raise MeshError(f"{what} has no mesh; pass mesh=make_mesh(...), or set one with set_mesh(mesh)")
    check_member(found, what)
    return found


def check_outside(what: str) -> None:
    """Raise `ArgumentError` in a body, and `RecordError` while torch writes down a graph."""
    refuse_traced(what)
    if state.body is not None:
        raise ArgumentError(
            f"{what} was called inside {state.body.name}, whose values are this rank's blocks; call it outside, and "
            "pass its result as an argument"
        )


def check_member(mesh: Mesh, what: str, error: Exception | None = None) -> None:
    """Raise `MeshError` in a process outside of a mesh, where it may have come of ``error``."""
    if mesh.coordinate() is None:
        raise MeshError(
            f"{what}: this process is not a member of {mesh!r}; call it on members only: "
            "if mesh.coordinate() is not None: ..."
        ) from error
