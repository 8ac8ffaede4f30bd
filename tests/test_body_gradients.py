"""Derivatives taken inside a checked body: transforms, torch.autograd, hooks, closures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from simulated import MESH, run, shards, typed, types
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_calls import F64

import fspmd
from fspmd import P, VarianceError, axis_index, device_get, pcast, psum, shard_map, typeof

# --- transforms -----------------------------------------------------------------------------------------------------


def loss(w: Tensor, x: Tensor) -> Tensor:
    return ((x @ w).sin() * (x @ w)).sum()


def total(w: Tensor, x: Tensor) -> Tensor:
    """The same over all ranks' blocks: what a gradient with respect to the invariant ``w`` is the gradient of."""
    return torch.stack([loss(w, block) for block in x.chunk(4)]).sum()


func = torch.func
#: name -> (of the loss with x bound, in the body; the same of the total, of plain tensors)
BY_W: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda f, w: func.grad(f)(w),
    "grad_and_value": lambda f, w: func.grad_and_value(f)(w)[0],
    "vjp": lambda f, w: func.vjp(f, w)[1](typed_one(f(w)))[0],
    "jacrev": lambda f, w: func.jacrev(f)(w),
    "hessian": lambda f, w: func.jacrev(func.jacrev(f))(w),
    "grad of grad": lambda f, w: func.grad(lambda w: func.grad(f)(w).sin().sum())(w),
    "grad by vmap": lambda f, w: func.vmap(lambda s: func.grad(lambda w: f(w * s))(w))(
        torch.tensor([1.0, 2.0], dtype=F64)
    ),
    "functional_call": lambda f, w: func.grad(lambda w: func.functional_call(Scaled(), {"w": w}, (f,)))(w),
    "fspmd.grad": lambda f, w: fspmd.grad(f)(w),
    "fspmd.grad of grad": lambda f, w: fspmd.grad(lambda w: fspmd.grad(f)(w).sin().sum())(w),
    "grad of fspmd.grad": lambda f, w: func.grad(lambda w: fspmd.grad(f)(w).sin().sum())(w),
    "fspmd.grad of func.grad": lambda f, w: fspmd.grad(lambda w: func.grad(f)(w).sin().sum())(w),
    "fspmd.vjp": lambda f, w: fspmd.vjp(f, w)[1](typed_one(f(w)))[0],
    "autograd.grad": lambda f, w: torch.autograd.grad(f(leaf := w.detach().requires_grad_()), leaf)[0],
    "autograd.grad of a list": lambda f, w: torch.autograd.grad([f(leaf := w.detach().requires_grad_())], [leaf])[0],
    "backward": lambda f, w: backward(lambda leaf: f(leaf).backward(), w),
    "torch.autograd.backward": lambda f, w: backward(lambda leaf: torch.autograd.backward(f(leaf)), w),
    "backward twice": lambda f, w: backward(lambda leaf: (f(leaf).backward(), f(leaf * 2).backward()), w),
    "checkpoint": lambda f, w: fspmd.grad(fspmd.checkpoint(f))(w),
    "functional.jacobian": torch.autograd.functional.jacobian,
}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=F64))

    def forward(self, f: Callable[[Tensor], Tensor]) -> Tensor:
        return f(self.w)


def typed_one(like: Tensor) -> Tensor:
    return torch.ones_like(like)


def backward(run_backward: Callable[[Tensor], Any], w: Tensor) -> Tensor:
    leaf = w.detach().requires_grad_()
    run_backward(leaf)
    assert leaf.grad is not None
    return leaf.grad


X = torch.linspace(-1, 1, 24, dtype=F64).view(8, 3)
W = torch.tensor([0.3, -0.7, 1.1], dtype=F64)


@pytest.mark.parametrize("name", BY_W)
def test_a_gradient_of_an_invariant_value_is_invariant_and_summed(name: str) -> None:
    by = BY_W[name]
    out, kinds = run(lambda x, w: (g := by(lambda w: loss(w, x), w), types(g)), X, W, specs=(P("x"), P()))
    if name in ("grad of grad", "fspmd.grad of grad", "grad of fspmd.grad", "fspmd.grad of func.grad"):
        expected = by(lambda w: total(w, X), W)
    else:
        expected = torch.stack([by(lambda w, x=x: loss(w, x), W) for x in X.chunk(4)]).sum(0)
    assert kinds == {"{}"}
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", BY_W)
def test_a_gradient_of_a_varying_value_is_that_of_its_rank(name: str) -> None:
    by = BY_W[name]
    out, kinds = run(
        lambda x, w: (g := by(lambda w: loss(w, x), pcast(w, "x", to="varying")), types(g)), X, W, specs=(P("x"), P())
    )
    assert kinds == {"{V:x}"}
    for block, x in zip(shards(out), X.chunk(4), strict=True):
        torch.testing.assert_close(block, by(lambda w, x=x: loss(w, x), W), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in BY_W if "hessian" not in name and "vmap" not in name])
