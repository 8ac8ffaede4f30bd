"""Every layout to every other: blocks by brute force over coordinates, gradients of the global function, prices."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from full import FULL
from processes import Processes
from simulated import layouts
from torch import Tensor

from fspmd import Mesh, P, Sharded, TensorSpec, device_get, device_put, make_mesh, set_topology
from fspmd.redistribution.cost import Link, Topology, topology
from fspmd.redistribution.redistribute import redistribute
from fspmd.redistribution.routes import Route, route
from fspmd.transport.frame import frame_over
from fspmd.transport.local_tensor import shards_of

F64 = torch.float64
MESHES = (
    make_mesh((4,), ("x",), transport="simulation"),
    make_mesh((2, 2), ("x", "y"), transport="simulation"),
    make_mesh((2, 3), ("x", "y"), transport="simulation"),
    make_mesh((2, 1, 3), ("x", "y", "z"), transport="simulation"),
)
SHAPES = ((12, 24), (5, 7), (1, 4), (0, 6))
GRID = MESHES[2]


def pairs(mesh: Mesh, shape: tuple[int, ...], every: int) -> list[tuple[P, P]]:
    """Of all pairs of layouts each ``every``-th, beginning where the shape says, so that shapes see different ones."""
    found = layouts(mesh, len(shape))
    all_pairs = list(itertools.product(found, repeat=2))
    return all_pairs[sum(shape) % every :: every]


def value(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=F64).reshape(shape).sin()


def moved(x: Tensor, source: P, target: P, mesh: Mesh) -> Sharded:
    """A global tensor laid out and moved on."""
    placed = device_put(x, source, mesh=mesh)
    after = placed.spec.with_partition(target)
    return Sharded(redistribute(placed.local, placed.spec, after), after)


def check_blocks(found: Sharded, x: Tensor) -> None:
    """Each rank's block is its window of ``x``; over unreduced axes the blocks add up to it."""
    mesh, spec = found.spec.mesh, found.spec
    coordinates = list(itertools.product(*map(range, mesh.shape.values())))
    sums: dict[Any, Tensor] = {}
    for at, block in zip(coordinates, shards_of(found.local.detach(), frame_over(mesh, mesh.axis_names)), strict=True):
        key = tuple(c for axis, c in zip(mesh.axis_names, at, strict=True) if axis not in spec.partition.unreduced)
        sums[key, at if not spec.partition.unreduced else ()] = sums.get((key, ()), torch.zeros_like(block)) + block
        window = tuple(slice(a, a + n) for a, n in zip(spec.offset(at), spec.local_shape(at), strict=True))
        if not spec.partition.unreduced:
            torch.testing.assert_close(block, x[window], rtol=0, atol=0)
    for at in coordinates:
        key = tuple(c for axis, c in zip(mesh.axis_names, at, strict=True) if axis not in spec.partition.unreduced)
        window = tuple(slice(a, a + n) for a, n in zip(spec.offset(at), spec.local_shape(at), strict=True))
        if spec.partition.unreduced:
            torch.testing.assert_close(sums[key, ()], x[window], rtol=1e-14, atol=1e-14)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mesh", MESHES)
