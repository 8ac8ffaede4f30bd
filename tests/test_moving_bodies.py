"""Sharded bodies that move rows, look up and attend: values and gradients beside unsharded torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from dispatch_cases import Case, check_case
from processes import Processes
from test_bodies import BYTES, GRID, LINE, WIDE
from torch.nn import functional as F

import fspmd
from fspmd import Mesh, make_mesh
from fspmd.cost import set_topology, topology

_attend = F.scaled_dot_product_attention
_SEEN = torch.arange(30).reshape(5, 6).remainder(4) != 1

CASES: dict[str, Case] = {
    "attention": (_attend, ((2, 4, 4, 3), (2, 4, 4, 3), (2, 4, 4, 3))),
    "attention, uneven": (lambda q, k, v: _attend(q, k, v, scale=0.3), ((3, 5, 3), (3, 5, 3), (3, 5, 3))),
    "attention, causal": (lambda q, k, v: _attend(q, k, v, is_causal=True), ((2, 5, 3), (2, 5, 3), (2, 5, 3))),
    "attention, lengths": (_attend, ((2, 5, 3), (2, 6, 3), (2, 6, 3))),
    "attention, causal lengths": (lambda q, k, v: _attend(q, k, v, is_causal=True), ((1, 5, 3), (1, 6, 3), (1, 6, 3))),
    "attention, seen": (lambda q, k, v: _attend(q, k, v, _SEEN), ((2, 5, 3), (2, 6, 3), (2, 6, 3))),
    "attention, added": (_attend, ((2, 5, 3), (2, 5, 3), (2, 5, 3), (5, 5))),
    "attention, added row": (_attend, ((2, 5, 3), (2, 5, 3), (2, 5, 3), (2, 5, 1))),
    "attention, groups": (
        lambda q, k, v: _attend(q, k, v, enable_gqa=True, is_causal=True),
        ((1, 8, 4, 3), (1, 4, 4, 3), (1, 4, 4, 3)),
    ),
}


@pytest.fixture(autouse=True)
def _bytes() -> Iterator[None]:
    before = topology()
    set_topology(BYTES)
    fspmd.propagation_cache_clear()
    yield
    set_topology(before)
    fspmd.propagation_cache_clear()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh", [LINE, GRID, WIDE])
def test_values_and_gradients(mesh: Mesh, name: str) -> None:
    check_case(name, CASES[name], mesh, 60)


def _on_processes(sizes: tuple[int, ...]) -> None:
    set_topology(BYTES)
    mesh = make_mesh(sizes, ("x", "y")[: len(sizes)])
    for name, case in CASES.items():
        check_case(name, case, mesh, 3)


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_on_processes(sizes: tuple[int, ...]) -> None:
    with Processes(4) as pool:
        pool.run(_on_processes, sizes, seconds=200)
