"""Arbitrary Python per rank: shapes of its own, gradients, and results that make no value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated import F64, GRID, MESH, run, shards
from torch import Tensor

import fspmd
from fspmd import (
    FspmdError,
    P,
    ShapeError,
    TreeError,
    axis_index,
    device_get,
    psum,
    rank_map,
    shard_map,
)
from fspmd.transport.frame import frame_over


def test_rank_map_runs_python_per_rank_with_shapes_of_its_own() -> None:
    def collect(x: Tensor) -> dict[str, Any]:
        n = int(x[0])
        return {"ones": torch.ones(n, 2), "double": 2 * x.tolist()[0], "all": x.repeat(n)}

    out = run(lambda x: rank_map(collect, x), torch.arange(4.0))
    assert [tuple(s.shape) for s in shards(out["ones"])] == [(0, 2), (1, 2), (2, 2), (3, 2)]
    assert [float(s) for s in shards(out["double"])] == [0.0, 2.0, 4.0, 6.0]
    assert [s.tolist() for s in shards(out["all"])] == [[], [1.0], [2.0] * 2, [3.0] * 3]


def test_rank_map_knows_its_rank() -> None:
    at = run(lambda: rank_map(lambda: torch.tensor(GRID.coordinate())), mesh=GRID, specs=())
    held = frame_over(GRID, ("x", "y"))
    assert [tuple(s.tolist()) for s in shards(at, held)] == list(held.coordinates())


def test_gradients_through_rank_map_with_uneven_results() -> None:
    def pick(x: Tensor, w: Tensor) -> Tensor:
        return (x[: int(x[0])] * w[0]).sin()

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return psum(rank_map(pick, x, w).square().sum(), "x")

    x, w = torch.tensor([0, 5, 1, 6, 2, 7, 1, 8], dtype=F64), torch.ones(2, dtype=F64)
    total = torch.zeros((), dtype=F64)
    leaf_x, leaf_w = x.clone().requires_grad_(), w.clone().requires_grad_()
    for rank in range(4):
        total = total + pick(leaf_x[2 * rank : 2 * rank + 2], leaf_w).square().sum()
    expected = torch.autograd.grad(total, (leaf_x, leaf_w), create_graph=True)
    second = torch.autograd.grad(sum(g.sin().sum() for g in expected), (leaf_x, leaf_w))
    f = shard_map(loss, mesh=MESH, in_specs=(P("x"), P()), out_specs=P())
    grads = fspmd.grad(f, (0, 1))(x, w)
    torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-12)
    again = fspmd.grad(lambda x, w: sum(g.sin().sum() for g in fspmd.grad(f, (0, 1))(x, w)), (0, 1))(x, w)
    torch.testing.assert_close(again, second, rtol=1e-12, atol=1e-12)
    by_transform = torch.func.grad(lambda x, w: device_get(f(x, w)), (0, 1))(x, w)
    torch.testing.assert_close(by_transform, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("call", [lambda f: f, lambda f: fspmd.jit(f, check=True)], ids=["eager", "jit"])
def test_results_share_no_memory(call: Any) -> None:
    """With arguments, or with one another: what is written into one is in no other."""

    def body(x: Tensor) -> list[Tensor]:
        x = x * 1
        found = [*rank_map(lambda x: (x[:1], x, y := x + 1, y[1:]), x), x]
        for i, one in enumerate(found):
            one.add_(10 * i)
        return found

    f = call(shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=[P("x")] * 5))
    x = torch.arange(8.0)
    expected = [x[::2], x + 10, x + 21, x[1::2] + 31, x + 40]
    torch.testing.assert_close([device_get(one) for one in f(x)], expected)


def test_rank_map_under_forward_mode_and_vmap() -> None:
    def even_or_odd(x: Tensor, n: Tensor) -> Tensor:
        return x.sin() if int(n) % 2 else x.square()

    def f(x: Tensor) -> Tensor:
        return rank_map(even_or_odd, x, axis_index("x"))

    x, t = torch.arange(8, dtype=F64), torch.ones(8, dtype=F64)
    g = shard_map(f, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    _, tangent = fspmd.jvp(g, (x,), (t,))
    odd = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1], dtype=torch.bool)
    torch.testing.assert_close(device_get(tangent), torch.where(odd, x.cos(), 2 * x))
    rows = torch.stack([x, x + 1])
    mapped = device_get(fspmd.vmap(g)(rows))
    torch.testing.assert_close(mapped, torch.where(odd, rows.sin(), rows.square()))


@pytest.mark.parametrize(
    ("fn", "error", "text"),
    [
        (lambda n: (n, n) if n else n, TreeError, "return the same structure on all ranks"),
        (lambda n: n.float() if n else n, FspmdError, "return one dtype on all ranks"),
        (lambda n: torch.zeros((1,) * int(n)), ShapeError, "give them one number of dims"),
        (lambda n: "many" if n else "none", FspmdError, "must be tensors or numbers"),
        (lambda n: psum(n, "x"), FspmdError, "which runs rank by rank and has no mesh axes"),
    ],
)
def test_rank_map_refuses_results_that_make_no_value(fn: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        run(lambda x: rank_map(fn, x[0]), torch.arange(4))