def test_any_layout_to_any_other(mesh: Mesh, shape: tuple[int, ...]) -> None:
    x, weight = value(shape), value(shape) + 2
    for source, target in pairs(mesh, shape, 1 if FULL else (5, 13, 13, 997)[MESHES.index(mesh)]):
        leaf = x.clone().requires_grad_()
        found = moved(leaf, source, target, mesh)
        check_blocks(found, x)
        (device_get(found) * weight).sum().backward()
        torch.testing.assert_close(leaf.grad, weight, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("mesh", MESHES[:3])
def test_the_gradient_lies_as_the_source(mesh: Mesh) -> None:
    """A `Sharded` leaf's gradient has its layout; the gradient's own gradient is the weight again."""
    x, weight = value((6, 4)), value((6, 4)) + 2
    for source, target in pairs(mesh, (6, 4), 5 if FULL else (3, 101, 101)[MESHES.index(mesh)]):
        placed = device_put(x, source, mesh=mesh).requires_grad_()
        after = placed.spec.with_partition(target)
        out = Sharded(redistribute(placed.local, placed.spec, after), after)
        out.backward(weight)
        assert placed.grad is not None
        assert placed.grad.spec.partition == P(
            *placed.spec.partition, unreduced=source.reduced, reduced=source.unreduced
        )
        check_blocks(placed.grad, weight)


def names(way: Route) -> list[str]:
    return [f"{step.call.pair.name}({','.join(step.call.axes)})" for step in way.steps]


def way(source: P, target: P, mesh: Mesh = GRID, shape: tuple[int, ...] = (48, 48)) -> Route:
    return route(TensorSpec(mesh, source, shape, F64), TensorSpec(mesh, target, shape, F64), topology())


#: what a person would write
KNOWN = (
    (P("x"), P(None, "x"), ["all_to_all(x)"]),
    (P("x"), P(), ["all_gather_invariant(x)"]),
    (P(), P("y", "x"), ["slice(x)", "slice(y)"]),
    (P(("x", "y")), P(), ["all_gather_invariant(x,y)"]),
    (P(("x", "y")), P("x"), ["all_gather_invariant(y)"]),
    (P(("x", "y")), P(("y", "x")), ["reblock(x,y)"]),
    (P("x"), P("x", "y"), ["slice(y)"]),
    (P("x"), P(None, ("y", "x")), ["slice(y)", "all_to_all(x)"]),
    (P("x"), P(None, ("x", "y")), ["reblock(x,y)"]),
    (P("x", None), P(None, "x"), ["all_to_all(x)"]),
    (P("x", "y"), P(), ["reblock(x,y)"]),
    (P(("x", "y")), P(None, ("x", "y")), ["all_to_all(x,y)"]),
    (P("x", reduced={"y"}), P(reduced={"x", "y"}), ["all_gather_reduced(x)"]),
    (P(unreduced={"x"}), P(), ["psum_unreduced(x)"]),
    (P(unreduced={"x", "y"}), P(), ["psum_unreduced(x,y)"]),
    (P(unreduced={"x"}), P("x"), ["psum_scatter_unreduced(x)"]),
    (P(unreduced={"x"}), P(reduced={"x"}), ["psum_to_reduced(x)"]),
    (P(unreduced={"x", "y"}), P(("x", "y")), ["psum_scatter_unreduced(x,y)"]),
    (P(unreduced={"x"}), P("y"), ["slice(y)", "psum_unreduced(x)"]),
    (P(reduced={"x"}), P(), ["reduced_to_invariant(x)"]),
    (P(), P(reduced={"x"}), ["invariant_to_reduced(x)"]),
)


@pytest.mark.parametrize(("source", "target", "steps"), KNOWN)
def test_routes_are_what_a_person_would_write(source: P, target: P, steps: list[str]) -> None:
    assert sorted(names(way(source, target))) == sorted(steps)


def test_blocks_of_a_square_mesh_change_places_in_one_step() -> None:
    assert names(way(P("x", "y"), P("y", "x"), MESHES[1])) == ["reblock(x,y)"]


def test_a_long_gather_is_not_paid_for_what_is_cut_again() -> None:
    """From rows over x to rows over y, of a tensor so large that latency does not count."""
    found = way(P("x"), P("y"), MESHES[1], (4096, 4096))
    whole = 4096 * 4096 * 8
    assert found.price.moved <= whole / 2
    assert found.price.peak < 1.5 * whole


@pytest.mark.parametrize("mesh", MESHES[1:])
def test_ways_round_slow_links_lead_to_the_same_blocks(mesh: Mesh) -> None:
    """Where axes have links of different speeds other routes are the cheapest."""
    before, x = topology(), value((5, 7))
    for slow in mesh.axis_names:
        try:
            set_topology(Topology(axes=((slow, Link(30.0, 1e-3)),)))
            for source, target in pairs(mesh, (5, 7), 5 if FULL else (53, 53, 2003)[MESHES.index(mesh) - 1]):
                leaf = x.clone().requires_grad_()
                found = moved(leaf, source, target, mesh)
                check_blocks(found, x)
                (device_get(found) * (x + 2)).sum().backward()
                torch.testing.assert_close(leaf.grad, x + 2, rtol=1e-14, atol=1e-14)
        finally:
            set_topology(before)


def _on_processes(shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    axes = ("x", "y", "z")[: len(sizes)]
    mesh = make_mesh(sizes, axes)
    simulated = make_mesh(sizes, axes, transport="simulation")
    x, weight, here = value(shape), value(shape) + 2, mesh.coordinate()
    assert here is not None
    at = frame_over(simulated, axes)
    for source, target in pairs(simulated, shape, (1, 1, 29)[len(sizes) - 1] if FULL else 23 ** len(sizes) // 2):
        leaf = x.clone().requires_grad_()
        found = moved(leaf, source, target, mesh)
        blocks = shards_of(moved(x, source, target, simulated).local, at)
        mine = blocks[list(itertools.product(*map(range, sizes))).index(here)]
        torch.testing.assert_close(found.local.detach(), mine, rtol=1e-14, atol=1e-14)
        (device_get(found) * weight).sum().backward()
        torch.testing.assert_close(leaf.grad, weight, rtol=1e-14, atol=1e-14)


#: processes, and the meshes that they make
POOLS = ((4, ((4,), (2, 2), (2, 1, 2))), (6, ((6,), (2, 3), (3, 1, 2))))


@pytest.mark.parametrize(("count", "meshes"), POOLS)
def test_on_processes_as_simulated(count: int, meshes: tuple[tuple[int, ...], ...]) -> None:
    with Processes(count) as pool:
        cases = list(itertools.product(((12, 12), (5, 7)), meshes))
        for shape, sizes in cases if FULL else cases[count // 2 % 2 :: 2]:
            pool.run(_on_processes, shape, sizes)
