"""Four real processes with Gloo on the loopback interface: gathers into one tensor, and packed trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bodies import inside, sharded
from ranks import RANKS, aligned, on_processes, together
from timing import Row, Table, side_by_side
from torch import Tensor

import fspmd
from fspmd import all_gather, psum

LEAVES = 50
#: by the bytes of one rank's block: how it is called in the table, calls in a sample, and samples
SIZES = {1 << 10: ("1 KiB", 10, 31), 1 << 20: ("1 MiB", 2, 15), 1 << 24: ("16 MiB", 1, 9)}


def measure() -> Table:
    """The times of the first of four processes."""
    return on_processes(_tables)


def _tables(mesh: fspmd.Mesh) -> Table:
    rows = [*(row for size in SIZES for row in _gather(mesh, size)), *_tree(mesh)]
    return Table(f"{RANKS} processes with Gloo", rows, "Time on the wall; the processes share the cores.")


def _gather(mesh: fspmd.Mesh, size: int) -> list[Row]:
    label, number, repeats = SIZES[size]
    blocks = sharded(mesh, size // 4)
    x = blocks.local

    def listed() -> Tensor:
        parts = [torch.empty_like(x) for _ in range(RANKS)]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    def into_one() -> Tensor:
        whole = x.new_empty(RANKS * x.numel())
        dist.all_gather_into_tensor(whole, x)
        return whole

    def ours(block: Tensor) -> Callable[[], object]:
        return lambda: all_gather(block, "x", tiled=True)

    times = side_by_side(
        {
            "ours": inside(mesh, blocks, ours, check_vma=True, timed=together),
            "list": aligned(listed),
            "one": aligned(into_one),
        },
        repeats=repeats,
        number=number,
    )
    what = f"all_gather, {label} per rank"
    return [
        Row(what, times["ours"], "dist.all_gather to a list, cat", times["list"]),
        Row(what, times["ours"], "dist.all_gather_into_tensor", times["one"]),
    ]


def _tree(mesh: fspmd.Mesh) -> list[Row]:
    def tree_of(block: Tensor) -> dict[str, Tensor]:
        return {f"w{i}": block + i for i in range(LEAVES)}

    def packed(block: Tensor) -> Callable[[], object]:
        tree = tree_of(block)
        return lambda: psum(tree, "x")

    def one_by_one(block: Tensor) -> Callable[[], object]:
        tree = tree_of(block)
        return lambda: {key: psum(leaf, "x") for key, leaf in tree.items()}

    blocks = sharded(mesh, 256)
    leaves = list(tree_of(blocks.local).values())

    def all_reduces() -> list[Any]:
        outs = [leaf.clone() for leaf in leaves]
        for out in outs:
            dist.all_reduce(out)
        return outs

    times = side_by_side(
        {
            "packed": inside(mesh, blocks, packed, check_vma=True, timed=together),
            "one by one": inside(mesh, blocks, one_by_one, check_vma=True, timed=together),
            "dist": aligned(all_reduces),
        },
        repeats=9,
        number=1,
    )
    what = f"psum of a tree of {LEAVES} leaves, 1 KiB each"
    return [
        Row(what, times["packed"], f"{LEAVES} psums", times["one by one"]),
        Row(what, times["packed"], f"{LEAVES} dist.all_reduce", times["dist"]),
    ]
