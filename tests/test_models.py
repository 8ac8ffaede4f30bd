"""Models of transformers as they are, beside themselves unsharded; `model_cases` is the table of models.

All of it runs with FSPMD_FULL=1, else each model once in each mode.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from model_cases import CASES
from model_programs import Placed, generated, on_processes, unsharded
from processes import Processes

from fspmd import FspmdError, Mesh, make_mesh

transformers.logging.set_verbosity_error()
FULL = os.environ.get("FSPMD_FULL") == "1"
#: what a step in float64 may differ by, where the model itself computes its norms and its loss in float32
CLOSE = 2e-6

#: the collectives of a step, with styles and without: over "tp" forward and backward, with "dp" forward and backward
COUNTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "GPT2": ((6, 5, 2, 29), (6, 5, 2, 29)),
    "Llama": ((6, 5, 1, 21), (11, 5, 1, 21)),
    "Qwen2": ((6, 5, 1, 27), (11, 5, 1, 27)),
    "Qwen3": ((6, 5, 1, 25), (11, 5, 1, 25)),
    "Gemma2": ((6, 5, 1, 25), (19, 5, 1, 25)),
    "Mixtral": ((6, 7, 1, 21), (19, 11, 35, 25)),
    "Mixtral, a loop": ((6, 7, 1, 21), (19, 11, 35, 25)),
    "Bert": ((6, 5, 5, 43), (6, 5, 5, 43)),
    "ViT": ((4, 4, 2, 40), (4, 4, 2, 40)),
    "T5": ((35, 12, 6, 51), (25, 12, 6, 51)),
    "Whisper": ((12, 12, 2, 89), (12, 12, 2, 89)),
    "Mamba": ((6, 19, 2, 23), (23, 19, 2, 23)),
    "ResNet": ((0, 0, 8, 20), (0, 0, 8, 20)),
}
#: what does not work yet: modes, with styles or without, and models
MISSING = {
    # grouped_mm has no rule
    ("step", False): {"Mixtral"},
    ("jit", False): {"Mixtral", "Mixtral, a loop"},
    ("generate", True): {"Whisper", "Mamba"},
}


def models(mode: str, having: str = "model", styles: tuple[bool, ...] = (True, False)) -> Any:
    """One test a model, with styles and without; those that do not work yet are expected to fail."""
    names = [name for name, case in CASES.items() if getattr(case, having)]
    fails = [pytest.mark.xfail(raises=(FspmdError, RuntimeError, TypeError))]
    cases = [
        pytest.param(
            name,
            styled,
            id=f"{name}, {'styles' if styled else 'no styles'}",
            marks=fails if name in MISSING.get((mode, styled), ()) else [],
        )
        for name in names
        for styled in styles
    ]
    return pytest.mark.parametrize(("name", "styled"), cases)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh((2, 4), ("dp", "tp"), transport="simulation")


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    with Processes(4) as pool:
        yield pool


@models("step")
def test_a_step_is_that_of_the_unsharded_model(name: str, styled: bool, mesh: Mesh) -> None:
    step, count = Placed(CASES[name], mesh, styled=styled).step()
    assert max(step.error(unsharded(name))) < CLOSE
    assert all(n <= most for n, most in zip(count, COUNTS[name][not styled], strict=True)), count


@models("jit")
def test_jit_records_the_step(name: str, styled: bool, mesh: Mesh) -> None:
    step, _ = Placed(CASES[name], mesh, styled=styled).recorded()
    assert max(step.error(unsharded(name))) < CLOSE


@models("checkpointing", "checkpoints", (True, False) if FULL else (True,))
def test_gradient_checkpointing_as_the_library_switches_it_on(name: str, styled: bool, mesh: Mesh) -> None:
    placed = Placed(CASES[name], mesh, styled=styled)
    placed.model.gradient_checkpointing_enable()  # type: ignore[operator]
    assert max(placed.step()[0].error(unsharded(name))) < CLOSE


@models("generate", "generate", (True, False) if FULL else (True,))
def test_generate_gives_the_tokens_of_the_unsharded_model(name: str, styled: bool, mesh: Mesh) -> None:
    assert torch.equal(generated(name, mesh, styled), generated(name))


def test_processes(four: Processes) -> None:
    """A sample; the simulation is the same code but for the transport."""
    for errors in four.run(on_processes, list(CASES) if FULL else ["GPT2", "Mixtral", "T5", "Mamba"], True):
        assert max(map(max, errors.values())) < CLOSE
