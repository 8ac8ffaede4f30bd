"""An interrupt, such as Ctrl-C, at a random moment leaves no thread in a body, and no mode active."""

from __future__ import annotations

import random
import signal
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from full import FULL
from processes import Processes
from simulated import MESH

import fspmd
from fspmd import P, device_get, device_put, psum, rank_map, shard_map
from fspmd.body import RUNNING, state
from fspmd.meshes.world import simulated
from fspmd.torch_internals import count_dispatch_modes, function_modes
from fspmd.tracing import is_recording

X = device_put(torch.linspace(-1, 1, 32).view(8, 4), P("x"), mesh=MESH)
W = torch.linspace(0, 1, 16).view(4, 4)
ON = {"mesh": MESH, "in_specs": (P("x"), P()), "out_specs": P()}


def _loss(a: Any, w: Any) -> Any:
    return psum((a @ w).sin().sum(), "x")


def _hooked(a: Any, w: Any) -> Any:
    y = (a @ w).sin()
    y.register_hook(lambda gradient: gradient * 2)
    return psum(y.sum(), "x")


def _backward(f: Callable[..., Any]) -> Callable[[], Any]:
    def run() -> Any:
        w = W.clone().requires_grad_()
        f(X, w).sum().backward()
        return w.grad

    return run


CALLS: dict[str, Callable[[], Any]] = {
    "checked": lambda: shard_map(_loss, **ON)(X, W),
    "unchecked": lambda: shard_map(lambda a, w: a @ w, **{**ON, "out_specs": P("x")}, check_vma=False)(X, W),
    "backward": _backward(shard_map(_loss, **ON)),
    "hooks": _backward(shard_map(_hooked, **ON)),
    "grad": lambda: fspmd.grad(lambda w: shard_map(_loss, **ON)(X, w).sum())(W),
    "rank by rank": lambda: shard_map(
        lambda a: rank_map(lambda v: v * 2, a), mesh=MESH, in_specs=P("x"), out_specs=P("x")
    )(X),
    "a record": lambda: fspmd.jit(lambda x: torch.softmax(x, -1).sum())(X),
    "sharded bodies": lambda: torch.softmax(X.T.contiguous(), -1),
}


class _Interrupt(BaseException):
    """Like KeyboardInterrupt, which would end pytest."""


def _raise(*_: Any) -> None:
    raise _Interrupt


def _is_interrupted(call: Callable[[], Any], seconds: float) -> bool:
    """Run a call that is interrupted after some seconds, unless it has ended."""
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _Interrupt:
        return True
    return False


def _interrupted(name: str, count: int) -> int:
    """Interrupt a call many times, and return how often it had not ended."""
    signal.signal(signal.SIGALRM, _raise)
    call, draw, interrupted = CALLS[name], random.Random(name), 0
    expected = call()
    taken = min(timeit.repeat(call, number=1, repeat=5))  # others may use the machine meanwhile
    for _ in range(count):
        interrupted += _is_interrupted(call, draw.uniform(1e-5, 1.5 * taken))
        assert (state.body, state.tracker, state.mode, RUNNING, simulated()) == (None, None, None, {}, None)
    torch.testing.assert_close(device_get(call()), device_get(expected))
    assert not function_modes()  # the last call has popped what torch may have put back late
    return interrupted


@pytest.mark.parametrize("name", CALLS)
def test_interrupts_leave_nothing_behind(name: str) -> None:
    with Processes(1) as pool:
        assert pool.run(_interrupted, name, 10000 if FULL else 400, seconds=500)[0] > 10


_CONTEXTS = {"contextlib.py", "_python_dispatch.py", "fake_tensor.py", "overrides.py", "refusals.py"}


class _Lines:
    """Counts the lines of contexts that a call runs, and raises at one of them."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if Path(frame.f_code.co_filename).name not in _CONTEXTS:
            return None
        self.count += event == "line"
        if self.count == self.at:
            sys.settrace(None)
            self.count += 1
            raise _Interrupt
        return self

    def run(self, call: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return call()
        finally:
            sys.settrace(before)


def test_a_recording_ends_between_any_two_lines_of_contexts() -> None:
    call, expected = CALLS["a record"], device_get(CALLS["a record"]())
    lines = _Lines(-1)
    lines.run(call)
    draw, interrupted = random.Random(0), 0
    for at in sorted(draw.sample(range(1, lines.count), lines.count - 1 if FULL else 120)):
        try:
            _Lines(at).run(call)
        except _Interrupt:
            interrupted += 1
        assert not count_dispatch_modes() + len(function_modes()), at
        assert not is_recording(), at
        torch.testing.assert_close(device_get(call()), expected)
    assert interrupted > 60
