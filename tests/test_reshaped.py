"""Writes that change a shape, and ``fill_diagonal_``, beside unsharded torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dispatch_cases import check_case
from torch import nn

import fspmd
from fspmd import P, communication_log, device_get, device_put, make_mesh

LINE = make_mesh((4,), ("x",), transport="simulation")
GRID = make_mesh((2, 2), ("x", "y"), transport="simulation")
WRITES: dict[str, Callable[[Any], Any]] = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(-1, 0),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.unsqueeze_(0).squeeze_(),
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", WRITES)
def test_the_shape_is_another_under_every_name(name: str) -> None:
    def f(x: Any) -> Any:
        y = x * 2
        alias = y
        assert WRITES[name](y) is alias
        return alias * alias

    check_case(name, (f, ((5, 3),)), GRID, 20)


def test_a_leaf_keeps_its_shape_while_autograd_follows() -> None:
    x = device_put(torch.ones(2, 3), P("x"), mesh=LINE).requires_grad_()
    with pytest.raises(fspmd.ArgumentError, match=r"t_\(\) got .* a leaf that requires grad; write y = x.t\(...\)"):
        x.t_()


@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()], ids=repr)
def test_orthogonal_matrices(shape: tuple[int, int], spec: P) -> None:
    x = nn.init.orthogonal_(fspmd.zeros(shape, spec=spec, mesh=LINE, dtype=torch.float64))
    whole = device_get(x)
    square = whole @ whole.T if shape[0] < shape[1] else whole.T @ whole
    torch.testing.assert_close(square, torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (9, 2), (3, 3, 3), (1, 4)])
@pytest.mark.parametrize("wrap", [False, True])
def test_diagonals(shape: tuple[int, ...], wrap: bool) -> None:
    want = torch.zeros(shape).fill_diagonal_(7.0, wrap)
    for spec in (P("x"), P(None, "x"), P("y", "x"), P(), P(("y", "x"))):
        x = device_put(torch.zeros(shape), spec, mesh=GRID)
        with communication_log() as log:
            assert x.fill_diagonal_(7.0, wrap=wrap) is x
        assert not log
        assert torch.equal(device_get(x), want)
    with pytest.raises(fspmd.ShapeError, match="give it a matrix, or a tensor whose dims all have one size"):
        x[0, 0].fill_diagonal_(1.0)
