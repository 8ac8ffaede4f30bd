"""A `Sharded` whose ranks compute their blocks, each from its place in the global tensor. Nothing moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.entries import Flat
from fspmd.errors import ArgumentError
from fspmd.meshes.mesh import Mesh
from fspmd.random.counter import Block, Distribution, draw
from fspmd.random.distributions import integers, normal, uniform
from fspmd.redistribution.redistribute import redistribute, viewed
from fspmd.sharded import Sharded, pair
from fspmd.spec import TensorSpec
from fspmd.torch_internals import running_transforms, transforms_active
from fspmd.tracing import outside_transforms
from fspmd.transport import known_values
from fspmd.transport.frame import Frame, frame_over
from fspmd.transport.local_tensor import local_tensor
from fspmd.transport.randomness import draw_seed
from fspmd.variance import unwrapped

_alias = torch.ops.aten.alias.default
Law = Callable[[torch.dtype], Distribution]


def fill(spec: TensorSpec, make: Callable[[Block], Tensor], device: torch.device) -> Sharded:
    """A value whose blocks ``make`` computes, alike on every rank that has the block.

    Of a pending sum the first rank has the value, and the other ranks have zeros.
    """
    if spec.flat:  # a block has several places
        entries = (None if isinstance(entry, Flat) else entry for entry in spec.partition)
        uncut = spec.with_partition(spec.partition.with_entries(entries))
        return Sharded(redistribute(fill(uncut, make, device).local, uncut, spec), spec)
    if not transforms_active():
        return pair(_local(spec, make, device), spec)
    with outside_transforms():  # a transform would wrap each simulated rank's block, and refuse writes into draws
        local = _local(spec, make, device)
    return pair(_alias(local), spec)  # the alias belongs to the transform, so that it can be written into


class _Place(NamedTuple):
    """The place of a rank's block, and whether the block is the zeros of a pending sum."""

    block: Block
    zeros: bool


def _local(spec: TensorSpec, make: Callable[[Block], Tensor], device: torch.device) -> Tensor:
    """This rank's block, or the blocks of a simulation."""
    mesh = spec.mesh
    if mesh.transport != "simulation":
        return _made(_place(spec, mesh.coordinate() or ()), spec, make, device)
    value_frame, places = _places(spec)
    return local_tensor([_made(place, spec, make, device) for place in places], value_frame)


def _made(place: _Place, spec: TensorSpec, make: Callable[[Block], Tensor], device: torch.device) -> Tensor:
    return torch.zeros(place.block.shape, dtype=spec.dtype, device=device) if place.zeros else make(place.block)


@cached(maxsize=256)
def _places(spec: TensorSpec) -> tuple[Frame, tuple[_Place, ...]]:
    """The frame of a value in a simulation, and the places of its blocks in the frame's order."""
    mesh = spec.mesh
    value_frame = frame_over(mesh, spec.partition.axes | spec.partition.unreduced)
    return value_frame, tuple(_place(spec, coordinate) for coordinate in value_frame.mesh_coordinates())


@cached(maxsize=1024)
def _place(spec: TensorSpec, coordinate: tuple[int, ...]) -> _Place:
    indices = zip(spec.mesh.axis_names, coordinate, strict=True)
    zeros = any(i and axis in spec.partition.unreduced for axis, i in indices)
    return _Place(Block(spec.shape, spec.offset(coordinate), spec.local_shape(coordinate)), zeros)


def drawn(
    spec: TensorSpec,
    law: Law,
    device: torch.device,
    then: Callable[[Tensor], Tensor] | None = None,
    generator: torch.Generator | None = None,
    key: Tensor | None = None,
) -> Sharded:
    """A value of random numbers. Every rank draws the elements of its block, to which ``then`` is applied.

    The numbers depend on ``key``, or on one draw of ``generator``, by default torch's own. It must be equal on all
    ranks.
    """
    if spec.flat:  # the unflattened dims have the same order of elements, and therefore the same numbers
        view = drawn(spec.unflattened, law, device, then, generator, key)
        return Sharded(viewed(view.local, view.spec, spec), spec)
    make = drawing(spec.dtype, law, device, then)  # a wrong dtype is an error before the generator advances
    seed = shared_seed(generator, spec.mesh, key)
    return fill(spec, lambda block: make(block, seed), device)


def shared_seed(generator: torch.Generator | None, mesh: Mesh, key: Tensor | None = None) -> Any:
    """The seed of a new value on a mesh, or its key. In a function that `vmap` maps, all elements share it.

    Raises:
        ArgumentError: `vmap` runs with another ``randomness`` than "same".
    """
    seed = _drawn_seed(generator) if key is None else key
    if known_values.hear is not None:
        known_values.hear(mesh, "the seed of a new value", seed)
    return seed


def _drawn_seed(generator: torch.Generator | None) -> int:
    if transforms_active():
        vmaps = [transform for transform in running_transforms() if hasattr(transform, "randomness")]
        for randomness in (transform.randomness() for transform in vmaps):
            if randomness != "same":
                raise ArgumentError(
                    f"vmap with randomness={randomness!r} maps a function that draws a Sharded, whose numbers all "
                    'elements share; write randomness="same", or draw outside of the function, with one dim more, and '
                    "map over that"
                )
    return draw_seed(generator)


def drawing(
    dtype: torch.dtype, law: Law, device: torch.device, then: Callable[[Tensor], Tensor] | None = None
) -> Callable[[Block, int | Tensor], Tensor]:
    """A function that draws a block with a seed.

    The real and the imaginary parts of complex numbers are independent draws. Normal ones have half the variance each.
    """
    split = dtype.is_complex and law in (uniform, normal)
    chosen = law(dtype.to_real() if split else dtype)

    def make(block: Block, seed: int | Tensor) -> Tensor:
        if split:
            parts = Block((*block.whole, 2), (*block.offset, 0), (*block.shape, 2))
            x = torch.view_as_complex(draw(parts, chosen, seed, device))
            x = x.mul_(0.5**0.5) if law is normal else x
        else:
            x = draw(block, chosen, seed, device)
        x = x if then is None else then(x)
        return x if x.dtype is dtype else x.to(dtype)

    return make


def shuffled(n: int, seed: int | Tensor, device: torch.device) -> Tensor:
    """The integers below ``n`` in a random order. ``n`` keys are drawn and sorted."""
    bits = draw(Block((n,), (0,), (n,)), integers(0, 1 << 64, torch.int64), seed, device)
    return unwrapped(bits.argsort(stable=True))
