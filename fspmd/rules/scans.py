"""Cumulative sums, products and extremes along a sharded dim: each block's own, joined with those of earlier blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fspmd.collectives import all_gather, axis_index
from fspmd.rules.bodies import Body, Site, gathering, widened
from fspmd.rules.extremes import counting, limit


def _before(site: Site, d: int, totals: Tensor, nothing: float) -> Tensor:
    """Return the total of all blocks before this rank's, or ``nothing`` for the first block.

    ``totals`` has the totals up to and including each block.
    """
    first = torch.zeros_like(totals[:1])
    at = axis_index(site.over((d,)))
    return torch.cat([first + nothing if nothing else first, totals]).index_select(0, at[None])[0]


def _scan(
    scan: Callable[..., Tensor], fold: Callable[..., Tensor], join: Callable[..., Tensor], nothing: float
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
        return join(scan(x, d), _before(site, d, totals, nothing).unsqueeze(d)).to(dtype)

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
