"""Pools and resizes along sharded dims: each rank fetches the rows that its block of the result depends on.

A pool pads at the ends. For a resize torch itself gives the weights of the rows. Linear interpolation of the row
numbers gives the position of each place between two rows. Cubic and antialiased interpolation of single rows gives the
weight of each row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.rules.bodies import Bodied, Site, widened
from fspmd.rules.convolutions import each, near, own_rows, window_rows, windows
from fspmd.rules.extremes import limit
from fspmd.rules.factors import NO_RULE, Factors, Rule, ShapedCall, match, parse
from fspmd.rules.windows import lacking, moved_in_turn, passing, per_rank, windowed
from fspmd.spec import TensorSpec


def pooled(count: int, *, added: bool = False, dilated: bool | None = None) -> Rule:
    """Return the rule of a pool over ``count`` trailing dims.

    Args:
        added: If the result has size 1 along a dim, ranks may add up their parts: a pending sum.
        dilated: The call names its windows by size, stride and padding, and if true by dilation. None: it does not.
    """

    def rule(call: ShapedCall) -> Factors:
        if call.ndim < count:
            return NO_RULE
        summed = [added and size == 1 for size in call.results[0][-count:]]
        after = "... " + " ".join("1" if summed[k] else f"[{k}]" for k in range(count))
        before = "... " + " ".join(f"[{k}]" for k in range(count))
        factors = match(parse(f"{before} -> {', '.join([after] * len(call.results))}"), call.shapes)
        factors = factors._replace(summed=frozenset(factors.names[str(k)] for k in range(count) if summed[k]))
        if dilated is None:
            return factors
        kernel = each(call.argument(1, "kernel_size"), count)
        stride, padding = call.argument(2, "stride") or kernel, call.argument(3, "padding", 0)
        dilation = call.argument(4, "dilation", 1) if dilated else 1
        return factors._replace(near=near(factors, call, kernel, stride, padding, dilation))

    return rule


def _of_dim(x: Tensor, d: int, values: Tensor) -> Tensor:
    """Reshape values along a dim so that they broadcast with x."""
    return values.view(-1, *(1,) * (x.dim() - 1 - d))


class _Pool:
    """One call: its windows along the ``count`` trailing dims of the operand. A 1-d pool runs as a 2-d one."""

    def __init__(self, site: Site, x: Tensor, count: int, window: Sequence[Any]) -> None:
        kernel, stride, *others = window
        self.site, self.count = site, count
        self.window = [each(v, count) for v in (kernel, stride if stride or stride == 0 else kernel, *others)]
        self.padded = list(self.window[2])  # padding that torch's pool adds; along cut dims `fetch` adds it
        self.cut = {k: x.dim() - count + k for k in range(count) if site.axes.get(str(k))}

    def along(self, k: int) -> tuple[int, int, int, int]:
        """Return size, stride, padding and dilation along a dim."""
        kernel, stride, padding, dilation = (values[k] for values in self.window)
        return kernel, stride, padding, dilation

    def fetch(self, x: Tensor, empty: float | None) -> Tensor:
        """Return the rows that the windows cover, with ``empty`` beyond the ends (None: zeros)."""
        for k, d in self.cut.items():
            x = windows(self.site, str(k), x, d, self.along(k))
            self.padded[k] = 0
            size, after = (spec.shape[d] for spec in (self.site.operands[0], self.site.results[0]))
            if empty is not None and (self.window[2][k] or after * self.window[1][k] + self.window[0][k] > size):
                rows = functools.partial(window_rows, self.site.blocks(after, str(k)), size, self.along(k))
                beyond = functools.partial(_beyond, rows)
                outside = per_rank(self.site, ("outside", d), self.site.axes[str(k)], beyond)
                x = x.masked_fill(_of_dim(x, d, outside), empty)
        return x

    def arguments(self) -> list[list[int]]:
        """Return the window for torch's pool; for a 1-d pool with a neutral dim before it."""
        return [[neutral, *v] if self.count == 1 else v for neutral, v in zip((1, 1, 0, 1), self._given(), strict=True)]

    def _given(self) -> list[list[int]]:
        return [self.window[0], self.window[1], self.padded, self.window[3]]

    def leave(self, out: Tensor) -> Tensor:
        """Return a result without the windows of empty blocks."""
        for k in self.cut:
            out = own_rows(self.site, str(k), out, out.dim() - self.count + k)
        return out

    def firsts(self, k: int) -> Tensor:
        """Return the global place at which each window of this rank's block begins."""
        d = self.site.results[0].ndim - self.count + k
        cut = self.site.blocks(self.site.results[0].shape[d], str(k))
        stride, padding = self.window[1][k], self.window[2][k]

        def begins(at: int) -> Tensor:
            start, length = cut[at]
            return torch.arange(start, start + max(length, 1)) * stride - padding

        return per_rank(self.site, ("firsts", d), self.site.axes.get(str(k), ()), begins)


