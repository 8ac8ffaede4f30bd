"""Variances and normalization layers along sharded dims: the mean first, then the squared differences from it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fspmd.collectives import psum
from fspmd.rules.bodies import Body, Dim, Site, dims_of, reducing, widened


def _squared(x: Tensor) -> Tensor:
    return (x * x.conj()).real if x.is_complex() else x * x


def _mean(site: Site, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the mean over all blocks along dims, which are kept."""
    count = prod(site.operands[0].shape[d] for d in dims)
    return psum(x.sum(dims, keepdim=True), site.over(dims)) / count


def _variance(
    site: Site,
    x: Tensor,
    dim: Dim | bool = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the variance and the mean; takes the arguments of all overloads of ``torch.var``.

    For any number m, ``sum((x - m)^2) = sum((x - mean)^2) + n (mean - m)^2``. Here m is the value of the mean as a
    constant. Then the last term is zero and so is its gradient, and backward needs no sum over ranks.
    """
    if isinstance(dim, bool):
        unbiased = dim
    dims = dims_of(x, None if isinstance(dim, bool) else dim)
    x = widened(x)
    mean = _mean(site, x, dims)
    constant = mean.detach()
    count = prod(site.operands[0].shape[d] for d in dims)
    squares = psum(_squared(x - constant).sum(dims, keepdim=True), site.over(dims)) - count * _squared(mean - constant)
    variance = squares / max(count - (unbiased if correction is None else correction), 0)
    return (variance, mean) if keepdim else (variance.squeeze(dims), mean.squeeze(dims))


def root(x: Tensor, p: float = 2) -> Tensor:
    """Return the p-th root. Zeros get no gradient, as in norms of torch."""
    positive = x > 0
    safe = x.where(positive, 1)
    return torch.where(positive, safe.sqrt() if p == 2 else safe.pow(1 / p), x * 0)


def _reduction(*parts: Any) -> Body:
    def body(site: Site, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        moments = _variance(site, x, *args, **kwargs)
        outs = tuple(part(x).to(spec.dtype) for part, x, spec in zip(parts, moments, site.results, strict=False))
        return outs if len(parts) > 1 else outs[0]

    return body


def _same(x: Tensor) -> Tensor:
    return x


#: bodies with two all-reduces of one number per row forward, and none backward
MOMENTS = {
    name: reducing(2, 0)(_reduction(*parts))
    for name, parts in (("var", (_same,)), ("std", (root,)), ("var_mean", (_same, _same)), ("std_mean", (root, _same)))
}


def _inner(x: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(x.dim() - len(shape), x.dim()))


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _normalised(site: Site, x: Tensor, shape: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x normalised, the mean, and the reciprocal of the standard deviation."""
    dims = _inner(x, shape)
    x = widened(x)
    mean = _mean(site, x, dims)
    x = x - mean
    scale = torch.rsqrt(_mean(site, x * x, dims) + eps)
    return x * scale, mean, scale


@reducing(2)
def layer_norm(
    site: Site,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
    **__: Any,
) -> Tensor:
    """The body of ``layer_norm``: two all-reduces of one number per row forward, two backward."""
    return _affine(_normalised(site, x, normalized_shape, eps)[0], weight, bias).to(x.dtype)


@reducing(2)
def native_layer_norm(
    site: Site, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    """The body of ``native_layer_norm``, which also gives the mean and the reciprocal of the standard deviation."""
    out, *others = _normalised(site, x, normalized_shape, eps)
    outs = [_affine(out, weight, bias), *others]
    return tuple(result.to(spec.dtype) for result, spec in zip(outs, site.results, strict=True))


@reducing(1)
def rms_norm(
    site: Site, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """The body of ``rms_norm``: one all-reduce of one number per row forward, one backward."""
    wide = widened(x)
    mean = _mean(site, _squared(wide), _inner(x, normalized_shape))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    return _affine(wide * torch.rsqrt(mean + eps), weight, None).to(site.results[0].dtype)
