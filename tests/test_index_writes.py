"""Writes by tensors of places into a sharded value: what stands there afterwards, gradients, and what moves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from full import FULL
from processes import Processes
from torch import Tensor

from fspmd import Mesh, P, communication_log, device_get, device_put, grad, jit, make_mesh, reshard

F64 = torch.float64
Function = Callable[[Any, Any], Any]
MESHES = [make_mesh((n,), ("x",), transport="simulation") for n in (2, 3, 6)]
MESHES += [make_mesh((2, 3), ("y", "x"), transport="simulation")]
SPECS = (P(), P("x"), P(None, "x"), P(unreduced={"x"}))
ROWS = torch.tensor([3, 0, 3])
OTHERS = torch.tensor([2, 0, 3])
PLACES = torch.tensor([[3, 0, 1, 1, 0], [0, 1, 2, 3, 1], [1, 3, 0, 2, 2]])


def _set(x: Any, i: Any, y: Any) -> Any:
    x[i] = y
    return x


def _add(x: Any, i: Any, y: Any) -> Any:
    x[i] += y
    return x


def _multiply(x: Any, i: Any, y: Any) -> Any:
    x[i] *= y
    return x


#: of x [rows, 5] and y [3, 5]
WRITES: dict[str, Function] = {
    "index_add_": lambda x, y: x.index_add_(0, ROWS, y),
    "index_add_ of a multiple": lambda x, y: x.index_add_(0, ROWS, y, alpha=2.5),
    "index_add_ of columns": lambda x, y: x.index_add_(-1, ROWS, (y[0, 0] * x.clone()).sin()[:, :3]),
    "index_copy_": lambda x, y: x.index_copy_(0, OTHERS, y),
    "index_reduce_": lambda x, y: x.index_reduce_(0, ROWS, y, "amax"),
    "index_fill_": lambda x, y: x.index_fill_(0, ROWS, 2.0) * y[0],
    "scatter_": lambda x, y: x.scatter_(0, PLACES, y),
    "scatter_ of a number": lambda x, y: x.scatter_(0, PLACES, 2.0) * y[0],
    "scatter_add_": lambda x, y: x.scatter_add_(0, PLACES, y),
    "scatter_reduce_": lambda x, y: x.scatter_reduce_(0, PLACES, y, "sum", include_self=True),
    "scatter_reduce_ to the mean": lambda x, y: x.scatter_reduce_(0, PLACES, y, "mean"),
    "index_put_": lambda x, y: x.index_put_((OTHERS,), y),
    "index_put_ that adds": lambda x, y: x.index_put_((ROWS - 4,), y, accumulate=True),
    "index_add_ through a view": lambda x, y: x.mT.index_add_(1, ROWS, y.mT).mT,
    "x[i] = y": lambda x, y: _set(x, OTHERS, y),
    "x[i] += y": lambda x, y: _add(x, OTHERS, y),
    "x[1:4] += y": lambda x, y: _add(x, slice(1, 4), y),
    "x[-1] += y": lambda x, y: _add(x, -1, y[0] * y[1]),
    "x[..., 1::2] += y": lambda x, y: _add(x, (..., slice(1, None, 2)), y[0, :2]) * 2,
    "x[1:4, 0] *= y": lambda x, y: _multiply(_multiply(x, (slice(1, 4), 0), y[:, 2]), 0, y[0]),
    "x.mT[1:4] *= y": lambda x, y: _multiply(x.mT, slice(1, 4), y[:, :1]).mT,
    "x[1:][:2] += y": lambda x, y: _add(x * 1, slice(1, 4), _add(y.clone(), slice(0, 2), y[1:])) + x,
    "x[:, i] = y": lambda x, y: _set(x, (slice(None), OTHERS), y[0, :3]),
    "x[i, j] = y": lambda x, y: _set(x, (OTHERS, OTHERS), y[:, 0]),
    "x[mask] = y": lambda x, y: _set(x, torch.arange(x.shape[0]) > 1, y[0]),
    "x[i].mul_()": lambda x, y: (x[OTHERS].mul_(3.0).add_(1.0) * y).sum(0) + x,
    "twice": lambda x, y: x.index_add_(0, ROWS, y).sin_().index_add_(0, OTHERS, y * 2),
}


def _laid(x: Tensor, spec: P, mesh: Mesh) -> Any:
    if spec.unreduced:
        return reshard(device_put(x, P(), mesh=mesh), spec)
    return device_put(x, spec, mesh=mesh)


def _values(f: Function, x: Any, y: Any) -> list[Any]:
    """What is given, the new value of what was written into, gradients of both, and theirs."""
    leaves = [x.requires_grad_(), y.requires_grad_()]
    written = x * 1
    out = f(written, y)
    firsts = torch.autograd.grad((out.cos() + written.sin()).sum() * 2, leaves, create_graph=True)
    total: Any = sum((g * g).sum() for g in firsts)
    seconds = torch.autograd.grad(total, leaves, allow_unused=True)
    return [out, written, *firsts, *(0.0 * x if g is None else g for x, g in zip(leaves, seconds, strict=True))]


CASES = list(itertools.product(WRITES, SPECS, SPECS))


def _check(mesh: Mesh, rows: int, cases: Sequence[tuple[str, P, P]]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(rows, 5, dtype=F64), torch.randn(3, 5, dtype=F64)
    for number, (name, of_x, of_y) in enumerate(cases):
        f = WRITES[name]
        theirs = _values(f, x.clone(), y.clone())
        mine = _values(f, _laid(x, of_x, mesh), _laid(y, of_y, mesh))
        if (FULL or number % 16 == 0) and "mask" not in name:  # whose gradient takes rows that values choose
            step = jit(grad(lambda x, y, f=f: f(x * 1, y).cos().sum(), argnums=(0, 1)))
            for _ in range(2):  # recorded, and replayed
                mine += step(_laid(x, of_x, mesh), _laid(y, of_y, mesh))
                theirs += grad(lambda x, y, f=f: f(x * 1, y).cos().sum(), argnums=(0, 1))(x, y)
        for one, other in zip(mine, theirs, strict=True):
            close = torch.allclose(device_get(one.detach()), other.detach(), equal_nan=True)
            assert close, (name, of_x, of_y)


def _on_processes(rows: int) -> None:
    _check(make_mesh((3,), ("x",)), rows, CASES if FULL else CASES[rows % 5 :: 61])


def test_on_processes() -> None:
    with Processes(3) as pool:
        for rows in (4, 7):
            pool.run(_on_processes, rows)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("rows", [4, 7])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh.shape.values())))
def test_what_is_written_is_what_torch_writes(mesh: Mesh, rows: int) -> None:
    """However both lie, evenly or not, pending too; with gradients of gradients, and in a record."""
    _check(mesh, rows, CASES if FULL else CASES[rows % 6 :: 53])


def test_a_write_into_what_is_no_sharded_value() -> None:
    x, y = torch.randn(7, 5, dtype=F64), torch.randn(3, 5, dtype=F64)
    for spec in SPECS:
        for name in ("index_add_", "scatter_", "index_put_ that adds"):
            mine, theirs = x.clone(), x.clone()
            WRITES[name](mine, _laid(y, spec, MESHES[1]))
            WRITES[name](theirs, y)
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", ["index_add_", "scatter_add_", "index_put_ that adds"])
def test_rows_are_added_where_they_lie(name: str) -> None:
    """As to the sum of what experts give for their tokens; in backward gradients of what is added are summed."""
    y = device_put(torch.randn(3, 5, dtype=F64), P(), mesh=MESHES[0]).requires_grad_()
    with communication_log() as log:
        x = device_put(torch.zeros(24, 5, dtype=F64), P("x"), mesh=MESHES[0])
        for _ in range(2):
            WRITES[name](x, y)
        assert not log
        x.sin().sum().backward()
    assert x.spec.partition == P("x", None)
    assert {(one.kind, one.shape) for one in log} == {("psum", (3, 5))}
