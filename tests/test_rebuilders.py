"""Rebuilders make results with the structure of the recorded one, of other tensors."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import optree
import pytest
import torch
from simulated import MESH

from fspmd import P, Sharded, device_put, jit
from fspmd.programs.records import rebuilder
from fspmd.trees import flatten_values

M = torch.ones(2)
X = device_put(torch.arange(8.0), P("x"), mesh=MESH)


class _Point(NamedTuple):
    x: Any
    y: Any


class _Checked(_Point):
    """Named tuples may do more than hold values."""

    def __new__(cls, x: Any, y: Any) -> _Checked:
        made: _Checked = super().__new__(cls, x, y)
        return made


#: results, and whether their rebuilders are straight lines
_RESULTS: dict[str, tuple[Any, bool]] = {
    "a tensor": (M, True),
    "a value": (X, True),
    "nothing": (None, True),
    "a number": (3, True),
    "an empty tuple": ((), True),
    "a tuple": ((M, X), True),
    "a list within a tuple": ((M, [X, None, "name"]), True),
    "a tensor twice": ((M, M), True),
    "a dict": ({"w": M, "b": X}, True),
    "dicts with keys of other types": ({2: M, 1: {"b": X}, "a": M}, False),
    "a named tuple": (_Point(M, [X]), True),
    "a named tuple of one's own": ({"at": _Checked(M, X)}, True),
    "strange numbers": ((M, -0.0, float("inf"), True), True),
    "an ordered dict": (OrderedDict(w=M, b=X), False),
    "a set": ((M, {1, 2}), False),
    "a function": ((M, len), False),
}


@pytest.mark.parametrize("name", _RESULTS)
def test_rebuilders_make_the_tree(name: str) -> None:
    out, is_straight = _RESULTS[name]
    leaves, treedef = flatten_values(out)
    given = [x.clone() for x in leaves if isinstance(x, torch.Tensor)]
    rebuild: Any = rebuilder(out)
    assert ("filled" in rebuild.__globals__) != is_straight
    made = rebuild(tuple(x.local if isinstance(x, Sharded) else x for x in given))
    assert type(made) is type(out)
    found, structure = flatten_values(made)
    assert structure == treedef
    assert optree.tree_structure(made) == optree.tree_structure(out)
    if type(out) is dict:
        assert list(made) == list(out)
    for x, leaf in zip(found, leaves, strict=True):
        assert type(x) is type(leaf)
        if isinstance(x, Sharded):
            assert any(x.local is y.local and x.spec is leaf.spec for y in given if isinstance(y, Sharded))
        elif isinstance(x, torch.Tensor):
            assert any(x is y for y in given)
        else:
            assert repr(x) == repr(leaf)


def test_results_with_mutable_leaves_are_made_anew() -> None:
    twice = jit(lambda x: (2 * x, {"seen"}, [x, x + 1]))
    first, second = twice(M), twice(M)
    assert first[1] is not second[1]
    assert first[2] is not second[2]