def _beyond(rows: Any, at: int) -> Tensor:
    is_outside: Tensor = rows(at) < 0
    return is_outside


def avg_pool(count: int) -> Bodied:
    """Return the body of average pools over ``count`` dims."""
    function = (torch.ops.aten.avg_pool2d, torch.ops.aten.avg_pool2d, torch.ops.aten.avg_pool3d)[count - 1].default

    def body(
        site: Site,
        x: Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        pool = _Pool(site, x, count, (kernel_size, stride, padding, 1))
        alike = divisor_override or (not any(pool.window[2]) and not ceil_mode and math.prod(pool.window[0]))
        dtype = x.dtype
        x = pool.fetch(widened(x), None)
        wide = x.unsqueeze(-2) if count == 1 else x
        kernels, strides, pads, _ = pool.arguments()
        out: Tensor = function(wide, kernels, strides, pads, ceil_mode, True, alike or 1)
        out = out.squeeze(-2) if count == 1 else out
        for k in range(0 if alike else count):
            d = x.dim() - count + k
            size, beyond = site.operands[0].shape[d], pool.window[2][k] if count_include_pad else 0
            first = pool.firsts(k)
            covered = (first + kernels[k - count]).clamp(max=size + beyond) - first.clamp(min=-beyond)
            out = torch.div(out, _of_dim(out, d, covered), rounding_mode=None if dtype.is_floating_point else "trunc")
        return pool.leave(out).to(dtype)

    return passing(body)


def max_pool(count: int, *, places: bool = True) -> Bodied:
    """Return the body of max pools over ``count`` dims; ``places``: with the global places of the maxima."""
    functions = torch.ops.aten.max_pool2d_with_indices, torch.ops.aten.max_pool3d_with_indices
    function = functions[count // 3].default

    def body(
        site: Site,
        x: Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        **_: Any,
    ) -> Any:
        pool = _Pool(site, x, count, (kernel_size, stride, padding, dilation))
        x = pool.fetch(x, limit(x.dtype, True))
        out, at = function(x.unsqueeze(-2) if count == 1 else x, *pool.arguments(), ceil_mode)
        if not places:
            return pool.leave(out.squeeze(-2))
        total = torch.zeros_like(at)
        for k in reversed(range(count)):  # the last dim runs fastest
            d = x.dim() - count + k
            place = at % x.shape[d]
            if k in pool.cut:
                place = place + pool.firsts(k)[0]
                place = place.where(place >= 0, place % pool.window[3][k])  # the window has only the least number
            total = total + place * math.prod(site.operands[0].shape[d + 1 :])
            at = at // x.shape[d]
        return pool.leave(out), pool.leave(total)

    return passing(body)


# --- adaptive pools: windows that divide a dim among a number of places -----------------------------------------------


def _shares(size: int, parts: int) -> list[Tensor]:
    """Return the rows of each window, and the windows' first rows, and lengths.

    Windows differ by one or two in length. `_left_out` masks the rows after the end of a shorter window.
    """
    places = torch.arange(parts)
    first, last = places * size // parts, -(-(places + 1) * size // parts)
    longest = int((last - first).max()) if parts else 1
    return [first[:, None] + torch.arange(longest).minimum((last - first - 1)[:, None]), first, last - first]


def _left_out(split: Tensor, lengths: Tensor, d: int) -> Tensor:
    beyond = torch.arange(split.shape[d + 1], device=split.device) >= lengths[:, None]
    return beyond.view(-1, split.shape[d + 1], *(1,) * (split.dim() - 2 - d))


def _shared(first: int, last: int, size: int, places: int) -> tuple[int, int]:
    """Return the range of rows of the windows of some places."""
    return first * size // places, -(-last * size // places)


def _shared_but_for_one(first: int, last: int, size: int, places: int) -> tuple[int, int]:
    """The same, but a single place needs no rows of others: each rank adds its own."""
    return (0, 0) if places == 1 else _shared(first, last, size, places)


def adaptive_avg(count: int) -> Bodied:
    """Return the body of adaptive average pools. Along a dim of one place, ranks add up their rows in a pending sum."""

    def body(site: Site, x: Tensor, output_size: Any) -> Tensor:
        dtype, x = x.dtype, widened(x)
        for k in range(count):
            d = x.dim() - count + k
            if site.results[0].shape[d] == 1:
                x = x.sum(d, keepdim=True) / site.operands[0].shape[d]
                continue
            split, _, lengths = windowed(site, str(k), x, d, _shares)
            x = split.masked_fill(_left_out(split, lengths, d), 0).sum(d + 1) / _of_dim(x, d, lengths)
        return x.to(dtype)

    return lacking(_shared_but_for_one)(body)


def adaptive_max(count: int) -> Bodied:
    """Return the body of adaptive max pools, with the global places of the maxima."""

    def body(site: Site, x: Tensor, output_size: Any, **_: Any) -> Any:
        at: Tensor | None = None
        for k in reversed(range(count)):
            d = x.dim() - count + k
            split, begins, lengths = windowed(site, str(k), x, d, _shares)
            x, best = torch.max(split.masked_fill(_left_out(split, lengths, d), limit(x.dtype, True)), d + 1)
            place = (best + _of_dim(best, d, begins)) * math.prod(site.operands[0].shape[d + 1 :])
            if at is not None:
                inner = windowed(site, str(k), at, d, _shares)[0]
                place = place + inner.gather(d + 1, best.unsqueeze(d + 1)).squeeze(d + 1)
            at = place
        return (x, at) if len(site.results) > 1 else x

    return lacking(_shared)(body)


# --- resizes: interpolation -------------------------------------------------------------------------------------------


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


#: rules of resizes, by the number of dims
_TEXTS: Final = {
    1: "... [0] -> ... [0]",
    2: "... [0] [1] -> ... [0] [1]",
    3: "... [0] [1] [2] -> ... [0] [1] [2]",
}
#: function -> (rule, body)
RESIZES = {
    **{
        f"{name}{n}d": (_TEXTS[n], _body(n, False, 0, functools.partial(_between, f"{name}1d", False)))
        for name in ("upsample_nearest", "_upsample_nearest_exact")
        for n in (1, 2, 3)
    },
    **{
        f"upsample_{name}{n}d": (_TEXTS[n], _body(n, True, 1, functools.partial(_between, "upsample_linear1d", True)))
        for n, name in enumerate(("linear", "bilinear", "trilinear"), 1)
    },
    **{
        name: (_TEXTS[2], _body(2, True, taps, functools.partial(_near, name)))
        for name, taps in (("upsample_bicubic2d", 2), ("_upsample_bilinear2d_aa", 1), ("_upsample_bicubic2d_aa", 2))
    },
}
