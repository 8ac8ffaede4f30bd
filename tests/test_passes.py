"""Passes over recorded programs: the numbers and gradients stay what they were, and each pass gains what it promises.

Generated programs have what passes look for: the same done twice, changes of layout in a row, writes in between. The
judge of values is the function run without `jit`; gains are counted in the programs.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import test_global_programs as chains
import test_random_programs as bodies
import torch
import torch.nn.functional as F
from full import FULL
from hypothesis import HealthCheck, given, settings
from processes import Processes
from simulated import GRID, MESH, layouts
from torch import Tensor

from fspmd import (
    ArgumentError,
    Link,
    Mesh,
    P,
    Sharded,
    TensorSpec,
    Topology,
    all_gather,
    all_to_all,
    axis_index,
    checkpoint,
    communication_log,
    device_get,
    device_put,
    jit,
    make_mesh,
    psum,
    psum_scatter,
    reshard,
    set_mesh,
    set_topology,
    shard_map,
    topology,
    value_and_grad,
)
from fspmd.programs.capture import capture
from fspmd.programs.memory import memory_of_program
from fspmd.programs.passes import recompute
from fspmd.programs.passes.chunked import Chunked
from fspmd.programs.passes.coalesce import Coalesce
from fspmd.programs.passes.overlap import Overlap
from fspmd.programs.passes.recompute import Recompute
from fspmd.programs.passes.table import PASSES, Pass, passes_of, transform
from fspmd.programs.program import Program, copied, owner
from fspmd.programs.schedule import schedule
from fspmd.programs.steps import Aliases, in_flight, is_collective, is_view, is_wait, wait_of, written
from fspmd.redistribution.cost import moves

F64 = torch.float64
Function = Callable[..., Any]


def with_passes(passes: Any) -> Function:
    """What calls a function by way of its record, which passes have changed: twice, the second time replayed."""

    def through(f: Function, *args: Any) -> Any:
        recorded = jit(f, passes=passes)
        recorded(*args)
        out = recorded(*args)
        assert recorded.cache_info().hits
        return out

    return through


def programs_of(f: Function, *args: Any, passes: Any) -> tuple[Program, Program]:
    """The program of a function as it was recorded, and as passes have changed it."""
    return capture(f, args, {}).program, program_of(f, *args, passes=passes)


def program_of(f: Function, *args: Any, passes: Any) -> Program:
    """The program of a function as passes have changed it."""
    program = capture(f, args, {}).program
    transform(program, passes_of(passes))
    program.graph.lint()
    alive = set(program.graph.nodes)
    assert all(owner(node) in alive for node in alive if "memory" in node.meta)
    return program


def collectives(program: Program) -> list[str]:
    """The names of those that move something, in order."""
    calls = [node.meta["call"] for node in program.graph.nodes if "call" in node.meta]
    return [call.pair.name for call in calls if moves(call.pair.kernel) and call.mesh.axis_size(call.axes) > 1]


# --- generated programs -----------------------------------------------------------------------------------------------


def generated(seed: int, mesh: Mesh) -> tuple[Function, list[Tensor], list[P]]:
    """A function of three matrices with a redundant past, its arguments, and how they lie."""
    draw = random.Random(seed)
    places = layouts(mesh, 2)
    size = draw.choice([4, 5, 12])
    plan: list[tuple[str, int, int, P]] = []
    count = 3
    for _ in range(draw.randint(4, 10)):
        kind = draw.choice(["move", "move", "move", "twice", "add", "mm", "write", "write", "sum", "t"])
        last = count - 1 if draw.random() < 0.6 else draw.randrange(count)
        plan.append((kind, last, draw.randrange(count), draw.choice(places)))
        count += 1
    ends = [draw.randrange(count) for _ in range(2)] + [count - 1]

    def f(*leaves: Any) -> list[Any]:
        values = list(leaves)
        for kind, i, j, to in plan:
            values.append(_STEPS[kind](values[i], values[j], to))
        return [values[i] for i in ends]

    leaves = [
        torch.randn(size, size, dtype=F64, generator=torch.Generator().manual_seed(seed * 3 + i)) / size
        for i in range(3)
    ]
    return f, leaves, [draw.choice(places) for _ in leaves]


def _moved(x: Any, to: P) -> Any:
    return reshard(x, to) if isinstance(x, Sharded) else x


def _written(x: Any, y: Any) -> Any:
    """A write between two uses of what it was made of."""
    z = x.clone()
    before = z * 3
    z *= 1.5
    return before + z.sin() + z * 3 + y


_STEPS: dict[str, Callable[[Any, Any, P], Any]] = {
    "move": lambda x, y, to: _moved(x, to),
    "twice": lambda x, y, to: (_moved(x * 2, to) + y) + (_moved(x * 2, to) - 0.5 * x),
    "add": lambda x, y, to: x + 0.5 * y,
    "mm": lambda x, y, to: x @ y + x @ y,
    "write": lambda x, y, to: _written(x, y),
    "sum": lambda x, y, to: x * y.sum(),
    "t": lambda x, y, to: x.t() + y,
}


def whole(x: Any) -> Tensor:
    return device_get(x) if isinstance(x, Sharded) else x


def check_generated(seed: int, mesh: Mesh, passes: Any) -> None:
    """Values, and gradients by autograd through the replay, beside those of whole tensors."""
    f, leaves, specs = generated(seed, mesh)
    plain = [x.clone().requires_grad_() for x in leaves]
    mine = [device_put(x, spec, mesh=mesh).requires_grad_() for x, spec in zip(leaves, specs, strict=True)]
    expected, found = f(*plain), with_passes(passes)(f, *mine)
    for x, want in zip(found, expected, strict=True):
        torch.testing.assert_close(whole(x).detach(), want.detach(), rtol=1e-10, atol=1e-10)
    for values in (expected, found):
        sum((whole(x).sin() * (i + 1)).sum() for i, x in enumerate(values)).backward()  # type: ignore[union-attr]
    for x, y in zip(plain, mine, strict=True):
        if x.grad is None:
            assert y.grad is None or not device_get(y.grad).any()
            continue
        torch.testing.assert_close(device_get(y.grad), x.grad, rtol=1e-7, atol=1e-7)


def some_passes(seed: int) -> list[Any]:
    """Passes in any order, some of them more than once."""
    draw = random.Random(seed)
    among = [*PASSES, Overlap(512, overtake=True), Overlap(overtake=True), Recompute(256), Recompute(collectives=True)]
    return [draw.choice(among) for _ in range(draw.randint(1, 2 * len(PASSES)))]


@pytest.mark.parametrize("mesh", [MESH, GRID], ids=["x4", "x2y3"])
@pytest.mark.parametrize("seed", range(0, 1000 if FULL else 5, 5))
def test_generated_programs(mesh: Mesh, seed: int) -> None:
    for one in range(seed, seed + (5 if FULL else 3)):
        chosen = None if one % 3 == 0 else list(PASSES) if one % 3 == 1 else some_passes(one)
        try:
            check_generated(one, mesh, chosen)
        except Exception as error:
            error.add_note(f"seed {one}, passes {chosen}")
            raise


@pytest.mark.parametrize("seed", [66, 93])
def test_cotangents_of_uneven_blocks_that_differ_over_more_axes(seed: int) -> None:
    check_generated(seed, GRID, ())


@settings(
    max_examples=1000 if FULL else 6,
    deadline=None,
    derandomize=not FULL,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(bodies.programs())
def test_random_bodies(drawn: Any) -> None:
    bodies.check(*drawn, with_passes(list(PASSES)))


def test_chains_of_torch_calls_on_sharded_values() -> None:
    chains.check_seeds(range(2000 if FULL else 2), None, with_passes(list(PASSES)))


def on_processes(seeds: range) -> None:
    mesh = make_mesh((2, 2), ("x", "y"))
    x = device_put(torch.arange(32, dtype=F64).reshape(16, 2).sin(), P("x"), mesh=make_mesh((4,), ("x",)))
    before = topology()
    set_topology(SLOW)
    for body, _, _ in [*PRODUCTS.values()][:: 1 if FULL else 3]:
        f = shard_map(body, mesh=x.spec.mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False)
        y = device_put(torch.arange(384, dtype=F64).reshape(16, 3, 8).sin(), P("x"), mesh=x.spec.mesh)
        torch.testing.assert_close(device_get(with_passes(["chunked"])(f, y, W)), device_get(f(y, W)))
    set_topology(before)
    expected = device_get(small_ones(x))
    torch.testing.assert_close(device_get(with_passes(["coalesce"])(small_ones, x)), expected)
    for seed in seeds:
        check_generated(seed, mesh, list(PASSES) if seed % 2 else some_passes(seed))
        if FULL:
            chains.check_seeds([seed], 4, with_passes(list(PASSES)))


def collectives_in_order(seeds: range) -> list[Any]:
    """As they begin on this rank where passes choose by bytes, which are not alike on all ranks."""
    mesh, found = make_mesh((2, 2), ("x", "y")), []
    for seed in seeds:
        f, leaves, specs = generated(seed, mesh)
        args = [device_put(x, spec, mesh=mesh).requires_grad_() for x, spec in zip(leaves, specs, strict=True)]
        alone: list[Any] = [Overlap(512, overtake=True), Recompute(256, collectives=True), "chunked"]
        for one in alone if FULL else alone[seed % 3 :][:1]:
            lowered = jit(f, passes=[one, Overlap(overtake=True)]).lower(*args)
            found.append([(c.kind, c.axes) for c in lowered.collectives()])
    bodies = (_own_operand, _own_use, _own_need, _equal_by_size)
    every = list(itertools.product(bodies, (8, 9), (None, ["coalesce"], [Overlap(overtake=True)])))
    for body, rows, passes in every[:: 1 if FULL else 7]:
        x = device_put(torch.ones(rows, 2, dtype=F64).cumsum(0), P(("x", "y")), mesh=mesh)
        f = shard_map(body, mesh=mesh, in_specs=P(("x", "y")), out_specs=P(("x", "y")), check_vma=False)
        torch.testing.assert_close(device_get(with_passes(passes)(f, x)), device_get(f(x)))
        found.append([(c.kind, c.axes) for c in jit(f, passes=passes).lower(x).collectives()])
    rows = device_put(torch.ones(8, 2, dtype=F64).cumsum(0), P(("x", "y")), mesh=mesh)
    for checked in (False, True) if FULL else (True,):
        f = shard_map(_own_place, mesh=mesh, in_specs=P(("x", "y")), out_specs=P(("x", "y")), check_vma=checked)
        step = value_and_grad(lambda x, f=f: f(x).square().sum())
        for passes in ([], list(PASSES)):
            torch.testing.assert_close(device_get(with_passes(passes)(step, rows)), device_get(step(rows)))
            lowered = jit(step, passes=passes).lower(rows)
            assert lowered.program.unlike == ""
            found.append([(c.kind, c.axes) for c in lowered.collectives()])
        assert len(found[-1]) < len(found[-2])
    few = [device_put(torch.ones(2, 2, dtype=F64), to, mesh=mesh) for to in (P(None, ("x", "y")), P(("x", "y")))]
    g = checkpoint(lambda u, v: u.sin() @ v + u.sin() * v.cos())
    with communication_log() as log:  # torch repeats a run until it has what it saved: not the same of empty blocks
        value_and_grad(lambda u, v: g(u, v).sum(), argnums=(0, 1))(*few)
    found.append([(c.kind, c.axes) for c in log])
    step = value_and_grad(lambda u, v: (u.sin().sum() * v.sum() * g(u, v)).sum(), argnums=(0, 1))
    for passes in (None, ["coalesce"], list(PASSES)):
        found.append([(c.kind, c.axes) for c in jit(step, passes=passes).lower(*few).collectives()])
    table = device_put(torch.ones(8, 2, dtype=F64).cumsum(0), P("x"), mesh=mesh)
    look = value_and_grad(lambda w: _used_twice(F.embedding(_IDS % 8, w)))
    for passes in ((), list(PASSES)):
        found.append([(c.kind, c.axes) for c in jit(look, passes=passes).lower(table).collectives()])
        assert len(found[-1]) == 1  # it is settled once, passes or not
        torch.testing.assert_close(device_get(with_passes(passes)(look, table)), device_get(look(table)))
    f = shard_map(lambda x: psum(x.sum(), "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    assert jit(f).lower(torch.ones(8)).program.even  # whatever was uneven before
    return found


def _used_twice(x: Any) -> Any:
    return (x * x.sin()).sum()


def _own_operand(x: Tensor) -> Tensor:
    """On the first rank the operands of both sums are made otherwise."""
    y = x.sin() * 1.0 if axis_index(("x", "y")) == 0 else x.sin()
    return x * (psum(x.sin().sum(), "x") + psum(y.sum(), "x"))


def _own_use(x: Tensor) -> Tensor:
    """On the first rank one sum needs another one."""
    one = psum(x.sum(), "x")
    y = x + 0 * one if int(axis_index(("x", "y"))) == 0 else x
    return x * (one + psum(y.sum(), "x"))


def _own_need(x: Tensor) -> Tensor:
    """The first rank alone needs a sum."""
    one = psum(x.sum(), "x")
    return x + one * 0 if axis_index(("x", "y")).item() == 0 else x


def _own_place(x: Tensor) -> Tensor:
    """On the first ranks both sums are of the same row; there and elsewhere two others are of the same."""
    first, own = x.narrow(0, 0, 1), x.narrow(0, axis_index(("x", "y")) // 2, 1)
    found = [psum(one.sin().sum(), ("x", "y")) for one in (first, own, torch.narrow(x, 0, axis_index("x"), 1))]
    return x * torch.stack(found).sum() * psum(x.sin() * x, "x") * psum(x.sin() * x, "x")


def _equal_by_size(x: Tensor) -> Tensor:
    """Two rows, or fewer, and all: where blocks are uneven that is the same on some ranks."""
    few, all_ = (x.narrow(0, 0, rows) for rows in (min(2, x.shape[0]), x.shape[0]))
    return x * (psum(few.sum(), ("x", "y")) + psum(all_.sum(), ("x", "y")))


# --- which programs passes may change, and what they say of the others -----------------------------------------------


_IDS = torch.tensor([[3, 15, 0], [1, 1, 8]])
#: calls of ordinary models, of a value of 16 by 16
_MODEL_CALLS: dict[str, Function] = {
    "embedding": lambda x: F.embedding(_IDS, x),
    "embedding with a padding": lambda x: F.embedding(_IDS, x, padding_idx=1),
    "a checkpointed embedding": checkpoint(lambda w: F.embedding(_IDS, w).sin()),
    "index": lambda x: x[_IDS],
    "index_select": lambda x: x.index_select(0, _IDS[0]),
    "gather": lambda x: x.gather(-1, _IDS[:1].expand(16, 3)),
    "scatter_add": lambda x: x.scatter_add(0, _IDS[:1].expand(2, 3), x[:2, :3].sin()),
    "index_add": lambda x: x.index_add(0, _IDS[0], x[:3].sin()),
    "cross_entropy": lambda x: F.cross_entropy(x.repeat(3, 1)[:6], _IDS.flatten()),
    "argmax": lambda x: x.sum() * x.argmax(-1),
    "topk": lambda x: x.topk(2).values.sum() * x,
    "causal mask": lambda x: x.masked_fill(torch.ones(16, 16, dtype=torch.bool).triu(1), -9.0).softmax(-1),
    "repeated rows": lambda x: x.repeat_interleave(torch.arange(16), dim=0, output_size=120),
}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", _MODEL_CALLS)
def test_model_code_is_the_same_on_all_ranks(name: str) -> None:
    """So that passes may change its collectives: what ranks index, mask and count is no way of their own."""
    call = _MODEL_CALLS[name]
    torch.manual_seed(0)
    x = torch.randn(16, 16, dtype=F64)

    def step(x: Any) -> Any:
        return value_and_grad(lambda x: call(x).sin().sum() * call(x).sum())(x)

    passes = ["equal_steps", "rewrites", "dead_code", "coalesce"]
    for mesh in (make_mesh((2, 2), ("x", "y")), make_mesh((4,), ("x",)))[: 2 if FULL else 1]:
        for spec in (P(mesh.axis_names), P(None, "x")):
            args = (device_put(x, spec, mesh=mesh),)
            program = jit(step, passes=()).lower(*args).program
            assert (program.unlike, program.uneven) == ("", "")
        torch.testing.assert_close(device_get(with_passes(passes)(step, *args)), step(x))


def test_a_language_model_has_each_sum_once() -> None:
    """The sum that a vocabulary-parallel embedding leaves pending, which two functions use, and packs of small ones."""
    mesh = make_mesh((2,), ("tp",))
    w, ids = (device_put(x, P(spec), mesh=mesh) for x, spec in ((torch.randn(16, 4, dtype=F64), "tp"), (_IDS, None)))

    def step(w: Any) -> Any:
        return value_and_grad(lambda w: _settled_twice(F.embedding(ids, w)))(w)

    def pair(w: Any) -> Any:
        found = F.embedding(ids, w), F.embedding(ids, w * 2)
        return [reshard(x, P()) for x in found]

    default = ("equal_steps", "rewrites", "dead_code")
    found = [len(jit(f, passes=p).lower(w).collectives()) for f in (step, pair) for p in ((), (*default, "coalesce"))]
    assert found == [2, 1, 2, 1]


def _settled_twice(x: Any) -> Any:
    return (reshard(x, P()) * reshard(x, P()).sin()).sum()


def _learns(x: Tensor) -> Tensor:
    """The second sum is as the first, nothing needs the third, and Python asks for the rank."""
    one = x if int(axis_index("x")) else x * 1
    found = psum(x, "x") * psum(x, "x")
    psum(one, "x")
    return found


def _product(to: P) -> Function:
    def f(x: Any) -> Any:
        h = x @ x.t()
        return reshard(h, P()).sin(), reshard(reshard(h, P()), to)

    return f


def _learns_length(x: Tensor) -> Tensor:
    return x + psum(x.narrow(0, 0, axis_index("x") % 1 + 1), "x")


_UNLIKE = "leaves alone {}; ranks may have other steps: {} (test_passes.py:"
#: functions of values that lie so on (4,), of so many rows, and what the text of their programs says
_LEFT: dict[str, tuple[Function, P, int, list[str]]] = {
    "Python has learnt the rank": (
        shard_map(_learns, in_specs=P("x"), out_specs=P("x"), check_vma=False),
        P("x"),
        8,
        [
            "coalesce " + _UNLIKE.format("all collectives", "Python has read a value that is made of axis_index"),
            "chunked " + _UNLIKE.format("all matmuls", "Python has read a value that is made of axis_index"),
            "equal_steps leaves this alone: ranks may have other steps; it is equal to %4\n",
            "dead_code leaves this alone: ranks may have other steps, and may need it\n",
        ],
    ),
    **{
        f"a length that is the rank's, {'checked' if checked else 'unchecked'}": (
            shard_map(_learns_length, in_specs=P("x"), out_specs=P("x"), check_vma=checked),
            P("x"),
            8,
            ["coalesce " + _UNLIKE.format("all collectives", "Python has read a value that is made of axis_index")],
        )
        for checked in (False, True)
    },
    "blocks are empty": (
        _product(P("x")),
        P(None, "x"),
        9,
        ["rewrites " + _UNLIKE.format("collectives in a row", "f64[9, 9@x] has empty blocks")],
    ),
    "blocks are uneven": (
        _product(P("x")),
        P(None, "x"),
        10,
        ["chunked leaves alone all matmuls; ranks may have blocks of other shapes: f64[10, 10@x] has blocks of diff"],
    ),
    "a sum is used, and scattered": (
        _product(P("x")),
        P(None, "x"),
        8,
        [
            "rewrites leaves this alone: (all-reduce, slice: reduce-scatter) other steps use %",
            "overlap leaves this alone: nothing could be computed while it is under way, with at most 536,870,912",
        ],
    ),
    "copies take longer": (
        lambda x: (reshard(x, P()), reshard(x * 2, P())),
        P("x"),
        1 << 10,
        ["coalesce leaves this alone: copies would take longer than to begin it after %"],
    ),
}


@pytest.mark.parametrize("name", _LEFT)
def test_the_text_tells_what_passes_leave_alone_and_why(name: str) -> None:
    f, spec, n, expected = _LEFT[name]
    mesh = make_mesh((4,), ("x",), transport="abstract")
    with set_mesh(mesh):
        texts = [jit(f, passes=p).lower(TensorSpec(mesh, spec, (n, n), F64)).as_text() for p in (PASSES, ["coalesce"])]
    assert [line for line in expected if not any(line in text for text in texts)] == []


@pytest.mark.skipif(not FULL, reason="a sample runs in test_jit, which has processes already")
def test_on_processes() -> None:
    with Processes(4) as pool:
        for seed in range(0, 400, 20):
            pool.run(on_processes, range(seed, seed + 20))
            first, *others = pool.run(collectives_in_order, range(seed, seed + 20))
            assert all(one == first for one in others)


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_finds_nothing_in_what_it_has_changed(name: str) -> None:
    """Nor do the default ones need another round."""
    for seed in range(12 if FULL else 1):
        f, leaves, specs = generated(seed, MESH)
        args = [device_put(x, spec, mesh=MESH).requires_grad_() for x, spec in zip(leaves, specs, strict=True)]
        assert not PASSES[name](program_of(f, *args, passes=[name]))


@pytest.mark.parametrize("seed", range(12 if FULL else 1))
def test_passes_in_any_order_leave_a_sound_program(seed: int) -> None:
    f, leaves, specs = generated(seed, MESH)
    args = [device_put(x, spec, mesh=MESH).requires_grad_() for x, spec in zip(leaves, specs, strict=True)]
    program_of(f, *args, passes=some_passes(seed))


# --- memory -----------------------------------------------------------------------------------------------------------


def _memory(f: Function, *args: Any) -> tuple[Program, Aliases, dict[str, Any]]:
    program = capture(f, args, {}).program
    nodes: dict[str, Any] = {}
    for node in program.graph.nodes:
        nodes.setdefault(node.name.split("_")[0], []).append(node)
    return program, Aliases(program), nodes


def test_who_shares_memory_and_who_writes_into_it() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        made = x.exp()
        view = made.t()
        before = made.sin()
        view.mul_(2)
        halves = made.split(1)
        halves[0].neg_()
        return before, y.cos()

    _, memory, nodes = _memory(f, torch.ones(2, 2), torch.ones(2))
    made, view, before, cos = (nodes[name][0] for name in ("exp", "t", "sin", "cos"))
    (write,), (flip,) = nodes["mul"], nodes["neg"]
    assert written(write) == [view]
    assert memory.of(made) is memory.of(view) is memory.of(write) is memory.of(flip)
    assert memory.of(before) is not memory.of(made)
    assert memory.is_written(made, made, flip)
    assert memory.is_written(view, write)
    assert not memory.is_written(made, made, write)
    assert not memory.is_written(before, before)
    assert memory.is_in_results(before)
    assert memory.is_in_results(cos)
    assert not memory.is_in_results(made)
    assert all(memory.is_outside(x) for x in nodes["x1"] + nodes["x0"])


def test_simulated_ranks_put_together_share_memory_with_all_their_blocks() -> None:
    def body(x: Tensor) -> Tensor:
        y = x.clone()
        y[:1] += psum(y.sum(0), "x")
        return y

    f = shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    program, memory, _ = _memory(f, device_put(torch.ones(10, 2), P("x"), mesh=MESH))  # uneven
    writes = [node for node in program.graph.nodes if written(node)]
    assert writes
    (end,) = program.results
    assert all(memory.of(x) is memory.of(end) for node in writes for x in written(node))


# --- each pass --------------------------------------------------------------------------------------------------------


def of_blocks(mesh: Mesh = MESH, out: P = P("x"), **options: Any) -> Function:  # noqa: B008
    return shard_map(mesh=mesh, in_specs=P("x"), out_specs=out, **options)


def check_gain(f: Function, x: Any, passes: Sequence[str | Pass], before: list[str], after: list[str]) -> Program:
    """The collectives of a function without and with passes, whose values stay the same."""
    was, now = programs_of(f, x, passes=passes)
    assert collectives(was) == before
    assert collectives(now) == after
    for want, got in zip(_leaves(f(x)), _leaves(with_passes(passes)(f, x)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    return now


def _leaves(out: Any) -> list[Tensor]:
    return [whole(x) for x in (out if isinstance(out, tuple) else (out,))]


X = device_put(torch.arange(32, dtype=F64).reshape(16, 2).sin(), P("x"), mesh=MESH)


def test_dead_code() -> None:
    @of_blocks()
    def f(x: Tensor) -> Tensor:
        psum(x, "x").sin()
        scratch = x.clone()
        scratch += 1
        kept = x.clone()
        kept[:1] = 0
        return kept * 2

    now = check_gain(f, X, ["dead_code"], ["psum"], [])
    assert sum(len(written(node)) for node in now.graph.nodes) == 1


def test_dead_code_keeps_draws_and_writes_into_arguments() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        torch.rand(2)
        y.view(-1).add_(1)
        return torch.rand_like(x)

    torch.manual_seed(0)
    x, y, z = torch.ones(3), torch.zeros(2), torch.zeros(2)
    expected = [f(x, y), f(x, y), f(x, y)]
    torch.manual_seed(0)
    recorded = jit(f, passes=["dead_code"])
    assert all(torch.equal(recorded(x, z), want) for want in expected)
    assert torch.equal(y, z)


def test_one_collective_for_equal_inputs() -> None:
    @of_blocks()
    def f(x: Tensor) -> Tensor:
        a, b = psum(x.sin(), "x"), psum(x.sin(), "x")
        y = x.clone()
        c = psum(y, "x")
        y += 1
        return a + b + c + psum(y, "x") + psum(x.sin() * 2, "x")

    check_gain(f, X, ["equal_steps"], ["psum"] * 5, ["psum"] * 4)


def test_results_stay_apart_where_users_may_write_into_them() -> None:
    @of_blocks(out=(P(), P()))
    def f(x: Tensor) -> Any:
        return psum(x, "x"), psum(x, "x")

    a, b = with_passes(None)(f, X)
    a.local.add_(1)
    assert not torch.equal(device_get(a), device_get(b))


def test_what_checkpoint_computes_again_is_computed_again() -> None:
    from fspmd import grad

    def f(x: Sharded) -> Any:
        return grad(checkpoint(lambda x: (reshard(x, P()).sin() ** 2).sum()))(x)

    was, now = programs_of(f, X, passes=None)
    assert collectives(was).count("all_gather_invariant") == collectives(now).count("all_gather_invariant") == 2


REPLICATED = device_put(torch.arange(32, dtype=F64).reshape(16, 2).sin(), P(), mesh=MESH)
PENDING = device_put(torch.arange(32, dtype=F64).reshape(16, 2).sin(), P(unreduced={"x"}), mesh=MESH)
COLUMNS = P(None, "x")
BOTH = device_put(torch.ones(12, 6, dtype=F64).cumsum(0), P(("x", "y")), mesh=GRID)
OF_BOTH = device_put(torch.ones(12, 6, dtype=F64).cumsum(0), P(unreduced={"x", "y"}), mesh=GRID)
#: argument, the layouts that it goes through, collectives before, and after
ROWS: dict[str, tuple[Sharded, list[P], list[str], list[str]]] = {
    "all-reduce, slice": (PENDING, [P(), P("x")], ["psum_unreduced"], ["psum_scatter"]),
    "slice, gather": (REPLICATED, [P("x"), P()], ["all_gather_invariant"], []),
    "gather, slice": (X, [P(), P("x")], ["all_gather_invariant"], []),
    "and again": (X, [P(), P("x"), P(), P("x")], ["all_gather_invariant"] * 2, []),
    "all-to-all, and back": (
        device_put(torch.ones(4, 8, dtype=F64).cumsum(1), P("x"), mesh=MESH),
        [COLUMNS, P("x")],
        ["all_to_all"] * 2,
        [],
    ),
    "sums over two axes": (OF_BOTH, [P(unreduced={"x"}), P()], ["psum_unreduced"] * 2, ["psum_unreduced"]),
    "gathers over two axes": (BOTH, [P("x"), P()], ["all_gather_invariant"] * 2, ["all_gather_invariant"]),
    "scatters over two axes": (
        OF_BOTH,
        [P("y", unreduced={"x"}), P(("y", "x"))],
        ["psum_scatter_unreduced"] * 2,
        ["psum_scatter_unreduced"],
    ),
    "a slice of other rows": (X, [P(), COLUMNS], ["all_gather_invariant"], ["all_gather_invariant"]),
}


@pytest.mark.parametrize("name", ROWS)
def test_collectives_in_a_row(name: str) -> None:
    x, path, before, after = ROWS[name]

    def f(x: Sharded) -> Sharded:
        for spec in path:
            x = reshard(x, spec)
        return x.t() * 2

    check_gain(f, x, ["rewrites"], before, after)


def test_what_is_used_elsewhere_is_not_rewritten() -> None:
    def f(x: Sharded) -> Any:
        total = reshard(x, P())
        return reshard(total, P("x")) * 2, total * 3

    check_gain(f, PENDING, None, ["psum_unreduced"], ["psum_unreduced"])


def test_an_argument_is_not_a_result_where_it_was_none() -> None:
    @jit
    def f(x: Sharded) -> Sharded:
        return reshard(reshard(x, P()), P("x"))

    f(X)
    out = f(X)
    out.local.add_(1)
    assert not torch.equal(device_get(out), device_get(X))


def small_ones(x: Sharded) -> Any:
    return shard_map(_small_ones, mesh=x.spec.mesh, in_specs=P("x"), out_specs=P("x"))(x)


def _small_ones(x: Tensor) -> Tensor:
    """Of every kind some, of several shapes, with steps between that use them, and one that waits for another."""
    total, other = psum(x, "x"), psum(x[:1].sin(), "x")
    whole, more = all_gather(x, "x", axis=1, tiled=True), all_gather(x[:2], "x", axis=0, tiled=True)
    scaled = total * 2
    late = psum(x + scaled, "x")
    parts, halves = psum_scatter(x, "x", tiled=True), psum_scatter(x.t().repeat(2, 1) * 3, "x", tiled=True)
    turned, back = all_to_all(x, "x", 0, 1, tiled=True), all_to_all(x.exp(), "x", 0, 0, tiled=True)
    values = (total, other, whole, more, late, scaled, parts, halves, turned, back)
    return torch.stack([value.sin().sum() * (i + 1) for i, value in enumerate(values)])


def test_small_collectives_as_one() -> None:
    before = ["psum"] * 2 + ["all_gather"] * 2 + ["psum"] + ["psum_scatter"] * 2 + ["all_to_all"] * 2
    after = ["psum", "all_gather", "psum", "psum_scatter", "all_to_all"]
    check_gain(small_ones, X, ["coalesce"], before, after)
    check_gain(small_ones, X, [Coalesce(bucket=X.local.nbytes)], before, before)


def test_steps_wait_for_what_was_packed_and_writes_for_what_it_reads() -> None:
    @of_blocks(out=P())
    def f(x: Tensor) -> Tensor:
        y = x.clone()
        first = psum(y, "x")
        y += 1
        first = first * 2
        second = psum(x.sin(), "x")
        y *= second
        return first + second + psum(y, "x")

    check_gain(f, X, ["coalesce"], ["psum"] * 3, ["psum"] * 2)


def test_large_collectives_stay_alone() -> None:
    big = device_put(torch.ones(4 << 18, 8), P("x"), mesh=MESH)
    f = of_blocks(out=P())(lambda x: psum(x, "x") + psum(x * 2, "x"))
    fast = Topology(Link(1.0, 450e3), launch=1.0)
    before = topology()
    set_topology(fast)
    try:
        assert collectives(programs_of(f, big, passes=["coalesce"])[1]) == ["psum"] * 2
    finally:
        set_topology(before)


@pytest.mark.parametrize("what", [psum, all_gather, psum_scatter], ids=lambda what: what.__name__)
def test_packing_takes_no_longer_by_the_model_whatever_is_first(what: Function) -> None:
    """Of large ones the copies are dear; small ones are packed across them."""
    mesh = make_mesh((8,), ("x",), transport="abstract")
    tiled = {} if what is psum else {"tiled": True}
    f = shard_map(
        lambda *xs: tuple(what(x, "x", **tiled) for x in xs), mesh=mesh, in_specs=P("x"), out_specs=P("x"),
        check_vma=False,
    )  # fmt: skip
    for sizes in ((1 << 26, 64, 64), (64, 1 << 26, 64), (64, 64, 1 << 26), (1 << 26, 64, 1 << 23)):
        args = [TensorSpec(mesh, P("x"), (size,), torch.float32) for size in sizes]
        whole, packed = (jit(f, passes=p).lower(*args) for p in ([], [Coalesce(1 << 40)]))
        assert packed.cost().time < whole.cost().time or sizes[-1] > 64
        assert packed.cost().time <= whole.cost().time
        assert len(packed.collectives()) <= (2 if sizes[-1] == 64 else 3)


def flights(program: Program) -> list[int]:
    """Of each collective under way the steps that compute meanwhile, in the order in which they begin."""
    nodes = list(program.graph.nodes)
    found = []
    for i, node in enumerate(nodes):
        if in_flight(node):
            wait = wait_of(node)
            assert wait is not None
            steps = nodes[i + 1 : nodes.index(wait)]
            found.append(sum(not (is_view(x) or is_wait(x) or is_collective(x)) for x in steps))
    return found


@of_blocks(out=P())
def layers(x: Tensor) -> Tensor:
    """Gathers of what is there from the beginning, each followed by work."""
    total = x
    for i in range(3):
        whole = all_gather(x[i : i + 1], "x", axis=0, tiled=True)
        total = (total * whole.sum()).tanh() + 1
    return psum(total, "x") * psum(total.exp(), "x")


def test_issue_early_wait_late() -> None:
    before = ["all_gather"] * 3 + ["psum"] * 2
    now = check_gain(layers, X, ["overlap"], before, before)
    assert flights(now) == [4, 8, 1]  # the first gather and the second sum are needed at once
    names = [node.meta["call"].pair.name for node in now.graph.nodes if in_flight(node)]
    assert names == ["all_gather"] * 2 + ["psum"]


@pytest.mark.parametrize("results", [0, 1, 2])
def test_bytes_under_way_stay_within_the_budget(results: int) -> None:
    size = 4 * 2 * 8
    now = programs_of(layers, X, passes=[Overlap(budget=results * size)])[1]
    assert flights(now) == {0: [], 1: [4, 4, 1], 2: [4, 8, 1]}[results]


def under_way(program: Program) -> int:
    """The most bytes of results that are awaited at once."""
    held, most = 0, 0
    for node in program.graph.nodes:
        wait = wait_of(node) if in_flight(node) else node if is_wait(node) else None
        if wait is not None:
            held += wait.meta["value"].nbytes * (-1 if wait is node else 1)
            most = max(most, held)
    assert not held
    return most


@pytest.mark.parametrize("overtake", [False, True])
def test_bytes_under_way_are_counted_while_one_lands_and_another_begins(overtake: bool) -> None:
    flown = 0
    for seed in range(200 if FULL else 8):
        f, leaves, specs = generated(seed, MESH)
        program = capture(
            f, tuple(device_put(x, to, mesh=MESH) for x, to in zip(leaves, specs, strict=True)), {}
        ).program
        for budget in (0, 64, 256, 384, 1024):
            tried = copied(program)
            flown += Overlap(budget, overtake)(tried)
            assert under_way(tried) <= budget
    assert flown


def test_gathers_overtake_where_they_may() -> None:
    """Those of the next layer begin before the sum of this one is there."""

    @of_blocks(out=P())
    def f(x: Tensor) -> Tensor:
        total = x.sum(0)
        for i in range(3):
            total = psum(total.sin() * all_gather(x[i : i + 1], "x", axis=0, tiled=True).sum(), "x")
        return total

    before = ["all_gather", "psum"] * 3
    ordered = check_gain(f, X, ["overlap"], before, before)
    assert max(flights(ordered), default=0) <= 2
    now = check_gain(f, X, [Overlap(overtake=True)], before, ["all_gather"] * 3 + ["psum"] * 3)
    assert len(flights(now)) == 3


def test_an_operand_is_not_written_into_while_it_is_under_way() -> None:
    @of_blocks(out=P())
    def f(x: Tensor) -> Tensor:
        y = x * 3
        total = psum(y, "x")
        z = x.exp().sin()
        y += 1
        return total * psum(y * z, "x")

    now = check_gain(f, X, ["overlap"], ["psum"] * 2, ["psum"] * 2)
    nodes = list(now.graph.nodes)
    (write,) = (i for i, node in enumerate(nodes) if written(node))
    assert [is_wait(node) for node in nodes[:write]].count(True) == 1
    assert flights(now)[0] == 2


def deep(x: Any, w: Any, layers: int = 4) -> Any:
    """Layers of which backward needs matmuls, which are dear, and functions of elements, which are not."""
    for _ in range(layers):
        x = ((x @ w).sin() * 2).tanh().exp()
    return x.mean()


def _deep_arguments() -> tuple[Sharded, Sharded]:
    w = torch.eye(64, dtype=F64).cumsum(0) / 64
    return device_put(torch.ones(256, 64, dtype=F64), P("x"), mesh=MESH), device_put(w, P(), mesh=MESH).requires_grad_()


def kept_bytes(program: Program) -> int:
    memories = {owner(node) for node in program.kept} - {owner(node) for node in (*program.inputs, *program.results)}
    return sum(node.meta["value"].nbytes for node in memories)


def test_recompute_within_a_budget() -> None:
    """First what is cheap: with two values a layer no matmul is repeated. Less is kept, less is held at the peak."""
    x, w = _deep_arguments()
    size = x.local.shards[0].nbytes
    before = programs_of(deep, x, w, passes=["dead_code"])[1]
    assert kept_bytes(before) == 12 * size  # x @ w, tanh and exp, each
    peaks = []
    for budget, again in ((12, 0), (8, 0), (4, 4), (0, 4)):
        now = programs_of(deep, x, w, passes=["dead_code", Recompute(budget * size)])[1]
        assert kept_bytes(now) == budget * size
        matmuls = [node for node in now.graph.nodes if node.target is torch.ops.aten.mm.default]
        assert len(matmuls) == 4 + 7 + again
        peaks.append(memory_of_program(now).peak)
        total = with_passes(["dead_code", Recompute(budget * size)])(deep, x, w)
        (gradient,) = torch.autograd.grad(total.local, [w.local])
        (expected,) = torch.autograd.grad(deep(x, w).local, [w.local])
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
    assert peaks[2] < peaks[1] < peaks[0]


def test_recompute_in_steps_that_compute_their_own_gradients() -> None:
    x, w = (y.detach() for y in _deep_arguments())
    step = value_and_grad(deep, argnums=1)
    was, now = programs_of(step, x, w, passes=["dead_code", Recompute(4 * x.local.shards[0].nbytes)])
    assert not now.deferred
    assert memory_of_program(now).peak < memory_of_program(was).peak
    for found, want in zip(with_passes([Recompute()])(step, x, w), step(x, w), strict=True):
        torch.testing.assert_close(device_get(found), device_get(want), rtol=1e-12, atol=1e-12)


def test_recompute_without_a_budget_keeps_what_lowers_the_peak() -> None:
    """Nothing kept would be all computed again at once."""
    mesh = make_mesh((4,), ("x",), transport="abstract")
    args = TensorSpec(mesh, P("x"), (1024, 64), F64), TensorSpec(mesh, P(), (64, 64), F64)

    def lowered(*passes: Any) -> Any:
        return jit(value_and_grad(functools.partial(deep, layers=12), argnums=1), passes=passes).lower(*args)

    peaks = [lowered(Recompute(budget)).memory().peak for budget in (0, 1 << 18, 1 << 20)]
    found = lowered("recompute")
    assert found.memory().peak <= min(peaks)
    assert found.memory().peak < 0.6 * lowered().memory().peak
    assert found.cost().time < lowered(Recompute(0)).cost().time


def test_budgets_that_drop_the_same_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of two steps keeps few values, so most budgets drop none of them, or all."""
    measured: list[int] = []

    def measure(program: Program, **options: Any) -> Any:
        found = memory_of_program(program, **options)
        measured.append(found.peak)
        return found

    def peak(recomputation: Recompute) -> int:
        step = jit(value_and_grad(lambda x: x.sin().exp().sum()), passes=[recomputation])
        return int(step.lower(torch.ones(100, dtype=F64)).memory().peak)

    least = min(map(peak, map(Recompute, (0, 400, 800, 1600, 3200))))
    monkeypatch.setattr(recompute, "memory_of_program", measure)
    assert peak(Recompute()) == least
    assert 0 < len(measured) < 4


