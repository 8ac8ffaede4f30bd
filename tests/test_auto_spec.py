"""`auto_spec` against brute force over all layouts, hand-written ones, and what runs with them communicate."""

from __future__ import annotations

import functools
import itertools
import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import optree
import pytest
import torch
from full import FULL
from torch.nn import functional as F

from fspmd import (
    ArgumentError,
    Link,
    Mesh,
    P,
    RecordError,
    SpecError,
    TensorSpec,
    Topology,
    auto_spec,
    checkpoint,
    communication_log,
    device_get,
    device_put,
    functional_call,
    grad,
    jit,
    make_mesh,
    psum,
    set_topology,
    shard_map,
    topology,
    value_and_grad,
    with_spec,
)
from fspmd.layout_search import solvers
from fspmd.layout_search.apply import _moved
from fspmd.layout_search.auto_spec import peak_of
from fspmd.layout_search.call_layouts import call_choices, layouts
from fspmd.layout_search.cost_model import CostModel, alike, renamed, ties
from fspmd.layout_search.op_graph import record
from fspmd.layout_search.search import Search
from fspmd.programs.memory import memory_of_program
from fspmd.redistribution.edges import back
from fspmd.redistribution.moves import moves
from fspmd.sharded import is_sharded

LINE = make_mesh((4,), ("x",))
GRID = make_mesh((2, 2), ("x", "y"))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def mlp(w: Any, x: Any) -> Any:
    return torch.relu(x @ w["up"]) @ w["down"]


def mlp_loss(w: Any, x: Any) -> Any:
    return mlp(w, x).sum()


