"""Attention of queries to a block of keys, on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fspmd.errors import ShapeError
from fspmd.messages import described
from fspmd.nn import block
from fspmd.nn.attention import Met, attention
from fspmd.nn.checks import check_operands
from fspmd.nn.parts import PartialAttention


def attend_block(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None = None, scale: float | None = None
) -> PartialAttention:
    """The attention of queries to some keys, on this rank alone. Differentiable in both results.

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
    check_operands(query, key, value, scale, "attend_block")
    if allowed is not None:
        _check_allowed(allowed, (*query.shape[:-3], 1, query.shape[-2], key.shape[-2]))
    return attention(OneBlock(scale), query, key, value, allowed)


@dataclass(frozen=True, eq=False)
class OneBlock:
    """All keys at once. ``alone``: whether 16 bits may round the part."""

    scale: float | None
    alone: bool = False

    def forward(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None) -> Met:
        return Met(block.forward(query, key, value, allowed, self.scale, self.alone), ())

    def backward(
        self,
        out_grad: Tensor,
        lse_grad: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        whole: PartialAttention,
        allowed: Tensor | None,
        kept_grads: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return block.backward(out_grad, lse_grad, query, key, value, whole, allowed, self.scale, self.alone)


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
