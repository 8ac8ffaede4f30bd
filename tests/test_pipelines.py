"""Schedules as tables, and pipelines that run them: closed forms, corrupted tables, values, communication."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from full import FULL
from pipeline_programs import (
    F64,
    ROWS,
    SCHEDULES,
    WIDTH,
    arguments,
    beside,
    block,
    compute,
    compute_beside,
    dense,
    errors_and_permutes,
    loss,
    of_any_shape,
    separate,
    separate_and_waiting,
    waiting,
    worst,
    worst_beside,
)
from processes import Processes

from fspmd import P, communication_log, device_get, device_put, jit, make_mesh, shard_map
from fspmd.errors import ArgumentError, AxisError, MeshError, ShapeError, SpecError, TreeError, VarianceError
from fspmd.nn import Action, Costs, Precision, Schedule, gpipe, one_f_one_b, pipeline, pipelines, zbv, zero_bubble

CASES = list(itertools.product(SCHEDULES, (1, 2, 3, 4), (1, 2, 3, 8)))
#: ticks of p ranks and m microbatches, with actions of one tick, if m is at least 2 p and a multiple of p
TICKS = {
    "gpipe": lambda p, m: 2 * (m + p - 1),
    "one_f_one_b": lambda p, m: 2 * (m + p - 1),
    "interleaved": lambda p, m: 2 * (2 * m + p - 1),
    "zero_bubble": lambda p, m: 3 * m + p - 1,
    "zbv": lambda p, m: 6 * m + p - 1,
}
PEAKS = {
    "gpipe": lambda p, m, r: m,
    "one_f_one_b": lambda p, m, r: p - r,
    "interleaved": lambda p, m, r: 2 * (p - r - 1) + p + 1,
    "zero_bubble": lambda p, m, r: p,
    "zbv": lambda p, m, r: 2 * p,
    "dual_pipe_v": lambda p, m, r: 2 * p + 1,
}


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("name", PEAKS)
def test_schedules_have_their_closed_forms(name: str, p: int) -> None:
    for m in (2 * p, 4 * p):
        schedule = SCHEDULES[name](p, m)
        assert schedule.peaks() == tuple(PEAKS[name](p, m, r) for r in range(p))
        if name in TICKS:
            assert len(schedule.ticks) == TICKS[name](p, m)


def test_bubbles_are_those_of_the_papers() -> None:
    assert f"{one_f_one_b(4, 8).bubble():.1%}" == "27.3%"
    assert f"{zbv(4, 8).bubble():.1%}" == "5.9%"
    for p, m, costs in itertools.product((2, 3, 4), (8, 12), (Costs(), Costs(2, 3, 1), Costs(1, 1.5, 0.5))):
        assert one_f_one_b(p, m).bubble(costs) == pytest.approx((p - 1) / (m + p - 1))
        f, i, w = costs
        late = (p - 1) * (f + i - w) if f == i == w else None
        if late is not None:
            busy = m * (f + i + w)
            assert SCHEDULES["zero_bubble"](p, m).bubble(costs) == pytest.approx(late / (busy + late))


def brute_force_bubble(schedule: Schedule) -> float:
    """Step through time. Each rank begins its next action when what it needs has ended; B takes two steps."""
    left = [[row[r] for row in schedule.ticks if row[r] is not None] for r in range(schedule.ranks)]
    ended: set[tuple[str, int, int]] = set()
    busy: list[tuple[int, Action] | None] = [None] * schedule.ranks
    time = worked = 0
    while any(left) or any(busy):
        for r, actions in enumerate(left):
            if busy[r] is None and actions:
                kind, stage, m = actions[0]
                if kind == "F":
                    ready = stage == 0 or ("F", stage - 1, m) in ended
                elif kind == "W":
                    ready = ("I", stage, m) in ended
                else:
                    ready = ("F", stage, m) in ended
                    ready &= stage == schedule.stages - 1 or bool({("B", stage + 1, m), ("I", stage + 1, m)} & ended)
                if ready:
                    busy[r] = (2 if kind == "B" else 1, actions.pop(0))
        time += 1
        for r, now in enumerate(busy):
            if now is not None:
                worked += 1
                busy[r] = (now[0] - 1, now[1]) if now[0] > 1 else None
                if busy[r] is None:
                    ended.add(now[1])
    return 1 - worked / (time * schedule.ranks)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_bubbles_are_those_of_a_simulation(case: tuple[str, int, int]) -> None:
    name, p, m = case
    schedule = SCHEDULES[name](p, m)
    assert schedule.bubble() == pytest.approx(brute_force_bubble(schedule))
    assert f"{schedule.bubble():.1%}".replace("%", " %") in str(schedule)


def changed(schedule: Schedule, tick: int, rank: int, action: Action | None) -> Schedule:
    rows = [list(row) for row in schedule.ticks]
    rows[tick][rank] = action
    return replace(schedule, ticks=tuple(map(tuple, rows)))


@pytest.mark.parametrize(
    ("tick", "rank", "action", "message"),
    [
        (7, 0, None, "one_f_one_b: rank 0 runs F for stage 0 of microbatch 2; it needs F and B, or F, I and W"),
        (2, 0, Action("F", 0, 1), r"F0.1 \(microbatch 1\) at tick 2 of rank 0: it ran at tick 1 already"),
        (0, 1, Action("F", 1, 1), r"F1.1 \(microbatch 1\) at tick 0 of rank 1: F0.1 must run at an earlier tick"),
        (2, 0, Action("B", 0, 0), r"B0.0 \(microbatch 0\) at tick 2 of rank 0: B1.0 must run at an earlier tick"),
        (2, 0, Action("F", 0, 2), "the rank then holds 3 activations, but its limit is 2"),
        (2, 0, Action("F", 1, 1), "stage 1 lies on rank 1"),
        (2, 0, Action("G", 0, 1), "there is no such action"),
    ],
)
def test_corrupted_tables_are_refused(tick: int, rank: int, action: Action | None, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        changed(one_f_one_b(2, 3), tick, rank, action).validate()


def test_rows_of_other_lengths_are_refused() -> None:
    schedule = one_f_one_b(2, 3)
    two_at_once = replace(schedule, ticks=((*schedule.ticks[0], Action("F", 0, 1)), *schedule.ticks[1:]))
    with pytest.raises(ArgumentError, match="tick 0 has 3 cells, but there are 2 ranks"):
        two_at_once.validate()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("local", [False, True])
def test_microbatches_may_have_any_shapes_and_a_loss_a_wider_dtype(name: str, jitted: bool, local: bool) -> None:
    assert of_any_shape(name, F64, "simulation", jitted, local) < 1e-12
    assert of_any_shape(name, torch.bfloat16, "simulation", jitted, local) < 0.2


#: what stages pass on, which may have no gradient
PASSED_ON: dict[str, tuple[Any, Any]] = {
    "complex": (lambda w, x: torch.complex(x @ w, x), lambda w, x: (x.real @ w) * x.imag),
    "booleans": (lambda w, x: x > 0, lambda w, x: x.double() @ w),
    "what is given": (lambda w, x: x, lambda w, x: x @ w),
    "no gradient": (lambda w, x: (x @ w).detach(), lambda w, x: x @ w),
}


@pytest.mark.parametrize("name", PASSED_ON)
@pytest.mark.parametrize("schedule", [gpipe(2, 3), one_f_one_b(2, 3), zero_bubble(2, 3)], ids=lambda s: s.name)
def test_stages_pass_on_values_of_any_kind(schedule: Schedule, name: str) -> None:
    mesh = make_mesh((2,), ("pp",), transport="simulation")
    w = torch.randn(2, 3, 3, dtype=F64).requires_grad_()
    x, t = ([torch.randn(4, 3, dtype=F64) for _ in range(3)] for _ in range(2))
    first, last = stages = PASSED_ON[name]
    step = pipeline(list(stages), schedule, loss=lambda y, t: (y - t).square().sum(), mesh=mesh)
    value, gradient = step(device_put(w.detach(), P("pp"), mesh=mesh), *device_put((x, t), P(), mesh=mesh))
    right = torch.stack([(last(w[1], first(w[0], a)) - b).square().sum() for a, b in zip(x, t, strict=True)]).mean()
    torch.testing.assert_close(device_get(value), right.detach())
    torch.testing.assert_close(device_get(gradient), torch.autograd.grad(right, w)[0])


def test_processes_with_microbatches_of_any_shapes() -> None:
    with Processes(4) as pool:
        for name in ("one_f_one_b", "zbv"):
            assert max(pool.run(of_any_shape, name, F64)) < 1e-12
            assert max(pool.run(of_any_shape, name, torch.bfloat16)) < 0.2
            for jitted in (False, True):
                assert max(pool.run(of_any_shape, name, F64, "process_group", jitted, True)) < 1e-12


@pytest.mark.one_of(8)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_schedule_is_the_dense_model(case: tuple[str, int, int]) -> None:
    name, p, m = case
    assert worst([(name, {"pp": p}, m)]) < [1e-13]


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_run_on_any_mesh_and_may_be_computed_again(name: str) -> None:
    for repeated in (False, True):
        assert worst([(name, {"dp": 2, "pp": 2, "tp": 2}, 3, repeated)]) < [1e-13]


def test_processes_are_the_dense_model() -> None:
    both = [[(name, {"pp": 4}, 3), (name, {"pp": 2, "tp": 2}, 4)] for name in SCHEDULES]
    cases = [case for i, each in enumerate(both) for case in (each if FULL else each[i % 2 : i % 2 + 1])]
    simulated = worst(cases)
    with Processes(4) as pool:
        for found in pool.run(worst, cases):
            assert found == pytest.approx(simulated, abs=1e-13)
            assert max(found) < 1e-13


#: a record as it is, as by default, and with collectives under way while a rank computes
PASSES = [(), ("equal_steps", "rewrites", "dead_code"), ("equal_steps", "dead_code", "coalesce", "overlap")]


@pytest.mark.one_of(3)
@pytest.mark.parametrize("passes", PASSES, ids=len)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_record_is_the_dense_model(name: str, passes: tuple[str, ...]) -> None:
    """It has the permutes of the table, whatever the passes, and the first rank joins all of them."""
    for shape, repeated in (({"pp": 1}, False), ({"pp": 3}, False), ({"dp": 2, "pp": 2, "tp": 2}, True)):
        ((error, permutes),) = errors_and_permutes([(name, shape, 3, repeated, 1, passes)])
        assert error < 1e-13
        assert permutes == sum(map(len, SCHEDULES[name](shape["pp"], 3).moves()))


def test_records_of_processes_are_the_dense_model() -> None:
    cases = [(name, {"pp": 2, "tp": 2}, 3, False, 1, PASSES[i % 3]) for i, name in enumerate(SCHEDULES)]
    permutes = [sum(map(len, SCHEDULES[name](2, 3).moves())) for name in SCHEDULES]
    with Processes(4) as pool:
        for found in pool.run(errors_and_permutes, cases):
            assert max(error for error, _ in found) < 1e-13
            assert [count for _, count in found] == permutes


SEPARATE = [({"pp": 3}, "one_f_one_b"), ({"pp": 2, "tp": 2}, "zbv"), ({"pp": 1}, "zbv")]


@pytest.mark.parametrize("recorded", [None, PASSES[1]])
@pytest.mark.parametrize(("shape", "name"), SEPARATE)
def test_each_stage_may_have_a_tree_of_its_own(shape: dict[str, int], name: str, recorded: Any) -> None:
    assert separate(shape, name, 3, recorded) < 1e-13


def test_trees_of_stages_on_processes() -> None:
    with Processes(4) as pool:
        for recorded in (None, PASSES[2]):
            assert max(pool.run(separate, {"pp": 2, "tp": 2}, "zbv", 3, recorded)) < 1e-13


@pytest.mark.parametrize("name", SCHEDULES)
def test_forwards_alone_keep_nothing_and_give_the_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each microbatch crosses each boundary between ranks once."""
    monkeypatch.setitem(SCHEDULES, name, lambda p, m, make=SCHEDULES[name]: make(p, m).forwards())
    value, grads, log, schedule = compute(name, {"pp": 3}, 4)
    assert float(value - dense(*arguments(schedule.stages, 4))[0]) == pytest.approx(0, abs=1e-13)
    assert grads is None
    assert schedule.peaks() == (0, 0, 0)
    places = schedule.ranks_of_stages
    crossed = sum(a != b for a, b in itertools.pairwise(places))
    assert len([edge for rounds in schedule.moves() for edges in rounds for edge in edges]) == 4 * crossed
    assert sum(call.kind == "ppermute" for call in log) == sum(map(len, schedule.moves()))


