"""Attention of a block by tiles. A tile is computed only if some query in it sees some key.

A block of a sequence is cut into tiles of one length. Which tiles of queries meet which tiles of keys follows from the
positions and the mask, before anything runs. All ranks run the same operations on equally many tiles: a rank that needs
fewer gets hidden ones. So ranks do equal work where the layout of the sequence balances it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fspmd.nn import block
from fspmd.nn.kernels import TRIANGLE, Allowed, BlockOptions
from fspmd.nn.masks import Mask
from fspmd.nn.parts import PartGradient, PartialAttention, Triple, merge, shares
from fspmd.tracing import hidden

MOST_TILES = 8  # of a block of queries, unless they would be too long
LEAST_LENGTH = 64  # of a tile; shorter ones spend more on copies than they save
MOST_BOOLS = 1 << 25  # of a mask, made at once; kernels of CPUs make numbers of four bytes of them
LONGEST_MASKED = 4096  # tile, of a block that would need a larger mask


Seen = Literal["all", "triangle", "some"]


class TileRuns(NamedTuple):
    """The positions of a tile; whether it has places without a position; and whether it has them in ascending order."""

    ranges: list[range]
    padded: bool
    ascending: bool


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of tiles that are computed together: int64 [ranks, pairs], and bool for ``real``."""

    query: Tensor
    key: Tensor
    real: Tensor  # False: a hidden pair, for ranks that need fewer
    seen: Seen  # which keys of a pair a query sees; "triangle": those up to its own place

    def to(self, device: torch.device) -> Pairs:
        """The same group on a device."""
        return Pairs(self.query.to(device), self.key.to(device), self.real.to(device), self.seen)


class Seeing(NamedTuple):
    """Who sees whom: the rank among those that share the sequence, and the mask; and how scores become weights."""

    at: int | Tensor
    mask: Mask
    scale: float | None
    alone: bool  # whether no other part is merged with that of these keys


