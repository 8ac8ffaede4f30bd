"""Four real processes with Gloo on the loopback interface: gathers into one tensor, and packed trees."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from bodies import inside, sharded
from timing import Row, Sampler, Table, loop, side_by_side
from torch import Tensor

import fspmd
from fspmd import all_gather, make_mesh, psum

RANKS = 4
LEAVES = 50
#: by the bytes of one rank's block: how it is called in the table, calls in a sample, and samples
SIZES = {1 << 10: ("1 KiB", 10, 31), 1 << 20: ("1 MiB", 2, 15), 1 << 24: ("16 MiB", 1, 9)}


def measure(seconds: float = 300.0) -> Table:
    """Run `_worker` in four processes; the times are rank 0's."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends, workers = [], []
        for rank in range(RANKS):
            here, there = context.Pipe()
            worker = context.Process(target=_worker, args=(rank, f"file://{folder}/store", there), daemon=True)
            worker.start()
            there.close()
            ends.append(here)
            workers.append(worker)
        try:
            if not ends[0].poll(seconds):
                raise TimeoutError(f"no answer from {RANKS} processes within {seconds:g} s")
            table: Table = ends[0].recv()
            return table
        finally:
            for end, worker in zip(ends, workers, strict=True):
                end.close()
                worker.join(10)
                if worker.is_alive():
                    worker.kill()


def _worker(rank: int, store: str, answer: Connection) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # all_gather_into_tensor, whose new name torch 2.11 does not have
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=limit)
    mesh = make_mesh((RANKS,), ("x",), device="cpu")
    rows = [*(row for size in SIZES for row in _gather(mesh, size)), *_tree(mesh)]
    dist.barrier()
    if rank == 0:
        answer.send(Table(f"{RANKS} processes with Gloo", rows, "Time on the wall; the processes share the cores."))
    answer.poll(None)  # until the other end is closed
    os._exit(0)  # all at once, past a teardown in which threads of Gloo's may still run


def _together(statement: Callable[[], object], number: int) -> float:
    """Seconds on the wall for so many calls that begin on all ranks together."""
    dist.barrier()
    return loop(statement, number, time.perf_counter)


def _aligned(statement: Callable[[], object]) -> Sampler:
    return lambda number: _together(statement, number)


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
            "ours": inside(mesh, blocks, ours, check_vma=True, timed=_together),
            "list": _aligned(listed),
            "one": _aligned(into_one),
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
            "packed": inside(mesh, blocks, packed, check_vma=True, timed=_together),
            "one by one": inside(mesh, blocks, one_by_one, check_vma=True, timed=_together),
            "dist": _aligned(all_reduces),
        },
        repeats=9,
        number=1,
    )
    what = f"psum of a tree of {LEAVES} leaves, 1 KiB each"
    return [
        Row(what, times["packed"], f"{LEAVES} psums", times["one by one"]),
        Row(what, times["packed"], f"{LEAVES} dist.all_reduce", times["dist"]),
    ]
