"""Calls whose results others get wrong on sharded values, values and gradients beside unsharded torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dispatch_cases import check_case, values
from torch import Tensor
from torch.nn import functional as F

import fspmd
from fspmd import P, communication_log, device_get, device_put, jit, make_mesh, psum, shard_map
from fspmd.redistribution.cost import Link, Topology, set_topology, topology

LINE = make_mesh((4,), ("x",), transport="simulation")
GRID = make_mesh((2, 3), ("x", "y"), transport="simulation")
EVEN, UNEVEN = (8, 12), (5, 7)


def _bce(x: Any, y: Any) -> Any:
    return F.binary_cross_entropy(x.sigmoid(), y.detach().sigmoid())


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "huber": F.huber_loss,
    "smooth_l1": F.smooth_l1_loss,
    "bce": _bce,
    "bce with logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.detach().sigmoid()),
    "cross entropy of probabilities": lambda x, y: F.cross_entropy(x, y.softmax(1), label_smoothing=0.1),
}


@pytest.mark.one_of(6)
@pytest.mark.parametrize("shape", [EVEN, UNEVEN])
@pytest.mark.parametrize("mesh", [LINE, GRID])
@pytest.mark.parametrize("name", LOSSES)
def test_mean_losses(name: str, mesh: fspmd.Mesh, shape: tuple[int, int]) -> None:
    loss = LOSSES[name]
    check_case(name, (lambda x, y: loss(x, y) + 0 * y.sum(), (shape, shape)), mesh, 12)


@pytest.mark.one_of(6)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", [F.l1_loss, F.mse_loss, F.huber_loss], ids=lambda f: f.__name__)
def test_weighted_losses(loss: Callable[..., Any], reduction: str) -> None:
    def weighted(x: Any, y: Any, w: Any) -> Any:
        return loss(x, y, reduction=reduction, weight=w.exp())

    for mesh, shape in ((LINE, UNEVEN), (GRID, EVEN)):
        check_case(loss.__name__, (weighted, (shape,) * 3), mesh, 4)


@pytest.mark.parametrize("loss", [F.l1_loss, F.mse_loss, F.huber_loss], ids=lambda f: f.__name__)
def test_weights_of_losses_reach_bodies_records_and_modes(loss: Callable[..., Any]) -> None:
    x, y, w = values((EVEN,) * 3)

    def weighted(x: Any, y: Any, w: Any) -> Any:
        return loss(x, y, reduction="sum", weight=w)

    body = shard_map(lambda *xs: psum(weighted(*xs), "x"), mesh=LINE, in_specs=(P("x"), P("x"), P("x")), out_specs=P())
    given = [device_put(one, P("x"), mesh=LINE) for one in (x, y, w)]
    expected = ((x - y).abs() if loss is F.l1_loss else loss(x, y, reduction="none")).mul(w).sum()
    with torch.device("cpu"):
        found = [weighted(x, y, w), body(x, y, w), jit(weighted)(*given), weighted(x, y, given[2]), weighted(*given)]
    for one in found:
        torch.testing.assert_close(device_get(one), expected)


def _classes(rows: int, classes: int) -> Tensor:
    found = torch.arange(rows) * 3 % classes
    found[1] = -100  # ignored
    return found


@pytest.mark.one_of(6)
@pytest.mark.parametrize("shape", [EVEN, UNEVEN])
@pytest.mark.parametrize("mesh", [LINE, GRID])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy(mesh: fspmd.Mesh, shape: tuple[int, int], reduction: str, smoothing: float) -> None:
    target = _classes(*shape)
    weight = torch.linspace(0.5, 1.5, shape[1], dtype=torch.float64)

    def loss(x: Any) -> Any:
        return F.cross_entropy(x, target, weight, reduction=reduction, label_smoothing=smoothing)

    check_case("cross_entropy", (loss, (shape,)), mesh, 12)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_under_autocast(smoothing: float) -> None:
    """The logits of a product have few digits there, and their loss is a float32."""
    x, labels = torch.randn(*EVEN), _classes(*EVEN)

    def loss(x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(x @ torch.eye(EVEN[1]), labels, label_smoothing=smoothing)

    for f in (loss, jit(loss)):
        torch.testing.assert_close(device_get(f(device_put(x, P("x", "y"), mesh=GRID))), loss(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(1,), (5,), (1, 7), (7, 1)])
def test_cross_entropy_needs_a_weight_for_each_class(shape: tuple[int, ...], smoothing: float) -> None:
    """Weights of these shapes have one for every label, and would broadcast."""
    x, weight = torch.ones(7, 7), torch.ones(shape)
    logits: Any = device_put(x, P("x"), mesh=LINE)
    with pytest.raises(fspmd.ArgumentError, match="for all 7 classes"):
        F.cross_entropy(logits, torch.zeros(7, dtype=torch.int64), weight, label_smoothing=smoothing)


LABELS = torch.tensor([[0, 2, -1], [1, -1, 0], [-1, 0, 0], [2, 1, 0], [0, -1, 1]])


@pytest.mark.one_of(6)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [5, 1, None])
def test_multilabel_margin_loss(reduction: str, rows: int | None) -> None:
    """Torch's graph of it, which others decompose, counts labels after the end."""
    target = LABELS[0] if rows is None else LABELS[:rows]

    def loss(x: Any) -> Any:
        return F.multilabel_margin_loss(x, target, reduction=reduction)

    check_case("multilabel", (loss, (tuple(target.shape),)), GRID, 12)


