"""Tensors that a body closes over are differentiable, with types and without, beside unsharded torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from processes import Processes
from simulated import CUBE, F64, GRID, MESH
from torch import Tensor, func
from torch.utils.checkpoint import checkpoint

import fspmd
from fspmd import Mesh, P, VarianceError, device_get, make_mesh, psum, shard_map
from fspmd.local_view.closures import captured_values

W = torch.linspace(-1.0, 1.0, 3, dtype=F64)
X = torch.linspace(-2.0, 2.0, 36, dtype=F64).reshape(12, 3)

Total = Callable[[Any], Any]  # the sum of a value over all rows, wherever they are


def _twice(w: Tensor, x: Tensor, total: Total) -> Tensor:
    return total((x * w).sin().sum()) * (w * w).sum()


def _alone(w: Tensor, x: Tensor, total: Total) -> Tensor:
    return w.exp().sum()


def _summed_first(w: Tensor, x: Tensor, total: Total) -> Tensor:
    return (total(x.sum(0)) * w.view(1, 3).cos()).sum()


def _checkpointed(w: Tensor, x: Tensor, total: Total) -> Tensor:
    return total(checkpoint(lambda x: (x @ w).tanh().sum(), x, use_reentrant=False))


def _in_place(w: Tensor, x: Tensor, total: Total) -> Tensor:
    return total((x * w).add_(w).square_().sum())


def _gradient_inside(w: Tensor, x: Tensor, total: Total) -> Tensor:
    def loss(x: Tensor) -> Tensor:
        value: Tensor = (x * w).sin().sum()
        return value

    return total((fspmd.grad(loss)(x) * func.grad(loss)(x)).sum())


PROGRAMS = (_twice, _alone, _summed_first, _checkpointed, _in_place, _gradient_inside)


def _by_backward(f: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    w = w.clone().requires_grad_()
    (f(w) * 3).backward()
    assert w.grad is not None
    return w.grad


def _hvp(f: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    v = w.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(v), v, create_graph=True)
    return torch.autograd.grad(g @ w, v)[0]


def _through(f: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    """The tensor closed over has a history, and other uses."""
    return func.grad(lambda w: f(w.sin()) * w.sum())(w)


DERIVATIVES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "backward": _by_backward,
    "twice by autograd": _hvp,
    "func.grad": lambda f, w: func.grad(f)(w),
    "fspmd.grad": lambda f, w: fspmd.grad(f)(w),
    "fspmd.grad twice": lambda f, w: fspmd.grad(lambda w: (fspmd.grad(f)(w) * w).sum())(w),
    "func.vjp": lambda f, w: func.vjp(f, w)[1](torch.tensor(2.0, dtype=F64)),
    "fspmd.jvp": lambda f, w: fspmd.jvp(f, (w,), (w.cos(),)),
    "hessian": lambda f, w: func.hessian(f)(w),
    "reverse over forward": lambda f, w: func.grad(lambda w: func.jvp(f, (w,), (w.cos(),))[1])(w),
    "vmap": lambda f, w: func.vmap(func.grad(f))(torch.stack([w, w.sin()])),
    "with a history": _through,
}
#: mesh, the spec of the rows, the axes of the map
LAYOUTS: tuple[tuple[Mesh, P, set[str] | None], ...] = (
    (MESH, P("x"), None),
    (GRID, P("y"), None),
    (GRID, P(("y", "x")), None),
    (CUBE, P("z"), {"z"}),
)


def _sharded(program: Any, mesh: Mesh, spec: P, names: set[str] | None, checked: bool, w: Tensor) -> Tensor:
    def body(x: Tensor) -> Tensor:
        out: Tensor = program(w, x, lambda value: psum(value, tuple(spec.mentioned)))
        return out

    mapped = shard_map(body, mesh=mesh, in_specs=spec, out_specs=P(), axis_names=names, check_vma=checked)
    out: Tensor = device_get(mapped(X))
    return out


@pytest.mark.one_of(6)
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(("mesh", "spec", "names"), LAYOUTS)
def test_closed_over_tensors_are_differentiable(
    mesh: Mesh, spec: P, names: set[str] | None, program: Any, checked: bool
) -> None:
    whole = partial(program, x=X, total=lambda value: value)
    ours = partial(_sharded, program, mesh, spec, names, checked)
    for name, derivative in DERIVATIVES.items():
        if program is _checkpointed and name != "backward":
            continue  # torch's checkpoint goes with autograd alone
        torch.testing.assert_close(derivative(ours, W), derivative(whole, W), rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("checked", [True, False])
def test_a_closed_over_tensor_in_nested_maps(checked: bool) -> None:
    def loss(w: Tensor) -> Tensor:
        def outer(x: Tensor) -> Tensor:
            local = w * 2

            def inner(x: Tensor) -> Tensor:
                return psum((x * w * local).sum(), "y")

            return psum(shard_map(inner, in_specs=P("y"), out_specs=P(), check_vma=checked)(x), "x")

        mapped = shard_map(outer, mesh=GRID, in_specs=P("x"), out_specs=P(), axis_names={"x"}, check_vma=checked)
        out: Tensor = device_get(mapped(X))
        return out

    torch.testing.assert_close(fspmd.grad(loss)(W), 4 * W * X.sum(0))


@pytest.mark.parametrize("checked", [True, False])
def test_a_closed_over_tensor_returned_as_it_is(checked: bool) -> None:
    def loss(w: Tensor) -> Tensor:
        mapped = shard_map(lambda x: (w, w.sin()), mesh=GRID, in_specs=P("x"), out_specs=P(), check_vma=checked)
        first, second = device_get(mapped(X))
        total: Tensor = first.sum() + second.sum()
        return total

    for by in (fspmd.grad, func.grad):
        torch.testing.assert_close(by(loss)(W), 1 + W.cos())


class _Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(W.clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


class _Factor:
    """An object that is no module."""

    def __init__(self, w: Tensor) -> None:
        self.kept = {"w": w}

    def __call__(self, x: Tensor) -> Tensor:
        return self.scaled(x)

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.kept["w"]


FROZEN = W.clone()


def _by_global(x: Tensor) -> Tensor:
    return x * FROZEN


@pytest.mark.parametrize(
    "held",
    [
        *("cell", "list", "module", "method", "default", "partial", "partial of a cell", "global"),
        *("object", "method of an object", "call of an object", "call of a method"),
    ],
)
def test_what_was_frozen_may_be_trained_later(held: str) -> None:
    module, w = _Scaled(), W.clone()
    listed, factor = [w], _Factor(w)
    function, trained = {
        "cell": (lambda x: x * w, w),
        "list": (lambda x: x * listed[0], w),
        "module": (lambda x: module(x), module.w),  # noqa: PLW0108
        "method": (module.forward, module.w),
        "default": (lambda x, v=w: x * v, w),
        "partial": (partial(torch.mul, w), w),
        "partial of a cell": (partial(lambda by, x: x * w * by, 1.0), w),
        "object": (factor, w),
        "method of an object": (factor.scaled, w),
        "call of an object": (lambda x: 1.0 * factor(x), w),
        "call of a method": (lambda x: 1.0 * factor.scaled(x), w),
        "global": (lambda x: _by_global(x), FROZEN),  # noqa: PLW0108
    }[held]
    apply = shard_map(function, mesh=MESH, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    x = X.clone().requires_grad_()
    try:
        device_get(apply(x)).sum().backward()  # shows a graph without closures
        trained.requires_grad_()
        device_get(apply(x)).sum().backward()
        torch.testing.assert_close(trained.grad, X.sum(0))
    finally:
        FROZEN.requires_grad_(False)
        FROZEN.grad = None


def _on_processes(checked: bool) -> list[Any]:
    mesh = make_mesh((2, 2), ("x", "y"))
    found = []
    for program in PROGRAMS[:3]:
        ours = partial(_sharded, program, mesh, P("y"), None, checked)
        found += [DERIVATIVES[name](ours, W) for name in ("backward", "fspmd.grad", "hessian", "reverse over forward")]
    return found


@pytest.mark.one_of(2)
@pytest.mark.parametrize("checked", [True, False])
def test_on_processes(checked: bool) -> None:
    expected = []
    for program in PROGRAMS[:3]:
        whole = partial(program, x=X, total=lambda value: value)
        expected += [DERIVATIVES[n](whole, W) for n in ("backward", "fspmd.grad", "hessian", "reverse over forward")]
    with Processes(4) as pool:
        for found in pool.run(_on_processes, checked):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


#: calls whose result is, or views, a tensor that a body closes over, typed by the block beside it
SHARING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "type_as": lambda w, x: w.type_as(x),
    "to": lambda w, x: w.to(x),
    "expand_as": lambda w, x: w.expand_as(x),
    "atleast_1d": lambda w, x: torch.atleast_1d(w, x)[0],
    "broadcast_tensors": lambda w, x: torch.broadcast_tensors(w, x)[0],
}


def shared(transport: str) -> dict[str, list[float] | str]:
    """The gradient of a tensor that ran in a body without gradients before; and what a write into the result gives."""
    mesh, found = make_mesh((4,), ("x",), transport=transport, device="cpu"), dict[str, list[float] | str]()
    x = torch.arange(12.0, dtype=F64)
    for name, share in SHARING.items():
        w = torch.ones(3, dtype=F64, requires_grad=True)
        f = shard_map(lambda x: psum((share(w, x) * x).sum(), "x"), mesh=mesh, in_specs=P("x"), out_specs=P())  # noqa: B023
        with torch.no_grad():
            f(x)
        (gradient,) = torch.autograd.grad(f(x), w)
        found[name] = device_get(gradient).tolist()
        plain = torch.ones(3, dtype=F64)
        write = shard_map(lambda x: share(plain, x).add_(x), mesh=mesh, in_specs=P("x"), out_specs=P("x"))  # noqa: B023
        with pytest.raises(VarianceError):
            write(x)
        assert plain.tolist() == [1.0, 1.0, 1.0]
    ones = torch.ones(3, dtype=F64)
    body = shard_map(
        lambda x: torch.autograd.grad(psum(y := x.detach().requires_grad_(), "x"), y, ones)[0],
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P("x"),
    )
    found["cotangent"] = [device_get(body(x)).tolist() for _ in range(2)][1]
    return found


def test_what_a_body_closes_over_keeps_its_type() -> None:
    expected = {name: [18.0, 22.0, 26.0] for name in SHARING} | {"cotangent": [1.0] * 12}
    assert shared("simulation") == expected
    with Processes(4) as pool:
        assert pool.run(shared, "process_group") == [expected] * 4


def _proxy() -> Any:
    """An object that finds attributes by code, which may fail or have side effects."""

    class Guarded(type):
        def __getattr__(cls, name: str) -> Any:
            raise RuntimeError(name)

    class Proxy(metaclass=Guarded):
        def __init__(self) -> None:
            self.weight = W

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

        @property
        def local(self) -> Tensor:
            raise RuntimeError("local")

    return Proxy()


def test_a_search_runs_no_code_of_objects() -> None:
    proxy = _proxy()

    def body(x: Tensor) -> Tensor:
        return x * proxy.weight if x is not None else proxy.local + proxy.absent

    assert [name for name, _ in captured_values(body)] == ["proxy.weight"]


def test_names_of_closed_over_tensors_have_no_addresses() -> None:
    states = {"w": W, 1: W + 1, object(): W + 2, id(W): W + 3}
    names = [name for name, _ in captured_values(lambda: states)]
    assert names == ["states['w']", "states[1]", "states[key 2]", "states[key 3]"]
