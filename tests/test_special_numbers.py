"""Numbers that are not finite, and signs of zeros, are torch's: what only moves elements keeps each bit of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dispatch_cases import F64, placements
from torch import Tensor
from torch.nn import functional as F

from fspmd import Mesh, P, Sharded, VarianceError, device_get, device_put, make_mesh, reshard

INF, NAN = float("inf"), float("nan")
MESHES = [
    make_mesh((4,), ("x",), transport="simulation"),
    make_mesh((2, 3), ("x", "y"), transport="simulation"),
]
SHAPES = [(5, 7), (3, 2)]
_ROWS = torch.tensor([[2, 0, 1], [1, 1, 2]])


def _set(x: Any, index: Any, value: Any) -> Any:
    y = x.clone()
    y[index] = value
    return y


#: of two matrices and a shape that both have
MOVES: dict[str, Callable[[Any, Any], Any]] = {
    "an int": lambda x, y: x[-1],
    "ints": lambda x, y: x[1, 0],
    "a slice": lambda x, y: x[1:, ::2],
    "tensors": lambda x, y: x[_ROWS, _ROWS % 2],
    "select": lambda x, y: x.select(1, 1),
    "gather": lambda x, y: x.gather(0, _ROWS[:, :2]),
    "index_select": lambda x, y: x.index_select(0, _ROWS[0]),
    "take": lambda x, y: x.take(_ROWS),
    "embedding": lambda x, y: F.embedding(_ROWS, x),
    "diagonal": lambda x, y: x.diagonal(),
    "diag_embed": lambda x, y: x.diag_embed(),
    "pad": lambda x, y: F.pad(x, (1, 0, 2, 1), value=-0.0),
    "pad with nan": lambda x, y: F.pad(x, (0, 3, 1, -1), value=NAN),
    "pad, reflected": lambda x, y: F.pad(x[None], (1, 1), "reflect"),
    "flip": lambda x, y: x.flip(0),
    "roll": lambda x, y: x.roll((2, -1), (0, 1)),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y], 1),
    "split": lambda x, y: x.split(2, 0)[1],
    "reshape": lambda x, y: x.reshape(-1),
    "repeat": lambda x, y: x.repeat(2, 1),
    "unfold": lambda x, y: x.unfold(0, 2, 1),
    "where": lambda x, y: torch.where(x > y, x, y),
    "tril": lambda x, y: x.tril(),
    "a write of a row": lambda x, y: _set(x, 1, y[0]),
    "a write of a slice": lambda x, y: _set(x, slice(1, 3), y[:2]),
    "scatter": lambda x, y: x.scatter(0, _ROWS[:1, :2], y),
    "index_copy": lambda x, y: x.index_copy(0, _ROWS[0], y[:3]),
    "maximum of columns": lambda x, y: x.nan_to_num(0.5, 9, -9).where(x != 0, 1).amax(0),
}


def _numbers(shape: tuple[int, int], seed: int) -> Tensor:
    some = torch.tensor([0.0, -0.0, INF, -INF, NAN, 1.0, -2.5], dtype=F64)
    return some[torch.randint(len(some), shape, generator=torch.Generator().manual_seed(seed))]


def _given(wholes: tuple[Tensor, ...], specs: tuple[P, ...], mesh: Mesh) -> list[Sharded]:
    return [device_put(x, spec, mesh=mesh) for x, spec in zip(wholes, specs, strict=True)]


@pytest.mark.one_of(6)
@pytest.mark.parametrize("name", MOVES)
def test_what_only_moves_keeps_each_bit(name: str) -> None:
    for mesh, shape in itertools.product(MESHES, SHAPES):
        wholes = _numbers(shape, 1), _numbers(shape, 2)
        expected = MOVES[name](*wholes)
        for specs in placements(mesh, (shape, shape), 3):
            found = device_get(MOVES[name](*_given(wholes, specs, mesh)))
            same = found.contiguous().view(torch.int64) == expected.contiguous().view(torch.int64)
            assert bool(same.all()), (specs, found, expected)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.int64, torch.bool])
def test_what_is_picked_of_other_dtypes(dtype: torch.dtype) -> None:
    x = _numbers((5, 3), 3)
    if not (dtype.is_floating_point or dtype.is_complex):
        x = x.nan_to_num(3, 2, -2)
    x = torch.complex(x, x.roll(1)) if dtype.is_complex else x.to(dtype)
    for mesh, f in itertools.product(
        MESHES, (lambda x: x[3], lambda x: F.embedding(_ROWS, x), lambda x: x.take(_ROWS))
    ):
        found, expected = device_get(f(device_put(x, P("x"), mesh=mesh))), f(x)
        as_bytes = [torch.view_as_real(one) if dtype.is_complex else one for one in (found, expected)]
        assert torch.equal(*(one.contiguous().view(torch.uint8) for one in as_bytes)), (found, expected)


#: that only move or choose elements
MOVED: dict[str, Callable[[Any], Any]] = {
    "a row": lambda x: x[3],
    "rows": lambda x: x[_ROWS],
    "elements": lambda x: x[_ROWS, _ROWS % 3],
    "index_select": lambda x: x.index_select(0, _ROWS[0]),
    "embedding": lambda x: F.embedding(_ROWS, x),
    "take": lambda x: x.flatten()[_ROWS],
    "pad": lambda x: F.pad(x, (1, 0, 2, 1), value=7),
    "diagonal": lambda x: x.diagonal(1),
    "cat": lambda x: torch.cat([x, x[:2]], 0),
    "unfold": lambda x: x.unfold(0, 2, 3),
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", MOVED)
def test_unsigned_integers(name: str) -> None:
    for mesh, dtype in itertools.product(MESHES, (torch.uint8, torch.uint16, torch.uint32, torch.uint64)):
        x = torch.arange(15).mul(17).reshape(5, 3).to(dtype)
        for spec in (P("x"), P(None, "x")):
            assert device_get(MOVED[name](device_put(x, spec, mesh=mesh))).tolist() == MOVED[name](x).tolist()


def test_a_group_that_is_not_finite_leaves_others_alone() -> None:
    x = torch.linspace(-1, 2, 36, dtype=F64).reshape(2, 6, 3).sin()
    x[0, 1, 2], x[1, 4, 0] = INF, NAN
    expected = F.group_norm(x, 3)
    for mesh, spec in itertools.product(MESHES, (P(None, "x"), P("x"), P(None, None, "x"))):
        found = device_get(F.group_norm(device_put(x, spec, mesh=mesh), 3))
        torch.testing.assert_close(found, expected, equal_nan=True, msg=f"{spec}: {found}")


#: linear functions of a sum of rows, and of matrices along whose rows they sum
SCALED: dict[str, Callable[[Any, Any, float], Any]] = {
    "mul": lambda x, y, v: x.sum(0) * v,
    "mul from the left": lambda x, y, v: v * x.sum(0),
    "div": lambda x, y, v: x.sum(0) / v,
    "div of a row": lambda x, y, v: x[1] / v,
    "mul of a row": lambda x, y, v: torch.mul(x[1], v),
    "mul of an element": lambda x, y, v: x.trace() * v,
    "mul of looked up rows": lambda x, y, v: F.embedding(_ROWS, x) * v,
    "add": lambda x, y, v: torch.add(x.sum(0), y.sum(0), alpha=v),
    "sub": lambda x, y, v: torch.sub(x[1], y[0], alpha=v),
    "addmm": lambda x, y, v: torch.addmm(y.T @ y, x.T.exp(), y, alpha=v),
    "addmm of a bias": lambda x, y, v: torch.addmm(y[0], x.T, y, beta=v),
    "addmv": lambda x, y, v: torch.addmv(y[0], x.T, x[:, 0], beta=v),
    "baddbmm": lambda x, y, v: torch.baddbmm((x.T @ x)[None], x.T[None], y[None], beta=v),
}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", SCALED)
def test_sums_are_scaled_as_a_whole_by_what_is_not_finite(name: str) -> None:
    for mesh, shape in itertools.product(MESHES, SHAPES):
        wholes = (
            torch.linspace(-1, 2, shape[0] * shape[1], dtype=F64).reshape(shape).sin(),
            torch.ones(shape, dtype=F64),
        )
        for specs in placements(mesh, (shape, shape), 2):
            for v in (0.5, INF, 0.0, -INF):
                found = device_get(SCALED[name](*_given(wholes, specs, mesh), v))
                expected = SCALED[name](*wholes, v)
                torch.testing.assert_close(found, expected, equal_nan=True, msg=f"{v} {specs}: {found} {expected}")


def test_a_pending_sum_is_not_scaled_in_place_by_what_is_not_finite() -> None:
    x = device_put(torch.tensor([1.0, -2.0, 3.0]), P("x"), mesh=MESHES[0]).sum()
    assert x.spec.partition.unreduced
    x.mul_(2.0)
    with pytest.raises(VarianceError, match=r"settle the sum first"):
        x.mul_(INF)
    with pytest.raises(VarianceError, match=r"settle the sum first"):
        x.div_(0)
    assert device_get(x).item() == 4
    assert device_get(reshard(x, P()).div_(0)).item() == INF


@pytest.mark.parametrize("shape", [(4, 1), (1, 1), (1,), (1, 5), (5, 1, 3)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_norms_of_one_element(shape: tuple[int, ...], keepdim: bool) -> None:
    """Torch 2.11 and 2.12 give these other shapes where there is no data."""
    mesh = make_mesh((2,), ("x",))
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for spec, dim, p in itertools.product((P("x"), P()), (-1, 0, tuple(range(len(shape))), None), (1, 2, torch.inf)):
        sharded = device_put(x, spec, mesh=mesh)
        for norm in (torch.linalg.vector_norm, lambda x, p, dim, keepdim: x.norm(p, dim, keepdim)):
            found, expected = norm(sharded, p, dim, keepdim), norm(x, p, dim, keepdim)
            assert found.shape == expected.shape
            assert not found.spec.even or found.local.shape == found.spec.block_shape
            assert torch.allclose(device_get(found), expected)
