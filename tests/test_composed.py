"""Functions made of others, of fewer rows than ranks: exact, and they move no more than gathers of their operands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dispatch_cases import Case, check_case, placements, priced_by_bytes, values
from torch.nn import functional as F

import fspmd
from fspmd import Mesh, P, communication_log, device_get, device_put, make_mesh, propagation_cache_clear
from fspmd.errors import CommunicationError, VarianceError
from fspmd.global_view import composed

LINE = make_mesh((4,), ("x",), transport="simulation")
SIX = make_mesh((6,), ("x",), transport="simulation")
GRID = make_mesh((2, 3), ("x", "y"), transport="simulation")
LABELS = torch.tensor([1, 0, 2])


def _normed(x: Any, weight: Any, bias: Any) -> Any:
    return torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)


CASES: dict[str, Case] = {
    "cumulative_trapezoid": (torch.cumulative_trapezoid, ((6,), (6,))),
    "cumulative_trapezoid of rows": (lambda y, x: torch.cumulative_trapezoid(y, x, dim=0), ((3, 3), (3, 3))),
    "gradient": (lambda x, at: torch.gradient(x, spacing=[at], dim=0), ((3, 2), (3,))),
    "native_batch_norm": (_normed, ((3, 1), (1,), (1,))),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), ((3, 2), (2,), (2,))),
    "group_norm": (lambda x, w: F.group_norm(x, 1, w), ((3, 2, 2), (2,))),
    "cross_entropy": (lambda x: F.cross_entropy(x, LABELS), ((3, 3),)),
    "a smoothed loss": (lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1, reduction="sum"), ((3, 3),)),
    "cov": (torch.cov, ((2, 3),)),
    "corrcoef": (torch.corrcoef, ((2, 5),)),
    "take": (lambda x: torch.take(x, torch.tensor([0, -1, 3])), ((2, 3),)),
    "normalize": (lambda x: F.normalize(x, dim=0), ((3, 2),)),
    "trapezoid": (lambda x, y: torch.trapezoid(x, y, dim=0), ((3, 2), (3, 2))),
    "cosine_similarity": (lambda x, y: F.cosine_similarity(x, y, dim=0), ((3, 2), (3, 2))),
    "dist": (torch.dist, ((3, 2), (3, 2))),
    "kron": (torch.kron, ((2, 3), (3, 2))),
}


@pytest.fixture
def by_bytes() -> Iterator[None]:
    with priced_by_bytes():
        yield


@pytest.mark.one_of(6)
@pytest.mark.parametrize("mesh", [LINE, SIX, GRID])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, mesh: Mesh) -> None:
    check_case(name, CASES[name], mesh, 6)


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_by_bytes(name: str, by_bytes: None) -> None:
    check_case(name, CASES[name], LINE, 12)


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", CASES)
def test_moves_no_more_than_gathers(name: str, by_bytes: None) -> None:
    function, shapes = CASES[name]
    for specs in placements(LINE, shapes, 12):
        given = [device_put(x, spec, mesh=LINE).requires_grad_() for x, spec in zip(values(shapes), specs, strict=True)]
        with communication_log() as gathered:
            for x in given:
                device_get(x.detach())
        with communication_log() as log:
            out = function(*given)
            found = [one for one in (out if isinstance(out, (tuple, list)) else (out,)) if one.requires_grad]
            locals_ = [one.local for one in found]
            torch.autograd.grad(
                locals_, [x.local for x in given], list(map(torch.ones_like, locals_)), allow_unused=True
            )
        thin = any(0 in x.spec.local_shape((3,)) for x in given)
        assert not thin or log.moved <= gathered.moved, f"{specs}\n{log}\n{gathered}"


@pytest.fixture
def gathering() -> Iterator[None]:
    """Whole operands are always the cheaper way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composed, "_ROUNDING", -float("inf"))
        propagation_cache_clear()
        yield
    propagation_cache_clear()


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", CASES)
def test_whole_operands_give_the_same(name: str, gathering: None) -> None:
    check_case(name, CASES[name], GRID, 6)


@pytest.mark.parametrize("mesh", [LINE, GRID])
def test_trying_a_function_draws_nothing(mesh: Mesh) -> None:
    """The numbers are those of the plain call, though it is tried on values without data first."""

    def pooled(x: Any) -> Any:
        torch.manual_seed(5)
        return F.fractional_max_pool2d(x, 2, output_ratio=(0.5, 0.5), return_indices=True)[0]

    (x,) = values(((1, 3, 9, 9),))
    for (spec,) in placements(mesh, (x.shape,), 12):
        torch.testing.assert_close(device_get(pooled(device_put(x, spec, mesh=mesh))), pooled(x))


def _running(x: Any, mean: Any, var: Any) -> Any:
    return F.batch_norm(x, mean, var, None, None, True, 0.3)


