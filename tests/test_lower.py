"""What a lowered program says of itself is what happens when the function runs.

The judge is `communication_log`, beside the function as it runs, on the same mesh.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import global_programs as programs
import pytest
import test_global_programs as chains
import test_random_programs as bodies
import torch
import torch.nn.functional as F
from full import FULL
from hypothesis import HealthCheck, given, settings
from processes import Processes
from simulated import GRID, MESH
from test_donation import Peak
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import fspmd
from fspmd import (
    ArgumentError,
    Link,
    Mesh,
    MeshError,
    P,
    RecordError,
    Sharded,
    TensorSpec,
    Topology,
    VarianceError,
    communication_log,
    device_get,
    device_put,
    grad,
    jit,
    make_mesh,
    set_topology,
    shard_map,
    topology,
    value_and_grad,
)
from fspmd.trees import flatten


def lowered(f: Callable[..., Any], *args: Any) -> Any:
    """What the function gives, where its lowered program tells of the communication that it asks for."""

    def called(*args: Any) -> Any:
        return f(*args)

    told = jit(called, passes=()).lower(*args).collectives()
    with communication_log() as log:
        out = called(*args)
        made, leaves = (
            [x for x in flatten(tree)[0] if isinstance(x, Tensor) and x.requires_grad] for tree in (out, args)
        )
        if made:
            with torch.no_grad():
                ones = [torch.ones_like(x) for x in made]
            torch.autograd.grad(made, leaves, ones, retain_graph=True, allow_unused=True)
    assert list(map(_facts, told)) == list(map(_facts, log))
    return out


def _facts(one: Any) -> Any:
    return one.kind, one.mesh, one.axes, one.shape, one.dtype, one.price, one.backward, one.cause.what, one.cause.text


@pytest.mark.parametrize("seed", range(0, 2000 if FULL else 5, 5))
def test_chains_of_torch_calls(seed: int) -> None:
    chains.check_seeds(range(seed, seed + 5), None, lowered)


@settings(
    max_examples=1000 if FULL else 8,
    deadline=None,
    derandomize=not FULL,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(bodies.programs())
def test_random_bodies(drawn: Any) -> None:
    bodies.check(*drawn, lowered)


def _uneven_products(x: Tensor) -> Tensor:
    """The first rank repeats the gather for the first product, and stops at what it saves of the second."""
    F.linear(x, fspmd.all_gather(x, "x", tiled=True, size=2).tanh())
    return F.linear(x, x.tanh()).sum()[None]


def _row_of_its_own(x: Tensor) -> Tensor:
    """Nothing that backward needs is saved by a row that is a view, so nothing is repeated."""
    fspmd.pmax(x.sin() * (1 + fspmd.axis_index("x")), "x")
    return x[fspmd.axis_index("x") % x.shape[0]][None]


@pytest.mark.parametrize(("body", "spec"), [(_uneven_products, P("x")), (_row_of_its_own, P())])
def test_what_a_checkpoint_repeats(body: Callable[[Tensor], Tensor], spec: P) -> None:
    f = shard_map(fspmd.checkpoint(body), mesh=make_mesh((3,), ("x",)), in_specs=spec, out_specs=P("x"))
    lowered(f, torch.randn(2, 4, dtype=torch.float64, requires_grad=True))


def _in_flight(x: Tensor) -> Tensor:
    begun = [fspmd.all_gather(x, "x", wait=False), fspmd.psum_scatter(x, "x", tiled=True, wait=False)]
    return torch.stack([one.wait().sin().sum() for one in begun])


def _extremum(x: Tensor) -> tuple[Tensor, Tensor]:
    largest = fspmd.pmax(x, "x")
    row = fspmd.axis_index("x") % largest.shape[0]  # steps without gradients between pmax and what uses it
    return largest, largest[row][None] + torch.zeros(1)


def test_gradients_are_of_the_call_that_they_are_gradients_of() -> None:
    f = shard_map(_extremum, mesh=MESH, in_specs=P("x"), out_specs=(P(), P("x")))
    lowered(f, torch.randn(2 * MESH.size, dtype=torch.float64, requires_grad=True))


def test_gradients_of_what_is_in_flight_are_of_the_line_where_it_began() -> None:
    f = shard_map(_in_flight, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    lowered(f, torch.randn(4 * MESH.size, dtype=torch.float64, requires_grad=True))


_ROWS: list[Callable[..., Any]] = [
    lambda x: torch.roll(x, 1, 0),
    lambda x: x.flip(0),
    lambda x: x[1:] * 2,
    lambda x: torch.nn.functional.pad(x, (0, 0, 1, 1)),
    lambda x: torch.cat([x, x]),
    lambda x: x.diff(dim=0).cumsum(0),
    lambda x: x.reshape(-1),
    lambda x: torch.nn.functional.conv1d(x.t()[None], torch.ones(2, 64, 3, dtype=x.dtype), padding=1),
]


def _check_rows(mesh: Mesh) -> None:
    for f, rows, gradient in [*itertools.product(_ROWS, (16, 13, 3), (False, True))][:: 1 if FULL else 5]:
        x = device_put(torch.randn(rows, 64, dtype=torch.float64), P("x"), mesh=mesh)
        lowered(f, x.requires_grad_(gradient))


@pytest.mark.parametrize("mesh", [MESH, GRID], ids=["x4", "x2y3"])
def test_rows_that_go_to_other_ranks(mesh: Mesh) -> None:
    """Exchanges of unequal lengths, which follow from shapes alone, and uneven collectives."""
    _check_rows(mesh)
    x = device_put(torch.randn(13, 64), P("x"), mesh=mesh)
    assert [one.kind for one in jit(_ROWS[0]).lower(x).collectives()] == ["ragged_all_to_all"]


def _on_processes(seeds: range) -> None:
    chains.check_seeds(seeds, 4, lowered)
    _check_rows(make_mesh((4,), ("x",)))


def test_on_processes() -> None:
    with Processes(4) as pool:
        pool.run(_on_processes, range(400 if FULL else 1))


def test_a_mesh_without_ranks() -> None:
    """As on processes, but for their number."""
    mesh = make_mesh((64, 8), ("dp", "tp"), transport="abstract")
    x = TensorSpec(mesh, P("dp"), (512, 1024), torch.float32)
    w = TensorSpec(mesh, P(None, "tp"), (1024, 4096), torch.float32)
    v = TensorSpec(mesh, P("tp"), (4096, 1024), torch.float32)

    def step(w: Any, v: Any, x: Any) -> Any:
        def loss(w: Any, v: Any) -> Any:
            return (torch.relu(x @ w) @ v).square().sum()

        gradients = grad(loss, argnums=(0, 1))(w, v)
        return [p - 0.1 * g for p, g in zip((w, v), gradients, strict=True)]

    program = jit(step).lower(w, v, x)
    moved = [(one.kind, one.axes, one.shape, one.backward) for one in program.collectives()]
    assert moved == [
        ("psum_unreduced", ("tp",), (8, 1024), False),
        ("psum", ("dp",), (512, 1024), True),
        ("psum", ("dp",), (1024, 512), True),
    ]
    cost = program.cost()
    assert cost.flops == 2 * 8 * 1024 * 512 * 5  # the gradient of x is not asked for
    assert cost.ranks == 512
    assert cost.time == pytest.approx(cost.computation + cost.communication)
    text = program.as_text()
    for part in ("step on mesh(dp=64, tp=8)", "f32[1024, 4096@tp]", "f32[512@dp, 1024]{U:tp}", "psum[dp](", "x @ w"):
        assert part in text


@pytest.mark.parametrize(
    ("f", "shapes", "flops"),
    [
        (torch.matmul, [(64, 32), (32, 16)], 2 * 16 * 32 * 16),
        (torch.matmul, [(64, 32), (32,)], 2 * 16 * 32),
        (torch.bmm, [(8, 16, 32), (8, 32, 16)], 2 * 2 * 16 * 32 * 16),
        (torch.dot, [(64,), (64,)], 2 * 16),
        (torch.nn.functional.conv1d, [(8, 3, 10), (6, 3, 3)], 2 * 2 * 6 * 8 * 9),
        *[
            (grad(lambda *tensors, f=f: f(*tensors).sum(), argnums=argnums), shapes, (1 + len(argnums)) * flops)
            for argnums in ((0,), (1,), (0, 1))
            for f, shapes, flops in (
                (torch.nn.functional.conv1d, [(8, 3, 10), (6, 3, 3)], 2 * 2 * 6 * 8 * 9),
                (lambda x, w: torch.nn.functional.conv1d(x, w, groups=2), [(8, 4, 10), (6, 2, 3)], 2 * 2 * 6 * 8 * 6),
                (torch.nn.functional.conv_transpose1d, [(8, 3, 10), (3, 6, 3)], 2 * 2 * 3 * 10 * 18),
            )
        ],
        (grad(lambda a, b: (a @ b).sum(), argnums=(0, 1)), [(64, 32), (32, 16)], 6 * 16 * 32 * 16),
        (
            lambda a: torch.nn.functional.scaled_dot_product_attention(a, a, a),
            [(8, 4, 16, 32)],
            4 * 2 * 4 * 16 * 16 * 32,
        ),
    ],
)
def test_flops_of_a_rank(f: Callable[..., Any], shapes: list[tuple[int, ...]], flops: int) -> None:
    """Of tensors of which the first is cut along its batch, as are those that share it: counted by hand."""
    mesh = make_mesh((4, 2), ("x", "y"), transport="abstract")
    cut = [P("x") if len(shape) != 2 and shape[0] == shapes[0][0] else P() for shape in shapes]
    given = [
        TensorSpec(mesh, spec, shape, torch.float32) for spec, shape in zip([P("x"), *cut[1:]], shapes, strict=True)
    ]
    assert jit(f, passes=()).lower(*given).cost().flops == flops


def _mlp(w: Any, x: Any) -> Any:
    h = torch.nn.functional.dropout(torch.relu(x @ w[0]), 0.5) @ w[1]
    return (h @ w[1].t()).square().mean()


@pytest.mark.parametrize("mesh", [make_mesh((4, 2), ("x", "y"), transport="abstract"), GRID], ids=["abstract", "x2y3"])
def test_cost_on_another_machine(mesh: Mesh) -> None:
    """What `set_topology` of it makes of the cost: of the collectives' time, too."""
    before, slow = topology(), Topology(memory=1e3, flops=1e3, launch=7.0, axes=(("x", Link(500.0, 400.0)),))
    a, b, x = (
        TensorSpec(mesh, *one, torch.float32) for one in ((P(), (11, 23)), (P(None, "y"), (23, 31)), (P("x"), (13, 11)))
    )
    program = jit(value_and_grad(_mlp)).lower((a, b), x)
    here, there = program.cost(), program.cost(slow)
    assert there.communication > 10 * here.communication > 0
    try:
        set_topology(slow)
        assert program.cost() == there
        assert program.cost(before) == here
    finally:
        set_topology(before)


