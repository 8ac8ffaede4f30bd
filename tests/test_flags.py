"""New values are where they are asked for, and autograd follows what torch follows; integers take no cotangents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fspmd import (
    ArgumentError,
    P,
    TreeError,
    communication_log,
    device_get,
    device_put,
    grad,
    make_mesh,
    vjp,
    vmap,
)

F64 = torch.float64
MESH = make_mesh((2, 2), ("x", "y"), transport="simulation")
PLAIN = torch.linspace(-1, 1, 32, dtype=F64).sin().reshape(8, 4)

NEW: dict[str, Callable[..., Any]] = {
    "empty_like": torch.empty_like,
    "zeros_like": torch.zeros_like,
    "full_like": lambda x, **options: torch.full_like(x, 2.0, **options),
    "rand_like": torch.rand_like,
    "randint_like": lambda x, **options: torch.randint_like(x, 9, **options),
    "new_zeros": lambda x, **options: x.new_zeros(3, **options),
    "new_tensor": lambda x, **options: x.new_tensor([1.0], **options),
}


@pytest.mark.parametrize("name", NEW)
def test_the_device_is_that_which_is_asked_for(name: str) -> None:
    for spec in (P(), P("x", "y"), P(unreduced={"x"})):
        x = device_put(PLAIN, spec, mesh=MESH)
        for device in (None, "cpu", torch.device("cpu")):
            assert NEW[name](x, device=device).device.type == "cpu"
        made = NEW[name](x, device="meta")
        assert (made.device.type, tuple(made.shape)) == ("meta", tuple(NEW[name](x).shape))
        with pytest.raises(ArgumentError, match="leave device= out"):
            NEW[name](x, device="cuda")


DRAWN: dict[str, Callable[[Any], Any]] = {
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "poisson": lambda x: torch.poisson(x.abs()),
    "normal": lambda x: torch.normal(x, 1.0),
    "normal, both": lambda x: torch.normal(x, x.abs()),
    "rand_like": torch.rand_like,
    "bernoulli of a number": lambda x: x.bernoulli(0.5),
    "multinomial": lambda x: x.softmax(1).multinomial(1),
}


@pytest.mark.parametrize("name", DRAWN)
def test_draws_are_followed_as_torch_follows_them(name: str) -> None:
    for spec in (P(), P("x", "y"), P(unreduced={"x"})):
        x, plain = device_put(PLAIN, spec, mesh=MESH).requires_grad_(), PLAIN.clone().requires_grad_()
        out, expected = DRAWN[name](x), DRAWN[name](plain)
        assert out.requires_grad == expected.requires_grad
        if out.requires_grad:
            out.sum().backward()
            assert not device_get(x.grad).any()
        torch.manual_seed(0)
        first = device_get(DRAWN[name](x.detach()))
        torch.manual_seed(0)
        assert torch.equal(device_get(DRAWN[name](x)).detach(), first)


def test_integers_take_none_for_a_cotangent() -> None:
    for spec in (P(), P("x", "y"), P(("y", "x"))):
        x = device_put(PLAIN, spec, mesh=MESH)
        _, pull = vjp(lambda x: {"values": x * 3, "places": x.argmax(1)}, x)
        (found,) = pull({"values": torch.ones(8, 4, dtype=F64), "places": None})
        assert torch.equal(device_get(found), torch.full((8, 4), 3.0, dtype=F64))
        with pytest.raises(TreeError):
            pull({"values": None, "places": None})

    def inner(x: Any) -> Any:
        _, pull = vjp(lambda x: (x * x, x.argmax(1)), x)
        return pull((torch.ones(8, 4, dtype=F64), None))[0].sum()

    assert torch.equal(grad(inner)(PLAIN), torch.full((8, 4), 2.0, dtype=F64))


@pytest.mark.parametrize("spec", [P("x"), P("y"), P(("x", "y")), P("x", "y")], ids=repr)
def test_a_mapped_dim_that_is_sharded_stays_so(spec: P) -> None:
    def f(x: Any, w: Any) -> Any:
        return (x.cumsum(0) @ w).sin(), x.sum()

    w = torch.randn(4, 3, dtype=F64)
    expected = torch.vmap(f, (0, None))(PLAIN, w)
    x = device_put(PLAIN, spec, mesh=MESH)
    with communication_log() as log:
        found = vmap(f, (0, None))(x, w)
    assert len(spec) > 1 or list(log) == [], str(log)
    for one, wanted in zip(found, expected, strict=True):
        assert one.spec.partition[0] == x.spec.partition[0]
        torch.testing.assert_close(device_get(one), wanted)
    gradient = grad(lambda x: vmap(f, (0, None))(x, w)[0].sum())(x)
    plain = PLAIN.clone().requires_grad_()
    torch.vmap(f, (0, None))(plain, w)[0].sum().backward()
    torch.testing.assert_close(device_get(gradient), plain.grad)
    moved = vmap(f, (0, None), (1, 0))(x, w)
    torch.testing.assert_close(device_get(moved[0]), expected[0].mT)


def test_names_of_mapped_dims_are_refused() -> None:
    with pytest.raises(ArgumentError, match="collectives here are over mesh axes"):
        vmap(torch.sin, axis_name="batch")
