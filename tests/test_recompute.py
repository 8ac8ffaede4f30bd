"""A checkpoint stops its recomputation by an exception, and counts what is saved: both are its own affair.

The judge is float64 torch without checkpoints.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fspmd import P, checkpoint, device_get, device_put, explicit, make_mesh

MESH = make_mesh((4,), ("x",))
X = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LEVELS = torch.tensor([0.1, 0.7], dtype=X.dtype)
COUNTS = torch.tensor([1, 0, 2, 1, 3])

CHECKPOINTS: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]]] = {
    "fspmd": checkpoint,
    "torch": lambda f: lambda x: torch_checkpoint(f, x, use_reentrant=False),
}
LAST: dict[str, Callable[[Any], Any]] = {  # the call that saves the last tensor, so the one that is stopped
    "a mask": lambda x: x[x > 0] * 2,
    "masked_select": lambda x: x.masked_select(x > 0),
    "quantile": lambda x: torch.quantile(x, LEVELS, dim=1),
    "repeat_interleave": lambda x: x.repeat_interleave(COUNTS, dim=0),
    "corrcoef": torch.corrcoef,
    "ctc_loss": lambda x: F.ctc_loss(
        x[:, None].log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2])
    ),
    "a rule": lambda x: x.sin(),
    "a composite": lambda x: F.multilabel_soft_margin_loss(x, (X > 0).to(X.dtype)),
    "a graph": lambda x: torch.trapezoid(x, dim=0).exp(),
}


def _gradient(f: Callable[[Any], Any], x: Any) -> Any:
    f(x).sum().backward()
    return x.grad


@pytest.mark.one_of(4)
@pytest.mark.parametrize("how", CHECKPOINTS)
@pytest.mark.parametrize("name", LAST)
def test_the_call_that_saves_last_is_stopped(name: str, how: str) -> None:
    want = _gradient(LAST[name], X.clone().requires_grad_())
    for spec in (P("x"), P(None, "x"), P()):
        for _ in range(2):  # planned, and as planned
            x = device_put(X, spec, mesh=MESH).requires_grad_()
            got = device_get(_gradient(CHECKPOINTS[how](LAST[name]), x))
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_looking_for_gradients_saves_nothing_of_a_checkpoint(how: str) -> None:
    """`explicit` asks which operands will have a gradient; backward recomputes outside of it."""

    def f(x: Any) -> Any:
        return torch.tanh(x @ W).sin()

    W = torch.randn(6, 4, dtype=X.dtype, generator=torch.Generator().manual_seed(1))
    want = _gradient(f, X.clone().requires_grad_())
    x = device_put(X, P(None, "x"), mesh=MESH).requires_grad_()
    with warnings.catch_warnings(action="ignore"), explicit("warn"):
        out = CHECKPOINTS[how](f)(x)
    out.sum().backward()
    torch.testing.assert_close(device_get(x.grad), want, rtol=1e-9, atol=1e-12)
