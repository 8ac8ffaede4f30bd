"""What one rank does alone with a value that was used: an error there, or nothing is sent; no rank is left waiting."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from subprocess import PIPE
from typing import Any

import pytest
import torch
from full import FULL
from processes import Processes, free_port

from fspmd import FspmdError, Mesh, P, communication_log, device_get, device_put, lockstep, make_mesh, reshard

F64 = torch.float64
SEEDS = 40 if FULL else 16


@pytest.fixture(scope="module", params=[2, 3] if FULL else [3])
def some(request: pytest.FixtureRequest) -> Iterator[Processes]:
    with Processes(request.param) as pool:
        yield pool


def _mesh() -> Mesh:
    return make_mesh((int(os.environ["WORLD_SIZE"]),), ("x",), device="cpu")


def _cut(x: Any) -> Any:
    return device_put(x, P("x"), mesh=_mesh())


#: a value whose use sends something, forward or backward; the use
Pair = tuple[Any, Callable[[Any], Any]]


def _pending(follows: bool) -> Pair:
    w = device_put(torch.linspace(-1, 1, 48, dtype=F64).view(6, 8), P(None, "x"), mesh=_mesh()).requires_grad_(follows)
    return w @ w.mT, torch.sin


def _gathered(_: bool) -> Pair:
    x = _cut(torch.linspace(-1, 1, 36, dtype=F64).view(6, 6)).requires_grad_()
    w = device_put(torch.ones(6, 60, dtype=F64), P(None, "x"), mesh=_mesh()).requires_grad_()
    return torch.relu(x), lambda y: y @ w


def _table(_: bool) -> Pair:
    w = device_put(torch.ones(2, 64, dtype=F64), P(), mesh=_mesh()).requires_grad_()
    batch = _cut(torch.ones(8, 900, 64, dtype=F64))
    return torch.nn.functional.embedding(torch.arange(7200).view(8, 900) % 2, w), lambda y: y * batch


def _expanded(_: bool) -> Pair:
    w = device_put(torch.ones(64, dtype=F64), P(), mesh=_mesh()).requires_grad_()
    batch = _cut(torch.ones(8, 900, 64, dtype=F64))
    return w.expand(8, 900, 64), lambda y: y * batch


VALUES = {"pending": _pending, "gathered": _gathered, "table": _table, "expanded": _expanded}


def _set(y: Any, block: Any) -> None:
    y.local = block


def _swap(y: Any) -> None:
    torch.utils.swap_tensors(y.local, y.local.detach().clone())


BY_HAND, ANOTHER, SWAPPED = "written into by hand", "x.local = block was written", "has weakref"
#: name -> what is done, with which values, and the error then or at the next use
ALONE: dict[str, tuple[Callable[[Any], Any], tuple[str, ...], str]] = {
    "a term": (lambda y: y.local.detach().mul_(2), ("pending", "gathered"), BY_HAND),
    "a row": (lambda y: y.local.detach()[0].zero_(), ("pending", "gathered"), BY_HAND),
    "another block": (lambda y: _set(y, y.local * 2), tuple(VALUES), ANOTHER),
    "no graph": (lambda y: _set(y, y.local.detach()), tuple(VALUES), ANOTHER),
    "a used block": (lambda y: _set(y * 2, y.local), tuple(VALUES), ANOTHER),
    "another tensor": (_swap, ("pending", "gathered"), SWAPPED),
    "a hook": (lambda y: y.register_hook(lambda g: g), ("table",), "x = x.clone"),
    "retained": (lambda y: y.retain_grad(), ("table",), "x = x.clone"),
    "detached": (lambda y: y.detach_(), ("pending", "gathered"), ""),
    "detached by hand": (lambda y: y.local.detach_(), ("pending", "gathered"), ""),
}


def _done_alone(name: str, value: str, follows: bool, everywhere: bool) -> tuple[int, float, str]:
    """Of a use after what the first rank, or each, has done: collectives, the sum of the result, and the error."""
    y, use = VALUES[value](follows)
    use(y)
    with communication_log() as log:
        try:
            if everywhere or _mesh().coordinate() == (0,):
                ALONE[name][0](y)
            out, error = float(use(y).local.detach().sum()), ""
        except (FspmdError, RuntimeError) as caught:
            out, error = 0.0, str(caught)
    return len(log), out, error


def _all_done_alone(everywhere: bool) -> dict[tuple[str, str, bool], tuple[int, float, str]]:
    return {
        (name, value, follows): _done_alone(name, value, follows, everywhere)
        for name, (_, values, _) in ALONE.items()
        for value in values
        for follows in ((False, True) if value == "pending" else (True,))
    }


@pytest.mark.parametrize("everywhere", [False, True])
def test_what_one_rank_does_by_hand_sends_nothing(some: Processes, everywhere: bool) -> None:
    """It gets an error, and the others go on as they would: none is left waiting, and none has another value."""
    first, *others = some.run(_all_done_alone, everywhere)
    for case, (sent, out, error) in first.items():
        wanted = ALONE[case[0]][2]
        assert sent == 0, case
        assert wanted in error if wanted else not error, (case, error)
        for other in others:
            sent_there, out_there, error_there = other[case]
            assert sent_there == 0, case
            assert error_there == (error if everywhere else ""), case
            assert wanted or case[1] != "pending" or out_there == out, case


#: what random programs make, of 6 x 6 elements
MAKE: tuple[Callable[[], Any], ...] = (
    lambda: _pending(True)[0],
    lambda: _pending(False)[0],
    lambda: _gathered(True)[0],
    lambda: _cut(torch.linspace(-1, 1, 36, dtype=F64).view(6, 6)),
    lambda: device_put(torch.ones(6, 6, dtype=F64), P(), mesh=_mesh()).requires_grad_() * 2,
    lambda: device_put(torch.ones(6, dtype=F64), P(), mesh=_mesh()).requires_grad_().expand(6, 6),
)
#: what they do with two of their values, or with the first
DO: tuple[Callable[[Any, Any], Any], ...] = (
    torch.add, torch.mul, torch.matmul, lambda x, _: torch.sin(x), lambda x, _: x.mT, lambda x, _: x.clone(),
    lambda x, _: x.reshape(36).reshape(6, 6), lambda x, _: reshard(x, P("x")), lambda x, _: torch.softmax(x, -1),
    lambda x, _: x.detach(), lambda x, _: x.cumsum(0), lambda x, _: x * device_get(x.detach()).sum(),
)  # fmt: skip
#: and what the first rank does by hand between
BY_HANDS: tuple[Callable[[Any], Any], ...] = (
    lambda y: y.local.detach().mul_(2), lambda y: y.local.detach()[0].zero_(), lambda y: _set(y, y.local * 2),
    lambda y: _set(y, y.local.detach().clone()), lambda y: y.local.detach().numpy().fill(1),
    lambda y: y.requires_grad and y.register_hook(lambda g: g), lambda y: y.requires_grad and y.retain_grad(),
)  # fmt: skip


def _random_program(seed: int, acts: bool) -> str:
    choose, first = random.Random(seed), _mesh().coordinate() == (0,)
    values = [choose.choice(MAKE)() for _ in range(3)]
    for _ in range(10):
        x, y, act = choose.choice(values), choose.choice(values), choose.choice(BY_HANDS)
        values.append(choose.choice(DO)(x, y))
        if choose.random() < 0.3 and acts and first:
            act(x)
    total = sum(x.sum() for x in values)
    if total.requires_grad:
        total.backward()
    return ""


def _random_programs(seeds: range, acts: bool) -> list[str]:
    """How each ends: "", or the error."""
    found = []
    for seed in seeds:
        try:
            with lockstep(seconds=10):
                found.append(_random_program(seed, acts))
        except (FspmdError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("acts", [False, True])
def test_random_programs_keep_step_whatever_one_rank_does_by_hand(some: Processes, acts: bool) -> None:
    """Until that rank has an error: nobody begins a collective that another does not."""
    first, *others = some.run(_random_programs, range(SEEDS if acts else SEEDS // 2), acts)
    for seed, ended in enumerate(first):
        assert acts or not ended, (seed, ended)
        assert not ended.startswith("LockstepError"), (seed, ended)
        for other in others:
            assert not other[seed] or "rank 0 has left lockstep() with" in other[seed], (seed, other[seed])
    if acts:
        assert SEEDS / 8 < len([ended for ended in first if ended]) < SEEDS * 7 / 8


_ENDS = """
import torch
from fspmd import P, device_get, device_put, make_mesh
mesh = make_mesh((2,), ("x",), device="cpu")
w = device_put(torch.ones(6, 8), P(None, "x"), mesh=mesh)
y = w @ w.mT
torch.cos(y)
if mesh.coordinate() == (0,):
    y.local.mul_(2)
torch.sin(y)
device_get(device_put(torch.ones(6), P("x"), mesh=mesh))
"""


def test_the_others_end_with_the_rank_that_fails() -> None:
    """Programs of their own, of which the second waits in a collective when the first ends."""
    around = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    programs = [
        subprocess.Popen([sys.executable, "-c", _ENDS], env={**around, "RANK": str(rank)}, stderr=PIPE, text=True)
        for rank in range(2)
    ]
    try:
        first, second = [program.communicate(timeout=300)[1] for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [1, 1]
    assert BY_HAND in first
    assert "RuntimeError: " in second  # of Gloo, whose words differ
