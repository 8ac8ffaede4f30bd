"""What else may run a recorded program: it gives the same values and gradients as the steps one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import pytest
import test_global_programs as chains
import test_passes as passes
import torch
import torch.nn.functional as F
from full import FULL
from processes import Processes
from simulated import GRID, MESH
from test_jit import REFUSED_OF_JAX, oracle, replayed
from torch import Tensor, fx

import fspmd
from fspmd import ArgumentError, P, device_put, jit
from fspmd.ops.schemas import facts_of
from fspmd.programs.passes.table import PASSES


def loss(w: Any, x: Any) -> Any:
    h = F.layer_norm(F.gelu(x @ w["a"]), (8,))
    return (h @ w["b"]).pow(2).mean() + F.dropout(h, 0.5).sum()


def _arguments(mesh: fspmd.Mesh, rows: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    a, b, x = torch.randn(4, 8), torch.randn(8, 4), torch.randn(rows, 4)
    w = {"a": device_put(a, P(), mesh=mesh), "b": device_put(b, P(None, "x"), mesh=mesh)}
    return w, device_put(x, P("x"), mesh=mesh)


def _agree(found: Any, expected: Any) -> None:
    for x, y in zip(optree.tree_leaves(found), optree.tree_leaves(expected), strict=True):
        for one, other in zip(getattr(x, "shards", [x]), getattr(y, "shards", [y]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def _check(mesh: fspmd.Mesh, rows: int, backend: Any) -> None:
    """Gradients within the record, and by autograd, against the function itself, with the numbers that it draws."""
    w, x = _arguments(mesh, rows)
    step = fspmd.value_and_grad(loss)
    recorded = jit(step, backend=backend)
    recorded(w, x)
    for _ in range(2):
        torch.manual_seed(1)
        found = recorded(w, x)
        torch.manual_seed(1)
        _agree(found, step(w, x))
    w = optree.tree_map(lambda x: x.requires_grad_(), w)
    recorded = jit(loss, backend=backend)
    recorded(w, x)
    for _ in range(2):
        gradients = []
        for f in (recorded, loss):
            torch.manual_seed(1)
            out = f(w, x)
            gradients.append(torch.autograd.grad(out, list(w.values())))
        _agree(*gradients)


def _interpreted(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Segments run as they are; those that would be compiled."""
    seen: list[fx.GraphModule] = []
    monkeypatch.setattr(torch._inductor, "compile", lambda module, values: seen.append(module) or module)
    return seen


