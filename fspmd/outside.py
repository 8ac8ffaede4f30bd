"""Checks of functions that are called outside of bodies: no body runs, and there is a mesh."""

from __future__ import annotations

from fspmd.body import state
from fspmd.errors import ArgumentError, MeshError, RecordError
from fspmd.meshes.mesh import Mesh, current_mesh, mesh_advice
from fspmd.messages import described
from fspmd.tracing import is_recording, refuse_traced


def the_mesh(mesh: Mesh | None, what: str) -> Mesh:
    """Return ``mesh``, or the mesh that is set, for the function named ``what``.

    Raises:
        ArgumentError: A body runs, or ``mesh`` is not a mesh.
        MeshError: There is no mesh, or this process is not a member of it.
    """
    check_outside(what)
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ArgumentError(f"{what} got {described(mesh)} for mesh; make one: {mesh_advice(mesh)}")
    return usable_mesh(mesh, what)


def usable_mesh(mesh: Mesh | None, what: str) -> Mesh:
    """Return ``mesh``, or the mesh that is set. Raise `MeshError` without one, or where this process is no member."""
    mesh = mesh or current_mesh()
    if mesh is None:
        raise MeshError(f"{what} has no mesh; pass mesh=make_mesh(...), or set one with set_mesh(mesh)")
    check_member(mesh, what)
    return mesh


def check_outside(what: str) -> None:
    """Raise `ArgumentError` in a body, and `RecordError` while torch traces a graph."""
    refuse_traced(what)
    if state.body is not None:
        raise ArgumentError(
            f"{what} was called inside {state.body.name}, whose values are this rank's blocks; call it outside, and "
            "pass its result as an argument"
        )


def check_member(mesh: Mesh, what: str, error: Exception | None = None) -> None:
    """Raise `MeshError` in a process that is not a member of a mesh. ``error`` is its cause, if there is one."""
    if mesh.coordinate() is None:
        raise MeshError(
            f"{what}: this process is not a member of {mesh!r}; call it on members only: "
            "if mesh.coordinate() is not None: ..."
        ) from error


def refuse_recorded(what: str) -> None:
    """Raise `RecordError` while `jit` records, for the function named ``what``, which needs values."""
    if is_recording():
        raise RecordError(
            f"{what} was called within jit, where values are unknown; call it before or after the jitted function"
        )
