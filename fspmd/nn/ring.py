"""How the queries of a rank meet the keys of a cut sequence: in a ring, gathered, or with heads cut in its place.

The steps follow from the layout and the mask, before anything runs: which keys a rank has in a step, and which tiles it
computes. Masks whose ranges say the same share them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from fspmd.cache import cached
from fspmd.collectives import all_gather, all_to_all, axis_index, ppermute, psum_scatter
from fspmd.entries import blocks
from fspmd.nn.attention import Met
from fspmd.nn.masks import Mask
from fspmd.nn.parts import PartGradient, PartialAttention, Triple, empty_part, merge
from fspmd.nn.sequences import Axes, SequenceLayout, on_host
from fspmd.nn.tiles import Seeing, Tiles, count_of, make_tiles, runs_of

Kept = tuple[Tensor | None, Tensor | None]  # the gradients of keys and values that were kept


@dataclass(frozen=True, eq=False)
class Turns:
    """The steps of a rank. In step i of a ring it has the block of the rank i places before it.

    ``table`` has the positions by rank and tile: int64 [ranks, tiles, length]. Places at which there is none have -1.
    """

    axis: Axes  # () if there is one rank
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
    def is_one_step(self) -> bool:
        """Whether queries meet all keys that they see in one step."""
        return len(self.tiles) == 1

    @property
    def at(self) -> int | Tensor:
        """The number of this rank."""
        return axis_index(self.axis) if self.axis else 0

    def hop(self, places: int) -> list[tuple[int, int]]:
        """Who sends to whom, for so many steps at once."""
        n = len(self.table)
        return [(r, (r + places) % n) for r in range(n)]


@cached(maxsize=256)
@on_host
def turns_of(
    axis: Axes, mask: Mask, layout: SequenceLayout, parts: tuple[int, ...] = (), gathered: bool = False
) -> Turns:
    """The steps over ``axis``, whose blocks axes of sizes ``parts`` cut into parts that may have different lengths.

    Args:
        mask: The `Mask.outline` of a mask.
        gathered: Whether a rank has the keys of the whole sequence, in one step.
    """
    are_equal = len({n for _, n in layout.cuts}) == 1 and not layout.block_length % prod(parts)

    @functools.cache
    def tiled(tiles: int) -> Turns:
        """The steps with about so many tiles of a block, which reach over parts if no part is padded."""
        if are_equal and not layout.block_length % tiles:
            return _tiled(axis, mask, layout, (), tiles, gathered)
        return _tiled(axis, mask, layout, parts, max(1, tiles // prod(parts)), gathered)

    for tiles in (1, 2):  # of a zigzag a rank has two runs of positions
        turns = tiled(tiles)
        if all(step.is_exact for step in turns.tiles.values()):
            return turns
    turns = tiled(count_of(layout.block_length))
    skips = len(turns.tiles) < (1 if gathered else len(layout.cuts)) or any(step.skips for step in turns.tiles.values())
    uncut = turns if skips else tiled(1)
    return uncut if all(step.is_small for step in uncut.tiles.values()) else turns


def _tiled(axis: Axes, mask: Mask, layout: SequenceLayout, parts: tuple[int, ...], tiles: int, gathered: bool) -> Turns:
    """The steps, with ``tiles`` tiles in each part of a block."""
    n, most = len(layout.cuts), blocks(layout.block_length, parts)[0][1]
    most = -(-most // tiles) * tiles

    def padded(row: Tensor) -> Tensor:
        cuts = blocks(len(row), parts)
        return torch.cat([F.pad(row[start : start + k], (0, most - k), value=-1) for start, k in cuts])

    table = torch.stack([padded(row[row >= 0]) for row in layout.table]).view(n, tiles * prod(parts), -1)
    runs = runs_of(table)
    if gathered:
        keys = table.view(1, -1) if tiles == 1 else table.flatten(0, 1)  # one tile if none is left out
        (every,) = runs_of(keys[None])
        steps = [make_tiles(table, keys.expand(n, -1, -1), runs, [every] * n, mask)]
    else:
        steps = [make_tiles(table, table.roll(i, 0), runs, [runs[r - i] for r in range(n)], mask) for i in range(n)]
    return Turns(axis, table, {i: step for i, step in enumerate(steps) if step.groups})


@dataclass(frozen=True, eq=False)
class _Steps:
    """The steps in which queries meet keys, by a mask."""

    turns: Turns
    mask: Mask
    scale: float | None

    def _seeing(self, alone: bool) -> Seeing:
        return Seeing(self.turns.at, self.mask, self.scale, alone)


class Ring(_Steps):
    """Blocks of keys and values pass all ranks. What is kept are a rank's own blocks, and not those that pass."""

    def forward(self, operands: Triple, allowed: None) -> Met:
        """The part of all keys."""
        query, _, value = operands
        merged, seeing = empty_part(query, value.shape[-1]), self._seeing(self.turns.is_one_step)
        for step, passing, _ in self._passing(operands[1:]):
            part = self.turns.tiles[step].forward((query, *passing), seeing)
            merged = part if step == self.turns.steps[0] else merge(merged, part)
        return Met(merged, ())

    def backward(
        self, grad: PartGradient, operands: Triple, merged: PartialAttention, allowed: None, kept_grads: tuple[()]
    ) -> list[Tensor]:
        """The ring once more. The gradients of keys and values travel with them, and come home in the end."""
        grads, seeing, coming = list[Tensor](), self._seeing(self.turns.is_one_step), None
        for step, passing, hop in self._passing(operands[1:]):
            parts = self.turns.tiles[step].backward(grad, (operands[0], *passing), merged, seeing)
            if coming is not None:
                grads[1:] = coming.wait()
            grads = [total + part for total, part in zip(grads, parts, strict=True)] if grads else parts
            coming = ppermute(tuple(grads[1:]), self.turns.axis, self.turns.hop(hop), wait=False) if hop else None
        if coming is not None:
            grads[1:] = coming.wait()
        return grads or _zero_gradients(operands, merged)

    def _passing(self, pair: tuple[Tensor, Tensor]) -> Iterator[tuple[int, tuple[Tensor, Tensor], int]]:
        """Yield each step, the keys and values that a rank has in it, and the places that their gradients go next.

        The pair of the next step is under way while one is in use. The gradients come home in the end.
        """
        axis, steps, hops, n = self.turns.axis, self.turns.steps, self.turns.hop, len(self.turns.table)
        if steps and steps[0]:
            pair = ppermute(pair, axis, hops(steps[0]))
        for step, after in itertools.pairwise([*steps, n]):
            hop, is_last = (after - step) % n, after == n
            coming = None if is_last else ppermute(pair, axis, hops(hop), wait=False)
            yield step, pair, hop
            pair = pair if coming is None else coming.wait()


