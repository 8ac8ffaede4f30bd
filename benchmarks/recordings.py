"""What it costs to record a program: per step, and whether that grows with the program."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from bodies import fake_world, sharded
from timing import Goal, Row, Table, Timing, summary

import fspmd
from fspmd import P, jit, make_mesh

LENGTHS = (8, 32, 128)  # layers
REPEATS = 7


Weights = list[fspmd.Sharded]


def measure() -> Table:
    """A step of a chain of layers, whose weights are given away: recorded as it runs, and lowered without values."""
    fake_world()
    mesh = make_mesh((8,), ("x",), device="cpu")
    x, spec = sharded(mesh, 64, 16), fspmd.TensorSpec(mesh, P(), (16, 16), torch.float32)
    rows = []
    for name, lowers in (("jit, first call", False), ("lower", True)):
        for layers in LENGTHS:
            weights = [fspmd.Sharded(torch.randn(16, 16), spec) for _ in range(layers)]
            count = len(jit(_step, passes=()).lower(weights, x).program.steps)
            timing = _per_step(weights, x, lowers, count)
            rows.append(Row(f"{name}, {count:,} steps: per step", timing, goal=Goal(300e-6)))
    return Table(
        "Recording programs, 8 ranks of the fake backend",
        rows,
        "Time on the processor per recorded step, the passes and the making of what replays included. Plans of the "
        "global view are cached, as they are in a program that has run before.",
    )


def _step(weights: Weights, x: fspmd.Sharded) -> Any:
    def loss(weights: Weights) -> Any:
        y: Any = x
        for w in weights:
            y = F.gelu(y @ w) + y
        return y.square().sum()

    return [w - 0.1 * g for w, g in zip(weights, fspmd.grad(loss)(weights), strict=True)]


def _per_step(weights: Weights, x: fspmd.Sharded, lowers: bool, count: int) -> Timing:
    samples = []
    for _ in range(1 + REPEATS):
        given, step = [fspmd.Sharded(w.local.clone(), w.spec) for w in weights], jit(_step, donate_argnums=0)
        begun = time.thread_time()
        if lowers:
            step.lower(given, x)
        else:
            step(given, x)
        samples.append((time.thread_time() - begun) / count)
    return summary(samples[1:])
