"""Functions of a tensor and a number, in floats, ints and other ways to write it, beside unsharded torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from dispatch_cases import F64, values
from full import FULL
from torch.nn import functional as F

import fspmd
from fspmd import Mesh, P, device_get, device_put, make_mesh

NUMBERED: dict[str, Callable[[Any, Any], Any]] = {
    "mul and add": lambda x, v: x * v + v,
    "pow and compare": lambda x, v: x.abs() ** v * (x > v),
    "clamp": lambda x, v: x.clamp(min=-v, max=v),
    "threshold": lambda x, v: F.threshold(x, v, -v),
    "masked_fill": lambda x, v: x.masked_fill(x > 0, v),
    "addmm": lambda x, v: torch.addmm(x, x, torch.ones(6, 6, dtype=F64), alpha=float(v), beta=v + 1.0),
    "layer_norm": lambda x, v: F.layer_norm(x, (6,), eps=v),
    "batch_norm": lambda x, v: F.batch_norm(x, None, None, training=True, eps=v),
    "huber_loss": lambda x, v: F.huber_loss(x, -x, delta=v),
    "huber_loss, weighed": lambda x, v: F.huber_loss(x, -x, delta=v, weight=x.abs()),
    "cross_entropy": lambda x, v: F.cross_entropy(x, (x > 0).long()[:, 0], label_smoothing=v / 4),
    "cross_entropy, weighed": lambda x, v: F.cross_entropy(
        x, (x > 0).long()[:, 0], x[0].detach().abs(), ignore_index=1, label_smoothing=v / 4
    ),
    "cosine_similarity": lambda x, v: F.cosine_similarity(x, x.cos() * 0.1, eps=v),
    "attention": lambda x, v: F.scaled_dot_product_attention(x[None], x[None], x[None], scale=float(v)),
    "renorm": lambda x, v: x.renorm(2.0, 0, float(v)),
    "full_like": lambda x, v: x * torch.full_like(x, v),
    "pad": lambda x, v: F.pad(x, (1, 2), value=v),
    "index_fill": lambda x, v: x.index_fill(1, torch.tensor([0, 3]), v),
    "scatter": lambda x, v: x.scatter(1, torch.tensor([[0, 3]] * 5), v),
    "x[i] = v": lambda x, v: _with_row(x * 1, 1, v),
    "x[i:j, k] = v": lambda x, v: _with_row(x * 1, (slice(1, 3), 2), v),
    "x[mask] = v": lambda x, v: _with_row(x * 1, x > 0, v),
    "of integers": lambda x, v: x * _with_row((x * 3).long(), 1, v),
    "lists": lambda x, v: torch._foreach_mul([x, x], [v, v + 1])[1],
    "dropout": lambda x, v: F.dropout(x, v / 4, training=False),
    "gumbel_softmax": lambda x, v: F.gumbel_softmax(x, tau=v).sum(1),
    "trapezoids": lambda x, v: torch.trapezoid(x, dx=v) + torch.cumulative_trapezoid(x, dx=v, dim=0).sum(1).sum(0),
    "numbers of NumPy": lambda x, v: x * np.float64(v) + np.float32(v),
    "norms": lambda x, v: F.normalize(x, p=v + 1.5) * x.norm(v + 1.5) * torch.dist(x, x * 0.5, v + 1.5),
}


def _with_row(x: Any, index: Any, value: Any) -> Any:
    x[index] = value
    return x


def check_numbers(name: str, mesh: Mesh, numbers: Sequence[Any], *, jitted: bool = False) -> list[int]:
    """Values and gradients of a function with each number beside torch's; how many plans were made after each."""
    f, whole, misses = NUMBERED[name], values(((5, 6),))[0], []
    for spec in (P("x"), P(None, "x")):
        x = device_put(whole, spec, mesh=mesh).requires_grad_()
        given = [numbers[0], *numbers]
        for v in given:
            found, x.grad = (fspmd.jit(f, static_argnums=1) if jitted else f)(x, v), None
            plain = whole.clone().requires_grad_()
            want = f(plain, v)
            torch.testing.assert_close(device_get(found), want)
            if want.requires_grad:
                found.cos().sum().backward()
                want.cos().sum().backward()
                torch.testing.assert_close(device_get(x.grad), plain.grad)
            misses.append(fspmd.propagation_cache_info().misses)
        assert jitted or len({*misses[-len(numbers) + 1 :]}) == 1, f"{name} {spec}: {misses}"
    return misses


def numbers_on_processes() -> None:
    """A fifth of them, as a process of Gloo."""
    mesh = make_mesh((4,), ("x",), device="cpu")
    for name in [*NUMBERED][:: 1 if FULL else 5]:
        check_numbers(name, mesh, (0.25, 0.5, 0.75))