def test_a_lowered_pipeline_is_that_of_the_first_rank() -> None:
    """Its permutes are those of the table. GPipe holds 8 activations; 1F1B holds 4, and a sum of gradients."""
    mesh, peaks = make_mesh((4,), ("pp",)), []
    w, x = device_put((torch.ones(4, 64, 64), [torch.ones(64, 64)] * 8), (P("pp"), P()), mesh=mesh)
    for make in (gpipe, one_f_one_b):
        schedule = make(4, 8)
        step = pipeline(lambda w, x: torch.tanh(x @ w), schedule, loss=lambda y, t: (y - t).sum(), mesh=mesh)
        program = jit(step).lower(w, x, x)
        assert sum(call.kind == "ppermute" for call in program.collectives()) == sum(map(len, schedule.moves()))
        peaks.append(program.memory().peak)
    assert peaks[0] - peaks[1] == (8 - 4 - 1) * 64 * 64 * 4


@pytest.mark.parametrize("name", SCHEDULES)
def test_flops_of_a_rank_have_a_closed_form(name: str) -> None:
    """A product forward and two backward of each stage and microbatch; the first stage has no gradient of its input."""
    p, m, rows, width = 2, 3, 8, 16
    mesh, schedule = make_mesh((p, 2), ("pp", "dp")), SCHEDULES[name](p, m)
    w = device_put(torch.ones(schedule.stages, width, width), P("pp"), mesh=mesh)
    x = device_put([torch.ones(rows, width)] * m, P("dp"), mesh=mesh)
    step = pipeline(lambda w, x: torch.tanh(x @ w), schedule, loss=lambda y, t: (y - t).sum(), mesh=mesh)
    mine = sum(rank == 0 for rank in schedule.ranks_of_stages)
    program = jit(step).lower(w, x, x)
    assert program.cost().flops == m * (3 * mine - 1) * 2 * (rows // 2) * width * width


def test_the_loss_times_c_gives_gradients_times_c() -> None:
    value, grads, _, _ = compute("zbv", {"pp": 2}, 3)
    value_c, grads_c, _, _ = compute("zbv", {"pp": 2}, 3, scale=8)
    assert torch.equal(value * 8, value_c)
    assert all(torch.equal(grads[name] * 8, grads_c[name]) for name in grads)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_share_no_memory(microbatches: int, recorded: bool) -> None:
    mesh = make_mesh((2,), ("x",))
    step = pipeline(
        lambda p, x: x + p[0] + p[1], gpipe(2, microbatches), loss=lambda y, t: (2 * y).sum() / 2, mesh=mesh, axis="x"
    )
    params = [device_put(torch.zeros(2, 4, 3), P("x"), mesh=mesh) for _ in range(2)]
    batches = [device_put([torch.zeros(4, 3)] * microbatches, P(), mesh=mesh) for _ in range(2)]
    _, (first, second) = (jit(step) if recorded else step)(params, *batches)
    first.add_(100)
    assert torch.equal(device_get(first), torch.full((2, 4, 3), 101.0))
    assert torch.equal(device_get(second), torch.full((2, 4, 3), 1.0))
    assert all(torch.equal(device_get(p), torch.zeros(2, 4, 3)) for p in params)


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_what_moves_is_what_a_closed_form_says(name: str) -> None:
    """A tick has a permute of one block if some rank sends. All forwards but the last stage's travel, and backwards."""
    p, m = 4, 8
    _, _, log, schedule = compute(name, {"pp": p}, m)
    permutes = [call for call in log if call.kind == "ppermute"]
    assert len(permutes) == sum(map(len, schedule.moves()))
    edges = [edge for rounds in schedule.moves() for edges in rounds for edge in edges]
    assert len(edges) == 2 * m * (p - 1)
    assert {call.price.moved for call in permutes} == {ROWS * WIDTH * F64.itemsize}
    assert sum(call.kind != "ppermute" for call in log) <= 2 + 1  # the loss, the table and no more


WAITING: list[tuple[str, dict[str, Any], list[str], float]] = [
    ("whole", {"over": "dp"}, ["psum_unreduced float64"] * 2, 1e-13),
    ("cut", {"over": ("dp",)}, ["all_gather_reduced float64", "psum_scatter_unreduced float64"] * 2, 1e-13),
    (
        "cut",
        {"over": "dp", "precision": Precision(F64, torch.float32, F64, F64)},
        ["all_gather_reduced float32", "psum_scatter_unreduced float64"] * 2,
        1e-6,
    ),
]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("layout", "options", "moves", "near"), WAITING, ids=range(len(WAITING)))
def test_gradients_wait_for_the_last_microbatch(
    name: str, layout: str, options: dict[str, Any], moves: list[str], near: float
) -> None:
    """Each leaf moves once each way over the axis of the batch, whatever the number of microbatches."""
    for jitted in (False, True):
        error, found = waiting(name, layout, options, "simulation", jitted)
        assert error < near
        assert [f"{kind} {dtype.removeprefix('torch.')}" for kind, dtype in found] == sorted(moves)


