"""Modules without memory, laid out on meshes without ranks: planned as a simulation of values would run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_parallel import CASES
from torch import nn

from fspmd import (
    ArgumentError,
    P,
    Sharded,
    TensorSpec,
    TreeError,
    device_put,
    functional_call,
    jit,
    make_mesh,
    parallelize,
    value_and_grad,
)

AXES = {(4,): ("tp",), (2, 3): ("data", "tp"), (2, 2, 2): ("data", "pod", "tp")}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("case", ["mlp", "block"])
@pytest.mark.parametrize("shape", AXES)
def test_a_module_on_the_meta_device_is_planned(shape: tuple[int, ...], case: str) -> None:
    make, styles, x = CASES[case]

    def planned(transport: Any, device: str) -> Any:
        mesh = make_mesh(shape, AXES[shape], transport=transport)
        with torch.device(device):
            module = make().to(torch.float64)
        tensors = dict(module.named_parameters())
        params, plan = parallelize(tensors, styles, mesh, axis="tp")
        batch = TensorSpec(mesh, P(mesh.axis_names[0]) if len(shape) > 1 else P(), x.shape, x.dtype)

        def step(params: Any, x: Any) -> Any:
            def loss(q: Any) -> Any:
                return functional_call(module, q, x, styles=plan).sin().sum()

            value, gradients = value_and_grad(loss)(params)
            return value, {name: params[name] - 0.1 * g for name, g in gradients.items()}

        given = {name: x.detach() for name, x in params.items()}
        return params, jit(step).lower(given, batch)

    params, lowered = planned("abstract", "meta")
    _, expected = planned("simulation", "cpu")
    assert all(x.local.is_meta and x.requires_grad for x in params.values())
    assert [str(row) for row in lowered.collectives()] == [str(row) for row in expected.collectives()]
    assert lowered.cost() == expected.cost()
    assert lowered.memory().peak == expected.memory().peak > 0


def test_specs_are_laid_out_too() -> None:
    for transport in ("abstract", "simulation"):
        mesh = make_mesh((2, 3), ("data", "tp"), transport=transport)
        make, styles, _ = CASES["mlp"]
        tensors = {name: x.detach() for name, x in make().named_parameters()}
        specs = {name: TensorSpec(mesh, P(), x.shape, x.dtype) for name, x in tensors.items()}
        placed, plan = parallelize(specs, styles, mesh, axis="tp")
        expected, _ = parallelize(tensors, styles, mesh, axis="tp")
        assert placed == {name: x.spec for name, x in expected.items()}
        assert device_put(specs["up.weight"], P("tp"), mesh=mesh) is placed["up.weight"]
        assert str(plan)


def test_messages() -> None:
    with torch.device("meta"):
        module = nn.BatchNorm1d(3)
    planned = "to plan without memory write make_mesh(..., transport='abstract'); for values, init_sharded"
    mesh = make_mesh((2,), ("x",), transport="simulation")
    with pytest.raises(ArgumentError) as caught:
        device_put({"w": module.weight}, P(), mesh=mesh)
    assert str(caught.value) == (
        "device_put: the tree does not fit its specs\n"
        f"  * tree['w'] is on the meta device, which has no values\n{planned}"
    )
    with pytest.raises(ArgumentError) as caught:
        parallelize(dict(module.named_parameters()), {}, mesh)
    assert str(caught.value) == (
        "parallelize lays out trees of tensors\n  * 'weight' is on the meta device, which has no values\n"
        f"  * 'bias' is on the meta device, which has no values\n{planned}"
    )
    params = {"weight": torch.ones(3), "bias": torch.ones(3)}
    with pytest.raises(TreeError, match=r"buffers, too: \(params, dict\(module.named_buffers\(\)\)\)$"):
        functional_call(module, params, torch.ones(2, 3))
    abstract = make_mesh((2,), ("x",), transport="abstract")
    buffers = device_put(dict(module.named_buffers()), P(), mesh=abstract)
    out = functional_call(module, (device_put(params, P("x"), mesh=abstract), buffers), torch.ones(2, 3))
    assert isinstance(out, Sharded)