@pytest.mark.one_of(12)
@pytest.mark.parametrize("mesh", [make_mesh((4, 2), ("x", "y"), transport="abstract"), GRID], ids=["abstract", "x2y3"])
@pytest.mark.parametrize("around", [lambda f: f, fspmd.checkpoint], ids=["kept", "checkpoint"])
@pytest.mark.parametrize("passes", [(), None, ("recompute",)], ids=["", "default", "recompute"])
@pytest.mark.parametrize(
    "shapes", [[(12, 24), (24, 36), (48, 12)], [(11, 23), (23, 31), (13, 11)]], ids=["even", "uneven"]
)
def test_flops_of_the_model(mesh: Mesh, around: Any, passes: Any, shapes: list[tuple[int, ...]]) -> None:
    """Those of whole tensors, as torch counts them, however ranks share the work, or repeat it."""
    step = value_and_grad(around(_mlp))
    a, b, x = (torch.randn(shape) for shape in shapes)
    with FlopCounterMode(display=False) as counted:
        torch.func.grad(_mlp)((a, b), x)
    every = []
    layouts = [(P(), P("x"), P(None, "y")), (P(), P("y"), P("x", "y")), (P(), P("x"), P(("x", "y")))]
    for specs in list(itertools.product(*layouts))[:: 1 if FULL else 4]:
        a, b, x = (TensorSpec(mesh, *one, torch.float32) for one in zip(specs, shapes, strict=True))
        every.append(jit(step, passes=passes).lower((a, b), x).cost())
        assert every[-1].model_flops == counted.get_total_flops()
    assert every[0].flops >= counted.get_total_flops()  # nothing is cut
    assert every[0].utilisation() * mesh.size <= every[0].hardware_utilisation * (1 + 1e-9)


