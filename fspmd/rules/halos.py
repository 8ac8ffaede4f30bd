"""Convolutions along sharded dims: each rank fetches the rows at its borders that its windows need (halos)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fspmd.collectives import pcast
from fspmd.rules.bodies import Site
from fspmd.rules.factors import Factors, ShapedCall, match, parse
from fspmd.rules.windows import fetched, longer, passing, per_rank, still
from fspmd.variance import get_variance


def window_rows(blocks: Sequence[tuple[int, int]], size: int, window: tuple[int, int, int, int], at: int) -> Tensor:
    """Return the global rows that the windows of a block cover, -1 outside. An empty block counts as one window."""
    kernel, stride, padding, dilation = window
    start, length = blocks[at]
    first = start * stride - padding
    places = first + torch.arange((max(length, 1) - 1) * stride + dilation * (kernel - 1) + 1)
    return places.where((places >= 0) & (places < size), -1)


def windows(site: Site, key: Any, x: Tensor, d: int, window: tuple[int, int, int, int]) -> Tensor:
    """Fetch the rows of a dim that the windows of the result's block cover.

    ``window``: size, stride, padding and dilation.
    """
    size = site.operands[0].shape[d]
    rows = functools.partial(window_rows, site.blocks(site.results[0].shape[d], key), size, window)
    return fetched(site, ("rows", d), x, d, site.axes[key], site.blocks(size, key), rows)


def _spread(site: Site, key: Any, x: Tensor, d: int, window: tuple[int, int, int, int]) -> Tensor:
    """Fetch the rows of a dim that a transposed convolution spreads over the result's block."""
    rows = functools.partial(_sources, site, key, d, window)
    return fetched(
        site, ("rows", d), x, d, site.axes[key], site.blocks(site.operands[0].shape[d], key), lambda at: rows(at)[0]
    )


def _within(site: Site, key: Any, out: Tensor, d: int, window: tuple[int, int, int, int]) -> Tensor:
    """Return the result's block, out of all places that the rows of `_spread` reach."""
    rows = functools.partial(_sources, site, key, d, window)
    return out.index_select(d, per_rank(site, ("own", d), site.axes[key], lambda at: rows(at)[1]))


def _sources(site: Site, key: Any, d: int, window: tuple[int, int, int, int], at: int) -> tuple[Tensor, Tensor]:
    """Return the rows that reach into a block (-1 outside), and the places of the block in their range."""
    kernel, stride, padding, dilation = window
    size, result = site.operands[0].shape[d], site.results[0].shape[d]
    start, length = site.blocks(result, key)[at]
    last = (start + max(length, 1) - 1 + padding) // stride
    first = min((start + padding) // stride, -((dilation * (kernel - 1) - start - padding) // stride))
    places = torch.arange(first, last + 1)
    block = torch.arange(start, start + length) + padding - first * stride
    return places.where((places >= 0) & (places < size), -1), block


def own_rows(site: Site, key: Any, out: Tensor, d: int) -> Tensor:
    """Return a result without the extra window of an empty block."""
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
    """The body of aten's convolution. An unreduced bias is added as a term of a pending sum."""
    left = each(padding, x.dim() - 2)
    strides, spread = each(stride, x.dim() - 2), each(dilation, x.dim() - 2)
    cut = [d for d in range(2, x.dim()) if site.axes.get(str(d))]
    behind = each(output_padding, x.dim() - 2)
    cuts = {d: (weight.shape[d], strides[d - 2], left[d - 2], spread[d - 2]) for d in cut}
    for d, window in cuts.items():
        if transposed:
            x = _spread(site, str(d), x, d, window)
            behind[d - 2] = max(0, window[1] - 1 - window[3] * (window[0] - 1))
        else:
            x = windows(site, str(d), x, d, window)
        left[d - 2] = 0
    if site.axes.get("c"):  # a group per channel
        groups = weight.shape[0] * groups // site.operands[1].shape[0]
    pending = () if bias is None else tuple(site.mesh.ordered(get_variance(bias).unreduced))
    added = None if pending else bias
    out: Tensor = torch.convolution(x, weight, added, strides, left, spread, transposed, behind, groups)
    for d, window in cuts.items():
        out = _within(site, str(d), out, d, window) if transposed else own_rows(site, str(d), out, d)
    if pending and bias is not None:
        for axis in site.mesh.ordered(get_variance(out).varying - get_variance(bias).varying - {*pending}):
            bias = pcast(bias, axis, to="varying")
        out = pcast(out, pending, to="unreduced") + bias.view(-1, *(1,) * (x.dim() - 2))
    return out


def near(
    factors: Factors,
    call: ShapedCall,
    kernel: Sequence[int],
    stride: Any,
    padding: Any,
    dilation: Any = 1,
    transposed: bool = False,
) -> frozenset[int]:
    """Return the factors along which each window lies in one block, since no window overlaps the next one."""
    count, aligned = len(kernel), set[int]()
    sizes, after = call.shapes[0][-count:], call.results[0][-count:]
    if transposed:
        sizes, after = after, sizes
    window = zip(kernel, *(each(v, count) for v in (stride, padding, dilation)), strict=True)
    for d, (length, step, pad, gap) in enumerate(window, call.ndim - count):
        at = d - call.ndim + count
        if not pad and gap * (length - 1) < step and after[at] * step == sizes[at]:
            factor = factors.operands[0][d]
            aligned |= set() if factor is None else {factor}
    return frozenset(aligned)


def folded(call: ShapedCall) -> Factors:
    """The rule of ``col2im``: it sums over windows (``l``). Channels are cut between channels, not within a window."""
    factors = match(parse("... c [l] -> ... c 1 1"), call.shapes)
    channels, windows = factors.names["c"], factors.names["l"]
    pieces = {channels: call.results[0][-3]}
    return factors._replace(summed=frozenset({windows}), scaled=frozenset({channels}), pieces=pieces)


@still
def fold(site: Site, x: Tensor, *window: Any) -> Tensor:
    """The body of ``col2im``: a pending sum, in which each rank has its windows, and zeros for the others."""
    d = x.dim() - 1
    if axes := site.axes.get("l", ()):
        size = site.operands[0].shape[d]
        blocks = site.blocks(size, "l")

        def places(at: int) -> Tensor:
            start, length = blocks[at]
            own = torch.arange(size) - start
            return own.where((own >= 0) & (own < length), length)

        x = longer(x, d).index_select(d, per_rank(site, "windows", axes, places))
    out: Tensor = torch.ops.aten.col2im.default(x, *window)
    return out


def each(value: Any, count: int) -> list[int]:
    """Return one number per dim, given one number for all dims or a list."""
    given = [value] if isinstance(value, int) else list(value)
    return given * count if len(given) == 1 else given
