"""Arguments without values: what a program is recorded with, where nobody runs it."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.programs.facts import is_dense
from fspmd.programs.fake_results import Imagining
from fspmd.programs.impurities import not_dense
from fspmd.sharded import NODES, Sharded
from fspmd.spec import TensorSpec
from fspmd.torch_internals import (
    FAKE_KEY,
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    dispatch_mode_of,
)
from fspmd.transport.frame import frame
from fspmd.transport.local_tensor import LocalTensor


def fake_mode() -> FakeTensorMode:
    """Within it torch works out shapes alone, of what it is given too."""
    return Imagining()


def stand_ins(tree: Any, mode: FakeTensorMode) -> Any:
    """The same tree, with a fake tensor for each tensor, and a `Sharded` of one for each `TensorSpec`."""
    return optree.tree_map(lambda leaf: _stand_in(leaf, mode), tree, none_is_leaf=True, namespace=NODES)


def active_mode() -> FakeTensorMode:
    """That in which a program is recorded."""
    mode: Any = dispatch_mode_of(FAKE_KEY)
    assert mode is not None
    return mode  # type: ignore[no-any-return]


def stand_in(x: Tensor, mode: FakeTensorMode) -> Tensor:
    """What takes the place of a tensor in the mode: of views of the same memory such views, too."""
    with DisableTorchFunction():
        fake: Tensor = mode.fake_tensor_converter.from_real_tensor(mode, x)
    return fake


def _stand_in(leaf: Any, mode: FakeTensorMode) -> Any:
    if isinstance(leaf, TensorSpec):
        return Sharded(_block(leaf, mode), leaf)
    if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
        if not is_dense(leaf):
            raise not_dense(leaf)
        fake = _fake(leaf, mode)
        return torch.nn.Parameter(fake, leaf.requires_grad) if isinstance(leaf, torch.nn.Parameter) else fake
    return leaf


def _block(spec: TensorSpec, mode: FakeTensorMode) -> Tensor:
    """This rank's block, or those of all simulated ranks."""
    device = spec.mesh.device
    with mode:
        if spec.mesh.transport != "simulation":
            at = spec.mesh.coordinate()
            return torch.empty((0,) if at is None else spec.local_shape(at), dtype=spec.dtype, device=device)
        held = frame(spec.mesh, spec.partition.axes | spec.partition.unreduced)
        if not held.axes:
            return torch.empty(spec.shape, dtype=spec.dtype, device=device)
        axes = spec.mesh.axis_names
        places = [dict(zip(held.axes, at, strict=True)) for at in held.coordinates()]
        shapes = [spec.local_shape(tuple(at.get(axis, 0) for axis in axes)) for at in places]
        return LocalTensor([torch.empty(shape, dtype=spec.dtype, device=device) for shape in shapes], held)


def _fake(x: Tensor, mode: FakeTensorMode) -> Tensor:
    if type(x) is LocalTensor:
        fake: Tensor = LocalTensor([_fake(shard, mode) for shard in x.shards], x.frame)
        return fake.requires_grad_(x.requires_grad)
    if not (x.is_meta or x.is_inference()):
        return mode.from_tensor(x.detach()).requires_grad_(x.requires_grad)
    device = None if x.is_meta else x.device
    with mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).requires_grad_(x.requires_grad)
