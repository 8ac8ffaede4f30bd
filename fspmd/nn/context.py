"""Attention over a sequence that is cut over ranks (context parallelism), for use inside a body.

Three ways compute the same. They differ in what moves, for n ranks and blocks of b bytes of keys and values:

* `ring_attention`: blocks of keys and values go round a ring, each on its way while the one before it is in use. A
  rank receives (n - 1) b bytes forward and (2 n - 1) b backward, more if gradients are wider, and holds two blocks.
* `gathered_attention`: an all-gather of keys and values, (n - 1) b bytes, and a reduce-scatter of their gradients. A
  rank holds the keys and values of the whole sequence.
* `ulysses_attention`: all-to-alls exchange the cut of the sequence for a cut of heads (Jacobs et al., "DeepSpeed
  Ulysses", 2023). Queries and results move too, but each only by (n - 1) / n of a block.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fspmd.cache import cached
from fspmd.collectives import all_gather, all_to_all, axis_index, axis_size, ppermute, psum_scatter
from fspmd.entries import blocks
from fspmd.errors import ShapeError
from fspmd.nn import attend
from fspmd.nn.attend import PartialAttention, check_operands, merge
from fspmd.nn.masks import Full, Mask, as_mask
from fspmd.nn.sequences import Axes, SequenceLayout, check_layout, same_length
from fspmd.nn.tiles import Tiles, count_of, make_tiles, runs_of
from fspmd.tracing import hidden


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    axis: Axes,
    *,
    mask: Mask | None = None,
    layout: SequenceLayout | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention by a ring. Queries stay, and blocks of keys and values pass all ranks.

    Args:
        query: This rank's block [..., heads, queries, width] of a sequence that ``axis`` cuts.
        key: [..., kv_heads, queries, width]. Only the ``kv_heads`` heads travel.
        value: [..., kv_heads, queries, value_width]
        axis: The mesh axis, or axes in rank order, over which the sequence is cut.
        mask: Who sees whom, by positions. The default is all.
        layout: Which positions each rank has. The default is `contiguous`, which needs blocks of one length.
        scale: Of the scores. The default is ``width ** -0.5``.
        sinks: The score of an attention sink for each head, [heads], which takes a share of the weights.

    Returns:
        [..., heads, queries, value_width], of the dtype of ``query``. A query that sees no key has 0.

    Communication: n - 1 `ppermute` of keys and values, forward; in backward the same again, and n of their gradients.

    Raises:
        ShapeError: The shapes do not fit together, or the layout does not fit the axis.

    >>> from fspmd import P, device_get, device_put, make_mesh, shard_map
    >>> from fspmd.nn import Causal, zigzag
    >>> mesh, layout = make_mesh((4,), ("cp",)), zigzag(16, 4)
    >>> q, k, v = torch.randn(3, 2, 16, 8, dtype=torch.float64)
    >>> ring = shard_map(lambda q, k, v: ring_attention(q, k, v, "cp", mask=Causal(), layout=layout),
    ...                  mesh=mesh, in_specs=P(None, "cp"), out_specs=P(None, "cp"))
    >>> out = layout.restore(device_get(ring(*(layout.store(x, 1) for x in (q, k, v)))), 1)
    >>> torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    True
    """
    turns = _checked(query, key, value, axis, (), mask, layout, scale, sinks, "ring_attention")
    return _attend(_RING, _padded((query, key, value), turns.length), sinks, turns, scale, query.shape[-2])