def _told(written: programs.Program, transport: str) -> Any:
    mesh = make_mesh(written.axes, ("x", "y")[: len(written.axes)], transport=transport)
    leaves = [TensorSpec(mesh, spec, shape, torch.float64) for shape, spec in written.leaves]

    def loss(*leaves: Any) -> Any:
        return sum(x.double().sin().sum() for x in programs.run(written, list(leaves)))

    try:
        program = jit(value_and_grad(loss, argnums=(0, 1, 2))).lower(*leaves)
    except VarianceError as error:  # writes into what had to be moved
        return str(error), ()
    told = []
    for one in program.collectives():
        axes = tuple(axis for axis in one.axes if mesh.shape[axis] > 1)  # those with one rank move nothing
        told.append((one.kind, axes, one.shape, one.price, one.backward, one.cause.what))
    cost, memory = program.cost(), program.memory()
    exact = told, cost.flops, cost.model_flops, memory.peak, memory.given
    return exact, (cost.time, cost.computation, cost.nbytes, cost.moved)


@pytest.mark.parametrize("seed", range(0, 1000 if FULL else 4, 4))
def test_a_simulation_is_lowered_as_its_first_rank(seed: int) -> None:
    """As on a mesh without ranks, where blocks are uneven, too. Processes pack some collectives into one."""
    for one in range(seed, seed + 4):
        written = programs.program(one)
        simulated, alone = (_told(written, transport) for transport in ("simulation", "abstract"))
        if not simulated[1] or len(simulated[0][0]) == len(alone[0][0]):
            assert simulated[0] == alone[0], f"seed {one}"
            # of uneven blocks a simulation copies where some rank must, such as one whose block is empty
            assert simulated[-1] == pytest.approx(alone[-1], rel=0.02), f"seed {one}"
        else:
            assert simulated[0][1] == alone[0][1]


