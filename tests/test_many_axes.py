"""Meshes of five axes: routes lead where they should, and nothing is searched for long."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from full import FULL

from fspmd import Mesh, P, TensorSpec, device_get, device_put, explain, make_mesh, reshard
from fspmd.global_view.axis_choices import combinations
from fspmd.global_view.question import ask
from fspmd.global_view.strategies import best_strategy
from fspmd.messages import micros
from fspmd.redistribution import straight
from fspmd.redistribution.cost import topology
from fspmd.redistribution.edges import priced
from fspmd.redistribution.moves import moves
from fspmd.redistribution.routes import route

FIVE = (2, 2, 2, 2, 2)


def _on_five_axes(draw: random.Random, mesh: Mesh, shape: tuple[int, ...]) -> TensorSpec:
    """A layout in which each axis cuts some dim, is pending or reduced, or does nothing."""
    cuts: list[list[str]] = [[] for _ in shape]
    states: dict[str, set[str]] = {"U": set(), "R": set(), "I": set()}
    share = draw.choice([0.2, 0.5, 1.0])
    for axis in draw.sample(mesh.axis_names, 5):
        state = "U" if draw.random() < share else draw.choice(["R", "I", "V", "V", "V"])
        if state == "V":
            draw.choice(cuts).append(axis)
        else:
            states[state].add(axis)
    partition = P(*map(tuple, cuts), unreduced=states["U"], reduced=states["R"])
    return TensorSpec(mesh, partition, shape, torch.float32)


_OPS: list[tuple[Any, list[tuple[int, ...]]]] = [
    (torch.mm, [(64, 32), (32, 128)]),
    (torch.addmm, [(128,), (64, 32), (32, 128)]),
    (torch.mul, [(64, 32), (64, 32)]),
    (F.linear, [(16, 64, 32), (128, 32), (128,)]),
    (F.scaled_dot_product_attention, [(8, 8, 32, 16)] * 3),
    (torch.lerp, [(64, 32), (64, 32), (32,)]),
]


def test_plans_on_five_axes_take_no_long_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of routes that are priced: some 30 µs each. Products of what is pending everywhere took 100 s."""
    mesh, draw, count = make_mesh(FIVE, tuple("abcde"), transport="abstract"), random.Random(0), 0

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return priced(*args)

    monkeypatch.setattr(straight, "priced", counted)
    for i in range(18 * (10 if FULL else 1)):
        function, shapes = _OPS[i % len(_OPS)]
        specs = [_on_five_axes(draw, mesh, shape) for shape in shapes]
        if i == 0:
            specs = [TensorSpec(mesh, P(unreduced=set(mesh.axis_names)), shape, torch.float32) for shape in shapes]
        for found in (route, moves):
            found.cache_clear()
        question, count = (
            ask(function, tuple(torch.empty(s, device="meta") for s in shapes), {}, [*enumerate(specs)]),
            0,
        )
        if question is not None and (best := best_strategy(question)) is not None:
            for spec, need, casts in zip(specs, best.operands, best.casts, strict=True):
                moves(spec, need, casts, topology())
        assert count < 800, specs


def test_of_many_combinations_few_are_looked_at() -> None:
    """Four operands in which no two axes have the same part: 22176 combinations, some of which take long to find."""
    mesh = make_mesh(FIVE, tuple("abcde"), transport="abstract")
    lies = [
        P(None, "e", ("c", "d"), None, unreduced={"a", "b"}),
        P(None, None, ("b", "d"), "e", unreduced={"a", "c"}),
        P(None, None, None, ("c", "d", "a"), unreduced={"b", "e"}),
        P(("a", "b"), None, "c", ("d", "e")),
    ]
    specs = [TensorSpec(mesh, one, (8, 8, 32, 32), torch.float32) for one in lies]
    args = [torch.empty(spec.shape, device="meta") for spec in specs]
    question = ask(F.scaled_dot_product_attention, tuple(args), {}, [*enumerate(specs)])
    assert question is not None
    count = sum(1 for _ in combinations(question))
    assert count <= 512
    assert best_strategy(question) is not None


def test_routes_on_five_axes_lead_where_they_should() -> None:
    """By values, in a simulation of 32 ranks; what is not proved the quickest tells how quick another may be."""
    mesh, draw, told = make_mesh(FIVE, tuple("abcde")), random.Random(1), 0
    for _ in range(60 if FULL else 10):
        shape = draw.choice([(8, 6), (4, 4, 4), (5,)])
        source, target = (_on_five_axes(draw, mesh, shape) for _ in range(2))
        whole = torch.randn(shape, dtype=torch.float64)
        x = reshard(device_put(whole, P(), mesh=mesh), source.partition)
        found = explain(x, target.partition)
        torch.testing.assert_close(device_get(reshard(x, target.partition)), whole)
        bound = found.routes[0][1].bound
        assert bound is None or bound < found.price.time
        told += f"none takes less than {micros(bound)}" in str(found) if bound is not None else 0
    assert told
