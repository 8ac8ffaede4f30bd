"""The steps of attention over a cut sequence: which keys a rank has in a step, and which tiles it computes.

They follow from the layout and the mask, before anything runs. Masks whose ranges say the same share them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from fspmd.cache import cached
from fspmd.collectives import axis_index
from fspmd.entries import blocks
from fspmd.nn.masks import Mask
from fspmd.nn.sequences import Axes, SequenceLayout, on_host
from fspmd.nn.tiles import Tiles, count_of, make_tiles, runs_of


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
    return turns if skips else tiled(1)


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
