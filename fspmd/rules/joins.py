"""Slices, joins, shifts and reshapes along sharded dims: each rank fetches the rows of its new block that it lacks.

An int index takes a row that one rank has. The result is a pending sum, and nothing moves.

A reshape moves elements if a sharded dim is not the first of its group, or if blocks change. The elements of a group of
dims are split into rows, as long as the boundaries of all blocks allow.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from fspmd.entries import entry_axes
from fspmd.rules.bodies import Bodied, Site
from fspmd.rules.views import groups
from fspmd.rules.windows import (
    Places,
    block_places,
    exchanged,
    fetched,
    in_pieces,
    moved_in_turn,
    passing,
    per_rank,
    picked,
    refilling,
    still,
    taken,
)
from fspmd.spec import TensorSpec
from fspmd.transport.carriers import where


@dataclass(frozen=True, slots=True)
class _Repeats:
    """The blocks of a group of dims, in its elements: ``times`` periods of ``width`` elements, each cut into parts."""

    times: int
    width: int
    parts: tuple[tuple[int, int], ...]  # (offset, length) of each block in a period
    sizes: tuple[int, ...]  # of the dims of a block; -1 for the cut dim

    @classmethod
    def of(cls, site: Site, spec: TensorSpec, dims: Sequence[int], axes: tuple[str, ...], key: int) -> _Repeats:
        sizes = [spec.shape[d] for d in dims]
        place = next(i for i, d in enumerate(dims) if entry_axes(spec.partition[d]) == axes)
        inner = prod(sizes[place + 1 :])
        parts = tuple((start * inner, length * inner) for start, length in site.blocks(sizes[place], key))
        width = sizes[place] * inner
        sizes[place] = -1
        return cls(prod(sizes[:place]), width, parts, tuple(sizes))

    @property
    def unit(self) -> int:
        """The greatest length that divides all offsets and lengths of blocks."""
        return gcd(self.width, *(start for start, _ in self.parts))

    def rows(self, unit: int, at: int) -> Tensor:
        """Return the rows of ``unit`` elements that a block has, in order."""
        start, length = self.parts[at]
        within = torch.arange(start // unit, (start + length) // unit)
        return (torch.arange(self.times)[:, None] * (self.width // unit) + within).flatten()


def regrouped(site: Site, x: Tensor, source: Sequence[int], target: Sequence[int], shift: int = 0) -> Tensor:
    """Reshape the dims ``source`` into the dims ``target``; ``shift``: all elements first move on by so many places."""
    before, after, at = site.operands[0], site.results[0], target[0]
    flat = x.flatten(at, at + len(source) - 1)
    sizes: Sequence[int] = [after.shape[d] for d in target]
    if (cut := next((d for d in source if before.partition[d] is not None), None)) is not None:
        axes = site.axes[cut]
        old, new = (_Repeats.of(site, spec, dims, axes, cut) for spec, dims in ((before, source), (after, target)))
        unit, count = gcd(old.unit, new.unit, shift), old.times * old.width
        sizes = new.sizes
        if not site.once(("aligned", at), lambda: not shift and _alike(old, new, unit)):
            flat = exchanged(
                site,
                ("rows", at),
                flat.unflatten(at, (-1, unit)),
                at,
                axes,
                lambda at: old.rows(unit, at),
                lambda at: (new.rows(unit, at) - shift // unit) % (count // unit),
            ).flatten(at, at + 1)
    out: Tensor = flat.unflatten(at, sizes)
    return out


def _alike(old: _Repeats, new: _Repeats, unit: int) -> bool:
    return all(torch.equal(old.rows(unit, at), new.rows(unit, at)) for at in range(len(old.parts)))


@passing
def reshape(site: Site, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """The body of reshapes: group by group; dims of size 1 appear or vanish."""
    for source, target in groups(site.operands[0].shape, site.results[0].shape):
        if not target:
            x = x.squeeze(len(x.shape) - (len(site.operands[0].shape) - source[0]))
        elif not source:
            x = x.unsqueeze(target[0])
        elif len(source) > 1 or len(target) > 1:
            x = regrouped(site, x, source, target)
    return x


def _size(site: Site, d: int) -> int:
    return site.operands[0].shape[d]


def _from(start: int, step: int) -> Places:
    return lambda i: start + step * i


def _rolled(shift: int, size: int, i: Tensor) -> Tensor:
    return (i - shift) % size


def _within(before: int, size: int, i: Tensor) -> Tensor:
    return (i - before).where((i >= before) & (i < before + size), -1)


def _outside(rows: Places, blocks: Sequence[tuple[int, int]], at: int) -> Tensor:
    return rows(block_places(blocks, at)) < 0


def _cut(site: Site, x: Tensor, d: int, start: int, length: int, step: int = 1) -> Tensor:
    """Return a range of a dim, sharded or not."""
    if not site.axes.get(d):
        return x[(slice(None),) * d + (slice(start, start + length * step, step),)]
    return taken(site, ("cut", start, length, step), x, d, _size(site, d), length, _from(start, step))


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
                x = picked(site, "at", x, d, _size(site, d), entry % _size(site, d))
                entries[i] = 0
            elif site.axes.get(d) and entry != slice(None):
                places = range(*entry.indices(_size(site, d)))
                x = _cut(site, x, d, places.start, len(places), places.step)
                entries[i] = slice(None)
            d += 1
    return x[tuple(entries)]


@passing
def select(site: Site, x: Tensor, dim: int, index: int) -> Tensor:
    """The body of ``select``: one row, as a pending sum."""
    d = dim % x.dim()
    return picked(site, "at", x, d, _size(site, d), index % _size(site, d)).select(d, 0)


@passing
def narrow(site: Site, x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """The body of ``narrow``."""
    d = dim % x.dim()
    return _cut(site, x, d, start % _size(site, d) if start < 0 else start, length)


@passing
def cut(site: Site, x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    """The body of aten's ``slice``."""
    d = dim % x.dim()
    places = range(*slice(start, end, step).indices(_size(site, d)))
    return _cut(site, x, d, places.start, len(places), step)


