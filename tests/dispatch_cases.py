"""A function of global tensors under many layouts of its operands, beside unsharded torch: values and gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from full import FULL
from simulated import layouts
from torch import Tensor

from fspmd import Mesh, P, Sharded, device_get, device_put, propagation_cache_clear
from fspmd.redistribution.cost import Link, Topology, set_topology, topology
from fspmd.transport.frame import frame_over
from fspmd.transport.local_tensor import shards_of

F64 = torch.float64
#: a function, and the shapes of its operands
Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]


def values(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    return [
        torch.linspace(-1.0, 1.0, max(1, torch.Size(shape).numel()), dtype=F64).mul(3 + i).sin().reshape(shape)
        for i, shape in enumerate(shapes)
    ]


def placements(mesh: Mesh, shapes: tuple[tuple[int, ...], ...], most: int) -> list[tuple[P, ...]]:
    """Layouts of all operands, evenly taken from all there are."""
    ways = [layouts(mesh, len(shape)) for shape in shapes]
    count = math.prod(map(len, ways))
    step = max(1, count // (most * 40 if FULL and mesh.transport == "simulation" else most))
    found = []
    for place in range(count // 7 % step, count, step):
        specs, left = [], place
        for own in reversed(ways):
            left, at = divmod(left, len(own))
            specs.append(own[at])
        found.append(tuple(reversed(specs)))
    return found


def check_case(name: str, case: Case, mesh: Mesh, most: int) -> None:
    """Values, shapes, dtypes and gradients of many layouts of the operands against unsharded torch."""
    f, shapes = case
    plain = [x.requires_grad_() for x in values(shapes)]
    expected = outputs_of(f(*plain))
    weights = [torch.arange(1.0, x.numel() + 1, dtype=F64).reshape(x.shape).cos().to(x.dtype) for x in expected]
    followed = [x for x in expected if x.requires_grad]
    sent = [w for x, w in zip(expected, weights, strict=True) if x.requires_grad]
    grads = _derived(lambda: torch.autograd.grad(followed, plain, sent, retain_graph=True))
    for specs in placements(mesh, shapes, most):
        given = [device_put(x.detach(), s, mesh=mesh).requires_grad_() for x, s in zip(plain, specs, strict=True)]
        outs = outputs_of(f(*given))
        total = torch.zeros((), dtype=F64)
        for out, want, weight in zip(outs, expected, weights, strict=True):
            assert isinstance(out, Sharded)
            assert (out.shape, out.dtype) == (tuple(want.shape), want.dtype), specs
            check_lies_as_told(out)
            found = device_get(out)
            torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12, msg=f"{name} {specs}: {out!r}")
            if want.requires_grad:
                total = total + (found * weight).sum()
        if grads is None:
            continue
        total.backward()
        for leaf, grad in zip(given, grads, strict=True):
            assert leaf.grad is not None, specs
            check_lies_as_told(leaf.grad)
            torch.testing.assert_close(device_get(leaf.grad), grad, rtol=1e-11, atol=1e-11, msg=f"{name} {specs}: grad")


def _derived(gradients: Callable[[], Any]) -> Any:
    """Gradients of torch's own; None where this version of torch knows no derivative."""
    try:
        return gradients()
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        return None


def check_second_derivatives(name: str, case: Case, mesh: Mesh, most: int) -> None:
    """Gradients of gradients of some layouts of the operands against unsharded torch, where that has any."""
    f, shapes = case
    plain = [x.requires_grad_() for x in values(shapes)]
    expected = _derived(lambda: _second_derivatives(f, plain))
    if expected is None:
        return
    for specs in placements(mesh, shapes, most):
        given = [device_put(x.detach(), s, mesh=mesh).requires_grad_() for x, s in zip(plain, specs, strict=True)]
        for found, want in zip(_second_derivatives(f, given), expected, strict=True):
            known = ~want.isnan()
            torch.testing.assert_close(found[known], want[known], rtol=1e-9, atol=1e-9, msg=f"{name} {specs}")


def _second_derivatives(f: Callable[..., Any], given: list[Any]) -> list[Tensor]:
    """Of squares of the results, so that linear functions have some."""
    total = _weighted([x + 0.1 * x * x for x in outputs_of(f(*given)) if x.requires_grad])
    grads = torch.autograd.grad(total, given, create_graph=True)
    found = torch.autograd.grad(_weighted(grads), given, allow_unused=True)
    return [torch.zeros(x.shape, dtype=F64) if g is None else device_get(g) for x, g in zip(given, found, strict=True)]


def _weighted(xs: Sequence[Any]) -> Any:
    return sum((x * torch.arange(1.0, x.numel() + 1, dtype=F64).reshape(x.shape).cos()).sum() for x in xs)


@contextmanager
def priced_by_bytes() -> Iterator[None]:
    """The cheapest way is that of the fewest bytes."""
    before, link, free = topology(), Link(0.0, 1000.0), float("inf")
    propagation_cache_clear()
    set_topology(Topology(inside=link, between=link, launch=0.0, memory=free, flops=free, spill=link))
    try:
        yield
    finally:
        set_topology(before)
        propagation_cache_clear()


def outputs_of(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def check_lies_as_told(x: Sharded) -> None:
    """Each rank's block has the shape that the spec gives it."""
    mesh, block = x.spec.mesh, x.local.detach()
    if mesh.transport == "process_group":
        blocks = {mesh.coordinate(): block}
    else:
        every = itertools.product(*map(range, mesh.shape.values()))
        blocks = dict(zip(every, shards_of(block, frame_over(mesh, mesh.axis_names)), strict=True))
    for at, own in blocks.items():
        assert at is not None
        assert tuple(own.shape) == x.spec.local_shape(at), (x, at, own.shape)
