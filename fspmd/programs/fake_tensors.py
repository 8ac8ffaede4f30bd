"""Fake tensors in the place of arguments and of captured tensors: shapes and strides without values."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.fake_mode import CachingFakeMode
from fspmd.programs.refusals import is_dense, not_dense
from fspmd.sharded import NODES, Sharded
from fspmd.spec import TensorSpec
from fspmd.torch_internals import (
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
)
from fspmd.transport.frame import frame
from fspmd.transport.local_tensor import blocks_of, has_overlaps, held_frame, local_tensor


def stand_ins(tree: Any, mode: CachingFakeMode, as_they_lie: bool = False) -> Any:
    """A tree with a fake tensor for each tensor, and a `Sharded` of a fake block for each `TensorSpec`.

    ``as_they_lie``: also tensors whose elements share memory keep their strides.
    """
    return optree.tree_map(lambda leaf: _stand_in(leaf, mode, as_they_lie), tree, none_is_leaf=True, namespace=NODES)


def stand_in(x: Tensor, mode: FakeTensorMode) -> Tensor:
    """The fake of a tensor in a mode. Fakes of views share memory as the views do."""
    with DisableTorchFunction():
        fake: Tensor = mode.fake_tensor_converter.from_real_tensor(mode, x)
    return fake


def _stand_in(leaf: Any, mode: CachingFakeMode, as_they_lie: bool) -> Any:
    if isinstance(leaf, TensorSpec):
        return Sharded(_block(leaf, mode), leaf)
    if isinstance(leaf, Tensor):
        if not is_dense(leaf):
            raise not_dense(leaf)
        fake = _fake_of(leaf, mode)
        return like(leaf, fake if as_they_lie else unshared(fake))
    return leaf


def like(x: Tensor, made: Tensor) -> Tensor:
    """``made``, which replaces ``x``, with the ``requires_grad`` of ``x``; a parameter if ``x`` is a parameter."""
    if isinstance(x, torch.nn.Parameter):
        return torch.nn.Parameter(made, x.requires_grad)
    return made.requires_grad_(x.requires_grad)


def unshared(x: Tensor) -> Tensor:
    """``x``, or a copy where elements share memory, so that other arguments may have the strides of the result."""
    is_strided = x.layout is torch.strided and not x.is_nested
    return x.contiguous() if is_strided and has_overlaps(x) else x


def _block(spec: TensorSpec, mode: CachingFakeMode) -> Tensor:
    """A fake of this rank's block, or of the blocks of all simulated ranks."""
    device = spec.mesh.device
    with mode:
        if spec.mesh.transport != "simulation":
            place = spec.mesh.coordinate()
            return torch.empty((0,) if place is None else spec.local_shape(place), dtype=spec.dtype, device=device)
        holders = frame(spec.mesh, spec.partition.axes | spec.partition.unreduced)
        axes = spec.mesh.axis_names
        places = [dict(zip(holders.axes, place, strict=True)) for place in holders.coordinates()]
        shapes = [spec.local_shape(tuple(place.get(axis, 0) for axis in axes)) for place in places]
        return local_tensor([torch.empty(shape, dtype=spec.dtype, device=device) for shape in shapes], holders)


def _fake_of(x: Tensor, mode: CachingFakeMode) -> Tensor:
    """The fake of a tensor. In a simulation the first block tells the memory of a value, so others get new memory."""
    blocks, held = blocks_of(x), held_frame(x)
    if held is None:
        return _fake(x, mode)
    first, *others = blocks
    if first.is_meta or any(isinstance(block, FakeTensor) or block.storage_offset() for block in others):
        return local_tensor([_fake(block, mode) for block in blocks], held)
    return local_tensor([_fake(first, mode), *map(mode.new_like, others)], held)


def _fake(x: Tensor, mode: CachingFakeMode) -> Tensor:
    """The fake of a block."""
    if isinstance(x, FakeTensor):
        return x.detach()
    if not (x.is_meta or x.is_inference()):
        return mode.from_tensor(x.detach())
    device = None if x.is_meta else x.device
    with mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
