"""Torch's own transforms of functions of `Sharded` values, given or closed over, are those of the global tensors.

The judge is plain torch in float64: the same call on tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from full import FULL
from processes import Processes
from simulated import F64, GRID
from torch import Tensor, func, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import fspmd
from fspmd import (
    ArgumentError,
    Mesh,
    P,
    RecordError,
    ShapeError,
    Sharded,
    VarianceError,
    device_get,
    device_put,
    jit,
    make_mesh,
    shard_map,
)

_GENERATOR = torch.Generator().manual_seed(0)
X, W = (torch.randn(*shape, generator=_GENERATOR, dtype=F64) for shape in ((4, 5), (5, 6)))
CLASSES = torch.tensor([0, 5, 2, 1])
#: of X and W: whole, even, uneven, with empty blocks, the mapped dim cut, the contracted one cut
SPECS = [(P(), P()), (P("x"), P(None, "y")), (P("y", "x"), P()), (P(), P("y", "x")), (P(("x", "y")), P(("y", "x")))]
LINEAR = nn.Linear(5, 6, dtype=F64)


def _loss(x: Any, w: Any) -> Any:
    return F.cross_entropy(F.layer_norm(x @ w, (6,)).tanh(), CLASSES)


def _pulled(f: Any, *args: Any, **options: Any) -> Any:
    out, pull, *aux = func.vjp(f, *args, **options)
    return out, pull(out), pull(torch.ones(out.shape, dtype=out.dtype)), *aux


def _written(w: Any) -> Any:
    y = w * 2
    y[:, 1] = w[:, 0].sin()
    return y.mul_(w).square().sum()


#: of X and W, or of one alone, where the other is closed over
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "grad": func.grad(_loss, argnums=(0, 1)),
    "grad and value, aux": lambda x, w: func.grad_and_value(lambda v: (_loss(x, v), x.sin()), has_aux=True)(w),
    "grad of a dict": lambda x, w: func.grad(lambda p: _loss(p["x"], p["w"]))({"x": x, "w": w}),
    "grad of grad": lambda x, w: func.grad(lambda v: func.grad(lambda u: _loss(x, u))(v).square().sum())(w),
    "grad of writes": lambda x, w: func.grad(_written)(w),
    "grad of nothing": lambda x, w: func.grad(lambda v: x.sin().sum())(w),
    "vjp": lambda x, w: _pulled(lambda u, v: (u @ v).tanh(), x, w),
    "vjp, aux": lambda x, w: _pulled(lambda v: ((x @ v).tanh(), v.cos()), w, has_aux=True),
    "jvp": lambda x, w: func.jvp(lambda u, v: (u @ v).tanh(), (x, w), (x.cos(), w.cos())),
    "jvp, aux": lambda x, w: func.jvp(lambda v: ((x @ v).tanh(), v.cos()), (w,), (w.sin(),), has_aux=True),
    "jvp of grad": lambda x, w: func.jvp(func.grad(lambda v: _loss(x, v)), (w,), (w.cos(),)),
    "jacrev": func.jacrev(lambda u, v: (u @ v).softmax(1), argnums=(0, 1)),
    "jacrev in chunks": lambda x, w: func.jacrev(lambda v: (x @ v).softmax(0), chunk_size=5)(w),
    "jacfwd": func.jacfwd(lambda u, v: (u @ v).softmax(1), argnums=(0, 1)),
    "hessian": lambda x, w: func.hessian(lambda v: _loss(x, v))(w),
    "vmap": lambda x, w: torch.vmap(lambda r: ((r @ w).sin(), r.sum(), w.cos()), out_dims=(1, 0, None))(x),
    "vmap over columns": lambda x, w: func.vmap(lambda c: c.cumsum(0), in_dims=1, out_dims=-1)(w),
    "vmap of vmap": lambda x, w: func.vmap(lambda r: func.vmap(lambda c: (r * c).sum(), in_dims=1)(w))(x),
    "gradients of samples": lambda x, w: func.vmap(
        func.grad(lambda v, r: (r @ v).tanh().square().sum()), in_dims=(None, 0)
    )(w, x),
    "functional_call": lambda x, w: func.grad(lambda p: func.functional_call(LINEAR, p, (x,)).tanh().sum())(
        {"weight": w.t(), "bias": w[0]}
    ),
}


def _of(x: Tensor, spec: P, mesh: Mesh) -> Sharded:
    found: Sharded = device_put(x, spec, mesh=mesh)
    return found


def _results(name: str, x: Any, w: Any) -> list[Tensor]:
    return [device_get(one) for one in tree_leaves(CALLS[name](x, w))]


def _found(name: str, mesh: Mesh, specs: tuple[P, P]) -> Iterator[list[Tensor]]:
    """With both values given as `Sharded` ones, and with one of them."""
    x, w = (_of(one, spec, mesh) for one, spec in zip((X, W), specs, strict=True))
    for given in ((x, w), (x, W), (X, w)):
        yield _results(name, *given)


def _check(name: str, found: list[Tensor]) -> None:
    torch.testing.assert_close(found, [x.detach() for x in tree_leaves(CALLS[name](X, W))], rtol=1e-9, atol=1e-11)


@pytest.mark.one_of(6)
@pytest.mark.parametrize("name", CALLS)
def test_values_given_and_closed_over(name: str) -> None:
    for specs in SPECS:
        for found in _found(name, GRID, specs):
            _check(name, found)


def _on_processes() -> None:
    mesh = make_mesh((2, 2), ("x", "y"), transport="process_group")
    for name in list(CALLS)[:: 1 if FULL else 4]:
        for found in _found(name, mesh, SPECS[1]):
            _check(name, found)


def test_on_processes() -> None:
    with Processes(4) as pool:
        pool.run(_on_processes)


@pytest.mark.parametrize("transform", [func.jacrev, func.jacfwd])
def test_jacobians_of_mapped_functions(transform: Any) -> None:
    f = shard_map(lambda x: x.sin() * 2, mesh=GRID, in_specs=P("x"), out_specs=P("x"))
    torch.testing.assert_close(device_get(transform(f)(X[:, 0])), (2 * X[:, 0].cos()).diag())
    torch.testing.assert_close(device_get(torch.vmap(f)(X)), X.sin() * 2)


def test_gradients_have_the_layouts_of_what_they_are_of() -> None:
    x, w = _of(X, P("x"), GRID), _of(W, P(None, "y"), GRID)
    for f in (func.grad(_loss, argnums=(0, 1)), jit(func.grad(_loss, argnums=(0, 1)))):
        assert [g.spec for g in f(x, w)] == [x.spec, w.spec]


def test_autograd_and_transforms_of_fspmd_go_through() -> None:
    w = _of(W, P("x", "y"), GRID).requires_grad_()
    expected = func.grad(lambda v: func.grad(lambda u: _loss(X, u))(v).square().sum())(W)

    def slope(v: Any) -> Any:
        return func.grad(lambda u: _loss(X, u))(v).square().sum()

    (found,) = torch.autograd.grad(slope(w), [w])  # type: ignore[call-overload]
    torch.testing.assert_close(device_get(found), expected)
    torch.testing.assert_close(device_get(fspmd.grad(slope)(w.detach())), expected)


@pytest.mark.parametrize("api", [func.jvp, fspmd.jvp], ids=["torch", "fspmd"])
def test_tangents_of_writes_into_uneven_blocks(api: Any) -> None:
    """Right where torch makes a tangent for the whole value, refused where for a view of a value that has none."""

    def add(x: Any) -> Any:
        return torch.zeros_like(x).add_(x).mul_(x.sin())

    def set_column(x: Any) -> Any:
        y = x.new_zeros(x.shape)
        y[:, 1] = x[:, 0].cos()
        return y

    def write_column(x: Any) -> Any:
        y = x.new_zeros(x.shape)
        y[:, 1].copy_(x[:, 0])
        return y

    x = torch.arange(15.0, dtype=F64).view(5, 3)
    for mesh in (make_mesh((2,), ("x",)), make_mesh((6,), ("x",))):
        for f in (add, set_column):
            given = tuple(device_put(one, P("x"), mesh=mesh) for one in (x, x.cos()))
            found = map(device_get, api(f, given[:1], given[1:]))
            torch.testing.assert_close(tuple(found), func.jvp(f, (x,), (x.cos(),)))
        with pytest.raises(ShapeError, match="compute a new value in place of a write"):
            api(write_column, given[:1], given[1:])


def test_tangents_of_forward_ad() -> None:
    """A tangent is moved to where its primal lies."""
    ad, x = torch.autograd.forward_ad, _of(X, P("x"), GRID)
    for tangent in (X.cos(), _of(X.cos(), P(None, "y"), GRID)):
        with ad.dual_level():
            value, along = ad.unpack_dual((ad.make_dual(x, tangent) * 2).sin())
            torch.testing.assert_close(device_get(value), (2 * X).sin())
            torch.testing.assert_close(device_get(along), (2 * X).cos() * 2 * X.cos())
            assert ad.unpack_dual(x).tangent is None
            with pytest.raises(fspmd.TreeError, match="tangents that do not fit"):
                ad.make_dual(X, x)


@pytest.mark.parametrize("mapped", [torch.vmap, fspmd.vmap])
def test_numbers_drawn_for_each_element_are_refused(mapped: Any) -> None:
    """A `Sharded` is drawn once for all elements."""
    x = _of(X, P(None, "y"), GRID)
    for draw in (torch.randn_like, lambda r: F.dropout(r, 0.5), lambda r: r.clone().normal_()):
        for randomness in ("error", "different"):
            with pytest.raises(ArgumentError, match=f"vmap with randomness='{randomness}' maps a function that draws"):
                mapped(draw, randomness=randomness)(x)
    first, *others = device_get(mapped(torch.randn_like, randomness="same")(x))
    assert all(torch.equal(first, other) for other in others)


def test_graphs_of_derivatives_are_refused() -> None:
    w = _of(W, P("x"), GRID)
    for f, primal in ((torch.sin, w), (lambda x: x * w, W)):
        with pytest.raises(RecordError, match=r"write fspmd\.jvp\(f, \(x,\), \(tangent,\)\)|write fspmd\.jit"):
            func.linearize(f, primal)


def test_a_write_that_vmap_would_lose_is_refused() -> None:
    """The elements of a dim that is cut are copies; where it is whole they are views, and the write is seen."""

    def add(row: Any) -> Any:
        row.add_(1)
        return row.sum()

    for spec, is_seen in ((P(), True), (P(None, "y"), True), (P("x"), False), (P(("x", "y")), False)):
        x = device_put(torch.zeros(4, 5, dtype=F64), spec, mesh=GRID)
        if is_seen:
            torch.vmap(add)(x)
            assert device_get(x).sum() == 20
        else:
            with pytest.raises(VarianceError, match=r"^add_\(\) writes into a copy: torch.vmap over a dim that is cut"):
                torch.vmap(add)(x)
