"""A simulated value as the tensors of its ranks, and back; differentiable in every mode and any number of times.

A value may be equal along an axis and its cotangent not. The tensor of one rank is then itself a simulated value, over
the axes that are left.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fspmd.errors import ShapeError
from fspmd.torch_internals import plain_apply, transforms_active
from fspmd.tracing import note_block_use
from fspmd.transport.frame import Frame, frame_over, groups, union
from fspmd.transport.local_tensor import common_frame, frame_of, local_tensor, resolved, shards_of

_alias = torch.ops.aten.alias.default


def unbind(x: Tensor, frame: Frame) -> tuple[Tensor, ...]:
    """Returns the block of each coordinate of ``frame``."""
    apply = _Unbind.apply if transforms_active() else _apply_unbind
    return apply(x, frame)  # type: ignore[no-any-return]


def bind(shards: tuple[Tensor, ...], frame: Frame) -> Tensor:
    """Joins the blocks of all coordinates to one simulated value. Their shapes may differ, their dtypes may not."""
    kinds = {shard.dtype for shard in shards}
    if len(kinds) > 1:
        raise ShapeError(
            f"the blocks of one value have different dtypes on different ranks: {[shard.dtype for shard in shards]}; "
            "convert them to one dtype on every rank"
        )
    apply = _Bind.apply if transforms_active() else _apply_bind
    return apply(frame, *shards)  # type: ignore[no-any-return]


class _Unbind(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, frame: Frame) -> tuple[Tensor, ...]:
        whole = union(frame_of(x, frame.mesh), frame)
        note_block_use(x)
        shards = list(map(_alias, shards_of(x, whole)))
        if whole is frame:
            return tuple(shards)
        rest = frame_over(whole.mesh, frozenset(whole.axes) - frozenset(frame.axes))
        return tuple(local_tensor([shards[i] for i in members], rest) for members in groups(whole, rest.axes)[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Frame], output: Any) -> None:
        ctx.frame = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return bind(grads, ctx.frame), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> tuple[Tensor, ...]:
        return unbind(tangent, ctx.frame)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, frame: Frame) -> tuple[tuple[Tensor, ...], Any]:
        return unbind(x, frame), (in_dims[0],) * frame.volume


class _Bind(torch.autograd.Function):
    @staticmethod
    def forward(frame: Frame, *shards: Tensor) -> Tensor:
        rest = common_frame(shards, None)
        if rest is None:
            return local_tensor([resolved(shard.detach()) for shard in shards], frame)
        whole = union(frame, rest)
        blocks: dict[int, Tensor] = {}
        for shard, members in zip(shards, groups(whole, rest.axes)[1], strict=True):
            blocks.update(zip(members, shards_of(shard.detach(), rest), strict=True))
        return local_tensor([blocks[i] for i in range(whole.volume)], whole)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.frame = inputs[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return None, *unbind(g, ctx.frame)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> Tensor:
        return bind(tangents, ctx.frame)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], frame: Frame, *shards: Tensor) -> tuple[Tensor, int]:
        rows = [
            shard.unsqueeze(0).expand(info.batch_size, *shard.shape) if dim is None else shard.movedim(dim, 0)
            for shard, dim in zip(shards, in_dims[1:], strict=True)
        ]
        return bind(tuple(rows), frame), 0


_apply_unbind = plain_apply(_Unbind)
_apply_bind = plain_apply(_Bind)
