"""What several groups share: a world of 8 ranks without communication, and samplers that run inside a body."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from timing import Sampler, loop
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import fspmd
from fspmd import P

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
