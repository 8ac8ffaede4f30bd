"""Extremes along sharded dims: maxima and minima, their places, and the k largest. Each rank contributes its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fspmd.collectives.reductions import Within, extremum
from fspmd.rules.bodies import Bodied, Body, Dim, Site, dims_of, finding, gathering, padded


def counting(size: int) -> torch.dtype:
    """Return the shortest integer dtype for the places of a dim of a size. Its greatest number stands for no place."""
    return next(dtype for dtype in (torch.uint8, torch.int32, torch.int64) if size <= torch.iinfo(dtype).max)


def limit(dtype: torch.dtype, greatest: bool) -> float:
    """Return the start of a search for the greatest (least) element: no element of the dtype is less (greater)."""
    if dtype is torch.bool:
        return not greatest
    if dtype.is_floating_point:
        return -torch.inf if greatest else torch.inf
    return torch.iinfo(dtype).min if greatest else torch.iinfo(dtype).max


def _of_all_or_a_dim(body: Body) -> Bodied:
    """Price ``max`` and ``min``: of all elements they give values, along a dim also places."""
    alone, placed = finding(1)(body), gathering(2)(body)
    return Bodied(body, lambda layout: (placed if layout.results[1:] else alone).time(layout))


def _alike(x: Tensor, top: Tensor) -> Tensor:
    """Whether each element of x equals the extreme; nan equals nan."""
    return (x == top) | (x.isnan() & top.isnan())


def extreme(site: Site, x: Tensor, dims: tuple[int, ...], greatest: bool) -> Tensor:
    """Return the extreme along dims, which are kept. Its gradient is divided evenly among all elements that attain it.

    One all-reduce of one number per row forward, and one backward.
    """
    wide = x.to(torch.uint8) if x.dtype is torch.bool else x
    ends = tuple(d for d in dims if site.has_empty(d))
    within = Within("max" if greatest else "min", dims, ends, limit(wide.dtype, greatest))
    return extremum(wide, site.over(dims), within).to(x.dtype)


def _squeezed(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    return x if keepdim else x.squeeze(dims)


def _amax(greatest: bool) -> Body:
    def body(site: Site, x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
        dims = dims_of(x, dim)
        return _squeezed(extreme(site, x, dims, greatest), dims, keepdim)

    return body


@finding(2)
def aminmax(site: Site, x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """The body of ``aminmax``: two all-reduces of one number per row forward, two backward."""
    dims = dims_of(x, dim)
    least, most = (_squeezed(extreme(site, x, dims, greatest), dims, keepdim) for greatest in (False, True))
    return torch.return_types.aminmax((least, most))


def _places(site: Site, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the global place of each element, counted along dims, in a shape that broadcasts with x."""
    places = torch.zeros((), dtype=torch.int64, device=x.device)
    for d in dims:
        size = site.operands[0].shape[d]
        shape = [1] * d + [-1] + [1] * (x.dim() - d - 1)
        places = places * size + (torch.arange(x.size(d), device=x.device) + site.offset(size, d)).view(shape)
    return places


def _along(site: Site, x: Tensor, d: int, greatest: bool) -> tuple[Tensor, Tensor]:
    """Return the first extreme along a dim, which is kept, and its global place."""
    take: Callable[..., Any] = torch.max if greatest else torch.min
    top, at = take(padded(site, x, d, limit(x.dtype, greatest)), d, keepdim=True)
    size = site.operands[0].shape[d]
    none = torch.iinfo(counting(size)).max
    at = torch.where(at < x.size(d), at + site.offset(size, d), none)
    tops, places = site.gathered((d,), top, at.to(counting(size)))
    best = take(tops, 0).values
    at = places.long().where(_alike(tops, best), none)
    first = at.min(0, keepdim=True)
    return tops.gather(0, first.indices)[0], first.values[0]


def _extreme_or_pair(greatest: bool) -> Body:
    """Return the body of ``max`` or ``min``: of all elements, or along a dim with places."""
    kind = getattr(torch.return_types, "max" if greatest else "min")

    def body(site: Site, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            return extreme(site, x, dims_of(x, None), greatest).view(())
        d = dim % x.dim()
        return kind([_squeezed(result, (d,), keepdim) for result in _along(site, x, d, greatest)])

    return body


def _place(greatest: bool) -> Body:
    """Return the body of ``argmax`` or ``argmin``."""

    def body(site: Site, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        x = x.detach()
        if dim is not None:
            d = dim % x.dim()
            return _squeezed(_along(site, x, d, greatest)[1], (d,), keepdim)
        dims = dims_of(x, None)
        top, kind = extreme(site, x, dims, greatest), counting(math.prod(site.operands[0].shape))
        none = torch.iinfo(kind).max
        at = torch.where(_alike(x, top), _places(site, x, dims), none).flatten()
        least = torch.cat([at, at.new_full((1,), none)]).amin()
        least = site.gathered(dims, least.to(kind))[0].amin(0).long()
        return least.view([1] * x.dim() if keepdim else [])

    return body


@gathering(2, each=True)
def topk(site: Site, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The body of ``topk``: each rank's k largest are gathered, with their places. Backward does not communicate."""
    d = dim % x.dim()
    size = site.operands[0].shape[d]
    shape = list(x.shape)
    shape[d] = k
    least = limit(x.dtype, largest)
    values, at = torch.topk(torch.cat([x, x.new_full(shape, least)], d), k, d, largest)
    kind = counting(size)
    at = torch.where(at < x.size(d), at + site.offset(size, d), torch.iinfo(kind).max).to(kind)
    values, at = (x.flatten(0, 1).movedim(0, d) for x in site.gathered((d,), values.movedim(d, 0), at.movedim(d, 0)))
    at, order = at.long().sort(d)
    values = values.gather(d, order)
    values, order = values.sort(dim=d, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(d, 0, k), at.gather(d, order).narrow(d, 0, k)))


#: bodies that move a few numbers per row forward, and at most one backward
EXTREMES = {
    **{name: finding(1)(_amax(name == "amax")) for name in ("amax", "amin")},
    **{name: _of_all_or_a_dim(_extreme_or_pair(name == "max")) for name in ("max", "min")},
    **{name: gathering(2)(_place(name == "argmax")) for name in ("argmax", "argmin")},
    "aminmax": aminmax,
    "topk": topk,
}