def test_smaller_buckets_are_not_tried_where_the_largest_packs_nothing() -> None:
    x = device_put(torch.ones(8, dtype=F64), P("x"), mesh=MESH)
    f = shard_map(lambda x: psum(psum(x, "x").sin(), "x"), mesh=MESH, in_specs=P("x"), out_specs=P())
    tried: list[Program] = []
    assert Coalesce().before(capture(f, (x,), {}).program, tried.append).bucket == Coalesce().bucket
    assert not tried


def test_recompute_repeats_no_draws_and_collectives_only_when_asked() -> None:
    def f(x: Sharded, w: Sharded) -> Any:
        return (torch.nn.functional.dropout(x, 0.5) @ reshard(w, P())).sin().sum()

    x, _ = _deep_arguments()
    w = device_put(torch.eye(64, dtype=F64).cumsum(0), P("x"), mesh=MESH).requires_grad_()
    x.requires_grad_()
    whole, mask = 64 * 64 * 8, 256 * 64 // 4
    assert kept_bytes(programs_of(f, x, w, passes=[Recompute(0)])[1]) in (whole + 8 * mask, whole + mask)
    asked = programs_of(f, x, w, passes=[Recompute(0, collectives=True)])[1]
    assert kept_bytes(asked) in (8 * mask, mask)
    assert collectives(asked).count("all_gather_invariant") == 2


