"""A collective on an operand whose kind the body has seen: the step is found, and does what a new one does.

The judge is the same program in bodies that keep no steps: their gradients and types are compared to the bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from processes import Processes
from simulated import MESH
from torch import Tensor

import fspmd
from fspmd import (
    ArgumentError,
    AxisError,
    Mesh,
    P,
    ShapeError,
    VarianceError,
    all_gather,
    all_to_all,
    make_mesh,
    pbroadcast,
    pcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    pshuffle,
    psum,
    psum_scatter,
    pswapaxes,
    shard_map,
    typeof,
)
from fspmd.cache import Cache
from fspmd.collectives import collective as runner

Run = Callable[[Tensor], Tensor]
#: collectives on [4, 8] of 4 ranks; each has a result that varies, or is equal on all ranks
CALLS: dict[str, Run] = {
    "psum": lambda x: psum(x, "x"),
    "psum of groups": lambda x: psum(x, "x", axis_index_groups=((0, 2), (1, 3))),
    "psum over a tuple": lambda x: psum(x, ("x",)),
    "pmean": lambda x: pmean(x, "x"),
    "pmean of uneven groups": lambda x: pmean(x, "x", axis_index_groups=((0,), (1, 2, 3))),
    "pmax": lambda x: pmax(x, "x"),
    "pmax of what has no gradient": lambda x: pmax(x.detach(), "x") + pmax(x, "x") + pmin([x, 2 * x.detach()], "x")[0],
    "all_gather": lambda x: all_gather(x, "x"),
    "all_gather, tiled": lambda x: all_gather(x, "x", axis=1, tiled=True),
    "all_gather, equal": lambda x: all_gather(x, "x", tiled=True, to="invarying"),
    "all_gather, reduced": lambda x: all_gather(x, "x", tiled=True, to="reduced"),
    "all_gather of a size": lambda x: all_gather(x, "x", tiled=True, size=16),
    "psum_scatter": lambda x: psum_scatter(x, "x"),
    "psum_scatter, tiled": lambda x: psum_scatter(x, "x", scatter_dimension=1, tiled=True),
    "psum_scatter of a pending sum": lambda x: psum_scatter(pcast(x, "x", to="unreduced"), "x", tiled=True),
    "psum of a pending sum": lambda x: psum(pcast(x, "x", to="unreduced"), "x"),
    "all_to_all": lambda x: all_to_all(x, "x", 0, 1),
    "all_to_all, tiled": lambda x: all_to_all(x, "x", 1, 0, tiled=True),
    "pswapaxes": lambda x: pswapaxes(x, "x", 0),
    "ppermute": lambda x: ppermute(x, "x", [(0, 1), (1, 3)]),
    "pshuffle": lambda x: pshuffle(x, "x", [3, 0, 1, 2]),
    "pbroadcast": lambda x: pbroadcast(x, "x", 2),
    "an equal operand": lambda x: all_gather(psum(x, "x"), "x", tiled=True),
    "a view": lambda x: psum(x.mT, "x"),
    "a bool": lambda x: psum(x > 0, "x") * x,
    "a number": lambda x: psum(2.0, "x") * x,
    "a tree": lambda x: sum(psum([x, x * 2], "x")),
    "a tree of shapes": lambda x: torch.cat([*psum_scatter({"a": x, "b": x.repeat(1, 2)}, "x").values()]),
    "a tree with a number": lambda x: sum(psum((x, 2), "x")),
    "a tree of types": lambda x: sum(all_gather([x, psum(x, "x")], "x", tiled=True)),
    "a tree of dtypes": lambda x: sum(pmean([x, x.float()], "x")),
    "a handle": lambda x: psum(x, "x", wait=False).wait(),
    "a handle of a tree": lambda x: sum(ppermute([x, 2 * x], "x", [(0, 3)], wait=False).wait()),
    "twice": lambda x: psum(ppermute(psum(x, "x") * x, "x", ((0, 1), (1, 0))), "x"),
}


class _Nothing(Cache[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def _body(call: Run, types: list[Any], keeps: bool) -> Run:
    def run(x: Tensor) -> Tensor:
        body = fspmd.body.state.body
        assert body is not None
        if not keeps:
            body.calls = _Nothing()
        y = call(x)
        types.append(str(typeof(y)))
        z = y.double() * torch.arange(y.numel()).view(y.shape)
        return ((z * z).sum() + 0 * x.double().sum())[None]

    return run


def _found(call: Run, mesh: Mesh, checked: bool, keeps: bool, dtypes: list[torch.dtype]) -> list[Any]:
    """Results, gradients and types of calls, each of its own numbers; every second has no gradient."""
    types: list[Any] = []
    f = shard_map(_body(call, types, keeps), mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=checked)
    found: list[Any] = [types]
    for i, dtype in enumerate([dtype for dtype in dtypes for _ in range(4)]):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(i), dtype=torch.float64).to(dtype)
        x.requires_grad_(i % 2 == 0)
        out = fspmd.device_get(f(x))
        found.append(out.detach())
        if x.requires_grad:
            found.append(torch.autograd.grad(out.sum(), x)[0])
    return found


def check(name: str, checked: bool, mesh: Mesh | None = None) -> None:
    mesh = mesh or MESH
    dtypes = [torch.float64, torch.bfloat16, torch.float64]
    kept, made = (_found(CALLS[name], mesh, checked, keeps, dtypes) for keeps in (True, False))
    assert kept[0] == made[0]
    for mine, theirs in zip(kept[1:], made[1:], strict=True):
        assert torch.equal(mine, theirs), name


def check_all() -> None:
    mesh = make_mesh((4,), ("x",))
    for name in CALLS:
        for checked in (True, False):
            check(name, checked, mesh)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_a_known_step_does_what_a_new_one_does(name: str, checked: bool) -> None:
    check(name, checked)


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    with Processes(4) as pool:
        yield pool


def test_on_processes(four: Processes) -> None:
    four.run(check_all)


def test_a_known_step_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(runner, "operand_of", lambda *args, **kwargs: made.append(args[2]) or _operand(*args, **kwargs))

    def body(x: Tensor) -> Tensor:
        for _ in range(3):
            for call in calls:
                CALLS[call](x)
        return x

    of_trees = ["a tree", "a tree of dtypes", "a handle"]
    calls = [
        *of_trees,
        "pmax",
        "pmean",
        "all_gather, tiled",
        "psum_scatter",
        "all_to_all",
        "pswapaxes",
        "ppermute",
        "pshuffle",
    ]
    shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"))(torch.ones(16, 8))
    assert len(made) == len(calls)


_operand = runner.operand_of


def test_errors_come_after_known_steps_too() -> None:
    def body(x: Tensor) -> Tensor:
        for right, wrong, error in [
            (lambda x: all_gather(x, "x", axis=1), lambda x: all_gather(x, "x", axis=3), ShapeError),
            (lambda x: all_gather(x, "x", axis=2), lambda x: all_gather(x[0], "x", axis=2), ShapeError),
            (lambda x: all_gather(x, "x", axis=1), lambda x: all_gather(x, "x", axis=1.0), ArgumentError),
            (lambda x: all_to_all(x, "x", 0, 1), lambda x: all_to_all(x, "x", False, 1), ArgumentError),
            (lambda x: pbroadcast(x, "x", 1), lambda x: pbroadcast(x, "x", True), ArgumentError),
            (lambda x: psum(x, "x"), lambda x: psum(x, "z"), AxisError),
            (lambda x: psum(x, "x"), lambda x: psum(pcast(psum(x, "x"), "x", to="reduced"), "x"), VarianceError),
            (lambda x: psum_scatter(x, "x", tiled=True), lambda x: psum_scatter(x[1:], "x", tiled=True), ShapeError),
            (lambda x: ppermute(x, "x", [(0, 1)]), lambda x: ppermute(x, "x", [(0, 1), (1, 1)]), ShapeError),
            (lambda x: ppermute(x, "x", [(0, 1)]), lambda x: ppermute(x.to_sparse(), "x", [(0, 1)]), fspmd.FspmdError),
        ]:
            for _ in range(2):
                right(x)
                with pytest.raises(error):
                    wrong(x)
        return x

    shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"))(torch.ones(16, 8))


def test_a_kept_step_holds_no_operand() -> None:
    alive: list[Any] = []

    def body(x: Tensor) -> Tensor:
        for call in CALLS.values():
            y = x * 2
            alive.append(weakref.ref(y))
            call(y)
        return x

    f = shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    f(torch.ones(16, 8))
    assert not any(ref() is not None for ref in alive)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_a_kept_step_holds_no_tensor(name: str, checked: bool) -> None:
    types: list[Any] = []
    run = _body(CALLS[name], types, True)
    f = shard_map(run, mesh=MESH, in_specs=P("x"), out_specs=P("x"), check_vma=checked)
    x = torch.linspace(-1, 1, 128, dtype=torch.float64).view(16, 8)
    want = fspmd.device_get(shard_map(run, mesh=MESH, in_specs=P("x"), out_specs=P("x"), check_vma=checked)(x))
    with torch.inference_mode():
        f(x)
    fspmd.jit(f).lower(x)
    x.requires_grad_()
    for run in (f, fspmd.jit(f), fspmd.jit(f)):
        out = fspmd.device_get(run(x))
        torch.testing.assert_close(out, want)
        torch.autograd.grad(out.sum(), x)


class _Ring:
    """A permutation of 4 positions, or their groups, which may change."""

    def __init__(self, *elements: Any) -> None:
        self.elements = elements

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)


def test_options_that_change() -> None:
    ring, groups = _Ring(3, 0, 1, 2), _Ring((0, 1), (2, 3))
    run: Any = lambda x: (pshuffle(x, "x", ring), psum(x, "x", axis_index_groups=groups))  # noqa: E731
    f = shard_map(run, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    x = torch.arange(4.0)
    for _ in range(2):
        assert [fspmd.device_get(y).tolist() for y in f(x)] == [[3, 0, 1, 2], [1, 1, 5, 5]]
    ring.elements, groups.elements = (1, 2, 3, 0), ((0, 2), (1, 3))
    assert [fspmd.device_get(y).tolist() for y in f(x)] == [[1, 2, 3, 0], [2, 4, 2, 4]]


def test_iterators_are_not_kept() -> None:
    def body(x: Tensor) -> Tensor:
        for _ in range(3):
            x = ppermute(x, "x", zip(range(4), (1, 2, 3, 0), strict=True))
        assert not fspmd.body.state.body.calls
        return x

    out = shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"))(torch.arange(4.0))
    assert fspmd.device_get(out).tolist() == [1, 2, 3, 0]


def test_types_that_a_view_has_of_its_base() -> None:
    def outer(x: Tensor) -> Tensor:
        equal, view = torch.ones(2), torch.FloatTensor(x)  # no mode sees this view

        def inner(y: Tensor) -> Tensor:
            for _ in range(2):
                psum(equal, "y")
                assert "V:x" in str(typeof(psum(view, "y")))
            return y

        shard_map(inner, mesh=mesh, in_specs=P("y"), out_specs=P("y"), axis_names={"y"}, check_vma=False)(equal)
        return x

    mesh = make_mesh((2, 2), ("x", "y"))
    shard_map(outer, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})(torch.ones(4))


def test_transforms_after_known_steps() -> None:
    w = torch.linspace(0, 1, 32, dtype=torch.float64).view(16, 2)
    f = shard_map(
        lambda x: psum((x * ppermute(x, "x", [(i, (i + 1) % 4) for i in range(4)])).sum(), "x"),
        mesh=MESH,
        in_specs=P("x"),
        out_specs=P(),
    )
    want = (w * w.roll(4, 0)).sum()
    gradient = w.roll(4, 0) + w.roll(-4, 0)
    for _ in range(2):
        torch.testing.assert_close(fspmd.device_get(f(w)), want)
        torch.testing.assert_close(fspmd.grad(f)(w), gradient)
        _, out = fspmd.jvp(f, (w,), (w,))
        torch.testing.assert_close(fspmd.device_get(out), 2 * want)
        rows = fspmd.vmap(f)(torch.stack([w, 2 * w]))
        torch.testing.assert_close(fspmd.device_get(rows), torch.stack([want, 4 * want]))


def test_blocks_that_become_uneven_are_compared() -> None:
    def body(x: Tensor) -> Tensor:
        psum(x, "x")
        some = x[x > 2]
        with pytest.raises(ShapeError, match="all ranks must pass the same shape"):
            psum(some, "x")
        return psum(x, "x")

    out = shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P())(torch.arange(8.0))
    assert fspmd.device_get(out).tolist() == [12.0, 16.0]
