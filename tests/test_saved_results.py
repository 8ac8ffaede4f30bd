"""Hooks on results that autograd saves, of uneven simulated blocks: they see what they see of plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fspmd import ArgumentError, P, device_get, device_put, make_mesh, psum, shard_map

F64 = torch.float64
SAVED: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "sqrt": lambda x: (x * x + 1).sqrt(),
    "reciprocal": lambda x: (x * x + 1).reciprocal(),
    "a power": lambda x: (x * x + 1).pow(x),
    "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: x.norm(dim=-1),
    "std": lambda x: x.std(-1),
    "amax": lambda x: x.amax(-1),
    "sin, which saves none": torch.sin,
}
#: what torch differentiates by plain sizes alone
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda x: x.prod(-1),
    "cumprod": lambda x: x.cumprod(-1),
}
LAYOUTS = [(2, P("x")), (4, P("x")), (2, P(None, "x")), (2, P())]  # of 5 rows, on 4 ranks 2, 2, 1 and 0


def _seen(f: Callable[[Any], Any], x: Any, method: str, total: Callable[[Any], Any] = torch.sum) -> list[Any]:
    """What is seen of the gradient of ``f(x)`` in a gradient, and in a gradient of that, and the last for x."""
    seen: list[Any] = []
    leaf = x.detach().requires_grad_()
    y = f(leaf * 1.0)
    getattr(y, method)(*[seen.append] * (method == "register_hook"))
    (g,) = torch.autograd.grad(total(y.sin() * y), leaf, create_graph=True)
    if method == "register_hook":
        assert len(seen) == 1
    total(g * g * g).backward()
    return [*(seen or [y.grad]), leaf.grad]


@pytest.mark.one_of(4)
@pytest.mark.parametrize("method", ["register_hook", "retain_grad"])
@pytest.mark.parametrize("name", [*SAVED, *REFUSED])
def test_their_gradient_is_seen_whole(name: str, method: str) -> None:
    torch.manual_seed(0)
    x, f = torch.randn(5, 3, dtype=F64), (SAVED | REFUSED)[name]
    wanted = _seen(f, x, method)
    for n, spec in LAYOUTS:
        laid = device_put(x, spec, mesh=make_mesh((n,), ("x",), transport="simulation"))
        try:
            found = [device_get(one.detach()) for one in _seen(f, laid, method)]
        except ArgumentError:
            found = []
        assert found or name in REFUSED
        for one, other in zip(found, wanted, strict=bool(found)):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["exp", "softmax"])
def test_their_gradient_is_seen_whole_in_a_body(name: str) -> None:
    torch.manual_seed(0)
    x, mesh = torch.randn(5, 3, dtype=F64), make_mesh((4,), ("x",), transport="simulation")

    def body(x: Tensor) -> Any:
        return tuple(one.detach() for one in _seen(SAVED[name], x, "retain_grad", lambda y: psum(y.sum(), "x")))

    found = shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=(P("x"), P("x")))(x)
    torch.testing.assert_close(list(map(device_get, found)), _seen(SAVED[name], x, "retain_grad"))
