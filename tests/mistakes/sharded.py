"""Values out of their place: a Sharded in the hands of what knows only tensors, a block outside its body."""

from __future__ import annotations

from typing import Any

import optree
import torch

from fspmd import ArgumentError, MeshError, P, ShapeError, Sharded, TreeError, device_put
from mistakes import Setting, mistake


def rows(m: Setting) -> Sharded:
    """Blocks of two along x."""
    x: Sharded = device_put(torch.arange(8.0), P("x"), mesh=m.line)
    return x


@mistake(ShapeError)
def torch_vmap_over_a_mapped_function(m: Setting) -> None:
    """a tree function put a tensor of shape (3, 2) in the place of a block of shape (2,) into Sharded f32[8@x] on \
    mesh(x=4); instead of torch.vmap and torch.func use fspmd.vmap, fspmd.grad ..., or return device_get(x) from the \
    function; instead of a tree_map that changes shapes use shard_map
    """
    torch.vmap(m.map(lambda x: x * 2, P("x"), P("x")))(torch.ones(3, 8))


@mistake(ShapeError)
def torch_vmap_over_sharded(m: Setting) -> None:
    """a tree function put a tensor of shape () in the place of a block of shape (2,) into Sharded f32[8@x] on \
    mesh(x=4); instead of torch.vmap and torch.func use fspmd.vmap, fspmd.grad ..., or return device_get(x) from the \
    function; instead of a tree_map that changes shapes use shard_map
    """
    torch.vmap(m.map(lambda x: x * 2, P("x"), P("x")))(rows(m))


@mistake(ShapeError)
def torch_jacobian_of_a_mapped_function(m: Setting) -> None:
    """a tree function put a tensor of shape (8, 2) in the place of a block of shape (2,) into Sharded f32[8@x] on \
    mesh(x=4); instead of torch.vmap and torch.func use fspmd.vmap, fspmd.grad ..., or return device_get(x) from the \
    function; instead of a tree_map that changes shapes use shard_map
    """
    torch.func.jacfwd(m.map(lambda x: x * 2, P("x"), P("x")))(torch.ones(8))


@mistake(ShapeError, checked=(True,))
def sum_by_a_tree_map(m: Setting) -> None:
    """a tree function put a tensor of shape () in the place of a block of shape (2,) into Sharded f32[8@x] on \
    mesh(x=4); instead of torch.vmap and torch.func use fspmd.vmap, fspmd.grad ..., or return device_get(x) from the \
    function; instead of a tree_map that changes shapes use shard_map
    """
    sums: Any = optree.tree_map(torch.sum, {"w": rows(m)})
    sums["w"]


@mistake(TreeError)
def sharded_number_in_a_tree_map(m: Setting) -> None:
    """a tree function put Sharded f32[2] on mesh(x=4) in the place of a block into Sharded f32[2] on mesh(x=4): it \
    called its function with blocks, and one of them met a Sharded value; write tree_map(f, tree, is_leaf=lambda x: \
    isinstance(x, Sharded)), which calls f with Sharded values, however each lies
    """
    rate: Any = device_put(torch.tensor(0.5), P(), mesh=m.line)
    optree.tree_map(lambda x: rate * x, {"w": device_put(torch.ones(2), P(), mesh=m.line)})["w"]


@mistake(MeshError, transports=("simulation",))
def block_of_another_body(m: Setting) -> None:
    """blocks of a body on mesh(x=2, y=2) were used together with blocks on mesh(x=4); return them from their own \
    body, and pass the result to the other as an argument
    """
    kept: list[torch.Tensor] = []
    m.inside(lambda x: (kept.append(x), x)[1])
    m.map(lambda x: x + kept[0], P("x"), P("x"), mesh=m.grid)(torch.ones(8, 4))


@mistake(ArgumentError, checked=(True,))
def format_of_a_vector(m: Setting) -> None:
    """the format '.2f' was asked of Sharded f32[8@x] on mesh(x=4); it takes a scalar: reduce it, or format its repr"""
    f"{rows(m):.2f}"
