"""What an explicit redistribution costs above its one collective, beside DTensor's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bodies import RANKS, World, fake_world, meshes, pair, placements
from timing import Overhead, Table, calls, side_by_side
from torch import Tensor

import fspmd
from fspmd import P

N = 16

BOUND = 1 / 5


def measure() -> Table:
    """Gather, slice, exchange, all-reduce and reduce-scatter over one mesh axis."""
    fake_world()
    world = meshes(1)
    # the collective alone, of a block, into a fresh tensor
    raw: dict[str, tuple[P, P, Callable[[Tensor], object]]] = {
        "all-gather": (P("x", None), P(), _gathered),
        "all-gather of columns": (P(None, "x"), P(), lambda x: torch.cat(_gathered(x).chunk(RANKS), dim=1)),
        "all-to-all": (P("x", None), P(None, "x"), _exchanged),
        "slice": (P(), P("x", None), lambda x: x.narrow(0, 0, N // RANKS)),
        "all-reduce": (P(unreduced={"x"}), P(), lambda x: dist.all_reduce(x.clone())),
        "reduce-scatter": (P(unreduced={"x"}), P("x", None), _scattered),
    }
    return Table(
        "An explicit redistribution of a block of 16 x 16 numbers, 8 ranks of the fake backend",
        [_row(world, what, *case) for what, case in raw.items()],
        "fspmd.reshard beside DTensor.redistribute; plain is the collective by raw c10d, into a fresh tensor.",
    )


def _row(world: World, what: str, before: P, after: P, plain: Callable[[Tensor], object]) -> Overhead:
    x = pair(world, before, (N, N))
    wanted: Any = placements(world, after)
    times = side_by_side(
        {
            "plain": calls(lambda: plain(x.plain)),
            "ours": calls(lambda: fspmd.reshard(x.ours, after)),
            "theirs": calls(lambda: x.theirs.redistribute(placements=wanted)),
        }
    )
    return Overhead(what, times["plain"], times["ours"], times["theirs"], BOUND)


def _gathered(x: Tensor) -> Tensor:
    out = x.new_empty((RANKS * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(out, x)
    return out


def _exchanged(x: Tensor) -> Tensor:
    parts = torch.cat(x.chunk(RANKS, dim=1))
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts)
    return out


def _scattered(x: Tensor) -> Tensor:
    out = x.new_empty((x.shape[0] // RANKS, *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x)
    return out
