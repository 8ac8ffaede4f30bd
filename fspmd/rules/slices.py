"""Slices, pieces and joins: each rank fetches the rows of its new block that it lacks.

An int index takes a row that one rank has. The result is a pending sum, and nothing moves.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fspmd.rules.bodies import Site
from fspmd.rules.factors import NO_RULE, Factors, Rule, ShapedCall, keeping
from fspmd.rules.windows import Places, block_places, fetched, in_pieces, passing, per_rank, picked, size_of, taken


def indexed(call: ShapedCall) -> Factors:
    """The rule of ``x[...]`` with ints, slices, None and an ellipsis: dims that are not taken in full must be whole."""
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if not all(entry is None or entry is Ellipsis or type(entry) in (int, slice) for entry in index):
        return NO_RULE
    dims = sum(type(entry) in (int, slice) for entry in index)
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    result: list[int | None] = []
    cut: set[int] = set()
    picked: set[int] = set()
    at = 0
    for entry in index:
        if entry is None:
            result.append(None)
        elif entry is Ellipsis:
            result += range(at, at + call.ndim - dims)
            at += call.ndim - dims
        else:
            if type(entry) is int:
                picked.add(at)
            else:
                result.append(at)
                if entry != slice(None):
                    cut.add(at)
            at += 1
    ints = frozenset(picked)
    return Factors((tuple(range(call.ndim)),), (tuple(result),), summed=ints, whole=frozenset(cut) | ints, near=ints)


@passing
def getitem(site: Site, x: Tensor, index: Any) -> Tensor:
    """The body of ``x[...]`` with ints, slices, None and an ellipsis."""
    entries = [*index] if isinstance(index, (tuple, list)) else [index]
    if Ellipsis not in entries:
        entries.append(Ellipsis)
    d = 0
    for i, entry in enumerate(entries):
        if entry is Ellipsis:
            d += x.dim() - sum(type(index) in (int, slice) for index in entries)
        elif entry is not None:
            if site.axes.get(d) and type(entry) is int:
                x = picked(site, "at", x, d, size_of(site, d), entry % size_of(site, d))
                entries[i] = 0
            elif site.axes.get(d) and entry != slice(None):
                places = range(*entry.indices(size_of(site, d)))
                x = _cut(site, x, d, places.start, len(places), places.step)
                entries[i] = slice(None)
            d += 1
    return x[tuple(entries)]


def _sliced_dims(call: ShapedCall) -> tuple[int, ...]:
    return () if call.results[0] == call.shapes[0] else (call.argument(1, "dim", 0) % call.ndim,)


sliced = keeping(_sliced_dims)


@passing
def cut(site: Site, x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    """The body of aten's ``slice``."""
    d = dim % x.dim()
    places = range(*slice(start, end, step).indices(size_of(site, d)))
    return _cut(site, x, d, places.start, len(places), step)


def _cut(site: Site, x: Tensor, d: int, start: int, length: int, step: int = 1) -> Tensor:
    """Return a range of a dim, sharded or not."""
    if not site.axes.get(d):
        return x[(slice(None),) * d + (slice(start, start + length * step, step),)]
    return taken(site, ("cut", start, length, step), x, d, size_of(site, d), length, _from(start, step))


def _from(start: int, step: int) -> Places:
    return lambda i: start + step * i


# --- pieces and joins -------------------------------------------------------------------------------------------------


def parts(place: int, name: str, *, gone: bool = False, copied: bool = False) -> Rule:
    """Return the rule of pieces along a dim, which must be whole.

    Args:
        place: The place of the argument that names the dim.
        name: Its name.
        gone: The pieces do not have the dim.
        copied: The pieces are not views.
    """

    def rule(call: ShapedCall) -> Factors:
        dim = call.argument(place, name, 0) % call.ndim
        every = range(call.ndim)
        piece = tuple(d for d in every if d != dim) if gone else tuple(every)
        cut = frozenset({dim})
        summed = cut if gone else frozenset[int]()  # one rank has the piece; the terms of the others are zero
        if copied and call.results[0] == call.shapes[0]:
            cut = frozenset()  # there is one piece
        return Factors((tuple(every),), (piece,) * len(call.results), summed=summed, whole=cut, near=summed)

    return rule


