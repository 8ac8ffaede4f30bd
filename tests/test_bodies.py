"""Sharded bodies: functions along sharded dims, values and gradients beside unsharded torch, and nothing gathered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from dispatch_cases import Case, check_case, check_second_derivatives, outputs_of
from full import FULL
from processes import Processes
from torch.nn import functional as F

import fspmd
from fspmd import ArgumentError, Mesh, P, device_get, device_put, make_mesh
from fspmd.rules import Bodied, Row
from fspmd.rules.table import ROWS, row_of

LINE = make_mesh((4,), ("x",), transport="simulation")
GRID = make_mesh((2, 2), ("x", "y"), transport="simulation")
WIDE = make_mesh((2, 3), ("x", "y"), transport="simulation")


def _tied(x: Any) -> Any:
    """Equal elements, zeros among them, that have gradients."""
    return (x + 3) / (x.detach() + 3) * (x.detach() * 2).round()


CASES: dict[str, Case] = {
    "softmax": (lambda x: F.softmax(x, -1), ((5, 6),)),
    "scatter at one place": (lambda x, s: x.scatter(0, torch.tensor(3), s.sum()), ((5,), (2,))),
    "scatter_add at one place": (lambda x, s: x.scatter_add(0, torch.tensor(3), s.sum()), ((6,), (2,))),
    "softmax of rows": (lambda x: F.softmax(x, 0), ((4, 6),)),
    "log_softmax": (lambda x: F.log_softmax(x, 0), ((5, 6),)),
    "softmin": (lambda x: F.softmin(x, -1), ((4, 5),)),
    "var": (lambda x: torch.var(x, 0), ((6, 5),)),
    "var of all": (lambda x: torch.var(x, correction=0), ((6, 5),)),
    "std": (lambda x: torch.std(x, -1, keepdim=True), ((4, 6),)),
    "std_mean": (lambda x: torch.std_mean(x, (0, 1), correction=0.5), ((5, 6),)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), ((3, 6), (6,), (6,))),
    "layer_norm of two dims": (lambda x: F.layer_norm(x, (5, 6)), ((3, 5, 6),)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (5,), w), ((3, 5), (5,))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), ((2, 4, 5), (4,), (4,))),
    "instance_norm": (F.instance_norm, ((3, 2, 6),)),
    "batch_norm": (lambda x, w: F.batch_norm(x, None, None, w, training=True), ((5, 3, 2), (3,))),
    "batch_norm of few rows": (lambda x, w: F.batch_norm(x, None, None, w, None, True), ((3, 2), (2,))),
    "cumulative_trapezoid": (torch.cumulative_trapezoid, ((6,), (6,))),
    "gradient": (lambda x, at: torch.gradient(x, spacing=[at], dim=0), ((3, 2), (3,))),
    "amax": (lambda x: torch.amax(x, 0), ((6, 5),)),
    "amin of all": (lambda x: x.amin(), ((5, 6),)),
    "amax of ties": (lambda x: torch.amax(_tied(x), (0, 1), keepdim=True), ((5, 6),)),
    "max": (lambda x: _tied(x).max(), ((6, 5),)),
    "max of a dim": (lambda x: _tied(x).max(-1), ((4, 6),)),
    "min of a dim": (lambda x: _tied(x).min(0, keepdim=True), ((6, 3),)),
    "argmax": (lambda x: (x * 1, _tied(x).argmax()), ((5, 6),)),
    "argmin of a dim": (lambda x: (x * 1, _tied(x).argmin(0, keepdim=True)), ((5, 6),)),
    "aminmax": (lambda x: _tied(x).aminmax(dim=1), ((3, 6),)),
    "topk": (lambda x: x.topk(3, -1), ((3, 6),)),
    "topk of the least": (lambda x: x.topk(2, 0, largest=False), ((5, 3),)),
    "norm of order 0": (lambda x: (x * 1, torch.linalg.vector_norm(_tied(x), 0, 0)), ((5, 4),)),
    "norm of order 1": (lambda x: torch.linalg.vector_norm(_tied(x), 1, -1), ((5, 4),)),
    "norm of order 2": (lambda x: torch.linalg.vector_norm(_tied(x), 2, (0, 1)), ((5, 4),)),
    "norm of order 3": (lambda x: torch.linalg.vector_norm(_tied(x), 3, 0), ((5, 4),)),
    "norm of order 0.5": (lambda x: torch.linalg.vector_norm(_tied(x), 0.5, -1), ((5, 4),)),
    "norm of order -2": (lambda x: torch.linalg.vector_norm(_tied(x), -2, 1), ((5, 4),)),
    "norm of order math.inf": (lambda x: torch.linalg.vector_norm(_tied(x), math.inf, None), ((5, 4),)),
    "norm of order -math.inf": (lambda x: torch.linalg.vector_norm(_tied(x), -math.inf, 0), ((5, 4),)),
    "norm": (lambda x: torch.norm(x, dim=1), ((4, 6),)),
    "norm of zeros": (lambda x: (x * 0).norm(), ((5, 6),)),
    "cdist": (torch.cdist, ((5, 6), (3, 6))),
    "cdist of order 1": (lambda x, y: torch.cdist(x, y, 1.0), ((2, 3, 5), (4, 5))),
    "cdist of order 3": (lambda x, y: torch.cdist(x, torch.cat([x[:1], y]), 3.0), ((5, 6), (3, 6))),
    "cdist of order 0": (lambda x, y: (torch.cdist(_tied(x), _tied(y), 0.0), x + 0, y + 0), ((5, 6), (3, 6))),
    "pdist": (lambda x: (F.pdist(x), F.pdist(x, 3.0), F.pdist(x, math.inf)), ((5, 6),)),
    "pdist of ties": (lambda x: (F.pdist(_tied(x), 0.0), F.pdist(_tied(x), 1.0)), ((5, 6),)),
    "cdist of order math.inf": (lambda x, y: torch.cdist(x, y, math.inf), ((5, 6), (3, 6))),
    "softmax, backward": (lambda g, y: torch._softmax_backward_data(g, y, 0, g.dtype), ((5, 6), (5, 6))),
    "log_softmax, backward": (
        lambda g, y: torch.ops.aten._log_softmax_backward_data(g, y, -1, g.dtype),
        ((4, 6), (4, 6)),
    ),
    "prod": (torch.prod, ((5, 6),)),
    "prod of a dim": (lambda x: _tied(x).prod(1, keepdim=True), ((4, 5),)),
    "prod of one factor": (lambda x: (x.prod(0), x[:, :1].prod(), (x - x.detach()).prod(0)), ((1, 5),)),
    "prod of one number": (lambda x: (x.prod(), x.prod(0), x.prod(-1, keepdim=True)), ((),)),
    "prod, without gradient": (
        lambda x: (x * 1, x.detach().prod(0), _tied(x).detach().prod(), (x > 0).prod(0)),
        ((4, 5),),
    ),
    "prod, its gradient": (fspmd.grad(lambda x: (_tied(x).prod(0).sin() + x.prod()).sum()), ((3, 2),)),
    "counts": (
        lambda x: (x + 0, (x > 0).any(0), (x < 0.9).all(1), (x > 0).any(), _tied(x).count_nonzero(0)),
        ((4, 5),),
    ),
    "chunk": (lambda x: x.chunk(3), ((7, 4),)),
    "split": (lambda x: x.split([2, 0, 4], -1), ((3, 6),)),
    "even pieces": (lambda x: x.chunk(2), ((24, 2),)),
    "cumsum": (lambda x: x.cumsum(0), ((5, 4),)),
    "cumprod": (lambda x: _tied(x).cumprod(1), ((4, 5),)),
    "cummax": (lambda x: _tied(x).cummax(1), ((3, 7),)),
    "cummin": (lambda x: _tied(x).cummin(0), ((5, 4),)),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), ((4, 6),)),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), ((4, 5),)),
    "logsumexp of all": (lambda x: torch.logsumexp(x, (0, 1), keepdim=True), ((6, 5),)),
}


@pytest.fixture(autouse=True)
def _bodies() -> Iterator[None]:
    """Bodies cost nothing, so that they are taken for blocks as small as these."""
    with pytest.MonkeyPatch.context() as patch:
        for name, row in _with_free_bodies().items():
            patch.setitem(ROWS, name, row)
        _plan_anew()
        yield
    _plan_anew()


def _plan_anew() -> None:
    row_of.cache_clear()
    fspmd.propagation_cache_clear()


def _with_free_bodies() -> dict[str, Row]:
    free = {name: Bodied(row.body.body, lambda *_: 0.0) for name, row in ROWS.items() if row.body is not None}
    return {name: replace(ROWS[name], body=body) for name, body in free.items()}


@pytest.mark.one_of(12)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("mesh", "most"), [(LINE, 15), (GRID, 10), (WIDE, 8)])
def test_values_and_gradients(mesh: Mesh, most: int, name: str) -> None:
    check_case(name, CASES[name], mesh, most)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", [name for name in CASES if "dist" not in name])  # torch has none of distances
def test_gradients_of_gradients(name: str) -> None:
    check_second_derivatives(name, CASES[name], LINE, 3)


@pytest.mark.parametrize("table", [P(), P("x"), P(None, "x")], ids=repr)
@pytest.mark.parametrize(("shape", "spec"), [((3,), P("x")), ((2, 3), P(None, "x")), ((7, 2), P(None, "x"))])
def test_embeddings_where_some_rank_has_no_places(shape: tuple[int, ...], spec: P, table: P) -> None:
    """torch's own have no second derivatives where there are no places."""
    generator = torch.Generator().manual_seed(len(shape))
    places = torch.randint(5, shape, generator=generator)
    rows = torch.randn(5, 4, generator=generator, dtype=torch.float64)

    def derivatives(places: Any, rows: Any) -> list[Any]:
        rows = rows.requires_grad_()
        out = F.embedding(places, rows, padding_idx=2) + torch.embedding(rows * 2, places)
        (first,) = torch.autograd.grad((out**3).sum(), rows, create_graph=True)
        return [out, first, *torch.autograd.grad((first**2).sum(), rows)]

    given = device_put(places, spec, mesh=LINE), device_put(rows, table, mesh=LINE)
    for got, expected in zip(derivatives(*given), derivatives(places, rows.clone()), strict=True):
        torch.testing.assert_close(device_get(got), expected)
    for wrong in (5, -1):
        with pytest.raises(IndexError, match="out of bounds"):
            F.embedding(device_put(torch.full(shape, wrong), spec, mesh=LINE), given[1])
    with pytest.raises(ArgumentError, match="Padding_idx must be within num_embeddings"):
        F.embedding(*given, padding_idx=5)


