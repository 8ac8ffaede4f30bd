"""A step of training on sharded state beside FSDP2: ``python benchmarks/state.py``.

Four processes with Gloo train three layers of an MLP with AdamW: forward, backward, update. Each of three ways has the
same parameters and batch, cut over all ranks: `fspmd.nn` recorded by `jit`, `fspmd.nn` as it is called, and torch's
``fully_shard`` of each layer with ``torch.optim.AdamW``. With small layers the time is the overhead of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import HEADER, RANKS, on_processes, rows_of_steps
from timing import Table
from torch import nn
from torch.distributed.fsdp import fully_shard

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


def measured(mesh: Mesh) -> Table:
    """The rows of the first rank, as text in the note of a table."""
    lines = [*HEADER]
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
        lines += rows_of_steps(label, steps, repeats)
    return Table(f"A step on {RANKS} processes with Gloo", [], "\n".join(lines))


if __name__ == "__main__":
    print(on_processes(measured).notes)