def test_gradients_of_processes_wait_for_the_last_microbatch() -> None:
    with Processes(4) as pool:
        for (layout, options, _, near), name in itertools.product(WAITING, ("one_f_one_b", "zbv")):
            simulated = waiting(name, layout, options, "simulation")
            for error, found in pool.run(waiting, name, layout, options):
                assert error < near
                assert found == simulated[1]


def test_gradients_of_trees_of_stages_wait_for_the_last_microbatch() -> None:
    """A process knows the layouts alone of the parameters of other stages."""
    cases = [(None, 1e-13), (Precision(F64, torch.float32, F64, F64), 1e-6)]
    with Processes(4) as pool:
        for (precision, near), jitted in itertools.product(cases, (False, True)):
            assert separate_and_waiting("simulation", precision, jitted) < near
            assert max(pool.run(separate_and_waiting, "process_group", precision, jitted)) < near


def test_the_loss_and_the_count_are_summed_over_ranks_once() -> None:
    """With the losses of all microbatches, and over all axes together."""
    for m in (1, 4):
        _, _, log, _ = compute("one_f_one_b", {"dp": 2, "pp": 2}, m)
        assert [call.axes for call in log if not call.shape] == [("dp",), ("dp", "pp")]


def test_sums_of_gradients_over_microbatches_have_their_own_dtype() -> None:
    """257 ones in bfloat16 are 256."""
    mesh = make_mesh((2,), ("pp",), transport="simulation")
    w = device_put(torch.zeros(2, 1), P("pp"), mesh=mesh)
    ones = [device_put(torch.ones(1), P(), mesh=mesh)] * 257
    for dtype, right in ((torch.float32, 257), (torch.bfloat16, 256)):
        precision = Precision(compute=torch.bfloat16, accumulate=dtype)
        step = pipeline(
            lambda w, x: x + w.to(x.dtype),
            gpipe(2, 257),
            loss=lambda y, t: y.sum(),
            count=lambda t: 1 / 257,
            mesh=mesh,
            precision=precision,
        )
        assert device_get(step(w, ones, ones)[1]).flatten().tolist() == [right] * 2


