"""Putting values on a mesh and taking them off."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fspmd import (
    ArgumentError,
    MeshError,
    P,
    ShapeError,
    Sharded,
    SpecError,
    TensorSpec,
    TreeError,
    device_get,
    device_put,
    from_callback,
    from_local,
    typeof,
)
from mistakes import Setting, mistake

ONES = torch.ones(8, 4)


@mistake(ArgumentError, checked=(True,))
def put_an_int(m: Setting) -> None:
    """device_put: the tree does not fit its specs
    * tree is the int 3; write torch.tensor(3), or give it None in specs to leave it as it is
    """
    device_put(3, P(), mesh=m.line)


@mistake(ArgumentError, checked=(True,))
def put_several_wrong_leaves(m: Setting) -> None:
    """device_put: the tree does not fit its specs
    * tree['data'] is a numpy array of shape (3,); write torch.from_numpy(array)
    * tree['rate'] is the float 0.1; write torch.tensor(0.1), or give it None in specs to leave it as it is
    * tree['sizes'][0] is the int 1; write torch.tensor(1), or give it None in specs to leave it as it is
    """
    device_put({"w": ONES, "rate": 0.1, "data": np.ones(3), "sizes": [1, ONES]}, P(), mesh=m.line)


@mistake(SpecError, checked=(True,))
def put_spec_too_long(m: Setting) -> None:
    """device_put: the tree does not fit its specs
      * tree['b'] of shape (4,): P(None, 'x') has 2 entries, but the value has 1 dim; give one entry per dim, for \
    example P('x')
    """
    device_put({"w": ONES, "b": torch.ones(4)}, P(None, "x"), mesh=m.line)


@mistake(SpecError, checked=(True,))
def put_unknown_axis(m: Setting) -> None:
    """device_put: the tree does not fit its specs
    * tree of shape (8, 4): P('y') names the axis 'y', but mesh(x=4) has only 'x'
    """
    device_put(ONES, P("y"), mesh=m.line)


@mistake(TreeError, checked=(True,))
def put_spec_is_a_string(m: Setting) -> None:
    """device_put: specs does not match the tree
    * specs is the string 'x'; write P('x')
    """
    device_put(ONES, "x", mesh=m.line)


@mistake(TreeError, checked=(True,))
def put_wrong_keys(m: Setting) -> None:
    """device_put: specs does not match the tree
      * tree has the key 'b', specs has not
      * specs has the key 'bias', tree has not
    give each leaf a P of its own, or one P to a whole subtree
    """
    device_put({"w": ONES, "b": ONES}, {"w": P("x"), "bias": P()}, mesh=m.line)


@mistake(MeshError, checked=(True,))
def put_without_mesh(m: Setting) -> None:
    """device_put has no mesh; pass mesh=make_mesh(...), or set one with set_mesh(mesh)"""
    device_put(ONES, P("x"))


@mistake(ArgumentError, checked=(True,))
def put_on_no_mesh(m: Setting) -> None:
    """device_put got the string 'x' for mesh; make one: make_mesh((4,), ('x',))"""
    device_put(ONES, P("x"), mesh="x")


@mistake(TreeError, checked=(True,))
def put_arguments_swapped(m: Setting) -> None:
    """device_put: specs does not match the tree
    * specs is a Mesh; expected a P such as P('x'), or None for a static value
    """
    device_put(ONES, m.line, mesh=m.line)


@mistake(ShapeError, checked=(True,))
def local_of_a_wrong_shape(m: Setting) -> None:
    """from_local got the spec f32[8@x] on mesh(x=4), but the blocks of all ranks make f32[12@x] on mesh(x=4); pass \
    blocks of its shape, or a P to have the global shape inferred
    """
    from_local(torch.ones(3), TensorSpec(m.line, P("x"), (8,), torch.float32))


@mistake(ArgumentError, checked=(True,))
def local_is_a_list(m: Setting) -> None:
    """from_local got the list [1.0, 2.0] for local; expected this rank's block, a tensor"""
    from_local([1.0, 2.0], P("x"), mesh=m.line)


@mistake(SpecError, checked=(True,))
def local_spec_is_a_string(m: Setting) -> None:
    """from_local: expected a P such as P('x'), but got the string 'x'"""
    from_local(ONES, "x", mesh=m.line)


@mistake(SpecError, checked=(True,))
def local_spec_too_long(m: Setting) -> None:
    """from_local of blocks with 1 dim: P('x', None) has 2 entries, but the value has 1 dim; give one entry per dim, \
    for example P('x')
    """
    from_local(torch.ones(3), P("x", None), mesh=m.line)


@mistake(MeshError, checked=(True,))
def local_without_mesh(m: Setting) -> None:
    """from_local has no mesh; pass mesh=make_mesh(...), or set one with set_mesh(mesh)"""
    from_local(ONES, P("x"))


@mistake(ShapeError, checked=(True,))
def callback_of_a_wrong_shape(m: Setting) -> None:
    """from_callback: at x=0 the callback returned a tensor of shape (8,), but the block of f32[8@x] on mesh(x=4) has \
    shape (2,) there; of a global tensor return x[index]
    """
    from_callback((8,), P("x"), lambda index: torch.ones(8), mesh=m.line)


@mistake(ShapeError, checked=(True,))
def callback_of_a_wrong_kind(m: Setting) -> None:
    """from_callback: at x=0 the callback returned no tensor, but the block of f32[8@x] on mesh(x=4) has shape (2,) \
    there; of a global tensor return x[index]
    """
    from_callback((8,), P("x"), lambda index: np.ones(2), mesh=m.line)


