"""Prices: published formulas, known problems, and the triangle inequality over all layouts."""

from __future__ import annotations

import itertools
import random
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from full import FULL
from simulated import layouts
from torch import Tensor

from fspmd import ArgumentError, Mesh, P, TensorSpec, device_put, make_mesh, propagation_cache_info, set_topology
from fspmd.entries import blocks
from fspmd.global_view.question import ask
from fspmd.global_view.strategies import best_strategy, strategies
from fspmd.redistribution.bounds import _overlapped, _rows, bound, least_times
from fspmd.redistribution.cost import ETHERNET, INFINIBAND, NVLINK, Link, Topology, price, topology
from fspmd.redistribution.edges import edges, priced, reblock
from fspmd.redistribution.routes import Route, route
from fspmd.transport.windows import Reblock, Traffic, Window, _pieces, coordinates, is_idle, traffic, window

WHOLE = 1 << 30
#: latency does not count, nor what a rank reads and writes itself: the limit of large arrays
LARGE = Topology(Link(0.0, 50e3), Link(0.0, 50e3), launch=0.0, memory=float("inf"))


def line(n: int) -> Mesh:
    return make_mesh((n,), ("x",), transport="simulation")


def time(kernel: str, n: int, before: int, after: int, figures: Topology = LARGE) -> float:
    return price(kernel, line(n), ("x",), before, after, figures).time


def way(source: P, target: P, mesh: Mesh, shape: tuple[int, ...], figures: Topology | None = None) -> Route:
    ends = (TensorSpec(mesh, partition, shape, torch.bfloat16) for partition in (source, target))
    return route(*ends, figures or topology())


# --- what is moved --------------------------------------------------------------------------------------------------


def _received(move: Reblock) -> Traffic:
    """By listing, for every rank, whose blocks it has to be sent."""
    messages = elements = 0
    mesh = move.source.mesh
    places = {at: (window(move.source, at), window(move.target, at)) for at in coordinates(mesh)}
    still = [i for i, axis in enumerate(mesh.axis_names) if axis not in move.axes]
    for at, (own, mine) in places.items():
        lacks = prod(length for _, length in mine) - _common(own, mine)
        held = {other for there, (other, _) in places.items() if all(there[i] == at[i] for i in still)}
        pieces = sum(_common(other, mine) > 0 for other in held - {own})
        messages, elements = max(messages, pieces if lacks else 0), max(elements, lacks)
    return Traffic(messages, elements)


def _common(a: Window, b: Window) -> int:
    return prod(max(0, min(i + n, k + m) - max(i, k)) for (i, n), (k, m) in zip(a, b, strict=True))


@pytest.mark.parametrize("sizes", [(9, 4), (2, 3)])
def test_traffic_is_that_of_the_busiest_of_all_ranks(sizes: tuple[int, ...]) -> None:
    """Of even blocks, uneven ones, and more ranks than rows."""
    mesh, chosen = make_mesh(sizes, ("x", "y"), transport="abstract"), random.Random(0)
    placed = [P(a, b) for a in ENTRIES for b in ENTRIES if not {*(a or ())} & {*(b or ())}]
    for _ in range(60):
        shape = chosen.choice([(36, 72), (3, 100), (37, 5), (1, 72), (0, 4)])
        source, target = (TensorSpec(mesh, chosen.choice(placed), shape, torch.float32) for _ in range(2))
        move = Reblock(source, target)
        assert traffic(move) == _received(move), move
        assert is_idle(move) == (not _received(move).elements)


ENTRIES: list[Any] = [None, ("x",), ("y",), ("x", "y"), ("y", "x")]


# --- the triangle inequality ----------------------------------------------------------------------------------------

TOPOLOGIES = {
    "one host": Topology(),
    "slow x": Topology(axes=(("x", ETHERNET),)),
    "slow y, little memory": Topology(axes=(("y", ETHERNET),), capacity=1e7),
}


EVERY = list(itertools.product(TOPOLOGIES, [(4,), (2, 2), (2, 3), (4, 2)], [(12, 12), (5, 7), (4096, 4096)]))
SOME = EVERY if FULL else EVERY[::5]


