"""Attention of queries to a block of keys, on one rank; and attention as one function of autograd.

The function serves each way in which queries meet their keys. Its result is a part: attention and the logarithm of the
sums. It saves that part and its operands. The backward pass is made of differentiable functions of them, so derivatives
of any order are right.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fspmd.errors import ShapeError
from fspmd.messages import described
from fspmd.nn import block
from fspmd.nn.arguments import Block, Scale, checked
from fspmd.nn.checks import check_operands
from fspmd.nn.kernels import BlockOptions
from fspmd.nn.parts import PartGradient, PartialAttention, Triple
from fspmd.ops.traits import without_autocast
from fspmd.torch_internals import forward_ad


class Met(NamedTuple):
    """The part of all keys, and the keys and values that backward needs in the place of the operands, if others."""

    part: PartialAttention
    kept: tuple[Tensor, ...]


class Way(Protocol):
    """How queries meet keys."""

    def forward(self, operands: Triple, allowed: Any, /) -> Met:
        """The part of all keys."""

    def backward(
        self, grad: PartGradient, operands: Triple, merged: PartialAttention, allowed: Any, kept_grads: Any, /
    ) -> Any:
        """The gradients of query, key and value, wide. ``operands`` has what was kept of keys and values."""


def attention(
    way: Way,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None = None,
    sinks: Tensor | None = None,
) -> PartialAttention:
    """The part of all keys, with attention sinks [..., heads]."""
    operands = query, key, value, allowed, sinks, way
    with_tangents = forward_ad._current_level >= 0
    out, lse, *_ = _attended(*operands) if with_tangents else _Attention.apply(*operands)
    return PartialAttention(out, lse)


@without_autocast()  # which would make bfloat16 of float32
def _attended(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, sinks: Tensor | None, way: Way
) -> tuple[Tensor, ...]:
    """``out``, ``lse`` and what backward needs, by differentiable functions where tangents are taken."""
    (out, lse), kept = way.forward((query, key, value), allowed)
    if sinks is not None:
        alone, lse = lse, torch.logaddexp(lse, sinks.to(lse.dtype)[..., None])
        out = out * (alone - lse).exp()[..., None]
    return out, lse, *kept


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, sinks: Tensor | None, way: Way
    ) -> tuple[Tensor, ...]:
        return _attended(query, key, value, allowed, sinks, way)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        query, key, value, allowed, sinks, ctx.way = inputs
        out, lse, *kept = output
        ctx.save_for_backward(query, *(kept or (key, value)), allowed, sinks, out, lse)
        ctx.set_materialize_grads(False)

    @staticmethod
    @without_autocast()  # which would make bfloat16 of float32
    def backward(ctx: Any, out_grad: Tensor | None, lse_grad: Tensor | None, *kept_grads: Any) -> tuple[Any, ...]:
        query, keys, values, allowed, sinks, out, lse = ctx.saved_tensors
        grad = PartGradient(torch.zeros_like(out) if out_grad is None else out_grad, lse_grad)
        grads = ctx.way.backward(grad, (query, keys, values), PartialAttention(out, lse), allowed, kept_grads)
        sinks_grad = None
        if sinks is not None:
            sinks_grad = -((sinks[..., None] - lse).exp() * grad.sums(out)).sum(-1)
            sinks_grad = sinks_grad.sum_to_size(sinks.shape).to(sinks.dtype)
        return *(g.to(query.dtype) for g in grads), None, sinks_grad, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> Any:
        """One more dim in front."""
        dims = given[0].dim() + (in_dims[0] is None)

        def in_front(x: Tensor | None, dim: int | None, of: int) -> Tensor | None:
            """The batch dim first, and as many dims after it as ``of`` leaves."""
            if x is None or (dim is None and of < dims):
                return x
            x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x[(slice(None), *[None] * (of - x.dim()))]

        places = dims, dims, dims, dims, dims - 2
        operands = zip(given[:5], in_dims[:5], places, strict=True)
        results = _Attention.apply(*itertools.starmap(in_front, operands), given[5])
        return results, (0,) * len(results)


#: torch asks for it in each call
_Attention.forward.__signature__ = inspect.signature(_Attention.forward)  # type: ignore[attr-defined]


@checked
def attend_block(
    query: Block, key: Block, value: Block, allowed: Tensor | None = None, scale: Scale | None = None
) -> PartialAttention:
    """The attention of queries to some keys, on this rank alone. Differentiable in both results.

    Gradients have the dtype of their operands. So queries in bfloat16 that meet many blocks by calls of their own get a
    sum of rounded gradients; `ring_attention` and its relatives add them wide.

    Args:
        query: [..., heads, queries, width]
        key: [..., kv_heads, keys, width]; each of the ``kv_heads`` serves ``heads / kv_heads`` heads of queries.
        value: [..., kv_heads, keys, value_width]
        allowed: which query sees which key: bool, broadcastable to [..., 1, queries, keys]. None: all see all.
        scale: of the scores; the default is ``width ** -0.5``.

    Returns:
        the part of these keys, in float32, or float64 if the operands are.

    Raises:
        ShapeError: The shapes do not fit together.
        ArgumentError: The operands are not of one floating dtype.

    >>> out, lse = attend_block(torch.ones(2, 3, 4), torch.ones(1, 5, 4), torch.ones(1, 5, 6))
    >>> out.shape, lse.shape
    (torch.Size([2, 3, 6]), torch.Size([2, 3]))
    """
    check_operands(query, key, value, "attend_block")
    if allowed is not None:
        _check_allowed(allowed, (*query.shape[:-3], 1, query.shape[-2], key.shape[-2]))
    return attention(OneBlock(scale), query, key, value, allowed)


@dataclass(frozen=True, eq=False)
class OneBlock:
    """All keys at once. ``alone``: whether 16 bits may round the part."""

    scale: float | None
    alone: bool = False

    def forward(self, operands: Triple, allowed: Tensor | None) -> Met:
        return Met(block.forward(operands, BlockOptions(allowed, self.scale, self.alone)), ())

    def backward(
        self, grad: PartGradient, operands: Triple, merged: PartialAttention, allowed: Tensor | None, kept_grads: Any
    ) -> Triple:
        return block.backward(grad, operands, merged, BlockOptions(allowed, self.scale, self.alone))


def _check_allowed(allowed: Tensor, shape: tuple[int, ...]) -> None:
    try:
        fits = torch.broadcast_shapes(allowed.shape, shape) == torch.Size(shape)
    except RuntimeError:
        fits = False
    if not fits or allowed.dtype != torch.bool:
        raise ShapeError(
            f"attend_block got {described(allowed)} for allowed; give it bools that broadcast to "
            f"[..., 1, queries, keys], here {shape}"
        )