SLOW = Topology(Link(0.001, 10.0), launch=0.001, memory=1e9, flops=1e3)
W = torch.arange(48, dtype=F64).reshape(8, 6).cos()
#: body of blocks [4, 3, 8] of x and [8, 6] of w, what communicates, and in how many chunks
PRODUCTS: dict[str, tuple[Function, str, int]] = {
    "gather of rows": (lambda x, w: all_gather(x[:, 0], "x", axis=0, tiled=True) @ w, "all_gather", 4),
    "of three dims": (lambda x, w: all_gather(x, "x", axis=0, tiled=True) @ w, "all_gather", 4),
    "of inner rows": (lambda x, w: all_gather(x.transpose(0, 1), "x", axis=1, tiled=True) @ w, "all_gather", 4),
    "with a bias": (
        lambda x, w: torch.nn.functional.linear(all_gather(x[:, 0], "x", axis=0, tiled=True), w.t(), w[0]),
        "all_gather",
        4,
    ),
    "of heads": (
        lambda x, w: torch.einsum(
            "bsd,dhk->bhsk", all_gather(x.transpose(0, 1), "x", axis=1, tiled=True), w.view(8, 2, 3)
        ),
        "all_gather",
        4,
    ),
    "sum": (lambda x, w: psum(x @ w, "x"), "psum_varying", 4),
    "sum of two": (
        lambda x, w: psum_scatter(x.repeat(2, 1, 1) @ w.flip(0) + x.repeat(2, 1, 1) @ w, "x", tiled=True),
        "psum_scatter",
        2,
    ),
    "scatter": (lambda x, w: psum_scatter(x.repeat(2, 1, 1) @ w, "x", tiled=True), "psum_scatter", 2),
    "scatter of inner rows": (
        lambda x, w: psum_scatter(x.repeat(1, 8, 1) @ w, "x", scatter_dimension=1, tiled=True),
        "psum_scatter",
        2,
    ),
    "scatter of heads": (
        lambda x, w: psum_scatter(
            torch.einsum("bshk,hkd->bsd", x.repeat(1, 8, 1).view(4, 24, 2, 4), w.view(2, 4, 6)),
            "x",
            scatter_dimension=1,
            tiled=True,
        ),
        "psum_scatter",
        2,
    ),
}


