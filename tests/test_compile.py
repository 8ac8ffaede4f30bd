"""Functions that `torch.compile` has made run as they are where a mode sees torch's calls."""

from __future__ import annotations

import functools
import sys
import threading
import types
from typing import Any

import pytest
import torch
import torch._dynamo
from compile_programs import compiled_functions
from full import FULL
from torch import Tensor

from fspmd import ArgumentError, P, device_get, grad, jit, make_mesh, shard_map, vmap
from fspmd.local_view.modes import check_not_compiled
from fspmd.torch_internals import count_function_modes

MESH = make_mesh((4,), ("x",))


@pytest.mark.filterwarnings("ignore")
def test_compiled_functions_in_simulated_bodies() -> None:
    assert compiled_functions("simulation", sample=1 if FULL else 9) == []


def test_the_compiler_is_as_it_was_after_a_body() -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")

    def count(f: object) -> int:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        f()  # type: ignore[operator]
        return int(torch._dynamo.utils.counters["frames"]["total"])

    def body(x: Tensor) -> Tensor:
        if x.numel() == 1:
            raise KeyError("within")
        return shard_map(compiled, in_specs=P(), out_specs=P(), axis_names={"y"})(x)

    grid = make_mesh((2, 2), ("x", "y"))
    mapped = shard_map(body, mesh=grid, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    assert count(lambda: mapped(torch.ones(8))) == 0
    with pytest.raises(KeyError):
        mapped(torch.ones(2))
    assert count(lambda: compiled(torch.ones(2))) == 1


def test_a_body_in_one_thread_ends_while_another_runs() -> None:
    """The second body begins within the first and ends after it; the compiler's stance is of the whole process."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    begin, inside, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(x: Tensor) -> Tensor:
        inside.set()
        assert ended.wait(20)
        return compiled(x)

    def quick(x: Tensor) -> Tensor:
        begin.set()
        assert inside.wait(20)
        return compiled(x)

    found: list[Tensor] = []
    options = {"mesh": MESH, "in_specs": P("x"), "out_specs": P("x")}

    def run() -> None:
        assert begin.wait(20)
        found.append(device_get(shard_map(slow, **options)(torch.ones(4))))

    thread = threading.Thread(target=run)  # a thread that a body starts would belong to that body
    thread.start()
    shard_map(quick, **options)(torch.ones(4))
    ended.set()
    thread.join(300)
    assert torch.allclose(found[0], torch.ones(4).sin() + 1)
    assert torch._dynamo.utils.counters["frames"]["total"] == 0
    compiled(torch.ones(4))
    assert torch._dynamo.utils.counters["frames"]["total"] == 1


def test_the_first_use_of_the_compiler_within_a_body_is_told() -> None:
    torch._dynamo.utils.counters["frames"]["total"] = 1
    with pytest.raises(ArgumentError, match="compile the function outside of the body"):
        check_not_compiled("shard_map(f)")


@pytest.mark.filterwarnings("ignore")
def test_what_is_made_of_a_compiled_function_is_more_than_that_function() -> None:
    compiled = torch.compile(lambda x: x * x.sum(), backend="eager")
    x = torch.arange(4.0)
    mapped = shard_map(compiled, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    whole = torch.compiler.disable(
        device_get
    )  # Dynamo would read the cache of specs, from which garbage goes meanwhile
    cases: list[tuple[Any, torch.Tensor]] = [
        (lambda x: whole(mapped(x)), x * x),
        (vmap(compiled), x * x),
        (jit(compiled), x * 6),
        (grad(torch.compile(lambda x: (x * x).sum(), backend="eager")), 2 * x),
    ]
    for i, (made, expected) in enumerate(cases):
        torch._dynamo.reset()
        assert torch.equal(made(x), expected)
        for f in [lambda x, made=made: made(x) * 1, made][slice(None) if FULL else slice(i % 2, i % 2 + 1)]:
            assert torch.equal(torch.compile(f, backend="eager")(x), expected)


def test_compiled_functions_run_uncompiled_to_the_end_of_a_body() -> None:
    """A function that torch calls runs in the body once more, with the mode of the body."""
    import torch._dynamo.eval_frame as compiler

    stances: list[str] = []

    def body(a: torch.Tensor) -> torch.Tensor:
        torch.nn.functional.triplet_margin_with_distance_loss(
            a, a + 1, a + 2, distance_function=lambda u, v: stances.append(compiler._stance.stance) or (u - v).sum(-1)
        )
        stances.append(compiler._stance.stance)
        return a

    mesh = make_mesh((2,), ("x",), transport="simulation")
    shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(torch.ones(4, 3))
    assert set(stances) == {"force_eager"}
    assert compiler._stance.stance == "default"


def test_a_stance_that_a_body_sets_stands_outside_of_it() -> None:
    import torch._dynamo.eval_frame as compiler

    graphs: list[Any] = []
    double = torch.compile(lambda a: a * 2, backend=lambda graph, _: graphs.append(graph) or graph.forward)

    def body(a: torch.Tensor, stance: str) -> torch.Tensor:
        torch.compiler.set_stance(stance)
        with torch.compiler.set_stance("default"):
            a = double(a)
        return double(a)

    mesh = make_mesh((2,), ("x",), transport="simulation")
    for stance in ("default", "eager_on_recompile", "default"):
        call = shard_map(functools.partial(body, stance=stance), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        assert torch.equal(device_get(call(torch.ones(2))), torch.full((2,), 4.0))
        assert not graphs
        assert compiler._stance.stance == stance
    double(torch.ones(3))
    assert len(graphs) == 1


def test_a_body_runs_while_another_thread_imports_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo.eval_frame", types.ModuleType("half imported"))
    mesh = make_mesh((2,), ("x",), transport="simulation")
    call = shard_map(lambda a: a * 2, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    assert torch.equal(device_get(call(torch.ones(2))), torch.full((2,), 2.0))


def test_a_mode_that_a_body_leaves_behind_is_gone_in_the_next() -> None:
    mesh = make_mesh((2,), ("x",), transport="simulation")
    options = {"mesh": mesh, "in_specs": P("x"), "out_specs": P("x")}
    shard_map(lambda a: [torch.overrides.TorchFunctionMode().__enter__(), a][1], **options)(torch.ones(2))
    assert count_function_modes() == 1
    shard_map(lambda a: a, **options)(torch.ones(2))
    assert not count_function_modes()


def test_the_stance_of_the_user_stands_outside_of_bodies() -> None:
    import torch._dynamo.eval_frame as compiler

    mesh = make_mesh((2,), ("x",), transport="simulation")
    stances: list[str] = []
    call = shard_map(
        lambda a: [stances.append(compiler._stance.stance), a][1], mesh=mesh, in_specs=P("x"), out_specs=P("x")
    )
    for _ in range(2):
        call(torch.ones(2))
        with torch.compiler.set_stance("eager_on_recompile"):
            stances.append(compiler._stance.stance)
            call(torch.ones(2))
            stances.append(compiler._stance.stance)
        stances.append(compiler._stance.stance)
    eager, outside = "force_eager", "eager_on_recompile"
    assert stances == [eager, outside, eager, outside, "default"] * 2
    with torch.compiler.set_stance(force_backend="eager"):
        call(torch.ones(2))
        assert compiler._stance.backend == "eager"
