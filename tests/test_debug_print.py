"""debug_print says what the values are when a program runs: eagerly, in bodies, in transforms, in records."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated import GRID, MESH
from torch import Tensor, func

import fspmd
from fspmd import ArgumentError, P, debug_print, device_put, jit, psum, shard_map

Function = Callable[..., Any]


def f(x: Any) -> Any:
    debug_print("x {}", x)
    y = x * 2
    debug_print("y {y} of {}", (1, None), y=y)
    return (y * y).sum()


def _said(run: Function, *args: Any) -> list[str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run(*args)
    return out.getvalue().splitlines()


def _lines(*rows: Any) -> list[str]:
    found = [f"x {torch.tensor(row)}" for row in rows]
    return [*found, *(f"y {torch.tensor(row) * 2} of (1, None)" for row in rows)]


ROWS = [[0.0, 1.0], [2.0, 3.0]]
#: functions of a matrix, and what is printed of it
TRANSFORMED: dict[str, tuple[Function, Function]] = {
    "plain": (lambda x: f(x[0]), lambda a, b: _lines(a)),
    "grad": (lambda x: fspmd.grad(f)(x[0]), lambda a, b: _lines(a)),
    "jvp": (lambda x: fspmd.jvp(f, (x[1],), (x[0],)), lambda a, b: _lines(b)),
    "vjp": (lambda x: fspmd.vjp(f, x[0]), lambda a, b: _lines(a)),
    "vmap": (fspmd.vmap(f), _lines),
    "vmap of the other dim": (lambda x: func.vmap(f, in_dims=1)(x.t()), _lines),
    "vmap of grad": (func.vmap(func.grad(f)), _lines),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms(name: str) -> None:
    run, lines = TRANSFORMED[name]
    recorded = jit(run)
    for given in (run, recorded, recorded, jit(run, backend=lambda module, _: module.forward)):
        for shift in (0.0, 5.0):
            x = torch.tensor(ROWS) + shift
            assert _said(given, x) == lines(*x.tolist())


def test_nested_vmap_goes_through_examples_in_their_order() -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    both = func.vmap(func.vmap(lambda y, z: (debug_print("{} {}", y[0], z), y)[1], in_dims=(1, None)), in_dims=(1, 0))
    z = torch.arange(3.0)
    assert _said(jit(both), x, z) == [f"{x[0, i, j].item()} {z[i].item()}" for i in range(3) for j in range(4)]


def test_sharded_values_are_global_and_printed_once() -> None:
    for spec in (P("x"), P(None, "y"), P(unreduced={"x"})):
        x = torch.arange(10.0).view(5, 2)
        given = device_put(x, spec, mesh=GRID)
        recorded = jit(fspmd.grad(f))
        for one, plain in ((given, x), (given + given, 2 * x)):
            assert _said(recorded, one) == "\n".join(_lines(plain.tolist())).splitlines()
        with fspmd.explicit():  # this is written
            assert _said(debug_print, "{}", given) == str(x).splitlines()


def test_each_rank_of_a_body() -> None:
    @jit
    def run(x: Any) -> Any:
        def body(x: Tensor) -> Tensor:
            total = psum(x, "x")
            debug_print("{:.1f} {} {}", total.sum(), fspmd.axis_index("x"), {"x": x})
            return total

        return shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P())(x)

    for shift in (0.0, 0.0, 1.0):
        x = torch.arange(4.0) + shift
        expected = [f"[x={i}] {x.sum():.1f} {i} {{'x': tensor([{i + shift:.0f}.])}}" for i in range(4)]
        assert _said(run, x) == expected
    assert run.cache_info() == (2, 1, 1)
    assert _said(run.lower, x) == []
    mapped = shard_map(
        lambda x: fspmd.rank_map(lambda x: (debug_print("{}", x), x)[1], x),
        mesh=MESH,
        in_specs=P("x"),
        out_specs=P("x"),
    )
    assert _said(mapped, torch.arange(4.0)) == [f"[rank={i}] tensor([{i}.])" for i in range(4)]


def test_a_function_that_needs_values_to_be_recorded_prints_once() -> None:
    def body(x: Tensor) -> Tensor:
        debug_print("{}", x)
        return fspmd.rank_map(lambda x: x + float(x.sum()), x)

    run = shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    recorded, x = jit(run), torch.arange(4.0)
    expected = _said(run, x)
    assert [_said(recorded, x) for _ in range(2)] == [expected, expected]


def test_formats_that_do_not_fit() -> None:
    x = torch.ones(3)
    for wrong in (lambda: debug_print("{} {}", x), lambda: debug_print("{y}", x), lambda: debug_print("{:.2f}", x)):
        with pytest.raises(ArgumentError, match=r"^debug_print\('.*'\) cannot format its values: .*; write one"):
            wrong()
    with pytest.raises(ArgumentError, match=r"^debug_print got a tensor of shape \(3,\) for its format; write debug_"):
        debug_print(x)  # type: ignore[arg-type]


def check_on_processes(mesh: fspmd.Mesh) -> None:
    rank = mesh.coordinate()[0]  # type: ignore[index]
    recorded = jit(f)
    body = jit(shard_map(lambda x: (debug_print("{}", x), x)[1], mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    for _ in range(2):
        x = device_put(torch.arange(3.0), P("x"), mesh=mesh)
        assert _said(recorded, x) == ([] if rank else _lines([0.0, 1.0, 2.0]))
        assert _said(body, x) == [f"[x={rank}] {torch.arange(3.0)[rank : rank + 1]}"]
