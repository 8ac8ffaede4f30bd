"""Softmax and related functions along sharded dims, by the maximum and the sum over all blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fspmd.collectives import pmax, psum
from fspmd.rules.bodies import Dim, Site, dims_of, padded, reducing, widened


def peak(site: Site, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the greatest element along dims, over all blocks, as a constant for autograd."""
    x = x.detach()
    x = x.real if x.is_complex() else x
    for d in dims:
        x = padded(site, x, d, -torch.inf)
    top = pmax(x.amax(dims, keepdim=True), site.over(dims))
    return top.where(top.isfinite(), 0)


def _shifted(site: Site, x: Tensor, dim: int | None, options: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return the elements less the greatest one, and the sum of their exponentials. ``options`` may have a dtype."""
    d = (0 if x.dim() in (1, 3) else 1) if dim is None else dim % x.dim()
    for option in options:
        if isinstance(option, torch.dtype):
            x = x.to(option)
    x = widened(x)
    x = x - peak(site, x, (d,))
    return x, psum(x.exp().sum(d, keepdim=True), site.over((d,)))


@reducing(2, 1)
def softmax(site: Site, x: Tensor, dim: int | None = None, *options: Any, **named: Any) -> Tensor:
    """The body of ``softmax``: two all-reduces of one number per row forward, one backward."""
    x, total = _shifted(site, x, dim, (*options, *named.values()))
    return (x.exp() / total).to(site.results[0].dtype)


@reducing(1)
def softmax_backward(site: Site, grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The gradient of `softmax`, given its result: one all-reduce of one number per row forward, one backward."""
    weighed = widened(grad) * output
    total = psum(weighed.sum(dim, keepdim=True), site.over((dim % grad.dim(),)))
    return (weighed - output * total).to(dtype)


@reducing(1)
def log_softmax_backward(site: Site, grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The same for `log_softmax`."""
    grad = widened(grad)
    total = psum(grad.sum(dim, keepdim=True), site.over((dim % grad.dim(),)))
    return (grad - output.exp() * total).to(dtype)


@reducing(2, 1)
def safe_softmax(site: Site, x: Tensor, dim: int, *options: Any, **named: Any) -> Tensor:
    """As `softmax`, but zeros where all elements are minus infinity."""
    x, total = _shifted(site, x, dim, (*options, *named.values()))
    return (x.exp() / total.where(total != 0, 1)).to(site.results[0].dtype)


@reducing(2, 1)
def log_softmax(site: Site, x: Tensor, dim: int | None = None, *options: Any, **named: Any) -> Tensor:
    """The body of ``log_softmax``: two all-reduces of one number per row forward, one backward."""
    x, total = _shifted(site, x, dim, (*options, *named.values()))
    return (x - total.log()).to(site.results[0].dtype)


@reducing(2, 0)
def logsumexp(site: Site, x: Tensor, dim: Dim, keepdim: bool = False) -> Tensor:
    """The body of ``logsumexp``: two all-reduces of one number per row forward, none backward."""
    dims = dims_of(x, dim)
    dtype = site.results[0].dtype
    x = widened(x.to(dtype))
    top = peak(site, x, dims)
    total = psum((x - top).exp().sum(dims, keepdim=True), site.over(dims)).log() + top
    return (total if keepdim else total.squeeze(dims)).to(dtype)
