"""Checkpoints of four processes with Gloo, beside torch.distributed.checkpoint with DTensors, and torch.save.

Every library writes and syncs the same 64 tensors, of which each process holds a quarter. torch.save writes a file per
process. Files lie in the folder for temporary files, and reads come from the cache of the system.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RANKS, on_processes
from report import report
from timing import Row, Sampler, Table, side_by_side
from torch.distributed.tensor import Shard, distribute_tensor

import fspmd
from fspmd import P, TensorSpec, make_mesh

LEAVES, SHAPE = 64, (1024, 1024)  # 256 MiB in all
REPEATS = 5


def measure() -> Table:
    """The times of the first of four processes."""
    return on_processes(_table, seconds=580)


def _folder() -> Path:
    made = [tempfile.mkdtemp(prefix="checkpoints-")]
    dist.broadcast_object_list(made)
    return Path(made[0])


def _once(call: Callable[[], Any], after: Callable[[], Any] = lambda: None) -> Sampler:
    """Seconds of single calls that begin and end together; ``after`` is not measured."""

    def sampled(number: int) -> float:
        taken = 0.0
        for _ in range(number):
            dist.barrier()
            start = time.perf_counter()
            call()
            dist.barrier()
            taken += time.perf_counter() - start
            after()
        return taken

    return sampled


def _table(mesh: fspmd.Mesh) -> Table:
    folder, rank = _folder(), dist.get_rank()
    grid = make_mesh((2, 2), ("a", "b"), device="cpu")
    ours = {f"w{i}": fspmd.randn(*SHAPE, spec=P("x"), mesh=mesh) for i in range(LEAVES)}
    wholes = fspmd.device_get(ours)
    theirs = {k: distribute_tensor(x, mesh.to_device_mesh(), [Shard(0)]) for k, x in wholes.items()}
    plain = {k: x.to_local().clone() for k, x in theirs.items()}
    moved = {k: TensorSpec(grid, P("b", "a"), SHAPE, torch.float32) for k in ours}
    moved_theirs = {k: distribute_tensor(torch.zeros(SHAPE), grid.to_device_mesh(), [Shard(1), Shard(0)]) for k in ours}
    blank = {k: torch.zeros_like(x) for k, x in theirs.items()}
    steps = iter(range(10**6))

    def save_plain() -> None:
        with open(folder / f"plain-{rank}", "wb") as file:
            torch.save(plain, file)
            os.fsync(file.fileno())

    def save_ours() -> None:
        fspmd.save(folder / "ours", ours, step=next(steps))

    def save_theirs() -> None:
        dcp.save(theirs, checkpoint_id=folder / f"theirs-{next(steps)}")

    def forget() -> None:
        if rank == 0:
            for kind in ("theirs-*", "ours/step-*"):
                for old in sorted(folder.glob(kind), key=lambda p: p.stat().st_mtime)[:-1]:
                    shutil.rmtree(old)
        dist.barrier()

    found = side_by_side(
        {"ours": _once(save_ours, forget), "theirs": _once(save_theirs, forget), "plain": _once(save_plain)},
        repeats=REPEATS,
        number=1,
    )
    rows = [
        Row("save", found["ours"], "dcp.save of DTensors", found["theirs"]),
        Row("save", found["ours"], "torch.save, a file per process, fsync", found["plain"]),
    ]
    last = max(folder.glob("theirs-*"), key=lambda p: p.stat().st_mtime)
    ours_bytes = sum(p.stat().st_size for p in (folder / "ours" / "latest").iterdir())
    theirs_bytes = sum(p.stat().st_size for p in last.iterdir())
    found = side_by_side(
        {
            "ours": _once(lambda: fspmd.load(folder / "ours", ours)),
            "theirs": _once(lambda: dcp.load(blank, checkpoint_id=last)),
            "plain": _once(lambda: torch.load(folder / f"plain-{rank}", weights_only=True)),
            "ours moved": _once(lambda: fspmd.load(folder / "ours", moved)),
            "theirs moved": _once(lambda: dcp.load(moved_theirs, checkpoint_id=last)),
        },
        repeats=REPEATS,
        number=1,
    )
    rows += [
        Row("load", found["ours"], "dcp.load into DTensors", found["theirs"]),
        Row("load", found["ours"], "torch.load, a file per process", found["plain"]),
        Row("load as other blocks (2 x 2)", found["ours moved"], "dcp.load into DTensors", found["theirs moved"]),
    ]
    running: list[Any] = []

    def begin_ours() -> None:
        running.append(fspmd.save(folder / "ours", ours, step=next(steps), asynchronous=True))

    def begin_theirs() -> None:
        running.append(dcp.async_save(theirs, checkpoint_id=folder / f"theirs-{next(steps)}", process_group=beside))

    def finish() -> None:
        handle = running.pop()
        handle.wait() if isinstance(handle, fspmd.SaveHandle) else handle.result()
        forget()

    beside = dist.new_group(backend="gloo")
    found = side_by_side(
        {"ours": _once(begin_ours, finish), "theirs": _once(begin_theirs, finish)}, repeats=REPEATS, number=1
    )
    rows.append(Row("stall of an asynchronous save", found["ours"], "dcp.async_save of DTensors", found["theirs"]))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    size = LEAVES * SHAPE[0] * SHAPE[1] * 4
    notes = (
        f"{LEAVES} tensors of {SHAPE[0]} x {SHAPE[1]} f32, {size / 2**20:.0f} MiB in all, on {RANKS} processes. On the "
        f"disk: ours {ours_bytes / 2**20:.2f} MiB, dcp {theirs_bytes / 2**20:.2f} MiB. Ours has checksums, which are "
        "compared at load, and syncs folders as well as files."
    )
    return Table("Checkpoints", rows, notes)


if __name__ == "__main__":
    report(__doc__, ("checkpoints",))
