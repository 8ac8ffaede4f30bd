"""Graphs of local steps: what is copied in and out, what stays where it lies, and when one is captured again.

Where there is no GPU `Remembered` stands for CUDA: it runs the functions of a capture again, on the memory that they
had then. Where there is one the same tests run on it, too.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import test_backends as others
import test_global_programs as chains
import test_passes_together as together
import torch
from full import FULL
from processes import Processes
from simulated import GRID, MESH
from test_jit import REFUSED_OF_JAX, oracle
from test_passes import some_passes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fspmd
from fspmd import ArgumentError, P, device_get, device_put, jit, make_mesh, nn, psum, shard_map
from fspmd.programs import backends, cuda_graphs
from fspmd.programs.cuda_graphs import CudaGraphs, by_cuda_graphs, by_graphs
from fspmd.programs.passes.table import PASSES
from fspmd.programs.program import memory_of

F64 = torch.float64


class Remembered:
    """Captures of functions on the CPU; nothing but results is there once a replay has ended."""

    device = "cpu"
    captured = 0

    def follow(self) -> None:
        pass

    def capture(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        type(self).captured += 1
        with _Tape() as tape:
            results = run()
        lasting = set(map(memory_of, results))
        spoiled = [x for _, _, _, made in tape.calls for x in made if memory_of(x) not in lasting]
        for x in (*spoiled, *results):
            _spoil(x)

        def replay() -> None:
            for func, args, kwargs, made in tape.calls:
                for x, new in zip(made, _tensors(func(*args, **kwargs)), strict=True):
                    x.copy_(new)
            for x in spoiled:
                _spoil(x)

        return replay, results


class _Tape(TorchDispatchMode):
    """The functions that make tensors of their own; views stay views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = set(map(memory_of, _tensors(args)))
        made = _tensors(out)
        if any(memory_of(x) not in before for x in made):
            self.calls.append((func, args, kwargs or {}, made))
        return out


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [x for one in tree for x in _tensors(one)] if isinstance(tree, (list, tuple)) else []


def _spoil(x: Tensor) -> None:
    x.fill_(math.nan if x.is_floating_point() or x.is_complex() else 1)


