"""Convolutions, folds and unfolds: each rank fetches the rows at its borders that its windows need (halos)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fspmd.collectives import pcast
from fspmd.rules.bodies import Site
from fspmd.rules.factors import NO_RULE, Dims, Factors, Shape, ShapedCall, match, parse
from fspmd.rules.windows import fetched, longer, passing, per_rank, size_of, still
from fspmd.variance import get_variance


def convolution(call: ShapedCall) -> Factors:
    """The rule of aten's convolution of x ``[n, i, ...]``, weight ``[o, i, ...]`` and bias ``[o]``.

    The weight of a transposed convolution is ``[i, o, ...]``. With several groups, channels of operand and result are
    cut alike, between groups.
    """
    window = " ".join("1" for _ in call.shapes[0][2:])
    kernel = "i o" if call.args[6] else "o i"
    space = " ".join(f"[{d}]" for d in range(2, call.ndim))
    groups = call.args[8]
    if groups == 1:
        factors = match(parse(f"n i {space}, {kernel} {window}, o -> n o {space}"), call.shapes)
    else:
        factors = match(parse(f"n c {space}, c 1 {window}, c -> n c {space}"), call.shapes)
        channels = factors.names["c"]
        factors = factors._replace(scaled=frozenset({channels}), pieces={channels: groups})
    return factors._replace(added=frozenset({2}), near=near(factors, call, call.shapes[1][2:], *call.args[3:7]))


def convolution_of_blocks(shape: Shape, x: Any, weight: Any, bias: Any, *args: Any) -> Any:
    """Run the convolution with the groups of the block; ``shape`` is the global shape of x."""
    groups = args[-1] if args[-1] == 1 else args[-1] * x.shape[1] // shape[1]
    return _convolve(x, weight, bias, *args[:-1], groups)


_convolve: Any = torch.convolution


@passing
def convolution_body(
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


# --- windows ----------------------------------------------------------------------------------------------------------


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


def own_rows(site: Site, key: Any, out: Tensor, d: int) -> Tensor:
    """Return a result without the extra window of an empty block."""
    blocks = site.blocks(site.results[0].shape[d], key)
    if all(length for _, length in blocks):
        return out
    return out.index_select(d, per_rank(site, ("own", d), site.axes[key], lambda at: torch.arange(blocks[at][1])))


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


def each(value: Any, count: int) -> list[int]:
    """Return one number per dim, given one number for all dims or a list."""
    given = [value] if isinstance(value, int) else list(value)
    return given * count if len(given) == 1 else given


# --- folds and unfolds ------------------------------------------------------------------------------------------------


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


def unfolded(call: ShapedCall) -> Factors:
    """The rule of ``unfold``: the dim of the windows must be whole. The elements of a window are a new dim."""
    every: Dims = tuple(range(call.ndim))
    if not every:
        return Factors(((),), ((None,),))
    if len(call.results[0]) != call.ndim + 1:
        return NO_RULE  # another function with the same name
    dim = call.argument(1, "dimension") % call.ndim
    size, step = call.results[0][-1], call.argument(3, "step")
    windowed = frozenset({dim})
    near = windowed if size <= step and call.results[0][dim] * step == call.shapes[0][dim] else frozenset[int]()
    return Factors((every,), ((*every, None),), whole=frozenset() if size == step == 1 else windowed, near=near)


def unfold_blocks(_: Shape, x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Run ``unfold`` on blocks. Windows of one element work for empty blocks too, which torch refuses."""
    return x.unsqueeze(-1) if size == step == 1 and x.dim() else x.unfold(dimension, size, step)


@passing
def unfold(site: Site, x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """The body of ``unfold``: each rank fetches the rows from its first window to its last."""
    d = dimension % x.dim()
    axes, blocks = site.axes[d], site.blocks(site.results[0].shape[d], d)

    def wanted(at: int) -> Tensor:
        start, length = blocks[at]
        return torch.arange(start * step, (start + length - 1) * step + size) if length else torch.arange(0)

    def windows(at: int) -> Tensor:
        return (torch.arange(blocks[at][1])[:, None] * step + torch.arange(size)).flatten()

    rows = fetched(site, "rows", x, d, axes, site.blocks(size_of(site, d), d), wanted)
    own = rows.index_select(d, per_rank(site, "windows", axes, windows))
    split: Tensor = own.unflatten(d, (-1, size))
    return split.movedim(d + 1, -1)
