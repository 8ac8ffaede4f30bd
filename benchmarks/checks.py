"""What the checks of ranks cost: a step of examples/train_lm.py and a psum on Gloo processes, with `debug` and without.

    torchrun --nproc-per-node 2 benchmarks/checks.py

Both are measured in turns, in one process group. Each process prints its own figures.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import fspmd
from fspmd import P

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import text_data
import train_lm

STEPS, TURNS = 12, 4


def step_times(args: list[str], watched: bool) -> list[float]:
    """Milliseconds of each step, without the first two."""
    given = train_lm.parse([*args, "--steps", str(STEPS)])
    mesh = fspmd.make_mesh(given.mesh, ("dp", "tp"), device="cpu")
    specs = train_lm.param_specs(given.layers)
    values = train_lm.init_params(given.seed, given.layers, given.width, given.heads, torch.float32)
    job, params = train_lm.local_job(mesh, specs), fspmd.device_put(values, specs, mesh=mesh)
    text, _ = text_data.load_text(given.text)
    ends: list[float] = []
    with fspmd.debug() if watched else contextlib.nullcontext():
        train_lm.train(given, job, params, text, lambda *_, **__: ends.append(time.perf_counter()))
    return [1000 * (b - a) for a, b in itertools.pairwise(ends[1:])]


def psum_times(watched: bool) -> list[float]:
    """Microseconds of a psum of 16 numbers."""
    mesh = fspmd.make_mesh((2,), ("x",), device="cpu")
    x = fspmd.device_put(torch.ones(32), P("x"), mesh=mesh)
    seconds: list[float] = []

    def body(b: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            begin = time.perf_counter()
            for _ in range(20):
                fspmd.psum(b, "x")
            seconds.append((time.perf_counter() - begin) / 20)
        return b

    with fspmd.debug() if watched else contextlib.nullcontext():
        fspmd.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)(x)
    return [1e6 * s for s in seconds]


def compare(what: str, unit: str, measure: Callable[[bool], list[float]]) -> None:
    off, on = [], []
    for _ in range(TURNS):
        off += measure(False)
        on += measure(True)
    a, b = statistics.median(off), statistics.median(on)
    print(f"| {what} | {a:.1f} {unit} | {b:.1f} {unit} | {100 * (b / a - 1):+.1f} % | {min(off):.1f}, {min(on):.1f} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| what | off | debug | more | least |")
    print("|---|---|---|---|---|")
    compare("a psum", "µs", psum_times)
    compare("a step", "ms", lambda watched: step_times(["--mesh", "1x2", "--batch", "8"], watched))
    compare("a step, --jit", "ms", lambda watched: step_times(["--mesh", "1x2", "--batch", "8", "--jit"], watched))
