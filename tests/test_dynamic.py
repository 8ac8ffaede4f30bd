"""Places that tensors hold, and classes: what torch reads values for is recorded without. The judge is torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from processes import Processes
from simulated import MESH
from torch import Tensor

import fspmd
from fspmd import P, RecordError, axis_index, device_get, device_put, jit, make_mesh, psum, shard_map

X = torch.randn(4, 3, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
#: of two places, the first in a dim of three, the second in one of two, where there is such a dim
INDICES: dict[str, Callable[[Any, Any], Any]] = {
    "i": lambda i, j: i,
    "negative": lambda i, j: i - 3,
    "int32": lambda i, j: i.int(),
    ":, i": lambda i, j: (slice(None), i),
    "1, i": lambda i, j: (np.int64(1), i),
    "i, 1": lambda i, j: (i, 1),
    "..., j": lambda i, j: (..., j),
    "i, j": lambda i, j: (i, j),
    "i, ..., j": lambda i, j: (i, ..., j),
    "None, i, None": lambda i, j: (None, i, None),
    "1:3, i, ::2": lambda i, j: (slice(1, 3), i, slice(None, None, 2)),
    ":, i, :, j": lambda i, j: (slice(None), i, slice(None), j),
    ":, i, 1, j": lambda i, j: (slice(None), i, 1, j),
    "i, i, i, j": lambda i, j: (i, i, i, j),
    ":, :, i, j": lambda i, j: (slice(None), slice(None), i, j),
    "list, i": lambda i, j: ([3, 0, 1], i),
    ":, i, list, j": lambda i, j: (slice(None), i, [4, 0], j),
    "tensor, 1, i": lambda i, j: (torch.tensor([[3, 0], [1, 2]]), 1, i),
    "i, list": lambda i, j: (i, [0, 1, 2]),
    "None, i, tensor": lambda i, j: (None, i, torch.tensor([2, 0])),
    "..., list, j": lambda i, j: (..., [2, 0], j),
}
PLACES = [(torch.tensor(i), torch.tensor(j)) for i, j in ((0, 1), (2, 0), (1, 1))]


def taken(index: Any, x: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return x[index(i, j)] * 2


def put(index: Any, x: Tensor, i: Tensor, j: Tensor) -> Tensor:
    y = x * 1
    y[index(i, j)] = x[index(i, j)].sin() + y[index(i, j)] * 2
    return y


def filled(index: Any, x: Tensor, i: Tensor, j: Tensor) -> Tensor:
    y = x * 1
    y[index(i, j)] = 0.5
    return y


def put_of_others(index: Any, x: Tensor, i: Tensor, j: Tensor) -> Tensor:
    y, place = x * 1, index(i, j)
    arrays = isinstance(place, tuple) and any(isinstance(k, list) or (isinstance(k, Tensor) and k.dim()) for k in place)
    y[place] = x[0, 0, 0, 0] * 9 if arrays else (x[0, 0, 0, 0] * 9).float()  # torch casts a value for numbers alone
    return y


def spread(index: Any, x: Tensor, i: Tensor, j: Tensor) -> Tensor:
    y = x * 1
    y[index(i, j)] = x[0, 0, 0] if y[index(i, j)].shape[-1:] == (2,) else x[0, 0, 0, 0]
    return y


@pytest.mark.one_of(10)
@pytest.mark.parametrize("f", [taken, put, filled, put_of_others, spread])
@pytest.mark.parametrize("name", INDICES)
def test_a_place_that_a_tensor_holds(name: str, f: Callable[..., Tensor]) -> None:
    """One record, whatever it is; gradients, too."""

    def plain(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return f(INDICES[name], x, i, j)

    def step(x: Tensor, i: Tensor, j: Tensor) -> Any:
        return plain(x, i, j), fspmd.grad(lambda x: (plain(x, i, j) ** 2).sum())(x)

    recorded = jit(step)
    for i, j in PLACES:
        for got, want in zip(recorded(X, i, j), step(X, i, j), strict=True):
            assert torch.equal(got, want)
        torch.testing.assert_close(jit(plain).lower(X, i, j).compile()(X, i, j), plain(X, i, j), rtol=0, atol=0)
    assert recorded.cache_info().misses == 1
    with pytest.raises(IndexError):
        recorded(X, torch.tensor(9), torch.tensor(9))


@pytest.mark.one_of(10)
@pytest.mark.parametrize("partition", [P("x"), P(None, None, "x"), P(None, "x")])
@pytest.mark.parametrize("name", list(INDICES)[::2])
def test_places_of_global_tensors(name: str, partition: P) -> None:
    x = device_put(X, partition, mesh=MESH)
    for f in taken, put, filled:
        of_tensors, of_sharded = (
            jit(lambda x, i, j, f=f: fspmd.value_and_grad(lambda x: (f(INDICES[name], x, i, j) ** 2).sum())(x))
            for _ in range(2)
        )
        for i, j in PLACES:
            leaf = X.clone().requires_grad_()
            want = (f(INDICES[name], leaf, i, j) ** 2).sum()
            for loss, g in (
                of_tensors(x, i, j),
                of_sharded(x, device_put(i, P(), mesh=MESH), device_put(j, P(), mesh=MESH)),
            ):
                torch.testing.assert_close(device_get(loss), want)
                torch.testing.assert_close(device_get(g), torch.autograd.grad(want, leaf, retain_graph=True)[0])
        assert of_tensors.cache_info().misses == of_sharded.cache_info().misses == 1


@pytest.mark.parametrize("select", [lambda x, i: x.select(-2, i), lambda x, i: torch.select(x, dim=2, index=i)])
def test_select(select: Callable[..., Tensor]) -> None:
    recorded = jit(select)
    for i in range(-5, 5):
        assert torch.equal(recorded(X, torch.tensor(i)), X.select(2, i))


@pytest.mark.parametrize(
    "f",
    [
        lambda x, i: x[i].add_(1),
        lambda x, i: (y := x * 1)[i].mul_(2) + y[i],
        lambda x, i: [y := x * 1, z := y[i], y.mul_(2), z][-1],
        lambda x, i: [y := x * 1, z := y[:, i], y[i].mul_(2), z][-1],
        lambda x, i: [y := x * 1, z := y[i][None], z.mul_(2), y][-1],
        lambda x, i: [y := x * 1, z := y[i][i][i], y.mul_(2), z][-1],
    ],
)
def test_writes_that_a_view_would_see(f: Callable[..., Any]) -> None:
    for run in jit(f), jit(f).lower:
        with pytest.raises(RecordError, match=r"^jit cannot record \w+_\(\), .* x\[i\] = x\[i\] \+ 1"):
            run(X * 1, torch.tensor(1))


@pytest.mark.parametrize(
    "f",
    [
        lambda x, i: x[i, :, [0, 1]],
        lambda x, i: x[i : i + 2],
        lambda x, i: x.narrow(0, i, 2),
        lambda x, i: x.select(0, 1).narrow(1, i, 1),
    ],
)
def test_places_that_are_refused_have_another_way(f: Callable[..., Any]) -> None:
    with pytest.raises(
        RecordError, match=r"x.index_select\(d, i \+ torch.arange\(n\)\) instead of x.narrow\(d, i, n\)"
    ):
        jit(f)(X, torch.tensor(1))
    rows = jit(lambda x, i: x.index_select(0, i + torch.arange(2)))
    assert torch.equal(rows(X, torch.tensor(1)), X[1:3])


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
@pytest.mark.parametrize("n", [4, 7])
def test_one_hot(shape: tuple[int, ...], n: int) -> None:
    recorded = jit(lambda x: F.one_hot(x, n))
    for seed in range(3):
        x = torch.randint(0, n, shape, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(recorded(x), F.one_hot(x, n))
        assert torch.equal(jit(F.one_hot).lower(x, num_classes=n).compile()(x, num_classes=n), F.one_hot(x, n))
    if x.numel():
        for wrong in (n, -1):
            with pytest.raises(RuntimeError, match=r"out of bounds"):
                recorded(torch.full(shape, wrong))
        with pytest.raises(RecordError):
            jit(F.one_hot)(x)
        with pytest.raises(RuntimeError, match=r"LongTensor"):
            recorded(x.int())


def layer(x: Tensor, i: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    kept = x.sin()
    kept[i] = kept[i] * 3
    return kept * x[i] + F.one_hot(i, 3) * total(x.sum(0)) * x[:, i, None] + x.select(0, i)


def of_blocks(x: Tensor, i: Tensor, n: int) -> Tensor:
    return torch.cat([layer(b, i, lambda _: x.sum(0)) for b in x.split(-(-len(x) // n))])


def check_in_bodies(mesh: Any) -> None:
    """Of blocks that are uneven or not, beside plain torch on each of them."""
    for check_vma in (True, False):
        body = shard_map(
            lambda x, i: layer(x, i, lambda s: psum(s, "x")),
            mesh=mesh,
            in_specs=(P("x"), P()),
            out_specs=P("x"),
            check_vma=check_vma,
        )

        def step(x: Any, i: Tensor, body: Any = body) -> Any:
            return fspmd.value_and_grad(lambda x: (body(x, i) ** 2).sum())(x)

        recorded = jit(step)
        for rows in (8, 11):
            x = torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
            mine = device_put(x, P("x"), mesh=mesh)
            whole = x.requires_grad_()
            for i in map(torch.tensor, (0, 1)):
                want = (of_blocks(whole, i, mesh.size) ** 2).sum()
                (wanted,) = torch.autograd.grad(want, whole)
                for loss, g in step(mine, i), recorded(mine, i):
                    torch.testing.assert_close(device_get(loss), want)
                    torch.testing.assert_close(device_get(g), wanted)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("rows", [8, 11])
def test_places_of_blocks_that_all_ranks_know(rows: int, check_vma: bool) -> None:
    """Blocks are uneven or not."""

    def f(x: Tensor, i: Tensor) -> Tensor:
        return (
            x[i : i + 1] + x.narrow(0, i, 1) * torch.narrow(x, 1, start=i, length=2).sum() + x[i, i] + x[..., i, None]
        )

    body = shard_map(f, mesh=MESH, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=check_vma)
    x = torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
    for i in map(torch.tensor, (0, 1)):
        want = torch.cat([f(b, i) for b in x.split(-(-rows // 4))])
        torch.testing.assert_close(device_get(body(device_put(x, P("x"), mesh=MESH), i)), want)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("rows", [8, 11])
def test_select_of_each_rank(rows: int, check_vma: bool) -> None:
    def f(x: Tensor) -> Tensor:
        return x + x.select(-1, axis_index("x"))[:, None] + torch.select(x, dim=1, index=axis_index("x") - 4)[:, None]

    body = shard_map(f, mesh=MESH, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)
    x = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
    want = torch.cat([b + 2 * b[:, r : r + 1] for r, b in enumerate(x.split(-(-rows // 4)))])
    for run in body, jit(body):
        torch.testing.assert_close(device_get(run(device_put(x, P("x"), mesh=MESH))), want)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("rows", [8, 11])
@pytest.mark.parametrize(
    "f",
    [
        lambda x, i: [y := x * 1, y[:, i].mul_(3), y][-1],
        lambda x, i: [y := x * 1, y.select(1, i).mul_(3), y][-1],
        lambda x, i: [y := x * 1, z := y[..., i], y.mul_(2), y + z[:, None]][-1],
    ],
)
def test_places_of_each_rank_are_views(f: Callable[..., Tensor], rows: int, check_vma: bool) -> None:
    body = shard_map(lambda x: f(x, axis_index("x")), mesh=MESH, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)
    x = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)).requires_grad_()
    mine = device_put(x.detach(), P("x"), mesh=MESH).requires_grad_()
    want = torch.cat([f(b, torch.tensor(r)) for r, b in enumerate(x.split(-(-rows // 4)))])
    got = body(mine)
    torch.testing.assert_close(device_get(got), want)
    (g,) = torch.autograd.grad((got**2).sum(), mine)
    torch.testing.assert_close(device_get(g), torch.autograd.grad((want**2).sum(), x)[0])
    with pytest.raises(RecordError, match=r"write x\[i\] = x\[i\] \+ 1"):
        jit(body)(mine)


def check_on_processes() -> None:
    check_in_bodies(make_mesh((4,), ("x",)))


def test_in_bodies() -> None:
    check_in_bodies(MESH)
    with Processes(4) as pool:
        pool.run(check_on_processes)
