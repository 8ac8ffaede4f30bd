"""Four real processes with Gloo on the loopback interface."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from itertools import accumulate as running_sums
from multiprocessing.connection import Connection
from typing import Any, Final

import optree
import torch
import torch.distributed as dist
from timing import Sampler, Table, loop
from torch.utils._python_dispatch import TorchDispatchMode

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


# --- steps side by side ---------------------------------------------------------------------------------------------

#: The columns of `rows_of_steps`. Each is that of the rank which has the most.
HEADER: Final = ["| | ms of the processor | MiB at most | KiB sent |", "|---|---|---|---|"]


def rows_of_steps(label: str, steps: Mapping[str, Callable[[], Any]], repeats: int) -> list[str]:
    """A row for each way to take a step.

    The time is the least processor time of a process, of all its threads, Gloo's too. The memory is the most above what
    is held between steps, by torch's profiler: the least of five, since threads of Gloo's let go of blocks late.
    """
    least = dict.fromkeys(steps, float("inf"))
    for step in steps.values():
        step()
        step()
    for _ in range(repeats):
        for name, step in steps.items():
            dist.barrier()
            start = time.process_time()
            step()
            least[name] = min(least[name], time.process_time() - start)
    rows = []
    for name, step in steps.items():
        figures = torch.tensor([least[name], min(peak(step) for _ in range(5)), sent(step)], dtype=torch.float64)
        dist.all_reduce(figures, dist.ReduceOp.MAX)
        seconds, held, moved = figures.tolist()
        rows.append(f"| {label}, {name} | {seconds * 1e3:.2f} | {held / 2**20:.2f} | {moved / 2**10:,.0f} |")
    return rows


def peak(step: Callable[[], Any]) -> int:
    """The most bytes above those held between steps."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    return int(max(running_sums((e.nbytes() for e in events), initial=0)))


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends by c10d, below all libraries: those of a ring, and those of messages.

    Gloo has no reduce-scatter: torch takes a part of an all-reduce, and so does fspmd.
    """

    total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [x.nbytes for x in optree.tree_leaves(args[:2]) if isinstance(x, torch.Tensor)]
            self.total += _BYTES[func.__name__.partition(".")[0]](args, max(sizes, default=0))
        return func(*args, **(kwargs or {}))


def _exchanged(args: Any, size: int) -> float:
    """The bytes of an exchange, but for those that stay."""
    x, rows = args[1], args[4]
    return x.nbytes * (1 - rows[dist.get_rank()] / len(x)) if rows and len(x) else x.nbytes * (RANKS - 1) / RANKS


#: The bytes that a collective sends, by its arguments and the most bytes of one of them.
_BYTES: Final[dict[str, Callable[[Any, int], float]]] = {
    "allreduce_": lambda _, size: 2 * size * (RANKS - 1) / RANKS,
    "_reduce_scatter_base_": lambda _, size: 2 * size * (RANKS - 1) / RANKS,
    "_allgather_base_": lambda _, size: size * (RANKS - 1) / RANKS,
    "alltoall_base_": _exchanged,
    "send": lambda _, size: size,
    "recv_": lambda _, size: 0,
    "barrier": lambda _, size: 0,
}


def sent(step: Callable[[], Any]) -> float:
    """The bytes that a step sends."""
    with Sent() as mode:
        step()
    return mode.total