def test_live_activations_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[int, int] = {}
    act = pipelines._Rank.act

    def counted(self: pipelines._Rank, action: Action) -> object:
        out = act(self, action)
        held[id(self)] = max(held.get(id(self), 0), len(self.kept))
        return out

    monkeypatch.setattr(pipelines._Rank, "act", counted)
    for name in SCHEDULES:
        held.clear()
        schedule = compute(name, {"pp": 3}, 8)[3]
        assert tuple(held.values()) == schedule.peaks()


def test_boundaries_that_differ_are_refused_before_anything_runs() -> None:
    mesh, ran = make_mesh((3,), ("pp",)), []

    def wide(w, x):
        ran.append(1)
        return torch.cat([x * w, x], -1)

    step = pipeline([lambda w, x: x * w, wide, lambda w, x: x], one_f_one_b(3, 1), loss=lambda y, t: y.sum(), mesh=mesh)
    w, x = device_put((torch.ones(3), torch.ones(2)), (P("pp"), P()), mesh=mesh)
    with pytest.raises(ShapeError, match=r"stage 1 returns f32\[4\].*stage 0 returns f32\[2\]"):
        step(w, [x], [x])
    assert len(ran) == 1


def test_arguments_that_do_not_fit_are_refused() -> None:
    mesh = make_mesh((2,), ("pp",))
    with pytest.raises(ArgumentError, match="the schedule one_f_one_b is for 4 ranks, but the axis 'pp' has 2"):
        pipeline(block, one_f_one_b(4, 2), loss=loss, mesh=mesh)
    with pytest.raises(ArgumentError, match="got 3 stages, but the schedule has 2"):
        pipeline([block] * 3, one_f_one_b(2, 2), loss=loss, mesh=mesh)
    with pytest.raises(ArgumentError, match="got 1 inputs and 1 targets, but the schedule has 2 microbatches"):
        pipeline(block, one_f_one_b(2, 2), loss=loss, mesh=mesh)({}, [0], [0])
    with pytest.raises(AxisError, match="got the axis 'zz', but"):
        pipeline(block, one_f_one_b(2, 2), loss=loss, mesh=mesh, axis="zz")
    with pytest.raises(ArgumentError, match="the axis of the stages; name the axes that cut batches"):
        pipeline(block, one_f_one_b(2, 2), loss=loss, mesh=mesh, over="pp")
    with pytest.raises(ArgumentError, match="got the string 'gpipe' for schedule; give it a table"):
        pipeline(block, "gpipe", loss=loss, mesh=mesh)  # type: ignore[arg-type]
    step = pipeline(lambda w, x: x * w, one_f_one_b(2, 1), loss=lambda y, t: y.sum(), mesh=mesh)
    plain, (x, w, wide) = (
        torch.ones(2),
        device_put([torch.ones(n) for n in (3, 2, 4)], (P(), P("pp"), P("pp")), mesh=mesh),
    )
    other = device_put(torch.ones(2), P("x"), mesh=make_mesh((2,), ("x",)))
    for error, match, call in (
        (ArgumentError, r"params is a tensor of shape \(2,\)", (plain, [x], [x])),
        (ArgumentError, r"inputs\[0\] is a tensor .*\n.*targets\[0\] .*\nlay values out first", (w, [plain], [plain])),
        (SpecError, "a leaf that 'pp' cuts has a row for each of the 2 stages", (wide, [x], [x])),
        (SpecError, "inputs and targets are not cut over 'pp'", (w, [w], [x])),
        (MeshError, r"params is f32\[2@x\].*\nlay values out on mesh\(pp=2\), or on its parts", (other, [x], [x])),
        (ArgumentError, "for inputs; give it a list", (w, x, [x])),
        (
            VarianceError,
            r"params is f32\[2\]{U:pp} .*\nsettle sums over 'pp' first",
            (w[torch.tensor([1, 0])], [x], [x]),
        ),
    ):
        with pytest.raises(error, match=match):
            step(*call)
    for result, match in (
        ((lambda y, t: y), r"the loss returned a Sharded of shape \(3,\)"),
        ((lambda y, t: None), "the loss returned None"),
    ):
        with pytest.raises(ArgumentError, match=match):
            pipeline(lambda w, x: x * w, one_f_one_b(2, 1), loss=result, mesh=mesh)(w, [x], [x])
    with pytest.raises(ArgumentError, match=r"stage 0 returned the tuple .* expected one"):
        pipeline(lambda w, x: (x, w), one_f_one_b(2, 1), loss=loss, mesh=mesh)(w, [x], [x])


