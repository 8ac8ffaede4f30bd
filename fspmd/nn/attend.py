"""Attention of queries to a part of the keys, and how parts become the whole.

A part is a pair ``(out, lse)``: the attention to these keys alone, and the logarithm of the sum of the exponentials of
its scores. `merge` makes of the parts of two sets of keys the part of both. It is associative and commutative, and
`nothing` is its identity, so parts may come in any order and on any rank. Parts are float32, or float64 if the operands
are: with bfloat16 operands nothing is rounded between parts. The method is that of Dao et al., "FlashAttention"
(NeurIPS 2022), and of Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers" (2023).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fspmd.errors import ArgumentError, ShapeError
from fspmd.messages import described
from fspmd.ops.traits import autocasts
from fspmd.sharded import Sharded
from fspmd.torch_internals import aten_cpu_attention, aten_cpu_attention_backward

Q = ParamSpec("Q")
R = TypeVar("R")


class PartialAttention(NamedTuple):
    """The attention to some keys: ``out`` f32[..., heads, queries, width] and ``lse`` f32[..., heads, queries].

    A query that sees none of the keys has ``out`` 0 and ``lse`` -inf.
    """

    out: Tensor
    lse: Tensor


def nothing(query: Tensor, width: int) -> PartialAttention:
    """The part of no keys, for values of a width. `merge` with it changes nothing."""
    wide = query.detach().to(_wide(query))
    return PartialAttention(wide.new_zeros((*query.shape[:-1], width)), wide.new_full(query.shape[:-1], -torch.inf))


def merge(a: PartialAttention, b: PartialAttention) -> PartialAttention:
    """The part of the keys of both. The two sets of keys must have no key in common. Differentiable.

    >>> q, k, v = torch.ones(1, 1, 2), torch.eye(4, 2)[None], torch.arange(4.0).view(1, 4, 1)
    >>> first, second = attend_block(q, k[:, :1], v[:, :1]), attend_block(q, k[:, 1:], v[:, 1:])
    >>> torch.allclose(merge(first, second).out, attend_block(q, k, v).out)
    True
    """
    top = torch.maximum(a.lse, b.lse).detach()
    top = top.where(top != -torch.inf, 0)
    weight_a, weight_b = (a.lse - top).exp(), (b.lse - top).exp()
    total = weight_a + weight_b
    seen = total != 0
    total = total.where(seen, 1)
    out = a.out * (weight_a / total)[..., None] + b.out * (weight_b / total)[..., None]
    return PartialAttention(out, (top + total.log()).where(seen, -torch.inf))


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
    return PartialAttention(*_Attend.apply(query, key, value, allowed, scale))


def full_precision(function: Callable[Q, R]) -> Callable[Q, R]:
    """Run a function without autocast, which would make bfloat16 of float32."""

    @functools.wraps(function)
    def run(*args: Q.args, **kwargs: Q.kwargs) -> R:
        with ExitStack() as stack:
            for kind, _ in autocasts():
                stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **kwargs)

    return run


class _Attend(torch.autograd.Function):
    """`forward` and `backward` of one part."""

    @staticmethod
    @full_precision
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        part = forward(query, key, value, allowed, scale)
        ctx.save_for_backward(query, key, value, allowed, *part)
        ctx.scale = scale
        return part

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, out_grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, allowed, *part = ctx.saved_tensors
        grads = backward(out_grad, lse_grad, query, key, value, PartialAttention(*part), allowed, ctx.scale)
        return *(g.to(x.dtype) for g, x in zip(grads, (query, key, value), strict=True)), None, None


def check_operands(query: Tensor, key: Tensor, value: Tensor, scale: object, what: str) -> None:
    """Raise `ShapeError` or `ArgumentError` unless queries, keys, values and the scale fit together."""
    for x in (query, key, value):
        if not isinstance(x, Tensor) or isinstance(x, Sharded):
            raise ArgumentError(
                f"{what} got {described(x)}; give it tensors: in a body, the blocks of this rank (see shard_map)"
            )
    dtypes = [x.dtype for x in (query, key, value)]
    if len({*dtypes}) > 1 or not query.is_floating_point():
        raise ArgumentError(
            f"{what} got a query, key and value of {', '.join(map(str, dtypes))}; give it one floating dtype"
        )
    if scale is not None and type(scale) not in (int, float):
        raise ArgumentError(
            f"{what} got {described(scale)} for scale; give it a number, and multiply queries by tensors"
        )
    shapes = [tuple(x.shape) for x in (query, key, value)]
    fits = (
        min(x.dim() for x in (query, key, value)) >= 3
        and query.shape[-1] == key.shape[-1]
        and key.shape[:-1] == value.shape[:-1]
        and query.shape[:-3] == key.shape[:-3]
        and key.shape[-3] > 0
        and query.shape[-3] % key.shape[-3] == 0
    )
    if not fits:
        raise ShapeError(
            f"{what} got a query, key and value of shapes {', '.join(map(str, shapes))}; they must be "
            "[..., heads, queries, width], [..., kv_heads, keys, width] and [..., kv_heads, keys, value_width], with "
            "heads a multiple of kv_heads"
        )


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


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def forward(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, scale: float | None) -> PartialAttention:
    """`attend_block` without checks and without gradients."""
    if not key.shape[-2]:
        return nothing(query, value.shape[-1])
    query, key, value = (x.to(_wide(x)) for x in (query, key, value))
    if _has_kernel(query):
        return _kernel_forward(query, key, value, allowed, scale)
    scores = _scores(query, key, allowed, scale)
    top = scores.amax(-1, keepdim=True)
    top = top.where(top != -torch.inf, 0)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    out = _grouped(weights @ value[..., None, :, :]) / total.where(total != 0, 1).flatten(-4, -3)
    return PartialAttention(out, _grouped(top + total.log())[..., 0])


def backward(
    out_grad: Tensor,
    lse_grad: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    whole: PartialAttention,
    allowed: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value that come from some keys, wide.

    ``whole`` is the part of all keys that the queries see, of which these may be a few: the gradients of several sets
    of keys then add up to those of the whole.
    """
    query, key, value = (x.to(_wide(x)) for x in (query, key, value))
    out_grad = out_grad.to(query.dtype)
    lse = whole.lse.where(whole.lse != -torch.inf, torch.inf)  # a query that sees nothing has weights of 0
    if lse_grad is None and key.shape[-2] and _has_kernel(query):
        return _kernel_backward(out_grad, query, key, value, PartialAttention(whole.out, lse), allowed, scale)
    groups = key.shape[-3], query.shape[-3] // key.shape[-3]
    drop = (out_grad * whole.out).sum(-1) - (0 if lse_grad is None else lse_grad)
    out_grad = out_grad.unflatten(-3, groups)
    weights = _scores(query, key, allowed, scale).sub_(lse.unflatten(-2, groups)[..., None]).exp_()
    scores_grad = (out_grad @ value[..., None, :, :].mT).sub_(drop.unflatten(-2, groups)[..., None]).mul_(weights)
    scores_grad = scores_grad.mul_(_scale(query, scale))
    query_grad = _grouped(scores_grad @ key[..., None, :, :])
    key_grad = (scores_grad.mT @ query.unflatten(-3, groups)).sum(-3)
    return query_grad, key_grad, (weights.mT @ out_grad).sum(-3)