def gathered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    axis: Axes,
    *,
    mask: Mask | None = None,
    layout: SequenceLayout | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention to gathered keys and values. Arguments and results are those of `ring_attention`.

    Communication: an `all_gather` of keys and one of values, forward; a reduce-scatter of each gradient, backward.
    """
    turns = _checked(query, key, value, axis, (), mask, layout, scale, sinks, "gathered_attention")
    return _attend(_GATHERED, _padded((query, key, value), turns.length), sinks, turns, scale, query.shape[-2])


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    axis: Axes,
    *,
    ring: Axes | None = None,
    mask: Mask | None = None,
    layout: SequenceLayout | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention with heads in the place of the sequence. Arguments and results are those of `ring_attention`.

    Where there are fewer KV heads than ranks, each is repeated as often as needed.

    Args:
        ring: A second axis, over which the sequence is cut first: ``P(..., ("ring", "heads"))``. Along it the keys and
            values pass in a ring, as in `ring_attention`; ``layout`` then says which positions its ranks have.

    Communication: an `all_to_all` of each operand and one of the result, forward; the same of gradients, backward.

    Raises:
        ShapeError: As `ring_attention`; and the number of heads is no multiple of the ranks.
    """
    turns = _checked(query, key, value, ring or (), axis, mask, layout, scale, sinks, "ulysses_attention")
    n, heads = axis_size(axis), query.shape[-3]
    if heads % n:
        raise ShapeError(
            f"ulysses_attention got {heads} heads for the {n} ranks of {axis!r}, to which it gives equally many; call "
            "ring_attention, or make the axis a divisor of the heads"
        )
    repeats = lcm(key.shape[-3], n) // key.shape[-3]
    if repeats > 1:
        key, value = (
            x.unsqueeze(-3).expand(*[-1] * (x.dim() - 2), repeats, -1, -1).flatten(-4, -3) for x in (key, value)
        )
    padded = _padded((query, key, value), turns.length // n)
    parts = (all_to_all(x, axis, x.dim() - 3, x.dim() - 2, tiled=True) for x in padded)
    if sinks is not None:
        sinks = sinks.view(n, heads // n)[axis_index(axis)]
    out = _attend(_RING, parts, sinks, turns, scale, turns.length)
    result: Tensor = all_to_all(out, axis, out.dim() - 2, out.dim() - 3, tiled=True)
    return result.narrow(-2, 0, query.shape[-2])


def _checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ring: Axes,
    axis: Axes,
    mask: Mask | None,
    layout: SequenceLayout | None,
    scale: float | None,
    sinks: Tensor | None,
    what: str,
) -> _Turns:
    """The steps of a ring over ``ring``, whose blocks ``axis`` cuts into parts, after checks of all arguments."""
    check_operands(query, key, value, scale, what)
    if not same_length(query.shape[-2], key.shape[-2]):
        raise ShapeError(
            f"{what} got a block of {query.shape[-2]} queries and one of {key.shape[-2]} keys; both are of one sequence"
        )
    if sinks is not None and sinks.shape != query.shape[-3:-2]:
        raise ShapeError(
            f"{what} got sinks of shape {tuple(sinks.shape)} for {query.shape[-3]} heads; give it one of each head"
        )
    mask = Full() if mask is None else as_mask(mask, what)
    layout = check_layout(layout, query.shape[-2], ring, axis, what)
    mask.check(layout.length)
    return _turns(ring if isinstance(ring, str) else tuple(ring), mask, layout, axis_size(axis) if axis else 1)


def _padded(blocks_of_rank: Iterable[Tensor], length: int) -> Iterator[Tensor]:
    """Blocks with zeros up to a length."""
    return (F.pad(x, (0, 0, 0, length - x.shape[-2])) for x in blocks_of_rank)


@dataclass(frozen=True, eq=False)
class _Turns:
    """The steps of a ring. In step i a rank has the block of the rank i places before it.

    ``table`` has the positions by rank and tile: int64 [ranks, tiles, length]. Places at which there is none have -1.
    """

    axis: Axes  # () if there is one rank
    mask: Mask
    table: Tensor
    tiles: dict[int, Tiles]  # of each step in which some rank's queries see a key

    @property
    def length(self) -> int:
        """The length of a padded block."""
        return self.table[0].numel()

    @property
    def steps(self) -> list[int]:
        """The steps in which some rank's queries see a key."""
        return list(self.tiles)

    @property
    def at(self) -> int | Tensor:
        """The number of this rank."""
        return axis_index(self.axis) if self.axis else 0

    def hop(self, places: int) -> list[tuple[int, int]]:
        """Who sends to whom, for so many steps at once."""
        n = len(self.table)
        return [(r, (r + places) % n) for r in range(n)]

    @functools.cached_property
    @hidden
    def all_keys(self) -> Tiles:
        """The tiles of a rank's queries and the keys of the whole sequence, as it is stored."""
        n, keys, runs = len(self.table), self.table.flatten(0, 1), runs_of(self.table)
        return make_tiles(
            self.table, keys.expand(n, -1, -1), runs, [[run for row in runs for run in row]] * n, self.mask
        )


@cached(maxsize=256)
@hidden
def _turns(axis: Axes, mask: Mask, layout: SequenceLayout, parts: int) -> _Turns:
    """The steps of a ring over ``axis``, whose blocks are cut into ``parts`` parts that may have different lengths."""
    turns = _tiled(axis, mask, layout, parts, max(1, count_of(layout.block_length) // parts))
    skips = any(len(turns.tiles) < layout.ranks or step.skips for step in turns.tiles.values())
    return turns if skips else _tiled(axis, mask, layout, parts, 1)


def _tiled(axis: Axes, mask: Mask, layout: SequenceLayout, parts: int, tiles: int) -> _Turns:
    """The steps, with ``tiles`` tiles in each part of a block."""
    n, most = layout.ranks, -(-layout.block_length // parts)
    most = -(-most // tiles) * tiles

    def padded(row: Tensor) -> Tensor:
        cuts = blocks(len(row), (parts,))
        return torch.cat([F.pad(row[start : start + k], (0, most - k), value=-1) for start, k in cuts])

    table = torch.stack([padded(row[row >= 0]) for row in layout.table]).view(n, tiles * parts, -1)
    runs = runs_of(table)
    steps = {i: make_tiles(table, table.roll(i, 0), runs, [runs[r - i] for r in range(n)], mask) for i in range(n)}
    return _Turns(axis, mask, table, {i: step for i, step in steps.items() if step.groups})


class _Way(NamedTuple):
    """How a rank meets all keys: forward, and backward with what forward has kept of keys and values."""

    forward: Callable[..., tuple[PartialAttention, Tensor, Tensor]]
    backward: Callable[..., list[Tensor]]


class _Attention(torch.autograd.Function):
    """Attention over a cut sequence, with sinks. Saved is one part: it has the sums of all keys, and of the sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        way: _Way,
        turns: _Turns,
        scale: float | None,
    ) -> Tensor:
        (out, lse), keys, values = way.forward(query, key, value, turns, scale)
        if sinks is not None:
            alone, lse = lse, torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out = out * (alone - lse).exp()[..., None]
        ctx.save_for_backward(query, keys, values, sinks, out, lse)
        ctx.way, ctx.turns, ctx.scale = way, turns, scale
        return out.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, sinks, *whole = ctx.saved_tensors
        out, lse = whole
        grads = ctx.way.backward(out_grad, query, keys, values, PartialAttention(out, lse), ctx.turns, ctx.scale)
        sinks_grad = None
        if sinks is not None:
            shares = (sinks[:, None] - lse).exp() * (out_grad * out).sum(-1)
            sinks_grad = -shares.sum(-1).flatten(0, -2).sum(0) if shares.dim() > 2 else -shares.sum(-1)
            sinks_grad = sinks_grad.to(sinks.dtype)
        return *(g.to(x.dtype) for g, x in zip(grads, (query, keys, values), strict=True)), sinks_grad, None, None, None


def _attend(
    way: _Way, operands: Iterable[Tensor], sinks: Tensor | None, turns: _Turns, scale: float | None, length: int
) -> Tensor:
    """The first ``length`` rows of the attention of padded blocks."""
    out: Tensor = _Attention.apply(*operands, sinks, way, turns, scale)
    return out.narrow(-2, 0, length)


def _gathered_forward(
    query: Tensor, key: Tensor, value: Tensor, turns: _Turns, scale: float | None
) -> tuple[PartialAttention, Tensor, Tensor]:
    keys, values = (all_gather(x, turns.axis, axis=x.dim() - 2, tiled=True) for x in (key, value))
    return turns.all_keys.forward(query, keys, values, turns.at, scale), keys, values


def _gathered_backward(
    out_grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    whole: PartialAttention,
    turns: _Turns,
    scale: float | None,
) -> list[Tensor]:
    """The gradients of keys and values are summed wide: bfloat16 sums would lose precision."""
    grad, *grads = turns.all_keys.backward(out_grad, query, keys, values, whole, turns.at, scale)
    return [grad, *(psum_scatter(g, turns.axis, scatter_dimension=g.dim() - 2, tiled=True) for g in grads)]


def _ring_forward(
    query: Tensor, key: Tensor, value: Tensor, turns: _Turns, scale: float | None
) -> tuple[PartialAttention, Tensor, Tensor]:
    """The ring. What is kept are a rank's own blocks, and not those that pass."""
    whole, at = attend.nothing(query, value.shape[-1]), turns.at
    for step, pair, _ in _passing((key, value), turns):
        part = turns.tiles[step].forward(query, *pair, at, scale)
        whole = part if step == turns.steps[0] else merge(whole, part)
    return whole, key, value


def _ring_backward(
    out_grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    whole: PartialAttention,
    turns: _Turns,
    scale: float | None,
) -> list[Tensor]:
    """The ring once more. The gradients of keys and values travel with them, and come home in the end."""
    grads = [torch.zeros_like(x, dtype=whole.out.dtype) for x in (query, key, value)]
    at, coming = turns.at, None
    for step, pair, hop in _passing((key, value), turns):
        parts = turns.tiles[step].backward(out_grad, query, *pair, whole, at, scale)
        if coming is not None:
            grads[1:] = coming.wait()
        grads = [total + part for total, part in zip(grads, parts, strict=True)]
        coming = ppermute(tuple(grads[1:]), turns.axis, turns.hop(hop), wait=False) if hop else None
    if coming is not None:
        grads[1:] = coming.wait()
    return grads


_RING, _GATHERED = _Way(_ring_forward, _ring_backward), _Way(_gathered_forward, _gathered_backward)


def _passing(pair: tuple[Tensor, Tensor], turns: _Turns) -> Iterator[tuple[int, tuple[Tensor, Tensor], int]]:
    """Yield each step, the pair of keys and values that a rank has in it, and the places that their gradients go next.

    The pair of the next step is under way while one is in use. The gradients come home in the end.
    """
    if turns.steps and turns.steps[0]:
        pair = ppermute(pair, turns.axis, turns.hop(turns.steps[0]))
    for step, after in itertools.pairwise([*turns.steps, len(turns.table)]):
        hop, is_last = (after - step) % len(turns.table), after == len(turns.table)
        coming = None if is_last else ppermute(pair, turns.axis, turns.hop(hop), wait=False)
        yield step, pair, hop
        pair = pair if coming is None else coming.wait()
