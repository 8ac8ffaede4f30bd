"""A step of a pipeline beside `torch.distributed.pipelining`: ``python benchmarks/pipelines.py``.

Four processes with Gloo have two layers of an MLP each, and train on eight microbatches: forward and backward, by one
schedule in both libraries. Of V-shaped schedules each rank has two stages of a layer. With small layers the time is the
overhead of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from ranks import HEADER, RANKS, on_processes, rows_of_steps
from timing import Table
from torch import Tensor, nn
from torch.distributed import pipelining

from fspmd import Mesh, P, device_put, jit
from fspmd.nn import Schedule, gpipe, one_f_one_b, pipeline, zbv

MICROBATCHES: Final = 8
LAYERS: Final = 2 * RANKS
SIZES: Final = {"width 32": (32, 4, 10), "width 256": (256, 64, 5)}  # rows of a microbatch, and so many samples
SCHEDULES: Final[dict[str, tuple[Callable[[int, int], Schedule], Any]]] = {
    "GPipe": (gpipe, pipelining.ScheduleGPipe),
    "1F1B": (one_f_one_b, pipelining.Schedule1F1B),
    "ZBV": (zbv, pipelining.ScheduleZBVZeroBubble),
}


def ours(mesh: Mesh, schedule: Schedule, layers: Tensor, x: Tensor, target: Tensor, record: bool) -> Callable[[], Any]:
    """A step of fspmd: the loss and the gradients of this rank's layers."""

    def stage(layers: list[Tensor], x: Tensor) -> Tensor:
        for w in layers:
            x = torch.tanh(x @ w)
        return x

    step = pipeline(stage, schedule, loss=lambda y, t: (y - t).square().sum(), mesh=mesh, axis="x")
    of_stages = layers.unflatten(0, (schedule.stages, -1))[list(schedule.order)]
    params = device_put(list(of_stages.unbind(1)), P("x"), mesh=mesh)
    batches = [device_put(list(part.chunk(MICROBATCHES)), P(), mesh=mesh) for part in (x, target)]
    run = jit(step) if record else step
    return lambda: run(params, *batches)


class Stage(nn.Module):
    """Some of the layers."""

    def __init__(self, layers: Tensor) -> None:
        super().__init__()
        self.layers = nn.ParameterList([w.clone() for w in layers])

    def forward(self, x: Tensor) -> Tensor:
        """The layers, one after another."""
        for w in self.layers:
            x = torch.tanh(x @ w)
        return x


def theirs(schedule: Schedule, kind: Any, layers: Tensor, x: Tensor, target: Tensor) -> Callable[[], Any]:
    """A step of torch's pipelines. The gradients are set to None before it, so that they are no sums over steps."""
    rank, device = dist.get_rank(), torch.device("cpu")
    parts = layers.unflatten(0, (schedule.stages, -1))
    mine = [s for s in range(schedule.stages) if schedule.ranks_of_stages[s] == rank]
    modules = {s: Stage(parts[s]) for s in mine}
    stages = [pipelining.PipelineStage(modules[s], s, schedule.stages, device) for s in mine]
    several = schedule.stages > RANKS
    run = kind(stages if several else stages[0], MICROBATCHES, loss_fn=lambda y, t: (y - t).square().sum())
    given = [x] if 0 in mine else []
    last = {"target": target} if schedule.stages - 1 in mine else {}

    def step() -> Any:
        for module in modules.values():
            module.zero_grad()
        run.step(*given, **last)
        return torch.stack([w.grad for s in schedule.order if s in modules for w in modules[s].layers])

    return step


def measured(mesh: Mesh) -> Table:
    """The rows, as text in the notes of a table."""
    lines = [*HEADER]
    for label, (width, rows, repeats) in SIZES.items():
        torch.manual_seed(0)
        layers, x = torch.randn(LAYERS, width, width) / width**0.5, torch.randn(MICROBATCHES * rows, width)
        target = torch.randn_like(x)
        for name, (make, kind) in SCHEDULES.items():
            schedule = make(RANKS, MICROBATCHES)
            steps = {
                f"{name}, fspmd, jit": ours(mesh, schedule, layers, x, target, True),
                f"{name}, fspmd": ours(mesh, schedule, layers, x, target, False),
                f"{name}, torch": theirs(schedule, kind, layers, x, target),
            }
            right = _right(layers, x, target).unflatten(0, (schedule.stages, -1))[list(schedule.order)]
            here = right.flatten(0, 1).chunk(RANKS)[dist.get_rank()]
            for way, step in steps.items():
                found = step()
                found = torch.stack([g.local for g in found[1]], 1).flatten(0, 1) if "fspmd" in way else found
                if (error := float((found - here).abs().max() / here.abs().max())) > 1e-4:
                    raise AssertionError(f"{way} is off by {error:.1e}")
            lines += rows_of_steps(label, steps, repeats)
    return Table(f"A step of a pipeline on {RANKS} processes with Gloo", [], "\n".join(lines))


def _right(layers: Tensor, x: Tensor, target: Tensor) -> Tensor:
    """The gradient in float64 on one device, of the mean over microbatches of their losses."""
    leaf = layers.double().requires_grad_()
    y = x.double()
    for w in leaf.unbind():
        y = torch.tanh(y @ w)
    loss = (y - target).square().sum() / MICROBATCHES
    return torch.autograd.grad(loss, leaf)[0]


if __name__ == "__main__":
    print(on_processes(measured, seconds=500).notes)