@mistake(ArgumentError, checked=(True,))
def callback_is_a_tensor(m: Setting) -> None:
    """from_callback got a tensor of shape (8,) for fn; give it a function of a tuple of slices"""
    from_callback((8,), P("x"), torch.ones(8), mesh=m.line)


@mistake(ArgumentError, checked=(True,))
def callback_shape_is_an_int(m: Setting) -> None:
    """from_callback got the int 8 for shape; give it the global shape, such as (8, 4)"""
    from_callback(8, P("x"), lambda index: torch.ones(2), mesh=m.line)


@mistake(SpecError, checked=(True,))
def callback_spec_too_long(m: Setting) -> None:
    """from_callback: a tensor of shape (8,): P('x', None) has 2 entries, but the value has 1 dim; give one entry \
    per dim, for example P('x')
    """
    from_callback((8,), P("x", None), lambda index: torch.ones(2), mesh=m.line)


@mistake(ArgumentError, checked=(True,))
def sharded_with_a_partition(m: Setting) -> None:
    """Sharded(local, spec) got a P for spec; it takes a TensorSpec: for a P write from_local(local, P(...), \
    mesh=mesh)
    """
    Sharded(ONES, P("x"))


@mistake(ArgumentError, checked=(True,))
def typeof_a_number(m: Setting) -> None:
    """typeof takes a tensor or a Sharded, but got the int 3"""
    typeof(3)


@mistake(ArgumentError, checked=(True,))
def callback_that_is_differentiated(m: Setting) -> None:
    """from_callback: the callback returned a tensor that requires grad, but no gradient goes back through \
    from_callback; return block.detach(), or use device_put, which is differentiable
    """
    w = torch.ones(8, 4, requires_grad=True)
    from_callback((8, 4), P("x"), lambda index: w[index] * 2, mesh=m.line)


@mistake(ShapeError, checked=(True,))
def coordinate_of_a_wrong_length(m: Setting) -> None:
    """the coordinate (0, 1) has 2 entries, but mesh(x=4) has 1; give one index per axis, as mesh.coordinate() does"""
    TensorSpec(m.line, P("x"), (8,), torch.float32).local_shape((0, 1))


@mistake(ShapeError, checked=(True,))
def coordinate_outside_the_mesh(m: Setting) -> None:
    """the coordinate (0, 2) lies outside mesh(x=2, y=2); give each axis an index from 0 to its size less 1, as \
    mesh.coordinate() does
    """
    TensorSpec(m.grid, P(("x", "y")), (8,), torch.float32).offset((0, 2))


@mistake(ShapeError, checked=(True,))
def coordinate_that_is_a_number(m: Setting) -> None:
    """a spec got the int 1 for a coordinate; give it mesh.coordinate()"""
    wrong: Any = 1
    TensorSpec(m.line, P("x"), (8,), torch.float32).local_shape(wrong)


@mistake(MeshError, checked=(True,))
def spec_without_a_mesh(m: Setting) -> None:
    """TensorSpec got None for mesh; make one: make_mesh((4,), ('x',))"""
    wrong: Any = None
    TensorSpec(wrong, P("x"), (8,), torch.float32)


@mistake(ShapeError, checked=(True,))
def spec_of_a_negative_size(m: Setting) -> None:
    """TensorSpec got the tuple (-1, 4) for shape; give it the global shape: TensorSpec(mesh, P('x'), (8, 4), \
    torch.float32)
    """
    TensorSpec(m.line, P("x"), (-1, 4), torch.float32)


@mistake(SpecError, checked=(True,))
def spec_of_a_named_dtype(m: Setting) -> None:
    """TensorSpec got the string 'float32' for dtype; give it one of torch: TensorSpec(mesh, P('x'), (8, 4), \
    torch.float32)
    """
    wrong: Any = "float32"
    TensorSpec(m.line, P("x"), (8, 4), wrong)


@mistake(ArgumentError)
def put_inside_a_body(m: Setting) -> None:
    """device_put was called inside shard_map(<lambda>), whose values are this rank's blocks; call it outside, and \
    pass its result as an argument
    """
    m.inside(lambda x: device_put(x, P("x"), mesh=m.line))


@mistake(ArgumentError)
def get_inside_a_body(m: Setting) -> None:
    """device_get was called inside shard_map(<lambda>), whose values are this rank's blocks; call it outside, and \
    pass its result as an argument
    """
    w: Any = device_put(ONES, P("x"), mesh=m.line)
    m.inside(lambda x: x + device_get(w)[:2])


@mistake(SpecError, checked=(True,))
def mesh_in_place_of_specs(m: Setting) -> None:
    """device_put got a Mesh for specs; write device_put(tree, P('x'), mesh=mesh), where specs are the axes that cut \
    each dim, and mesh has the devices
    """
    device_put(ONES, m.line)


@mistake(ArgumentError, checked=(True,))
def put_a_module(m: Setting) -> None:
    """device_put: the tree does not fit its specs
    * tree['all'] is a generator; write list(...)
    * tree['layer'] is a Linear; write dict(module.named_parameters())
    """
    layer = torch.nn.Linear(2, 2)
    device_put({"layer": layer, "all": layer.parameters()}, P(), mesh=m.line)


@mistake(ArgumentError, checked=(True,), transports=("simulation",))
def put_the_blocks_of_all_ranks(m: Setting) -> None:
    """device_put: the tree does not fit its specs
      * tree holds the blocks of all simulated ranks: it is x.local of a Sharded, or comes from a body
    pass the Sharded itself, or a global tensor
    """
    x: Any = device_put(ONES, P("x"), mesh=m.line)
    device_put(x.local, P("x"), mesh=m.line)
