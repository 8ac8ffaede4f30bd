"""What is given to ``shard_map`` and to the functions it makes: functions, meshes, axis names, arguments."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fspmd import ArgumentError, AxisError, MeshError, P, ShapeError, device_put, psum, shard_map
from mistakes import Setting, mistake

ONES = torch.ones(8, 4)


def same(x: Tensor) -> Tensor:
    return x


@dataclass
class Batch:
    """A class that optree does not know."""

    inputs: Tensor


# --- shard_map itself -----------------------------------------------------------------------------------------------


@mistake(ArgumentError)
def not_a_function(m: Setting) -> None:
    """shard_map got the int 3 for f; give it a function: shard_map(f, mesh=mesh, in_specs=(P('x'), P()), \
    out_specs=P('x'))
    """
    m.map(3, P("x"), P("x"))


@mistake(ArgumentError)
def the_result_of_a_call(m: Setting) -> None:
    """shard_map got a tensor of shape (8, 4) for f; give it a function: shard_map(f, mesh=mesh, in_specs=(P('x'), \
    P()), out_specs=P('x'))
    """
    m.map(same(ONES), P("x"), P("x"))


@mistake(ArgumentError)
def mesh_is_a_string(m: Setting) -> None:
    """shard_map got the string 'x' for mesh; make one: make_mesh((4,), ('x',))"""
    shard_map(same, mesh="x", in_specs=P("x"), out_specs=P("x"), check_vma=m.check_vma)


@mistake(ArgumentError)
def mesh_is_a_shape(m: Setting) -> None:
    """shard_map got the tuple (4,) for mesh; make one: make_mesh((4,), ('x',))"""
    shard_map(same, mesh=(4,), in_specs=P("x"), out_specs=P("x"), check_vma=m.check_vma)


@mistake(ArgumentError)
def mesh_is_a_device_mesh(m: Setting) -> None:
    """shard_map got a DeviceMesh for mesh; make one: Mesh.from_device_mesh(mesh)"""
    mesh: Any = m.line.to_device_mesh()
    shard_map(same, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=m.check_vma)


@mistake(ArgumentError)
def axis_names_is_a_string(m: Setting) -> None:
    """shard_map got axis_names='x'; write a set of names: {'x'}"""
    m.map(same, P("x"), P("x"), axis_names="x")


@mistake(ArgumentError)
def axis_names_is_an_int(m: Setting) -> None:
    """shard_map got the int 1 for axis_names; write a set of names, such as {'x'}"""
    m.map(same, P("x"), P("x"), axis_names=1)


@mistake(ArgumentError)
def axis_names_holds_an_int(m: Setting) -> None:
    """shard_map got the int 1 in axis_names; name an axis by a string"""
    m.map(same, P("x"), P("x"), axis_names={"x", 1})


@mistake(AxisError)
def axis_names_unknown(m: Setting) -> None:
    """shard_map(same): axis_names has 'z', but mesh(x=4) has only 'x'"""
    m.map(same, P("x"), P("x"), axis_names={"x", "z"})(ONES)


@mistake(AxisError)
def axis_names_empty(m: Setting) -> None:
    """shard_map got an empty axis_names; name the axes bound in f, or leave it out for all of them"""
    m.map(same, P(), P(), axis_names=set())(ONES)


@mistake(ArgumentError)
def check_vma_is_a_string(m: Setting) -> None:
    """shard_map got the string 'no' for check_vma; expected True or False"""
    shard_map(same, mesh=m.line, in_specs=P("x"), out_specs=P("x"), check_vma="no")


# --- meshes ---------------------------------------------------------------------------------------------------------


@mistake(MeshError)
def no_mesh(m: Setting) -> None:
    """shard_map(same) has no mesh; pass mesh=make_mesh(...), or set one with set_mesh(mesh)"""
    shard_map(same, in_specs=P("x"), out_specs=P("x"), check_vma=m.check_vma)(ONES)


@mistake(MeshError)
def sharded_on_other_ranks(m: Setting) -> None:
    """shard_map(same) runs on mesh(x=2), but some arguments lie on other ranks
      * x is Sharded f32[8@x, 4] on mesh(x=4)
    move it first: device_put(device_get(x), spec, mesh=mesh)
    """
    half = m.grid["x"]
    if half.coordinate() is None:
        half = m.grid.split("y", (1, 1))[1]["x"]
    x = device_put(ONES, P("x"), mesh=m.line)
    m.map(same, P("x"), P("x"), mesh=half)(x)


@mistake(MeshError)
def two_arguments_on_two_meshes(m: Setting) -> None:
    """shard_map(add) runs on mesh(x=4), but some arguments lie on other ranks
      * y is Sharded f32[8@x, 4] on mesh(x=2)
    move it first: device_put(device_get(x), spec, mesh=mesh)
    """

    def add(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    small = m.grid["x"]
    x, y = device_put(ONES, P("x"), mesh=m.line), device_put(ONES, P("x"), mesh=small)
    m.map(add, P("x"), P("x"))(x, y)


@mistake(MeshError)
def nested_on_another_mesh(m: Setting) -> None:
    """shard_map(same) was given mesh(x=4) inside a body on mesh(x=2, y=2); a nested shard_map runs on the mesh of \
    the enclosing body: leave out mesh=
    """

    def outer(x: Tensor) -> Tensor:
        inner: Tensor = m.map(same, P("x"), P("x"), mesh=m.line)(x)
        return inner

    m.map(outer, P("y"), P("y"), mesh=m.grid, axis_names={"y"})(ONES)


@mistake(AxisError)
def nested_over_a_bound_axis(m: Setting) -> None:
    """shard_map(same): axis_names has 'x', which the enclosing body has bound; name others: 'y'"""

    def outer(x: Tensor) -> Tensor:
        inner: Tensor = m.map(same, P("x"), P("x"), mesh=m.grid, axis_names={"x"})(x)
        return inner

    m.map(outer, P("x"), P("x"), mesh=m.grid, axis_names={"x"})(ONES)


@mistake(AxisError)
def nested_with_all_axes_bound(m: Setting) -> None:
    """shard_map(same): all axes of mesh(x=4) are bound by the enclosing body; call the function without shard_map"""

    def outer(x: Tensor) -> Tensor:
        inner: Tensor = m.map(same, P("x"), P("x"))(x)
        return inner

    m.map(outer, P("x"), P("x"))(ONES)


# --- arguments of the mapped function -------------------------------------------------------------------------------


@mistake(ArgumentError)
def arguments_that_are_no_tensors(m: Setting) -> None:
    """shard_map(f): the arguments do not fit in_specs
      * rate is the float 0.1, not a tensor; pass torch.tensor(0.1), or give it None in in_specs (a static argument)
      * name is the string 'sgd', not a tensor; give it None in in_specs (a static argument)
      * data is a numpy array of shape (4,), not a tensor; pass torch.from_numpy(array), or give it None in in_specs \
    (a static argument)
      * flag is the bool True, not a tensor; pass torch.tensor(True), or give it None in in_specs (a static argument)
    """

    def f(x: Tensor, rate: float, name: str, data: Any, flag: bool) -> Tensor:
        return x

    m.map(f, P("x"), P("x"))(ONES, 0.1, "sgd", np.ones(4), True)


@mistake(ArgumentError)
def argument_of_an_unknown_class(m: Setting) -> None:
    """shard_map(f): the arguments do not fit in_specs
      * batch is a Batch, not a tensor; give it None in in_specs (a static argument), or register Batch with optree if \
    it is a tree of tensors
    """

    def f(batch: Batch) -> Tensor:
        return batch.inputs

    m.map(f, P("x"), P("x"))(Batch(ONES))


@mistake(ArgumentError)
def no_tensor_on_the_second_call(m: Setting) -> None:
    """shard_map(f): the arguments do not fit in_specs
    * y is the float 1.0, not a tensor; pass torch.tensor(1.0), or give it None in in_specs (a static argument)
    """

    def f(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    g = m.map(f, (P("x"), P("x")), P("x"))
    g(ONES, ONES)
    g(ONES, 1.0)


@mistake(ArgumentError, transports=("simulation",))
def a_simulated_block(m: Setting) -> None:
    """shard_map(same): the arguments do not fit in_specs
      * x holds the blocks of all simulated ranks: it is x.local of a Sharded, or comes from a body
    pass the Sharded itself, or a global tensor
    """
    x = device_put(ONES, P("x"), mesh=m.line)
    m.map(same, P("x"), P("x"))(x.local)


@mistake(ArgumentError)
def closed_over_sharded(m: Setting) -> None:
    """mul() was used on Sharded f32[8@x, 4] on mesh(x=4) inside shard_map(<lambda>), whose values are this rank's \
    blocks; pass it as an argument, with its spec in in_specs, instead of closing over it
    """
    w = device_put(ONES, P("x"), mesh=m.line)
    m.inside(lambda x: torch.mul(x, w))


@mistake(ArgumentError)
def closed_over_sharded_in_a_function(m: Setting) -> None:
    """matmul() was used on Sharded f32[4@x, 4] on mesh(x=4) inside shard_map(<lambda>), whose values are this \
    rank's blocks; pass it as an argument, with its spec in in_specs, instead of closing over it
    """
    w = device_put(torch.ones(4, 4), P("x"), mesh=m.line)
    m.inside(lambda x: torch.matmul(x, w))


@mistake(ArgumentError)
def closed_over_sharded_in_a_collective(m: Setting) -> None:
    """psum takes tensors and numbers
    * x is Sharded f32[8@x, 4] on mesh(x=4); pass it as an argument of the function, with its spec in in_specs
    """
    w = device_put(ONES, P("x"), mesh=m.line)
    m.inside(lambda x: psum(w, "x"))


@mistake(ArgumentError)
def sharded_in_a_function_without_a_rule(m: Setting) -> None:
    """to_sparse() has no rule for Sharded f32[8@x, 4] on mesh(x=4): it calls _to_sparse(), which has no rule; write \
    one, such as fspmd.rule(f, 'm n -> m n'), or use it in a function run by shard_map, whose values are this rank's \
    blocks, or on the global tensor, device_get(x)
    """
    device_put(ONES, P("x"), mesh=m.line).to_sparse()


@mistake(ArgumentError)
def sharded_made_another_shape(m: Setting) -> None:
    """t_() got Sharded f32[1, 8@x] on mesh(x=4), a leaf that requires grad; write y = x.t(...), or call it under \
    torch.no_grad()
    """
    device_put(torch.ones(1, 8), P(None, "x"), mesh=m.line).requires_grad_().t_()


@mistake(ArgumentError)
def sharded_of_shapes_that_do_not_fit(m: Setting) -> None:
    """@ of Sharded f32[8@x, 4] on mesh(x=4), Sharded f32[8, 4] on mesh(x=4) fails on the global tensors: a and b must \
    have same reduction dim, but got [8, 4] X [8, 4].
    """
    device_put(ONES, P("x"), mesh=m.line) @ ONES


@mistake(MeshError)
def sharded_on_two_meshes(m: Setting) -> None:
    """+ got values on two meshes, mesh(x=4) and mesh(x=2, y=2); move one with device_put"""
    device_put(ONES, P("x"), mesh=m.line) + device_put(ONES, P("x"), mesh=m.grid)


@mistake(ArgumentError)
def sharded_as_a_branch(m: Setting) -> None:
    """Sharded bool[4@x] on mesh(x=4) was used as a condition (if, while, and, or, not), but has 4 elements instead of \
    one: write x.any() or x.all()
    """
    if device_put(torch.ones(4), P("x"), mesh=m.line) > 0:
        pass


@mistake(ArgumentError)
def returned_sharded(m: Setting) -> None:
    """shard_map(<lambda>): the results do not fit out_specs
      * result is Sharded f32[8@x, 4] on mesh(x=4), but a body returns blocks
    pass it as an argument with its spec and return its block, or give it None in out_specs
    """
    w = device_put(ONES, P("x"), mesh=m.line)
    m.inside(lambda x: w)


@mistake(ArgumentError)
def sharded_into_a_nested_body(m: Setting) -> None:
    """shard_map(same): the arguments do not fit in_specs
      * x is Sharded f32[8@x, 4] on mesh(x=2, y=2), but a nested shard_map takes blocks
    pass it to the outer function, with its spec, and hand its block on
    """
    w = device_put(ONES, P("x"), mesh=m.grid)

    def outer(x: Tensor) -> Tensor:
        inner: Tensor = m.map(same, P("y"), P("y"), mesh=m.grid)(w)
        return inner

    m.map(outer, P("x"), P("x"), mesh=m.grid, axis_names={"x"})(ONES)


@mistake(ArgumentError)
def partial_with_a_wrong_keyword(m: Setting) -> None:
    """shard_map(same): functools.partial binds arguments that same does not have; leave them out"""
    m.map(functools.partial(same, y=1), P("x"), P("x"))(ONES)


@mistake(ArgumentError)
def no_in_specs(m: Setting) -> None:
    """shard_map got no in_specs, which says how values lie on the mesh: shard_map(f, mesh=mesh, in_specs=(P('x'), \
    P()), out_specs=P('x'))
    """
    shard_map(same, mesh=m.line, out_specs=P("x"))


@mistake(ShapeError)
def uneven_block_cut_again(m: Setting) -> None:
    """shard_map(inner): y has blocks of different shapes, (3, 4) and (2, 4), on different ranks, so P('y') cannot cut \
    them again; cut the whole value over all these axes in the outer map, or pad the blocks to one shape first
    """

    def inner(y: Tensor) -> Tensor:
        return y * 2

    def outer(x: Tensor) -> Tensor:
        y: Tensor = m.map(inner, P("y"), P("y"), mesh=m.grid)(x)
        return y

    m.map(outer, P("x"), P("x"), mesh=m.grid, axis_names={"x"})(torch.ones(5, 4))
