"""What the checks of ranks cost: a step of examples/train_lm.py and a psum on Gloo processes, with `debug` and without.

    torchrun --nproc-per-node 2 benchmarks/checks.py

Both are measured in turns, in one process group. Each process prints its own figures. A step varies by more than the
checks cost. So their own time is measured as well: what the program spends in them, and the processor time of the
thread that `debug` starts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import fspmd
from fspmd import P
from fspmd.inspection import deadlines, watch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import text_data
import train_lm

STEPS, TURNS = 12, 4
#: methods of the monitor, and what they are told of
PARTS = {
    "call": "collectives",
    "record": "replays",
    "called": "torch functions",
    "value": "digests of values",
    "layouts": "layouts",
    "wait": "waits",
}


def step_times(args: list[str], watched: bool, at_end: Callable[[], None] = lambda: None) -> list[float]:
    """Milliseconds of each step, without the first two."""
    given = train_lm.parse([*args, "--steps", str(STEPS)])
    mesh = fspmd.make_mesh(given.mesh, ("dp", "tp"), device="cpu")
    specs = train_lm.param_specs(given.layers)
    values = train_lm.init_params(given.seed, given.layers, given.width, given.heads, torch.float32)
    job, params = train_lm.local_job(mesh, specs), fspmd.device_put(values, specs, mesh=mesh)
    text, _ = text_data.load_text(given.text)
    ends: list[float] = []

    def say(*_: Any, **__: Any) -> None:
        ends.append(time.perf_counter())
        at_end()

    with fspmd.debug() if watched else contextlib.nullcontext():
        train_lm.train(given, job, params, text, say)
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


class Clock:
    """Takes the time of functions. It takes each time twice, one around the other, to leave out its own cost."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}  # milliseconds, by part

    def over(self, part: str, is_left_out: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Count the time of a function for a part, or leave it out of the part that calls it."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*args: Any, **kwargs: Any) -> Any:
                begin = time.perf_counter()
                try:
                    return function(*args, **kwargs)
                finally:
                    times[0] = time.perf_counter() - begin

            def measured(*args: Any, **kwargs: Any) -> Any:
                begin = time.perf_counter()
                try:
                    return timed(*args, **kwargs)
                finally:
                    outer = time.perf_counter() - begin
                    seconds = -outer if is_left_out else 2 * times[0] - outer
                    self.spent[part] = self.spent.get(part, 0.0) + 1000 * seconds

            times = [0.0]
            return functools.wraps(function)(measured)

        return decorate


def time_in_checks(args: list[str]) -> tuple[float, dict[str, float]]:
    """Milliseconds of a step, and of each part of the checks in it."""
    clock = Clock()
    rows: list[dict[str, float]] = []
    beside: list[float] = []  # processor time of the monitor's thread, once it is connected

    def patch(owner: Any, name: str, over: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        stack.enter_context(mock.patch.object(owner, name, over(getattr(owner, name))))

    def until_its_end(run: Callable[..., None]) -> Callable[..., None]:
        def measured(*args: Any) -> None:
            run(*args)
            beside.append(1000 * time.thread_time())

        return measured

    def once_connected(channel: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any) -> Any:
            found = channel(*args)
            if threading.current_thread().name == "fspmd-monitor":
                beside.append(1000 * time.thread_time())
            return found

        return measured

    def at_end() -> None:
        rows.append(dict(clock.spent))
        clock.spent.clear()

    with contextlib.ExitStack() as stack:
        for name, part in PARTS.items():
            patch(deadlines.Monitor, name, clock.over(part))
        patch(watch, "_noted", clock.over(PARTS["call"]))
        patch(deadlines, "is_over", clock.over(PARTS["wait"], is_left_out=True))  # torch's own wait
        patch(deadlines.Monitor, "_run", until_its_end)
        patch(deadlines.Monitor, "_channel", once_connected)
        step = statistics.median(step_times(args, True, at_end))
        for thread in threading.enumerate():
            if thread.name == "fspmd-monitor":
                thread.join()
    parts = {part: statistics.median(row.get(part, 0.0) for row in rows[2:]) for part in PARTS.values()}
    return step, {**parts, "its thread": (beside[-1] - beside[0]) / STEPS}


def compare(what: str, unit: str, measure: Callable[[bool], list[float]]) -> None:
    off, on = [], []
    for _ in range(TURNS):
        off += measure(False)
        on += measure(True)
    a, b = statistics.median(off), statistics.median(on)
    print(f"| {what} | {a:.1f} {unit} | {b:.1f} {unit} | {100 * (b / a - 1):+.1f} % | {min(off):.1f}, {min(on):.1f} |")


def show_time_in_checks(what: str, args: list[str]) -> None:
    step, parts = time_in_checks(args)
    total = sum(parts.values())
    shown = ", ".join(f"{part} {ms:.2f}" for part, ms in parts.items() if ms >= 0.005)
    print(f"| {what} | {step:.0f} ms | {total:.2f} ms | {100 * total / step:.2f} % | {shown} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    steps = {" ".join(["a step", *more]): ["--mesh", "1x2", *more] for more in ([], ["--jit"], ["--batch", "8"])}
    print("| what | off | debug | more | least |")
    print("|---|---|---|---|---|")
    compare("a psum", "µs", psum_times)
    for what, args in steps.items():
        compare(what, "ms", lambda watched, args=args: step_times(args, watched))  # type: ignore[misc]
    print("\n| what | debug | in checks | part | of it, ms |")
    print("|---|---|---|---|---|")
    for what, args in steps.items():
        show_time_in_checks(what, args)
