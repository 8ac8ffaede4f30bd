"""Values, types, gradients and gradients of gradients of small programs are those that JAX gives.

The answers were recorded by `jax_oracle/generate.py`; JAX itself is not needed here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jax_oracle.programs import Program, all_programs
from jax_oracle.torch_backend import build, scalar, weighted
from torch import Tensor

import fspmd
from fspmd.errors import FspmdError

PROGRAMS = all_programs()
ANSWERS = Path(__file__).with_name("jax_oracle") / "golden.json"
GOLDEN: dict[str, Any] = json.loads(ANSWERS.read_text())["programs"]
VALUED = [name for name, program in PROGRAMS.items() if program.expect == "values"]
SMOOTH = [name for name in VALUED if PROGRAMS[name].differentiated()]
TWICE = [name for name in SMOOTH if PROGRAMS[name].second]
JUDGED = [name for name, program in PROGRAMS.items() if program.expect == "verdict"]


def agree(what: str, found: Sequence[Tensor | None], recorded: Sequence[dict[str, Any]]) -> None:
    """Every tensor has the recorded shape and, to 1e-10, the recorded elements; no gradient at all means zero."""
    assert len(found) == len(recorded), f"{what}: {len(found)} tensors, JAX has {len(recorded)}"
    for i, (x, y) in enumerate(zip(found, recorded, strict=True)):
        expected = torch.tensor(y["data"], dtype=torch.float64).reshape(y["shape"])
        value = torch.zeros_like(expected) if x is None else x.detach()
        assert value.shape == expected.shape, f"{what} {i}: shape {tuple(value.shape)}, JAX has {tuple(expected.shape)}"
        kind = "bool" if value.dtype == torch.bool else "float" if value.is_floating_point() else "int"
        assert kind == y["kind"], f"{what} {i}: {value.dtype}, JAX has {y['kind']}"
        matches = torch.allclose(value.to(torch.float64), expected, rtol=1e-10, atol=1e-10)
        assert matches, f"{what} {i}: {value.tolist()}, JAX has {expected.tolist()}"


def prepared(program: Program) -> tuple[Any, list[Tensor], list[Tensor]]:
    """The program, its inputs, and those of them that are differentiated."""
    _, run, inputs = build(program)
    chosen = [inputs[i].requires_grad_() for i in program.differentiated()]
    return run, inputs, chosen


@pytest.mark.parametrize("name", VALUED)
def test_values_and_types(name: str) -> None:
    m, run, inputs = build(PROGRAMS[name])
    agree("output", run(*inputs), GOLDEN[name]["outputs"])
    if PROGRAMS[name].check_vma:
        assert m.types == GOLDEN[name]["types"]


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_by_backward(name: str) -> None:
    run, inputs, chosen = prepared(PROGRAMS[name])
    total = scalar(run(*inputs))
    grads = torch.autograd.grad(total, chosen, allow_unused=True) if total.requires_grad else [None] * len(chosen)
    agree("gradient", grads, GOLDEN[name]["grads"])


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_by_grad(name: str) -> None:
    program = PROGRAMS[name]
    _, run, inputs = build(program)
    grads = fspmd.grad(lambda *args: scalar(run(*args)), argnums=program.differentiated())(*inputs)
    agree("gradient", grads, GOLDEN[name]["grads"])


@pytest.mark.one_of(8)
@pytest.mark.parametrize("name", TWICE)
def test_second_gradients_by_backward(name: str) -> None:
    run, inputs, chosen = prepared(PROGRAMS[name])
    total = scalar(run(*inputs)) + 0 * sum(torch.sum(x) for x in chosen)
    grads = torch.autograd.grad(total, chosen, create_graph=True, materialize_grads=True)
    along = sum((torch.sum(g * w) for g, w in zip(grads, weighted(grads, 5), strict=True)), start=torch.zeros(()))
    assert isinstance(along, Tensor)
    second = torch.autograd.grad(along, chosen, allow_unused=True) if along.requires_grad else [None] * len(chosen)
    agree("second gradient", second, GOLDEN[name]["second"])


@pytest.mark.one_of(8)
@pytest.mark.parametrize("name", TWICE)
def test_second_gradients_by_grad_of_grad(name: str) -> None:
    program = PROGRAMS[name]
    _, run, inputs = build(program)
    first = fspmd.grad(lambda *args: scalar(run(*args)), argnums=program.differentiated())

    def along(*args: Tensor) -> Tensor:
        grads = first(*args)
        return torch.stack([torch.sum(g * w) for g, w in zip(grads, weighted(grads, 5), strict=True)]).sum()

    second = fspmd.grad(along, argnums=program.differentiated())(*inputs)
    agree("second gradient", second, GOLDEN[name]["second"])


@pytest.mark.parametrize("name", JUDGED)
def test_acceptance(name: str) -> None:
    program = PROGRAMS[name]
    m, run, inputs = build(program)
    try:
        run(*inputs)
        answer = m.types.get("result", "accepted")
    except FspmdError:
        answer = "rejected"
    recorded = GOLDEN[name]
    theirs = recorded["types"].get("result", "accepted") if recorded["accepted"] else "rejected"
    assert answer == (program.deviation[0] if program.deviation else theirs)


def test_every_program_was_recorded() -> None:
    assert sorted(PROGRAMS) == sorted(GOLDEN), "run tests/jax_oracle/generate.py again"