@dataclass(frozen=True, eq=False)
class Tiles:
    """What each rank computes of its queries and the keys that it has in a step.

    ``queries`` and ``keys`` have the positions by rank and tile: int64 [ranks, tiles, length]; -1 where there is none.
    """

    queries: Tensor
    keys: Tensor
    groups: tuple[Pairs, ...]
    is_one: bool  # whether all queries meet all keys at once, as one pair on each rank
    copies: dict[torch.device, Tiles] = field(default_factory=dict)  # on other devices

    def on(self, device: torch.device) -> Tiles:
        """The same on a device. They are copied once, unless the device exists for fake tensors only."""
        if device == self.queries.device:
            return self
        if device not in self.copies:
            module = None if device.type == "meta" else torch.get_device_module(device)
            if module is not None and not module.is_available():
                return self._copied(device)
            self.copies[device] = hidden(self._copied)(device)
        return self.copies[device]

    def _copied(self, device: torch.device) -> Tiles:
        groups = tuple(group.to(device) for group in self.groups)
        return Tiles(self.queries.to(device), self.keys.to(device), groups, self.is_one)

    @property
    def pairs(self) -> int:
        """The number of pairs of tiles that each rank computes."""
        return sum(group.query.shape[1] for group in self.groups)

    @property
    def bools(self) -> int:
        """The size of the mask of a pair of tiles."""
        return self.queries.shape[2] * self.keys.shape[2]

    @property
    def is_small(self) -> bool:
        """Whether no pair needs a mask of more than `MOST_BOOLS`."""
        return self.is_exact or self.bools <= MOST_BOOLS

    @property
    def is_exact(self) -> bool:
        """Whether each rank computes the pairs of query and key that the mask allows, and no others."""
        return all(group.seen != "some" for group in self.groups)

    @property
    def skips(self) -> bool:
        """Whether some pairs of tiles are not computed."""
        return self.pairs < self.queries.shape[1] * self.keys.shape[1]

    def forward(self, operands: Triple, seeing: Seeing) -> PartialAttention:
        """The part of the keys."""
        merged, cut = None, self._cut_all(operands)
        for q, k, of_query, _, allowed in self._each(operands[0].device, seeing):
            if self.is_one:
                return block.forward(operands, BlockOptions(_of_one(allowed), *seeing[2:]))
            out, lse = block.forward(_take_all(cut, q, k), BlockOptions(allowed, seeing.scale))
            by_tile = torch.where(
                of_query[:, :, None, None], lse.unsqueeze(-4), -torch.inf
            )  # [.., tiles, pairs, heads, n]
            weights, total = shares(by_tile, -3)
            out = (weights.movedim(-3, -1).unsqueeze(-2) @ out.movedim(-4, -2).unsqueeze(-5)).squeeze(-2)
            part = PartialAttention(self._joined(out), total.movedim(-3, -2).flatten(-2))
            merged = part if merged is None else merge(merged, part)
        assert merged is not None  # `Turns` leaves out steps without pairs
        return merged

    def backward(self, grad: PartGradient, operands: Triple, merged: PartialAttention, seeing: Seeing) -> list[Tensor]:
        """The gradients of query, key and value, wide; ``merged`` is the part of all keys that the queries see."""
        dtype, totals = merged.out.dtype, list[Tensor]()
        cut, out_grads, outs = self._cut_all(operands), *(self._cut(x, self.queries) for x in (grad.out, merged.out))
        lses = self._cut_rows(merged.lse)
        lse_grads = None if grad.lse is None else self._cut_rows(grad.lse)
        for q, k, of_query, of_key, allowed in self._each(operands[0].device, seeing):
            if self.is_one:
                parts = block.backward(grad, operands, merged, BlockOptions(_of_one(allowed), *seeing[2:]))
                return [gradient.to(dtype) for gradient in parts]
            some_grad = PartGradient(_take(out_grads, q), None if lse_grads is None else lse_grads.index_select(-3, q))
            part = PartialAttention(_take(outs, q), lses.index_select(-3, q))
            parts = block.backward(some_grad, _take_all(cut, q, k), part, BlockOptions(allowed, seeing.scale))
            sums = [
                self._joined(torch.tensordot(of_tile.to(dtype), gradient.to(dtype).movedim(-4, 0), 1).movedim(0, -4))
                for gradient, of_tile in zip(parts, (of_query, of_key, of_key), strict=True)
            ]
            totals = [total + part for total, part in zip(totals, sums, strict=True)] if totals else sums
        return totals

    def _each(self, device: torch.device, seeing: Seeing) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Allowed]]:
        """Yield pairs: the tiles of queries and of keys, which pairs are of which tile, and who sees whom.

        The pairs of a group are computed together, but no more at once than there are tiles: each has its own copies.
        Nor are there more than for a mask of `MOST_BOOLS`.
        """
        tiles, at = self.on(device), seeing.at
        queries, keys = (_row(x, at) for x in (tiles.queries, tiles.keys))
        most = max(len(queries), len(keys))
        masked = max(1, min(most, MOST_BOOLS // max(1, self.bools)))
        turns = [
            (group, slice(start, start + n))
            for group, n in ((group, masked if group.seen == "some" else most) for group in tiles.groups)
            for start in range(0, group.query.shape[1], n)
        ]
        for group, some in turns:
            q, k, real = (_row(x, at)[some] for x in (group.query, group.key, group.real))
            allowed: Allowed = TRIANGLE if group.seen == "triangle" else None
            if group.seen == "some":
                seen = keys[k]
                allowed = seeing.mask.allows(queries[q].clamp(min=0)[:, :, None], seen.clamp(min=0)[:, None, :])
                allowed = (allowed & (seen >= 0)[:, None, :] & real[:, None, None]).unsqueeze(1)
            of_query, of_key = (
                (torch.arange(len(tiles), device=device)[:, None] == index) & real
                for tiles, index in ((queries, q), (keys, k))
            )
            yield q, k, of_query, of_key, allowed

    def _cut_all(self, operands: Triple) -> Triple:
        query, key, value = operands
        return self._cut(query, self.queries), self._cut(key, self.keys), self._cut(value, self.keys)

    @staticmethod
    def _cut(x: Tensor, positions: Tensor) -> Tensor:
        """[..., heads, n, width] as [..., tiles, heads, length, width]."""
        cut: Tensor = x.unflatten(-2, positions.shape[1:])
        return cut.movedim(-3, -4)

    def _cut_rows(self, x: Tensor) -> Tensor:
        """[..., heads, queries] as [..., tiles, heads, length]."""
        rows: Tensor = x.unflatten(-1, self.queries.shape[1:])
        return rows.movedim(-2, -3)

    @staticmethod
    def _joined(x: Tensor) -> Tensor:
        """[..., tiles, heads, length, width] as [..., heads, n, width]."""
        return x.movedim(-4, -3).flatten(-3, -2)


def _row(x: Tensor, at: int | Tensor) -> Tensor:
    """``x[at]``, without asking for the number: it differs from rank to rank."""
    return x[at] if isinstance(at, int) else x.index_select(0, at).squeeze(0)


def _of_one(allowed: Allowed) -> Allowed:
    return allowed.squeeze(0) if isinstance(allowed, Tensor) else allowed


def _take(tiles: Tensor, index: Tensor) -> Tensor:
    return tiles.index_select(-4, index)


def _take_all(tiles: Triple, queries: Tensor, keys: Tensor) -> Triple:
    return _take(tiles[0], queries), _take(tiles[1], keys), _take(tiles[2], keys)


def count_of(length: int) -> int:
    """Return into how many tiles a block of a length is cut."""
    return max(1, min(MOST_TILES, length // LEAST_LENGTH), -(-length // LONGEST_MASKED))


def runs_of(table: Tensor) -> list[list[TileRuns]]:
    """The runs of positions of each tile, by rank. ``table`` has the positions: int64 [ranks, tiles, length]."""
    return [[_runs(tile) for tile in row] for row in table.tolist()]


def make_tiles(
    queries: Tensor, keys: Tensor, of_queries: list[list[TileRuns]], of_keys: list[list[TileRuns]], mask: Mask
) -> Tiles:
    """The tiles of a step. ``queries`` and ``keys`` are those of `Tiles`, the others their `runs_of`."""
    over, triangle = functools.cache(mask.over), functools.cache(mask.is_triangle)
    pairs: dict[Seen, list[list[tuple[int, int]]]] = {"all": [], "triangle": [], "some": []}
    for rank, (query_runs, key_runs) in enumerate(zip(of_queries, of_keys, strict=True)):
        for row in pairs.values():
            row.append([])
        for (i, q), (j, k) in itertools.product(enumerate(query_runs), enumerate(key_runs)):
            known = _over(over, q, k)
            if known is None and q.ascending and torch.equal(queries[rank, i], keys[rank, j]):
                known = "triangle" if triangle(range(q.ranges[0].start, q.ranges[-1].stop)) else None
            if known is not False:
                pairs["all" if known is True else known or "some"][rank].append((i, j))
    groups = tuple(group for seen, rows in pairs.items() if (group := _group(rows, seen)) is not None)
    is_one = queries.shape[1] == keys.shape[1] == 1 and len(groups) == 1 and bool(groups[0].real.all())
    return Tiles(queries, keys, groups, is_one)


def _over(
    over: Callable[[range, range], bool | None], queries: TileRuns, keys: TileRuns
) -> bool | Literal["triangle"] | None:
    known = {over(q, k) for q in queries.ranges for k in keys.ranges}
    if None in known or len(known) > 1:
        return None
    return True in known and (not keys.padded or None)


def _runs(positions: list[int]) -> TileRuns:
    """The runs of consecutive positions. Where they are many, one range from the first to the last."""
    places = sorted(p for p in positions if p >= 0)
    starts = [i for i, p in enumerate(places) if not i or places[i - 1] != p - 1]
    if len(starts) > MOST_TILES:
        starts = starts[:1]
    ends = [*starts[1:], len(places)] if starts else []
    ranges = [range(places[start], places[end - 1] + 1) for start, end in zip(starts, ends, strict=True)]
    return TileRuns(ranges, len(places) < len(positions), places == positions)


def _group(pairs: list[list[tuple[int, int]]], seen: Seen) -> Pairs | None:
    most = max(map(len, pairs))
    if not most:
        return None
    rows = torch.tensor([[*row, *[(0, 0)] * (most - len(row))] for row in pairs])
    real = torch.tensor([[i < len(row) for i in range(most)] for row in pairs])
    return Pairs(rows[..., 0], rows[..., 1], real, seen if bool(real.all()) else "some")
