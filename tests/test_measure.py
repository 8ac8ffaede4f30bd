"""Measured links: positive, and the same on all ranks; and prices that follow them."""

from __future__ import annotations

from math import inf

import pytest
from processes import Processes

from fspmd import Link, MeshError, Topology, make_mesh, measure_topology, set_topology, topology
from fspmd.redistribution.cost import price


def _measured(sizes: tuple[int, ...]) -> Topology:
    return measure_topology(make_mesh(sizes, ("x", "y", "z")[: len(sizes)]))


def test_all_ranks_measure_the_same() -> None:
    with Processes(4) as pool:
        for sizes in ((4,), (2, 2), (1, 4)):
            figures = pool.run(_measured, sizes)
            assert all(one == figures[0] for one in figures)
            links = dict(figures[0].axes)
            assert set(links) == {axis for axis, n in zip("xyz", sizes, strict=False) if n > 1}
            assert all(link.latency >= 0 and 0 < link.bandwidth < inf for link in links.values())
            assert figures[0].launch > 0
            assert figures[0].memory > 0


def test_prices_follow_what_is_set() -> None:
    mesh = make_mesh((2, 4), ("x", "y"), transport="simulation")
    before = topology()
    try:
        set_topology(Topology(launch=3.0, memory=float("inf"), axes=(("x", Link(5.0, 10.0)),)))
        assert price("gather", mesh, ("x",), 100, 200).time == 3 + 5 + 100 / 10
    finally:
        set_topology(before)


def test_a_simulated_mesh_is_refused() -> None:
    with pytest.raises(
        MeshError, match="is simulated in one process, where nothing moves between ranks; measure under"
    ):
        measure_topology(make_mesh((4,), ("x",), transport="simulation"))
    with pytest.raises(MeshError, match=r"mesh\(x=2\) is abstract: it has no ranks, and nothing to measure; measure"):
        measure_topology(make_mesh((2,), ("x",), transport="abstract"))
