"""A Sharded in the hands of what knows only tensors: numpy, torch.func, tree functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree
import torch

from fspmd import ArgumentError, P, ShapeError, Sharded, device_put
from mistakes import Setting, mistake


def rows(m: Setting) -> Sharded:
    """Blocks of two along x."""
    x: Sharded = device_put(torch.arange(8.0), P("x"), mesh=m.line)
    return x


@mistake(ArgumentError, checked=(True,))
def array_of_sharded(m: Setting) -> None:
    """numpy was used on Sharded f32[8@x] on mesh(x=4); write it in a function run by shard_map, whose values are this \
    rank's blocks, or use it on the global tensor, device_get(x)
    """
    np.asarray(rows(m))


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
