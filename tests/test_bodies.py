"""Sharded bodies: functions along sharded dims, values and gradients beside unsharded torch, and nothing gathered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from dispatch_cases import Case, check_case
from processes import Processes
from torch.nn import functional as F

import fspmd
from fspmd import Mesh, make_mesh
from fspmd.cost import Link, Topology, set_topology, topology

#: bytes cost something and messages nothing, so that bodies are taken for blocks as small as these
BYTES = Topology(Link(0.0, 1e3), Link(0.0, 1e3), launch=0.0)
LINE = make_mesh((4,), ("x",), transport="simulation")
GRID = make_mesh((2, 2), ("x", "y"), transport="simulation")
WIDE = make_mesh((2, 3), ("x", "y"), transport="simulation")

CASES: dict[str, Case] = {
    "softmax": (lambda x: F.softmax(x, -1), ((5, 6),)),
    "softmax of rows": (lambda x: F.softmax(x, 0), ((4, 6),)),
    "log_softmax": (lambda x: F.log_softmax(x, 0), ((5, 6),)),
    "softmin": (lambda x: F.softmin(x, -1), ((4, 5),)),
    "var": (lambda x: torch.var(x, 0), ((6, 5),)),
    "var of all": (lambda x: torch.var(x, correction=0), ((6, 5),)),
    "std": (lambda x: torch.std(x, -1, keepdim=True), ((4, 6),)),
    "std_mean": (lambda x: torch.std_mean(x, (0, 1), correction=0.5), ((5, 6),)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), ((3, 6), (6,), (6,))),
    "layer_norm of two dims": (lambda x: F.layer_norm(x, (5, 6)), ((3, 5, 6),)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (5,), w), ((3, 5), (5,))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), ((2, 4, 5), (4,), (4,))),
    "instance_norm": (F.instance_norm, ((3, 2, 6),)),
    "batch_norm": (lambda x, w: F.batch_norm(x, None, None, w, training=True), ((5, 3, 2), (3,))),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), ((4, 5),)),
    "logsumexp of all": (lambda x: torch.logsumexp(x, (0, 1), keepdim=True), ((6, 5),)),
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
        pool.run(_on_processes, sizes, seconds=120)