def test_the_loss_may_be_summed_or_not(name: str) -> None:
    """Each rank's varying loss counts once, and so does the sum of all."""
    by = BY_W[name]
    one, two = run(
        lambda x, w: (by(lambda w: loss(w, x), w), by(lambda w: psum(loss(w, x), "x"), w)), X, W, specs=(P("x"), P())
    )
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_forward_mode_keeps_types() -> None:
    def body(x: Tensor, w: Tensor) -> Any:
        (value, tangent), (_, directional) = (
            func.jvp(lambda x: loss(w, x), (x,), (x.cos(),)),
            fspmd.jvp(lambda w: psum(loss(w, x), "x"), (w,), (w,)),
        )
        return types(value), types(tangent), types(directional), tangent, directional

    *kinds, tangent, directional = run(body, X, W, specs=(P("x"), P()))
    assert kinds == [{"{V:x}"}, {"{V:x}"}, {"{}"}]
    for block, x in zip(shards(tangent), X.chunk(4), strict=True):
        torch.testing.assert_close(block, func.jvp(lambda x: loss(W, x), (x,), (x.cos(),))[1])
    torch.testing.assert_close(directional, func.jvp(lambda w: total(w, X), (W,), (W,))[1])


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda x, w: func.vmap(lambda row: row @ w)(x), "{V:x}"),
        (lambda x, w: func.vmap(lambda row: row * 2)(w[None]), "{}"),
        (lambda x, w: func.vmap(lambda s: (x @ w) * s)(w), "{V:x}"),
        (lambda x, w: func.vmap(lambda row: psum(row @ w, "x"))(x), "{}"),
        (lambda x, w: func.vmap(func.grad(lambda row: (row @ w).sin()))(x), "{V:x}"),
        (lambda x, w: func.vmap(func.vmap(lambda s: s + x.sum()))(x * 0 + w), "{V:x}"),
        (lambda x, w: func.jacfwd(lambda x: x @ w)(x), "{V:x}"),
        (lambda x, w: func.hessian(lambda x: loss(w, x))(x), "{V:x}"),
        (lambda x, w: func.linearize(lambda x: x @ w, x)[1](x), "{V:x}"),
        (lambda x, w: torch.autograd.functional.vjp(lambda x: (x @ w).sum(), x)[1], "{V:x}"),
    ],
)
def test_transforms_keep_types(f: Callable[..., Any], expected: str) -> None:
    assert typed(f, X, W, specs=(P("x"), P())) == {expected}


# --- gradients in the body, hooks, closures -------------------------------------------------------------------------