@pytest.mark.parametrize("rows", [8, 5])
def test_functions(rows: int) -> None:
    seen: list[tuple[fx.GraphModule, int]] = []

    def backend(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        places = [node for node in module.graph.nodes if node.op == "placeholder"]
        assert len(places) == len(examples)
        seen.append((module, sum("call" in node.meta for node in module.graph.nodes)))
        return module.forward

    _check(MESH, rows, backend)
    assert len(seen) == 3  # the step; forward and backward of the loss
    assert seen[0][1] == seen[1][1] + seen[2][1] > 2


@pytest.mark.parametrize("rows", [8, 5])
def test_segments_between_collectives(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _interpreted(monkeypatch)
    _check(MESH, rows, "inductor")
    targets = {node.target for module in seen for node in module.graph.nodes if node.op == "call_function"}
    assert torch.ops.aten.native_layer_norm_backward.default in targets
    assert all(target.__module__ == "torch._ops.aten" or target.__name__ == "getitem" for target in targets)
    assert len(seen) == len({id(module) for module in seen}) < 60


def _interpreting(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    return fx.Interpreter(module).run


@pytest.mark.parametrize("backend", [_interpreting, "inductor"])
def test_programs_of_other_tests(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "inductor":
        _interpreted(monkeypatch)
    again = functools.partial(replayed, backend=backend)
    chains.check_seeds(range(400 if FULL else 3), None, again)
    names = [name for name in oracle.SMOOTH if name not in REFUSED_OF_JAX]
    for name in names if FULL else (*names[::74], "inner_forward_over_reverse"):
        program, inputs, _ = oracle.prepared(oracle.PROGRAMS[name])
        oracle.agree("output", again(program, *inputs), oracle.GOLDEN[name]["outputs"])


def check_with_passes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that passes have changed, on both meshes."""
    monkeypatch.setattr(passes, "jit", functools.partial(jit, backend="inductor"))
    for mesh in (MESH, GRID):
        for chosen in (list(PASSES), passes.some_passes(seed)):
            passes.check_generated(seed, mesh, chosen)


def test_programs_that_passes_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    _interpreted(monkeypatch)
    for seed in range(400 if FULL else 2):
        check_with_passes(seed, monkeypatch)


@pytest.mark.skipif(not FULL, reason="compiles for minutes")
def test_programs_that_passes_have_changed_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(30):
        check_with_passes(seed, monkeypatch)


def test_what_is_written_into_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _interpreted(monkeypatch)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2 + 1
        part = y[1:]
        part.add_(1)
        z = (x + 1) * 3
        return y, z

    x = torch.arange(3.0)
    assert [one.tolist() for one in replayed(f, x, backend="inductor")] == [[1, 4, 6], [3, 6, 9]]
    (module,) = seen
    assert [node.name for node in module.graph.nodes if node.op == "call_function"][-1].startswith("mul")


@pytest.mark.parametrize("rows", [8, 5])
def test_attention_without_dropout_is_in_segments(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch tags attention as random. Without dropout it draws nothing: equal calls are one."""
    seen = _interpreted(monkeypatch)
    torch.manual_seed(0)
    plain = torch.randn(rows, 2, 3, 4)
    x = device_put(plain, P("x"), mesh=MESH)
    step = fspmd.value_and_grad(lambda x: (F.scaled_dot_product_attention(x, x + 1, x, is_causal=True) * 2).sum())
    _agree(replayed(step, x, backend="inductor"), step(x))
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert op in [node.target for module in seen for node in module.graph.nodes]
    twice = jit(lambda x: sum(F.scaled_dot_product_attention(x, x, x) for _ in range(2)))
    assert [node.target for node in twice.lower(plain).program.steps].count(op) == 1


@pytest.mark.parametrize(
    ("name", "before"),
    [("_scaled_dot_product_flash_attention", ()), ("_scaled_dot_product_cudnn_attention", (None, True))],
)
def test_attention_draws_with_dropout(name: str, before: tuple[Any, ...]) -> None:
    facts, operands = facts_of(getattr(torch.ops.aten, name).default), (torch.ones(1),) * 3
    assert facts.random
    assert facts.draws((*operands, *before, 0.5), {})
    assert not facts.is_pure(operands, {"dropout_p": 0.5})
    assert facts.is_pure(operands, {})
    assert facts.is_pure((*operands, *before, 0.0), {})


def test_a_function_of_another_library_may_always_draw() -> None:
    """Torch leaves out arguments that equal their default, and the default of theirs need not be 0."""
    with torch.library._scoped_library("drawing", "DEF") as library:
        tags = (torch.Tag.nondeterministic_seeded,)
        library.define("noisy(Tensor x, float dropout_p=0.5) -> Tensor", tags=tags)
        library.impl("noisy", lambda x, dropout_p=0.5: x * (torch.rand(x.shape) > dropout_p), "CPU")
        library.impl("noisy", lambda x, dropout_p=0.5: torch.empty_like(x), "Meta")
        x = torch.ones(64, requires_grad=True)
        recorded = jit(lambda x: (torch.ops.drawing.noisy(torch.ones_like(x), 0.5) * x**3).sum())
        first = torch.autograd.grad(recorded(x), x, create_graph=True)[0]
        second = torch.autograd.grad(first.sum(), x)[0]
        assert torch.equal(first / 3, second / 6)
        assert 0 < first.count_nonzero() < 64


def test_donated_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    _interpreted(monkeypatch)
    for backend in ("inductor", _interpreting):
        step = jit(lambda w, g: w - 0.5 * g, donate_argnums=0, backend=backend)
        for _ in range(3):
            w = torch.ones(3)
            assert step(w, w * 2).tolist() == [0, 0, 0]
            with pytest.raises(fspmd.DonationError):
                w.sum()


def test_what_is_no_backend() -> None:
    with pytest.raises(ArgumentError, match=r"^jit got the string 'xla' for backend; write 'replay', 'inductor',"):
        jit(loss, backend="xla")
    x = torch.ones(3)
    for backend, message in (
        (lambda module, examples: 1, r"^the backend of jit returned the int 1; it must return a function$"),
        (
            lambda module, examples: lambda x: x,
            r"^the function made by the backend of jit returned a tensor .* a tuple of 1 values",
        ),
        (
            lambda module, examples: lambda x: (x[1:],),
            r"^the function .* returned a tensor f32\[2\] for result 0; it must return a tens",
        ),
        (
            lambda module, examples: lambda x: (x.double(),),
            r"for result 0; it must return a tensor f32\[3\], as the graph does$",
        ),
        (
            lambda module, examples: lambda x: [None],
            r"^the function made by the backend of jit returned None for result 0;",
        ),
    ):
        recorded = jit(lambda x: x + 1, backend=backend)
        with pytest.raises(ArgumentError, match=message):
            recorded(x)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    def refuse(module: Any, values: Any) -> Any:
        raise InvalidCxxCompiler

    monkeypatch.setattr(torch._inductor, "compile", refuse)
    recorded = jit(lambda x: x.sin() + 1, backend="inductor")
    with pytest.raises(ArgumentError, match=r"^jit\(backend='inductor'\) needs a C\+\+ compiler .* g\+\+ or clang"):
        recorded(torch.ones(2))


def _compiled_on_processes() -> None:
    mesh = fspmd.make_mesh((2,), ("x",))
    for rows in (8, 5):
        _check(mesh, rows, "inductor")


@pytest.mark.skipif(not FULL, reason="compiles for minutes")
def test_compiled() -> None:
    for rows in (8, 5):
        _check(MESH, rows, "inductor")
    with Processes(2) as pool:
        pool.run(_compiled_on_processes)
