"""A `Sharded` whose blocks are computed where they lie, each from its place in the global tensor. Nothing moves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fspmd.entries import Flat
from fspmd.errors import ArgumentError
from fspmd.random.counter import Block, Distribution, draw
from fspmd.random.distributions import integers, normal, uniform
from fspmd.redistribution.redistribute import redistribute, viewed
from fspmd.sharded import Sharded, pair
from fspmd.spec import P, TensorSpec
from fspmd.torch_internals import VmapInterpreter, running_transforms, transforms_active
from fspmd.tracing import outside_transforms
from fspmd.transport.frame import Frame, frame
from fspmd.transport.local_tensor import local_tensor
from fspmd.transport.randomness import draw_seed
from fspmd.variance import unwrapped

_alias = torch.ops.aten.alias.default
Law = Callable[[torch.dtype], Distribution]


def fill(spec: TensorSpec, make: Callable[[Block], Tensor], device: torch.device) -> Sharded:
    """``make`` gives a block, alike on every rank that has it; of a pending sum the first rank has it, others zeros."""
    if spec.flat:  # of which no block has one place
        like = spec.partition
        entries = (None if isinstance(entry, Flat) else entry for entry in like)
        whole = spec.with_partition(P(*entries, unreduced=like.unreduced, reduced=like.reduced))
        return Sharded(redistribute(fill(whole, make, device).local, whole, spec), spec)
    if not transforms_active():
        return pair(_local(spec, make, device), spec)
    with outside_transforms():  # they would wrap each simulated rank's block, and refuse writes into what is drawn
        local = _local(spec, make, device)
    return pair(_alias(local), spec)  # as what torch makes, to be written into


class _Place(NamedTuple):
    """Where a rank's block lies; whether it is the zeros that this rank has of a pending sum."""

    block: Block
    zeros: bool


def _local(spec: TensorSpec, make: Callable[[Block], Tensor], device: torch.device) -> Tensor:
    mesh = spec.mesh
    if mesh.transport != "simulation":
        return _made(_place(spec, mesh.coordinate() or ()), spec, make, device)
    held, places = _places(spec)
    return local_tensor([_made(place, spec, make, device) for place in places], held)


def _made(place: _Place, spec: TensorSpec, make: Callable[[Block], Tensor], device: torch.device) -> Tensor:
    return torch.zeros(place.block.shape, dtype=spec.dtype, device=device) if place.zeros else make(place.block)


@functools.lru_cache(maxsize=256)
def _places(spec: TensorSpec) -> tuple[Frame, tuple[_Place, ...]]:
    """The places of all blocks of a simulation, and the frame in whose order they are."""
    mesh = spec.mesh
    held = frame(mesh, spec.partition.axes | spec.partition.unreduced)
    first = dict.fromkeys(mesh.axis_names, 0)
    full = (first | dict(zip(held.axes, coordinate, strict=True)) for coordinate in held.coordinates())
    return held, tuple(_place(spec, tuple(one.values())) for one in full)


@functools.lru_cache(maxsize=1024)
def _place(spec: TensorSpec, coordinate: tuple[int, ...]) -> _Place:
    names = zip(spec.mesh.axis_names, coordinate, strict=True)
    zeros = any(i and axis in spec.partition.unreduced for axis, i in names)
    return _Place(Block(spec.shape, spec.offset(coordinate), spec.local_shape(coordinate)), zeros)


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
    make = drawing(spec.dtype, law, device, then)  # which refuses a dtype before the generator goes on
    seed = shared_seed(generator) if key is None else key
    return fill(spec, lambda block: make(block, seed), device)


def shared_seed(generator: torch.Generator | None) -> int:
    """The seed of a new value, whose numbers all elements of a mapped function share."""
    if transforms_active():
        mapping = [one.randomness() for one in running_transforms() if isinstance(one, VmapInterpreter)]
        if any(randomness != "same" for randomness in mapping):
            raise ArgumentError(
                f"vmap with randomness={next(r for r in mapping if r != 'same')!r} maps a function that draws a "
                'Sharded, whose numbers all elements share; write randomness="same", or draw outside of the function, '
                "with one dim more, and map over that"
            )
    return draw_seed(generator)


def drawing(
    dtype: torch.dtype, law: Law, device: torch.device, then: Callable[[Tensor], Tensor] | None = None
) -> Callable[[Block, int | Tensor], Tensor]:
    """What draws a block of a seed.

    The parts of complex numbers are two independent draws, of half the variance if normal.
    """
    split = dtype.is_complex and law in (uniform, normal)
    chosen = law(dtype.to_real() if split else dtype)

    def make(block: Block, seed: int | Tensor) -> Tensor:
        if split:
            parts = Block((*block.whole, 2), (*block.offset, 0), (*block.shape, 2))
            found = torch.view_as_complex(draw(parts, chosen, seed, device))
            found = found.mul_(0.5**0.5) if law is normal else found
        else:
            found = draw(block, chosen, seed, device)
        found = found if then is None else then(found)
        return found if found.dtype is dtype else found.to(dtype)

    return make


def shuffled(n: int, seed: int | Tensor, device: torch.device) -> Tensor:
    """The integers below ``n`` in a random order, for which ``n`` keys are drawn and sorted."""
    bits = draw(Block((n,), (0,), (n,)), integers(0, 1 << 64, torch.int64), seed, device)
    return unwrapped(bits.argsort(stable=True))
