"""A `Sharded` whose blocks are computed where they lie, each from its place in the global tensor. Nothing moves."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fspmd.counter import Block, Distribution, draw
from fspmd.distributions import normal
from fspmd.sharded import Sharded
from fspmd.spec import TensorSpec
from fspmd.transport.frame import frame
from fspmd.transport.local_tensor import local_tensor

Law = Callable[[torch.dtype], Distribution]


def fill(spec: TensorSpec, make: Callable[[Block], Tensor], device: torch.device) -> Sharded:
    """``make`` gives a block, alike on every rank that has it; of a pending sum the first rank has it, others zeros."""
    mesh = spec.mesh
    if mesh.transport != "simulation":
        return Sharded(_at(spec, mesh.coordinate() or (), make, device), spec)
    held = frame(mesh, spec.partition.axes | spec.partition.unreduced)
    blocks = []
    for coordinate in held.coordinates():
        full = dict.fromkeys(mesh.axis_names, 0) | dict(zip(held.axes, coordinate, strict=True))
        blocks.append(_at(spec, tuple(full.values()), make, device))
    return Sharded(local_tensor(blocks, held), spec)


def _at(spec: TensorSpec, coordinate: tuple[int, ...], make: Callable[[Block], Tensor], device: torch.device) -> Tensor:
    shape = spec.local_shape(coordinate)
    names = zip(spec.mesh.axis_names, coordinate, strict=True)
    if any(i and axis in spec.partition.unreduced for axis, i in names):
        return torch.zeros(shape, dtype=spec.dtype, device=device)
    return make(Block(spec.shape, spec.offset(coordinate), shape))


def drawn(
    spec: TensorSpec, law: Law, seed: int, device: torch.device, then: Callable[[Tensor], Tensor] | None = None
) -> Sharded:
    """Every rank draws its block's elements; ``then`` makes of them what is wanted.

    The parts of complex numbers are two independent draws, of half the variance if normal.
    """
    dtype = spec.dtype.to_real() if spec.dtype.is_complex else spec.dtype

    def make(block: Block) -> Tensor:
        if spec.dtype.is_complex:
            parts = Block((*block.whole, 2), (*block.offset, 0), (*block.shape, 2))
            found = torch.view_as_complex(draw(parts, law(dtype), seed, device))
            found = found.mul_(0.5**0.5) if law is normal else found
        else:
            found = draw(block, law(dtype), seed, device)
        return then(found).to(spec.dtype) if then is not None else found

    return fill(spec, make, device)
