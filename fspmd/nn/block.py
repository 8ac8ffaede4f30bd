"""The attention of queries to one block of keys, and its gradients: products and sums, or a kernel of torch.

Nothing here knows of autograd. Where gradients are differentiated in turn, `backward` is products and sums alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fspmd.nn import kernels
from fspmd.nn.kernels import BlockOptions, mask_of, scale_of
from fspmd.nn.parts import PartGradient, PartialAttention, Triple, empty_part, normaliser, wide
from fspmd.torch_internals import forward_ad, transforms_active


def forward(operands: Triple, options: BlockOptions) -> PartialAttention:
    """`attend_block` without checks and without gradients."""
    query, key, value = operands
    if not key.shape[-2]:
        return empty_part(query, value.shape[-1])
    with_tangents = forward_ad._current_level >= 0  # which kernels and writes do not have
    part = None if with_tangents else kernels.forward(operands, options)
    if part is not None:
        return part
    query, key, value = (x.to(wide(x)) for x in operands)
    scores = _scores(query, key, options)
    top = scores.detach().amax(-1, keepdim=True)
    top = top.where(top != -torch.inf, 0)
    weights = (scores - top).exp() if with_tangents else scores.sub_(top).exp_()
    divisor, lse = normaliser(top, weights.sum(-1, keepdim=True))
    out = _grouped(weights @ value[..., None, :, :]) / _grouped(divisor)
    return PartialAttention(out, _grouped(lse)[..., 0])


def backward(grad: PartGradient, operands: Triple, merged: PartialAttention, options: BlockOptions) -> Triple:
    """The gradients of query, key and value that come from some keys. Those of a kernel are not wide.

    ``merged`` is the part of all keys that the queries see, of which these may be a few: the gradients of several sets
    of keys then add up to those of the whole.
    """
    lse = merged.lse.where(merged.lse != -torch.inf, torch.inf)  # a query that sees nothing has weights of 0
    followed = torch.is_grad_enabled() and any(x.requires_grad for x in (grad.out, *operands))
    if not (followed or transforms_active()) and grad.lse is None:
        gradients = kernels.backward(grad.out, operands, PartialAttention(merged.out, lse), options)
        if gradients is not None:
            return gradients
    query, key, value, out_grad = (x.to(wide(x)) for x in (*operands, grad.out))
    groups = key.shape[-3], query.shape[-3] // key.shape[-3]
    drop = PartGradient(out_grad, grad.lse).sums(merged.out)
    out_grad = out_grad.unflatten(-3, groups)
    weights = _scores(query, key, options).sub(lse.unflatten(-2, groups)[..., None]).exp_()
    scores_grad = (out_grad @ value[..., None, :, :].mT).sub(drop.unflatten(-2, groups)[..., None]).mul_(weights)
    scores_grad = scores_grad.mul_(scale_of(query, options.scale))
    query_grad = _grouped(scores_grad @ key[..., None, :, :])
    key_grad = (scores_grad.mT @ query.unflatten(-3, groups)).sum(-3)
    return query_grad, key_grad, (weights.mT @ out_grad).sum(-3)


# --- products -------------------------------------------------------------------------------------------------------


def _scores(query: Tensor, key: Tensor, options: BlockOptions) -> Tensor:
    """The scores [..., kv_heads, heads / kv_heads, queries, keys]."""
    groups = key.shape[-3], query.shape[-3] // key.shape[-3]
    scaled: Tensor = query * scale_of(query, options.scale)
    scores: Tensor = scaled.unflatten(-3, groups) @ key[..., None, :, :].mT
    seen = mask_of(options.allowed, query, key)
    if seen is not None:
        hidden = ~(seen if seen.dim() < 3 else seen.unsqueeze(-3))
        scores.masked_fill_(hidden, -torch.inf)
    return scores


def _grouped(x: Tensor) -> Tensor:
    """[..., kv_heads, heads / kv_heads, n, m] as [..., heads, n, m]."""
    return x.flatten(-4, -3)
