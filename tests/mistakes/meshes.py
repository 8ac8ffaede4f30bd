"""Meshes: shapes, names, ranks, and what is asked of them."""

from __future__ import annotations

from typing import Any

from fspmd import Mesh, MeshError, make_mesh, set_mesh
from mistakes import Setting, mistake


@mistake(MeshError)
def set_mesh_of_a_name(m: Setting) -> None:
    """set_mesh takes a mesh, or None, but got str; make one: make_mesh((4,), ('x',))"""
    set_mesh("x")


@mistake(MeshError)
def mesh_of_a_bad_shape(m: Setting) -> None:
    """make_mesh((2, 0), ('x', 'y')): every size in the shape must be at least 1, but one is 0"""
    make_mesh((2, 0), ("x", "y"))


@mistake(MeshError)
def mesh_of_floats(m: Setting) -> None:
    """make_mesh((2.0, 2), ('x', 'y')): the shape must be integers, but 2.0 is of type float"""
    make_mesh((2.0, 2), ("x", "y"))


@mistake(MeshError)
def mesh_of_one_int(m: Setting) -> None:
    """make_mesh(4, 'x'): the shape must be a tuple of integers, such as (4,), not 4"""
    make_mesh(4, "x")


@mistake(MeshError)
def mesh_with_a_bare_name(m: Setting) -> None:
    """make_mesh((4,), 'x'): axis names must be a tuple of strings, such as ('x',), not 'x'"""
    make_mesh((4,), "x")


@mistake(MeshError)
def mesh_with_names_in_one_string(m: Setting) -> None:
    """make_mesh((2, 2), 'xy'): axis names must be a tuple of strings, such as ('x', 'y'), not 'xy'"""
    make_mesh((2, 2), "xy")


@mistake(MeshError, checked=(True,))
def mesh_as_a_context(m: Setting) -> None:
    """with mesh(x=4): a mesh is set for a block by set_mesh: write with set_mesh(mesh):"""
    with m.line:
        pass


@mistake(MeshError, checked=(True,))
def coordinate_along_an_axis(m: Setting) -> None:
    """coordinate('x'): a rank is an int; the place along an axis is coordinate()[i]"""
    wrong: Any = "x"
    m.line.coordinate(wrong)


@mistake(MeshError, checked=(True,))
def concatenate_without_a_list(m: Setting) -> None:
    """concatenate(mesh(x=2), mesh(y=2)): give a list of meshes and the axis they differ along: concatenate([a, b], \
    'x')
    """
    wrong: Any = m.grid["y"]
    Mesh.concatenate(m.grid["x"], wrong)


@mistake(MeshError, checked=(True,))
def mesh_with_a_name_twice(m: Setting) -> None:
    """make_mesh((2, 2), ('x', 'x')): the axis names must differ, but 'x' would name two axes of ('x', 'x')"""
    make_mesh((2, 2), ("x", "x"))


@mistake(MeshError)
def mesh_with_too_few_names(m: Setting) -> None:
    """make_mesh((2, 2), ('x',)): 2 sizes but 1 names, give one name for each size"""
    make_mesh((2, 2), ("x",))


@mistake(MeshError)
def mesh_with_a_rank_twice(m: Setting) -> None:
    """make_mesh((4,), ('x',)): rank 1 would stand in two places, give each rank one"""
    make_mesh((4,), ("x",), ranks=(0, 1, 1, 2))


@mistake(MeshError, transports=("gloo",))
def mesh_larger_than_the_world(m: Setting) -> None:
    """make_mesh((4, 2), ('x', 'y')): 8 ranks are more than the world has, 4: start 8 processes (torchrun \
    --nproc-per-node 8), make a smaller mesh, or pass transport="simulation"
    """
    make_mesh((4, 2), ("x", "y"))


@mistake(MeshError, checked=(True,), transports=("simulation",))
def mesh_of_devices_that_are_not_there(m: Setting) -> None:
    """make_mesh((4,), ('x',)): device='xpu', but torch finds none here: leave it out, or write device="cpu\""""
    make_mesh((4,), ("x",), device="xpu")
