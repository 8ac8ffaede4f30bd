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
from fspmd.rules.windows import lacking, moved_in_turn, windowed
from fspmd.spec import TensorSpec


def _between(name: str, aligned: bool, size: int, length: int, align: bool, scale: float | None) -> list[Tensor]:
    """Return, for each place of the result, the rows before and after it, and their weights; or the row that it is."""
    every = torch.arange(size, dtype=torch.float64)[None, None]
    resize: Any = getattr(torch.ops.aten, name).default
    places: Tensor = (resize(every, [length], align, scale) if aligned else resize(every, [length], scale))[0, 0]
    below = places.floor()
    if torch.equal(places, below):
        return [below.long()[:, None].clamp(0, size - 1)]
    rows = torch.stack([below, places.ceil()], 1).long().clamp(0, size - 1)
    share = places - below
    return [rows, torch.stack([1 - share, share], 1)]


def _near(name: str, size: int, length: int, align: bool, scale: float | None) -> list[Tensor]:
    """Return, for each place of the result, the adjacent rows that it depends on, and their weights."""
    resize: Any = getattr(torch.ops.aten, name).default
    eye = torch.eye(size, dtype=torch.float64)[None, None]
    every: Tensor = resize(eye, [length, size], align, scale, None)[0, 0]
    places = torch.arange(size).expand_as(every)
    first, last = places.where(every != 0, size).amin(1), places.where(every != 0, -1).amax(1)
    rows = first[:, None] + torch.arange(int((last - first).max()) + 1)
    within = rows <= last[:, None]
    rows = rows.clamp(max=size - 1)
    return [rows, every.gather(1, rows) * within]


def _interpolated(site: Site, x: Tensor, k: int, d: int, tables: Callable[[int, int], list[Tensor]]) -> Tensor:
    split, *weights = windowed(site, str(k), x, d, tables)
    if not weights:
        return split.squeeze(d + 1)
    return (split * weights[0].to(x.dtype).view(*weights[0].shape, *(1,) * (x.dim() - 1 - d))).sum(d + 1)


def _body(count: int, aligned: bool, taps: int, tables: Callable[..., list[Tensor]]) -> Bodied:
    """Return the body of an interpolation over ``count`` trailing dims.

    Args:
        aligned: The first argument after the size is ``align_corners``.
        reach: The number of rows before and after a place that it depends on.
        tables: Gives the rows that each place depends on, and their weights.
    """

    def rows(first: int, last: int, size: int, places: int) -> tuple[int, int]:
        far = taps * max(1, -(-size // places))
        return first * size // places - far, -(-last * size // places) + far

    def body(site: Site, x: Tensor, output_size: Any, *args: Any, **named: Any) -> Tensor:
        align, *given = (*args, *named.values()) if aligned else (False, *args, *named.values())
        listed = given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
        scales = [*listed, *(None,) * (count - len(listed))]
        dtype, x = x.dtype, widened(x) if aligned else x
        first = x.dim() - count
        for d in moved_in_turn(site, {first + k: str(k) for k in range(count)}):
            k = d - first
            x = _interpolated(site, x, k, d, functools.partial(tables, align=align, scale=scales[k]))
        return x.to(dtype)

    return _of_floats(lacking(rows)(body)) if aligned else lacking(rows)(body)


def _of_floats(body: Bodied) -> Bodied:
    """Return a body that takes no integers, for which torch has other formulas."""
    return replace(body, time=lambda layout: body.time(layout) if _floats(layout.operands) else math.inf)


def _floats(specs: Sequence[TensorSpec]) -> bool:
    return specs[0].dtype.is_floating_point


#: function -> (number of trailing dims, body)
RESIZES = {
    **{
        f"{name}{n}d": (n, _body(n, False, 0, functools.partial(_between, f"{name}1d", False)))
        for name in ("upsample_nearest", "_upsample_nearest_exact")
        for n in (1, 2, 3)
    },
    **{
        f"upsample_{name}{n}d": (n, _body(n, True, 1, functools.partial(_between, "upsample_linear1d", True)))
        for n, name in enumerate(("linear", "bilinear", "trilinear"), 1)
    },
    **{
        name: (2, _body(2, True, taps, functools.partial(_near, name)))
        for name, taps in (("upsample_bicubic2d", 2), ("_upsample_bilinear2d_aa", 1), ("_upsample_bicubic2d_aa", 2))
    },
}
