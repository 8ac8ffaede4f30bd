"""Convolutions and pools along sharded dims: each rank fetches the borders that its windows reach into."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fspmd.collectives import pcast
from fspmd.rules.bodies import Bodied, Site
from fspmd.rules.factors import Factors, match, parse
from fspmd.rules.whole import NO_RULE, Rule, Whole
from fspmd.rules.windows import fetched, passing, per_rank
from fspmd.variance import get_variance


def _rows(blocks: Sequence[tuple[int, int]], size: int, window: tuple[int, int, int, int], at: int) -> Tensor:
    """What the windows of a block reach over, -1 beyond the ends; of one window where the block is empty."""
    kernel, stride, padding, dilation = window
    start, length = blocks[at]
    first = start * stride - padding
    places = first + torch.arange((max(length, 1) - 1) * stride + dilation * (kernel - 1) + 1)
    return places.where((places >= 0) & (places < size), -1)


def _windows(site: Site, key: Any, x: Tensor, d: int, window: tuple[int, int, int, int]) -> Tensor:
    """The block of a dim that the windows of the result's block take: their size, stride, padding and dilation."""
    size = site.operands[0].shape[d]
    rows = functools.partial(_rows, site.blocks(site.results[0].shape[d], key), size, window)
    return fetched(site, ("rows", d), x, d, site.axes[key], site.blocks(size, key), rows)


def _spread(site: Site, key: Any, x: Tensor, d: int, window: tuple[int, int, int, int]) -> Tensor:
    """The rows of a dim that a transposed convolution spreads over the result's block."""
    rows = functools.partial(_sources, site, key, d, window)
    return fetched(
        site, ("rows", d), x, d, site.axes[key], site.blocks(site.operands[0].shape[d], key), lambda at: rows(at)[0]
    )


def _within(site: Site, key: Any, out: Tensor, d: int, window: tuple[int, int, int, int]) -> Tensor:
    """Of what those rows are spread over, the result's block."""
    rows = functools.partial(_sources, site, key, d, window)
    return out.index_select(d, per_rank(site, ("own", d), site.axes[key], lambda at: rows(at)[1]))


