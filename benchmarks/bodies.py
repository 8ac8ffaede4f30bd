"""What several groups share: a world of 8 ranks without communication, and samplers that run inside a body."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from timing import Sampler, loop
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fspmd
from fspmd import P
from fspmd.entries import entry_axes

RANKS = 8

#: makes, from the block that a body gets, what is to be timed
Statement = Callable[[Tensor], Callable[[], object]]
Timer = Callable[[Callable[[], object], int], float]


def fake_world(ranks: int = RANKS) -> None:
    """This process as rank 0 of many, on torch's ``fake`` backend: calls cost what they cost, and move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def inside(
    mesh: fspmd.Mesh, x: fspmd.Sharded, statement: Statement, *, check_vma: bool, timed: Timer = loop
) -> Sampler:
    """The sampler of a call inside a body over the axis "x", which gets ``x`` sharded by its first dim."""
    taken: list[float] = []

    def body(block: Tensor, number: int) -> Tensor:
        taken.append(timed(statement(block), number))
        return block

    mapped = fspmd.shard_map(body, mesh=mesh, in_specs=(P("x"), None), out_specs=P("x"), check_vma=check_vma)

    def sample(number: int) -> float:
        mapped(x, number)
        return taken.pop()

    return sample


def sharded(mesh: fspmd.Mesh, *block_shape: int) -> fspmd.Sharded:
    """Random numbers sharded over "x", of which this process has one block, or in a simulation all."""
    shape = (block_shape[0] * mesh.size, *block_shape[1:])
    if mesh.transport == "simulation":
        whole: fspmd.Sharded = fspmd.device_put(torch.randn(shape), P("x"), mesh=mesh)
        return whole
    return fspmd.Sharded(torch.randn(block_shape), fspmd.TensorSpec(mesh, P("x"), shape, torch.float32))


@dataclass(frozen=True, slots=True)
class World:
    """The same mesh for us and for DTensor."""

    ours: fspmd.Mesh
    theirs: DeviceMesh


@dataclass(frozen=True, slots=True)
class Pair:
    """One value three times: this rank's block, and the global tensor for us and for DTensor."""

    plain: Tensor
    ours: fspmd.Sharded
    theirs: DTensor


#: of a mesh of one, two and three axes
SIZES = {1: (RANKS,), 2: (RANKS // 2, 2), 3: (RANKS // 4, 2, 2)}


def meshes(axes: int) -> World:
    """Eight ranks on so many axes, "x", "y" and "z"."""
    names = ("x", "y", "z")[:axes]
    device_mesh = init_device_mesh("cpu", SIZES[axes], mesh_dim_names=names)
    return World(fspmd.make_mesh(SIZES[axes], names, device="cpu"), device_mesh)


def pair(world: World, spec: P, block_shape: tuple[int, ...], *, grad: bool = False) -> Pair:
    """Random numbers; DTensor has no reduced values, and has them replicated."""
    block = torch.randn(block_shape, requires_grad=grad)
    cuts = [entry_axes(entry) for entry in spec] + [()] * (len(block_shape) - len(spec))
    sizes = world.ours.shape
    shape = tuple(n * prod(sizes[axis] for axis in axes) for n, axes in zip(block_shape, cuts, strict=True))
    ours = fspmd.TensorSpec(world.ours, spec, shape, torch.float32)
    theirs = DTensor.from_local(block.detach(), world.theirs, placements(world, spec), run_check=False)
    return Pair(block, fspmd.Sharded(block.detach().requires_grad_(grad), ours), theirs.requires_grad_(grad))


def placements(world: World, spec: P) -> list[Placement]:
    """A spec in the terms of DTensor."""
    dim_of = {axis: dim for dim, entry in enumerate(spec) for axis in entry_axes(entry)}
    return [
        Shard(dim_of[axis]) if axis in dim_of else Partial() if axis in spec.unreduced else Replicate()
        for axis in world.ours.axis_names
    ]