def test_a_leaf_accumulates_summed_gradients() -> None:
    def body(x: Tensor, w: Tensor) -> Any:
        leaf = w.detach().requires_grad_()
        loss(leaf, x).backward()
        first = leaf.grad.clone()
        loss(leaf, x).backward()
        return types(leaf.grad), first, leaf.grad

    kinds, first, second = run(body, X, W, specs=(P("x"), P()))
    assert kinds == {"{}"}
    torch.testing.assert_close(first, func.grad(total)(W, X), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(second, 2 * first)


def test_a_varying_leaf_has_a_varying_gradient() -> None:
    def body(x: Tensor, w: Tensor) -> Any:
        leaf = x.detach().requires_grad_()
        psum(loss(w, leaf), "x").backward()
        return types(leaf.grad), leaf.grad

    kinds, grad = run(body, X, W, specs=(P("x"), P()))
    assert kinds == {"{V:x}"}
    torch.testing.assert_close(torch.cat(shards(grad)), func.grad(lambda x: total(W, x))(X), rtol=1e-12, atol=1e-12)


def test_a_gradient_of_several_inputs_and_outputs() -> None:
    def body(x: Tensor, w: Tensor) -> Any:
        a, b = x.detach().requires_grad_(), w.detach().requires_grad_()
        out = [(a * b).sin(), b.cos()]
        cotangents = [torch.ones_like(out[0]), torch.ones_like(b)]
        grads = torch.autograd.grad(out, [a, b], cotangents, create_graph=True)
        unused = torch.autograd.grad(b.sum(), [a, b], allow_unused=True)
        return [types(g) for g in grads], grads, unused[0] is None

    kinds, (by_x, by_w), unused = run(body, X, W, specs=(P("x"), P()))
    assert kinds == [{"{V:x}"}, {"{}"}]
    assert unused
    expected = func.grad(lambda x, w: (x * w).sin().sum() + w.cos().sum(), (0, 1))(X, W)
    torch.testing.assert_close((torch.cat(shards(by_x)), by_w), expected, rtol=1e-12, atol=1e-12)


def test_a_cotangent_that_varies_more_than_its_output_is_refused() -> None:
    def body(x: Tensor, w: Tensor) -> Any:
        b = w.detach().requires_grad_()
        return torch.autograd.grad(b * 2, b, x[0])

    with pytest.raises(VarianceError, match="cotangent"):
        run(body, X, W, specs=(P("x"), P()))


@pytest.mark.parametrize("inside", [True, False])
def test_a_hook_sees_a_typed_gradient_and_may_communicate(inside: bool) -> None:
    seen: list[str] = []

    def body(x: Tensor, w: Tensor) -> Tensor:
        y = x * w
        y.register_hook(lambda g: seen.append(f"{typeof(g)} {typeof(psum(g, 'x'))}"))
        v = w * 1
        v.register_hook(lambda g: seen.append(repr(typeof(g))))
        return psum((y * v).sum(), "x")

    if inside:
        run(lambda x, w: fspmd.grad(lambda w: body(x, w))(w), X, W, specs=(P("x"), P()))
    else:
        leaf = W.clone().requires_grad_()
        shard_map(body, mesh=MESH, in_specs=(P("x"), P()), out_specs=P())(X, leaf).backward()
    assert sorted(seen) == ["f64[2,3]{V:x} f64[2,3]", "f64[3]"]


def test_a_hook_replaces_a_gradient() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        v = w * 1
        v.register_hook(lambda g: g * 10)
        return (x * v).sum()

    grad = run(lambda x, w: fspmd.grad(lambda w: body(x, w))(w), X, W, specs=(P("x"), P()))
    torch.testing.assert_close(grad, 10 * X.sum(0))


def test_a_hook_that_makes_an_invariant_gradient_vary_is_refused() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        v = w * 1
        v.register_hook(lambda g: g * axis_index("x"))
        return (x * v).sum()

    with pytest.raises(VarianceError, match="a hook on f64"):
        run(lambda x, w: fspmd.grad(lambda w: body(x, w))(w), X, W, specs=(P("x"), P()))


def test_closed_over_tensors_are_invariant_and_differentiable() -> None:
    w, scale = W.clone().requires_grad_(), torch.tensor(3.0, dtype=F64, requires_grad=True)

    @shard_map(mesh=MESH, in_specs=P("x"), out_specs=(P("x"), P()))
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        assert types([w, scale]) == {"{}"}
        return (x @ w) * scale, psum((x @ w).sin().sum(), "x") * scale

    rows, summed = f(X)
    (device_get(rows).square().sum() + device_get(summed)).backward()
    v, s = W.clone().requires_grad_(), torch.tensor(3.0, dtype=F64, requires_grad=True)
    (((X @ v) * s).square().sum() + (X @ v).sin().sum() * s).backward()
    torch.testing.assert_close((w.grad, scale.grad), (v.grad, s.grad), rtol=1e-12, atol=1e-12)


def test_a_closed_over_module() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 1)).double()
    f = shard_map(lambda x: psum(module(x).square().sum(), "x"), mesh=MESH, in_specs=P("x"), out_specs=P())
    device_get(f(X)).backward()
    found = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module(X).square().sum().backward()
    torch.testing.assert_close(found, [p.grad for p in module.parameters()], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN, nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_recurrent_modules_write_into_values_of_their_own(kind: Any, trained: bool, checked: bool) -> None:
    torch.manual_seed(0)
    module = kind(3, 5).double().requires_grad_(trained)

    def loss(x: Tensor) -> Tensor:
        out = module(x if "Cell" in kind.__name__ else x[None])
        return (out if isinstance(out, Tensor) else out[0]).square().sum()

    f = shard_map(lambda x: psum(loss(x), "x"), mesh=MESH, in_specs=P("x"), out_specs=P(), check_vma=checked)
    parameters = [p for p in module.parameters() if trained]
    found, expected = device_get(f(X)), loss(X)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    if trained:
        gradients = [torch.autograd.grad(value, parameters) for value in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


class Cube(torch.autograd.Function):
    """``w * x**3``, once differentiable."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(w, x)
        return w * x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        w, x = ctx.saved_tensors
        return g * x**3, g * 3 * w * x * x


def like_torch(w: Tensor, x: Tensor) -> Tensor:
    """A function that speaks the torch function protocol and applies a Function to values it made itself."""
    if torch.overrides.has_torch_function((w, x)):
        return torch.overrides.handle_torch_function(like_torch, (w, x), w, x)
    return Cube.apply(w * 2, x * 3).sum()


def distances(w: Tensor, x: Tensor) -> Tensor:
    """A function of torch's that calls one of the user's, which closes over ``w``."""
    return F.triplet_margin_with_distance_loss(
        x, 2 * x + 1, x - 1, distance_function=lambda a, b: Cube.apply(w, a - b).sum(-1).abs(), reduction="sum"
    )


@pytest.mark.parametrize("f", [like_torch, distances])
def test_functions_within_torch_functions(f: Callable[..., Tensor]) -> None:
    mapped = shard_map(lambda w, x: psum(f(w, x), "x"), mesh=MESH, in_specs=(P(), P("x")), out_specs=P())
    found, expected = (fspmd.grad(g, argnums=(0, 1))(W, X) for g in (mapped, f))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_function_that_torch_calls_varies_as_the_operands_do() -> None:
    def f(w: Tensor, x: Tensor) -> Tensor:
        return F.triplet_margin_with_distance_loss(w, w, w, distance_function=lambda a, b: (x * a).sum())

    with pytest.raises(VarianceError, match="distance_function returned f64"):
        run(f, W, X, specs=(P(), P("x")))


def test_types_do_not_outlive_the_body() -> None:
    w = W.clone()
    f = shard_map(lambda x: x * w, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    for _ in range(2):
        f(X)
    assert types(w) == {"{}"}
    assert types(torch.ones(2) * 2) == {"{}"}


def test_a_value_of_one_call_is_typed_anew_in_the_next() -> None:
    """The same tensor may enter once cut and once whole."""
    x = torch.arange(4.0)
    assert typed(lambda x: x * 1, x, specs=P("x")) == {"{V:x}"}
    assert typed(lambda x: x * 1, x, specs=P()) == {"{}"}
    assert typed(lambda x, y: [x * 1, y * 1], x, x, specs=(P("x"), P())) == {"{V:x}", "{}"}


@pytest.mark.parametrize("remember", [fspmd.checkpoint, lambda f: partial(checkpoint, f, use_reentrant=False)])
@pytest.mark.parametrize("inner", ["grad", "value_and_grad", "vjp", "grad of grad", "written"])
def test_a_gradient_within_a_checkpoint_has_its_function_run_once_before_backward(remember: Any, inner: str) -> None:
    runs = 0

    def energy(x: Tensor) -> Tensor:
        y = x.sin() if inner != "written" else x.sin().mul_(x)
        return (y.exp() * x).sum()

    def f(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        if inner == "vjp":
            (g,) = fspmd.vjp(energy, x)[1](torch.ones((), dtype=F64))
        elif inner == "value_and_grad":
            g = fspmd.value_and_grad(energy)(x)[1]
        elif inner == "grad of grad":
            g = fspmd.grad(lambda x: fspmd.grad(energy)(x).sin().sum())(x)
        else:
            g = fspmd.grad(energy)(x)
        return (g * x).cos().sum()

    x = X.clone().requires_grad_()
    out = remember(f)(x)
    assert runs == 1
    (got,) = torch.autograd.grad(out, x)
    assert runs == 2
    torch.testing.assert_close(got, torch.autograd.grad(f(x), x)[0], rtol=1e-12, atol=1e-12)


def test_a_gradient_within_a_checkpoint_of_what_was_written_into() -> None:
    def energy(x: Tensor) -> Tensor:
        y = x * 1
        z = y.sin()
        y.mul_(2)
        return (y * z).sum()

    with pytest.raises(fspmd.ArgumentError, match=r"shape \(8, 3\) that a gradient needs has been written into"):
        fspmd.checkpoint(lambda x: (fspmd.grad(energy)(x) ** 2).sum())(X.clone().requires_grad_())