@pytest.mark.parametrize("order", [0, 1, 2])
def test_handles_are_lowered_and_differentiated(order: int) -> None:
    """The way back of a handle may move nothing, and is waited for all the same."""

    def body(x: Tensor) -> Tensor:
        first, second = (fspmd.psum(x * i, "x", wait=False) for i in (1, 2))
        return first.wait() * second.wait()

    told = []
    for transport in ("simulation", "abstract"):
        mesh = make_mesh((4,), ("x",), transport=transport)
        f = shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P())
        for _ in range(order):
            f = grad(lambda x, f=f: f(x).square().sum())
        program = jit(f).lower(TensorSpec(mesh, P("x"), (8, 3), torch.float64))
        told.append((len(program.collectives()), program.cost(), program.memory().peak, program.as_text().count("\n")))
    assert told[0] == told[1]
    assert told[0][0] >= 2


_LOSSES: dict[str, Callable[..., Any]] = {
    "matmul": lambda w: (w @ w.T).tanh().sum(),
    "softmax": lambda w: w.softmax(1).square().sum(),
    "slices": lambda w: w[1:, ::2].sin().sum(),
    "checkpoint": lambda w: fspmd.checkpoint(lambda x: (x.sin() @ x.T).tanh())(w).sum(),
    "body": lambda w: shard_map(
        lambda x: fspmd.psum(fspmd.all_gather(x.sin(), "y").prod(0).sum(), ("x", "y")),
        mesh=w.spec.mesh,
        in_specs=P("x", "y"),
        out_specs=P(),
    )(w),
}


@pytest.mark.parametrize("name", _LOSSES)
def test_collectives_of_gradients_of_gradients_have_the_line_of_what_they_are_for(name: str) -> None:
    for order in (2, 3):
        f = _LOSSES[name]
        for _ in range(order):
            f = grad(lambda w, f=f: f(w).square().sum())  # the gradients
        lowered(f, device_put(torch.randn(6, 9, dtype=torch.float64), P("x", "y"), mesh=GRID))
        program = jit(f, passes=()).lower(TensorSpec(GRID, P("x", "y"), (6, 9), torch.float64))  # no cause of anything
        assert len(program.collectives()) >= 2
        assert not [line for line in program.as_text().split("\n") if "  <- " in line and "no cause of" in line]


