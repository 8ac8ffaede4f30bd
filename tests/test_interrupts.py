"""An interrupt, such as Ctrl-C, at a random moment leaves no thread in a body, and no mode active."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from full import FULL
from simulated import MESH

import fspmd
from fspmd import P, device_get, device_put, psum, rank_map, shard_map
from fspmd.body import RUNNING, state
from fspmd.torch_internals import count_function_modes, pop_function_mode

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
    "sharded bodies": lambda: torch.softmax(X.T.contiguous(), -1),
}


class _Interrupt(BaseException):
    """Like KeyboardInterrupt, which would end pytest."""


def _raise(*_: Any) -> None:
    raise _Interrupt


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _raise)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    state.body = state.tracker = None
    RUNNING.clear()
    while count_function_modes():
        pop_function_mode()


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


@pytest.mark.parametrize("name", CALLS)
def test_interrupts_leave_nothing_behind(name: str) -> None:
    call, draw = CALLS[name], random.Random(name)
    expected = call()
    start = time.perf_counter()
    call()
    taken = time.perf_counter() - start
    interrupted = 0
    for _ in range(20000 if FULL else 400):
        interrupted += _is_interrupted(call, draw.uniform(1e-5, 1.5 * taken))
        assert (state.body, state.tracker, RUNNING) == (None, None, {})
    assert interrupted > 10
    torch.testing.assert_close(device_get(call()), device_get(expected))
    assert not count_function_modes()  # the last call has popped what torch may have put back late