def _check_writes(mesh: Mesh, most: int) -> None:
    shapes = ((5, 3), (3,), (3,))
    plain = values(shapes)
    expected = _running(*plain)  # which writes into the others
    for specs in placements(mesh, shapes, most):
        if any(spec.unreduced or spec.reduced for spec in specs[1:]):
            continue
        given = [device_put(x, spec, mesh=mesh) for x, spec in zip(values(shapes), specs, strict=True)]
        with torch.inference_mode(most % 2 == 0):
            torch.testing.assert_close(device_get(_running(*given)), expected)
        for x, want, spec in zip(given, plain, specs, strict=True):
            assert x.spec.with_partition(spec) is x.spec
            torch.testing.assert_close(device_get(x), want)


@pytest.mark.parametrize("most", [39, 40])
def test_running_moments_are_written_where_they_lie(most: int, gathering: None) -> None:
    _check_writes(LINE, most)
    _check_writes(GRID, most)


def test_plain_moments_are_written_once() -> None:
    plain = values(((3, 2), (2,), (2,)))
    x, *moments = values(((3, 2), (2,), (2,)))
    expected = _running(*plain)
    torch.testing.assert_close(device_get(_running(device_put(x, P("x"), mesh=LINE), *moments)), expected)
    torch.testing.assert_close(moments, plain[1:])


def test_what_should_be_a_view_is_not_written_into(gathering: None) -> None:
    x = device_put(torch.zeros(3, 4), P("x"), mesh=LINE)
    pieces = torch.hsplit(x, 2)
    with pytest.raises(VarianceError, match="hsplit"):
        pieces[0].add_(1)
    with pytest.raises(VarianceError, match="hsplit"):
        x.add_(1)


def test_what_has_a_copy_is_not_written_into(gathering: None) -> None:
    x, mean, var = (device_put(one, P("x"), mesh=LINE) for one in values(((5, 3), (3,), (3,))))
    taken = mean[1:3]
    with pytest.raises(VarianceError, match="batch_norm"):
        _running(x, mean, var)
    torch.testing.assert_close(device_get(taken), device_get(mean)[1:3])


TRACED: dict[str, Any] = {
    "nll_loss": lambda x: F.nll_loss(x, LABELS),
    "a smoothed loss": lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1),
    "gradient": lambda x: torch.gradient(x, spacing=0.5, dim=0)[0],
    "local_response_norm": lambda x: F.local_response_norm(x[:, :, None], 3, alpha=0.1),
}


@pytest.mark.parametrize("name", TRACED)
def test_what_a_transform_traces_first_is_the_graph_of_all_calls(name: str) -> None:
    f, (plain,) = TRACED[name], values(((3, 3),))
    expected = torch.func.jvp(f, (plain,), (plain.cos(),))
    for specs in (P(), P("x")):
        propagation_cache_clear()
        x = device_put(plain, specs, mesh=LINE)
        found = fspmd.jvp(f, (x,), (x.cos(),))
        for got, want in zip((*found, f(x)), (*expected, expected[0]), strict=True):
            torch.testing.assert_close(device_get(got), want)


def test_gathers_are_refused_where_they_are_not_written(gathering: None) -> None:
    x = device_put(torch.ones(3, 2), P(("x", "y")), mesh=GRID)
    with fspmd.explicit(), pytest.raises(CommunicationError, match="normalize"):
        F.normalize(x, dim=0)


@pytest.mark.parametrize("f", [torch.cov, torch.corrcoef])
def test_of_cut_observations_sums_move_alone(f: Any) -> None:
    """However cheap a gather of them looks beside the time of a message."""
    x = torch.randn(5, 40_000, dtype=torch.float64)
    with communication_log() as log:
        out = f(device_put(x, P(None, "x"), mesh=LINE))
    assert log
    assert all(one.shape in {(5, 1), (5, 5)} for one in log)
    torch.testing.assert_close(device_get(out), f(x))


def test_a_margin_loss_of_classes_cut_twice_sums_no_gradient() -> None:
    x, labels = torch.randn(8, 9, dtype=torch.float64), torch.tensor([[3, 0, -1, *[1] * 6]] * 8)
    laid = device_put(x, P(None, ("x", "y")), mesh=GRID).requires_grad_()
    with communication_log() as log:
        F.multilabel_margin_loss(laid, labels).backward()
    assert [one.kind for one in log] == ["all_gather_invariant"]
    expected = x.requires_grad_()
    F.multilabel_margin_loss(expected, labels).backward()
    torch.testing.assert_close(device_get(laid.grad), expected.grad)


def test_a_cosine_similarity_settles_each_operand_once() -> None:
    x, y = torch.randn(2, 6, 8, dtype=torch.float64)
    pending = [fspmd.reshard(device_put(each, P(), mesh=LINE), P(unreduced={"x"})) for each in (x, y)]
    with communication_log() as log:
        out = F.cosine_similarity(*pending)
    assert len(log) == 2
    torch.testing.assert_close(device_get(out), F.cosine_similarity(x, y))