def test_what_is_packed_of_uneven_simulations_is_told() -> None:
    """Blocks of one size that were made of uneven ones."""

    def body(x: Tensor) -> Tensor:
        x = x.sum(0)
        return fspmd.psum(x, "x") * fspmd.psum(x * 3, "x")

    step = jit(shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P()), passes=["coalesce"])
    x = device_put(torch.randn(7, 3), P("x"), mesh=MESH)
    step(x)
    with communication_log() as log:
        step(x)
    assert [one.shape for one in step.lower(x).collectives()] == [one.shape for one in log] == [(1, 6)]


def test_compiled_programs_of_uneven_simulations() -> None:
    """What is told is told of one rank, and what runs are all."""
    program = jit(grad(lambda w, x: (x @ w).relu().square().sum()))
    w, x = torch.randn(5, 7, dtype=torch.float64), torch.randn(9, 5, dtype=torch.float64)
    mine = device_put(w, P(None, "x"), mesh=MESH), device_put(x, P("x"), mesh=MESH)
    lowered = program.lower(*mine)
    assert not any(str(step.target) in ("shard_of", "LocalTensor") for step in lowered.program.steps)
    expected = torch.func.grad(lambda w: (x @ w).relu().square().sum())(w)
    torch.testing.assert_close(device_get(lowered.compile()(*mine)), expected)


def test_what_one_rank_alone_begins_a_sum_with_is_another_value() -> None:
    """The first rank, which an abstract mesh lowers for, adds a residual to a pending sum, and uses it again after."""
    found = []
    for transport in ("abstract", "simulation"):
        mesh = make_mesh((2, 4), ("x", "y"), transport=transport)
        shapes = {(8, 6): P("x"), (6, 12): P(None, "y"), (12, 6): P("y")}
        given = [TensorSpec(mesh, spec, shape, torch.float32) for shape, spec in shapes.items()]
        step = jit(value_and_grad(lambda x, a, b: (x + (x @ a).relu() @ b).square().sum(), (1, 2)))
        program = step.lower(*given)
        assert program.cost().overlapped >= 0
        found.append((program.cost().model_flops, [one.kind for one in program.collectives()]))
        assert "invariant_to_unreduced" in program.as_text()
    assert found[0] == found[1]
    assert found[0][0] == 5 * 2 * 8 * 6 * 12  # x has no gradient


def test_new_values_are_held_in_blocks_alone() -> None:
    mesh = make_mesh((64, 8), ("x", "y"), transport="abstract")
    program = jit(lambda: fspmd.randn(8192, 8192, spec=P("x", "y"), mesh=mesh) + 1, passes=()).lower()
    assert program.memory().peak == 2 * 4 * 128 * 1024


def test_nothing_runs_on_a_mesh_without_ranks() -> None:
    mesh = make_mesh((4,), ("x",), transport="abstract")
    x = Sharded(torch.ones(2, 4), TensorSpec(mesh, P("x"), (8, 4), torch.float32))
    with pytest.raises(MeshError, match="is abstract: it has no ranks that could communicate"):
        device_get(x)


def test_gradients_are_not_copied_where_one_rank_has_all() -> None:
    """Their sum over an axis of size one would be a copy."""

    def steps(n: int) -> int:
        mesh = make_mesh((n,), ("x",), transport="abstract")
        w, x = (TensorSpec(mesh, spec, shape, torch.float32) for spec, shape in ((P(), (3, 2)), (P("x"), (4, 3))))
        return len(jit(fspmd.grad(lambda w, x: (x @ w).sin().sum())).lower(w, x).program.steps)

    assert steps(1) == steps(2) - 1


def test_lowering_leaves_generators_alone() -> None:
    x = device_put(torch.ones(8, 4), P("x"), mesh=MESH)
    before = torch.get_rng_state()
    jit(lambda x: torch.nn.functional.dropout(x, 0.5) + torch.rand(4)).lower(x)
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_is_lowered_on_the_way() -> None:
    """In a body, a transform or a record tensors are not what a caller has."""

    def lowers(x: Any) -> Any:
        jit(torch.relu).lower(x)
        return x

    for outer in (torch.func.vmap(lowers), jit(lowers), jit(lowers).lower):  # type: ignore[attr-defined]
        with pytest.raises(RecordError, match=r"jit\(relu\).lower\(...\) was called in"):
            outer(torch.ones(3))
    with pytest.raises(RecordError, match="call it outside of them"):
        shard_map(lowers, mesh=MESH, in_specs=P("x"), out_specs=P("x"))(torch.ones(8))


