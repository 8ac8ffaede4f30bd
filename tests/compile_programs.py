"""Functions that `torch.compile` has made, in bodies and around them; the judge is the same function, uncompiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fspmd
from fspmd import Mesh, P, device_get, device_put, grad, jit, psum, shard_map

Function = Callable[[Tensor, Tensor], Tensor]


def _plain(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w) * x.sum(1, keepdim=True)


def _broken(x: Tensor, w: Tensor) -> Tensor:
    y = torch.tanh(x @ w)
    torch._dynamo.graph_break()
    return y * x.sum(1, keepdim=True)


def _writes(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y.tanh_()
    return y * x.sum(1, keepdim=True)


class _Module(nn.Module):
    def __init__(self, f: Function, w: Tensor) -> None:
        super().__init__()
        self.f, self.w = f, nn.Parameter(w.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x, self.w)


class _Setting:
    """One function, compiled, on a mesh: how it is mapped, and what it is given."""

    def __init__(self, f: Function, backend: str, mesh: Mesh, checked: bool, given: tuple[Tensor, Tensor]) -> None:
        self.f, self.backend, self.mesh, self.checked = f, backend, mesh, checked
        self.whole = given
        self.x = device_put(given[0], P("x"), mesh=mesh)
        self.w = device_put(given[1], P(), mesh=mesh)

    def compiled(self, f: Any) -> Any:
        return torch.compile(f, backend=self.backend)

    def mapped(self, body: Any, out: P | None = None, only_x: bool = False) -> Any:
        specs: Any = P("x") if only_x else (P("x"), P())
        return shard_map(
            body, mesh=self.mesh, in_specs=specs, out_specs=P("x") if out is None else out, check_vma=self.checked
        )

    def gradients(self, loss: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
        x, w = self.x.detach().requires_grad_(), self.w.detach().requires_grad_()
        loss(x, w).backward()
        return x.grad, w.grad


def _argument(s: _Setting) -> Any:
    compiled = s.compiled(s.f)
    return s.gradients(lambda x, w: (s.mapped(compiled)(x, w) ** 2).sum())


def _closed_over(s: _Setting) -> Any:
    compiled, x, w = s.compiled(s.f), s.x.detach().requires_grad_(), s.whole[1].clone().requires_grad_()
    (s.mapped(lambda x: compiled(x, w), only_x=True)(x) ** 2).sum().backward()
    return x.grad, w.grad


def _module(s: _Setting) -> Any:
    module, x = _Module(s.f, s.whole[1]), s.x.detach().requires_grad_()
    module.compile(backend=s.backend)
    (s.mapped(module, only_x=True)(x) ** 2).sum().backward()
    return x.grad, module.w.grad


def _collective(s: _Setting) -> Any:
    compiled = s.compiled(lambda x, w: psum((s.f(x, w) ** 2).sum(), "x"))
    return s.gradients(s.mapped(compiled, P()))


def _differentiated_within(s: _Setting) -> Any:
    compiled = s.compiled(s.f)
    inner = grad(lambda x, w: psum((compiled(x, w) ** 2).sum(), "x"), argnums=(0, 1))
    return shard_map(inner, mesh=s.mesh, in_specs=(P("x"), P()), out_specs=(P("x"), P()))(s.x, s.w)


def _differentiated_around(s: _Setting) -> Any:
    compiled = s.compiled(s.f)
    return grad(lambda x, w: (s.mapped(compiled)(x, w) ** 2).sum(), argnums=(0, 1))(s.x, s.w)


def _recorded_arguments(s: _Setting) -> Any:
    compiled = s.compiled(s.f)
    body = s.mapped(compiled)
    step = jit(grad(lambda x, w: (body(x, w) ** 2).sum(), argnums=(0, 1)))
    step(s.x * 2, s.w)
    return step(s.x, s.w)


def _around(s: _Setting) -> Any:
    body = s.mapped(s.f)
    return s.gradients(s.compiled(lambda x, w: (body(x, w) ** 2).sum() * 1.0))


_WAYS = {
    way.__name__.strip("_"): way
    for way in (
        _argument,
        _closed_over,
        _module,
        _collective,
        _differentiated_within,
        _differentiated_around,
        _recorded_arguments,
        _around,
    )
}


def collectives_of_all(backends: tuple[str, ...]) -> list[str]:
    """What is wrong of collectives of all four processes in unchecked bodies that are compiled."""
    n = 4
    mesh = fspmd.make_mesh((n,), ("x",), device="cpu")
    whole = torch.randn(2 * n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()

    def body(x: Tensor) -> Tensor:
        return psum((x.sin() ** 2).sum(0), "x") * x.cos() * fspmd.all_gather(x, "x", axis=1, tiled=True).sum(1, True)

    def alone(x: Tensor) -> Tensor:
        rows = x.view(n, -1, 3).sum((0, 2))[:, None].repeat(n, 1)
        return (x.sin() ** 2).sum(0) * x.cos() * rows

    expected = torch.autograd.grad(alone(whole).sum(), whole)[0]
    wrong = []
    for backend in backends:
        torch._dynamo.reset()
        compiled = torch.compile(body, backend=backend)
        x = device_put(whole.detach(), P("x"), mesh=mesh).requires_grad_()
        for f in (compiled, lambda x, f=compiled: f(x) * 1):
            x.grad = None
            out = shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)(x)
            out.sum().backward()
            if not (torch.allclose(device_get(out), alone(whole)) and torch.allclose(device_get(x.grad), expected)):
                wrong.append(backend)
    return wrong


def compiled_functions(
    transport: str, backends: tuple[str, ...] = ("eager", "aot_eager"), sample: int = 1
) -> list[str]:
    """What is wrong, of every way to use a compiled function on two ranks; each ``sample``-th."""
    mesh = fspmd.make_mesh((2,), ("x",), transport=transport, device="cpu")
    if mesh.coordinate() is None:
        return []
    given = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 6, generator=given, dtype=torch.float64).requires_grad_() for n in (5, 6))
    (_plain(x, w) ** 2).sum().backward()
    expected = x.grad, w.grad
    wrong = []
    every = itertools.product(_WAYS, (_plain, _broken, _writes), backends, (True, False))
    for name, f, backend, checked in itertools.islice(every, 0, None, sample):
        torch._dynamo.reset()
        setting = _Setting(f, backend, mesh, checked, (x.detach(), w.detach()))
        found = map(device_get, _WAYS[name](setting))
        if not all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True)):
            wrong.append(f"{name} {f.__name__} {backend} {'checked' if checked else 'unchecked'}")
    return wrong
