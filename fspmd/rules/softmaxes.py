"""Softmax and its kin along a sharded dim: the maximum and the sum are taken over all blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fspmd.collectives import pmax, psum
from fspmd.rules.bodies import Site, reducing


def _peak(site: Site, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The greatest element along dims, on all ranks; of no weight in derivatives."""
    x = x.detach()
    for d in dims:
        x = torch.cat(
            [x, torch.full_like(x.narrow(d, 0, 0).sum(d, keepdim=True), -torch.inf)], d
        )  # blocks may be empty
    top = pmax(x.amax(dims, keepdim=True), site.over(dims))
    return top.where(top.isfinite(), 0)


@reducing(2)
def softmax(site: Site, x: Tensor, dim: int, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Tensor:
    """Two all-reduces of one number per row forward, one backward."""
    x = x if dtype is None else x.to(dtype)
    d = dim % x.dim()
    e = (x - _peak(site, x, (d,))).exp()
    return e / psum(e.sum(d, keepdim=True), site.over((d,)))
