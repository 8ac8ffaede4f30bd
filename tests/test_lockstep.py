"""`lockstep`: ranks that part are an error on all of them, before anything is sent; who keeps step notices nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from processes import Processes
from ragged_cases import run_ragged, some_ragged

from fspmd import (
    ArgumentError,
    LockstepError,
    Mesh,
    P,
    communication_log,
    device_get,
    device_put,
    jit,
    lockstep,
    make_mesh,
    reshard,
)

F64 = torch.float64


@pytest.fixture(scope="module", params=[2, 3])
def some(request: pytest.FixtureRequest) -> Iterator[Processes]:
    with Processes(request.param) as pool:
        yield pool


def _mesh() -> Mesh:
    return make_mesh((int(os.environ["WORLD_SIZE"]),), ("x",), device="cpu")


def _pending(seed: int) -> Any:
    w = device_put(torch.linspace(seed, 1, 48, dtype=F64).view(6, 8), P(None, "x"), mesh=_mesh())
    return w @ w.mT


def _first() -> bool:
    return _mesh().coordinate() == (0,)


def _settled_after_a_write() -> None:
    y = _pending(0)
    torch.cos(y)
    if _first():
        y.mul_(2)
    torch.sin(y)


def _written_in_one_graph() -> None:
    x = device_put(torch.ones(6, 3), P("x"), mesh=_mesh())
    w = device_put(torch.ones(3), P(), mesh=_mesh()).requires_grad_()
    z = x + w
    if _first():
        with torch.no_grad():
            w.mul_(2)
    ((x + w) * 3 + z).sum().backward()


def _stepped() -> None:
    w = device_put(torch.ones(3), P("x"), mesh=_mesh()).requires_grad_()
    w.grad = device_put(torch.ones(3), P("x"), mesh=_mesh())
    if _first():
        torch.optim.SGD([w], lr=0.1).step()
    device_get(w)


def _another_value() -> None:
    y = _pending(0)
    torch.cos(y)
    if _first():
        y = _pending(0)
    torch.sin(y)


def _evaluated_alone() -> None:
    if _first():
        device_get(_pending(0))


def _other_shape() -> None:
    """One collective at one line, as where a set of names has another order on each rank. It ended the processes."""
    rows = 4 if _first() else 6
    w = device_put(torch.ones(rows, 8, dtype=F64), P(None, "x"), mesh=_mesh())
    torch.sin(w @ w.mT)


def _like_it() -> Any:
    return torch.cos(_pending(1))


def _other() -> Any:
    return device_get(device_put(torch.ones(6), P("x"), mesh=_mesh()))


#: what the first rank does alone, and words of the error
PARTED: dict[str, tuple[Callable[[], Any], str]] = {
    "a write": (_settled_after_a_write, "rank 0: psum_unreduced over 'x' of mesh(x="),
    "a write in a graph": (_written_in_one_graph, ", backward, for + (test_lockstep.py:"),
    "a step": (_stepped, ", for device_get (test_lockstep.py:"),
    "another value": (_another_value, "f64[6, 6], for sin() (test_lockstep.py:"),
    "a number to print": (_evaluated_alone, "f64[6, 6], for device_get (test_lockstep.py:"),
    "another shape": (_other_shape, "f64[4, 4], for sin() (test_lockstep.py:"),
}
#: what all ranks do afterwards: a collective that the first could be taken for, one of another kind, or none
THEN: dict[str, Callable[[], Any]] = {"like it": _like_it, "another": _other, "the end": lambda: None}


def _parted() -> dict[tuple[str, str], str]:
    found = {}
    for name, (act, _) in PARTED.items():
        for then, others in THEN.items():
            try:
                with lockstep(seconds=10):
                    act()
                    others()
                found[name, then] = ""
            except LockstepError as caught:
                found[name, then] = str(caught)
    return found


def test_ranks_that_part_are_told_where(some: Processes) -> None:
    """Alike on all of them, but for those that have left with nothing to meet for."""
    first, *others = some.run(_parted)
    for (name, then), error in first.items():
        assert PARTED[name][1] in error, error
        if (name, then) == ("a number to print", "the end"):
            assert " has left lockstep()\n  * others are at " in error
            continue
        assert "ranks came to different collectives, or after different writes:" in error, (name, then)
        assert "rank 0: " in error
        assert f"rank {len(others)}: " in error
        assert (", after 1 write, the last: " in error) == ("a write" in name or name == "a step"), error
        assert ("mul_() (test_lockstep.py:" in error) == ("a write" in name), error
        assert ("the end of lockstep()" in error) == (then == "the end" and name in ("a write", "another value")), error
        assert [other[name, then] for other in others] == [error] * len(others)


def _late() -> str:
    """The first rank comes to a collective, the others later to the same."""
    _mesh()
    try:
        with lockstep(seconds=0.5):
            if not _first():
                time.sleep(1)
            _other()
    except LockstepError as caught:
        return str(caught)
    return ""


def _left() -> str:
    try:
        with lockstep(seconds=10):
            _other()
            if _first():
                raise KeyError("mine")
            _other()
    except (LockstepError, KeyError) as caught:
        return f"{type(caught).__name__}: {caught}"
    return ""


def test_who_is_late_or_has_left_is_named(some: Processes) -> None:
    first, *others = some.run(_late)
    assert "1 rank did not come to " in first if len(others) == 1 else "2 ranks did not come to " in first
    assert "for device_get (test_lockstep.py:" in first
    assert "  * rank 1 has come to no collective" in first
    for other in others:
        assert "rank 0 has left lockstep() with LockstepError: " in other
    alone, *left = some.run(_left)
    assert alone == "KeyError: 'mine'"
    assert all("rank 0 has left lockstep() with KeyError: 'mine'\n  * others are at " in one for one in left), left


def _in_step() -> tuple[list[Any], int]:
    """Programs with uneven blocks, gradients, writes, records and ragged exchanges, within `lockstep` and without."""
    found: list[Any] = []
    for checked in (False, True):
        with communication_log() as log, lockstep(seconds=10) if checked else nullcontext():
            x = device_put(torch.linspace(0, 1, 35, dtype=F64).view(7, 5), P("x"), mesh=_mesh()).requires_grad_()
            w = device_put(torch.linspace(-1, 1, 25, dtype=F64).view(5, 5), P(None, "x"), mesh=_mesh()).requires_grad_()
            step = jit(lambda x, w: (torch.tanh(x @ w) @ w.mT).square().sum())
            for _ in range(3):
                loss = (torch.tanh(x @ w) @ w.mT).square().sum() + step(x, w)
                loss.backward()
                with torch.no_grad():
                    for leaf in (x, w):
                        leaf.sub_(0.01 * leaf.grad)
                        leaf.grad = None
                y = _pending(0)
                found.append(float(torch.cos(y).sum() + y.mul_(2).sin().sum()))
            found += [float(loss), device_get(x).tolist(), device_get(reshard(w, P("x"))).tolist()]
    half = len(found) // 2
    assert found[:half] == found[half:]
    return found[:half], len(log)


def _exchanged() -> None:
    for case in some_ragged(20, seed=1):
        with lockstep(seconds=10):
            run_ragged(case, "process_group")


def test_who_keeps_step_notices_nothing(some: Processes) -> None:
    first, *others = some.run(_in_step)
    assert first[1] > 20
    assert others == [first] * len(others)


def test_ragged_exchanges_keep_step() -> None:
    with Processes(4) as four:
        four.run(_exchanged)


def test_a_simulation_is_in_step() -> None:
    with lockstep(), lockstep(1):
        x = device_put(torch.ones(4), P("x"), mesh=make_mesh((2,), ("x",), transport="simulation"))
        assert float(x.sum().cos()) == float(torch.tensor(4.0).cos())


@pytest.mark.parametrize("seconds", [0, -1, True, "1", float("nan")])
def test_seconds_are_a_number_above_zero(seconds: Any) -> None:
    with pytest.raises(ArgumentError, match="lockstep got seconds="), lockstep(seconds):
        pass
