"""Custom autograd functions in a checked body: operands cast, backward run in the body with types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated import MESH, run, shards, typed, types
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_calls import F64

import fspmd
from fspmd import P, VarianceError, psum, shard_map, typeof

X = torch.linspace(-1, 1, 24, dtype=F64).view(8, 3)
W = torch.tensor([0.3, -0.7, 1.1], dtype=F64)


class Product(torch.autograd.Function):
    """Old style: ctx in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.scale = scale
        return (x @ w) * scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        return torch.outer(g, w) * ctx.scale, (g @ x) * ctx.scale, None


class ProductApart(torch.autograd.Function):
    """New style: setup_context, usable under torch.func."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, scale: float) -> Tensor:
        return (x @ w) * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.scale = inputs[2]

    backward = Product.backward


class SummedProduct(torch.autograd.Function):
    """Collectives in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, seen: list[Any]) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.seen = seen
        return psum((x @ w).sum(), "x")

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        ctx.seen.append((repr(typeof(g)), repr(typeof(x)), repr(typeof(psum(x, "x")))))
        return g * w.expand_as(x), g * x.sum(0), None


class Both(torch.autograd.Function):
    """Two outputs, the first not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(w)
        order = x.argsort()
        ctx.mark_non_differentiable(order)
        return order, x * w

    @staticmethod
    def backward(ctx: Any, _: Tensor, g: Tensor) -> tuple[Tensor, None]:
        (w,) = ctx.saved_tensors
        return g * w, None


TRANSFORMS: dict[str, Callable[..., Tensor]] = {
    "fspmd.grad": lambda f, w: fspmd.grad(f)(w),
    "autograd.grad": lambda f, w: torch.autograd.grad(f(leaf := w.detach().requires_grad_()), leaf)[0],
    "backward": lambda f, w: (f(leaf := w.detach().requires_grad_()).backward(), leaf.grad)[1],
}


@pytest.mark.parametrize("function", [Product, ProductApart])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_custom_function_casts_its_operands(function: Any, transform: str) -> None:
    def body(x: Tensor, w: Tensor) -> Any:
        out = function.apply(x, w, 2.0)
        return types(out), TRANSFORMS[transform](lambda w: function.apply(x, w, 2.0).sin().sum(), w)

    kinds, grad = run(body, X, W, specs=(P("x"), P()))
    assert kinds == {"{V:x}"}
    expected = torch.func.grad(lambda w: ((X @ w) * 2).sin().sum())(W)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


def test_a_custom_function_under_a_transform() -> None:
    body = lambda x, w: torch.func.grad(lambda w: ProductApart.apply(x, w, 2.0).sin().sum())(w)  # noqa: E731
    grad = run(body, X, W, specs=(P("x"), P()))
    torch.testing.assert_close(grad, torch.func.grad(lambda w: ((X @ w) * 2).sin().sum())(W), rtol=1e-12, atol=1e-12)


def test_a_checkpoint_runs_again_on_its_arguments_as_given() -> None:
    """They are kept as they are, and not cast to one type. So Python may read an equal one again."""
    x = X.clone().requires_grad_()
    power, seen = torch.tensor(3.0, requires_grad=True), []

    def cube(x: Tensor, power: Tensor) -> Tensor:
        seen.append(types(power))
        return x ** int(power)

    f = shard_map(
        lambda *args: checkpoint(cube, *args, use_reentrant=False), mesh=MESH, in_specs=(P("x"), P()), out_specs=P("x")
    )
    f(x, power).sum().backward()
    torch.testing.assert_close(x.grad, 3 * X**2)
    assert seen == [{"{}"}, {"{}"}]


@pytest.mark.parametrize("inside", [True, False])
def test_collectives_in_a_custom_function(inside: bool) -> None:
    """Its backward runs in the body, with types, also when it is called from outside."""
    seen: list[Any] = []

    def forward(x: Tensor, w: Tensor) -> Tensor:
        out = SummedProduct.apply(x, w, seen)
        assert types(out) == {"{}"}
        return out

    if inside:
        grad = run(lambda x, w: fspmd.grad(lambda w: forward(x, w))(w), X, W, specs=(P("x"), P()))
    else:
        w = W.clone().requires_grad_()
        shard_map(forward, mesh=MESH, in_specs=(P("x"), P()), out_specs=P())(X, w).backward()
        grad = w.grad
    torch.testing.assert_close(grad, X.sum(0))
    assert seen == [("f64[]", "f64[2,3]{V:x}", "f64[2,3]")]


def _through_copies(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Any) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            return f(*args)

    return run


@pytest.mark.parametrize("kept", [fspmd.checkpoint, _through_copies])
@pytest.mark.parametrize("function", [Product, ProductApart])
@pytest.mark.parametrize("rows", [8, 5, 2])
def test_second_derivatives_of_saved_tensors_that_hooks_keep(rows: int, function: Any, kept: Any) -> None:
    """They come back without a type. As values that are equal on all ranks they had one reduction too many."""

    def second(f: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        x, w = X[:rows].clone().requires_grad_(), W.clone().requires_grad_()
        first = torch.autograd.grad(f(x, w).square().sum(), (x, w), create_graph=True)
        return torch.autograd.grad(sum((g.sin()).sum() for g in first), (x, w))

    def body(x: Tensor, w: Tensor) -> Tensor:
        return kept(lambda x, w: function.apply(x.exp(), w.exp(), 2.0).sin())(x, w)

    on_ranks = shard_map(body, mesh=MESH, in_specs=(P("x"), P()), out_specs=P("x"))
    expected = second(lambda x, w: (x.exp() @ w.exp() * 2.0).sin())
    torch.testing.assert_close(second(lambda x, w: fspmd.device_get(on_ranks(x, w))), expected)


def test_a_custom_function_with_several_outputs() -> None:
    assert typed(Both.apply, X, W, specs=(P("x"), P())) == {"{V:x}"}
    grad = run(lambda x, w: fspmd.grad(lambda x: Both.apply(x, w)[1].sum())(x), X, W, specs=(P("x"), P()))
    torch.testing.assert_close(torch.cat(shards(grad)), W.expand(8, 3))


def scripted(w: Tensor, x: Tensor) -> Tensor:
    return (x * w).square().sum()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_is_one_call() -> None:
    compiled: Any = torch.jit.script(scripted)
    f = shard_map(lambda w, x: psum(compiled(w, x), "x"), mesh=MESH, in_specs=(P(), P("x")), out_specs=P())
    found, expected = (fspmd.grad(g, argnums=(0, 1))(W, X) for g in (f, scripted))
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_torchscript_module_in_a_checked_body_is_frozen() -> None:
    module: Any = torch.jit.script(torch.nn.Linear(3, 2).double())
    f = shard_map(lambda x: psum(module(x).sum(), "x"), mesh=MESH, in_specs=P("x"), out_specs=P())
    with pytest.raises(VarianceError, match="call the Python module"):
        f(X)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    torch.testing.assert_close(fspmd.grad(f)(X), fspmd.grad(lambda x: module(x).sum())(X))


@pytest.mark.parametrize("check_vma", [True, False])
def test_anomaly_detection_looks_at_every_rank(check_vma: bool) -> None:
    def loss(x: Tensor) -> Tensor:
        return psum(x.sqrt().sum(), "x")

    f = shard_map(loss, mesh=MESH, in_specs=P("x"), out_specs=P(), check_vma=check_vma)
    x = torch.ones(8, dtype=F64)
    with torch.autograd.detect_anomaly():
        assert fspmd.grad(f)(x).tolist() == [0.5] * 8
        x[5] = -1
        with pytest.raises(RuntimeError, match="returned nan values"):
            fspmd.grad(f)(x)


def test_the_advice_gives_a_rule_to_all_who_call_a_function_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a library does, whose code stays as it is."""
    x = fspmd.ones(5, 3, spec=P("x"), mesh=MESH, dtype=F64)
    w = fspmd.ones(3, spec=P(), mesh=MESH, dtype=F64)
    with pytest.raises(fspmd.ArgumentError) as caught:
        torch.func.grad(lambda x: ProductApart.apply(x, w, 2.0).sum())(x)
    name, _, call = str(caught.value).rpartition("for all who call it: ")[2].partition(" = ")
    assert name == "ProductApart.apply"
    made = eval(call.replace("m n -> m n", "m [k], [k] -> m"), {"fspmd": fspmd, "ProductApart": ProductApart})
    monkeypatch.setattr(ProductApart, "apply", made)
    found = torch.func.grad(lambda x: ProductApart.apply(x, w, 2.0).sum())(x)
    assert torch.equal(fspmd.device_get(found), torch.full((5, 3), 2.0, dtype=F64))


class Weighed(torch.autograd.Function):
    """w², of which the backward is a function run by shard_map, differentiated: the sum of X times the cotangent."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * _slope(g)


def _slope(like: Tensor) -> Tensor:
    f = shard_map(lambda w, x: psum((w * x).sum(), "x"), mesh=MESH, in_specs=(P(), P("x")), out_specs=P())
    with torch.enable_grad():
        w = like.detach().requires_grad_()
        (g,) = torch.autograd.grad(fspmd.device_get(f(w, X)), w)
    return g


def _hooked(w: Tensor) -> Tensor:
    y = w * 1
    y.register_hook(_slope)
    return y


@pytest.mark.parametrize("function", [Weighed.apply, _hooked])
def test_bodies_in_backward_outside_of_bodies(function: Any) -> None:
    w = torch.tensor(2.0, dtype=F64, requires_grad=True)
    function(w).backward()
    for found in (w.grad, fspmd.grad(function)(w.detach())):
        torch.testing.assert_close(found, X.sum())
