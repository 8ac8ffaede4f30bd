"""Four real processes with Gloo on the loopback interface."""

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

import torch
import torch.distributed as dist
from timing import Sampler, Table, loop

from fspmd import Mesh, make_mesh

RANKS = 4


def on_processes(work: Callable[[Mesh], Table], seconds: float = 300.0) -> Table:
    """What the first of the processes measures; ``work`` is a function of a module, of a mesh of one axis."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends, workers = [], []
        for rank in range(RANKS):
            here, there = context.Pipe()
            arguments = (work, rank, f"file://{folder}/store", there)
            worker = context.Process(target=_worker, args=arguments, daemon=True)
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


def _worker(work: Callable[[Mesh], Table], rank: int, store: str, answer: Connection) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # all_gather_into_tensor, whose new name torch 2.11 does not have
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=limit)
    table = work(make_mesh((RANKS,), ("x",), device="cpu"))
    dist.barrier()
    if rank == 0:
        answer.send(table)
    answer.poll(None)  # until the other end is closed
    os._exit(0)  # all at once, past a teardown in which threads of Gloo's may still run


def together(statement: Callable[[], object], number: int) -> float:
    """Seconds on the wall for so many calls that begin on all ranks together."""
    dist.barrier()
    return loop(statement, number, time.perf_counter)


def aligned(statement: Callable[[], object]) -> Sampler:
    """The sampler of such calls."""
    return lambda number: together(statement, number)
