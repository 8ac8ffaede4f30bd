"""Readers find the leaves of arguments of one structure, and refuse all others."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from simulated import MESH
from torch import nn

from fspmd import P, device_put, jit, reshard
from fspmd.programs.readers import reader
from fspmd.trees import flatten_trees

M = torch.ones(2, 2)
X = device_put(torch.arange(8.0), P("x"), mesh=MESH)


class _Pair(NamedTuple):
    first: Any
    second: Any


#: arguments, and arguments of another structure or form
_READ: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...], dict[str, Any]]] = {
    "a dict": (({"w": M, "b": X},), {}, ({"b": M, "w": X},), {}),
    "a dict in another order": (({"w": M, "b": X},), {}, ({"b": X, "w": M},), {}),
    "a dict with another key": (({"w": M, "b": X},), {}, ({"w": M, "c": X},), {}),
    "a longer list": (([M, [X]],), {}, ([M, [X], M],), {}),
    "a tuple in the place of a list": (([M, [X]],), {}, ([M, (X,)],), {}),
    "a named tuple": ((_Pair(M, (X, {})),), {}, ((M, (X, {})),), {}),
    "another container within": ((_Pair(M, (X, {})),), {}, (_Pair(M, (X, [])),), {}),
    "another argument": ((M, [X]), {}, (M, [X], []), {}),
    "a name": (([M],), {"x": X}, ([M],), {"y": X}),
    "no tree": ((M, X), {}, (X, M), {}),
    "another spec": (([X],), {}, ([reshard(X, P())],), {}),
    "another form": (([X],), {}, ([X[::2][:4]],), {}),
    "a parameter": (([nn.Parameter(M)],), {}, ([M],), {}),
    "an ordered dict": ((OrderedDict(w=M, b=X),), {}, (OrderedDict(b=X, w=M),), {}),
    "an ordered dict in the place of a dict": ((OrderedDict(w=M),), {}, ({"w": M},), {}),
    "a number": (([M],), {}, ([3],), {}),
}


@pytest.mark.parametrize("name", _READ)
def test_readers_know_their_arguments(name: str) -> None:
    args, kwargs, others, other_names = _READ[name]
    leaves = flatten_trees((args, kwargs))[0]
    read = reader(args, kwargs, leaves)
    found = read(args, kwargs)
    assert found is not None
    assert len(found) == len(leaves)
    assert all(x is y for x, y in zip(found, leaves, strict=True))
    assert read(others, other_names) is None


@pytest.mark.parametrize("name", _READ)
def test_readers_are_straight_lines_where_they_can_be(name: str) -> None:
    args, kwargs, *_ = _READ[name]
    read = reader(args, kwargs, flatten_trees((args, kwargs))[0])
    assert (read.__name__ == "by_walk") == name.startswith("an ordered dict")


def test_readers_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where more kinds of calls take turns than are near, as with lengths of sequences."""
    written: list[Any] = []
    monkeypatch.setattr("fspmd.programs.jit.reader", lambda *given: written.append(given) or reader(*given))
    add = jit(lambda a, b: a + b)
    for _ in range(3):
        for n in range(1, 9):
            assert torch.equal(add(torch.ones(n), torch.ones(n)), torch.full((n,), 2.0))
    assert len(written) == 8
