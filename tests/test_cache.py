"""Caches of plans and records: one limit, the oldest entry goes first, and counters for each."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import fspmd
from fspmd import P, device_get, device_put, make_mesh
from fspmd.cache import LIMIT, Cache, forget
from fspmd.meshes import grid
from fspmd.variance import Variance

MESH = make_mesh((2,), ("x",), transport="simulation")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """The limit of new caches is 3."""
    monkeypatch.setattr(Cache.__init__, "__defaults__", (3,))
    return 3


def double(x: Tensor) -> Tensor:
    return x * 2


def test_plans_of_a_mapped_function_are_limited_and_counted(small: int) -> None:
    mapped: Any = fspmd.shard_map(lambda tree: double(tree["a"]), mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    for _ in range(2):
        for n in range(5):
            tree = {"a": torch.arange(4.0), **{f"b{i}": torch.ones(2) for i in range(n)}}
            for _ in range(2):
                assert torch.equal(device_get(mapped(tree)), torch.arange(4.0) * 2)
    assert mapped.cache_info() == (10, 10, small, small)


def test_shapes_of_one_plan_are_limited(small: int) -> None:
    """A plan knows the shapes that it has cut, and those of its results."""
    mapped: Any = fspmd.shard_map(double, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    sizes = range(7002, 7042, 2)
    for n in sizes:
        assert torch.equal(device_get(mapped(torch.ones(n))), torch.full((n,), 2.0))
    known = [keys for keys in map(_shapes, gc.get_objects()) if keys & {*sizes, *(n // 2 for n in sizes)}]
    assert len(known) >= 2
    assert max(map(len, known)) == small


def _shapes(x: object) -> set[int]:
    """The sizes in the keys of a dict of shapes."""
    keys = list(x) if isinstance(x, dict) else []
    return {key[0][0] for key in keys if type(key) is tuple and key and type(key[0]) is torch.Size and key[0]}


def test_records_are_limited(small: int) -> None:
    recorded = fspmd.jit(double)
    for _ in range(2):
        for n in range(5):
            assert torch.equal(recorded(torch.arange(float(n))), torch.arange(float(n)) * 2)
    assert recorded.cache_info().currsize == small


def test_all_caches_have_one_limit() -> None:
    mapped: Any = fspmd.shard_map(double, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    assert mapped.cache_info().maxsize == fspmd.propagation_cache_info().maxsize == LIMIT
    before = fspmd.propagation_cache_info().misses
    x = device_put(torch.arange(4.0), P("x"), mesh=MESH)
    fspmd.propagation_cache_resize(2)
    try:
        for n in range(5):
            assert torch.equal(device_get(x + n), torch.arange(4.0) + n)
            device_get(x.view(1, *(1,) * n, 4) * 2)
        assert fspmd.propagation_cache_info().currsize <= 2
    finally:
        fspmd.propagation_cache_resize(LIMIT)
    assert fspmd.propagation_cache_info().misses > before


@pytest.mark.parametrize("n", [2, 20_000])
def test_repeated_names_of_many_are_told(n: int) -> None:
    names = [f"n{i}" for i in range(n)]
    assert P(*names).axes == frozenset(names)
    for repeated in (lambda: P(*names, names[1]), lambda: P(*names, unreduced={names[1]})):
        with pytest.raises(fspmd.SpecError, match=names[1]):
            repeated()


def live_meshes() -> int:
    gc.collect()
    return sum(type(x) is fspmd.Mesh for x in gc.get_objects())


@pytest.mark.parametrize("new_names", [False, True])
def test_meshes_of_a_loop_are_let_go(new_names: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "_NEW", 50)
    monkeypatch.setattr(grid._interning, "limit", len(grid._interning.living) + 50)
    doubled = fspmd.shard_map(double, in_specs=P(), out_specs=P())  # one function for all meshes
    before, most = live_meshes(), 0
    for i in range(150):
        name = f"x{i}" if new_names else "x"
        mesh = make_mesh((2,), (name,), ranks=(i + 1, 0), transport="simulation")
        x = device_put(torch.arange(4.0), P(name), mesh=mesh)
        y = x + x
        with fspmd.set_mesh(mesh):
            y = doubled(fspmd.shard_map(fspmd.psum, in_specs=(P(name), None), out_specs=P())(y, name))
        assert y.local.tolist() == [8, 16]
        if i % 25 == 24:
            most = max(most, live_meshes())
    assert most - before < 100


def test_equal_values_are_one_object_after_caches_are_forgotten() -> None:
    spec, variance = P("a", None, unreduced={"b"}), Variance({"a"}, {"b"})
    x = device_put(torch.arange(4.0), P("x"), mesh=MESH)
    forget()
    assert P("a", None, unreduced={"b"}) is spec
    assert Variance({"a"}, {"b"}) is variance
    assert (x + x).spec is x.spec
    assert make_mesh((2,), ("x",), transport="simulation") is MESH
