"""``out=``, cotangents that lie otherwise, and ops by what is registered of them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._decomp import register_decomposition
from torch.nn import functional as F

from fspmd import ArgumentError, P, ShapeError, TreeError, device_get, device_put, make_mesh, vjp
from fspmd.errors import FspmdError

F64 = torch.float64
MESH = make_mesh((2, 3), ("x", "y"), transport="simulation")
SPECS = (P(), P("x"), P(None, "y"), P("y", "x"), P(("x", "y")), P(unreduced={"x"}), P("y", unreduced={"x"}))
PLAIN, OTHER = torch.randn(7, 5, dtype=F64), torch.randn(7, 5, dtype=F64)


def put(x: Tensor, spec: P) -> Any:
    return device_put(x, spec, mesh=MESH)


@pytest.mark.parametrize("spec", SPECS[1:4], ids=repr)
def test_results_go_where_they_are_wanted(spec: P) -> None:
    for given in SPECS:
        out = put(torch.zeros(7, 5, dtype=F64), spec)
        assert torch.mul(put(PLAIN, given), put(OTHER, P("x")), out=out) is out
        assert out.spec.partition == P(*spec, *(None,) * (2 - len(spec)))
        torch.testing.assert_close(device_get(out), PLAIN * OTHER)
    x = put(PLAIN, spec)
    torch.add(x, x, out=x)
    torch.testing.assert_close(device_get(x), 2 * PLAIN)
    plain = torch.zeros(7, 5, dtype=F64)
    assert torch.sin(put(PLAIN, spec), out=plain) is plain
    torch.testing.assert_close(plain, PLAIN.sin())
    assert torch.add(PLAIN, OTHER, out=x) is x
    torch.testing.assert_close(device_get(x), PLAIN + OTHER)
    outs = put(torch.zeros(7, dtype=F64), P("y")), put(torch.zeros(7, dtype=torch.int64), P())
    found = torch.max(put(PLAIN, spec), 1, out=outs)
    assert (found[0] is outs[0], found[1] is outs[1]) == (True, True)
    assert torch.equal(device_get(outs[1]), PLAIN.max(1).indices)


def test_outs_without_elements_take_the_shape_of_the_result() -> None:
    for spec, empty in itertools.product(SPECS, (P(), P("x"))):
        for dtype in (F64, torch.float32):
            out, plain = put(torch.empty(0, dtype=dtype), empty), torch.empty(0, dtype=dtype)
            alias = out
            assert torch.mm(put(PLAIN, spec).t(), put(OTHER, P("x")), out=out) is alias
            torch.mm(put(PLAIN.to(dtype), spec).t(), OTHER.to(dtype), out=plain)
            expected = torch.mm(PLAIN.t(), OTHER).to(dtype)
            for found in (out, plain, out + 0):
                assert (found.shape, found.dtype, found.stride()) == (expected.shape, dtype, expected.stride())
                torch.testing.assert_close(device_get(found), expected)
    values, places = put(torch.empty(0, dtype=F64), P()), put(torch.empty(0, dtype=torch.int64), P())
    torch.max(put(PLAIN, P("x")), 1, out=(values, places))
    assert torch.equal(device_get(places), PLAIN.max(1).indices)


ops: Any = torch.ops.aten
OVERLOADS: dict[str, Callable[..., Any]] = {
    "mse_loss": lambda x, y, **out: ops.mse_loss.out(x, y, 0, **out),
    "smooth_l1_loss": lambda x, y, **out: ops.smooth_l1_loss.out(x, y, reduction=0, **out),
    "huber_loss": lambda x, y, **out: ops.huber_loss.out(x, y, 0, 0.5, **out),
    "soft_margin_loss": lambda x, y, **out: ops.soft_margin_loss.out(x, y, 0, **out),
    "binary_cross_entropy": lambda x, y, **out: ops.binary_cross_entropy.out(x.sigmoid(), y.sigmoid(), None, 0, **out),
    "add": lambda x, y, **out: ops.add.out(x, y, alpha=2, **out),
    "gelu": lambda x, y, **out: ops.gelu.out(x, **out),
    "_softmax": lambda x, y, **out: ops._softmax.out(x, 1, False, **out),
}


@pytest.mark.parametrize("name", OVERLOADS)
def test_overloads_with_outs(name: str) -> None:
    """Such an op must have ``out``, which the op without it may not have."""
    call = OVERLOADS[name]
    expected = call(PLAIN, OTHER, out=torch.empty(7, 5, dtype=F64))
    for given, spec in itertools.product(SPECS, SPECS[:3]):
        out = put(torch.zeros(7, 5, dtype=F64), spec)
        assert call(put(PLAIN, given), put(OTHER, P("x")), out=out) is out
        torch.testing.assert_close(device_get(out), expected)
    plain = torch.zeros(7, 5, dtype=F64)
    assert call(put(PLAIN, P("x")), OTHER, out=plain) is plain
    torch.testing.assert_close(plain, expected)


def test_overloads_with_several_outs_and_sums() -> None:
    x, total = put(PLAIN, P("x", "y")), put(torch.zeros((), dtype=F64), P())
    ops.mse_loss.out(x, OTHER, 2, out=total)
    torch.testing.assert_close(device_get(total), F.mse_loss(PLAIN, OTHER, reduction="sum"))
    values, indices = put(torch.zeros(7, 2, dtype=F64), P("y")), put(torch.zeros(7, 2, dtype=torch.int64), P())
    found = ops.topk.values(x, 2, values=values, indices=indices)
    assert (found[0] is values, found[1] is indices) == (True, True)
    for ours, theirs in zip(found, PLAIN.topk(2), strict=True):
        assert torch.equal(device_get(ours), theirs)
    sums = [put(torch.zeros(7, 5, dtype=F64), P("x")) for _ in range(2)]
    ops._foreach_add.List_out([x, x], [x, put(OTHER, P())], out=sums)
    assert torch.equal(device_get(sums[1]), PLAIN + OTHER)


def test_outs_that_do_not_fit_are_refused() -> None:
    x = put(PLAIN, P("x"))
    cases: tuple[tuple[Any, Any, type[FspmdError], str], ...] = (
        (x, put(torch.zeros(7, dtype=F64), P()), ShapeError, "for a result of shape"),
        (x, put(torch.zeros(7, 5, dtype=torch.int32), P()), ArgumentError, "cannot be cast"),
        (
            x.detach().requires_grad_(),
            put(torch.zeros(7, 5, dtype=F64), P()),
            ArgumentError,
            "do not support automatic",
        ),
    )
    for given, out, error, message in cases:
        with pytest.raises(error, match=message):
            torch.add(given, given, out=out)


@pytest.mark.parametrize("foreach", [False, True])
def test_adamax_as_torch_writes_it(foreach: bool) -> None:
    for spec in SPECS[1:2]:
        x, plain = put(PLAIN, spec).requires_grad_(), PLAIN.clone().requires_grad_()
        ours, theirs = (torch.optim.Adamax([p], lr=0.1, foreach=foreach) for p in (x, plain))
        for _ in range(3):
            (x * x).sum().backward()
            (plain * plain).sum().backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(device_get(x), plain)


def test_cotangents_that_lie_otherwise_are_moved() -> None:
    for spec in SPECS:
        for other in SPECS:
            x = put(PLAIN, spec).requires_grad_()
            (x * 2).backward(put(OTHER, other))
            torch.testing.assert_close(device_get(x.grad), 2 * OTHER)
            (found,) = torch.autograd.grad(x * 2, x, put(OTHER, other))
            torch.testing.assert_close(device_get(found), 2 * OTHER)
            (found,) = vjp(lambda x: x * 2, x.detach())[1](put(OTHER, other))
            torch.testing.assert_close(device_get(found), 2 * OTHER)
    with pytest.raises(TreeError, match="does not fit"):
        (x * 2).backward(put(OTHER.float(), P("x")))
    with pytest.raises(TreeError, match="does not fit"):
        (x * 2).backward(device_put(OTHER, P("x"), mesh=make_mesh((2,), ("x",), transport="simulation")))


ATEN: dict[str, Callable[[Any, Any], Any]] = {
    "mse_loss": torch.ops.aten.mse_loss,
    "mse_loss.default": lambda x, y: torch.ops.aten.mse_loss.default(x, y, 2),
    "l1_loss": torch.ops.aten.l1_loss,
    "smooth_l1_loss": lambda x, y: torch.ops.aten.smooth_l1_loss(x, y, 2),
    "huber_loss": torch.ops.aten.huber_loss,
    "soft_margin_loss": lambda x, y: torch.ops.aten.soft_margin_loss(x, y.detach().sign()) * y,
    "binary_cross_entropy": lambda x, y: torch.ops.aten.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "batch norm": lambda x, y: torch.ops.aten.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False) * y,
}


def check(f: Callable[..., Any]) -> None:
    plain = [x.clone().requires_grad_() for x in (PLAIN, OTHER)]
    expected = f(*plain)
    expected.sum().backward()
    for n, spec in enumerate(SPECS):
        given = [put(x.detach(), one).requires_grad_() for x, one in zip(plain, (spec, SPECS[-n]), strict=True)]
        out = f(*given)
        torch.testing.assert_close(device_get(out), expected.detach())
        out.sum().backward()
        for x, one in zip(given, plain, strict=True):
            torch.testing.assert_close(device_get(x.grad), one.grad)


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", ATEN)
def test_losses_as_ops(name: str) -> None:
    check(ATEN[name])


def _classes(x: Any) -> Any:
    """Of each row distinct ones, before the first -1."""
    classes = x.detach().argsort(-1)
    return classes.where((classes != 1).cumprod(-1).bool(), -1)


@pytest.mark.parametrize("name", ["mse_loss", "huber_loss.default", "multilabel_margin_loss.default"])
def test_a_reduction_is_no_value(name: str) -> None:
    """Calls of the same types, with another number: each has a plan of its own."""
    op, labelled = operator.attrgetter(name)(torch.ops.aten), "label" in name
    for reduction in (1, 0, 2):
        check(lambda x, y, n=reduction: op(x, _classes(y) if labelled else y, n) * y.sum())  # type: ignore[misc]


@pytest.fixture
def library() -> Iterator[Any]:
    with torch.library._scoped_library("fspmd_test", "DEF") as lib:
        yield lib


def test_ops_by_what_is_registered_of_them(library: Any) -> None:
    library.define("implicit(Tensor x, Tensor y) -> Tensor")
    library.impl("implicit", lambda x, y: (x @ y.mT).relu(), "CompositeImplicitAutograd")
    check(torch.ops.fspmd_test.implicit)
    library.define("explicit(Tensor x, Tensor y) -> Tensor")
    library.impl("explicit", lambda x, y: x.sin() * y, "CompositeExplicitAutograd")
    x, y = put(PLAIN, P("x")), put(OTHER, P("y"))
    torch.testing.assert_close(device_get(torch.ops.fspmd_test.explicit(x, y)), PLAIN.sin() * OTHER)
    library.define("decomposed(Tensor x) -> Tensor")
    library.impl("decomposed", lambda x: x.exp(), "CPU")
    with pytest.raises(FspmdError, match="decomposed"):
        torch.ops.fspmd_test.decomposed(x)

    @register_decomposition(torch.ops.fspmd_test.decomposed.default)
    def decomposed(x: Tensor) -> Tensor:
        return torch.exp(x)

    for op in (torch.ops.fspmd_test.decomposed, torch.ops.fspmd_test.decomposed.default):
        torch.testing.assert_close(device_get(op(x)), PLAIN.exp())


def test_custom_ops() -> None:
    @torch.library.custom_op("fspmd_test::scaled", mutates_args=())
    def scaled(x: Tensor, by: float) -> Tensor:
        return x * by

    scaled.register_fake(lambda x, by: torch.empty_like(x))
    x = put(PLAIN, P("x"))
    with pytest.raises(FspmdError, match=r"scaled\(\) has no rule"):
        scaled(x, 2.0)
    register_decomposition(torch.ops.fspmd_test.scaled.default)(lambda x, by: x * by)
    torch.testing.assert_close(device_get(scaled(x, 3.0)), PLAIN * 3)


def test_asserts_with_messages() -> None:
    x = put(PLAIN, P("x", "y"))
    for of in (torch.ops.aten._assert_async.msg, torch._assert_async):
        assert of((x < 99).all(), "never seen") is None
        with pytest.raises(ArgumentError, match="as it should be"):
            of((x > 99).all(), "as it should be")
    assert F.relu(x).shape == (7, 5)