@pytest.fixture
def slow() -> Any:
    """Links and arithmetic so slow that chunks pay."""
    before = topology()
    set_topology(SLOW)
    yield
    set_topology(before)


def _time(program: Program) -> float:
    return max(event.start + event.duration for event in schedule(program))


@pytest.mark.one_of(4)
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("name", PRODUCTS)
def test_matmuls_in_chunks(name: str) -> None:
    """Values and gradients, of programs that keep what was gathered for them; all but one chunk are overlapped."""
    body, what, chunks = PRODUCTS[name]

    def f(x: Sharded) -> Any:
        return shard_map(body, mesh=MESH, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False)(x, W)

    x = device_put(torch.arange(384, dtype=F64).reshape(16, 3, 8).sin(), P("x"), mesh=MESH)
    for passes in (["chunked"], ["equal_steps", "rewrites", "dead_code", "chunked", "overlap"]):
        was, now = programs_of(f, x, passes=())[1], check_gain(f, x, passes, [what], [what] * chunks)
        assert len([steps for steps in flights(now) if steps]) >= chunks - 1
        assert not PASSES["dead_code"](now)
        assert _time(now) < _time(was)
        y, z = (x.detach().requires_grad_() for _ in range(2))
        device_get(with_passes(passes)(f, y)).sin().sum().backward()
        device_get(f(z)).sin().sum().backward()
        torch.testing.assert_close(device_get(y.grad), device_get(z.grad), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("slow")
def test_what_was_gathered_for_several_is_there_for_all() -> None:
    def body(x: Tensor) -> Tensor:
        whole = all_gather(x, "x", axis=0, tiled=True)
        return whole @ W @ W.t() + (whole @ W.flip(0)) @ W.t() * whole

    f = shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    x = device_put(torch.arange(384, dtype=F64).reshape(16, 3, 8).sin(), P("x"), mesh=MESH)
    check_gain(f, x, ["chunked"], ["all_gather"], ["all_gather"] * 4)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("mesh", [MESH, GRID] if FULL else [GRID])
def test_a_layer_whose_sequence_is_cut_is_computed_in_chunks(mesh: Mesh) -> None:
    """Of a transformer: each of its gathers and scatters of activations, forward and backward."""
    tp, width = "x", 8
    torch.manual_seed(0)
    leaves = [torch.randn(shape, dtype=F64) for shape in [(4, 16, 8), (8, 4, 2), (4, 2, 8), (8, 16), (8, 16), (16, 8)]]
    cut, whole_ = P(None, tp, None), P(None, None, None, reduced={tp})
    specs = [cut, P(None, tp), P(tp), P(None, tp), P(None, tp), P(tp)]

    def layer(x: Any, wq: Any, wo: Any, gate: Any, up: Any, down: Any) -> Any:
        h = _moved(F.layer_norm(x, (width,)), whole_)
        q = torch.einsum("bsd,dhk->bhsk", h, wq)
        a = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        x = x + _moved(torch.einsum("bhsk,hkd->bsd", a, wo), cut)
        h = _moved(F.layer_norm(x, (width,)), whole_)
        return x + _moved((F.silu(F.linear(h, gate.t())) * (h @ up)) @ down, cut)

    mine = [device_put(x, spec, mesh=mesh) for x, spec in zip(leaves, specs, strict=True)]
    step = value_and_grad(lambda *given: layer(*given).sin().sum(), argnums=tuple(range(len(leaves))))
    for passes in ([*PASSES], ["overlap", "chunked", "coalesce"], ["chunked"])[: 3 if FULL else 1]:
        value, gradients = with_passes(passes)(step, *mine)
        expected, wanted = step(*leaves)
        torch.testing.assert_close(whole(value), expected)
        for x, y in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(whole(x), y)
    was, now = programs_of(step, *mine, passes=["chunked"])
    moved = [node for node in was.graph.nodes if is_collective(node, "gather_once", "reduce_scatter")]
    assert len(moved) == 8  # two of each, forward and backward
    assert not [node for node in moved if node.name in {one.name for one in now.graph.nodes}]


def test_matmuls_stay_whole_where_chunks_do_not_pay() -> None:
    f = of_blocks()(lambda x: all_gather(x, "x", axis=0, tiled=True) @ W[:2])
    check_gain(f, X, ["chunked"], ["all_gather"], ["all_gather"])


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("what", [psum, psum_scatter])
def test_a_product_to_which_a_matrix_is_added_stays_whole(what: Function) -> None:
    added = torch.arange(96, dtype=F64).reshape(16, 6)

    def body(x: Tensor) -> Tensor:
        one = torch.addmm(added, all_gather(x[:, 0], "x", axis=0, tiled=True), W)
        return what(one.addmm(one, W[:6]), "x", **({"tiled": True} if what is psum_scatter else {}))

    x = device_put(torch.arange(384, dtype=F64).reshape(16, 3, 8).sin(), P("x"), mesh=MESH)
    name = "psum_varying" if what is psum else "psum_scatter"
    check_gain(of_blocks(check_vma=False)(body), x, ["chunked"], ["all_gather", name], ["all_gather", name])


def _mlp(x: Any, up: Any, down: Any) -> Any:
    y = F.gelu(reshard(x, P("dp", None, None)) @ up)
    return x + reshard(y @ down, P("dp", "tp", None))


def _mlp_of_cut_weights(x: Any, up: Any, down: Any) -> Any:
    return _mlp(x, reshard(up, P(None, "tp")), reshard(down, P("tp", None)))


@pytest.mark.parametrize(
    ("first", "others"),
    [
        ("chunked", []),
        ("chunked", ["overlap"]),
        ("chunked", [Overlap(overtake=True)]),
        ("chunked", ["coalesce", Overlap(1 << 24, True)]),
        ("coalesce", ["overlap"]),
    ],
)
def test_passes_leave_alone_what_later_ones_hide(first: str, others: Any) -> None:
    """By the schedule no program takes longer for them, and some take less."""
    mesh = make_mesh((4, 8), ("dp", "tp"), transport="abstract")
    gains = []
    for f, weights in ((_mlp, (P(None, "tp"), P("tp", None))), (_mlp_of_cut_weights, (P("dp", "tp"), P("tp", "dp")))):
        for rows, width in ((2048, 4096), (256, 1024)):
            shapes = [((16, rows, width), P("dp", "tp", None)), ((width, 4 * width), weights[0])]
            shapes.append(((4 * width, width), weights[1]))
            args = [TensorSpec(mesh, spec, shape, torch.bfloat16) for shape, spec in shapes]
            step = value_and_grad(lambda *a, f=f: f(*a).square().mean(), argnums=(0, 1, 2))
            for g in (f, step):
                was, now = (jit(g, passes=[*one, *others]).lower(*args).cost().time for one in ([], [first]))
                gains.append(was - now)
    assert min(gains) >= 0
    assert max(gains) > 0


def test_packed_collectives_give_results_that_lie_as_they_did_alone() -> None:
    def body(x: Tensor) -> Tensor:
        a, b = psum(x.t(), "x"), psum(x.sin().t(), "x")
        return a.t().view(-1) + b.t().view(-1)

    f = of_blocks(out=P(), check_vma=False)(body)
    check_gain(f, X, ["coalesce"], ["psum_varying"] * 2, ["psum_varying"])


@pytest.mark.parametrize("passes", [["overlap"], ["coalesce"], [Overlap(overtake=True)], list(PASSES)], ids=str)
def test_collectives_do_not_overtake_writes_that_they_see_through_other_views(passes: Any) -> None:
    def body(x: Tensor) -> Tensor:
        y = x.clone()
        turned, flat = y.t(), y.view(-1)
        a = psum(turned, "x").t()
        flat.add_(1)
        b = psum(turned, "x").t()
        turned.sin_()
        return a + b + psum(flat, "x").view(x.shape) + y

    f = of_blocks(check_vma=False)(body)
    torch.testing.assert_close(device_get(with_passes(passes)(f, X)), device_get(f(X)))


def test_options_that_say_the_default_do_not_make_steps_differ() -> None:
    """Gradients make zeros in both of these spellings, a simulation of uneven blocks in the second alone."""

    def f(x: Tensor) -> Tensor:
        by_autograd = torch.ops.aten.zeros.default([2], dtype=F64, layout=torch.strided, device=x.device)
        return x + by_autograd.expand(16, 2) * torch.zeros(2, dtype=F64, device=x.device).expand(16, 2)

    program = jit(f, passes=["equal_steps"]).lower(torch.ones(16, 2, dtype=F64))
    assert program.as_text().count(" zeros(") == 1


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_passes_by_name_with_options_or_none() -> None:
    seen = []

    def look(program: Program) -> None:
        seen.append(len(program.steps))

    f = of_blocks(out=P())(lambda x: psum(x, "x") + psum(x, "x"))
    jit(f, passes=[look, "equal_steps", look])(X)
    assert seen == [3, 2]
    assert len(programs_of(f, X, passes=())[1].steps) == 3
    named: Any = jit(passes=(name for name in ["equal_steps"]))
    assert len(named(f).lower(X).collectives()) == 1
    for wrong, said in (
        ("dead_code", "passes=the string"),
        (["dead"], "one of equal_steps"),
        ([3], "the int 3"),
        ([Overlap], r"the class Overlap for a pass; write Overlap\(\)"),
    ):
        with pytest.raises(ArgumentError, match=said):
            jit(f, passes=wrong)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        *[(of, "a number of bytes >= 0") for of in (Coalesce, Overlap, lambda x: Recompute(x or -1))],
        (Chunked, "ints >= 1"),
        (lambda x: Overlap(overtake=x), "True or False"),
        (lambda x: Recompute(collectives=x), "True or False"),
    ],
)
@pytest.mark.parametrize("value", [-1, float("nan"), None, "1", (0,), (2.5,), [None]])
def test_options_that_are_none(make: Function, said: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"=...\\) got .*; expected {said}"):
        make(value)


