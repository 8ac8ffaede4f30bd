"""Interpolation of sharded space: each rank fetches the rows between which its block of the result lies.

Where a place of the result lies is what torch itself makes of the rows' numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fspmd.rules.bodies import Bodied, Site, widened
from fspmd.rules.windows import block_places, fetched, moved_in_turn, passing, per_rank

#: of a number of rows, the size of the result, whether corners are aligned, and a scale
Positions = Callable[[int, int, bool, "float | None"], Tensor]


def _positions(name: str, aligned: bool, size: int, length: int, align: bool, scale: float | None) -> Tensor:
    with torch._C.DisableTorchFunction():
        rows = torch.arange(size, dtype=torch.float64)[None, None]
        resize: Any = getattr(torch.ops.aten, name).default
        places: Tensor = resize(rows, [length], align, scale) if aligned else resize(rows, [length], scale)
        return places[0, 0]


def _resized(site: Site, x: Tensor, k: int, d: int, positions: Any) -> Tensor:
    """A dim at the places that ``positions`` are, between two rows each."""
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


def _body(name: str, count: int, aligned: bool) -> Bodied:
    """Of so many trailing dims; ``aligned``: the first argument after the size says whether corners are aligned."""
    positions: Positions = functools.partial(_positions, name, aligned)

    def body(site: Site, x: Tensor, output_size: Any, *args: Any, **named: Any) -> Tensor:
        align, *given = (*args, *named.values()) if aligned else (False, *args, *named.values())
        listed = given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
        scales = [*listed, *(None,) * (count - len(listed))]
        dtype, x = x.dtype, widened(x) if aligned else x
        first = x.dim() - count
        for d in moved_in_turn(site, {first + k: str(k) for k in range(count)}):
            k = d - first
            x = _resized(site, x, k, d, lambda size, length, k=k: positions(size, length, align, scales[k]))
        return x.to(dtype) if dtype.is_floating_point or not aligned else x.round().to(dtype)

    return passing(body)


#: of the trailing dims of images: (number of them, body) by name
RESIZES = {
    **{
        f"{name}{n}d": (n, _body(f"{name}1d", n, False))
        for name in ("upsample_nearest", "_upsample_nearest_exact")
        for n in (1, 2, 3)
    },
    **{
        f"upsample_{name}{n}d": (n, _body("upsample_linear1d", n, True))
        for n, name in enumerate(("linear", "bilinear", "trilinear"), 1)
    },
}