_WITH_OPTIONS: list[Callable[[Any, Any, str], Any]] = [
    lambda places, table, option: F.embedding(places, table, **{option: True}),
    lambda places, table, option: torch.embedding(table, places, **{option: True}),
    lambda places, table, option: F.embedding(places, table, None, None, 2.0, option != "sparse", option == "sparse"),
    lambda places, table, option: torch.embedding(table, places, -1, option != "sparse", option == "sparse"),
]


def test_embeddings_by_name_where_some_rank_has_no_rows() -> None:
    whole, places = torch.randn(3, 2), torch.tensor([0, 1, 2, 0])
    for spec in (P("x"), P(None, "x")):
        named = {"weight": device_put(whole, spec, mesh=LINE), "indices": device_put(places, P("x"), mesh=LINE)}
        assert torch.equal(device_get(torch.embedding(**named)), whole[places])
        assert torch.equal(device_get(torch.embedding(**named, scale_grad_by_freq=True)), whole[places])


@pytest.mark.parametrize("f", _WITH_OPTIONS)
def test_options_of_embeddings_are_not_lost_where_some_rank_has_no_places(f: Any) -> None:
    places, plain = torch.tensor([1, 1]), torch.ones(5, 3, dtype=torch.float64).requires_grad_()
    table = device_put(plain.detach(), P("x"), mesh=LINE).requires_grad_()
    f(places, plain, "scale_grad_by_freq").sum().backward()
    f(device_put(places, P("x"), mesh=LINE), table, "scale_grad_by_freq").sum().backward()
    torch.testing.assert_close(device_get(table.grad), plain.grad)
    with pytest.raises(ArgumentError, match="sparse=True"):
        f(device_put(places, P("x"), mesh=LINE), table, "sparse")