class Gathered(_Steps):
    """A rank gathers the keys and values of the whole sequence, and keeps them."""

    def forward(self, operands: Triple, allowed: None) -> Met:
        """The part of all keys."""
        query, *pair = operands
        keys, values = (all_gather(x, self.turns.axis, axis=x.dim() - 2, tiled=True) for x in pair)
        merged = empty_part(query, values.shape[-1])
        for tiles in self.turns.tiles.values():
            merged = tiles.forward((query, keys, values), self._seeing(True))
        return Met(merged, (keys, values))

    def backward(
        self, grad: PartGradient, operands: Triple, merged: PartialAttention, allowed: None, kept_grads: Kept
    ) -> list[Tensor]:
        """The gradients of keys and values are summed wide: bfloat16 sums would lose precision."""
        grads, axis = list[Tensor](), self.turns.axis
        for tiles in self.turns.tiles.values():
            grads = tiles.backward(grad, operands, merged, self._seeing(not axis))
        query_grad, *grads = grads or _zero_gradients(operands, merged)
        totals = _with(grads, kept_grads)
        return [query_grad, *(psum_scatter(g, axis, scatter_dimension=g.dim() - 2, tiled=True) for g in totals)]


@dataclass(frozen=True, eq=False)
class Exchanged:
    """A rank gives its part of all heads of keys and values for the whole of some heads, those of its queries.

    ``repeats`` ranks share a head. Their gradients of it are summed wide.
    """

    way: Ring
    axis: Axes
    repeats: int

    def forward(self, operands: Triple, allowed: None) -> Met:
        """The part of all keys."""
        query, key, value = operands
        keys, values = self._heads(key), self._heads(value)
        return Met(self.way.forward((query, keys, values), None).part, (keys, values))

    def backward(
        self, grad: PartGradient, operands: Triple, merged: PartialAttention, allowed: None, kept_grads: Kept
    ) -> list[Tensor]:
        """The gradients go back where their parts of the sequence came from."""
        query_grad, *grads = self.way.backward(grad, operands, merged, None, ())
        return [query_grad, *(self._rows(g, operands[1].dtype) for g in _with(grads, kept_grads))]

    def _heads(self, x: Tensor) -> Tensor:
        repeated = x.repeat_interleave(self.repeats, -3) if self.repeats > 1 else x
        heads: Tensor = all_to_all(repeated, self.axis, x.dim() - 3, x.dim() - 2, tiled=True)
        return heads

    def _rows(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """The transpose of `_heads`."""
        grad = grad if self.repeats > 1 else grad.to(dtype)
        rows: Tensor = all_to_all(grad, self.axis, grad.dim() - 2, grad.dim() - 3, tiled=True)
        return rows.unflatten(-3, (-1, self.repeats)).sum(-3) if self.repeats > 1 else rows


def _with(grads: list[Tensor], kept_grads: Kept) -> Iterator[Tensor]:
    """The gradients of keys and values, and what comes to them from second derivatives."""
    return (g if more is None else g + more for g, more in zip(grads, kept_grads, strict=True))


def _zero_gradients(operands: tuple[Tensor, ...], merged: PartialAttention) -> list[Tensor]:
    """The gradients of operands where no query sees a key."""
    hidden = torch.ones((), dtype=torch.bool, device=merged.out.device)
    return [x.to(merged.out.dtype).masked_fill(hidden, 0) for x in operands]  # whose gradients are 0, not missing
