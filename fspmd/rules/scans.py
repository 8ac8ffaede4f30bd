"""Sums, products and extremes so far, along a sharded dim: a block's own, after what the blocks before it come to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fspmd.collectives import all_gather, axis_index
from fspmd.rules.bodies import Body, Site, gathering, widened
from fspmd.rules.extremes import counting, limit


def _before(site: Site, d: int, totals: Tensor, nothing: float) -> Tensor:
    """Of what all blocks up to each come to, that up to the one before this; ``nothing`` for the first."""
    first = torch.zeros_like(totals[:1])
    at = axis_index(site.over((d,)))
    return torch.cat([first + nothing if nothing else first, totals]).index_select(0, at[None])[0]


def _scan(
    scan: Callable[..., Tensor], fold: Callable[..., Tensor], join: Callable[..., Tensor], nothing: float
) -> Body:
    """Of elements with an associative ``join``; ``fold`` takes all along a dim, ``nothing`` changes nothing."""

    def body(site: Site, x: Tensor, dim: int, **_: Any) -> Tensor:
        d = dim % x.dim()
        dtype = site.results[0].dtype
        x = x.to(dtype)
        x = widened(x) if dtype.is_floating_point else x
        if not site.over((d,)):
            return scan(x, d).to(dtype)
        totals = scan(all_gather(fold(x, d), site.over((d,))), 0)
        return join(scan(x, d), _before(site, d, totals, nothing).unsqueeze(d)).to(dtype)

    return body


def _log_sum(a: Tensor, b: Tensor) -> Tensor:
    """``logaddexp``, whose own second derivatives are nan where a term is -inf or far above the other."""
    return torch.stack(torch.broadcast_tensors(a, b)).logsumexp(0)


def _extreme_scan(greatest: bool) -> Body:
    """Of ``cummax`` and ``cummin``: the last of equal ones, or the last nan, with its place in the whole."""
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
        short = counting(site.operands[0].shape[d] + 1)  # places counted from that of nothing, -1
        last, place = all_gather([values.narrow(d, n, 1), (at.narrow(d, n, 1) + 1).to(short)], site.over((d,)))
        place = place.long() - 1
        top, rank = scan(last, 0)
        top, place = _before(site, d, top, least), _before(site, d, place.gather(0, rank), 0)
        values, at = values.narrow(d, 1, n), at.narrow(d, 1, n)
        own = values.isnan() | (values >= top if greatest else values <= top)
        return kind([torch.where(own, values, top), torch.where(own, at, place)])

    return body


#: one gather of one number per row forward, one reduce-scatter backward
SCANS = {
    "cumsum": gathering(1, 1)(_scan(torch.cumsum, torch.sum, torch.add, 0)),
    "cumprod": gathering(1, 1)(_scan(torch.cumprod, torch.prod, torch.mul, 1)),
    "logcumsumexp": gathering(1, 1)(_scan(torch.logcumsumexp, torch.logsumexp, _log_sum, -torch.inf)),
    "cummax": gathering(2, 1)(_extreme_scan(True)),
    "cummin": gathering(2, 1)(_extreme_scan(False)),
}
