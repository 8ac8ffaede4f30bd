"""The attention of queries to one block of keys, and its gradients: products and sums, or a kernel of torch.

Nothing here knows of autograd. Where gradients are differentiated in turn, `backward` is products and sums alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fspmd.nn import kernels
from fspmd.nn.kernels import Allowed, mask_of, scale_of
from fspmd.nn.parts import PartialAttention, closed, nothing, wide
from fspmd.torch_internals import forward_ad, transforms_active


def forward(
    query: Tensor, key: Tensor, value: Tensor, allowed: Allowed, scale: float | None, alone: bool = False
) -> PartialAttention:
    """`attend_block` without checks and without gradients. ``alone``: whether no other part is merged with it."""
    if not key.shape[-2]:
        return nothing(query, value.shape[-1])
    with_tangents = forward_ad._current_level >= 0  # which kernels and writes do not have
    part = None if with_tangents else kernels.forward(query, key, value, allowed, scale, alone)
    if part is not None:
        return part
    query, key, value = (x.to(wide(x)) for x in (query, key, value))
    scores = _scores(query, key, allowed, scale)
    top = scores.detach().amax(-1, keepdim=True)
    top = top.where(top != -torch.inf, 0)
    weights = (scores - top).exp() if with_tangents else scores.sub_(top).exp_()
    divisor, lse = closed(top, weights.sum(-1, keepdim=True))
    out = _grouped(weights @ value[..., None, :, :]) / _grouped(divisor)
    return PartialAttention(out, _grouped(lse)[..., 0])


def backward(
    out_grad: Tensor,
    lse_grad: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    whole: PartialAttention,
    allowed: Allowed,
    scale: float | None,
    alone: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value that come from some keys. Those of a kernel are not wide.

    ``whole`` is the part of all keys that the queries see, of which these may be a few: the gradients of several sets
    of keys then add up to those of the whole.
    """
    lse = whole.lse.where(whole.lse != -torch.inf, torch.inf)  # a query that sees nothing has weights of 0
    followed = torch.is_grad_enabled() and any(x.requires_grad for x in (out_grad, query, key, value))
    if not (followed or transforms_active()) and lse_grad is None:
        found = kernels.backward(out_grad, query, key, value, PartialAttention(whole.out, lse), allowed, scale, alone)
        if found is not None:
            return found
    query, key, value, out_grad = (x.to(wide(x)) for x in (query, key, value, out_grad))
    groups = key.shape[-3], query.shape[-3] // key.shape[-3]
    drop = (out_grad * whole.out).sum(-1) - (0 if lse_grad is None else lse_grad)
    out_grad = out_grad.unflatten(-3, groups)
    weights = _scores(query, key, allowed, scale).sub(lse.unflatten(-2, groups)[..., None]).exp_()
    scores_grad = (out_grad @ value[..., None, :, :].mT).sub(drop.unflatten(-2, groups)[..., None]).mul_(weights)
    scores_grad = scores_grad.mul_(scale_of(query, scale))
    query_grad = _grouped(scores_grad @ key[..., None, :, :])
    key_grad = (scores_grad.mT @ query.unflatten(-3, groups)).sum(-3)
    return query_grad, key_grad, (weights.mT @ out_grad).sum(-3)


# --- products -------------------------------------------------------------------------------------------------------


def _scores(query: Tensor, key: Tensor, allowed: Allowed, scale: float | None) -> Tensor:
    """The scores [..., kv_heads, heads / kv_heads, queries, keys]."""
    groups = key.shape[-3], query.shape[-3] // key.shape[-3]
    scaled: Tensor = query * scale_of(query, scale)
    scores: Tensor = scaled.unflatten(-3, groups) @ key[..., None, :, :].mT
    seen = mask_of(allowed, query, key)
    if seen is not None:
        hidden = ~(seen if seen.dim() < 3 else seen.unsqueeze(-3))
        scores.masked_fill_(hidden, -torch.inf)
    return scores


def _grouped(x: Tensor) -> Tensor:
    """[..., kv_heads, heads / kv_heads, n, m] as [..., heads, n, m]."""
    return x.flatten(-4, -3)