@pytest.fixture
def slow() -> Iterator[None]:
    """Computing takes long, so that small tensors are worth a collective."""
    before = topology()
    set_topology(Topology(flops=10.0, launch=1.0))
    yield
    set_topology(before)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs hold what the model counts."""
    monkeypatch.setattr("fspmd.layout_search.auto_spec.peak_of", lambda f, args, layouts: layouts.memory)


def brute(f: Any, mesh: Mesh, *args: Any) -> list[tuple[float, int]]:
    """µs and bytes of the layouts of arguments and ways of ops that no others beat in both; each cast paid for once."""
    leaves, treedef = optree.tree_flatten(args)
    program = record(f, mesh, leaves, treedef)
    every = [call_choices(op, program.values) for op in program.ops]
    home, best = dict(program.gradients), list[tuple[float, int]]()
    pairs = zip(program.ops, every, strict=True)
    rows = [row for op, own in pairs for row in zip(op.operands, own[0].needs, strict=True)]
    first = [*program.leaves, *home]  # leaves and gradients, then what is kept or returned
    passed_on = {*program.outputs, *(n for n, need in rows if need.saved)} - {*first}

    def held(spec: TensorSpec) -> int:
        return prod(spec.local_shape((0,) * len(mesh.shape))) * spec.dtype.itemsize

    def from_op(i: int, lies: dict[int, TensorSpec], cast: frozenset[Any], time: float, copies: int) -> None:
        if any(time >= known and copies >= memory for known, memory in best):
            return
        if i == len(every):
            last = [lies[home.get(n, n)] for n in program.outputs]
            time += sum(moves(spec, spec.with_partition(P(*spec.partition)), (), topology()).forward for spec in last)
            if not any(time >= known and copies >= memory for known, memory in best):
                best.append((time, copies))
            return
        for way in every[i]:
            total, known, more = time + way.time, cast, copies
            for n, need in zip(program.ops[i].operands, way.needs, strict=True):
                asked = lies[n], need.spec, need.casts, topology()
                taken = moves(*asked, need.followed)
                total += taken.forward + taken.backward
                stays = lies[n] is need.spec
                total += 0.0 if stays and (n, need.casts) in known else taken.casting
                known |= {(n, need.casts)} if stays else frozenset()
                more += held(need.spec) if need.saved and not stays else 0
            more += sum(
                held(spec) for n, spec in zip(program.ops[i].results, way.results, strict=True) if n in passed_on
            )
            from_op(i + 1, lies | dict(zip(program.ops[i].results, way.results, strict=True)), known, total, more)

    for start in itertools.product(*(layouts(program.values[n]) for n in program.leaves)):
        lies = dict(zip(program.leaves, start, strict=True))
        from_op(0, lies, frozenset(), 0.0, sum(held(lies[home.get(n, n)]) for n in first))
    return best


def _square(x: Any) -> Any:
    return (x @ x).sum()


def _shared(w: Any, x: Any) -> Any:
    return ((x @ w["a"]) * (x @ w["b"])).sum()


PROGRAMS: list[tuple[Any, tuple[Any, ...]]] = [
    (mlp, ({"up": meta(8, 16), "down": meta(16, 8)}, meta(4, 8))),
    (value_and_grad(mlp_loss), ({"up": meta(4, 16), "down": meta(16, 4)}, meta(8, 4))),
    (value_and_grad(mlp_loss), ({"up": meta(2, 2), "down": meta(2, 2)}, meta(64, 2))),
    (value_and_grad(_square), (meta(8, 8),)),
    (value_and_grad(_shared, argnums=(0, 1)), ({"a": meta(4, 8), "b": meta(4, 8)}, meta(1, 4))),
]


@pytest.mark.one_of(3)
@pytest.mark.parametrize(("f", "args"), PROGRAMS)
@pytest.mark.usefixtures("slow", "counted")
def test_no_combination_of_ways_is_cheaper(f: Any, args: tuple[Any, ...]) -> None:
    mesh = make_mesh((2,), ("x",))
    every = brute(f, mesh, *args)
    found = auto_spec(f, mesh, *args)
    assert found.time == pytest.approx(min(time for time, _ in every), rel=1e-9)
    least = min(memory for _, memory in every)
    for limit in {found.memory - 1, (found.memory + least) // 2, least}:
        quickest = min((time for time, memory in every if memory <= limit), default=None)
        if quickest is not None:
            small = auto_spec(f, mesh, *args, memory_limit=limit)
            assert small.memory <= limit
            assert small.time == pytest.approx(quickest, rel=1e-9)
            assert small.bound == small.time
            by_integers = auto_spec(f, mesh, *args, memory_limit=limit, alternatives=0, solver="milp")
            assert by_integers.memory <= limit
            assert by_integers.time == pytest.approx(quickest, rel=1e-6)
    with pytest.raises(ArgumentError, match=f"the least that was found is {least:,}"):
        auto_spec(f, mesh, *args, memory_limit=least - 1)


@pytest.mark.usefixtures("slow")
def test_both_solvers_find_a_plan_of_the_same_time() -> None:
    f, args = WHOLE[-1]
    found = [auto_spec(f, LINE, *args, alternatives=0, solver=solver) for solver in ("elimination", "milp")]
    assert found[1].time == pytest.approx(found[0].time, rel=1e-6)


@pytest.mark.one_of(3)
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(("f", "args"), PROGRAMS)
def test_what_is_left_out_on_the_way_is_no_better(f: Any, args: tuple[Any, ...]) -> None:
    """Every move priced, every choice looked at."""
    mesh = make_mesh((2, 3), ("x", "y"))
    leaves, treedef = optree.tree_flatten(args)
    whole = CostModel(record(f, mesh, leaves, treedef), topology(), {})
    values, most = {value for value, _ in whole.pairs}, max(map(len, whole.choices))
    for i, k in itertools.product(range(most), repeat=2):
        whole.price([(i if v in values else k) % len(own) for v, own in enumerate(whole.choices)])
    every = [torch.arange(len(own)) for own in whole.choices]
    least = solvers.eliminate(whole, solvers.order(whole), 0.0, every).cost
    assert auto_spec(f, mesh, *args).time == pytest.approx(least, rel=1e-9)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(("f", "args"), PROGRAMS)
def test_what_a_choice_costs_at_least_is_what_is_found_with_it_alone(f: Any, args: tuple[Any, ...]) -> None:
    leaves, treedef = optree.tree_flatten(args)
    model = CostModel(record(f, LINE, leaves, treedef), topology(), {})
    sequence, every = solvers.order(model), [torch.arange(len(own)) for own in model.choices]
    solved = solvers.eliminate(model, sequence, 0.0, every)
    for share in (1.0, 1.1, 1.5, 4.0):
        most = share * solved.cost
        for some, marginals in zip(solved.within(most), solved.marginals(), strict=True):
            assert some.tolist() == (marginals <= most * (1 + 1e-11)).nonzero().flatten().tolist()
    for v, marginals in enumerate(solved.marginals()):
        for i, least in enumerate(marginals.tolist()):
            kept = [*every[:v], torch.tensor([i]), *every[v + 1 :]]
            assert least == pytest.approx(solvers.eliminate(model, sequence, 0.0, kept).cost, rel=1e-9)


def test_axes_that_are_alike_stand_for_each_other() -> None:
    mesh = make_mesh((8, 2, 2, 3), ("x", "y", "z", "w"), transport="abstract")
    names = dict(zip("xyzw", "xzyw", strict=True))
    assert names not in alike(mesh, Topology(per_host=4))  # a host has ranks along z, and none along y
    assert names in alike(mesh, Topology(per_host=1))
    spec = TensorSpec(mesh, P(("x", "y"), unreduced={"z"}), (64, 4), torch.float32)
    assert renamed(spec, names).partition == P(("x", "z"), None, unreduced={"y"})


def test_a_graph_that_is_too_wide_needs_the_other_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    f, args = PROGRAMS[0]
    expected = auto_spec(f, LINE, *args).time
    monkeypatch.setattr(solvers, "WIDEST", 1)
    assert auto_spec(f, LINE, *args).time == pytest.approx(expected)
    with pytest.raises(ArgumentError, match="got solver='elimination', but the graph"):
        auto_spec(f, LINE, *args, solver="elimination")
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ArgumentError, match=r"pip install fspmd\[auto\]"):
        auto_spec(f, LINE, *args)


@pytest.mark.usefixtures("slow", "counted")
def test_without_scipy_only_a_limit_that_matters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    f, args = PROGRAMS[0]
    monkeypatch.setitem(sys.modules, "scipy", None)
    found = auto_spec(f, LINE, *args)
    assert len(found.alternatives) == 3
    assert auto_spec(f, LINE, *args, memory_limit=found.memory, alternatives=0).time == found.time
    with pytest.raises(ArgumentError, match=r"needs SciPy for a memory_limit.* pip install fspmd\[auto\]"):
        auto_spec(f, LINE, *args, memory_limit=found.memory - 1)


#: with the entry of a dim that all axes cut
MESHES = [(LINE, "x"), (GRID, ("x", "y"))]


@pytest.mark.parametrize(("mesh", "cut"), MESHES)
def test_an_mlp_is_split_as_megatron_splits_it(mesh: Mesh, cut: Any) -> None:
    w = {"up": meta(4096, 16384), "down": meta(16384, 4096)}
    found = auto_spec(value_and_grad(mlp_loss), mesh, w, meta(64, 4096))
    assert found.specs[0] == {"up": P(None, cut), "down": P(cut, None)}
    by_hand = {"w.up": P(None, cut), "w.down": P(cut), "x": P()}
    assert auto_spec(value_and_grad(mlp_loss), mesh, w, meta(64, 4096), fixed=by_hand).time == found.time
    whole = auto_spec(value_and_grad(mlp_loss), mesh, w, meta(64, 4096), fixed={"w.*": P()})
    assert whole.time > 2 * found.time


@pytest.mark.parametrize(("mesh", "cut"), MESHES)
def test_small_weights_stay_whole_where_the_batch_is_large(mesh: Mesh, cut: Any) -> None:
    w = {"up": meta(64, 64), "down": meta(64, 16)}
    found = auto_spec(value_and_grad(mlp_loss), mesh, w, meta(1 << 20, 64), fixed={"x": P(cut)})
    assert found.specs[0] == {"up": P(None, None), "down": P(None, None)}
    free = auto_spec(value_and_grad(mlp_loss), mesh, w, meta(1 << 20, 64))
    assert (free.time, free.specs) == (found.time, found.specs)  # of equals that which holds less


@pytest.mark.parametrize(("mesh", "cut"), MESHES)
def test_a_large_vocabulary_is_split(mesh: Mesh, cut: Any) -> None:
    def loss(w: Any, x: Any, target: Any) -> Any:
        return F.cross_entropy(x @ w, target)

    args = (meta(1024, 128_000), meta(512, 1024), meta(512, dtype=torch.long))
    found = auto_spec(value_and_grad(loss), mesh, *args)
    assert found.specs == (P(None, cut), P(None, None), P(None))
    assert not any(str(step) for step in found.steps if step.name == "_log_softmax()")  # its body sums over ranks


def _block(p: Any, x: Any) -> Any:
    b, t, d = x.shape
    h = F.rms_norm(x, (d,), p["norm"])
    q, k, v = ((h @ p[name]).view(b, t, 8, d // 8).transpose(1, 2) for name in ("q", "k", "v"))
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + a.transpose(1, 2).reshape(b, t, d) @ p["o"]
    return x + F.gelu(F.rms_norm(x, (d,), p["norm"]) @ p["up"]) @ p["down"]


def _weights(d: int) -> dict[str, torch.Tensor]:
    square = {name: meta(d, d) for name in "qkvo"}
    return {"norm": meta(d), **square, "up": meta(d, 4 * d), "down": meta(4 * d, d)}


def _block_loss(p: Any, x: Any) -> Any:
    return _block(p, x).sum()


@pytest.mark.parametrize(("mesh", "cut"), MESHES)
def test_a_transformer_block_is_no_dearer_than_megatrons(mesh: Mesh, cut: Any) -> None:
    args = (_weights(2048), meta(2, 512, 2048))
    f = value_and_grad(_block_loss, argnums=(0, 1))
    found = auto_spec(f, mesh, *args)
    columns = {f"p.{name}": P(None, cut) for name in ("q", "k", "v", "up")}
    hand = auto_spec(f, mesh, *args, fixed={**columns, "p.o": P(cut), "p.down": P(cut), "p.norm": P(), "x": P()})
    assert found.time <= hand.time
    assert all(found.specs[0][name] == P(None, cut) for name in ("q", "k", "v", "up"))
    assert all(found.specs[0][name] == P(cut, None) for name in ("o", "down"))


LM = {"emb": meta(48, 32), "head": meta(32, 48), "layer": _weights(32)}


def _lm_loss(p: Any, ids: Any, target: Any) -> Any:
    x = _block(p["layer"], F.embedding(ids, p["emb"]))
    return F.cross_entropy((x @ p["head"]).flatten(0, 1), target.flatten())


PLACES = meta(4, 8, dtype=torch.long)
WHOLE: list[tuple[Any, tuple[Any, ...]]] = [*PROGRAMS, (value_and_grad(_lm_loss), (LM, PLACES, PLACES))]


def _filled(x: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, 48, x.shape) if x.dtype == torch.long else torch.randn(x.shape, dtype=torch.float64)


@pytest.mark.one_of(4)
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("mesh", [LINE, GRID])
@pytest.mark.parametrize(("f", "args"), WHOLE)
def test_what_was_found_runs_and_communicates_what_was_predicted(f: Any, args: tuple[Any, ...], mesh: Mesh) -> None:
    torch.manual_seed(0)
    values: Any = optree.tree_map(_filled, args)
    found = auto_spec(f, mesh, *values, alternatives=0)
    expected = optree.tree_leaves(f(*values))
    placed = device_put(values, found.specs, mesh=mesh)
    with communication_log() as log:
        applied = found.apply(f)(*placed)
    for out in (f(*placed), applied, jit(found.apply(f))(*placed)):
        for got, want in zip(optree.tree_leaves(out, is_leaf=is_sharded), expected, strict=True):
            torch.testing.assert_close(device_get(got), want)
    assert sum(one.price.time for one in log) == pytest.approx(found.communication)


@pytest.mark.usefixtures("slow")
def test_what_is_predicted_to_be_quicker_sends_less() -> None:
    f, args = PROGRAMS[1]
    values: Any = optree.tree_map(lambda x: torch.randn(x.shape), args)

    def sent(fixed: dict[str, P]) -> tuple[float, float]:
        found = auto_spec(f, LINE, *args, fixed=fixed)
        with communication_log() as log:
            f(*device_put(values, found.specs, mesh=LINE))
        return found.time, sum(one.price.moved for one in log)

    hand = sent({"w.up": P(None, "x"), "w.down": P("x"), "x": P()})
    gathered = sent({"w.up": P("x"), "w.down": P("x"), "x": P(None, "x")})
    assert hand[0] < gathered[0]
    assert hand[1] < gathered[1]


def _step(w: Any, m: Any, x: Any) -> Any:
    """Of a descent with momentum."""
    loss, grads = value_and_grad(mlp_loss)(w, x)
    m = {name: 0.9 * m[name] + grads[name] for name in w}
    return loss, {name: w[name] - 0.1 * m[name] for name in w}, m


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("shapes", [((64, 8), (8, 64), (256, 64)), ((8, 64), (64, 8), (4, 8))])
def test_what_is_carried_to_the_next_step_lies_as_it_did(shapes: Any) -> None:
    up, down, x = shapes
    w, m = ({"up": meta(*up), "down": meta(*down)} for _ in range(2))
    values: Any = optree.tree_map(_filled, (w, m, meta(*x)))
    found = auto_spec(_step, LINE, *values, carried={"1": "w", "2": "m"}, fixed={"x": P("x")}, alternatives=0)
    placed = device_put(values, found.specs, mesh=LINE)
    with communication_log() as log:
        _, *out = found.apply(_step)(*placed)
    assert sum(one.price.time for one in log) == pytest.approx(found.communication)
    expected = _step(*values)[1:]
    assert optree.tree_map(lambda y: y.spec.partition, tuple(out), is_leaf=is_sharded) == found.specs[:2]
    for got, want in zip(optree.tree_leaves(out, is_leaf=is_sharded), optree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(device_get(got), want)


def test_optimizer_states_are_sharded_where_weights_are_not_split() -> None:
    w, m = ({"up": meta(1024, 4096), "down": meta(4096, 1024)} for _ in range(2))
    found = auto_spec(_step, LINE, w, m, meta(1 << 16, 1024), carried={"1": "w", "2": "m"}, fixed={"x": P("x")})
    assert all(spec.axes for spec in optree.tree_leaves(found.specs[1]))
    whole = auto_spec(_step, LINE, w, m, meta(1 << 16, 1024), carried={"1": "w", "2": "m"}, fixed={"[wm].*": P()})
    assert found.time < whole.time
    assert found.memory < whole.memory


@pytest.mark.usefixtures("slow", "counted")
def test_what_would_not_fit_is_sharded() -> None:
    f, args = WHOLE[-1] if FULL else (value_and_grad(_block_loss), (_weights(16), meta(4, 8, 16)))
    fixed = {"ids": P("x"), "target": P("x")} if FULL else {"x": P("x")}
    free = auto_spec(f, LINE, *args, fixed=fixed, alternatives=0)
    limit = round(0.9 * free.memory)
    small = auto_spec(f, LINE, *args, fixed=fixed, memory_limit=limit, alternatives=0)
    assert small.memory <= limit
    assert free.time <= small.bound <= small.time
    assert ("above the optimum" in str(small)) == (small.bound < small.time * (1 - 1e-9))
    assert "at most 25% above the optimum" in str(replace(small, bound=small.time / 1.25))
    by_integers = auto_spec(f, LINE, *args, fixed=fixed, memory_limit=limit, alternatives=0, solver="milp")
    assert small.bound * (1 - 1e-6) <= by_integers.time <= small.time * (1 + 1e-6)


def _repeated(w: Any, x: Any) -> Any:
    for one in w:
        x = checkpoint(lambda one, x: torch.tanh(torch.relu(x @ one) @ one))(one, x)
    return x.sum()


def _held(f: Any, args: tuple[Any, ...], found: Any) -> int:
    laid = iter([spec for _, spec in found.leaves])
    lowered = jit(found.apply(f)).lower(*optree.tree_map(lambda _: next(laid), args))
    peak = memory_of_program(lowered.program, scratch=False).peak  # as ranks decide alike
    return peak


def _rounds(w: Any, x: Any) -> Any:
    for one in w:
        x = torch.tanh(x @ one)
    return x.sum()


@pytest.mark.one_of(2)
@pytest.mark.parametrize("sizes", [(4,), (2, 3)] if FULL else [(2, 3)])
@pytest.mark.parametrize(
    ("f", "args"),
    [
        (value_and_grad(mlp_loss), ({"up": meta(64, 256), "down": meta(256, 64)}, meta(32, 64))),
        (value_and_grad(_rounds), ([meta(128, 128)] * 3, meta(64, 128))),
    ],
)
def test_runners_up_under_a_limit(f: Any, args: tuple[Any, ...], sizes: tuple[int, ...]) -> None:
    """No later than those of plans without one that hold no more, each lowered by itself."""
    mesh = make_mesh(sizes, ("x", "y")[: len(sizes)], transport="abstract")
    free = auto_spec(f, mesh, *args, alternatives=16)
    plans = [(_held(f, args, one), one.time) for one in (free, *free.alternatives)]
    for limit in sorted({held for held, _ in plans})[:: 3 if FULL else 6]:
        fit = [time for held, time in plans if held <= limit]
        found = auto_spec(f, mesh, *args, memory_limit=limit)
        every = [found, *found.alternatives]
        assert [one.time for one in every] == sorted(one.time for one in every)
        assert len(every) >= min(4, len(fit))
        assert all(one.time <= time * (1 + 1e-9) for one, time in zip(every, fit, strict=False))
        assert all(_held(f, args, one) == one.peak for one in every)
        assert max(one.peak or 0 for one in every) <= limit


@pytest.mark.one_of(4)
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("sizes", [(4,), (2, 3)] if FULL else [(4,)])
@pytest.mark.parametrize(
    ("f", "args"),
    [
        (value_and_grad(mlp_loss), ({"up": meta(30, 64), "down": meta(64, 30)}, meta(50, 30))),
        (value_and_grad(_repeated), ([meta(7, 7), meta(7, 7)], meta(6, 7))),
        (value_and_grad(_repeated), ([meta(64, 64)] * 3, meta(96, 64))),
        (mlp, ({"up": meta(30, 7), "down": meta(7, 30)}, meta(5, 30))),
    ],
)
def test_programs_hold_what_they_may(f: Any, args: tuple[Any, ...], sizes: tuple[int, ...]) -> None:
    """By what is held in the recorded program, of which the model is an estimate."""
    mesh = make_mesh(sizes, ("x", "y")[: len(sizes)], transport="abstract")

    held = functools.partial(_held, f, args)
    free = auto_spec(f, mesh, *args, alternatives=0)
    most, fitted = held(free), 0
    for share in (1.0, 0.85, 0.6) if FULL else (1.0, 0.7):
        limit = int(share * most)
        try:
            found = auto_spec(f, mesh, *args, memory_limit=limit, alternatives=1)
        except ArgumentError as error:
            least = int(str(error).partition("found is ")[2].partition(":")[0].replace(",", ""))
            assert least > limit
            continue
        fitted += 1
        for one in (found, *found.alternatives):
            assert held(one) == one.peak <= limit
            assert one.time >= free.time * (1 - 1e-9)
        assert (found.time > free.time * (1 + 1e-9)) <= (share < 1)
    assert fitted


def test_a_program_that_holds_nothing_fits() -> None:
    assert auto_spec(lambda x: x.t(), LINE, meta(0, 4), memory_limit=1).peak == 0


@pytest.mark.usefixtures("slow")
def test_what_holds_more_by_the_model_may_fit() -> None:
    """Beside a plan of brute force that fits: the arguments cut over all axes."""
    f, args = value_and_grad(_shared, argnums=(0, 1)), ({"a": meta(4, 8), "b": meta(4, 8)}, meta(2, 4))
    fixed = {"w.a": P("y", "x"), "w.b": P("x", "y"), "x": P(None, "y")}
    known = auto_spec(f, GRID, *args, fixed=fixed, memory_limit=234, alternatives=0)
    found = auto_spec(f, GRID, *args, memory_limit=234, alternatives=0)
    assert found.peak is not None
    assert found.peak <= 234
    assert found.bound <= known.time


@pytest.mark.usefixtures("slow")
def test_dims_that_are_flattened_and_then_gathered() -> None:
    def loss(w: Any, x: Any, y: Any) -> Any:
        return F.cross_entropy((x @ w).flatten(0, 1), y.flatten())

    torch.manual_seed(0)
    values: Any = optree.tree_map(_filled, (meta(6, 48), meta(3, 4, 6), meta(3, 4, dtype=torch.long)))
    f = value_and_grad(loss, argnums=(0, 1))
    pairs = [*itertools.product([P(), P("x"), P(None, "x"), P(None, "y", "x"), P("x", "y")], repeat=2)]
    for x, y in pairs[:: 1 if FULL else 5]:
        fixed = {"x": x, "y": P(*y[:2])}
        found = auto_spec(f, GRID, *values, fixed=fixed, alternatives=0)
        out = found.apply(f)(*device_put(values, found.specs, mesh=GRID))
        for got, want in zip(optree.tree_leaves(out, is_leaf=is_sharded), optree.tree_leaves(f(*values)), strict=True):
            torch.testing.assert_close(device_get(got), want)


@pytest.mark.usefixtures("slow")
def test_layers_that_repeat_lie_as_is_given() -> None:
    """Whatever the others do, though a layer uses its weight twice."""
    f, args = value_and_grad(_repeated), ([meta(64, 64)] * 3, meta(96, 64))
    for choice in [*itertools.product([P(), P("x"), None], repeat=3)][:: 1 if FULL else 4]:
        fixed = {f"w.{i}": spec for i, spec in enumerate(choice) if spec is not None}
        found = auto_spec(f, LINE, *args, fixed=fixed, alternatives=0)
        assert all(
            dict(found.leaves)[name].partition == P(*spec, *[None] * (2 - len(spec))) for name, spec in fixed.items()
        )
        assert found.bound <= found.time


def test_the_function_may_say_how_a_value_lies() -> None:
    def f(w: Any, x: Any) -> Any:
        return with_spec(torch.relu(x @ w), P("x")).sum()

    found = auto_spec(f, LINE, meta(256, 256), meta(1 << 16, 256))
    assert found.specs == (P(None, None), P("x", None))


@pytest.mark.usefixtures("slow")
def test_a_value_that_is_said_to_be_whole_is_whole() -> None:
    def f(w: Any, x: Any) -> Any:
        return with_spec(torch.relu(x @ w), P()).sum()

    values: Any = optree.tree_map(_filled, (meta(8, 8), meta(256, 8)))
    found = auto_spec(value_and_grad(f), LINE, *values)
    with communication_log() as log:
        found.apply(value_and_grad(f))(*device_put(values, found.specs, mesh=LINE))
    assert sum(one.price.time for one in log) == pytest.approx(found.communication)
    assert any(one.kind != "psum_unreduced" for one in log)  # it was sharded before, and is gathered


@pytest.mark.usefixtures("slow")
def test_ops_of_many_kinds_run_as_was_found() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)).double()
    weights = {name: x.detach() for name, x in module.named_parameters()}

    def f(p: Any, w: Any, x: Any) -> Any:
        h = F.conv1d(x, w, padding=1)
        parts = torch.cat([h, 2 * h], 1).split(4, 1)
        y = functional_call(module, p, sum(part.sin() for part in parts))
        return torch.einsum("btd,bsd->bts", y, y).softmax(-1)[:, 1:].var(0).sum() + sum(part.mean() for part in parts)

    torch.manual_seed(0)
    args: Any = (weights, torch.randn(6, 4, 3, dtype=torch.float64), torch.randn(16, 4, 8, dtype=torch.float64))
    found = auto_spec(value_and_grad(f), LINE, *args)
    placed = device_put(args, found.specs, mesh=LINE)
    with communication_log() as log:
        out = found.apply(value_and_grad(f))(*placed)
    expected = optree.tree_leaves(value_and_grad(f)(*args))
    for got, want in zip(optree.tree_leaves(out, is_leaf=is_sharded), expected, strict=True):
        torch.testing.assert_close(device_get(got), want)
    assert sum(one.price.time for one in log) == pytest.approx(found.communication, rel=0.01)


@pytest.mark.usefixtures("slow")
def test_blocks_that_are_cut_anew_take_what_was_predicted() -> None:
    """An all-to-all, there and back, of unequal lengths: all ranks send to all."""

    def loss(x: Any) -> Any:
        return (with_spec(x.sin().unflatten(1, (3, -1)), P(None, None, "x")) ** 2).sum()

    x = torch.randn(64, 3072, dtype=torch.float64)
    found = auto_spec(value_and_grad(loss), LINE, x, fixed={"x": P(None, "x")}, alternatives=0)
    with communication_log() as log:
        found.apply(value_and_grad(loss))(device_put(x, found.specs[0], mesh=LINE))
    assert [one.backward for one in log if one.kind == "ragged_all_to_all"] == [False, True]
    assert sum(one.price.time for one in log) == pytest.approx(found.communication, rel=0.1)


@pytest.mark.parametrize("length", [512, 4096])
def test_attention_along_a_sharded_sequence_takes_what_was_predicted(length: int) -> None:
    """As long as the program that `lower` shows is: the ring waits for blocks that products do not hide."""
    shape, fixed = (1, 2, length, 64), {name: P(None, None, "x") for name in ("query", "key", "value")}

    def attend(query: Any, key: Any, value: Any) -> Any:
        return F.scaled_dot_product_attention(query, key, value)

    found = auto_spec(attend, LINE, *[meta(*shape)] * 3, fixed=fixed, alternatives=0)
    specs = [TensorSpec(LINE, spec, shape, torch.float32) for spec in found.specs]
    assert jit(found.apply(attend)).lower(*specs).cost().time == pytest.approx(found.time, rel=0.01)


@pytest.mark.usefixtures("slow")
def test_no_plan_but_those_that_are_told_is_quicker_than_a_runner_up() -> None:
    """Against the quickest plan of each layout of the arguments."""
    mesh = make_mesh((2,), ("x",))
    for f, (w, x) in PROGRAMS[0 if FULL else 1 : 2]:
        shapes = {"w.up": w["up"], "w.down": w["down"], "x": x}
        found = auto_spec(f, mesh, w, x, alternatives=5)
        every = []
        for choice in itertools.product(*([P(None, None), P("x", None), P(None, "x")] for _ in shapes)):
            fixed = dict(zip(shapes, choice, strict=True))
            one = auto_spec(f, mesh, w, x, fixed=fixed, alternatives=0)
            every.append(one.time)
        told = [one.time for one in (found, *found.alternatives)]
        assert told == pytest.approx(sorted(every)[:6])
        assert len({str(one.specs) for one in (found, *found.alternatives)}) == 6


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("mesh", [LINE, GRID])
def test_what_checkpoint_computes_again_lies_as_it_did(mesh: Mesh) -> None:
    torch.manual_seed(0)
    f, values = value_and_grad(_repeated), optree.tree_map(_filled, ([meta(7, 7), meta(7, 7)], meta(6, 7)))
    found = auto_spec(f, mesh, *values, alternatives=0)
    placed = device_put(values, found.specs, mesh=mesh)
    for out in (found.apply(f)(*placed), jit(found.apply(f))(*placed)):
        for got, want in zip(optree.tree_leaves(out, is_leaf=is_sharded), optree.tree_leaves(f(*values)), strict=True):
            torch.testing.assert_close(device_get(got), want)


def test_moves_that_gradients_follow_are_quick_there_and_back() -> None:
    """What is quickest forward may not be; the log tells what both take."""
    mesh, before = make_mesh((2, 2, 2), ("x", "y", "z")), topology()
    figures = Topology(axes=(("x", Link(30.0, 12.5e3)),))
    every = layouts(TensorSpec(mesh, P(), (64, 64), torch.float64))
    pairs = [(a, b) for a in every for b in every if a is not b]
    ways = {(a, b): [moves(a, b, (), figures, followed) for followed in (False, True)] for a, b in pairs}
    pairs = [pair for pair, (searched, way) in ways.items() if way.calls != searched.calls]
    assert pairs
    whole = torch.randn(64, 64, dtype=torch.float64)
    set_topology(figures)
    try:
        for i, (source, need) in enumerate(pairs[:: len(pairs) // 6]):
            x = device_put(whole, source.partition, mesh=mesh).requires_grad_()
            with communication_log() as log:
                moved = _moved(x, need, ()) if i % 2 else with_spec(x, need.partition)
                (moved * moved).sum().backward()
            assert x.grad is not None
            torch.testing.assert_close(device_get(x.grad), 2 * whole)
            taken = sum(one.price.time for one in log)
            searched, way = ways[source, need]
            assert taken == pytest.approx(way.time)
            steps, before_each = searched.route.steps, [source, *(step.spec for step in searched.route.steps)]
            backward = [back(step, spec, figures).time for step, spec in zip(steps, before_each, strict=False)]
            assert taken < searched.forward + sum(backward)
    finally:
        set_topology(before)


def _softmax_loss(w: Any, x: Any) -> Any:
    return (torch.softmax(x @ w, -1) ** 2).sum()


#: a program, its mesh, and a layout that holds less while ops run, though arguments take more bytes
LESS: list[Any] = [
    (*PROGRAMS[1], (4, 2), {"w.up": P(None, "x"), "w.down": P("x"), "x": P("y")}),
    (*PROGRAMS[4], (2, 2), {"w.a": P("x", "y"), "w.b": P("x", "y"), "x": P(None, "x")}),
    (value_and_grad(_softmax_loss), (meta(6, 9), meta(12, 6)), (2, 2), {"w": P("y"), "x": P("x", "y")}),
]


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(("f", "args", "sizes", "fixed"), LESS)
def test_a_layout_that_fits_is_no_quicker_than_what_is_found(f: Any, args: Any, sizes: Any, fixed: Any) -> None:
    """By the bytes that programs hold, of which the model knows a part."""
    mesh = make_mesh(sizes, ("x", "y"))
    hand = auto_spec(f, mesh, *args, fixed=fixed, alternatives=0)
    held, free = peak_of(f, args, hand), auto_spec(f, mesh, *args, alternatives=0)
    assert held is not None
    assert held < (peak_of(f, args, free) or 0)
    found = auto_spec(f, mesh, *args, memory_limit=held, alternatives=0)
    assert found.time <= hand.time * (1 + 1e-9)
    assert found.peak is not None
    assert found.peak <= held


def _of_kinds(kinds: tuple[str, ...]) -> Any:
    """A scalar function of a matrix and a batch, of ops without collectives within."""

    def loss(w: Any, x: Any) -> Any:
        rows: dict[str, Any] = {
            "mm": lambda h: h @ w,
            "sin": torch.sin,
            "relu": torch.relu,
            "mul": lambda h: h * (h @ w),
            "add": lambda h: h + h.sum(0),
            "tanh": lambda h: torch.tanh(F.linear(h, w)),
            "said": lambda h: with_spec(h @ w, P("x")),
        }
        for kind in kinds:
            x = rows[kind](x)
        return (x * x).sum().sqrt()

    return loss


def _penalty(loss: Any) -> Any:
    def of_gradients(w: Any, x: Any) -> Any:
        out, own = value_and_grad(loss, argnums=(0, 1))(w, x)
        return out + sum((g * g).sum() for g in own)

    return of_gradients


def _after_a_step(loss: Any) -> Any:
    return lambda w, x: loss(w - 0.1 * grad(loss)(w, x), x)


NESTED: list[Any] = [
    lambda loss: grad(_penalty(loss)),
    lambda loss: value_and_grad(_after_a_step(loss)),
    lambda loss: grad(lambda w, x: (grad(loss)(w, x) * torch.ones_like(w)).sum()),
    lambda loss: grad(_penalty(_penalty(loss))),
    lambda loss: value_and_grad(lambda w, x: (grad(loss, argnums=1)(w, x).square().sum(1) - 1).square().sum(), 1),
]


@pytest.mark.one_of(6)
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("mesh", [LINE, GRID, make_mesh((3, 2), ("x", "y"))])
@pytest.mark.parametrize("nested", range(len(NESTED)))
def test_gradients_of_gradients_communicate_what_was_predicted(nested: int, mesh: Mesh) -> None:
    generator = random.Random(nested)
    for shapes in (((4, 4), (8, 4)), ((5, 5), (7, 5))):
        kinds = tuple(generator.choices(["mm", "sin", "relu", "mul", "add", "tanh", "said"], k=3))
        torch.manual_seed(0)
        f, values = NESTED[nested](_of_kinds(kinds)), tuple(torch.randn(n, dtype=torch.float64) for n in shapes)
        found = auto_spec(f, mesh, *values, alternatives=0)
        with communication_log() as log:
            out = found.apply(f)(*device_put(values, found.specs, mesh=mesh))
        for got, want in zip(optree.tree_leaves(out, is_leaf=is_sharded), optree.tree_leaves(f(*values)), strict=True):
            torch.testing.assert_close(device_get(got), want)
        assert sum(one.price.time for one in log) == pytest.approx(found.communication), kinds


def test_gradients_of_gradients_through_what_writes_are_refused() -> None:
    def loss(w: Any, x: Any) -> Any:
        return ((x @ w).add_(1) ** 2).sum()

    args = (meta(8, 8), meta(4, 8))
    assert auto_spec(grad(loss), LINE, *args).time > 0
    with pytest.raises(RecordError, match=r"gradients of gradients through add_\(\), which writes into its operand"):
        auto_spec(grad(_penalty(loss)), LINE, *args)


@pytest.mark.usefixtures("slow")
def test_gradients_of_gradients_of_a_checkpoint_lie_as_was_found() -> None:
    torch.manual_seed(0)
    values = (torch.randn(6, 6, dtype=torch.float64), torch.randn(7, 6, dtype=torch.float64))
    f = grad(_penalty(checkpoint(_of_kinds(("tanh", "mul")))))
    plain = auto_spec(grad(_penalty(_of_kinds(("tanh", "mul")))), LINE, *values, alternatives=0)
    found = auto_spec(f, LINE, *values, alternatives=0)
    assert found.time == pytest.approx(plain.time)
    got = found.apply(f)(*device_put(values, found.specs, mesh=LINE))
    torch.testing.assert_close(device_get(got), f(*values))


def test_specs_stand_in_for_tensors() -> None:
    spec = TensorSpec(LINE, P(), (4096, 4096), torch.float32)
    assert auto_spec(torch.mm, LINE, spec, spec).time > 0


def test_tensors_without_elements_are_whole() -> None:
    def f(x: Any, w: Any) -> Any:
        return (x @ w).relu()

    found = auto_spec(f, GRID, meta(0, 8), meta(8, 4))
    placed = device_put((torch.ones(0, 8), torch.ones(8, 4)), found.specs, mesh=GRID)
    assert found.specs[0].entries[0] is None
    assert device_get(found.apply(f)(*placed)).shape == (0, 4)


@pytest.mark.parametrize("solver", ["elimination", "milp"])
def test_a_program_without_tensors_has_one_plan(solver: str) -> None:
    found = auto_spec(lambda: None, LINE, solver=solver)
    assert (found.time, found.memory, found.alternatives) == (0.0, 0, ())


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.topk(2).values.sum() + x.topk(k=2, dim=0).indices.sum(),
        lambda x: x.sort().values * x.max(1, keepdim=True).values + x.median(0).values,
        lambda x: x.cummax(0).values + x.kthvalue(2, 1, True).values + x.aminmax().max + x.frexp().mantissa,
        lambda x: torch.linalg.qr(x).R.sum() + torch.linalg.slogdet(x @ x.mT).logabsdet,
        lambda x: sum(one.sum() for one in [*x.chunk(2), *x.split(1)]) + x.var(0).unbind()[0],
    ],
)
def test_results_that_have_names(f: Any) -> None:
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = auto_spec(f, LINE, x)
    mine = device_put(x, found.specs[0], mesh=LINE)
    torch.testing.assert_close(device_get(found.apply(f)(mine)), f(x))


def test_errors_say_what_to_write() -> None:
    args = ({"up": meta(8, 8), "down": meta(8, 8)}, meta(8, 8))
    with pytest.raises(ArgumentError, match=r"got 'w.upp' in fixed, which matches no argument; near it: 'w.up'"):
        auto_spec(mlp, LINE, *args, fixed={"w.upp": P()})
    with pytest.raises(SpecError, match=r"fixed\['w.up'\] for w.up, of shape \(8, 8\)"):
        auto_spec(mlp, LINE, *args, fixed={"w.up": P("z")})
    with pytest.raises(ArgumentError, match="got '1' in carried, which is no result"):
        auto_spec(mlp, LINE, *args, carried={"1": "x"})
    with pytest.raises(ArgumentError, match="no argument 'w'"):
        auto_spec(mlp, LINE, *args, carried={"": "w"})
    with pytest.raises(ArgumentError, match="solver='simplex'"):
        auto_spec(mlp, LINE, *args, solver="simplex")
    with pytest.raises(ArgumentError, match=r"auto_spec got the list \['x'\] for fixed; write a dict with"):
        auto_spec(mlp, LINE, *args, fixed=["x"])  # type: ignore[arg-type]
    for limit in (-1, 0.5, True, float("nan"), "80 GB"):
        with pytest.raises(ArgumentError, match="write a number of bytes, such as 80e9"):
            auto_spec(mlp, LINE, *args, memory_limit=limit)  # type: ignore[arg-type]
    for count in (-1, 2.5, None, True):
        with pytest.raises(ArgumentError, match="write an int >= 0, such as 3"):
            auto_spec(mlp, LINE, *args, alternatives=count)  # type: ignore[arg-type]
    for by_path in {"fixed": {0: P()}}, {"carried": {0: "x"}}, {"carried": {"0": 1}}:
        with pytest.raises(
            ArgumentError, match=r"auto_spec got the int \d for a key path in (fixed|carried); write str"
        ):
            auto_spec(mlp, LINE, *args, **by_path)  # type: ignore[arg-type]
    with pytest.raises(RecordError, match=r"auto_spec cannot record grad\(\): no graph .* write fspmd.grad"):
        auto_spec(lambda x: torch.autograd.grad((x**2).sum(), x), LINE, torch.ones(4).requires_grad_())
    with pytest.raises(RecordError, match="auto_spec cannot record <lambda>: it reads a value"):
        auto_spec(lambda x: x if x.sum() > 0 else -x, LINE, meta(4))


def _layers(p: Any, x: Any) -> Any:
    for layer in p:
        x = _block(layer, x)
    return x.sum()


@pytest.mark.usefixtures("slow")
def test_layers_that_repeat_lie_alike_and_lose_nothing_by_it() -> None:
    args = ([_weights(32) for _ in range(6)], meta(4, 8, 32))
    f = value_and_grad(_layers)
    leaves, treedef = optree.tree_flatten(args)
    program = record(f, LINE, leaves, treedef)
    same = ties(program, {})
    assert len(same.ops) == 4 * (len(program.ops) // 6)  # the first begins with an argument
    found = auto_spec(f, LINE, *args, alternatives=2)
    assert all(layer == found.specs[0][0] for layer in found.specs[0])
    apart = Search(CostModel(program, topology(), {})).best(None)
    assert found.time == pytest.approx(apart.time)
    assert len(found.alternatives) == 2
    assert all(other.time >= found.time and other.specs != found.specs for other in found.alternatives)
    for other in found.alternatives:
        assert all(layer == other.specs[0][1] for layer in other.specs[0][1:])
        fixed = {name: P(*spec.partition) for name, spec in other.leaves}
        assert auto_spec(f, LINE, *args, fixed=fixed, alternatives=0).time <= other.time * (1 + 1e-9)


@pytest.mark.usefixtures("slow")
def test_runners_up_of_layers_that_repeat_take_what_is_predicted() -> None:
    """Moves that were priced for layers that lie otherwise cost as much where these lie alike."""

    def f(ws: Any, x: Any) -> Any:
        for w in ws:
            x = torch.tanh(x @ w)
        return x

    args = ([meta(6, 6) for _ in range(3)], meta(5, 6))
    for other in auto_spec(f, GRID, *args, alternatives=20 if FULL else 8).alternatives:
        fixed = {name: P(*spec.partition) for name, spec in other.leaves}
        assert auto_spec(f, GRID, *args, fixed=fixed, alternatives=0).time <= other.time * (1 + 1e-9)


@pytest.mark.parametrize("mesh", [LINE, GRID] if FULL else [LINE])
def test_some_layers_are_sharded_where_not_all_need_to_be(mesh: Mesh) -> None:
    """Beside the free plan for the first layers and that of the least memory for the others."""
    leaves, treedef = optree.tree_flatten(([_weights(32) for _ in range(8 if FULL else 2)], meta(4, 8, 32)))
    program = record(value_and_grad(_layers), mesh, leaves, treedef)

    def best(limit: float | None, fixed: dict[int, P]) -> tuple[Any, dict[int, P]]:
        found = Search(CostModel(program, topology(), fixed)).best(limit)
        laid = {number: found.layout(number) for number in program.leaves}
        return found, {number: P(*spec.partition) for number, spec in laid.items()}

    free, free_specs = best(None, {})
    tight, tight_specs = best(0.5 * free.memory, {})
    weights = program.leaves[:-1]
    for count in (len(weights) // 2, len(weights) * 3 // 4)[: 2 if FULL else 1]:
        mixed, _ = best(None, {n: (free_specs if i < count else tight_specs)[n] for i, n in enumerate(weights)})
        found, _ = best(mixed.memory, {})
        assert found.memory <= mixed.memory
        assert found.time <= min(mixed.time, tight.time) * 1.01


@pytest.mark.usefixtures("slow")
def test_layers_of_one_shape_may_lie_otherwise_than_each_other() -> None:
    def f(p: Any, x: Any) -> Any:
        for w in p:
            x = torch.relu(x @ w)
        return x.sum()

    args = ([meta(64, 64) for _ in range(4)], meta(4, 64))
    found = auto_spec(value_and_grad(f), LINE, *args, fixed={"x": P()})
    assert {P(None, "x"), P("x", None)} <= {*found.specs[0]}


@pytest.mark.parametrize("body", [lambda x: x, lambda x: 2 * x, lambda x: psum(x, "x")])
def test_a_function_of_blocks_is_refused(body: Any) -> None:
    local = shard_map(body, mesh=LINE, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    with pytest.raises(RecordError, match="run by shard_map: its layouts are written already"):
        auto_spec(lambda x: local(x).sum(), LINE, meta(8, 8))


def test_a_mesh_without_ranks_will_do() -> None:
    mesh = make_mesh((64,), ("x",), transport="abstract")
    w = {"up": meta(8192, 32768), "down": meta(32768, 8192)}
    found = auto_spec(value_and_grad(mlp_loss), mesh, w, meta(4096, 8192), alternatives=0)
    assert all(spec.axes == {"x"} for spec in found.specs[0].values())


def test_other_threads_dispatch_as_ever() -> None:
    x = device_put(torch.ones(8), P("x"), mesh=LINE)
    seen: list[Any] = []

    def f(y: Any) -> Any:
        thread = threading.Thread(target=lambda: seen.append(device_get(2 * x)))
        thread.start()
        thread.join()
        return y.sum()

    auto_spec(f, LINE, meta(8))
    assert torch.equal(seen[0], 2 * torch.ones(8))


_PLACES, _ONES = torch.arange(8), torch.ones(8, 8, dtype=torch.float64)
#: functions of a value and of tensors that are none of the arguments, such as classes that are counted
BESIDE_PLAIN: dict[str, Any] = {
    "cross_entropy": lambda x: F.cross_entropy(x.T, _PLACES, weight=_ONES[0]),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, _PLACES),
    "take_along_dim": lambda x: torch.take_along_dim(x, _PLACES[:, None], 1),
    "solve": lambda x: torch.linalg.solve(x, _ONES[:, :1]),
    "one_hot": lambda x: x * F.one_hot(x.topk(1, -1)[1][:, 0], 8),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid().detach()) * x,
    "scatter_": lambda x: (2 * x).scatter_(1, _PLACES[:, None], _ONES[:, :1]),
}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", BESIDE_PLAIN)
def test_tensors_that_are_no_arguments_stand_beside_values_without_data(name: str) -> None:
    def loss(x: Any) -> Any:
        return BESIDE_PLAIN[name](x).square().sum()

    x = torch.eye(8, dtype=torch.float64) + torch.randn(8, 8, dtype=torch.float64)
    found = auto_spec(value_and_grad(loss), LINE, x, fixed={"x": P("x")}, alternatives=0)
    (laid,) = device_put((x,), found.specs, mesh=LINE)
    torch.manual_seed(0)
    expected = value_and_grad(loss)(device_put(x, P(), mesh=LINE))
    torch.manual_seed(0)
    value, gradient = jit(found.apply(value_and_grad(loss)))(laid)
    torch.testing.assert_close(device_get(value), device_get(expected[0]))
    torch.testing.assert_close(device_get(gradient), device_get(expected[1]))


#: writes into a value that no rule of one op decides
WRITES: dict[str, Any] = {
    "index_copy_": lambda y, x: y.index_copy_(0, _PLACES[:1], x[:1]),
    "index_add_": lambda y, x: y.index_add_(0, _PLACES[:3], x[:3]),
    "x[...] =": lambda y, x: y.__setitem__((slice(None), 2), x[:, 1]),
    "relu": lambda y, x: F.relu(y, inplace=True),
    "cumsum_": lambda y, x: y.cumsum_(0).addcmul_(x, x),
}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("fixed", [P(), P("x"), P(None, "x")])
def test_what_is_written_is_read_where_it_was_written(name: str, fixed: P) -> None:
    def f(x: Any, w: Any) -> Any:
        y = x * 2
        WRITES[name](y, x + 1)
        return y @ w

    x = torch.randn(8, 8, dtype=torch.float64)
    found = auto_spec(f, LINE, x, x, fixed={"x": fixed}, alternatives=0)
    laid, jitted = device_put((x, x), found.specs, mesh=LINE), jit(found.apply(f))
    torch.testing.assert_close(device_get(jitted(*laid)), f(x, x))
    lowered = getattr(jit(found.apply(f), passes=()), "lower")(*laid)  # noqa: B009
    assert lowered.cost().communication == pytest.approx(found.communication)
