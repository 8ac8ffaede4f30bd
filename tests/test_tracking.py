"""Types in a checked body after every kind of torch call; operands are cast once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from processes import Processes
from simulated import GRID, MESH, run, typed, types
from torch import Tensor, nn
from torch_calls import CALLS, F64, operands
from tracking_programs import (
    REFUSED_WAYS,
    TENSOR_CALLS,
    WAYS,
    parameter_returned,
    types_of_way,
    untyped_on_processes,
)

import fspmd
from fspmd import (
    ArgumentError,
    P,
    VarianceError,
    axis_index,
    device_get,
    device_put,
    make_mesh,
    pcast,
    psum,
    shard_map,
    typeof,
)
from fspmd.transport.simulation import SimulationTransport
from fspmd.variance import INVARIANT, get_variance

X = torch.linspace(-1, 1, 24, dtype=F64).view(8, 3)
W = torch.tensor([0.3, -0.7, 1.1], dtype=F64)


# --- every call -----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", WAYS)
def test_every_way_to_call_torch_is_seen(name: str) -> None:
    assert types_of_way(name, MESH) == {"{V:x}"}


def test_storage_of_simulated_ranks_is_no_memory() -> None:
    """Torch crashes when it reads a tensor that was set to such a storage."""
    x = device_put(torch.arange(8.0), P("x"), mesh=make_mesh((4,), ("x",), transport="simulation"))
    with pytest.raises(ArgumentError, match=r"x\.set_\(storage\) got the storage of a value of simulated ranks"):
        torch.zeros(2).set_(x.local.untyped_storage())
    storage, ops = x.local.untyped_storage(), torch.ops.aten
    sets: list[Callable[[], Any]] = [
        lambda: ops.set_.source_Storage(torch.zeros(2), storage),
        lambda: ops.set_.source_Storage_storage_offset(torch.zeros(2), storage, 0, [2], [1]),
        lambda: ops.set.source_Storage(torch.zeros(2), storage),
        lambda: ops.set_.source_Storage(x.local.clone(), storage),
    ]
    for refused in sets:
        with pytest.raises(RuntimeError, match="the devices must match"):  # torch's own words
            refused()
    assert x.local.untyped_storage() is storage
    plain = torch.arange(3.0)
    assert torch.equal(torch.zeros(0).set_(plain.untyped_storage()), plain)


def test_bytes_of_simulated_ranks_are_refused() -> None:
    x = device_put(torch.arange(8.0), P("x"), mesh=make_mesh((4,), ("x",), transport="simulation"))
    reads: list[Callable[[Any], Any]] = [
        lambda s: s.clone(),
        lambda s: s[0],
        lambda s: s.tolist(),
        lambda s: s.byteswap(torch.float32),
        lambda s: torch.zeros(2).untyped_storage().copy_(s),
    ]
    for read in reads:
        with pytest.raises(ArgumentError, match="got the storage of a value of simulated ranks"):
            read(x.local.untyped_storage())


def test_a_gradient_goes_through_a_view_that_no_mode_sees() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        return torch.DoubleTensor(x * 2) * w + nn.utils.rnn.pad_sequence([x * w, x])[:, 0]

    f = shard_map(body, mesh=MESH, in_specs=(P("x"), P()), out_specs=P("x"))
    x, w = torch.arange(8, dtype=F64), torch.tensor([1.0, -2.0], dtype=F64, requires_grad=True)
    f(x, w).sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, 3 * x.view(4, 2).sum(0))


@pytest.mark.parametrize("name", REFUSED_WAYS)
def test_memory_of_a_varying_value_is_given_to_nobody(name: str) -> None:
    with pytest.raises(VarianceError, match=REFUSED_WAYS[name][1]):
        typed(REFUSED_WAYS[name][0], torch.arange(8, dtype=F64), specs=P("x"))


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    with Processes(4) as pool:
        yield pool


def test_every_call_is_seen_on_processes(four: Processes) -> None:
    assert four.run(untyped_on_processes) == [[]] * 4


def test_a_parameter_that_differs_from_rank_to_rank_is_not_returned_as_one_that_does_not(four: Processes) -> None:
    for text in four.run(parameter_returned):
        assert "varies over 'x', but its spec P() does not say so" in text


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
