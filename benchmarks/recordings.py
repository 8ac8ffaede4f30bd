"""What it costs to record a program: per step, and whether that grows with the program."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from bodies import fake_world, sharded
from timing import Goal, Row, Table, Timing, summary

import fspmd
from fspmd import P, jit, make_mesh

LENGTHS = (8, 32, 128)  # layers
REPEATS = 7


def measure() -> Table:
    """A chain of layers, its gradient taken: recorded as it runs, and lowered without values."""
    fake_world()
    mesh = make_mesh((8,), ("x",), device="cpu")
    x, w = (
        sharded(mesh, 64, 16),
        fspmd.Sharded(torch.randn(16, 16), fspmd.TensorSpec(mesh, P(), (16, 16), torch.float32)),
    )
    rows = []
    for name, made in (("jit, first call", lambda f: jit(f)(w, x)), ("lower", lambda f: jit(f).lower(w, x))):
        for layers in LENGTHS:
            step = _chain(layers)
            count = len(jit(step, passes=()).lower(w, x).program.steps)
            rows.append(Row(f"{name}, {count:,} steps: per step", _per_step(made, step, count), goal=Goal(300e-6)))
    return Table(
        "Recording programs, 8 ranks of the fake backend",
        rows,
        "Time on the processor per recorded step, the passes and the making of what replays included. Plans of the "
        "global view are cached, as they are in a program that has run before.",
    )


def _chain(layers: int) -> Callable[..., Any]:
    def loss(w: Any, x: Any) -> Any:
        for _ in range(layers):
            x = F.gelu(x @ w) + x
        return x.square().sum()

    return fspmd.grad(loss)


def _per_step(made: Callable[[Any], Any], step: Callable[..., Any], count: int) -> Timing:
    samples = []
    made(step)
    for _ in range(REPEATS):
        begun = time.thread_time()
        made(step)
        samples.append((time.thread_time() - begun) / count)
    return summary(samples)
