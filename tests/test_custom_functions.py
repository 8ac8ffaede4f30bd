"""Custom functions of autograd on Sharded values: gradients of both orders, replays, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from custom_function_programs import (
    LOSSES,
    SPECS,
    Activation,
    arguments,
    failures,
    failures_on_processes,
    gradients,
    recorded,
)
from processes import Processes
from simulated import GRID, MESH
from torch import Tensor

import fspmd
from fspmd import ArgumentError, P, communication_log, device_get, device_put


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    with Processes(4) as pool:
        yield pool


def test_gradients_are_those_of_plain_tensors() -> None:
    assert failures(GRID) == []


def test_gradients_on_processes(four: Processes) -> None:
    assert four.run(failures_on_processes) == [[]] * 4


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("name", LOSSES)
def test_jit_records_them(name: str, specs: Any) -> None:
    value, *expected = gradients(LOSSES[name], arguments(), 1)
    filled = [torch.zeros_like(x) if g is None else g for g, x in zip(expected, arguments(), strict=True)]
    torch.testing.assert_close(recorded(name, specs, GRID), [value, *filled])


def test_nothing_moves_that_need_not() -> None:
    x = device_put(torch.ones(8, 4), P("x"), mesh=MESH).requires_grad_()
    with communication_log() as log:
        Activation.apply(x).sum().backward()
    assert not list(log)


def test_arguments_that_forward_does_not_take() -> None:
    class Named(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *, scale: float = 2.0) -> Tensor:
            return x * scale

    x = device_put(torch.ones(8, 4), P("x"), mesh=MESH).requires_grad_()
    with pytest.raises(ArgumentError, match=r"Named.apply got arguments that forward does not take: .*'scales'"):
        Named.apply(x, scales=3.0)
    with pytest.raises(ArgumentError, match=r"Named.forward takes 'scale' by keyword alone, .* leave the \* out"):
        Named.apply(x, scale=3.0)


def test_a_plain_argument_has_a_gradient() -> None:
    """It would be lost, if a Function took the shell of the Sharded beside it."""

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
            ctx.save_for_backward(w, x)
            return w * x

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
            return (g * ctx.saved_tensors[1]).sum(0), None

    w = torch.ones(3, requires_grad=True)
    Times.apply(w, device_put(torch.arange(12.0).view(4, 3), P("x"), mesh=MESH)).sum().backward()
    assert w.grad is not None
    assert device_get(w.grad).tolist() == [18.0, 22.0, 26.0]


def test_distributions_that_draw_by_a_custom_function() -> None:
    weights = torch.linspace(0.5, 2, 12).view(4, 3)
    x = device_put(weights, P("x"), mesh=MESH).requires_grad_()
    drawn = torch.distributions.Dirichlet(x).rsample()
    (drawn * torch.arange(3.0)).sum().backward()
    y = weights.requires_grad_()
    total = y.sum(-1, keepdim=True).expand_as(y)
    values = device_get(drawn.detach())
    slope = torch._dirichlet_grad(values, y.detach(), total.detach())
    g = torch.arange(3.0).expand(4, 3)
    torch.testing.assert_close(device_get(x.grad), slope * (g - (values * g).sum(-1, keepdim=True)))


def test_what_is_refused() -> None:
    x = device_put(torch.ones(8, 4), P("x"), mesh=MESH).requires_grad_()

    class Writes(Activation):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

    class Misshapen(Activation):
        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g.sum(0)

    with pytest.raises(ArgumentError, match=r"Writes.apply writes into Sharded"):
        Writes.apply(x * 1)
    with pytest.raises(ArgumentError, match=r"Misshapen.backward returned .* as the gradient of Sharded"):
        Misshapen.apply(x).sum().backward()
    with pytest.raises(ArgumentError, match=r"^Activation.apply, .* in a transform such as vmap or torch.func.grad"):
        torch.func.grad(lambda x: Activation.apply(x).sum())(x)
    assert fspmd.typeof(Activation.apply(x.detach())).partition == P("x", None)  # no gradient to lose


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise ValueError("an error of its own")


def test_errors_of_a_backward_are_told() -> None:
    x = device_put(torch.ones(6), P("x"), mesh=MESH).requires_grad_()
    with pytest.raises(ValueError, match="an error of its own"):
        torch.autograd.grad(_Failing.apply(x).sum(), x)