@passing
def select(site: Site, x: Tensor, dim: int, index: int) -> Tensor:
    """The body of ``select``: one row, as a pending sum."""
    d = dim % x.dim()
    return picked(site, "at", x, d, size_of(site, d), index % size_of(site, d)).select(d, 0)


@passing
def narrow(site: Site, x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """The body of ``narrow``."""
    d = dim % x.dim()
    return _cut(site, x, d, start % size_of(site, d) if start < 0 else start, length)


def chunk_blocks(_: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
    """Run `torch.unsafe_chunk` on blocks."""
    return torch.chunk(*args, **kwargs)


def split_blocks(_: tuple[int, ...], x: Tensor, split_size: Any, dim: int = 0) -> Any:
    """Run `torch.unsafe_split` on blocks."""
    return torch.split(x, split_size, dim)


@in_pieces
def split(site: Site, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """The body of ``split`` and ``chunk``: one exchange for all pieces."""
    d = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % x.dim()
    sizes, axes = [spec.shape[d] for spec in site.results], site.axes[d]
    starts = list(itertools.accumulate(sizes, initial=0))[:-1]
    cuts = [site.blocks(size, d) for size in sizes]

    def rows(at: int) -> Tensor:
        return torch.cat([start + block_places(cut, at) for start, cut in zip(starts, cuts, strict=True)])

    x = fetched(site, "split", x, d, axes, site.blocks(size_of(site, d), d), rows)
    if all(spec.even for spec in site.results):
        return tuple(x.split([cut[0][1] for cut in cuts], d))

    def piece(k: int, at: int) -> Tensor:
        before = sum(cut[at][1] for cut in cuts[:k])
        return torch.arange(before, before + cuts[k][at][1])

    indices = [per_rank(site, k, axes, functools.partial(piece, k)) for k in range(len(cuts))]
    return tuple(x.index_select(d, index) for index in indices)


def joined(*, new: bool = False) -> Rule:
    """Return the rule of ``cat``: the dim must be whole; with ``new`` that of ``stack``, where the dim is new."""

    def rule(call: ShapedCall) -> Factors:
        ndim = max(map(len, call.shapes))
        dim = call.argument(1, "dim", 0) % (ndim + new)
        every = range(ndim)
        if new:
            return Factors((tuple(every),) * len(call.shapes), ((*range(dim), None, *range(dim, ndim)),))
        long = [shape for shape in call.shapes if len(shape) == ndim and shape[dim]]
        if len(long) == 1:  # all other operands are empty
            empty = tuple(None if d == dim else d for d in every)
            rows = (
                tuple(every) if shape is long[0] else empty if len(shape) == ndim else (None,) for shape in call.shapes
            )
            return Factors(tuple(rows), (tuple(every),))
        operands = tuple(tuple(every) if len(shape) == ndim else (None,) for shape in call.shapes)  # torch skips [0]
        return Factors(operands, (tuple(every),), whole=frozenset({dim}))

    return rule


@passing
def cat(site: Site, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The body of ``cat``: each rank fetches the rows of each operand that fall into its new block."""
    shape, parts, start = site.results[0].shape, [], 0
    d = dim % len(shape)
    axes, blocks = site.axes[d], site.blocks(shape[d], d)
    for k, (x, spec) in enumerate(zip(tensors, site.operands, strict=True)):
        if x.dim() != len(shape):
            continue
        size = spec.shape[d]
        before = site.blocks(size, d)

        def wanted(at: int, start: int = start, size: int = size) -> Tensor:
            places = block_places(blocks, at) - start
            return places[(places >= 0) & (places < size)]

        parts.append(fetched(site, k, x, d, axes, before, wanted))
        start += size
    return torch.cat(parts, d)
