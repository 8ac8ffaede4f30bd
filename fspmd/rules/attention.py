"""Scaled dot product attention: batch and heads may be sharded by its rule, sequences by its body.

If queries and keys are sharded alike, blocks of keys and values go round a ring. Each block is sent on while the one
before it is in use, and the softmax is accumulated (Liu, Zaharia and Abbeel, "Ring Attention with Blockwise
Transformers", 2023). If only keys are sharded, each rank attends to its own, and the results are added up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fspmd.collectives import pmax, ppermute, psum
from fspmd.entries import entry_axes
from fspmd.ops.traits import autocasts
from fspmd.redistribution.cost import work
from fspmd.rules.bodies import Bodied, BodyLayout, Site
from fspmd.rules.factors import NO_RULE, Dims, Factors, ShapedCall, match, parse
from fspmd.rules.windows import block_places, per_rank

_PATTERNS = {
    (mask, heads): parse(f"... {heads}l 1, ... {heads}s 1, ... {heads}s 1{', ...' * mask} -> ... {heads}l 1")
    for mask in (0, 1)
    for heads in ("", "h ")
}


def attention(call: ShapedCall) -> Factors:
    """The rule of attention. A body shards keys (``s``), causal queries (``l``), or both alike (``t``)."""
    if call.argument(4, "dropout_p", 0.0) or min(map(len, call.shapes)) < 2 or len(call.shapes) < 3:
        return NO_RULE
    grouped = bool(call.argument(7, "enable_gqa", False))
    query, key, value = call.shapes[:3]
    if grouped and min(len(shape) for shape in call.shapes[:3]) < 3:
        return NO_RULE
    factors = match(_PATTERNS[0, "h " if grouped else ""], call.shapes[:3])
    names = {name: factors.names[name] for name in ("l", "s")}
    rows, s = names["l"], names["s"]
    t = names["t"] = len(factors.names)
    masks = tuple(_mask(factors.results[0], shape, call, s) for shape in call.shapes[3:])
    separate = factors._replace(
        operands=(*factors.operands, *masks),
        summed=frozenset(),
        whole=frozenset({s, rows} if call.argument(5, "is_causal", False) else {s}),
        scaled=frozenset({factors.names["h"]} if grouped else ()),
        names=names,
        multiplications=query[-1] + value[-1],
    )
    if query[-2] != key[-2]:
        return separate
    ring = {rows: t, s: t}
    operands = tuple(tuple(ring.get(f, f) if f is not None else None for f in dims) for dims in separate.operands[:3])
    ring_masks = tuple(tuple(t if f == rows else None if f == s else f for f in dims) for dims in masks)
    results = (tuple(ring.get(f, f) if f is not None else None for f in separate.results[0]),)
    alike = separate._replace(
        operands=(*operands, *ring_masks),
        results=results,
        whole=frozenset({t}),
        multiplications=separate.multiplications * key[-2],
    )
    return separate._replace(alternatives=(alike,))


def _mask(result: Dims, shape: Sequence[int], call: ShapedCall, s: int) -> Dims:
    """Return the dims of a mask ``[..., l, s]``, in which any size may be 1."""
    sizes = (*call.results[0][:-1], call.shapes[1][-2])
    factors = (*result[:-1], s)
    rows = zip(factors[len(factors) - len(shape) :], sizes[len(sizes) - len(shape) :], shape, strict=True)
    return tuple(f if n == size and n != 1 else None for f, size, n in rows)


def _time(layout: BodyLayout) -> float:
    """Return the µs of forward: of the ring, or of the all-reduces of the parts, their maxima and their weights."""
    over_keys, is_ring = _along(layout)
    if not over_keys.axes:
        return 0.0
    if is_ring:
        return _rounds(over_keys)
    query, value = over_keys.operands[0], over_keys.operands[2]
    rows = math.prod(query.block_shape[:-1]) * max(query.dtype.itemsize, 4)
    number_per_row, parts = (over_keys.price("reduce", n, n) for n in (rows, rows * value.shape[-1]))
    return 2 * number_per_row + parts


def _back(layout: BodyLayout) -> float:
    """Return the µs of backward: of the ring; all-reduces need no communication there."""
    over_keys, is_ring = _along(layout)
    return _rounds(over_keys) if is_ring else 0.0


def _along(layout: BodyLayout) -> tuple[BodyLayout, bool]:
    """Return the layout over the axes that cut keys, and whether they cut queries alike, so that there is a ring."""
    cut = [entry_axes(spec.partition[-2]) for spec in layout.operands[:2]]
    queries, keys = (tuple([axis for axis in layout.axes if axis in axes]) for axes in cut)
    return layout._replace(axes=keys), bool(keys) and queries == keys


def _rounds(layout: BodyLayout) -> float:
    """Return the µs of the ring's rounds that the products do not hide. The last products need no round."""
    query, key, value = layout.operands[:3]
    heads = math.prod(query.block_shape[:-2])  # heads of keys and values are repeated first
    sent = heads * key.block_shape[-2] * (query.shape[-1] + value.shape[-1]) * max(query.dtype.itemsize, 4)
    round_time = layout.price("permute", sent, sent)
    multiplications = math.prod(query.block_shape[:-1]) * key.block_shape[-2] * (query.shape[-1] + value.shape[-1])
    return (query.mesh.axis_size(layout.axes) - 1) * max(0.0, round_time - work(multiplications, sent, layout.topology))


