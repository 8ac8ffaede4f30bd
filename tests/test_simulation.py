"""Simulated ranks: which values are held once, integers that differ from rank to rank, Python control flow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from simulated import CUBE, F64, GRID, MESH, run, shards
from torch import Tensor

import fspmd
from fspmd import (
    FspmdError,
    P,
    VarianceError,
    axis_index,
    device_get,
    pcast,
    pmax,
    psum,
    shard_map,
)
from fspmd.transport.frame import frame_over, groups, spread, union
from fspmd.transport.local_tensor import frame_of

# --- frames ---------------------------------------------------------------------------------------------------------


def test_a_frame_holds_its_axes_in_mesh_order() -> None:
    held = frame_over(CUBE, ("z", "x"))
    assert held.axes == ("x", "z")
    assert held.sizes == (2, 2)
    assert held.volume == 4
    assert frame_over(CUBE, frozenset(("x", "z"))) is held
    assert repr(held) == "Frame(x=2, z=2)"
    assert list(held.coordinates()) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_frames_of_three_axes_join_spread_and_group() -> None:
    x, zx = frame_over(CUBE, ("x",)), frame_over(CUBE, ("x", "z"))
    whole = union(union(x, frame_over(CUBE, ("y",))), zx)
    assert whole.axes == ("x", "y", "z")
    places = list(whole.coordinates())
    assert spread(x, whole) == tuple(at[0] for at in places)
    assert spread(zx, whole) == tuple(at[0] * 2 + at[2] for at in places)
    rest, table = groups(whole, ("z", "x"))  # major first: z
    assert rest.axes == ("y",)
    for y, group in enumerate(table):
        assert [places[i] for i in group] == [(x, y, z) for z in range(2) for x in range(2)]


def frames_in_body(mesh: Any, specs: Any, f: Callable[..., Any], *args: Tensor) -> tuple[str, ...]:
    out = run(f, *args, mesh=mesh, specs=specs)
    return frame_of(out, mesh).axes


@pytest.mark.parametrize(
    ("f", "axes"),
    [
        (lambda a, b, w: w * 2, ()),
        (lambda a, b, w: a * w, ("x",)),
        (lambda a, b, w: b + 1, ("y",)),
        (lambda a, b, w: a.sum() * b, ("x", "y")),
        (lambda a, b, w: psum(a.sum() * b, "x"), ("y",)),
        (lambda a, b, w: psum(a.sum() * b, ("x", "y")), ()),
        (lambda a, b, w: psum(a, "x") + w, ()),
        (lambda a, b, w: pmax(psum(a.sum() * b, "y"), "x"), ()),
        (lambda a, b, w: fspmd.all_gather(a.sum() * b, "y", to="invarying"), ("x",)),
        (lambda a, b, w: fspmd.all_gather(a, "x", tiled=True), ("x",)),  # varying: each rank may write into its own
        (lambda a, b, w: pcast(w, "y", to="varying").clone(), ("y",)),
        (lambda a, b, w: fspmd.pbroadcast(a, "x", 1), ("x",)),
        (lambda a, b, w: axis_index("x") + axis_index("y"), ("x", "y")),
        (lambda a, b, w: axis_index(("y", "x")), ("x", "y")),
        (lambda a, b, w: torch.zeros(3), ()),
        (lambda a, b, w: torch.zeros_like(a), ("x",)),
        (lambda a, b, w: fspmd.ppermute(w, "y", [(0, 1)]), ("y",)),
    ],
)
def test_a_value_is_held_once_per_coordinate_of_the_axes_it_differs_over(f: Any, axes: tuple[str, ...]) -> None:
    a, b, w = torch.arange(4.0), torch.arange(6.0), torch.ones(2)
    assert frames_in_body(GRID, (P("x"), P("y"), P()), f, a, b, w) == axes


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("own", "before"),
    [
        (lambda x: fspmd.all_gather(x, "x", tiled=True), [1, 2, 3, 4]),
        (lambda x: fspmd.all_gather(x, "x", tiled=True).clone(), [1, 2, 3, 4]),
        (lambda x: pcast(torch.zeros(4, dtype=F64), "x", to="varying").clone(), [0, 0, 0, 0]),
        (lambda x: fspmd.pbroadcast(x, "x", 1).repeat(2), [3, 4, 3, 4]),
    ],
)
def test_each_rank_may_write_into_its_own_copy(own: Callable[..., Any], before: list[int], check_vma: bool) -> None:
    def body(x: Tensor) -> Tensor:
        z = own(x)
        view = z[:2]
        view += x
        return z.mul_(axis_index("x") + 1)

    mesh = fspmd.make_mesh((2,), ("x",))
    out = run(body, torch.arange(1, 5, dtype=F64), mesh=mesh, specs=(P("x"),), check_vma=check_vma)
    start = torch.tensor(before, dtype=F64)
    for rank, (block, x) in enumerate(zip(shards(out, frame_over(mesh, ("x",))), ([1, 2], [3, 4]), strict=True)):
        expected = (start + torch.tensor([*x, 0, 0])) * (rank + 1)
        torch.testing.assert_close(block, expected, rtol=0, atol=0)


def test_values_on_three_axes_meet_coordinate_by_coordinate() -> None:
    a, b, c = (torch.randn(12, dtype=F64) for _ in range(3))
    out = run(lambda a, b, c: a[:2] * b[:2] + c[:2], a, b, c, mesh=CUBE, specs=(P("x"), P("y"), P("z")))
    held = frame_over(CUBE, ("x", "y", "z"))
    for (x, y, z), block in zip(held.coordinates(), shards(out, held), strict=True):
        expected = a.view(2, 6)[x, :2] * b.view(3, 4)[y, :2] + c.view(2, 6)[z, :2]
        torch.testing.assert_close(block, expected, rtol=0, atol=0)


def test_what_is_equal_on_all_ranks_is_computed_once() -> None:
    calls = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Tensor) -> Tensor:
            calls.append(type(w))
            return w * 2

    run(lambda x, w: Counted.apply(w) + psum(x, "x"), torch.ones(4), torch.ones(1), specs=(P("x"), P()))
    assert calls == [Tensor]


# --- axis_index -----------------------------------------------------------------------------------------------------

TABLE = torch.arange(48, dtype=F64).view(4, 6, 2)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "f",
    [
        lambda i, t: t * i + 2 - i,
        lambda i, t: torch.where(i == 2, t, -t),
        lambda i, t: torch.where(i % 2 == 0, 1.0, 0.0),
        lambda i, t: t[i],
        lambda i, t: t[-1 - i],
        lambda i, t: t[:, i],
        lambda i, t: t[..., i % 2],
        lambda i, t: t[1, i],
        lambda i, t: t[i, 1],
        lambda i, t: t[i, i],
        lambda i, t: t[i, :, i % 2],
        lambda i, t: t[None, i, ..., 0],
        lambda i, t: t[i, ..., None],
        lambda i, t: t[i, [0, 2]],
        lambda i, t: t[[0, 1], [1, 2], i % 2],
        lambda i, t: t[i, torch.tensor([3, 1, 1])],
        lambda i, t: t[i, :, torch.tensor([1, 0, 0])],
        lambda i, t: t[:, torch.tensor([3, 1, 1]), i % 2],
        lambda i, t: t[t[:, 0, 0] > 20, i],
        lambda i, t: t[i][t[i] > 20],
        lambda i, t: t[i : i + 1],
        lambda i, t: t[i:],
        lambda i, t: t[:i, 1],
        lambda i, t: t[i, i : i + 2, 0],
        lambda i, t: t.narrow(1, i, 3),
        lambda i, t: torch.narrow(t, dim=1, start=i, length=2),
        lambda i, t: t.index_select(0, i[None]),
        lambda i, t: t.index_select(1, torch.arange(2) + i),
        lambda i, t: torch.gather(t, 1, (torch.zeros(4, 1, 2, dtype=torch.long) + i)),
        lambda i, t: t.take(i * 3),
        lambda i, t: torch.take_along_dim(t, i.view(1, 1, 1), 1),
        lambda i, t: F.one_hot(i, 4),
        lambda i, t: torch.arange(5)[None] * i,
        lambda i, t: t.roll(1, 0)[i],
        lambda i, t: torch.zeros(6).index_fill(0, i, 1.0),
        lambda i, t: torch.arange(4) == i,
        lambda i, t: 3 // (i + 1),
        lambda i, t: (-i).abs().float() / 2,
    ],
)
def test_axis_index_is_an_integer_of_each_rank(f: Callable[..., Tensor], check_vma: bool) -> None:
    out = run(lambda t: f(axis_index("x"), t), TABLE, specs=P(), check_vma=check_vma)
    for rank, block in enumerate(shards(out)):
        torch.testing.assert_close(block, f(torch.tensor(rank), TABLE), rtol=0, atol=0)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "write",
    [
        lambda i, t: t.__setitem__(i, 0.0),
        lambda i, t: t.__setitem__(i, t[0] * 2),
        lambda i, t: t.__setitem__((slice(None), i), 7),
        lambda i, t: t.__setitem__((i, i, 1), torch.tensor(5)),
        lambda i, t: t.__setitem__((i, [0, 2]), 1.5),
        lambda i, t: t.__setitem__((slice(i, i + 1), 0), 9.0),
        lambda i, t: t.__setitem__((i, Ellipsis, 0), torch.arange(6.0, dtype=F64)),
        lambda i, t: t.__setitem__((None, i), torch.ones(1, 1, 6, 2, dtype=F64)),
        lambda i, t: t.__setitem__((1, 1, 1), i.double()),
        lambda i, t: t.__setitem__(i, t[i] + i),
    ],
)
def test_writing_at_a_place_that_differs_from_rank_to_rank(write: Callable[..., Any], check_vma: bool) -> None:
    def f(t: Tensor) -> Tensor:
        i = axis_index("x")
        z = t + 0 * i
        write(i, z)
        return z

    out = run(f, TABLE, specs=P(), check_vma=check_vma)
    for rank, block in enumerate(shards(out)):
        expected = TABLE.clone()
        write(torch.tensor(rank), expected)
        torch.testing.assert_close(block, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "f",
    [
        lambda i, t: t[i],
        lambda i, t: t[i : i + 2],
        lambda i, t: t[i, :, torch.tensor([1, 0, 0])],
        lambda i, t: t.index_select(1, torch.arange(2) + i),
        lambda i, t: t.narrow(1, i, 3),
        lambda i, t: torch.where(i == 1, t, t * t),
    ],
)
def test_gradients_at_places_that_differ_from_rank_to_rank(f: Callable[..., Tensor]) -> None:
    """With respect to an invariant value: the sum over ranks."""
    out = run(fspmd.grad(lambda t: f(axis_index("x"), t.sin()).square().sum()), TABLE, specs=P())
    expected = torch.zeros_like(TABLE)
    for rank in range(4):
        t = TABLE.clone().requires_grad_()
        expected += torch.autograd.grad(f(torch.tensor(rank), t.sin()).square().sum(), t)[0]
    assert type(out) is Tensor
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_an_axis_index_of_two_axes_counts_major_first() -> None:
    held = frame_over(GRID, ("x", "y"))
    out = run(lambda: axis_index(("y", "x")), mesh=GRID, specs=())
    assert [int(s) for s in shards(out, held)] == [y * 2 + x for x, y in held.coordinates()]


# --- control flow ---------------------------------------------------------------------------------------------------


def test_python_branches_on_invariant_values() -> None:
    def halve(x: Tensor) -> Tensor:
        steps = 0
        while psum(x.abs().sum(), "x") > 1e-3:
            x = x / 2
            steps += 1
        assert range(psum(torch.tensor(1), "x")) == range(4)
        return torch.tensor(steps)

    assert device_get(shard_map(halve, mesh=MESH, in_specs=P("x"), out_specs=P())(torch.ones(8))) == 13


BRANCHES: dict[str, Callable[[Tensor], Any]] = {
    "if": lambda x: 1 if x.sum() > 6 else 2,
    "while": lambda x: next(iter([])) if not (x.sum() > 6) else 0,
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "range": lambda x: range(x.sum().long()),
    "index": lambda x: [1, 2, 3][x.sum().long()],
    "format": lambda x: f"{x.sum():.2f}",
    "in": lambda x: 3.0 in x,
    "equal": lambda x: torch.equal(x, x + axis_index("x")),
    "allclose": lambda x: torch.allclose(x, x + axis_index("x")),
    "and": lambda x: x.sum() > 6 and x.sum() < 10,
    "tensor of numbers": lambda x: torch.tensor([x[0], x[1]]),
}


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("check_vma", [True, False])
def test_one_python_value_of_a_varying_tensor_is_refused(name: str, check_vma: bool) -> None:
    with pytest.raises(VarianceError, match=r"rank_map|torch\.stack"):
        run(BRANCHES[name], torch.arange(8.0), check_vma=check_vma)


def test_a_size_that_differs_from_rank_to_rank_is_no_python_number() -> None:
    for ask in (range, float, bool, lambda n: n > 1 and 2, lambda n: n == 2 or 3):
        with pytest.raises(VarianceError, match=r"a size that differs from rank to rank, \{.*\} over 'x', was"):
            run(lambda x, ask=ask: ask(x.shape[0]), torch.arange(5.0))


def test_sizes_equal_on_all_ranks_are_python_numbers() -> None:
    def f(x: Tensor) -> Any:
        n, same = x.shape[0], x.shape[0]
        return n - same, n == same, n != same, max(n * 0, 3), bool(n * 0 + 1), [0] * (n // 3)

    assert run(f, torch.arange(5.0)) == (0, True, False, 3, True, [])


def test_uneven_blocks_that_have_no_common_form_are_refused() -> None:
    x = torch.arange(10.0).view(5, 2)
    for f, text in (
        (lambda x: x.squeeze(0), "different numbers of dims"),
        (lambda x: x.split(1), "a different number of tensors on different ranks"),
        (list, "a different number of tensors on different ranks"),
    ):
        with pytest.raises(FspmdError, match=text):
            run(f, x)


def test_a_differentiated_invariant_value_beside_a_size_must_be_cast() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return (w * x.shape[0]).sum()

    x, w = torch.arange(5.0), torch.ones(3).requires_grad_()
    with pytest.raises(VarianceError, match=r"cast the value first: pcast\(x, 'x', to='varying'\)"):
        run(f, x, w, specs=(P("x"), P()))
    grad = run(lambda x, w: fspmd.grad(lambda w: f(x, pcast(w, "x", to="varying")))(w), x, w, specs=(P("x"), P()))
    torch.testing.assert_close(grad, torch.full((3,), 5.0))


def test_without_types_python_may_ask_for_what_all_ranks_agree_on() -> None:
    def body(x: Tensor) -> Tensor:
        steps = 0
        while fspmd.psum(x.sum(), "x") > 1:
            x, steps = x / 2, steps + 1
        assert (steps, float(fspmd.pmax(x.max(), "x"))) == (3, 0.375)
        return x

    run(body, torch.arange(4.0), specs=(P("x"),), mesh=fspmd.make_mesh((4,), ("x",)), check_vma=False)