@pytest.mark.one_of(3)
@pytest.mark.parametrize(("figures", "sizes", "shape"), SOME)
def test_no_detour_is_cheaper(figures: str, sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Of all layouts a, b, c of a matrix: going from a to c costs at most what going by way of b does."""
    mesh = make_mesh(sizes, ("x", "y")[: len(sizes)], transport="simulation")
    found = layouts(mesh, 2)
    cost = {(a, b): way(a, b, mesh, shape, TOPOLOGIES[figures]).price.time for a in found for b in found}
    for a, b, c in itertools.product(found, repeat=3):
        assert cost[a, c] <= (cost[a, b] + cost[b, c]) * (1 + 1e-9) + 1e-8, (a, b, c)


# --- routes by brute force ------------------------------------------------------------------------------------------


def brute_force(mesh: Mesh, shape: tuple[int, ...], figures: Topology) -> tuple[list[TensorSpec], Tensor]:
    """Every layout of a tensor, and the least time between any two by every sequence of edges (Floyd and Warshall)."""
    found = [TensorSpec(mesh, partition, shape, torch.bfloat16) for partition in layouts(mesh, len(shape))]
    number = {spec: i for i, spec in enumerate(found)}
    pending = [spec for spec in found if not spec.partition.axes]
    least = torch.full((len(found), len(found)), float("inf"), dtype=torch.float64)
    for i, spec in enumerate(found):
        least[i, i] = 0.0
        steps = {edge for end in pending for edge in edges(spec, end, True)}
        words = spec.partition.unreduced, spec.partition.reduced
        others = (other for other in found if (other.partition.unreduced, other.partition.reduced) == words)
        for move, after in {*steps, *(reblock(spec, other) for other in others if other is not spec)}:
            least[i, number[after]] = min(least[i, number[after]], priced(move, spec, after, figures).price.time)
    for k in range(len(found)):
        least = torch.minimum(least, least[:, k : k + 1] + least[k : k + 1])
    return found, least


CUBES = [
    *itertools.product(TOPOLOGIES, [(2, 2, 2), (2, 3, 2)], [(12,), (5,), (1 << 20,), (12, 12), (5, 7), (4096, 4096)])
]
TRIED = CUBES if FULL else [*CUBES[3::12], CUBES[23]]


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("figures", "sizes", "shape"), TRIED)
def test_routes_on_three_axes_are_the_quickest_of_all(
    figures: str, sizes: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """Of a sample; and no estimate of what is still to come is above it. On equal links uneven blocks may take 1.3."""
    mesh = make_mesh(sizes, ("x", "y", "z"), transport="simulation")
    prices = TOPOLOGIES[figures]
    found, least = brute_force(mesh, shape, prices)
    draw = random.Random(repr((figures, sizes, shape)))
    excess = least_times(found, found, prices) - least
    assert float(excess.max()) <= 1e-6, [found[i] for i in divmod(int(excess.argmax()), len(found))]
    for target in draw.sample(found, 12):
        ahead, j = bound(target, prices), found.index(target)
        for i, source in enumerate(found):
            assert ahead(source) <= float(least[i, j]) + 1e-6, (source, target)
        for i in draw.sample(range(len(found)), 5):
            taken = route(found[i], target, prices).price.time
            allowed = 1.3 if figures == "one host" and sizes == (2, 3, 2) else 1 + 1e-9
            assert float(least[i, j]) - 1e-5 <= taken <= float(least[i, j]) * allowed + 1e-5, (found[i], target)


def any_layout(draw: random.Random, ndim: int, first: tuple[str, ...] = (), reduced: tuple[str, ...] = ()) -> P:
    """A layout over x, y and z. ``first`` cut the first dim before them."""
    dims, words = [list(first), *([] for _ in range(ndim - 1))], {"unreduced": set[str](), "reduced": set(reduced)}
    for axis in draw.sample("xyz", 3):
        match draw.choice([*range(ndim), *range(ndim), "unreduced", "reduced", None]):
            case int(dim):
                dims[dim].append(axis)
            case str(word):
                words[word].add(axis)
    return P(*map(tuple, dims), **words)


@pytest.mark.parametrize("shape", [(9,), (4096, 64), (16, 4096, 8)])
@pytest.mark.parametrize("sizes", [(64, 16, 8), (2, 3, 4)])
def test_axes_of_one_rank_change_no_price_and_widen_no_search(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Beside the mesh without them. They cut the first dim before and after, or are reduced at the end, or neither."""
    x, y, z = sizes
    wide = make_mesh(sizes, ("x", "y", "z"), transport="abstract")
    thin = make_mesh((1, x, 1, y, 1, z), ("a", "x", "b", "y", "c", "z"), transport="abstract")
    for seed in range(8):
        wanted = way(*(any_layout(random.Random(2 * seed + i), len(shape)) for i in (0, 1)), wide, shape)
        for first, reduced in (((), ()), (("a",), ()), ((), ("b", "c"))):
            source = any_layout(random.Random(2 * seed), len(shape), first)
            target = any_layout(random.Random(2 * seed + 1), len(shape), first, reduced)
            found = way(source, target, thin, shape)
            assert found.looked <= 4 * wanted.looked + 10, (source, target)
            if wanted.bound is None and found.bound is None:
                assert found.price.time == pytest.approx(wanted.price.time, abs=1e-5), (source, target)


# --- published formulas ---------------------------------------------------------------------------------------------


CALLS: dict[str, tuple[Any, ...]] = {
    "mm": (torch.mm, [(8, 12), (12, 4)]),
    "addmm": (torch.addmm, [(5,), (6, 5), (5, 5)]),
    "softmax": (torch.softmax, [(4096, 512)], 1),
    "sum": (torch.sum, [(7, 4)]),
}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("sizes", [(4,), (2, 3), (1, 3)])
@pytest.mark.parametrize("name", CALLS)
def test_the_strategy_that_is_taken_is_the_first_of_the_cheapest(name: str, sizes: tuple[int, ...]) -> None:
    """Though most are never priced: of all strategies, each priced to its end."""
    mesh, (function, shapes, *rest) = make_mesh(sizes, ("x", "y")[: len(sizes)], transport="simulation"), CALLS[name]
    every = list(itertools.product(*(layouts(mesh, len(shape)) for shape in shapes)))
    for partitions in every[:: max(1, len(every) // 12)]:
        specs = [TensorSpec(mesh, one, shape, torch.float32) for one, shape in zip(partitions, shapes, strict=True)]
        args = (*(torch.empty(shape, device="meta") for shape in shapes), *rest)
        question = ask(function, args, {}, list(enumerate(specs)))
        assert question is not None
        for gradients in (frozenset[int](), frozenset(range(len(specs)))):
            asked = question._replace(gradients=gradients)
            best, cheapest = best_strategy(asked), min(strategies(asked), key=lambda one: one.time)
            assert best is not None
            assert (best.operands, best.results) == (cheapest.operands, cheapest.results)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 1, 3), *([(2, 4, 2)] if FULL else [])])
