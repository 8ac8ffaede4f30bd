"""`init_sharded` of models as Hugging Face writes them, beside what the library makes of them itself."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from test_initial import unlike
from torch import Tensor, nn

from fspmd import P, device_get, init_sharded, make_mesh

pytest.importorskip("transformers")
from model_cases import CASES

MESHES = {
    shape: make_mesh(shape, tuple(names), transport="simulation")
    for shape, names in {(1,): "x", (3,): "x", (4,): "x", (2, 2): "yx"}.items()
}


def state_of(module: Any) -> dict[str, Tensor]:
    return {name: x.detach() for name, x in (*module.named_parameters(), *module.named_buffers())}


def made(name: str) -> nn.Module:
    return CASES[name].model(copy.deepcopy(CASES[name].config))


@functools.lru_cache
def of_library(name: str, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return state_of(made(name))


def rows(name: str, shape: tuple[int, ...]) -> P:
    return P("x") if shape else P()


def columns(name: str, shape: tuple[int, ...]) -> P:
    return P(*(None,) * (len(shape) - 1), "x") if shape else P()


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", [name for name in CASES if "loop" not in name])
def test_models_are_initialised_as_their_library_does(name: str) -> None:
    expected = [of_library(name, seed) for seed in range(4)]
    first: dict[str, Tensor] = {}
    for shape, specs in (((1,), P()), ((4,), rows), ((3,), columns), ((2, 2), rows)):
        torch.manual_seed(0)
        module, params, buffers = init_sharded(lambda: made(name), specs, mesh=MESHES[shape], axis="x")
        found = {key: device_get(x).detach() for key, x in {**params, **buffers}.items()}
        assert list(found) == list(expected[0])
        assert [x.requires_grad for x in params.values()] == [x.requires_grad for x in module.parameters()]
        for key, x in found.items():
            others = [one[key] for one in expected]
            assert (x.shape, x.dtype) == (others[0].shape, others[0].dtype), key
            if all(torch.equal(others[0], one) for one in others):  # not random
                torch.testing.assert_close(x, others[0], rtol=1e-6, atol=1e-7, msg=lambda text, key=key: key + text)
            else:
                assert unlike(x, torch.stack(others)) < 1, (key, x.std(), others[0].std())
                assert x.abs().max() <= 1.6 * torch.stack(others).abs().max(), key
            torch.testing.assert_close(x, first.setdefault(key, x), rtol=1e-6, atol=1e-7)