def _body(
    site: Site,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    empty = any(length == 0 for _, length in site.blocks(site.operands[0].shape[-2], "l"))
    if not site.over(("s", "t")) and not empty:  # causal queries are sharded, keys are not
        allowed = _allowed(site, "l", None, 0, is_causal)
        return F.scaled_dot_product_attention(query, key, value, allowed, scale=scale, enable_gqa=enable_gqa)
    device = query.device.type
    cast = dict(autocasts()).get(device) if query.dtype is not torch.float64 else None
    dtype = cast or query.dtype
    with nullcontext() if cast is None else torch.autocast(device, enabled=False):
        wide = torch.promote_types(dtype, torch.float32)
        query, key, value = (x.to(dtype).to(wide) for x in (query, key, value))
        if enable_gqa:
            group = site.operands[0].shape[-3] // site.operands[1].shape[-3]
            key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
        query = query * (scale if scale is not None else site.operands[0].shape[-1] ** -0.5)
        out = (_ring if site.axes.get("t") else _parts)(site, query, key, value, attn_mask, is_causal)
    return out.to(dtype)


def _masked(scores: Tensor, allowed: Tensor | None, mask: Tensor | None) -> Tensor:
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)


def _allowed(site: Site, rows: str, columns: str | None, step: int, causal: bool) -> Tensor | None:
    """Return a mask of the keys that each query of the block may see in a step of the ring; None means all.

    All blocks of the ring have the length of the longest.
    """
    length, size = (site.operands[i].shape[-2] for i in (0, 1))
    over, across = site.over((rows,)), site.over((columns,))
    own = site.blocks(length, rows)
    cut = site.blocks(size, columns)
    ring = rows == columns
    if not causal and (not ring or len({n for _, n in cut}) == 1):
        return None

    def made(at: int) -> Tensor:
        query, holder = (at, (at - step) % len(cut)) if ring else divmod(at, len(cut))
        start, extent = cut[holder]
        places = torch.arange(cut[0][1] if ring else extent)
        seen = (places < extent).expand(own[query][1], -1)
        return seen & (block_places(own, query)[:, None] >= start + places) if causal else seen

    return per_rank(site, ("allowed", step), over if ring else (*over, *across), made)


def _ring(site: Site, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    axes, size = site.axes["t"], site.operands[1].shape[-2]
    cut = site.blocks(size, "t")
    n, longest = len(cut), cut[0][1]
    turn = [(i, (i + 1) % n) for i in range(n)]
    pair = tuple(_lengthened(site, x, cut) for x in (key, value))
    top = query.detach().new_full((), -torch.inf)
    total = out = query.new_zeros(())
    for step in range(n):
        coming = ppermute(pair, axes, turn, wait=False) if step + 1 < n else None
        part = mask
        if mask is not None and mask.shape[-1] != 1:
            columns = per_rank(site, ("columns", step), axes, _columns(cut, step, longest))
            part = mask.index_select(-1, columns)
        scores = _masked(query @ pair[0].mT, _allowed(site, "t", "t", step, causal), part)
        new = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
        finite = new.where(new.isfinite(), 0)
        weights, fade = (scores - finite).exp(), (top - finite).exp()
        total, out = total * fade + weights.sum(-1, keepdim=True), out * fade + weights @ pair[1]
        top = new
        pair = pair if coming is None else coming.wait()
    return out / total.where(total != 0, 1)


def _columns(cut: Sequence[tuple[int, int]], step: int, longest: int) -> Callable[[int], Tensor]:
    """Return a function that gives the keys of a rank in a step. Places beyond the end of its block repeat the last."""

    def made(at: int) -> Tensor:
        start, length = cut[(at - step) % len(cut)]
        return (start + torch.arange(longest)).clamp(max=max(start + length - 1, 0))

    return made


def _lengthened(site: Site, x: Tensor, cut: Sequence[tuple[int, int]]) -> Tensor:
    """Append zeros to a block, to the length of the longest block."""
    if len({n for _, n in cut}) == 1:
        return x
    index = per_rank(site, "lengthened", site.axes["t"], lambda at: _or_last(cut[at][1], cut[0][1]))
    return torch.cat([x, torch.zeros_like(x.narrow(-2, 0, 0).sum(-2, keepdim=True))], -2).index_select(-2, index)


def _or_last(length: int, longest: int) -> Tensor:
    return torch.arange(longest).clamp(max=length)


def _parts(site: Site, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    axes = site.over(("s",))
    scores = _masked(query @ key.mT, _allowed(site, "l", "s", 0, causal), mask)
    ended = torch.cat(
        [scores.detach(), torch.full_like(scores.detach().narrow(-1, 0, 0).sum(-1, keepdim=True), -torch.inf)], -1
    )
    top = pmax(ended.amax(-1, keepdim=True), axes)
    weights = (scores - top.where(top.isfinite(), 0)).exp()
    total = psum(weights.sum(-1, keepdim=True), axes)
    return psum(weights @ value, axes) / total.where(total != 0, 1)


attend = Bodied(_body, _time, _back)


def with_dropout(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention with dropout, composed of functions that have rules. It drops the same weights in every layout."""
    if attn_mask is not None and is_causal:
        raise RuntimeError("scaled_dot_product_attention: explicit attn_mask should not be set when is_causal=True")
    if enable_gqa:
        group = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.mT
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        return F.dropout(scores.softmax(-1), dropout_p) @ value
    excluded = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask == -torch.inf
    nothing_left = excluded.all(-1, keepdim=True)  # such a query gets zeros, and no gradient
    if attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(excluded & ~nothing_left, -torch.inf)
    else:
        scores = scores + attn_mask.masked_fill(nothing_left, 0)
    weights = scores.softmax(-1).masked_fill(nothing_left, 0)
    return F.dropout(weights, dropout_p) @ value