def test_of_operands_in_conflict_the_strategy_is_the_first_of_the_cheapest(sizes: tuple[int, ...]) -> None:
    """Attention and a product of which every operand has every axis on another dim; (2, 4, 2) is on two hosts."""
    mesh, draw = make_mesh(sizes, ("x", "y", "z"), transport="simulation"), random.Random(repr(sizes))
    for function, shape in ((F.scaled_dot_product_attention, (8, 4, 6, 8)), (torch.baddbmm, (8, 8, 8))):
        lie = [P(*order) for order in set(itertools.permutations(["x", "y", "z", None][: len(shape)]))]
        specs = [TensorSpec(mesh, one, shape, torch.float32) for one in draw.sample(sorted(lie, key=repr), 3)]
        question = ask(function, tuple(torch.empty(shape, device="meta") for _ in specs), {}, list(enumerate(specs)))
        assert question is not None
        for gradients in (frozenset[int](), frozenset(range(3))):
            asked = question._replace(gradients=gradients)
            best, cheapest = best_strategy(asked), min(strategies(asked), key=lambda one: one.time)
            assert best is not None
            assert (best.operands, best.results) == (cheapest.operands, cheapest.results)


def test_of_equal_routes_all_processes_take_the_same() -> None:
    """That which comes first in the order of the mesh's axes, and not in one that hashes of strings give."""
    mesh = make_mesh((4, 2, 2), ("x", "y", "z"), transport="simulation")
    for source in (P(None, ("y", "x", "z")), P(None, ("y", "x"))):
        found = way(source, P(), mesh, (64, 64))
        assert [step.spec.partition for step in found.steps] == [P(None, ("y", "z")), P(None, None)]


