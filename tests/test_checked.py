"""`jit(f, check=True)` compares a record with its function."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fspmd
from fspmd import P, RecordError, device_get, device_put, jit, make_mesh, psum, shard_map

MESH = make_mesh((4,), ("x",), transport="simulation")
OUTSIDE: list[Any] = [0]
GENERATOR = torch.Generator()


def _summed(x: Any) -> Any:
    return shard_map(lambda x: psum((x * 2).sum(0), "x"), mesh=MESH, in_specs=P("x"), out_specs=P())(x)


def _gradient(x: Any) -> Any:
    return fspmd.grad(lambda x: (_summed(x) ** 2).sum())(x)


def _written(x: Any) -> Any:
    x.mul_(2)
    return x + 1


PURE: dict[str, Callable[[Any], Any]] = {
    "product": lambda x: {"y": x * 2, "z": [x.sum(), 3]},
    "collective": _summed,
    "gradient": _gradient,
    "drawn": lambda x: F.dropout(x, 0.5) + torch.rand_like(x),
    "written": _written,
}


@pytest.mark.parametrize("name", PURE)
@pytest.mark.parametrize("rows", [8, 6])
def test_pure_functions(name: str, rows: int) -> None:
    f = PURE[name]
    checked = jit(f, check=True)
    for n in range(3):
        x = device_put(torch.arange(rows * 1.0) + n, P("x"), mesh=MESH)
        torch.manual_seed(n)
        expected = f(x.clone())
        torch.manual_seed(n)
        found = checked(x)
        torch.testing.assert_close(device_get(found), device_get(expected))
    assert checked.cache_info()[:2] == (2, 1)


def _forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return x + torch.rand(3)


def _set_back(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    y = torch.rand(3)
    torch.set_rng_state(state)
    return x + y + torch.rand(3)


def _on_some(x: Tensor) -> Any:
    return _summed(x) if OUTSIDE[0] else x * 1


def _kept(x: Tensor) -> Tensor:
    OUTSIDE[0] += 1
    return x * OUTSIDE[0]


IMPURE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "random": (lambda x: x * random.random(), r"result differs from the function.s: .* Perhaps \S+ reads a value"),
    "forked": (_forked, r"it draws other random numbers. Perhaps \S+ sets the state of a generator, or restores it$"),
    "set back": (_set_back, r"result differs from the function.s"),
    "counter": (_kept, r"result differs from the function.s"),
    "number": (lambda x: OUTSIDE[0], r"result is 0, but the function gives 1"),
    "structure": (lambda x: [x] * (1 + OUTSIDE[0]), r"its result is .*, but the function gives"),
    "collectives": (_on_some, r"its collective 0 is missing, but the function's is psum over"),
}


@pytest.mark.parametrize("name", IMPURE)
def test_functions_that_are_not_pure(name: str) -> None:
    f, message = IMPURE[name]
    OUTSIDE[0] = 0
    checked, x = jit(check=True)(f), torch.ones(3) if name in ("forked", "set back") else torch.ones(8)
    told = rf"^jit\(\S+, check=True\) found a difference between the record and the function: {message}"

    def calls() -> None:
        for _ in range(2):
            checked(x)
            OUTSIDE[0] += 1

    with pytest.raises(RecordError, match=told):
        calls()
