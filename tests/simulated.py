"""What tests of simulated ranks share: meshes, local tensors, and running a function in a body."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd import Mesh, P, device_put, make_mesh, shard_map, typeof
from fspmd.transport.frame import Frame, frame_over
from fspmd.transport.local_tensor import shards_of

F64 = torch.float64
SHARDED = P("x")
MESH = make_mesh((4,), ("x",), transport="simulation")
GRID = make_mesh((2, 3), ("x", "y"), transport="simulation")
CUBE = make_mesh((2, 3, 2), ("x", "y", "z"), transport="simulation")


def simulated(*shape: int, seed: int = 0) -> Tensor:
    """A local tensor of four ranks, outside any body."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * shape[0], *shape[1:], generator=generator, dtype=F64)
    return device_put(x, P("x"), mesh=MESH).local


def shards(x: Tensor, held: Frame | None = None) -> list[Tensor]:
    return shards_of(x.detach(), held or frame_over(MESH, ("x",)))


def layouts(mesh: Mesh, dims: int) -> list[P]:
    """Every partition of a tensor: each axis on a dim, in every order there, nowhere, unreduced or reduced."""
    found = set()
    places = [*range(dims), None, "unreduced", "reduced"]
    for order in itertools.permutations(mesh.axis_names):
        for at in itertools.product(places, repeat=len(order)):
            on = [tuple(axis for axis, place in zip(order, at, strict=True) if place == dim) for dim in range(dims)]
            words = {w: {a for a, p in zip(order, at, strict=True) if p == w} for w in ("unreduced", "reduced")}
            found.add(P(*on, **words))
    return sorted(found, key=repr)


def run(f: Callable[..., Any], *args: Any, mesh: Any = MESH, specs: Any = SHARDED, check_vma: bool = True) -> Any:
    """What ``f`` returns in a body, as it is there."""
    kept = []

    def body(*xs: Any) -> Tensor:
        kept.append(f(*xs))
        return torch.zeros(())

    shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)(*args)
    return kept[0]


def types(out: Any) -> set[str]:
    """The letters and axes of every tensor of a result, such as ``{V:x}``; empty for an invariant one."""
    leaves = [leaf for leaf in optree.tree_leaves(out) if isinstance(leaf, Tensor)]
    return {repr(typeof(leaf).variance) for leaf in leaves}


def typed(f: Callable[..., Any], *args: Any, mesh: Any = MESH, specs: Any) -> set[str]:
    return run(lambda *xs: types(f(*xs)), *args, mesh=mesh, specs=specs)
