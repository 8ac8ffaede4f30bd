"""A step of training on sharded state beside FSDP2: ``python benchmarks/state.py``.

Four processes with Gloo train three layers of an MLP with AdamW: forward, backward, update. Each of three ways has the
same parameters and batch, cut over all ranks: `fspmd.nn` recorded by `jit`, `fspmd.nn` as it is called, and torch's
``fully_shard`` of each layer with ``torch.optim.AdamW``. Told are, of a step on the first rank: the least processor
time of the process (of all its threads, Gloo's too), which with small layers is the overhead of the host; the
most memory above what is held between steps, by torch's profiler; and the bytes that the rank sends in collectives of
c10d, counted below both libraries.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate as running_sums
from typing import Any

import optree
import torch
import torch.distributed as dist
from ranks import RANKS, on_processes
from timing import Table
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from fspmd import Mesh, P, checkpoint, device_put, jit
from fspmd.nn import accumulate, adamw, gathered

LAYERS, ROWS = 3, 64
WIDTHS = {"width 32": (32, 10), "width 256": (256, 5)}  # with so many samples


class Layer(nn.Module):
    """x + tanh(x up) down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(width, 4 * width) / width)
        self.down = nn.Parameter(torch.randn(4 * width, width) / width)

    def forward(self, x: Any) -> Any:
        """The layer."""
        return x + torch.tanh(x @ self.up) @ self.down


def layer(params: Any, x: Any) -> Any:
    """The same layer, on parameters that are gathered when used."""
    full = gathered(params, "x")
    return x + torch.tanh(x @ full["up"]) @ full["down"]


def loss(params: Any, x: Any) -> Any:
    """The sum of squares, and the number of rows."""
    for one in params:
        x = checkpoint(layer)(one, x)
    return x.square().sum(), len(x)


def ours(mesh: Mesh, values: Any, x: Any, record: bool) -> Callable[[], Any]:
    """A step of fspmd."""
    params, batches = device_put(values, P("x"), mesh=mesh), [device_put(x, P("x"), mesh=mesh)]
    init, update = adamw(1e-3)

    def step(params: Any, state: Any) -> Any:
        _, grads = accumulate(loss)(params, batches)
        return update(grads, state, params)

    run = jit(step, donate_argnums=(0, 1)) if record else step
    held = [params, init(params)]
    del params

    def once() -> None:
        held[:] = run(*held) if not record else run(held.pop(0), held.pop(0))

    return once


def theirs(mesh: Mesh, width: int, values: Any, x: Any) -> Callable[[], Any]:
    """A step of FSDP2, which gathers again in backward."""
    model = nn.Sequential(*(Layer(width) for _ in range(LAYERS)))
    with torch.no_grad():
        for part, one in zip(model, values, strict=True):
            part.up.copy_(one["up"])
            part.down.copy_(one["down"])
    line = mesh.to_device_mesh()
    for part in model:
        fully_shard(part, mesh=line)
    fully_shard(model, mesh=line)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    rows = x.chunk(RANKS)[dist.get_rank()]

    def once() -> None:
        optimizer.zero_grad()
        (model(rows).square().sum() / len(rows)).backward()
        optimizer.step()

    return once


def peak(step: Callable[[], Any]) -> int:
    """The most bytes above those held between steps."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    return int(max(running_sums((e.nbytes() for e in events), initial=0)))


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends in the collectives of c10d, as a ring sends them.

    Gloo has no reduce-scatter: torch takes a part of an all-reduce, and so does fspmd.
    """

    total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [x.nbytes for x in optree.tree_leaves(args[:2]) if isinstance(x, torch.Tensor)]
            if any(name in str(func) for name in ("allreduce", "_reduce_scatter_base_")):
                self.total += 2 * max(sizes) * (RANKS - 1) / RANKS
            elif "_allgather_base_" in str(func):
                self.total += max(sizes) * (RANKS - 1) / RANKS
            else:
                raise NotImplementedError(str(func))
        return func(*args, **(kwargs or {}))


def sent(step: Callable[[], Any]) -> float:
    """The bytes that a step sends."""
    with Sent() as mode:
        step()
    return mode.total


def measured(mesh: Mesh) -> Table:
    """The rows of the first rank, as text in the note of a table."""
    lines = ["| | ms of the processor | MiB at most | KiB sent |", "|---|---|---|---|"]
    for label, (width, repeats) in WIDTHS.items():
        torch.manual_seed(0)
        values = [
            {"up": torch.randn(width, 4 * width) / width, "down": torch.randn(4 * width, width) / width}
            for _ in range(LAYERS)
        ]
        x = torch.randn(ROWS, width)
        steps = {
            "fspmd, jit": ours(mesh, values, x, record=True),
            "fspmd": ours(mesh, values, x, record=False),
            "FSDP2": theirs(mesh, width, values, x),
        }
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
        for name, step in steps.items():
            held, moved = min(peak(step) for _ in range(2)), sent(step)
            lines.append(f"| {label}, {name} | {least[name] * 1e3:.2f} | {held / 2**20:.2f} | {moved / 2**10:,.0f} |")
    return Table(f"A step on {RANKS} processes with Gloo", [], "\n".join(lines))


if __name__ == "__main__":
    print(on_processes(measured).notes)
