"""Parts: attention to some of the keys, and how parts become the whole.

A part is a pair ``(out, lse)``: the attention to these keys alone, and the logarithm of the sum of the exponentials of
its scores. `merge` joins the parts of two sets of keys. It is associative and commutative, and
`empty_part` is its identity, so parts may come in any order and on any rank. Parts are float32, or float64 if the
operands are: with bfloat16 operands nothing is rounded between parts, except by kernels of GPUs (`fspmd.nn.kernels`).
The method is that of Dao et al., "FlashAttention" (NeurIPS 2022), and of Liu, Zaharia and Abbeel, "Ring Attention with
Blockwise Transformers" (2023).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fspmd.collectives import pmax, psum
from fspmd.errors import ArgumentError, ShapeError
from fspmd.messages import described
from fspmd.nn.arguments import checked
from fspmd.nn.checks import check_varies
from fspmd.nn.sequences import Axes


class PartialAttention(NamedTuple):
    """The attention to some keys: ``out`` f32[..., heads, queries, width] and ``lse`` f32[..., heads, queries].

    A query that sees none of the keys has ``out`` 0 and ``lse`` -inf.
    """

    out: Tensor
    lse: Tensor


#: query, key and value, or their gradients
Triple = tuple[Tensor, Tensor, Tensor]


class PartGradient(NamedTuple):
    """The gradient of a part. None stands for zeros."""

    out: Tensor
    lse: Tensor | None

    def sums(self, out: Tensor) -> Tensor:
        """The number to subtract from the gradient of each score: ``(out * out_grad).sum(-1) - lse_grad``."""
        total = (self.out * out).sum(-1)
        return total if self.lse is None else total - self.lse


@checked
def empty_part(query: Tensor, width: int) -> PartialAttention:
    """The part of no keys, for values of a width. `merge` with it changes nothing."""
    if width < 0 or query.dim() < 1 or not query.is_floating_point():
        raise ArgumentError(
            f"empty_part got {described(query)} of {query.dtype} and the width {width}; give it queries [..., heads, "
            "queries, width] of floats, and a width from 0 on"
        )
    like = query.detach().to(wide(query))
    return PartialAttention(like.new_zeros((*query.shape[:-1], width)), like.new_full(query.shape[:-1], -torch.inf))


@checked
def merge(a: PartialAttention, b: PartialAttention) -> PartialAttention:
    """The part of the keys of both. The two sets of keys must have no key in common. Differentiable.

    Raises:
        ShapeError: the parts are of other queries, or of values of other widths.

    >>> from fspmd.nn import attend_block
    >>> q, k, v = torch.ones(1, 1, 2), torch.eye(4, 2)[None], torch.arange(4.0).view(1, 4, 1)
    >>> first, second = attend_block(q, k[:, :1], v[:, :1]), attend_block(q, k[:, 1:], v[:, 1:])
    >>> torch.allclose(merge(first, second).out, attend_block(q, k, v).out)
    True
    """
    if a.out.shape != b.out.shape or a.lse.shape != b.lse.shape:
        raise ShapeError(
            f"merge got parts with out {tuple(a.out.shape)} and {tuple(b.out.shape)}; give it two parts of the same "
            "queries, and of values of one width"
        )
    top = torch.maximum(a.lse, b.lse).detach()
    top = top.where(top != -torch.inf, 0)
    weight_a, weight_b = (a.lse - top).exp(), (b.lse - top).exp()
    total, lse = normaliser(top, weight_a + weight_b)
    out = a.out * (weight_a / total)[..., None] + b.out * (weight_b / total)[..., None]
    return PartialAttention(out, lse)


def shares(lse: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The share of each of several parts along a dim, and the ``lse`` of all. All may be -inf, in derivatives too."""
    top = lse.detach().amax(dim, keepdim=True)
    top = top.where(top != -torch.inf, 0)
    weights = (lse - top).exp()
    total, lse_of_all = normaliser(top, weights.sum(dim, keepdim=True))
    return weights / total, lse_of_all.squeeze(dim)


def normaliser(top: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """The divisor of a sum of weights ``exp(score - top)``, and its ``lse``; 1 and -inf where no key is seen."""
    seen = total != 0
    divisor = total.where(seen, 1)
    return divisor, (top + divisor.log()).where(seen, -torch.inf)


@checked
def merge_over(part: PartialAttention, axis: Axes) -> PartialAttention:
    """In a body, the part of the keys of all ranks of an axis, on each of them: what `merge` makes of their parts.

    Communication: a `pmax` of ``lse`` and a `psum` of as many numbers as the part has.

    Raises:
        VarianceError: the part is equal on all ranks of an axis, as one that was merged already.

    >>> from fspmd import P, make_mesh, shard_map
    >>> from fspmd.nn import attend_block
    >>> q, k, v = torch.ones(1, 1, 2), torch.eye(4, 2)[None], torch.arange(4.0).view(1, 4, 1)
    >>> call = shard_map(lambda k, v: merge_over(attend_block(q, k, v), "cp").out, mesh=make_mesh((4,), ("cp",)),
    ...                  in_specs=P(None, "cp"), out_specs=P())
    >>> torch.allclose(call(k, v).local, attend_block(q, k, v).out)
    True
    """
    check_varies("merge_over", axis, "a part", *part)
    top = pmax(part.lse.detach(), axis)
    top = top.where(top != -torch.inf, 0)
    weight = (part.lse - top).exp()
    out, total = psum((part.out * weight[..., None], weight), axis)
    divisor, lse = normaliser(top, total)
    return PartialAttention(out / divisor[..., None], lse)


def wide(x: Tensor) -> torch.dtype:
    """The dtype of the parts of operands: float32, or float64 if they are."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32
