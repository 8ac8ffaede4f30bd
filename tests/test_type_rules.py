"""What types allow: pending sums stay pending under linear ops only, varying values are not written into others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from simulated import GRID, MESH, run, shards, types
from torch import Tensor, nn
from torch_calls import F64

import fspmd
from fspmd import P, VarianceError, axis_index, device_get, pcast, psum, shard_map

X = torch.linspace(-1, 1, 24, dtype=F64).view(8, 3)
W = torch.tensor([0.3, -0.7, 1.1], dtype=F64)


# --- unreduced and reduced values -----------------------------------------------------------------------------------

A = torch.linspace(-1, 1, 48, dtype=F64).view(16, 3)
KEEPS_SUM: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "itself": lambda u, v, w: u,
    "u + v": lambda u, v, w: u + v,
    "u - v": lambda u, v, w: torch.sub(u, v, alpha=2.0),
    "sum of a list": lambda u, v, w: sum([u, v]),
    "-u": lambda u, v, w: -u,
    "2 * u": lambda u, v, w: 2.0 * u,
    "u / 3": lambda u, v, w: u / 3,
    "u * w": lambda u, v, w: u * w,
    "w * u": lambda u, v, w: w * u,
    "u / w": lambda u, v, w: u / (w + 5),
    "u @ w": lambda u, v, w: u @ w[:3, None],
    "w @ u": lambda u, v, w: w[:4] @ u[:, 0] if w.numel() == 4 else torch.ones(4, dtype=F64) @ u,
    "linear": lambda u, v, w: F.linear(u, w[None, :3]),
    "einsum": lambda u, v, w: torch.einsum("ij,j->i", u, w[:3]),
    "sum": lambda u, v, w: u.sum(0),
    "mean": lambda u, v, w: u.mean(),
    "cumsum": lambda u, v, w: u.cumsum(0),
    "reshape": lambda u, v, w: u.reshape(2, -1),
    "transpose": lambda u, v, w: u.T.contiguous(),
    "index": lambda u, v, w: u[1:, 0],
    "index_select": lambda u, v, w: u.index_select(0, torch.tensor([2, 0])),
    "gather": lambda u, v, w: u.gather(1, torch.zeros(4, 1, dtype=torch.long)),
    "cat": lambda u, v, w: torch.cat([u, v]),
    "stack": lambda u, v, w: torch.stack((u, v)),
    "split": lambda u, v, w: u.split(2),
    "to float32": lambda u, v, w: u.to(torch.float32).double(),
    "tril": lambda u, v, w: u.tril(),
    "add_": lambda u, v, w: (u * 1).add_(v),
    "clone": lambda u, v, w: u.clone(),
}
BREAKS_SUM: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "u + 1": lambda u, v, w: u + 1,
    "1 - u": lambda u, v, w: 1 - u,
    "u + w": lambda u, v, w: u + w,
    "u * v": lambda u, v, w: u * v,
    "u @ v": lambda u, v, w: u @ v.T,
    "1 / u": lambda u, v, w: 1 / u,
    "w / u": lambda u, v, w: w / u,
    "sin": lambda u, v, w: u.sin(),
    "relu": lambda u, v, w: F.relu(u),
    "abs": lambda u, v, w: u.abs(),
    "max": lambda u, v, w: u.max(),
    "square": lambda u, v, w: u**2,
    "softmax": lambda u, v, w: u.softmax(-1),
    "where": lambda u, v, w: torch.where(w[0] > 0, u, 0.0),
    "u > 0": lambda u, v, w: u > 0,
    "sort": lambda u, v, w: u.sort(),
    "linear with a bias": lambda u, v, w: F.linear(u, w[None, :3], w[:1]),
    "cat with an invariant": lambda u, v, w: torch.cat([u, w[None, :3]]),
    "to integers": lambda u, v, w: u.to(torch.int64),
    "layer_norm": lambda u, v, w: F.layer_norm(u, (3,)),
    "in place times v": lambda u, v, w: (u * 1).mul_(v),
    "clamp": lambda u, v, w: u.clamp(min=0),
    "dropout": lambda u, v, w: F.dropout(u, 0.5),
    "beside a varying value": lambda u, v, w: u * axis_index("x"),
}
W3 = torch.tensor([0.5, -1.0, 2.0], dtype=F64)


@pytest.mark.parametrize("name", KEEPS_SUM)
def test_linear_ops_keep_a_sum_pending(name: str) -> None:
    """Adding the results of all ranks up gives the result for the sum; gradients too."""
    f = KEEPS_SUM[name]

    def body(a: Tensor, w: Tensor) -> Any:
        def settled(a: Tensor, w: Tensor) -> tuple[Any, Any]:
            u, v = pcast(a, "x", to="unreduced"), pcast(a * 2, "x", to="unreduced")
            out = f(u, v, w)
            return psum(out, "x"), types(out)

        def scalar(a: Tensor, w: Tensor) -> Tensor:
            return sum(leaf.sin().sum() for leaf in optree.tree_leaves(settled(a, w)[0]))

        return *settled(a, w), fspmd.grad(scalar, (0, 1))(a, w)

    out, kinds, (by_a, by_w) = run(body, A, W3, specs=(P("x"), P()))
    assert kinds == {"{U:x}"}

    def scalar(a: Tensor, w: Tensor) -> Tensor:
        s = torch.stack(a.chunk(4)).sum(0)
        return sum(leaf.sin().sum() for leaf in optree.tree_leaves(f(s, 2 * s, w)))

    s = torch.stack(A.chunk(4)).sum(0)
    tolerance = 1e-6 if name == "to float32" else 1e-12
    expected = optree.tree_leaves(f(s, 2 * s, W3))
    torch.testing.assert_close(optree.tree_leaves(out), expected, rtol=tolerance, atol=tolerance)
    grads = torch.func.grad(scalar, (0, 1))(A, W3)
    torch.testing.assert_close((torch.cat(shards(by_a)), by_w), grads, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", BREAKS_SUM)
def test_other_ops_on_a_pending_sum_are_refused(name: str) -> None:
    f = BREAKS_SUM[name]
    with pytest.raises(VarianceError, match=r"unreduced over 'x'|\{U:x\}"):
        run(
            lambda a, w: f(pcast(a, "x", to="unreduced"), pcast(a * 2, "x", to="unreduced"), w),
            A,
            W3,
            specs=(P("x"), P()),
        )


@pytest.mark.parametrize(
    ("f", "kind"),
    [
        (lambda r, x, w: r * 2 + 1, "{R:x}"),
        (lambda r, x, w: r.sin() * w, "{R:x}"),
        (lambda r, x, w: r * x, "{V:x}"),
        (lambda r, x, w: torch.where(x > 0, r, w), "{V:x}"),
        (lambda r, x, w: r * axis_index("y"), "{V:y R:x}"),
        (lambda r, x, w: r[axis_index("x") % 3], "{V:x}"),
        (lambda r, x, w: torch.stack([r, w]), "{R:x}"),
        (lambda r, x, w: r * pcast(w, "y", to="reduced"), "{R:x,y}"),
    ],
)
def test_reduced_operands(f: Callable[..., Any], kind: str) -> None:
    def body(x: Tensor, w: Tensor) -> Any:
        out = f(pcast(w, "x", to="reduced"), x, w)
        return types(out)

    assert run(body, torch.ones(2, 3, dtype=F64), W3, mesh=GRID, specs=(P("x"), P())) == {kind}


def test_gradients_of_reduced_values_are_pending_sums() -> None:
    def body(x: Tensor, w: Tensor) -> Any:
        r = pcast(w, "x", to="reduced")
        g = fspmd.grad(lambda r: (x * r.sin() + w).sum())(r)
        return types(g), psum(g, "x"), fspmd.grad(lambda w: (x * pcast(w, "x", to="reduced").sin() + w).sum())(w)

    kinds, by_r, by_w = run(body, X, W, specs=(P("x"), P()))
    assert kinds == {"{U:x}"}
    torch.testing.assert_close(by_r, (X * W.cos()).sum(0))
    torch.testing.assert_close(by_w, (X * W.cos()).sum(0) + 8)


# --- writes ---------------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "w += x": lambda x, w: w.__iadd__(x),
    "add_": lambda x, w: w.add_(x),
    "copy_": lambda x, w: w.copy_(x),
    "w[0] = x": lambda x, w: w.__setitem__(0, x[0]),
    "w[i] = 1": lambda x, w: w.__setitem__(axis_index("x"), 1.0),
    "w[mask] = 1": lambda x, w: w.__setitem__(x > 0, 1.0),
    "view": lambda x, w: w[:1].add_(x[:1]),
    "out=": lambda x, w: torch.add(x, x, out=w),
    "out= of two": lambda x, w: torch.sort(x, out=(w, torch.empty(2, dtype=torch.long))),
    "index_add_": lambda x, w: w.index_add_(0, torch.tensor([0, 1]), x),
    "masked_fill_": lambda x, w: w.masked_fill_(x > 0, 1.0),
    "where=": lambda x, w: torch.where(x > 0, x, x, out=w),
    "foreach": lambda x, w: torch._foreach_add_([w], [x]),
    "foreach beside a varying one": lambda x, w: torch._foreach_add_([x * 1, w], [x, x]),
    "data": lambda x, w: setattr(w, "data", x),
    "aten overload": lambda x, w: torch.ops.aten.add_.Tensor(w, x),
    "aten packet": lambda x, w: torch.ops.aten.add_(w, x),
    "running statistics": lambda x, w: F.batch_norm(x[:, None], w[:1], w[1:], training=True),
    "optimizer": lambda x, w: optimizer_step(x, w=w),
}


def optimizer_step(x: Tensor, w: Tensor) -> None:
    leaf = nn.Parameter(w)
    leaf.grad = x
    torch.optim.SGD([leaf], lr=0.1).step()


@pytest.mark.parametrize("name", WRITES)
def test_writing_a_varying_value_into_an_invariant_one_is_refused(name: str) -> None:
    w = torch.tensor([1.0, 2.0])
    before = w.clone()
    with pytest.raises(VarianceError):
        run(WRITES[name], torch.arange(8.0), w, specs=(P("x"), P()))
    assert torch.equal(w, before)


def test_writing_an_invariant_value_into_an_invariant_one_is_plain() -> None:
    def body(x: Tensor) -> Tensor:
        acc = torch.zeros(2)
        for _ in range(3):
            acc += psum(x, "x")
        acc[0] = 1.0
        return acc

    assert device_get(shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P())(torch.ones(8))).tolist() == [1.0, 12.0]


def test_lists_of_different_types_are_stepped_each_by_its_own() -> None:
    def body(x: Tensor, w: Tensor) -> Any:
        a, b = x * 1, w * 1
        torch._foreach_add_([a, b], [x, w], alpha=2.0)
        sums = torch._foreach_add([a, b], 1.0)
        return types(a), types(b), [types(s) for s in sums], sums

    va, vb, each, sums = run(body, torch.arange(8.0), torch.ones(2), specs=(P("x"), P()))
    assert (va, vb, each) == ({"{V:x}"}, {"{}"}, [{"{V:x}"}, {"{}"}])
    assert torch.cat(shards(sums[0])).tolist() == [3.0 * i + 1 for i in range(8)]
    assert sums[1].tolist() == [4.0, 4.0]