def test_the_dense_model_is_right_by_differences() -> None:
    params, inputs, targets = arguments(2, 2)
    value, grads = dense(params, inputs, targets)
    moved = params["w"].clone()
    moved[1, 0, 0] += 1e-6
    assert (dense({**params, "w": moved}, inputs, targets)[0] - value) / 1e-6 == pytest.approx(
        float(grads["w"][1, 0, 0]), rel=1e-4
    )


BESIDE = [
    (name, shape, m, scale, recorded)
    for name, shape, m in itertools.product(
        SCHEDULES, ({"pp": 1}, {"pp": 2}, {"pp": 3, "tp": 2}, {"dp": 4, "pp": 2}), (1, 5)
    )
    for scale, recorded in ((None, False), (3.0, True))
]


@pytest.mark.one_of(8)
@pytest.mark.parametrize("case", BESIDE)
def test_stages_may_add_to_the_loss_and_return_more(case: tuple[Any, ...]) -> None:
    for mine, right in compute_beside(*case):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


def test_stages_on_processes_may_add_to_the_loss_and_return_more() -> None:
    with Processes(4) as pool:
        cases = [("zbv", {"dp": 2, "pp": 2}, 3, 2.0, False), ("one_f_one_b", {"pp": 4}, 3, None, True)]
        for found in pool.run(worst_beside, cases):
            assert max(found) < 1e-12