def test_memory_is_let_go_after_its_last_use() -> None:
    def chain(x: Any) -> Any:
        for _ in range(5):
            x = x.exp() + 1
        return x.sum()

    x = TensorSpec(make_mesh((4,), ("x",), transport="abstract"), P("x"), (4096,), torch.float64)
    memory = jit(chain).lower(x).memory()
    assert str(memory.holds[0]).endswith("f64[1024]                 x")
    assert (memory.given, memory.peak) == (8 * 1024, 3 * 8 * 1024)  # the argument, an operand and a result
    (held,) = (held for line, held in memory.by_line.items() if line.startswith("x = x.exp() + 1"))
    assert held == [2 * 8 * 1024, *[3 * 8 * 1024] * 9]  # of exp and + in turn; the first has no other operand


def test_results_that_nobody_takes_are_held_with_the_others() -> None:
    x = TensorSpec(make_mesh((1,), ("x",), transport="abstract"), P(), (512,), torch.float64)
    memory = jit(lambda x: x.sort().values).lower(x).memory()
    assert memory.peak == 3 * 8 * 512  # x, the values, and where they were


_SEVERAL: dict[str, Callable[..., Any]] = {
    "sort": lambda x: (x + 1).sort().indices * 1,
    "both": lambda x: [y + 1 for y in (x + 1).sort()],
    "topk": lambda x: (x * 2).topk(5).values.sum(),
    "moments": lambda x: torch.sub(*torch.var_mean(x * 2, 0)),
    "layer norm": fspmd.grad(lambda x: F.layer_norm(x * 2, (64,)).cos().sum()),
    "max": fspmd.grad(lambda x: ((x * 2).max(0).values * (x * 3).min(1).values).sum()),
    "parts": lambda x: [y.exp() for y in (x * 2).split(16)],
    "svd": lambda x: torch.linalg.svd(x * 2)[1] * 2,
    "made once": lambda x: ((x * torch.zeros(64).add(1).diag()).exp() * 2).sin(),
}


@pytest.mark.parametrize("name", _SEVERAL)
def test_all_results_of_a_step_are_held_until_the_last_is_taken(name: str) -> None:
    """The peak is what is counted when it runs, to the byte."""
    step, x = jit(_SEVERAL[name]), torch.rand(64, 64)
    with Peak(x) as counted:
        step(x)  # the record may keep what it makes once
        counted.bytes = 0
        out = step(x)
    assert step.lower(x).memory().peak == counted.bytes
    del out


def test_a_lowered_program_is_what_runs() -> None:
    """Results that are written into donated memory are so from the start, and nothing that compiles it changes it."""
    x = device_put(torch.ones(8, 4), P("x"), mesh=MESH)
    program = jit(lambda w, g: w - 0.5 * g, donate_argnums=0).lower(x, x.spec)
    before = program.as_text(), str(program.memory())
    assert "sub_(%0" in before[0]
    assert torch.equal(device_get(program.compile()(x, x * 2)), torch.zeros(8, 4))
    assert (program.as_text(), str(program.memory())) == before
    assert (
        "sub_("
        not in jit(lambda w, g: w - 0.5 * g, donate_argnums=0, backend="inductor").lower(x.spec, x.spec).as_text()
    )


def compiled(f: Callable[..., Any], *args: Any) -> Any:
    """What a program gives that was lowered for such arguments, and never recorded with values."""
    return jit(f).lower(*args).compile()(*args)


@pytest.mark.parametrize("seed", range(0, 2000, 5) if FULL else [5])
def test_chains_compiled_ahead(seed: int) -> None:
    chains.check_seeds(range(seed, seed + 5), None, compiled)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("seed", [51, 128, 263, 416])  # a leaf that is settled for one function and used by another
