"""Custom functions of autograd as libraries write them, and losses made with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import fspmd
from fspmd import Mesh, P, device_get, device_put, make_mesh

F64 = torch.float64


class Activation(torch.autograd.Function):
    """Old style, one argument, as Bloom's GELU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1 + torch.tanh(0.8 * x))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        t = torch.tanh(0.8 * x)
        return g * (0.5 * (1 + t) + 0.4 * x * (1 - t * t))


class Product(torch.autograd.Function):
    """Asks whose gradient is needed, and keeps a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.scale = scale
        return (x @ w) * scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        of_x = g @ w.T * ctx.scale if ctx.needs_input_grad[0] else None
        return of_x, x.T @ g * ctx.scale if ctx.needs_input_grad[1] else None, None


class Several(torch.autograd.Function):
    """New style: three results, one without a gradient, one saved; no zeros for those that are not used."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * w, x.argsort(-1), x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output[2])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: None, h: Tensor | None) -> Any:
        x, w, y = ctx.saved_tensors
        of_x = 0 if g is None else g * w
        return of_x if h is None else of_x + h * y, None if g is None else (g * x).sum(0)


class Scaled(torch.autograd.Function):
    """The identity, with a scaled gradient; a default; a backward without a graph."""

    @staticmethod
    def forward(x: Tensor, scale: float = 2.0) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def vjp(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.scale, None


class Reversed(torch.autograd.Function):
    """Returns its argument itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class Gated(torch.autograd.Function):
    """Returns the gradient of a factor as it lies in the product; torch sums it over the dims that were broadcast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, v: Tensor, power: int = 1) -> Tensor:
        ctx.save_for_backward(x, v)
        ctx.power = power
        return x * v**power

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, v = ctx.saved_tensors
        return g * v**ctx.power, g * x * ctx.power * v ** (ctx.power - 1), None


Loss = Callable[[Any, Any, Any], Any]


def _takes_names() -> bool:
    """Whether ``Function.apply`` takes keyword arguments. Those of torch 2.11 are positional."""
    try:
        Product.apply(torch.eye(2), scale=1.0, w=torch.eye(2))
    except TypeError:
        return False
    return True


LOSSES: dict[str, Loss] = {
    "activation": lambda x, w, v: (Activation.apply(x @ w) ** 2).sum(),
    "activation of a pending sum": lambda x, w, v: Activation.apply((x * v).sum()),
    "product": lambda x, w, v: (Product.apply(x, w, 2.0) ** 2).sum(),
    "several": lambda x, w, v: sum((y**2 + z * i).sum() for y, i, z in [Several.apply(x, v)]),
    "first of several": lambda x, w, v: (Several.apply(x, v)[0] ** 2).sum(),
    "last of several": lambda x, w, v: (Several.apply(x, v)[2] ** 2).sum(),
    "scaled": lambda x, w, v: (Scaled.apply(x) ** 2).sum() + (Scaled.apply(x @ w, 3.0) ** 2).sum(),
    "reversed": lambda x, w, v: (Reversed.apply(x * v) ** 2).sum() + (Reversed.apply(x) ** 3).sum(),
    "broadcast": lambda x, w, v: (Gated.apply(x, v, 2) ** 2).sum() + Gated.apply(x, v[:1]).sum(),
    "chain": lambda x, w, v: (Activation.apply(Product.apply(Activation.apply(x), w, 0.5)) ** 2).sum(),
    "checkpoint": lambda x, w, v: (
        checkpoint(lambda x: Product.apply(Activation.apply(x), w, 1.0), x, use_reentrant=False) ** 2
    ).sum(),
}
if _takes_names():
    LOSSES["arguments by name"] = lambda x, w, v: (Product.apply(x, scale=2.0, w=w) ** 2).sum()
ONCE = {"reversed"}  # losses whose gradients have none
SPECS = [(P("x"), P(None, "y"), P()), (P("x", "y"), P("y"), P("y")), (P(), P("x"), P()), (P("x"), None, None)]


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    """x of 5 rows, so that blocks are uneven; w and v."""
    generator = torch.Generator().manual_seed(0)
    x, w, v = (torch.randn(shape, generator=generator, dtype=F64) for shape in ((5, 4), (4, 6), (4,)))
    return x, w, v


def placed(specs: Any, mesh: Mesh) -> list[Any]:
    """The arguments on a mesh; without a spec one stays plain."""
    pairs = zip(arguments(), specs, strict=True)
    return [x if spec is None else device_put(x, spec, mesh=mesh) for x, spec in pairs]


def gradients(f: Loss, args: Any, order: int) -> list[Any]:
    """The loss, and the gradients of all arguments; for order 2 of the sum of squares of the gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in args]
    value = f(*leaves)
    if order == 2:
        first = torch.autograd.grad(value, leaves, create_graph=True, allow_unused=True)
        value = sum((g**2).sum() for g in first if g is not None)
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    return [device_get(y.detach()) if y is not None else None for y in (value, *found)]


def failures(mesh: Mesh) -> list[str]:
    """The losses, layouts and orders whose gradients are not those of plain tensors."""
    wrong = []
    for name, f in LOSSES.items():
        for specs in SPECS:
            for order in (1,) if name in ONCE else (1, 2):
                expected, found = gradients(f, arguments(), order), gradients(f, placed(specs, mesh), order)
                try:
                    torch.testing.assert_close(found, expected)
                except AssertionError as error:
                    wrong.append(f"{name} {specs} {order}: {error}")
    return wrong


def failures_on_processes() -> list[str]:
    return failures(make_mesh((2, 2), ("x", "y"), transport="process_group", device="cpu"))


def recorded(name: str, specs: Any, mesh: Mesh) -> list[Any]:
    """The loss and gradients of a replay."""
    step = fspmd.jit(fspmd.value_and_grad(LOSSES[name], argnums=(0, 1, 2)))
    step(*placed(specs, mesh))
    value, found = step(*placed(specs, mesh))
    return [device_get(y) for y in (value, *found)]