def test_forwards_alone_return_more() -> None:
    mesh = make_mesh((2,), ("pp",), transport="simulation")
    stages = beside([block, block])
    schedule = one_f_one_b(2, 3)
    params, inputs, _ = arguments(2, 3)
    stored = {n: device_put(params[n], P("pp"), mesh=mesh) for n in ("w", "b")}
    xs = [device_put(params["table"][x], P(), mesh=mesh) for x in inputs]

    def squares(y: Any, t: Any) -> Any:
        return (y * y).sum()

    both = [
        pipeline(stages, table, loss=squares, mesh=mesh, has_aux=True)(stored, xs, xs)
        for table in (schedule, schedule.forwards())
    ]
    (value, aux), (again, more) = both[0][0], both[1][0]
    assert value == again
    assert both[1][1] is None
    assert torch.equal(device_get(aux["positive"]), device_get(more["positive"]))


def test_microbatches_of_even_and_uneven_blocks_return_one_tree_beside() -> None:
    """Stages are recorded on other meshes where blocks are uneven."""
    mesh = make_mesh((2, 2), ("pp", "dp"), transport="simulation")
    x = [torch.randn(n, 3, dtype=F64) for n in (4, 3, 1)]

    def stage(w: Any, x: Any) -> Any:
        y = shard_map(lambda w, x: x @ w, in_specs=(P(), P("dp")), out_specs=P("dp"))(w, x)
        return y, 0.0, {"positive": (y > 0).sum()}

    step = pipeline(stage, one_f_one_b(2, 3), loss=lambda y, t: (y - t).square().sum(), mesh=mesh, has_aux=True)
    w = torch.randn(2, 3, 3, dtype=F64)
    given = device_put((x, x), P("dp"), mesh=mesh)
    with communication_log() as log:
        (_, aux), _ = step(device_put(w, P("pp"), mesh=mesh), *given)
    passed_on = torch.cat(x) @ w[0], torch.cat(x) @ w[0] @ w[1]
    assert device_get(aux["positive"]).tolist() == [int((y > 0).sum()) for y in passed_on]
    # three microbatches of three shapes there and back, each in a permute of its own
    assert sum(call.kind == "ppermute" for call in log) == 6