_DTYPES: dict[str, tuple[torch.dtype, Any]] = {
    "softmax of halves": (torch.bfloat16, lambda x: x.softmax(0)),
    "log_softmax asked for floats": (torch.float16, lambda x: F.log_softmax(x, 0, dtype=torch.float32)),
    "var of halves": (torch.float16, lambda x: x.var(0)),
    "layer_norm of halves": (torch.bfloat16, lambda x: F.layer_norm(x.mT, (x.shape[0],))),
    "norm of halves": (torch.bfloat16, lambda x: torch.linalg.vector_norm(x, 2, 0)),
    "norm in floats": (torch.float16, lambda x: torch.linalg.vector_norm(x, 3, 0, dtype=torch.float32)),
    "prod of halves": (torch.bfloat16, lambda x: (x.prod(0), x.prod())),
    "cumsum of halves": (torch.bfloat16, lambda x: x.cumsum(0)),
    "amax of halves": (torch.bfloat16, lambda x: x.amax(0)),
    "extremes of ints": (torch.int32, lambda x: (*x.aminmax(dim=0), *x.max(0), x.argmin(), x.amax(), x.topk(3, 0)[0])),
    "sums of ints": (
        torch.int32,
        lambda x: (x.cumsum(0), x.prod(0), x.cumprod(0), *x.cummax(0), x.any(0), x.logsumexp(0)),
    ),
    "bools": (torch.bool, lambda x: (x.amax(0), x.any(), x.all(0), x.count_nonzero(0), x.cumsum(0), x.prod(0))),
    "complex": (torch.complex64, lambda x: (x.var(0), x.std(), x.norm(dim=0), x.cumsum(0), x.prod(0))),
}