@pytest.mark.one_of(6)
@pytest.mark.parametrize("shape", [EVEN, UNEVEN])
@pytest.mark.parametrize("mesh", [LINE, GRID])
@pytest.mark.parametrize("order", [0.5, 1, 2, 3, math.inf])
def test_norms(mesh: fspmd.Mesh, shape: tuple[int, int], order: float) -> None:
    def norms(x: Any) -> Any:
        return torch.linalg.vector_norm(x, order), torch.linalg.vector_norm(x, order, 0), x.norm(order, 1)

    check_case("norm", (norms, (shape,)), mesh, 12)


@pytest.fixture
def _bytes() -> Iterator[None]:
    """Messages are free and bytes are dear, as between blocks of real size."""
    before = topology()
    set_topology(Topology(Link(0.0, 1e3), Link(0.0, 1e3), launch=0.0))
    fspmd.propagation_cache_clear()
    yield
    set_topology(before)
    fspmd.propagation_cache_clear()


@pytest.mark.usefixtures("_bytes")
def test_cross_entropy_gathers_no_classes() -> None:
    x = device_put(torch.randn(5, 300), P(None, "x"), mesh=LINE).requires_grad_()
    with communication_log() as log:
        F.cross_entropy(x, torch.tensor([3, 299, -100, 0, 77])).backward()
    assert 0 < log.moved <= 5 * 8 * 5
    assert [(one.shape, one.backward) for one in log] == [((5, 1), False), ((5, 2), False)]


@pytest.mark.usefixtures("_bytes")
def test_cross_entropy_of_a_batch_is_one_sum() -> None:
    x = device_put(torch.randn(30, 3), P("x"), mesh=LINE).requires_grad_()
    with communication_log() as log:
        F.cross_entropy(x, device_put(torch.arange(30) % 3, P("x"), mesh=LINE)).backward()
    assert [one.shape for one in log] == [(2,)]


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_clip_by_global_norm_over_mixed_meshes(order: float) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 3), (7,), (3, 5), (4, 4), (2, 0), (6,))
    plain = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    square = make_mesh((2, 2), ("x", "y"), transport="simulation")
    specs = (P("x"), P(("y", "x")), P(None, "x"), P("x", "y"), P(), P(unreduced={"x"}))
    meshes = (square, square, LINE, square, LINE, LINE)
    given = [device_put(x, spec, mesh=mesh) for x, spec, mesh in zip(plain, specs, meshes, strict=True)]
    want = torch.linalg.vector_norm(torch.cat([x.flatten() for x in plain]), order)
    for limit in (1.0, 1e3):
        clipped, norm = fspmd.clip_by_global_norm(given, limit, order)
        torch.testing.assert_close(norm, want, rtol=1e-12, atol=0.0)
        for x, before, y in zip(clipped, given, plain, strict=True):
            assert x.spec == before.spec
            scale = min(1.0, limit / (float(want) + 1e-6))
            torch.testing.assert_close(fspmd.device_get(x), y * scale, rtol=1e-12, atol=1e-15)


def test_global_norm_sums_alike_layouts_at_once() -> None:
    leaves = [device_put(torch.randn(5, 3), P("x"), mesh=LINE) for _ in range(6)]
    with communication_log() as log:
        fspmd.global_norm(leaves)
    assert len(log) == 1


@pytest.mark.parametrize(("tree", "order"), [(["a"], 2.0), ([torch.ones(3)], 0.0), ([torch.ones(3)], None)])
def test_global_norm_refuses(tree: Any, order: float) -> None:
    with pytest.raises(fspmd.ArgumentError, match="global_norm got"):
        fspmd.global_norm(tree, order)
    with pytest.raises(fspmd.ArgumentError, match="clip_by_global_norm got None for max_norm; expected a number"):
        fspmd.clip_by_global_norm([torch.ones(3)], None)  # type: ignore[arg-type]


#: where a call lies such that others compute another number, or refuse
SPACES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "conv of sharded channels and space": (
        lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1),
        ((2, 4, 7, 6), (4, 4, 3, 3), (4,)),
    ),
    "conv of groups": (lambda x, w, b: F.conv1d(x, w, b, groups=2, padding=1), ((2, 4, 8), (4, 2, 3), (4,))),
    "dims merged over boundaries": (lambda x: x.reshape(10, 3), ((2, 5, 3),)),
    "a dim split over boundaries": (lambda x: x.view(2, 3, 5), ((6, 5),)),
    "dims regrouped": (lambda x: x.reshape(4, 9), ((6, 6),)),
}


@pytest.mark.one_of(6)
@pytest.mark.parametrize("mesh", [LINE, GRID])
@pytest.mark.parametrize("name", SPACES)
def test_spaces(name: str, mesh: fspmd.Mesh) -> None:
    check_case(name, SPACES[name], mesh, 40)