@pytest.mark.parametrize("jitted", [False, True])
def test_sums_of_what_stages_return_beside_have_the_dtypes_of_torch(jitted: bool) -> None:
    """Bools are counted, and 258 ones in bfloat16 are 258. Pending sums are cast before they are settled."""
    mesh = make_mesh((2, 2), ("pp", "dp"), transport="simulation")

    def stage(w: Any, x: Any) -> Any:
        return x * w, 0.0, {"some": x > 0, "ones": (x * 0 + 1).bfloat16(), "all": (x > 0).all()}

    step = pipeline(stage, gpipe(2, 258), loss=lambda y, t: y.sum(), mesh=mesh, has_aux=True)
    w, x = (
        device_put(torch.ones(2), P("pp"), mesh=mesh),
        device_put([torch.tensor([1.0, -1.0])] * 258, P("dp"), mesh=mesh),
    )
    (_, aux), _ = (jit(step) if jitted else step)(w, x, x)
    assert {name: (value.dtype, device_get(value).tolist()) for name, value in aux.items()} == {
        "some": (torch.int64, [[258, 0]] * 2),
        "ones": (torch.bfloat16, [[258.0, 258.0]] * 2),
        "all": (torch.int64, [0, 0]),
    }


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (lambda y: y, "returns \\(y, part, aux\\), but stage 0 returned"),
        (lambda y: (y, 0.0), "stage 0 returned a tuple of 2"),
        (lambda y: (y, y, None), "for its part of the loss; expected a scalar"),
        (lambda y: (y, torch.ones(()), None), "for its part of the loss; expected a scalar"),
        (lambda y: (y, 0.0, {"n": 3}), "in aux; expected Sharded values"),
    ],
)
def test_stages_that_return_no_triple_are_refused(out: Any, words: str) -> None:
    mesh = make_mesh((2,), ("pp",), transport="simulation")
    step = pipeline(lambda w, x: out(x * w), one_f_one_b(2, 2), loss=lambda y, t: y.sum(), mesh=mesh, has_aux=True)
    w, x = device_put(torch.ones(2), P("pp"), mesh=mesh), device_put([torch.ones(3)] * 2, P(), mesh=mesh)
    with communication_log() as log, pytest.raises(TreeError, match=words):
        step(w, x, x)
    assert not log


