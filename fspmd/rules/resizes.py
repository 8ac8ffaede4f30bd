"""Interpolation along sharded dims: each rank fetches the rows that its block of the result depends on.

torch itself gives the weights of the rows. Linear interpolation of the row numbers gives the position of each place
between two rows. Cubic and antialiased interpolation of single rows gives the weight of each row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fspmd.rules.bodies import Bodied, Site, widened
from fspmd.rules.windows import block_places, fetched, lacking, moved_in_turn, per_rank
from fspmd.spec import TensorSpec
from fspmd.torch_internals import DisableTorchFunction


def _positions(name: str, aligned: bool, size: int, length: int, align: bool, scale: float | None) -> Tensor:
    with DisableTorchFunction():
        rows = torch.arange(size, dtype=torch.float64)[None, None]
        resize: Any = getattr(torch.ops.aten, name).default
        places: Tensor = resize(rows, [length], align, scale) if aligned else resize(rows, [length], scale)
        return places[0, 0]


def _resized(site: Site, x: Tensor, k: int, d: int, positions: Any) -> Tensor:
    """Interpolate a dim at ``positions``, each between two rows."""
    size, length, key = site.operands[0].shape[d], site.results[0].shape[d], str(k)
    axes, after = site.axes.get(key, ()), site.blocks(site.results[0].shape[d], key)
    places: Tensor = site.once(("places", d), lambda: positions(size, length))

    def lower(at: int) -> Tensor:
        return places[block_places(after, at)].floor().long().clamp(0, size - 1)

    def upper(at: int) -> Tensor:
        return places[block_places(after, at)].ceil().long().clamp(0, size - 1)

    def first(at: int) -> int:
        return int(lower(at)[0]) if axes and after[at][1] else 0

    def wanted(at: int) -> Tensor:
        return torch.arange(first(at), int(upper(at)[-1]) + 1) if after[at][1] else torch.arange(0)

    def take(key: str, rows: Any) -> Tensor:
        return x.index_select(d, per_rank(site, (key, d), axes, lambda at: rows(at) - first(at)))

    if axes:
        x = fetched(site, ("rows", d), x, d, axes, site.blocks(size, key), wanted)
    below = take("lower", lower)
    if site.once(("whole", d), lambda: bool((places == places.floor()).all())):
        return below
    share = per_rank(site, ("share", d), axes, lambda at: places[block_places(after, at)] - lower(at))
    share = share.to(x.dtype).view(-1, *(1,) * (x.dim() - 1 - d))
    return below * (1 - share) + take("upper", upper) * share


def _shares(name: str, size: int, length: int, align: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return, for each place of the result, the adjacent rows that it depends on, and their weights."""
    with DisableTorchFunction():
        resize: Any = getattr(torch.ops.aten, name).default
        every: Tensor = resize(torch.eye(size, dtype=torch.float64)[None, None], [length, size], align, scale, None)[
            0, 0
        ]
        places = torch.arange(size).expand_as(every)
        first, last = places.where(every != 0, size).amin(1), places.where(every != 0, -1).amax(1)
        rows = first[:, None] + torch.arange(int((last - first).max()) + 1)
        within = rows <= last[:, None]
        rows = rows.clamp(max=size - 1)
        return rows, every.gather(1, rows) * within


def _shared(site: Site, x: Tensor, k: int, d: int, shares: Any) -> Tensor:
    """Resize a dim by ``shares``: the rows that each place depends on, and their weights."""
    size, length, key = site.operands[0].shape[d], site.results[0].shape[d], str(k)
    axes, after = site.axes.get(key, ()), site.blocks(site.results[0].shape[d], key)
    rows, weights = site.once(("shares", d), lambda: shares(size, length))

    def of_block(values: Tensor, at: int) -> Tensor:
        return values[block_places(after, at)]

    def first(at: int) -> int:
        return int(of_block(rows, at).min()) if axes and after[at][1] else 0

    def new_rows(at: int) -> Tensor:
        return torch.arange(first(at), int(of_block(rows, at).max()) + 1) if after[at][1] else torch.arange(0)

    if axes:
        x = fetched(site, ("rows", d), x, d, axes, site.blocks(size, key), new_rows)
    terms = []
    for j in range(rows.shape[1]):

        def nth(at: int, j: int = j) -> Tensor:
            return of_block(rows, at)[:, j] - first(at)

        def share(at: int, j: int = j) -> Tensor:
            return of_block(weights, at)[:, j]

        row, weight = per_rank(site, ("row", d, j), axes, nth), per_rank(site, ("weight", d, j), axes, share)
        terms.append(x.index_select(d, row) * weight.to(x.dtype).view(-1, *(1,) * (x.dim() - 1 - d)))
    out: Tensor = functools.reduce(torch.add, terms)
    return out


def _body(count: int, aligned: bool, reach: int, along: Callable[..., Tensor], places: Callable[..., Any]) -> Bodied:
    """Return the body of an interpolation over ``count`` trailing dims.

    Args:
        aligned: The first argument after the size is ``align_corners``.
        reach: The number of rows before and after a place that it depends on.
        along: Interpolates one dim.
        places: Gives the positions, or rows and weights, to ``along``.
    """

    def rows(first: int, last: int, size: int, places: int) -> tuple[int, int]:
        far = reach * max(1, -(-size // places))
        return first * size // places - far, -(-last * size // places) + far

    def body(site: Site, x: Tensor, output_size: Any, *args: Any, **named: Any) -> Tensor:
        align, *given = (*args, *named.values()) if aligned else (False, *args, *named.values())
        listed = given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
        scales = [*listed, *(None,) * (count - len(listed))]
        dtype, x = x.dtype, widened(x) if aligned else x
        first = x.dim() - count
        for d in moved_in_turn(site, {first + k: str(k) for k in range(count)}):
            k = d - first
            x = along(site, x, k, d, lambda size, length, k=k: places(size, length, align, scales[k]))
        return x.to(dtype)

    return _of_floats(lacking(rows)(body)) if aligned else lacking(rows)(body)


def _of_floats(bodied: Bodied) -> Bodied:
    """Return a body that takes no integers, for which torch has other formulas."""
    return replace(bodied, time=lambda layout: bodied.time(layout) if _floats(layout.operands) else math.inf)


def _floats(specs: Sequence[TensorSpec]) -> bool:
    return specs[0].dtype.is_floating_point


#: function -> (number of trailing dims, body)
RESIZES = {
    **{
        f"{name}{n}d": (n, _body(n, False, 0, _resized, functools.partial(_positions, f"{name}1d", False)))
        for name in ("upsample_nearest", "_upsample_nearest_exact")
        for n in (1, 2, 3)
    },
    **{
        f"upsample_{name}{n}d": (
            n,
            _body(n, True, 1, _resized, functools.partial(_positions, "upsample_linear1d", True)),
        )
        for n, name in enumerate(("linear", "bilinear", "trilinear"), 1)
    },
    **{
        name: (2, _body(2, True, reach, _shared, functools.partial(_shares, name)))
        for name, reach in (("upsample_bicubic2d", 2), ("_upsample_bilinear2d_aa", 1), ("_upsample_bicubic2d_aa", 2))
    },
}
