"""A module whose forward runs on each rank's blocks: a mixture of experts with loops and shapes by values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import Processes
from torch import Tensor, nn
from torch.nn import functional as F

import fspmd
from fspmd import ArgumentError, Mesh, OnBlocks, P, communication_log, device_get, device_put, make_mesh

F64 = torch.float64
STYLES = {"experts": OnBlocks(specs={"up": 1, "down": -1}, axis="tp")}


class Experts(nn.Module):
    """Rows by the expert that each has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 4)), nn.Parameter(torch.randn(3, 4, 8))
        self.register_buffer("scale", torch.full((), 2.0))

    def forward(self, x: Tensor, which: Tensor, *, weights: Tensor | None = None) -> Tensor:
        out = torch.zeros_like(x)
        for expert in which.unique():
            rows = (which == expert).nonzero()[:, 0]
            found = F.linear(F.linear(x[rows], self.up[expert]).relu(), self.down[expert]) * self.scale
            out.index_add_(0, rows, found if weights is None else found * weights[rows, None])
        return out


class Model(nn.Module):
    """Experts between two functions of whole rows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        return torch.tanh(x + self.experts(torch.sin(x), which, weights=x.sum(-1))).square().sum()


def _given(rows: int) -> tuple[Model, Tensor, Tensor]:
    torch.manual_seed(rows)
    model = Model().to(F64)
    return model, torch.randn(rows, 4, dtype=F64, requires_grad=True), torch.randint(3, (rows,))


def _errors(mesh: Mesh, rows: int, spec: P, jitted: bool = False, styles: Any = STYLES) -> list[float]:
    """Of the loss, and of all gradients."""
    model, x, which = _given(rows)
    params = dict(model.named_parameters())
    loss = model(x, which)
    expected = [loss, *torch.autograd.grad(loss, [x, *params.values()])]
    placed, plan = fspmd.parallelize(params, styles, mesh)

    def step(x: Any, params: Any, which: Any) -> Any:
        return fspmd.functional_call(model, params, x, which, styles=plan)

    run = fspmd.value_and_grad(step, argnums=(0, 1))
    run = fspmd.jit(run) if jitted else run
    args = device_put(x, spec, mesh=mesh), placed, device_put(which, spec, mesh=mesh)
    for _ in range(1 + jitted):
        value, (by_x, by_params) = run(*args)
    found = device_get([value, by_x, *(by_params[name] for name in params)])
    assert type(model.experts.up) is nn.Parameter
    assert "forward" not in vars(model.experts)
    return [float((a - b).detach().abs().max()) for a, b in zip(found, expected, strict=True)]


MESHES = {
    (2, 4): (("dp", "tp"), P("dp")),
    (4,): (("tp",), P()),
    (2, 2, 2): (("dp", "pp", "tp"), P("dp")),
    (3, 2): (("dp", "tp"), P("dp")),
}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("rows", [12, 7])
@pytest.mark.parametrize("shape", MESHES)
def test_values_and_gradients_are_those_of_the_module(shape: tuple[int, ...], rows: int, jitted: bool) -> None:
    names, spec = MESHES[shape]
    assert max(_errors(make_mesh(shape, names, transport="simulation"), rows, spec, jitted)) < 1e-12


WHOLE, ROWS = OnBlocks(axis="tp"), OnBlocks(axis="tp", input=None, result=None, output=None)


@pytest.mark.one_of(4)
@pytest.mark.parametrize("rows", [12, 7, 2])
@pytest.mark.parametrize("shape", MESHES)
def test_of_parameters_that_are_whole_nothing_is_summed(shape: tuple[int, ...], rows: int) -> None:
    names, spec = MESHES[shape]
    mesh = make_mesh(shape, names, transport="simulation")
    for style in (WHOLE, ROWS):
        assert max(_errors(mesh, rows, spec, styles={"experts": style})) < 1e-12
    assert max(_errors(mesh, rows, P("tp"), styles={"experts": ROWS})) < 1e-12
    three = OnBlocks(axis="tp", input="replicated", kwargs={"which": "replicated", "weights": "replicated"})
    assert max(_errors(mesh, rows, P("tp"), styles={"experts": three})) < 1e-12
    with pytest.raises(ArgumentError, match=r"^OnBlocks: forward of Experts got .*, but Sharded i64\[.*tp"):
        _errors(mesh, rows, P("tp"), styles={"experts": WHOLE})


def on_processes(rows: int) -> list[float]:
    return _errors(make_mesh((2, 2), ("dp", "tp"), device="cpu"), rows, P("dp"))


def test_on_processes() -> None:
    with Processes(4) as pool:
        for rows in (12, 7):
            assert max(map(max, pool.run(on_processes, rows))) < 1e-12


def test_one_sum_forward_and_one_for_each_argument_backward() -> None:
    mesh = make_mesh((2, 4), ("dp", "tp"), transport="simulation")
    model, x, which = _given(12)
    params, plan = fspmd.parallelize(dict(model.named_parameters()), STYLES, mesh)
    x, which = device_put((x.detach(), which), P("dp"), mesh=mesh)
    with communication_log() as log:
        loss = fspmd.functional_call(model, params, x.requires_grad_(), which, styles=plan)  # a sum over dp is pending
        loss.backward()
    assert [(one.axes, one.shape) for one in log.forward] == [(("tp",), (6, 4))]
    sums = sorted((one.axes, one.shape) for one in log.backward)
    assert sums == [(("dp",), (3, 2, 4)), (("dp",), (3, 4, 2)), (("tp",), (6,)), (("tp",), (6, 4))]


def test_forward_takes_a_tensor() -> None:
    mesh = make_mesh((4,), ("tp",), transport="simulation")
    model = nn.Sequential(Experts())
    params, plan = fspmd.parallelize(dict(model.named_parameters()), {"0": OnBlocks()}, mesh)
    with pytest.raises(ArgumentError, match=r"^OnBlocks: forward of Experts got no tensor, from which its result"):
        fspmd.functional_call(model, params, None, styles=plan)
    assert "forward" not in vars(model[0])