@pytest.mark.parametrize("name", _DTYPES)
def test_dtypes(name: str) -> None:
    """Results have torch's dtype; of halves they are as good as torch's, whose sums are floats."""
    dtype, f = _DTYPES[name]
    plain = (torch.linspace(-2.0, 2.0, 58).reshape(29, 2) * 1.7).to(dtype)
    given = fspmd.device_put(plain, fspmd.P("x"), mesh=LINE)
    for found, want in zip(outputs_of(f(given)), outputs_of(f(plain)), strict=True):
        assert (found.dtype, found.shape) == (want.dtype, tuple(want.shape))
        torch.testing.assert_close(fspmd.device_get(found), want)


def test_pieces_are_one_exchange() -> None:
    x = fspmd.device_put(torch.arange(32.0).reshape(16, 2), fspmd.P("x"), mesh=LINE)
    with fspmd.communication_log() as log:
        x.chunk(4)
    assert [one.kind for one in log] == ["ragged_all_to_all"]


def test_nan_is_the_extreme() -> None:
    plain = torch.tensor([1.0, math.nan, 3.0, 3.0, math.nan, -math.inf, 2.0])
    x = fspmd.device_put(plain, fspmd.P("x"), mesh=LINE)
    for f in (torch.amax, torch.amin, torch.argmax, torch.argmin, lambda x: x.max(0), lambda x: x.cummin(0)):
        for found, want in zip(outputs_of(f(x)), outputs_of(f(plain)), strict=True):
            torch.testing.assert_close(fspmd.device_get(found), want, equal_nan=True)


def _on_processes(sizes: tuple[int, ...]) -> None:
    ROWS.update(_with_free_bodies())
    mesh = make_mesh(sizes, ("x", "y")[: len(sizes)])
    for name, case in list(CASES.items())[:: 1 if FULL else 12]:
        check_case(name, case, mesh, 2)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_on_processes(sizes: tuple[int, ...]) -> None:
    with Processes(4) as pool:
        pool.run(_on_processes, sizes)