def _sources(site: Site, key: Any, d: int, window: tuple[int, int, int, int], at: int) -> tuple[Tensor, Tensor]:
    """The rows that reach into a block, -1 beyond the ends, and where it lies in what they are spread over."""
    kernel, stride, padding, dilation = window
    size, result = site.operands[0].shape[d], site.results[0].shape[d]
    start, length = site.blocks(result, key)[at]
    last = (start + max(length, 1) - 1 + padding) // stride
    first = min((start + padding) // stride, -((dilation * (kernel - 1) - start - padding) // stride))
    places = torch.arange(first, last + 1)
    block = torch.arange(start, start + length) + padding - first * stride
    return places.where((places >= 0) & (places < size), -1), block


def _own(site: Site, key: Any, out: Tensor, d: int) -> Tensor:
    """Without the window of an empty block."""
    blocks = site.blocks(site.results[0].shape[d], key)
    if all(length for _, length in blocks):
        return out
    return out.index_select(d, per_rank(site, ("own", d), site.axes[key], lambda at: torch.arange(blocks[at][1])))


@passing
def convolution(
    site: Site,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """aten's. A bias that is a term of a pending sum is added to another one."""
    left = _each(padding, x.dim() - 2)
    strides, spread = _each(stride, x.dim() - 2), _each(dilation, x.dim() - 2)
    cut = [d for d in range(2, x.dim()) if site.axes.get(str(d))]
    behind = _each(output_padding, x.dim() - 2)
    windows = {d: (weight.shape[d], strides[d - 2], left[d - 2], spread[d - 2]) for d in cut}
    for d, window in windows.items():
        if transposed:
            x = _spread(site, str(d), x, d, window)
            behind[d - 2] = max(0, window[1] - 1 - window[3] * (window[0] - 1))
        else:
            x = _windows(site, str(d), x, d, window)
        left[d - 2] = 0
    pending = () if bias is None else tuple(site.mesh.ordered(get_variance(bias).unreduced))
    own = None if pending else bias
    out: Tensor = torch.convolution(x, weight, own, strides, left, spread, transposed, behind, groups)
    for d, window in windows.items():
        out = _within(site, str(d), out, d, window) if transposed else _own(site, str(d), out, d)
    if pending and bias is not None:
        for axis in site.mesh.ordered(get_variance(out).varying - get_variance(bias).varying - {*pending}):
            bias = pcast(bias, axis, to="varying")
        out = pcast(out, pending, to="unreduced") + bias.view(-1, *(1,) * (x.dim() - 2))
    return out


def _each(value: Any, count: int) -> list[int]:
    given = [value] if isinstance(value, int) else list(value)
    return given * count if len(given) == 1 else given


def pooled(count: int, *, dilated: bool = False) -> Rule:
    """Of so many trailing dims; those that are padded, or whose windows reach beyond the end, are gathered."""

    def rule(whole: Whole) -> Factors:
        if whole.ndim < count:
            return NO_RULE
        padding = _each(whole.argument(3, "padding", 0), count)
        ceil = whole.argument(5 if dilated else 4, "ceil_mode", False)
        space = " ".join("1" if padding[k] or ceil else f"[{k}]" for k in range(count))
        return match(parse(f"... {space} -> " + ", ".join([f"... {space}"] * len(whole.results))), whole.shapes)

    return rule


def _pool(site: Site, x: Tensor, kernel: Any, stride: Any, dilation: Any, count: int) -> tuple[Tensor, list[int]]:
    kernels, spread = _each(kernel, count), _each(dilation, count)
    strides = _each(stride, count) if isinstance(stride, int) or stride else kernels
    cut = [k for k in range(count) if site.axes.get(str(k))]
    for k in cut:
        d = x.dim() - count + k
        x = _windows(site, str(k), x, d, (kernels[k], strides[k], 0, spread[k]))
    return x, cut


def avg_pool(count: int) -> Bodied:
    """Averages of windows of so many dims."""
    function: Any = (torch.avg_pool1d, torch.ops.aten.avg_pool2d.default, torch.ops.aten.avg_pool3d.default)[count - 1]

    def body(site: Site, x: Tensor, kernel_size: Any, stride: Any = (), *rest: Any, **named: Any) -> Tensor:
        x, cut = _pool(site, x, kernel_size, stride, 1, count)
        sizes = (_each(v, count) for v in (kernel_size, stride or kernel_size))
        out: Tensor = function(x, *sizes, *rest, **named)
        for k in cut:
            out = _own(site, str(k), out, x.dim() - count + k)
        return out

    return passing(body)


def max_pool(count: int) -> Bodied:
    """The greatest of windows of so many dims, and their places in the whole."""
    function = (torch.ops.aten.max_pool2d_with_indices, torch.ops.aten.max_pool3d_with_indices)[count - 2].default

    def body(
        site: Site,
        x: Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        x, cut = _pool(site, x, kernel_size, stride, dilation, count)
        sizes = (_each(v, count) for v in (kernel_size, stride or kernel_size, padding, dilation))
        out, places = function(x, *sizes, ceil_mode)
        steps = _each(stride or kernel_size, count)
        at = torch.zeros_like(places)
        for k in reversed(range(count)):  # the last dim runs fastest
            d = x.dim() - count + k
            start: Tensor | int = 0
            if k in cut:
                blocks = site.blocks(site.results[0].shape[d], str(k))
                firsts = functools.partial(_first, blocks, steps[k])
                start = per_rank(site, ("first", d), site.axes[str(k)], firsts)
            at = at + (places % x.shape[d] + start) * math.prod(site.operands[0].shape[d + 1 :])
            places = places // x.shape[d]
        for k in cut:
            out, at = (_own(site, str(k), one, x.dim() - count + k) for one in (out, at))
        return out, at

    return passing(body)


def _first(blocks: Sequence[tuple[int, int]], stride: int, at: int) -> Tensor:
    return torch.tensor(blocks[at][0] * stride)
