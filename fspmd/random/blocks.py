"""A `Sharded` whose blocks are computed where they lie, each from its place in the global tensor. Nothing moves."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fspmd.entries import Flat
from fspmd.random.counter import Block, Distribution, draw
from fspmd.random.distributions import integers, normal, uniform
from fspmd.redistribution.redistribute import redistribute, viewed
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec
from fspmd.tracing import outside_transforms
from fspmd.transport.frame import frame
from fspmd.transport.local_tensor import local_tensor
from fspmd.transport.randomness import draw_seed
from fspmd.variance import unwrapped

_transforms_active = torch._C._are_functorch_transforms_active
_alias = torch.ops.aten.alias.default
Law = Callable[[torch.dtype], Distribution]


def fill(spec: TensorSpec, make: Callable[[Block], Tensor], device: torch.device) -> Sharded:
    """``make`` gives a block, alike on every rank that has it; of a pending sum the first rank has it, others zeros."""
    if spec.flat:  # of which no block has one place
        like = spec.partition
        entries = (None if isinstance(entry, Flat) else entry for entry in like)
        whole = spec.with_partition(P(*entries, unreduced=like.unreduced, reduced=like.reduced))
        return Sharded(redistribute(fill(whole, make, device).local, whole, spec), spec)
    with outside_transforms():  # they would wrap each simulated rank's block, and refuse writes into what is drawn
        local = _local(spec, make, device)
    return Sharded(_alias(local) if _transforms_active() else local, spec)  # as what torch makes, to be written into


def _local(spec: TensorSpec, make: Callable[[Block], Tensor], device: torch.device) -> Tensor:
    mesh = spec.mesh
    if mesh.transport != "simulation":
        return _at(spec, mesh.coordinate() or (), make, device)
    held = frame(mesh, spec.partition.axes | spec.partition.unreduced)
    blocks = []
    for coordinate in held.coordinates():
        full = dict.fromkeys(mesh.axis_names, 0) | dict(zip(held.axes, coordinate, strict=True))
        blocks.append(_at(spec, tuple(full.values()), make, device))
    return local_tensor(blocks, held)


def _at(spec: TensorSpec, coordinate: tuple[int, ...], make: Callable[[Block], Tensor], device: torch.device) -> Tensor:
    shape = spec.local_shape(coordinate)
    names = zip(spec.mesh.axis_names, coordinate, strict=True)
    if any(i and axis in spec.partition.unreduced for axis, i in names):
        return torch.zeros(shape, dtype=spec.dtype, device=device)
    return make(Block(spec.shape, spec.offset(coordinate), shape))


def drawn(
    spec: TensorSpec,
    law: Law,
    device: torch.device,
    then: Callable[[Tensor], Tensor] | None = None,
    generator: torch.Generator | None = None,
    key: Tensor | None = None,
) -> Sharded:
    """Every rank draws its block's elements, and ``then`` makes of them what is wanted.

    They follow from ``key``, or from one draw of ``generator``, by default torch's own; all ranks have the same.
    """
    if spec.flat:  # elements that are in the same order, and so the same numbers
        view = drawn(spec.unflattened, law, device, then, generator, key)
        return Sharded(viewed(view.local, view.spec, spec), spec)
    _chosen(law, spec.dtype)  # which refuses a dtype before the generator goes on
    return fill(spec, drawing(spec.dtype, law, draw_seed(generator) if key is None else key, device, then), device)


def _chosen(law: Law, dtype: torch.dtype) -> tuple[Distribution, bool]:
    """The law of a dtype; and whether that of complex numbers has two parts to draw."""
    split = dtype.is_complex and law in (uniform, normal)
    return law(dtype.to_real() if split else dtype), split


def drawing(
    dtype: torch.dtype,
    law: Law,
    seed: int | Tensor,
    device: torch.device,
    then: Callable[[Tensor], Tensor] | None = None,
) -> Callable[[Block], Tensor]:
    """What draws a block. The parts of complex numbers are two independent draws, of half the variance if normal."""
    chosen, split = _chosen(law, dtype)

    def make(block: Block) -> Tensor:
        if split:
            parts = Block((*block.whole, 2), (*block.offset, 0), (*block.shape, 2))
            found = torch.view_as_complex(draw(parts, chosen, seed, device))
            found = found.mul_(0.5**0.5) if law is normal else found
        else:
            found = draw(block, chosen, seed, device)
        return (then(found) if then is not None else found).to(dtype)

    return make


def shuffled(n: int, seed: int | Tensor, device: torch.device) -> Tensor:
    """The integers below ``n`` in a random order, for which ``n`` keys are drawn and sorted."""
    bits = draw(Block((n,), (0,), (n,)), integers(0, 1 << 64, torch.int64), seed, device)
    return unwrapped(bits.argsort(stable=True))