@in_pieces
def split(site: Site, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """The body of ``split`` and ``chunk``: one exchange for all pieces."""
    d = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % x.dim()
    sizes, axes = [spec.shape[d] for spec in site.results], site.axes[d]
    starts = list(itertools.accumulate(sizes, initial=0))[:-1]
    cuts = [site.blocks(size, d) for size in sizes]

    def rows(at: int) -> Tensor:
        return torch.cat([start + block_places(cut, at) for start, cut in zip(starts, cuts, strict=True)])

    x = fetched(site, "split", x, d, axes, site.blocks(_size(site, d), d), rows)
    if all(spec.even for spec in site.results):
        return tuple(x.split([cut[0][1] for cut in cuts], d))

    def piece(k: int, at: int) -> Tensor:
        before = sum(cut[at][1] for cut in cuts[:k])
        return torch.arange(before, before + cuts[k][at][1])

    indices = [per_rank(site, k, axes, functools.partial(piece, k)) for k in range(len(cuts))]
    return tuple(x.index_select(d, index) for index in indices)


@passing
def flip(site: Site, x: Tensor, dims: int | Sequence[int], *more: int) -> Tensor:
    """The body of ``flip``."""
    over = [d % x.dim() for d in ((dims, *more) if isinstance(dims, int) else dims)]
    for d in over:
        if site.axes.get(d):
            last = _size(site, d) - 1
            x = taken(site, "flip", x, d, last + 1, last + 1, _from(last, -1))
    return x.flip([d for d in over if not site.axes.get(d)])


@passing
def roll(site: Site, x: Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Tensor:
    """The body of ``roll``."""
    if not isinstance(dims, int) and not dims:
        (shift,) = [shifts] if isinstance(shifts, int) else shifts
        return (
            regrouped(site, x, range(x.dim()), range(x.dim()), shift) if 0 not in site.operands[0].shape else x.clone()
        )
    pairs = zip(*(([v] if isinstance(v, int) else v) for v in (shifts, dims)), strict=True)
    for k, (shift, dim) in enumerate(pairs):
        d = dim % x.dim()
        size = _size(site, d)
        if site.axes.get(d) and size:
            x = taken(site, k, x, d, size, size, functools.partial(_rolled, shift, size))
        else:
            x = x.roll(shift, d)
    return x


@passing
def shuffle(site: Site, x: Tensor, groups: int) -> Tensor:
    """The body of ``channel_shuffle``: the first channel of each group, then the second of each, and so on."""
    channels = _size(site, 1)
    return taken(site, "shuffle", x, 1, channels, channels, lambda i: i % groups * (channels // groups) + i // groups)


@passing
def repeat(site: Site, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """The body of ``repeat`` and ``tile``."""
    after = site.results[0].shape
    new = len(after) - x.dim()
    for d in range(x.dim()):
        size = _size(site, d)
        if site.axes.get(d) and after[new + d] != size:
            x = taken(site, "repeat", x, d, size, after[new + d], functools.partial(_rolled, 0, size))
    times = [n // size if size and not site.axes.get(d) else 1 for d, (n, size) in _sizes(site, after[new:])]
    return x.repeat(*after[:new], *times)


def _sizes(site: Site, after: Sequence[int]) -> Any:
    return enumerate(zip(after, site.operands[0].shape, strict=True))


@passing
def pad(site: Site, x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    """The body of ``constant_pad_nd``. Negative sizes drop rows."""
    local = list(pad)
    for k in range(len(pad) // 2):
        d = x.dim() - 1 - k
        size, before, after = _size(site, d), pad[2 * k], site.results[0].shape[d]
        if not site.axes.get(d) or not (before or pad[2 * k + 1]):
            continue
        local[2 * k] = local[2 * k + 1] = 0
        rows = functools.partial(_within, before, size)
        x = taken(site, "pad", x, d, size, after, rows)
        if str(value) not in ("0", "0.0"):  # -0.0 must be filled in too
            outside = functools.partial(_outside, rows, site.blocks(after, d))
            empty = per_rank(site, ("empty", d), site.axes[d], outside)
            filling = torch.full((), value, dtype=x.dtype, device=x.device)
            x = where(empty.view(-1, *(1,) * (x.dim() - 1 - d)), filling, x)
    return torch.constant_pad_nd(x, local, value)


def _mirrored(before: int, behind: int, size: int, i: Tensor) -> Tensor:
    return size - 1 - ((i - before).abs() - size + 1).abs()


def _nearest(before: int, behind: int, size: int, i: Tensor) -> Tensor:
    return (i - before).clamp(0, size - 1)


def _wrapped(before: int, behind: int, size: int, i: Tensor) -> Tensor:
    left = max(-before, 0)  # rows are dropped before the others wrap around
    return left + (i - max(before, 0)) % (size - left - max(-behind, 0))


def pad_with(rows: Callable[[int, int, int, Tensor], Tensor]) -> Bodied:
    """Return the body of a pad with rows of the operand: ``rows(before, behind, size, places)`` gives their places."""

    def body(site: Site, x: Tensor, pad: Sequence[int], *_: Any, **__: Any) -> Tensor:
        sides = {x.dim() - 1 - k: side for k, side in enumerate(zip(pad[::2], pad[1::2], strict=True))}
        for d in moved_in_turn(site, {d: d for d in sides}):
            before, behind = sides[d]
            size, after = _size(site, d), site.results[0].shape[d]
            if before or behind:
                x = taken(site, "pad", x, d, size, after, functools.partial(rows, before, behind, size))
        return x

    return refilling(body)


reflect, replicate, wrap = pad_with(_mirrored), pad_with(_nearest), pad_with(_wrapped)


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

    rows = fetched(site, "rows", x, d, axes, site.blocks(_size(site, d), d), wanted)
    own = rows.index_select(d, per_rank(site, "windows", axes, windows))
    split: Tensor = own.unflatten(d, (-1, size))
    return split.movedim(d + 1, -1)


def triangle(beyond: Callable[[Tensor, int], Tensor]) -> Bodied:
    """Return the body of ``tril`` or ``triu``: each rank zeroes the elements of its block ``beyond`` the diagonal."""

    def body(site: Site, x: Tensor, diagonal: int = 0) -> Tensor:
        places = []
        for d in (x.dim() - 2, x.dim() - 1):
            cut = site.blocks(_size(site, d), d)
            places.append(per_rank(site, d, site.axes.get(d, ()), functools.partial(block_places, cut)))
        return x.masked_fill(beyond(places[1] - places[0][:, None], diagonal), 0)

    return still(body)


tril = triangle(lambda behind, diagonal: behind > diagonal)
triu = triangle(lambda behind, diagonal: behind < diagonal)
