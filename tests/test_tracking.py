"""Types in a checked body after every kind of torch call; operands are cast once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from simulated import GRID, run, typed, types
from torch import Tensor, nn
from torch_calls import CALLS, F64, operands

import fspmd
from fspmd import P, axis_index, device_get, make_mesh, pcast, psum, shard_map, typeof
from fspmd.transport.simulation import SimulationTransport
from fspmd.variance import INVARIANT, get_variance

X = torch.linspace(-1, 1, 24, dtype=F64).view(8, 3)
W = torch.tensor([0.3, -0.7, 1.1], dtype=F64)


# --- every call -----------------------------------------------------------------------------------------------------

NO_TENSORS = ("shape, numel, stride", "is_contiguous")
TENSOR_CALLS = [name for name in CALLS if name not in NO_TENSORS]


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", TENSOR_CALLS)
def test_a_result_varies_over_what_its_operands_vary_over(name: str) -> None:
    f, kinds = CALLS[name]
    whole = [torch.cat([x, x]) for x in operands(kinds, 0)]
    assert typed(f, *whole, mesh=GRID, specs=P("x")) == {"{V:x}"}
    if (
        len(kinds) > 1
        and "=" not in name
        and not name.endswith("_")
        and name not in ("foreach in place", "write into views")
    ):
        first = torch.cat([whole[0]] * 3)[: len(whole[0]) // 2 * 3]
        two = typed(f, first, *whole[1:], mesh=GRID, specs=(P("y"), *[P("x")] * (len(kinds) - 1)))
        assert two == ({"{V:x}", "{V:y}"} if name == "foreach norm" else {"{V:x,y}"})


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", TENSOR_CALLS)
def test_a_result_of_invariant_operands_is_invariant_and_held_once(name: str) -> None:
    f, kinds = CALLS[name]

    def body(*xs: Tensor) -> Any:
        out = f(*xs)
        kinds = {type(leaf) for leaf in optree.tree_leaves(out) if isinstance(leaf, Tensor)}
        return types(out), kinds

    assert run(body, *operands(kinds, 0), specs=P()) == ({"{}"}, {Tensor})


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", TENSOR_CALLS)
def test_a_result_of_reduced_operands_is_reduced(name: str) -> None:
    f, kinds = CALLS[name]
    xs = operands(kinds, 0)
    assert typed(lambda *xs: f(*(pcast(x, "x", to="reduced") for x in xs)), *xs, specs=P()) == {"{R:x}"}


def after(x: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    change(x)
    return x


METHODS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "operator": lambda x, w: x + w,
    "reflected": lambda x, w: 1 / (2 - x) ** 2,
    "method": lambda x, w: w.add(x),
    "function": lambda x, w: torch.add(w, x, alpha=2),
    "keyword": lambda x, w: torch.add(input=w, other=x),
    "nn.functional": lambda x, w: F.softplus(w * x),
    "linalg": lambda x, w: torch.linalg.vector_norm(x * w),
    "fft": lambda x, w: torch.fft.rfft(x * w),
    "special": lambda x, w: torch.special.expit(x * w),
    "aten packet": lambda x, w: torch.ops.aten.add(w, x),
    "aten overload": lambda x, w: torch.ops.aten.add.Tensor(w, x),
    "aten of a list": lambda x, w: torch.ops.aten.cat.default([w, x]),
    "prims": lambda x, w: torch.ops.prims.sin(x),
    "list": lambda x, w: torch.stack([w, x]),
    "tuple": lambda x, w: torch.cat((w, x, w)),
    "nested lists": lambda x, w: torch.block_diag(*[w, x]),
    "three outputs": lambda x, w: torch.linalg.svd(torch.outer(x, w)),
    "named tuple": lambda x, w: (x * w).max(0),
    "field of a named tuple": lambda x, w: (x * w).sort().values,
    "T": lambda x, w: torch.outer(x, w).T,
    "mT": lambda x, w: torch.outer(x, w).mT,
    "H": lambda x, w: torch.outer(x, w).H,
    "real": lambda x, w: torch.complex(x, w).real,
    "imag": lambda x, w: torch.complex(w, x).imag,
    "data": lambda x, w: x.data,
    "index": lambda x, w: w[x.argsort()],
    "slice": lambda x, w: x[1:],
    "chain of views": lambda x, w: x[None].expand(2, 2).t().reshape(-1),
    "mask": lambda x, w: w[x > 0],
    "where": lambda x, w: torch.where(x > 0, w, 0.0),
    "comparison": lambda x, w: x < w,
    "bool": lambda x, w: (x < w) & (x > 0),
    "axis_index": lambda x, w: axis_index("x"),
    "index by axis_index": lambda x, w: w[axis_index("x") % 2],
    "axis_index beside a number": lambda x, w: 3 - axis_index("x"),
    "module": lambda x, w: nn.Linear(2, 3, dtype=F64)(x),
    "new_zeros": lambda x, w: x.new_zeros(3),
    "zeros_like": lambda x, w: torch.zeros_like(x),
    "no_grad": lambda x, w: torch.no_grad()(lambda: x * w)(),
    "copy": lambda x, w: torch.tensor(x),
    "as_tensor": lambda x, w: torch.as_tensor(x),
    "type of another": lambda x, w: (x * w).type_as(w),
    "deepcopy": lambda x, w: __import__("copy").deepcopy(x),
    "out=": lambda x, w: torch.add(x, w, out=torch.empty_like(x)),
    "in place": lambda x, w: (x * 1).add_(w),
    "in-place operator": lambda x, w: after(x * 1, lambda y: y.__iadd__(w)),
    "setitem": lambda x, w: after(x * 1, lambda y: y.__setitem__(0, w[0])),
    "data of another": lambda x, w: after(x * 1, lambda y: setattr(y, "data", w * x)),
    "named dims of einsum": lambda x, w: torch.einsum("i,j->ij", [x, w]),
    "split": lambda x, w: x.split(1),
    "checkpoint": lambda x, w: fspmd.checkpoint(lambda x: x * w)(x),
    "torch checkpoint": lambda x, w: torch.utils.checkpoint.checkpoint(lambda x: x * w, x, use_reentrant=False),
    "stop_gradient": lambda x, w: fspmd.stop_gradient(x),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_way_to_call_torch_is_seen(name: str) -> None:
    x, w = torch.arange(8, dtype=F64), torch.tensor([1.0, -2.0], dtype=F64)
    assert typed(METHODS[name], x, w, specs=(P("x"), P())) == {"{V:x}"}


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.new_tensor([1.0, 2.0]),
        lambda x: torch.ones(x.shape),
        lambda x: torch.arange(x.shape[0]),
        lambda x: psum(x, "x"),
        lambda x: psum(x, "x").sin().sum() * torch.ones(3),
        lambda x: torch.tensor([x.shape[0], x.ndim]),
    ],
)
def test_what_does_not_vary(f: Callable[[Tensor], Any]) -> None:
    assert typed(f, torch.arange(8.0), specs=P("x")) == {"{}"}


def test_copies_of_values_keep_their_types() -> None:
    """The type of a copy is the same object, and making it changes no other type."""

    def body(x: Tensor) -> Tensor:
        for value in (x, nn.Parameter(x), psum(x, "x"), pcast(psum(x, "x"), "x", to="reduced")):
            assert repr(typeof(copy.deepcopy(value))) == repr(typeof(value))
        for variance in (get_variance(x), INVARIANT):
            assert copy.deepcopy(variance) is pickle.loads(pickle.dumps(variance)) is variance
        assert repr(INVARIANT) == "{}"
        p = nn.Parameter(x.clone())
        p.sum().backward()
        optimizer = torch.optim.Adam([p])
        optimizer.step()
        copied = copy.deepcopy(optimizer)
        (q,) = copied.param_groups[0]["params"]
        (q * axis_index("x")).sum().backward()
        copied.step()
        return q.grad

    found = shard_map(body, mesh=make_mesh((4,), ("x",), transport="simulation"), in_specs=P("x"), out_specs=P("x"))(X)
    assert torch.equal(device_get(found), 1 + torch.arange(4.0, dtype=F64).repeat_interleave(2)[:, None].expand(8, 3))


def test_typeof_prints_dtype_shape_and_axes() -> None:
    def body(a: Tensor, b: Tensor, w: Tensor) -> list[str]:
        r = pcast(w, "x", to="reduced")
        u = pcast(a, "x", to="unreduced")
        values = (a, b, w, a * b, psum(a, "x"), a * b > 0, axis_index(("x", "y")), r, r * b, u, u * b)
        return [repr(typeof(v)) for v in values]

    a, b, w = torch.ones(4, 3), torch.ones(6), torch.ones(3)
    specs = (P("x"), P("y"), P())
    a, b = torch.ones(4, 2), torch.ones(6)
    w = torch.ones(2)
    assert run(body, a, b, w, mesh=GRID, specs=specs) == [
        "f32[2,2]{V:x}",
        "f32[2]{V:y}",
        "f32[2]",
        "f32[2,2]{V:x,y}",
        "f32[2,2]",
        "bool[2,2]{V:x,y}",
        "i64[]{V:x,y}",
        "f32[2]{R:x}",
        "f32[2]{V:y R:x}",
        "f32[2,2]{U:x}",
        "f32[2,2]{V:y U:x}",
    ]


# --- casts are made once --------------------------------------------------------------------------------------------


@pytest.fixture
def reductions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The axes of every all-reduce, in order."""
    seen: list[tuple[str, ...]] = []
    original = SimulationTransport.reduce_once

    def counted(self: Any, x: Tensor, mesh: Any, axes: tuple[str, ...], o: Any) -> Any:
        seen.append(axes)
        return original(self, x, mesh, axes, o)

    monkeypatch.setattr(SimulationTransport, "reduce_once", counted)
    return seen