def test_stages_return_one_tree() -> None:
    mesh = make_mesh((2,), ("pp",), transport="simulation")
    stages = [lambda w, x, n=n: (x * w, 0.0, {n: x.sum()}) for n in ("a", "b")]
    step = pipeline(stages, one_f_one_b(2, 2), loss=lambda y, t: y.sum(), mesh=mesh, has_aux=True)
    w, x = device_put(torch.ones(2), P("pp"), mesh=mesh), device_put([torch.ones(3)] * 2, P(), mesh=mesh)
    with pytest.raises(TreeError, match=r"stage 1 returns \{'b': f32\[\] .*stage 0 returns \{'a'"):
        step(w, x, x)


def test_a_scale_is_a_number_of_any_kind() -> None:
    mesh = make_mesh((2,), ("pp",), transport="simulation")
    step: Any = pipeline(lambda w, x: x * w, one_f_one_b(2, 2), loss=lambda y, t: y.sum(), mesh=mesh)
    w, x = device_put(torch.ones(2), P("pp"), mesh=mesh), device_put([torch.ones(3)] * 2, P(), mesh=mesh)
    for scale in (4.0, torch.tensor(4.0), device_put(torch.tensor(4.0), P(), mesh=mesh)):
        for call in (step, jit(step)):
            value, gradient = call(w, x, x, scale)
            assert (float(value), device_get(gradient).tolist()) == (3.0, [12.0, 12.0])
    for wrong in (torch.ones(1), "4"):
        with pytest.raises(ArgumentError, match=r"scale is .* expected a number, or a 0-d tensor"):
            step(w, x, x, wrong)


def test_microbatches_return_one_shape() -> None:
    """The sum of [3] and of [1] would have a shape, but no meaning."""
    mesh = make_mesh((2,), ("pp",), transport="simulation")
    step = pipeline(
        lambda w, x: (x * w, 0.0, x.abs()), one_f_one_b(2, 2), loss=lambda y, t: y.sum(), mesh=mesh, has_aux=True
    )
    w, x = device_put(torch.ones(2), P("pp"), mesh=mesh), device_put([torch.ones(n) for n in (3, 1)], P(), mesh=mesh)
    with pytest.raises(TreeError, match=r"microbatch 1 returns f32\[1\] .*microbatch 0 returns f32\[3\]"):
        step(w, x, x)