@pytest.mark.parametrize("rows", [8, 5])
def test_a_loop_over_slices_sums_their_gradients_at_once(rows: int) -> None:
    """As a state space model does: eagerly each step's gradient is summed by itself."""

    def scan(decay: Any, drive: Any, readout: Any) -> Any:
        state, outs = 0, []
        for t in range(len(readout)):
            state = decay[:, t] * state + drive[:, t]
            outs.append(state @ readout[t])
        return torch.stack(outs).sin().sum()

    torch.manual_seed(0)
    plain = [torch.randn(shape, dtype=F64) for shape in ((rows, 6, 3), (rows, 6, 3), (6, 3))]
    expected = torch.func.grad(scan, argnums=(0, 1, 2))(*plain)
    mesh = make_mesh((4,), ("x",))
    given = [device_put(x, spec, mesh=mesh) for x, spec in zip(plain, (P("x"), P("x"), P()), strict=True)]
    counts = []
    for passes in (None, ["equal_steps", "rewrites", "coalesce", "dead_code"]):
        step = jit(value_and_grad(scan, argnums=(0, 1, 2)), passes=passes)
        torch.testing.assert_close(device_get(step(*given)[1]), expected)
        counts.append(len(step.lower(*given).collectives()))
    assert counts == ([6, 1] if rows == 8 else [6, 6])  # of uneven blocks ranks may not choose what to pack
