"""Attention over cut sequences under transforms: derivatives of any order, maps over a batch, forward mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from context_programs import F64, dense, seen_by
from torch import Tensor, func

from fspmd import P, device_get, jit, make_mesh, psum, shard_map
from fspmd.nn import Causal, attend_block, gathered_attention, ring_attention, ulysses_attention, zigzag

WAYS = [ring_attention, gathered_attention, ulysses_attention]
LENGTH, WIDTH, LIES = 6, 3, zigzag(6, 2)
ROWS = P(None, "cp")


def operands() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(heads, LENGTH, WIDTH, dtype=F64) for heads in (4, 2, 2)]


def attend(way: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    return way(q, k, v, "cp", mask=Causal(), layout=LIES, sinks=sinks)


def right(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    return dense(q, k, v, seen_by("causal", LENGTH), WIDTH**-0.5, sinks)


def on_mesh(f: Callable[..., Any], *args: Tensor, out: P, jitted: bool = False) -> Tensor:
    """``f`` of the stored blocks in a body, whose sequence dim is the one before the last; ``out`` likewise."""
    mesh = make_mesh((2,), ("cp",), transport="simulation")
    rows = [P() if x.dim() < 3 else P(*[None] * (x.dim() - 2), "cp") for x in args]
    call = shard_map(f, mesh=mesh, in_specs=tuple(rows), out_specs=out)
    stored = [LIES.store(x, x.dim() - 2) if x.dim() > 2 else x for x in args]
    found = device_get((jit(call) if jitted else call)(*stored))
    dim = next((i for i, entry in enumerate(out) if entry == "cp"), None)
    return LIES.restore(found, dim) if dim is not None else found


@pytest.mark.one_of(3)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_second_derivatives_are_those_of_the_definition(way: Any, jitted: bool, sinks: bool) -> None:
    leaves = [x.requires_grad_() for x in (*operands(), *([torch.randn(4, dtype=F64)] if sinks else []))]

    def twice(f: Callable[..., Tensor]) -> list[Tensor]:
        grads = torch.autograd.grad(f(*leaves).sin().sum(), leaves, create_graph=True)
        total = sum(g.cos().sum() for g in grads)
        return [*grads, *torch.autograd.grad(total, leaves)]

    found = twice(lambda *x: on_mesh(lambda *y: attend(way, *y), *x, out=ROWS, jitted=jitted))
    torch.testing.assert_close(found, twice(right), rtol=1e-10, atol=1e-10)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("argnum", [0, 1, 2])
def test_grad_in_a_body(way: Any, argnum: int) -> None:
    def loss(*x: Tensor) -> Tensor:
        return psum(attend(way, *x).sin().sum(), "cp")

    found = on_mesh(func.grad(loss, argnum), *operands(), out=ROWS)
    torch.testing.assert_close(found, func.grad(lambda *x: right(*x).sin().sum(), argnum)(*operands()))


@pytest.mark.parametrize("way", WAYS)
def test_grad_of_grad_in_a_body(way: Any) -> None:
    def twice(total: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def inner(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return total(func.grad(lambda k: total(attended(q, k, v).sin()))(k).cos())

        attended = right if total is torch.sum else lambda *x: attend(way, *x)
        return func.grad(inner)

    found = on_mesh(twice(lambda x: psum(x.sum(), "cp")), *operands(), out=ROWS)
    torch.testing.assert_close(found, twice(torch.sum)(*operands()))


@pytest.mark.parametrize("way", WAYS)
def test_vjp_in_a_body(way: Any) -> None:
    q, k, v = operands()
    g = torch.randn_like(q)
    found = on_mesh(lambda q, k, v, g: func.vjp(lambda v: attend(way, q, k, v), v)[1](g)[0], q, k, v, g, out=ROWS)
    torch.testing.assert_close(found, func.vjp(lambda v: right(q, k, v), v)[1](g)[0])


BATCHED = [(True,) * 4, (True, False, False, False), (False, False, True, False), (False, True, True, True)]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("batched", BATCHED, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_vmap_in_a_body(way: Any, batched: tuple[bool, ...]) -> None:
    plain = [*operands(), torch.randn(4, dtype=F64)]
    leaves = [torch.stack([x, x.sin(), x.cos()]) if b else x for x, b in zip(plain, batched, strict=True)]
    dims = tuple(0 if b else None for b in batched)
    rows = P(None, None, "cp")
    found = on_mesh(func.vmap(lambda *x: attend(way, *x), dims), *leaves[:3], leaves[3], out=rows)
    torch.testing.assert_close(found, func.vmap(right, dims)(*leaves))

    def loss(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return func.vmap(func.grad(lambda *x: f(*x).sin().sum(), 2), dims)

    each = on_mesh(
        func.vmap(func.grad(lambda *x: psum(attend(way, *x).sin().sum(), "cp"), 2), dims),
        *leaves[:3],
        leaves[3],
        out=rows,
    )
    torch.testing.assert_close(each, loss(right)(*leaves))


@pytest.mark.parametrize("masked", [False, True])
def test_transforms_of_one_block(masked: bool) -> None:
    q, k, v = (torch.stack([x, x.sin()]) for x in operands())
    seen = torch.rand(2, LENGTH, LENGTH) < 0.6
    seen[0, 2] = False

    def mine(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return attend_block(q, k, v, seen if masked else None).out

    def definition(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return dense(q, k, v, seen.double() if masked else torch.ones_like(seen).double(), WIDTH**-0.5, None)

    def results(f: Callable[..., Tensor]) -> list[Tensor]:
        gradient = func.grad(lambda *x: f(*x).sin().sum(), argnums=1)
        return [
            func.vmap(f)(q, k, v, seen),
            func.vmap(f, (None, 0, None, None))(q[0], k, v[0], seen[0]),
            func.vmap(f, (None, None, None, 0))(q[0], k[0], v[0], seen),
            func.vmap(gradient)(q, k, v, seen),
            func.vmap(func.grad(lambda *x: gradient(*x).cos().sum()), (0, None, 0, None))(q, k[0], v, seen[0]),
            func.jacrev(f, 2)(q[0], k[0], v[0], seen[0]),
        ]

    torch.testing.assert_close(results(mine), results(definition))