# --- torch's kernel for CPUs ----------------------------------------------------------------------------------------
#
# It wants four dims, as many heads of keys as of queries, values as wide as keys, and a mask of floats. It ends the
# process for no keys, and gives a query that sees no key the lse 0.


def _has_kernel(query: Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[-2] > 0


def _kernel_forward(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, scale: float | None
) -> PartialAttention:
    batch, width = query.shape[:-1], value.shape[-1]
    operands, bias = _alike(query, key, value), _bias(query, key, allowed)
    out, lse = aten_cpu_attention(*operands, attn_mask=bias, scale=_scale(query, scale))
    out, lse = out[..., :width].reshape(*batch, width), lse.reshape(batch)
    if allowed is not None:
        sees = allowed.any(-1)
        out, lse = out.where(sees[..., None], 0), lse.where(sees, -torch.inf)
    return PartialAttention(out, lse)


def _kernel_backward(
    out_grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    whole: PartialAttention,
    allowed: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    operands = _alike(query, key, value)
    shape = operands[0].shape
    out_grad, out = (F.pad(x, (0, shape[-1] - x.shape[-1])).reshape(shape) for x in (out_grad, whole.out))
    lse, bias = whole.lse.reshape(out.shape[:-1]), _bias(query, key, allowed)
    grads = aten_cpu_attention_backward(
        out_grad, *operands, out, lse, 0.0, False, attn_mask=bias, scale=_scale(query, scale)
    )
    query_grad, key_grad, value_grad = (
        g[..., : x.shape[-1]].reshape(*x.shape[:-3], query.shape[-3], *x.shape[-2:])
        for g, x in zip(grads, (query, key, value), strict=True)
    )
    groups = key.shape[-3], query.shape[-3] // key.shape[-3]
    return query_grad, key_grad.unflatten(-3, groups).sum(-3), value_grad.unflatten(-3, groups).sum(-3)


def _alike(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """The operands as [batch, heads, n, width], with zeros up to one width, and the heads of keys repeated."""
    heads, width = query.shape[-3], max(query.shape[-1], value.shape[-1])
    key, value = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (key, value))
    padded = (F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    return [x.reshape(-1, heads, *x.shape[-2:]) for x in padded]


def _bias(query: Tensor, key: Tensor, allowed: Tensor | None) -> Tensor | None:
    """The mask as numbers that are added to the scores: [batch, 1, queries, keys]."""
    if allowed is None:
        return None
    sizes = query.shape[-2], key.shape[-2]
    bias = torch.where(allowed, 0.0, -torch.inf).to(query.dtype)
    return bias.expand(*query.shape[:-3], 1, *sizes).reshape(-1, 1, *sizes)


def _scale(query: Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5) if scale is None else scale


# --- products -------------------------------------------------------------------------------------------------------


def _scores(query: Tensor, key: Tensor, allowed: Tensor | None, scale: float | None) -> Tensor:
    """The scores [..., kv_heads, heads / kv_heads, queries, keys]."""
    groups = key.shape[-3], query.shape[-3] // key.shape[-3]
    scaled: Tensor = query * _scale(query, scale)
    scores: Tensor = scaled.unflatten(-3, groups) @ key[..., None, :, :].mT
    if allowed is not None:
        hidden = ~(allowed if allowed.dim() < 3 else allowed.unsqueeze(-3))
        scores.masked_fill_(hidden, -torch.inf)
    return scores


def _grouped(x: Tensor) -> Tensor:
    """[..., kv_heads, heads / kv_heads, n, m] as [..., heads, n, m]."""
    return x.flatten(-4, -3)
