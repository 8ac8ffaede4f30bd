"""Scaled dot product attention: batch and heads as they lie, sequences by bodies.

With queries and keys sharded alike, blocks of keys and values go round a ring, each sent on while the one before it is
used, and the softmax is summed up as they come (Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers",
2023). With keys alone sharded each rank attends to its own, and the parts are added up.
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
from fspmd.rules.factors import Dims, Factors, match, parse
from fspmd.rules.global_call import NO_RULE, Whole
from fspmd.rules.windows import block_places, per_rank
from fspmd.torch_internals import safe_softmax

_PATTERNS = {
    (mask, heads): parse(f"... {heads}l 1, ... {heads}s 1, ... {heads}s 1{', ...' * mask} -> ... {heads}l 1")
    for mask in (0, 1)
    for heads in ("", "h ")
}


def attention(whole: Whole) -> Factors:
    """Keys (``s``), and causal queries (``l``), by a body; where there are as many of both, together (``t``)."""
    if whole.argument(4, "dropout_p", 0.0) or min(map(len, whole.shapes)) < 2 or len(whole.shapes) < 3:
        return NO_RULE
    grouped = bool(whole.argument(7, "enable_gqa", False))
    query, key, value = whole.shapes[:3]
    if grouped and min(len(shape) for shape in whole.shapes[:3]) < 3:
        return NO_RULE
    found = match(_PATTERNS[0, "h " if grouped else ""], whole.shapes[:3])
    names = {name: found.names[name] for name in ("l", "s")}
    rows, s = names["l"], names["s"]
    t = names["t"] = len(found.names)
    masks = tuple(_mask(found.results[0], shape, whole, s) for shape in whole.shapes[3:])
    own = frozenset({s, rows} if whole.argument(5, "is_causal", False) else {s})
    scaled = frozenset({found.names["h"]} if grouped else ())
    found = found._replace(
        operands=(*found.operands, *masks),
        summed=frozenset(),
        whole=own,
        scaled=scaled,
        names=names,
        products=query[-1] + value[-1],
    )
    if query[-2] != key[-2]:
        return found
    ring = {rows: t, s: t}
    joint = tuple(tuple(ring.get(f, f) if f is not None else None for f in dims) for dims in found.operands[:3])
    beside = tuple(tuple(t if f == rows else None if f == s else f for f in dims) for dims in masks)
    results = (tuple(ring.get(f, f) if f is not None else None for f in found.results[0]),)
    together = found._replace(
        operands=(*joint, *beside), results=results, whole=frozenset({t}), products=found.products * key[-2]
    )
    return found._replace(others=(together,))


def _mask(result: Dims, shape: Sequence[int], whole: Whole, s: int) -> Dims:
    """``[..., l, s]``, of which any dim may be 1."""
    sizes = (*whole.results[0][:-1], whole.shapes[1][-2])
    factors = (*result[:-1], s)
    pairs = zip(factors[len(factors) - len(shape) :], sizes[len(sizes) - len(shape) :], shape, strict=True)
    return tuple(f if size == own and own != 1 else None for f, size, own in pairs)


def _time(layout: BodyLayout) -> float:
    """Of what the products do not hide of the rounds of a ring; or of the sums of all parts, and of their weights."""
    own, goes_round = _along(layout)
    if not own.axes:
        return 0.0
    if goes_round:
        return _rounds(own)
    query, value = own.operands[0], own.operands[2]
    rows = math.prod(query.block_shape[:-1]) * max(query.dtype.itemsize, 4)
    one, whole = (own.price("reduce", n, n) for n in (rows, rows * value.shape[-1]))
    return 2 * one + whole


def _back(layout: BodyLayout) -> float:
    """Of the same for gradients: sums have none."""
    own, goes_round = _along(layout)
    return _rounds(own) if goes_round else 0.0


def _along(layout: BodyLayout) -> tuple[BodyLayout, bool]:
    """Over those of the axes that cut keys; and whether they cut queries alike, so that keys go round a ring."""
    cut = [entry_axes(spec.partition[-2]) for spec in layout.operands[:2]]
    queries, keys = (tuple([axis for axis in layout.axes if axis in own]) for own in cut)
    return layout._replace(axes=keys), bool(keys) and queries == keys


def _rounds(layout: BodyLayout) -> float:
    """Each round begins before the products of the one before it, and none comes after the last products."""
    query, key, value = layout.operands[:3]
    heads = math.prod(query.block_shape[:-2])  # those of keys and values are repeated first
    sent = heads * key.block_shape[-2] * (query.shape[-1] + value.shape[-1]) * max(query.dtype.itemsize, 4)
    one = layout.price("permute", sent, sent)
    products = math.prod(query.block_shape[:-1]) * key.block_shape[-2] * (query.shape[-1] + value.shape[-1])
    return (query.mesh.axis_size(layout.axes) - 1) * max(0.0, one - work(products, sent, layout.topology))


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
    if not site.over(("s", "t")) and not empty:  # causal, of a part of the queries
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
    """Which of the keys that are here in a step of the ring each query of the block may see; None for all.

    Blocks that go round are as long as the longest.
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
            held = per_rank(site, ("columns", step), axes, _columns(cut, step, longest))
            part = mask.index_select(-1, held)
        scores = _masked(query @ pair[0].mT, _allowed(site, "t", "t", step, causal), part)
        new = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
        finite = new.where(new.isfinite(), 0)
        weights, fade = (scores - finite).exp(), (top - finite).exp()
        total, out = total * fade + weights.sum(-1, keepdim=True), out * fade + weights @ pair[1]
        top = new
        pair = pair if coming is None else coming.wait()
    return out / total.where(total != 0, 1)


def _columns(cut: Sequence[tuple[int, int]], step: int, longest: int) -> Callable[[int], Tensor]:
    """The keys that a rank has in a step; beyond the end of a block any."""

    def made(at: int) -> Tensor:
        start, length = cut[(at - step) % len(cut)]
        return (start + torch.arange(longest)).clamp(max=max(start + length - 1, 0))

    return made


def _lengthened(site: Site, x: Tensor, cut: Sequence[tuple[int, int]]) -> Tensor:
    """With zeros at the end, as long as the longest block."""
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
    """Attention of which shares are dropped, the same ones under every layout: by functions that have rules."""
    if attn_mask is not None and is_causal:
        raise RuntimeError("scaled_dot_product_attention: explicit attn_mask should not be set when is_causal=True")
    if enable_gqa:
        group = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.mT
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return F.dropout(safe_softmax(scores, -1), dropout_p) @ value
