"""The attention of queries to one block of keys, and its gradients: products and sums, or a kernel of torch.

Nothing here knows of autograd. Where gradients are differentiated in turn, `backward` is products and sums alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fspmd.nn.parts import PartialAttention, nothing, wide
from fspmd.torch_internals import aten_cpu_attention, aten_cpu_attention_backward, transforms_active


def forward(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, scale: float | None) -> PartialAttention:
    """`attend_block` without checks and without gradients."""
    if not key.shape[-2]:
        return nothing(query, value.shape[-1])
    query, key, value = (x.to(wide(x)) for x in (query, key, value))
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
    query, key, value = (x.to(wide(x)) for x in (query, key, value))
    out_grad = out_grad.to(query.dtype)
    lse = whole.lse.where(whole.lse != -torch.inf, torch.inf)  # a query that sees nothing has weights of 0
    followed = torch.is_grad_enabled() and any(x.requires_grad for x in (out_grad, query, key, value))
    if not (followed or transforms_active()) and lse_grad is None and key.shape[-2] and _has_kernel(query):
        return _kernel_backward(out_grad, query, key, value, PartialAttention(whole.out, lse), allowed, scale)
    groups = key.shape[-3], query.shape[-3] // key.shape[-3]
    drop = (out_grad * whole.out).sum(-1) - (0 if lse_grad is None else lse_grad)
    out_grad = out_grad.unflatten(-3, groups)
    weights = _scores(query, key, allowed, scale).sub(lse.unflatten(-2, groups)[..., None]).exp_()
    scores_grad = (out_grad @ value[..., None, :, :].mT).sub(drop.unflatten(-2, groups)[..., None]).mul_(weights)
    scores_grad = scores_grad.mul_(_scale(query, scale))
    query_grad = _grouped(scores_grad @ key[..., None, :, :])
    key_grad = (scores_grad.mT @ query.unflatten(-3, groups)).sum(-3)
    return query_grad, key_grad, (weights.mT @ out_grad).sum(-3)


# --- torch's kernel for CPUs ----------------------------------------------------------------------------------------
#
# It wants four dims, as many heads of keys as of queries, values as wide as keys, and a mask of floats. It takes rows
# for dense whatever their stride, ends the process for no keys, and gives a query that sees no key the lse 0.


def _has_kernel(query: Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[-2] > 0


def _kernel_forward(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, scale: float | None
) -> PartialAttention:
    batch, width = query.shape[:-1], value.shape[-1]
    operands, bias = _alike(query, key, value), _bias(query, key, allowed)
    out, lse = aten_cpu_attention(*operands, attn_mask=bias, scale=_scale(query, scale))
    lse = lse.to(out.dtype)  # the kernel of torch 2.11 without values says float32
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
    out_grad, out = (_padded(x, shape[-1]).reshape(shape) for x in (out_grad, whole.out))
    lse, bias = whole.lse.reshape(out.shape[:-1]), _bias(query, key, allowed)
    grads = aten_cpu_attention_backward(
        out_grad, *operands, out, lse, 0.0, False, attn_mask=bias, scale=_scale(query, scale)
    )
    query_grad, key_grad, value_grad = (
        g[..., : x.shape[-1]].reshape(*x.shape[:-3], query.shape[-3], *x.shape[-2:])
        for g, x in zip(grads, (query, key, value), strict=True)
    )
    groups = key.shape[-3], query.shape[-3] // key.shape[-3]
    if groups[1] > 1:
        key_grad, value_grad = (g.unflatten(-3, groups).sum(-3) for g in (key_grad, value_grad))
    return query_grad, key_grad, value_grad


def _alike(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """The operands as [batch, heads, n, width], with zeros up to one width, and the heads of keys repeated."""
    heads, width = query.shape[-3], max(query.shape[-1], value.shape[-1])
    if heads != key.shape[-3]:
        key, value = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (key, value))
    return [_padded(x, width).reshape(-1, heads, x.shape[-2], width) for x in (query, key, value)]


def _padded(x: Tensor, width: int) -> Tensor:
    """With zeros up to a width, and dense rows."""
    if x.shape[-1] < width:
        return F.pad(x, (0, width - x.shape[-1])).contiguous()
    return x if x.stride(-1) == 1 else x.contiguous()


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