def test_a_function_that_runs_again_for_gradients_of_gradients_gives_results_as_recorded(seed: int) -> None:
    chains.check_seeds([seed], None, compiled)


@settings(
    max_examples=1000 if FULL else 8,
    deadline=None,
    derandomize=not FULL,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(bodies.programs())
def test_bodies_compiled_ahead(drawn: Any) -> None:
    bodies.check(*drawn, compiled)


def test_compiled_programs_refuse_other_arguments() -> None:
    x = device_put(torch.ones(8, 4), P("x"), mesh=MESH)
    program = jit(lambda x, n: x * n).lower(x.spec, 2).compile()
    assert torch.equal(device_get(program(x, 2)), torch.full((8, 4), 2.0))
    with pytest.raises(
        ArgumentError, match=r"was lowered for other arguments: x: spec P\('x', None\) -> P\(None, 'x'\)"
    ):
        program(device_put(torch.ones(8, 4), P(None, "x"), mesh=MESH), 2)
    with pytest.raises(ArgumentError, match="n: value 2 -> 3"):
        program(x, 3)
    abstract = make_mesh((4,), ("x",), transport="abstract")
    with pytest.raises(MeshError, match="which is abstract and has no ranks"):
        jit(torch.relu).lower(TensorSpec(abstract, P("x"), (8,), torch.float32)).compile()


def test_a_timeline(tmp_path: Path) -> None:
    x = TensorSpec(make_mesh((4,), ("x",), transport="abstract"), P("x"), (4096, 64), torch.float64)
    program = jit(lambda x: (x.exp() @ x.sum(0)).sum()).lower(x)
    trace, drawn = program.visualize(tmp_path / "step")
    events = [one for one in json.loads(trace.read_text())["traceEvents"] if one["ph"] == "X"]
    assert sum(one["dur"] for one in events) == pytest.approx(program.cost().time)  # nothing overlaps
    assert [one["name"] for one in events if one["tid"]] == ["psum_unreduced[x]"]
    assert ElementTree.fromstring(drawn.read_text()).tag.endswith("svg")


def test_logs_are_told_of_replays() -> None:
    f = jit(lambda x: (x.exp() @ x.sum(0)).sum())
    x = device_put(torch.rand(8, 4), P("x"), mesh=MESH).requires_grad_()
    f(x)
    with communication_log() as log:
        out = f(x)
        out.backward()
    assert f.cache_info().hits == 1  # type: ignore[attr-defined]
    assert list(map(_facts, log)) == list(map(_facts, f.lower(x).collectives()))  # type: ignore[attr-defined]
    assert log.backward


def test_writes_into_what_is_closed_over_are_found_though_nothing_has_values() -> None:
    y = torch.ones(4)
    for write in (lambda x: y[1:].add_(x * 2), lambda x: y.view(2, 2)[0].copy_(x[:2])):
        with pytest.raises(RecordError, match=r"writes into a tensor of shape .* closes over"):
            jit(write).lower(torch.ones(3))
    z = torch.ones(4)[1:]
    assert "add" in jit(lambda x: z.clone().add_(x)).lower(torch.ones(3)).as_text()


def test_a_device_that_is_not_here_is_planned_as_a_cpu() -> None:
    """torch ended the process: its autograd has no guard for a device that it was not built for."""
    mesh = make_mesh((4,), ("x",), transport="abstract", device="cuda")
    w, x = TensorSpec(mesh, P(), (16, 16), torch.float32), TensorSpec(mesh, P("x"), (8, 16), torch.float32)
    program = jit(fspmd.value_and_grad(lambda w, x: F.pad(x @ w, (0, 1)).sin().sum(), argnums=(0, 1))).lower(w, x)
    assert {collective.kind for collective in program.collectives()} == {"psum"}
    assert mesh.device_type == "cuda"
    halves = [TensorSpec(mesh, p, (64, 64), torch.bfloat16) for p in (P("x"), P())]
    program, threads = jit(lambda x, w: x @ w).lower(*halves), torch.get_num_threads()
    peaks = set()
    for n in (1, 8):
        torch.set_num_threads(n)
        peaks.add(program.memory().peak)
    torch.set_num_threads(threads)
    assert peaks == {(16 * 64 + 64 * 64 + 16 * 64) * 2}  # kernels of CPUs take more