def test_prices_are_those_of_the_literature() -> None:
    """Rings of 16 ranks and 1 GiB over links of 1 us and 50 GB/s, worked out by hand."""
    mesh = make_mesh((16,), ("x",), transport="simulation")
    plain = Topology(Link(1.0, 50e3), Link(1.0, 50e3), launch=0.0, memory=float("inf"))
    whole = 1 << 30
    expected = {
        "gather": (whole // 16, whole, 15 + whole * 15 / 16 / 50e3),
        "reduce_scatter": (whole, whole // 16, 15 + whole * 15 / 16 / 50e3),
        "reduce": (whole, whole, 30 + whole * 30 / 16 / 50e3),
        "exchange": (whole, whole, 15 + whole * 15 / 16 / 50e3),
        "permute": (whole, whole, 1 + whole / 50e3),
        "slice": (whole, whole // 16, 0.0),
    }
    for kernel, (before, after, time) in expected.items():
        assert price(kernel, mesh, ("x",), before, after, plain).time == pytest.approx(time, rel=1e-12)


def test_links_are_found_from_where_ranks_stand() -> None:
    mesh = make_mesh((2, 8), ("dp", "tp"), transport="simulation")
    figures = Topology(per_host=8)
    assert [figures.link(mesh, axes) for axes in (("tp",), ("dp",), ("dp", "tp"))] == [NVLINK, INFINIBAND, INFINIBAND]
    across = make_mesh((2, 8), ("dp", "tp"), ranks=[i % 8 * 2 + i // 8 for i in range(16)], transport="simulation")
    assert [figures.link(across, axes) for axes in (("tp",), ("dp",))] == [INFINIBAND, NVLINK]
    named = Topology(axes=(("tp", Link(9.0, 1e3)),))
    assert named.link(mesh, ("tp",)) == Link(9.0, 1e3)
    assert named.link(mesh, ("dp", "tp")) == Link(9.0, 1e3)


def test_calls_are_planned_anew_by_other_figures() -> None:
    mesh, before = line(4), topology()
    x, w = (device_put(torch.ones(64, 64), spec, mesh=mesh) for spec in (P(None, "x"), P("x")))
    x @ w
    planned = propagation_cache_info().currsize
    try:
        set_topology(Topology(axes=(("x", ETHERNET),)))
        assert planned > propagation_cache_info().currsize == 0
        x @ w
        set_topology(topology())
        assert propagation_cache_info().currsize == 1
    finally:
        set_topology(before)


def test_a_way_between_hosts_is_no_quicker_than_one_inside() -> None:
    """Of hosts whose ranks are joined by less than the network: no group is quicker for being larger."""
    mesh = make_mesh((2, 3), ("x", "y"), transport="simulation")
    figures = Topology(inside=Link(1.5, 3e3), between=Link(5.0, 50e3), per_host=3, launch=0.1)
    assert figures.link(mesh, ("x",)) == Link(5.0, 50e3)
    assert figures.link(mesh, ("y",)) == Link(1.5, 3e3)
    assert figures.link(mesh, ("x", "y")) == Link(5.0, 3e3)
    found, least = brute_force(mesh, (2, 30), figures)
    assert float((least_times(found, found, figures) - least).max()) <= 1e-9
    for j, target in enumerate(found):
        ahead = bound(target, figures)
        assert all(ahead(source) <= float(least[i, j]) + 1e-9 for i, source in enumerate(found))


def test_bounds_are_as_exact_as_prices() -> None:
    """Of sums whose bytes over bandwidth single precision rounds up."""
    mesh = make_mesh((3, 2), ("x", "y"), transport="simulation")
    figures = Topology(axes=(("x", Link(0.0, 1e3)), ("y", Link(1.0, 450e3))), memory=float("inf"))
    found, least = brute_force(mesh, (1 << 16,), figures)
    assert float((least_times(found, found, figures) - least).max()) <= 1e-9


@pytest.mark.parametrize("seed", range(300))
def test_blocks_that_meet_are_counted_without_all_blocks(seed: int) -> None:
    rng = random.Random(seed)
    size, some, others = rng.randint(0, 60), *(tuple(rng.choices(range(1, 5), k=rng.randint(0, 3))) for _ in range(2))
    start, length = blocks(size, others)[-1]
    meeting = [n for begin, n in blocks(size, some) if n and begin < start + length and start < begin + n]
    assert _overlapped(size, some, others) == max(1, len(meeting))
    places = tuple(rng.choice([None, rng.randrange(n)]) for n in some)
    rows = set[int]()
    for at, (begin, n) in zip(itertools.product(*map(range, some)), blocks(size, some), strict=True):
        if all(place in (None, i) for place, i in zip(places, at, strict=True)):
            rows.update(range(begin, begin + n))
    found = _rows(size, some, places)
    assert [i for begin, end in found for i in range(begin, end)] == sorted(rows)
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(found))
    starts, ends = _pieces(size, some)
    assert [*zip(starts.tolist(), (ends - starts).tolist(), strict=True)] == [*blocks(size, some)]


@pytest.mark.parametrize(
    ("figures", "named"),
    [
        ({"inside": Link(-1.0, 1.0)}, "inside.latency=-1.0"),
        ({"between": Link(1.0, 0)}, "between.bandwidth=0"),
        ({"axes": (("x", Link(float("nan"), 1.0)),)}, "x.latency=nan"),
        ({"spill": 3, "launch": "a"}, "spill=3, .*launch='a'"),
        ({"per_host": 0, "flops": 0.0}, "per_host=0, flops=0.0"),
        ({"per_host": 2.5}, "per_host=2.5"),
        ({"axes": 3}, "axes=3"),
        ({"axes": {"x": Link(1.0, 1.0)}}, "axes={'x': .*}"),
        ({"axes": ("x", Link(1.0, 1.0))}, r"axes=\('x', .*\)"),
        ({"axes": [("x", Link(1.0, 1.0))], "launch": -1}, r"axes=\[\('x', .*\)\], launch=-1"),
        ({"axes": (("x", 3),)}, "x=3"),
    ],
)
def test_figures_that_are_none(figures: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=f"Topology got {named}; latency"):
        Topology(**figures)


def test_large_gathers_take_bytes_over_bandwidth_whatever_the_axis() -> None:
    """Austin et al., "How to Scale Your Model" (2025), "Sharded Matrices": the time of an all-gather of a large array
    depends on its bytes and the bandwidth alone, that of a reduce-scatter is the same, an all-reduce takes twice it.
    """
    for n in (16, 64, 256):
        gather = time("gather", n, WHOLE // n, WHOLE)
        assert gather == pytest.approx(WHOLE / 50e3, rel=1 / n + 1e-9)
        assert time("reduce_scatter", n, WHOLE, WHOLE // n) == pytest.approx(gather, rel=1e-12)
        assert time("reduce", n, WHOLE, WHOLE) == pytest.approx(2 * gather, rel=1e-12)


@pytest.mark.parametrize("n", [4, 8, 64])
def test_an_all_to_all_through_a_switch_takes_an_nth_of_a_gather(n: int) -> None:
    """The same book, "How to Think About GPUs": bytes (n - 1) / (n^2 bandwidth), since every pair has a way of its own.

    On a ring, where pieces pass through the ranks between, it takes a quarter of a gather; links here are switched.
    """
    gather, exchange = time("gather", n, WHOLE // n, WHOLE), time("exchange", n, WHOLE // n, WHOLE // n)
    assert exchange == pytest.approx(gather / n, rel=1e-12)
    assert exchange == pytest.approx(WHOLE * (n - 1) / n**2 / 50e3, rel=1e-12)


def test_small_collectives_take_their_latency() -> None:
    """n - 1 messages follow each other around a ring (Thakur et al., 2005, section 3.1)."""
    figures = Topology(Link(1.0, 450e3), launch=0.0)
    assert time("gather", 8, 16, 128, figures) == pytest.approx(7, rel=1e-3)
    assert time("reduce", 8, 16, 16, figures) == pytest.approx(14, rel=1e-3)


def test_a_gather_inside_a_host() -> None:
    """bf16[1024, 16384] over the eight GPUs of a host with NVLink 4: 7/8 of 33.6 MB at 450 GB/s."""
    figures = Topology(launch=0.0, memory=float("inf"), inside=Link(0.0, 450e3))
    found = way(P("x"), P(), line(8), (1024, 16384), figures)
    assert found.price.time == pytest.approx(2 * 1024 * 16384 * 7 / 8 / 450e3, rel=1e-12)
    assert found.price.time == pytest.approx(65.2, abs=0.1)


def test_over_two_hosts_most_bytes_stay_inside() -> None:
    """A gather over dp between hosts where tp is idle: each rank fetches a part, which the host then shares."""
    mesh = make_mesh((2, 8), ("dp", "tp"), transport="simulation")
    found = way(P("dp"), P(), mesh, (8192, 8192))
    between = [step.price.moved for step in found.steps if "dp" in step.call.axes]
    whole = 8192 * 8192 * 2
    assert sum(between) <= whole / 2 / 8
    plain = price("gather", mesh, ("dp",), whole // 2, whole)
    assert found.price.time < plain.time / 2


def test_what_does_not_fit_is_avoided() -> None:
    """Rows over x to rows over y of a square mesh without ever holding the whole."""
    mesh = make_mesh((2, 2), ("x", "y"), transport="simulation")
    whole = 4096 * 4096 * 2
    figures = Topology(capacity=whole)
    assert way(P("x"), P("y"), mesh, (4096, 4096), figures).price.peak <= whole
    full = price("gather", mesh, ("x",), whole // 2, whole, figures)
    assert full.time > price("gather", mesh, ("x",), whole // 2, whole).time


# --- problems of the scaling literature -----------------------------------------------------------------------------

#: TPU v5p, as Austin et al. reckon: operations in a µs, and bytes in a µs both ways along one axis of the torus
CHIP, AXIS = 4.59e8, 1.8e5
WIDTH, INNER = 8192, 28672  # D and F of LLaMA 3 70B


def torus(axes: int) -> Topology:
    return Topology(Link(0.0, axes * AXIS), Link(0.0, axes * AXIS), launch=0.0, memory=float("inf"))


def two_matmuls(tokens: float) -> float:
    """µs of a chip for tokens through [D, F] and [F, D]."""
    return 4 * tokens * WIDTH * INNER / CHIP


def gathered(n: int, elements: float, figures: Topology) -> float:
    return time("gather", n, int(2 * elements / n), int(2 * elements), figures)


@pytest.mark.parametrize("n", [2, 3, 8, 64, 512])
def test_bytes_on_the_wire_are_the_least_possible(n: int) -> None:
    """Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (2009): 2 (n - 1) / n of the bytes; or a half."""
    size = 512 * 9 * 1024
    for kernel, before, after, share in (
        ("reduce", size, size, 2 * (n - 1) / n),
        ("reduce_scatter", size, size // n, (n - 1) / n),
        ("gather", size // n, size, (n - 1) / n),
        ("exchange", size, size, (n - 1) / n),
    ):
        assert price(kernel, line(n), ("x",), before, after, LARGE).moved == pytest.approx(share * size, rel=1e-3)


@pytest.mark.parametrize(("axes", "critical"), [(1, 2550), (2, 1275), (3, 850)])
def test_sharded_weights_are_gathered_in_time_from_a_batch_on(axes: int, critical: int) -> None:
    """FSDP is bound by computing where a chip has more than C / W tokens: 2550, on three axes 850 (chapter 5)."""
    for n in (256, 4096):
        least = 2 * gathered(n, WIDTH * INNER, torus(axes)) / two_matmuls(1)
        assert least == pytest.approx(critical, rel=1 / n + 1e-3)
    assert 2 * gathered(8960, WIDTH * INNER, torus(3)) > two_matmuls(4e6 / 8960)  # LLaMA 3 70B: 446 tokens a chip


def test_data_parallel_gradients_take_as_long_as_sharded_weights() -> None:
    """Backward computes twice as much, and all-reduces what FSDP gathers and reduce-scatters: the same batch."""
    n, size = 1024, 2 * WIDTH * INNER
    reduced = 2 * time("reduce", n, size, size, torus(1))
    assert reduced / (2 * two_matmuls(1)) == pytest.approx(2550, rel=2e-3)


@pytest.mark.parametrize(("axes", "most"), [(1, 11), (2, 22)])
def test_tensor_parallel_layers_wait_from_some_width_on(axes: int, most: int) -> None:
    """Y < F W / C (chapter 5): a gather before the layer and a reduce-scatter after it, whatever the batch."""
    for tokens in (1 << 10, 1 << 18):
        waits = []
        for n in range(2, 64):
            size = 2 * tokens * WIDTH
            moved = gathered(n, tokens * WIDTH, torus(axes)) + time("reduce_scatter", n, size, size // n, torus(axes))
            waits.append(moved * n / (n - 1) > two_matmuls(tokens / n))
        assert waits.index(True) + 1 == most


@pytest.mark.parametrize(("tokens", "chips"), [(48_000, 64), (1 << 20, 1024), (1 << 22, 4096)])
def test_the_best_mix_of_both_is_the_root_of_batch_times_chips_over_width(tokens: int, chips: int) -> None:
    """X = sqrt(B N / F) ranks of FSDP beside N / X of tensor parallelism move the least (chapter 5)."""
    figures = torus(1)

    def moved(x: int) -> float:
        y = chips // x
        size = int(2 * tokens * WIDTH / x)
        weights = 2 * gathered(x, WIDTH * INNER / y, figures) if x > 1 else 0.0
        shared = gathered(y, tokens * WIDTH / x, figures) + time("reduce_scatter", y, size, size // y, figures)
        return weights + shared

    best = min((1 << i for i in range(chips.bit_length())), key=moved)
    assert best / 2 <= (tokens * chips / INNER) ** 0.5 <= best * 2


@pytest.mark.parametrize("tokens", [1 << 8, 1 << 12, 1 << 14, 1 << 18])
def test_weights_are_gathered_for_many_tokens_and_activations_for_few(tokens: int) -> None:
    """x[B, D@x] w[D@x, F]: B F partial products are added, or D F weights gathered once x is cut by rows."""
    mesh, figures = line(8), torus(1)
    added = way(P(unreduced={"x"}), P("x"), mesh, (tokens, INNER), figures).price.time
    turned = way(P(None, "x"), P("x"), mesh, (tokens, WIDTH), figures).price.time
    weights = turned + way(P("x"), P(), mesh, (WIDTH, INNER), figures).price.time
    assert (weights < added) == (tokens * (INNER - WIDTH / 8) > WIDTH * INNER)


def test_hosts_add_up_their_gradients_first() -> None:
    """8 hosts of 8: inside a reduce-scatter and a gather, between them an all-reduce of an eighth (chapter on GPUs)."""
    mesh = make_mesh((8, 8), ("dp", "tp"), transport="simulation")
    size = 2 * 8192 * 8192
    figures = Topology(Link(0.0, 450e3), Link(0.0, 50e3), launch=0.0, memory=float("inf"))
    found = way(P(unreduced={"dp", "tp"}), P(), mesh, (8192, 8192), figures)
    expected = 2 * size * 7 / 8 / 450e3 + 2 * (size / 8) * 7 / 8 / 50e3
    assert found.price.time == pytest.approx(expected, rel=1e-9)