@pytest.fixture(params=[Remembered, *([CudaGraphs] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the tensors of a test are."""
    monkeypatch.setitem(backends._BY_NAME, "cudagraphs", functools.partial(by_graphs, request.param))
    monkeypatch.setattr(Remembered, "captured", 0)
    torch.set_default_device(request.param.device)
    yield request.param.device
    torch.set_default_device(None)


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in, for programs whose arguments are on the CPU."""
    monkeypatch.setitem(backends._BY_NAME, "cudagraphs", functools.partial(by_graphs, Remembered))


graphed = functools.partial(jit, backend="cudagraphs")


def _replayed(f: Any, *args: Any) -> Any:
    """The second replay."""
    recorded = graphed(f)
    for _ in range(3):
        out = recorded(*args)
    return out


@pytest.mark.parametrize("rows", [8, 5])
def test_values_gradients_and_draws(rows: int, device: str) -> None:
    others._check(make_mesh((4,), ("x",), transport="simulation", device=device), rows, "cudagraphs")
    assert device != "cpu" or Remembered.captured > 5


def test_experts_with_a_capacity(device: str) -> None:
    """Beside dense float64. Of the tokens of each rank, the later ones of a full expert count as 0."""
    mesh = make_mesh((2,), ("ep",), transport="simulation", device=device)

    def body(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        out, dropped = nn.experts(
            x, nn.route(x, 1, axes="ep"), lambda rows, n: nn.grouped_matmul(rows, w, n), axis="ep", capacity=2
        )
        return out, psum(dropped, "ep")

    layer = graphed(shard_map(body, mesh=mesh, in_specs=(P("ep"), P("ep")), out_specs=(P("ep"), P())))
    w = torch.randn(4, 4, 3, dtype=torch.float64)
    for _ in range(4):
        x = torch.randn(16, 4, dtype=torch.float64)
        chosen = x.argmax(1)
        expected, full = torch.zeros(16, 3, dtype=torch.float64), [[0] * 4 for _ in range(2)]
        for i, expert in enumerate(chosen.tolist()):
            full[i // 8][expert] += 1
            if full[i // 8][expert] <= 2:
                expected[i] = x[i] @ w[expert]
        out, dropped = layer(device_put(x, P("ep"), mesh=mesh), device_put(w, P("ep"), mesh=mesh))
        torch.testing.assert_close(device_get(out), expected, rtol=1e-12, atol=1e-12)
        assert int(device_get(dropped)) == sum(max(0, n - 2) for rank in full for n in rank)
    assert device != "cpu" or Remembered.captured


@pytest.mark.usefixtures("remembered")
def test_programs_of_other_tests() -> None:
    chains.check_seeds(range(400 if FULL else 6), None, _replayed)
    names = [name for name in oracle.SMOOTH if name not in REFUSED_OF_JAX]
    for name in names if FULL else (*names[::51], "inner_forward_over_reverse"):
        program, inputs, _ = oracle.prepared(oracle.PROGRAMS[name])
        oracle.agree("output", _replayed(program, *inputs), oracle.GOLDEN[name]["outputs"])


@pytest.mark.usefixtures("remembered")
def test_programs_that_passes_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With parameters that are given away, and gradients by autograd."""
    monkeypatch.setattr(together, "jit", graphed)
    for seed in range(200 if FULL else 4):
        together.check(seed, (MESH, GRID)[seed % 2], some_passes(seed) if seed % 3 else list(PASSES), seed % 2 == 0)


def test_results_stay_what_they_are(device: str) -> None:
    """Of an earlier call, also views, and what backward keeps of forward."""
    f = graphed(lambda x: ((x * 2).sin() + 1).t())
    f(torch.zeros(2, 3))
    given = [torch.full((2, 3), float(i)) for i in range(3)]
    for x, out in zip(given, [f(x) for x in given], strict=True):
        torch.testing.assert_close(out, (x * 2).sin().t() + 1)
    g = graphed(lambda x: ((x * 2).sin() * x).exp().sum())
    leaves = [x.clone().requires_grad_() for x in given]
    g(leaves[0])
    for _ in range(2):
        outs = [g(x) for x in leaves]
        found = [torch.autograd.grad(out, x)[0] for out, x in zip(outs, leaves, strict=True)]
        for x, gradient in zip(leaves, found, strict=True):
            (expected,) = torch.autograd.grad(((x * 2).sin() * x).exp().sum(), x)
            torch.testing.assert_close(gradient, expected)


def test_views_are_views_of_the_same(device: str) -> None:
    f = graphed(lambda x: (x.t(), (y := (x + 1).exp() * 2), y[0], y.view(3, 2)))
    x = torch.rand(2, 3)
    for _ in range(3):
        before, y, row, other = f(x)
    assert before.data_ptr() == x.data_ptr()
    assert y.data_ptr() == row.data_ptr() == other.data_ptr()
    y.zero_()
    assert not row.any()
    assert not other.any()


def test_tensors_closed_over_are_read_where_they_lie(device: str) -> None:
    w = torch.ones(3)

    def f(x: Any) -> Any:
        y = (x * w).sin() + w
        return torch.bernoulli((y > -9) * 1.0).exp() * x, y

    recorded = graphed(f)

    def check(captures: int) -> None:
        Remembered.captured = 0
        for x in (torch.ones(2, 3), torch.zeros(2, 3)):
            for one, other in zip(recorded(x), f(x), strict=True):
                torch.testing.assert_close(one, other)
        assert device != "cpu" or Remembered.captured == captures

    check(4)  # two graphs, again once x has moved
    w.mul_(2)
    check(0)
    w.data = torch.full((3,), 3.0)  # elsewhere; what is captured later may have its memory where the first graph works
    check(2)
    check(0)


def test_what_goes_from_graph_to_graph_is_not_copied(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(cuda_graphs, "foreach_copy_", lambda to, of: copied.append(len(of)) or copy(to, of))

    def f(x: Tensor) -> Tensor:
        y, z = x.sin() * 2, x.cos() + 1
        return (torch.bernoulli(torch.ones_like(x)) + y) * z

    recorded = graphed(f)
    for x in (torch.ones(2, 3), torch.zeros(2, 3), torch.ones(2, 3)):
        torch.testing.assert_close(recorded(x), f(x))
    assert copied == [1] + [1, 1] * 2  # x, once it has moved; what was drawn


def test_parameters_are_read_where_they_lie(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also such as the function updates: its steps are one graph, and the update."""
    copied: list[int] = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(cuda_graphs, "foreach_copy_", lambda to, of: copied.append(len(of)) or copy(to, of))

    def step(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        y = (x @ w + b).sin()
        slope = y.cos()
        torch._foreach_sub_([w, b], [x.T @ slope, slope.sum(0)], alpha=0.1)
        return y.sum()

    recorded, Remembered.captured = graphed(step), 0
    ours, plain = ([torch.ones(3, 2), torch.zeros(2)] for _ in range(2))
    kept = [torch.full((4, 3), float(i)) for i in range(6)]  # each elsewhere
    for x in kept:
        torch.testing.assert_close((recorded(*ours, x), ours), (step(*plain, x), plain))
    assert copied == [1] * 5  # x, once it has moved
    assert device != "cpu" or Remembered.captured == 2
    for i in range(2):  # what else has moved is copied, too
        ours = [x.clone() for x in ours]
        torch.testing.assert_close((recorded(*ours, kept[i]), ours), (step(*plain, kept[i]), plain))
    assert copied == [1] * 5 + [3] * 2
    assert device != "cpu" or Remembered.captured == 3


def test_what_steps_between_hand_on_is_kept(device: str) -> None:
    """A cast of a simulation gives each rank the same memory."""
    mesh = make_mesh((4,), ("x",), transport="simulation", device=device)
    f = fspmd.shard_map(
        lambda x: fspmd.pcast(x.sin() * 2 + 1, "x", to="varying"), mesh=mesh, in_specs=P(), out_specs=P("x")
    )
    given = [device_put(torch.full((4, 2), float(i)), P(), mesh=mesh) for i in range(4)]
    recorded = graphed(f)
    recorded(given[0])
    for x, out in zip(given, [recorded(x) for x in given], strict=True):
        torch.testing.assert_close(device_get(out)[:4], device_get(x).sin() * 2 + 1)


def test_one_call_at_a_time(device: str) -> None:
    """Threads share the memory of graphs."""
    f = graphed(lambda x: ((x * 2).sin() + 1) * x)
    given = [torch.full((64,), float(i)) for i in range(4)]
    f(given[0])
    wrong: list[Any] = []

    def work(x: Tensor) -> None:
        for _ in range(50):
            out = f(x)
            if not torch.allclose(out, ((x * 2).sin() + 1) * x):
                wrong.append(out)

    threads = [threading.Thread(target=work, args=(x,)) for x in given]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


def test_donated_arguments(device: str) -> None:
    step = graphed(lambda w, g: (w - 0.5 * g) * 2 - w, donate_argnums=0)
    for _ in range(3):
        w = torch.ones(3)
        assert step(w, w * 2).tolist() == [-1, -1, -1]
        with pytest.raises(fspmd.DonationError):
            w.sum()


def test_what_is_on_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArgumentError, match=r"^jit\(backend='cudagraphs'\) needs a CUDA device, but torch.cuda.is_av"):
        graphed(torch.sin)

    class Elsewhere(Remembered):
        device = "cuda"

    monkeypatch.setitem(backends._BY_NAME, "cudagraphs", functools.partial(by_graphs, Elsewhere))
    with pytest.raises(ArgumentError, match=r"^jit\(backend='cudagraphs'\) got a function of tensors on cpu, and none"):
        graphed(torch.sin)(device_put(torch.ones(4), P("x"), mesh=MESH))


def test_what_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(Remembered):
        def capture(self, run: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setitem(backends._BY_NAME, "cudagraphs", functools.partial(by_graphs, Refusing))
    f = graphed(lambda x: x.sin() + 1)
    with pytest.raises(ArgumentError, match="got a step that CUDA cannot capture"):
        f(torch.ones(2))


def _on_processes() -> None:
    backends._BY_NAME["cudagraphs"] = functools.partial(by_graphs, Remembered)
    try:
        mesh = make_mesh((2,), ("x",))
        for rows in (8, 5):
            others._check(mesh, rows, "cudagraphs")
        chains.check_seeds(range(100 if FULL else 4), 2, _replayed)
    finally:
        backends._BY_NAME["cudagraphs"] = by_cuda_graphs
    assert Remembered.captured


@pytest.mark.skipif(not FULL, reason="takes processes that import much")
def test_on_processes() -> None:
    """What one graph gives lies where it did for the collective and the graph that take it."""
    with Processes(2) as pool:
        pool.run(_on_processes)
