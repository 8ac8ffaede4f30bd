"""Extremes along sharded dims: maxima and minima, their places, the k largest; cumulative sums, products and extremes.

Each rank contributes its own. A cumulative function joins those of each block with those of earlier blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fspmd.collectives import all_gather, axis_index
from fspmd.collectives.reductions import Within, extremum
from fspmd.rules.bodies import Bodied, Body, Dim, Site, dims_of, finding, gathering, padded, widened
from fspmd.rules.factors import Factors, ShapedCall, along, elementwise


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


def max_or_min(call: ShapedCall) -> Factors:
    """The rule of ``max`` and ``min``: of all elements, along a dim, or elementwise of two operands."""
    return along(call, call.dims(1, "dim")) if len(call.shapes) == 1 else elementwise(call)


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


def _before(site: Site, d: int, totals: Tensor, neutral: float) -> Tensor:
    """Return the total of all blocks before this rank's, or ``neutral`` for the first block.

    ``totals`` has the totals up to and including each block.
    """
    first = torch.zeros_like(totals[:1])
    at = axis_index(site.over((d,)))
    return torch.cat([first + neutral if neutral else first, totals]).index_select(0, at[None])[0]


def _scan(
    scan: Callable[..., Tensor], fold: Callable[..., Tensor], join: Callable[..., Tensor], neutral: float
) -> Body:
    """Return the body of a cumulative function.

    Args:
        scan: The function on one block.
        fold: Reduces a dim.
        join: Combines two totals; it is associative.
        nothing: The neutral element of ``join``.
    """

    def body(site: Site, x: Tensor, dim: int, **_: Any) -> Tensor:
        d = dim % x.dim()
        dtype = site.results[0].dtype
        x = x.to(dtype)
        x = widened(x) if dtype.is_floating_point else x
        if not site.over((d,)):
            return scan(x, d).to(dtype)
        totals = scan(all_gather(fold(x, d), site.over((d,))), 0)
        return join(scan(x, d), _before(site, d, totals, neutral).unsqueeze(d)).to(dtype)

    return body


def _log_sum(a: Tensor, b: Tensor) -> Tensor:
    """``logaddexp``. torch's own has nan second derivatives if a term is -inf, or far above the other."""
    return torch.stack(torch.broadcast_tensors(a, b)).logsumexp(0)


def _extreme_scan(greatest: bool) -> Body:
    """Return the body of ``cummax`` or ``cummin``: the last of equal elements, or the last nan, and its place."""
    scan = torch.cummax if greatest else torch.cummin
    kind = getattr(torch.return_types, "cummax" if greatest else "cummin")

    def body(site: Site, x: Tensor, dim: int) -> Any:
        d = dim % x.dim()
        if not site.over((d,)):
            return scan(x, d)
        least = limit(x.dtype, greatest)
        shape = list(x.shape)
        shape[d] = 1
        values, at = scan(torch.cat([x.new_full(shape, least), x], d), d)  # blocks may be empty
        at = at - 1 + site.offset(site.operands[0].shape[d], d)
        n = x.size(d)
        short = counting(site.operands[0].shape[d] + 1)  # places plus one; 0 stands for no element
        last, place = all_gather([values.narrow(d, n, 1), (at.narrow(d, n, 1) + 1).to(short)], site.over((d,)))
        place = place.long() - 1
        top, rank = scan(last, 0)
        top, place = _before(site, d, top, least), _before(site, d, place.gather(0, rank), 0)
        values, at = values.narrow(d, 1, n), at.narrow(d, 1, n)
        is_extreme = values.isnan() | (values >= top if greatest else values <= top)
        return kind([torch.where(is_extreme, values, top), torch.where(is_extreme, at, place)])

    return body


#: bodies with one all-gather of one number per row forward, and one reduce-scatter backward
SCANS = {
    "cumsum": gathering(1, 1)(_scan(torch.cumsum, torch.sum, torch.add, 0)),
    "cumprod": gathering(1, 1)(_scan(torch.cumprod, torch.prod, torch.mul, 1)),
    "logcumsumexp": gathering(1, 1)(_scan(torch.logcumsumexp, torch.logsumexp, _log_sum, -torch.inf)),
    "cummax": gathering(2, 1)(_extreme_scan(True)),
    "cummin": gathering(2, 1)(_extreme_scan(False)),
}