COUNTER = iter(range(10**6))


def fresh_mesh() -> Any:
    """A mesh that no collective was made for yet, so that the counting kernel is taken."""
    return make_mesh((4,), (f"tp{next(COUNTER)}",), transport="simulation")


def count(f: Callable[[Any, str], Any], reductions: list[Any], *args: Tensor, specs: Callable[[str], Any]) -> int:
    mesh = fresh_mesh()
    (axis,) = mesh.axis_names

    def body(*xs: Tensor) -> Tensor:
        f(*xs, axis)
        return torch.zeros(())

    shard_map(body, mesh=mesh, in_specs=specs(axis), out_specs=P())(*args)
    return len(reductions)


def test_projections_of_one_invariant_value_cost_one_all_reduce(reductions: list[Any]) -> None:
    def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor, axis: str) -> None:
        def heads(x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x @ q, x @ k, x @ v).sum()

        fspmd.grad(heads)(x)

    x, w = torch.randn(5, 8), torch.randn(4 * 8, 2)
    assert count(attention, reductions, x, w, w, w, specs=lambda a: (P(), P(a), P(a), P(a))) == 1


def test_one_all_reduce_per_parameter(reductions: list[Any]) -> None:
    def f(x: Tensor, w1: Tensor, w2: Tensor, axis: str) -> None:
        fspmd.grad(lambda ws: (torch.tanh(x @ ws[0]) @ ws[1] + (x @ ws[0]) @ ws[1]).sum())((w1, w2))

    x, w1, w2 = torch.randn(8, 3), torch.randn(3, 3), torch.randn(3)
    assert count(f, reductions, x, w1, w2, specs=lambda a: (P(a), P(), P())) == 2


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda x, w, axis: (x * w).sum(), 0),  # nothing is differentiated
        (lambda x, w, axis: torch.no_grad()(torch.mul)(x, w.requires_grad_()), 0),
        (lambda x, w, axis: fspmd.grad(lambda x: (x * w).sum())(x), 0),  # the gradient of a varying value
        (lambda x, w, axis: fspmd.grad(lambda w: (x * w.detach()).sum() + w.sum())(w), 1),  # w.sum() on every rank
        (lambda x, w, axis: fspmd.grad(lambda w: (w * w).sum())(w), 0),  # nothing varies
        (lambda x, w, axis: fspmd.grad(lambda w: (x * pcast(w, axis, to="varying")).sum())(w), 1),
        (lambda x, w, axis: fspmd.grad(lambda v: (x * v).sum())(pcast(w, axis, to="varying")), 0),
        (lambda x, w, axis: fspmd.grad(lambda v: (x * v).sum())(pcast(w, axis, to="reduced")), 0),  # a pending sum
        (lambda x, w, axis: psum(fspmd.grad(lambda v: (x * v).sum())(pcast(w, axis, to="reduced")), axis), 1),
        (lambda x, w, axis: fspmd.grad(lambda w: torch.stack([(x * w).sum() for _ in range(5)]).sum())(w), 1),
        (lambda x, w, axis: fspmd.grad(lambda w: (x * w.sin()).sum() + (x * w.cos()).sum())(w), 2),  # two values
        (
            lambda x, w, axis: fspmd.grad(lambda w: torch.cat([x * w, w + x, torch.where(x > 0, x, w)]).sum())(w),
            1,
        ),
        (lambda x, w, axis: fspmd.grad(lambda w: fspmd.checkpoint(lambda x: (x * w * w).sum())(x))(w), 1),
    ],
)
def test_all_reduces_of_a_gradient(f: Callable[..., Any], expected: int, reductions: list[Any]) -> None:
    found = count(f, reductions, torch.randn(4), torch.randn(1), specs=lambda a: (P(a), P()))
    assert found == expected


def test_a_value_written_in_place_is_cast_anew() -> None:
    def f(w: Tensor, x: Tensor) -> Tensor:
        v = w * 1
        first = (x * v).sum()
        v.mul_(3)
        return first + (x * v).square().sum()

    grad = run(lambda x, w: fspmd.grad(lambda w: f(w, x))(w), X, W, specs=(P("x"), P()))
    expected = torch.func.grad(lambda w: torch.stack([f(w, x) for x in X.chunk(4)]).sum())(W)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)
