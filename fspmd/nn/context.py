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

from collections.abc import Iterable, Iterator
from math import lcm
from typing import TypeVar

from torch import Tensor
from torch.nn import functional as F

from fspmd.body import bound_body, resolve_axes
from fspmd.collectives import all_to_all, axis_index, axis_size
from fspmd.errors import ShapeError
from fspmd.nn.arguments import Block, Scale, checked
from fspmd.nn.attention import Way, attention
from fspmd.nn.checks import check_layout, check_operands, check_varies, shapes_everywhere
from fspmd.nn.masks import Full, Mask
from fspmd.nn.ring import Exchanged, Gathered, Ring, turns_of
from fspmd.nn.sequences import Axes, SequenceLayout


@checked
def ring_attention(
    query: Block,
    key: Block,
    value: Block,
    axis: Axes,
    *,
    mask: Mask | None = None,
    layout: SequenceLayout | None = None,
    scale: Scale | None = None,
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

    >>> import torch
    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> from fspmd.nn import Causal, zigzag
    >>> mesh, layout = make_mesh((4,), ("cp",)), zigzag(16, 4)
    >>> q, k, v = torch.randn(3, 2, 16, 8, dtype=torch.float64)
    >>> ring = shard_map(lambda q, k, v: ring_attention(q, k, v, "cp", mask=Causal(), layout=layout),
    ...                  mesh=mesh, in_specs=P(None, "cp"), out_specs=P(None, "cp"))
    >>> out = layout.restore(device_get(ring(*(layout.store(x, 1) for x in (q, k, v)))), 1)
    >>> torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    True
    """
    way = _checked(query, key, value, axis, (), mask, layout, scale, sinks, "ring_attention", Ring)
    return _attend(way, _padded((query, key, value), way.turns.length), sinks, query)


@checked
def gathered_attention(
    query: Block,
    key: Block,
    value: Block,
    axis: Axes,
    *,
    mask: Mask | None = None,
    layout: SequenceLayout | None = None,
    scale: Scale | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention to gathered keys and values. Arguments and results are those of `ring_attention`.

    Communication: an `all_gather` of keys and one of values, forward; a reduce-scatter of each gradient, backward.
    """
    given = query, key, value, axis, (), mask, layout, scale, sinks, "gathered_attention"
    way = _checked(*given, Gathered) if axis else _checked(*given, Ring)  # which is one step, of what a rank has
    return _attend(way, _padded((query, key, value), way.turns.length), sinks, query)


@checked
def ulysses_attention(
    query: Block,
    key: Block,
    value: Block,
    axis: Axes,
    *,
    ring: Axes | None = None,
    mask: Mask | None = None,
    layout: SequenceLayout | None = None,
    scale: Scale | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention with heads in the place of the sequence. Arguments and results are those of `ring_attention`.

    Where there are fewer KV heads than ranks, each is repeated as often as needed.

    Args:
        ring: A second axis, over which the sequence is cut first: ``P(..., ("ring", "heads"))``. Along it the keys and
            values pass in a ring, as in `ring_attention`.
        layout: Which positions the ranks of all these axes have, or those of ``ring`` alone.

    Communication: an `all_to_all` of each operand and one of the result, forward; the same of gradients, backward.

    Raises:
        ShapeError: As `ring_attention`; and the number of heads is no multiple of the ranks.
    """
    way = _checked(query, key, value, ring or (), axis, mask, layout, scale, sinks, "ulysses_attention", Ring)
    if not axis:
        return _attend(way, _padded((query, key, value), way.turns.length), sinks, query)
    n, heads = axis_size(axis), query.shape[-3]
    exchanged = Exchanged(way, axis, lcm(key.shape[-3], n) // key.shape[-3])
    query_rows, *pair = _padded((query, key, value), way.turns.length // n)
    part: Tensor = all_to_all(query_rows, axis, query.dim() - 3, query.dim() - 2, tiled=True)
    if sinks is not None:
        sinks = sinks.view(n, heads // n)[axis_index(axis)]
    out = _attend(exchanged, (part, *pair), sinks, part)
    result: Tensor = all_to_all(out, axis, out.dim() - 2, out.dim() - 3, tiled=True)
    return result.narrow(-2, 0, query.shape[-2])


W = TypeVar("W", Ring, Gathered)


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
    way: type[W],
) -> W:
    """The way over ``ring``, whose blocks ``axis`` cuts into parts, after checks of all arguments."""
    everywhere = shapes_everywhere(what, query, key, value, *([] if sinks is None else [sinks]))
    check_operands(query, key, value, what, everywhere)
    body = bound_body(what)
    rings, inner = resolve_axes(body, ring, what), resolve_axes(body, axis, what)
    if cut := rings + inner:
        check_varies(what, cut, "a query, key and value", query, key, value)
    for shapes in everywhere.values():
        if shapes[0][-2] != shapes[1][-2]:
            raise ShapeError(
                f"{what} got a block of {shapes[0][-2]} queries and one of {shapes[1][-2]} keys; both are of one "
                "sequence"
            )
        if shapes[3:] and shapes[3] != shapes[0][-3:-2]:
            raise ShapeError(
                f"{what} got sinks of shape {shapes[3]} for {shapes[0][-3]} heads; give it one of each head"
            )
        if axis and shapes[0][-3] % axis_size(axis):
            raise ShapeError(
                f"{what} got {shapes[0][-3]} heads for the {axis_size(axis)} ranks of {axis!r}, to which it gives "
                "equally many; call ring_attention, or make the axis a divisor of the heads"
            )
    mask = Full() if mask is None else mask
    layout = check_layout(layout, everywhere, rings, inner, what)
    mask.check(layout.length)
    return way(turns_of(rings, mask.outline, layout, body.sizes(inner), way is Gathered), mask, scale)


def _padded(blocks_of_rank: Iterable[Tensor], length: int) -> Iterator[Tensor]:
    """Blocks with zeros up to a length, dense: a block that is padded would have other strides than one that is not."""
    return (F.pad(x, (0, 0, 0, length - x.shape[-2])).contiguous() for x in blocks_of_rank)


def _attend(way: Way, operands: Iterable[Tensor], sinks: Tensor | None, like: Tensor) -> Tensor:
    """The attention of padded blocks, as long and of the dtype as ``like``."""
    query, key, value = operands
    out = attention(way, query, key, value, sinks=sinks).out
    return out.to(like.dtype).narrow(-2, 0, like.shape[-2])
