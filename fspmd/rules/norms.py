"""Vector norms, products and counts along sharded dims: the results of all ranks' blocks, combined."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.collectives import pmax, psum
from fspmd.collectives.reductions import product
from fspmd.rules.bodies import (
    Bodied,
    Body,
    BodyLayout,
    Dim,
    Site,
    dims_of,
    finding,
    gathering,
    is_followed,
    reducing,
    widened,
)
from fspmd.rules.extremes import extreme
from fspmd.rules.variances import root


def _power(x: Tensor, p: float) -> Tensor:
    """Return ``x ** p`` of absolute values. Zeros get no gradient."""
    if p in (1, 2):
        return x if p == 1 else x * x
    nonzero = x != 0
    powers = x.where(nonzero, 1).pow(p)
    return powers.where(nonzero, 0 if p >= 0 else torch.inf)


@reducing(1, 0)
def vector_norm(
    site: Site, x: Tensor, ord: float = 2, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The body of vector norms: one all-reduce of one number per row forward, none backward.

    A norm of infinite order is an `extreme`.
    """
    dims = dims_of(x, dim)
    x = widened(x if dtype is None else x.to(dtype)).abs()
    if math.isinf(ord):
        norm = extreme(site, x, dims, ord > 0)
    else:
        norm = psum(_power(x, ord).sum(dims, keepdim=True), site.over(dims))
        if ord not in (0, 1):
            norm = root(norm, ord) if ord > 0 else norm.pow(1 / ord)
    return (norm if keepdim else norm.squeeze(dims)).to(site.results[0].dtype)


#: names of the ways to compute distances, by the number that aten has for each
_CDIST_MODES: Final = ("use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist")


@reducing(1, 0, each=True)
def distances(site: Site, x: Tensor, y: Tensor, p: float, mode: int | None) -> Tensor:
    """The body of ``cdist``: one all-reduce of one number per pair of rows forward, none backward."""
    return _added_up(site, torch.cdist(x, y, p, _CDIST_MODES[mode or 0]), p)


@reducing(1, 0, each=True)
def distances_within(site: Site, x: Tensor, p: float = 2) -> Tensor:
    """The body of ``pdist``: the same for the rows of one matrix."""
    return _added_up(site, torch.pdist(x, p), p)


def _added_up(site: Site, own: Tensor, p: float) -> Tensor:
    """Return distances, given those along the columns of this rank's block."""
    if p == 0:
        return psum(own, site.over(("k",)))
    powers = psum(_power(own, p), site.over(("k",)))
    return powers if p == 1 else root(powers, p)


def _prod(site: Site, x: Tensor, dim: int | None = None, keepdim: bool = False, **_: Any) -> Tensor:
    """The body of ``prod``: one all-reduce of one number per row.

    With a gradient it is one all-gather forward, and nothing backward.
    """
    dtype = site.results[0].dtype
    x = x.to(dtype)
    if dtype.is_floating_point:
        x = widened(x)
    dims = dims_of(x, dim)
    own = x.prod() if dim is None else x.prod(dim, keepdim)
    if dtype.is_complex or is_followed(x):
        return site.gathered(dims, own)[0].prod(0).to(dtype)
    return product(own, site.over(dims)).to(dtype)


def _reduced(layout: BodyLayout) -> float:
    """Return the µs of `_prod` without gradients: an all-reduce, or for complex numbers an all-gather."""
    price = gathering(1) if layout.operands[0].dtype.is_complex else reducing(1)
    return price(_prod).time(layout)


def _gathered(layout: BodyLayout) -> float:
    """Return the µs that gradients add: those of the all-gather in place of the all-reduce."""
    return gathering(1)(_prod).time(layout) - _reduced(layout)


prod = Bodied(_prod, _reduced, _gathered)


def _counted(how: str) -> Body:
    """Return the body of ``any`` or ``all``: one all-reduce of one byte per row."""

    def body(site: Site, x: Tensor, dim: Dim = None, keepdim: bool = False, **_: Any) -> Tensor:
        dims = dims_of(x, dim)
        hits = x == 0 if how == "all" else x != 0
        some = pmax(hits.any(dims, keepdim=keepdim).to(torch.uint8), site.over(dims))
        return (some == 0 if how == "all" else some > 0).to(site.results[0].dtype)

    return body


COUNTS = {name: finding(1, 0)(_counted(name)) for name in ("any", "all")}
