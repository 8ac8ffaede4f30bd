"""Models of transformers as they are, beside themselves unsharded; `model_cases` is the table of models.

All of it runs with FSPMD_FULL=1, else each model eagerly, and a sample of them in each other mode.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from full import FULL
from huggingface_programs import MODELS, check_written, complaints, save_models
from huggingface_programs import on_processes as folders_on_processes
from model_cases import CASES
from model_programs import Placed, counted, generated, on_processes, unsharded
from processes import Processes

from fspmd import Mesh, OnBlocks, RecordError, Style, communication_log, make_mesh

transformers.logging.set_verbosity_error()
#: what a step in float64 may differ by, where the model itself computes its norms and its loss in float32
CLOSE = 2e-6

#: the most collectives of a step, with styles and without: over "tp" forward and backward, with "dp" the same
COUNTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "GPT2": ((6, 5, 2, 28), (6, 5, 2, 28)),
    "Llama": ((6, 5, 1, 21), (6, 5, 1, 21)),
    "Qwen2": ((6, 5, 1, 27), (6, 5, 1, 27)),
    "Qwen3": ((6, 5, 1, 25), (6, 5, 1, 25)),
    "Gemma2": ((6, 5, 1, 24), (6, 5, 1, 24)),
    "Mixtral": ((6, 7, 1, 21), (6, 5, 7, 19)),
    "Mixtral, a loop": ((6, 7, 1, 21), (12, 11, 27, 25)),
    "Bert": ((6, 5, 3, 42), (6, 5, 3, 42)),
    "ViT": ((4, 4, 1, 40), (4, 4, 1, 40)),
    "T5": ((13, 12, 5, 49), (13, 12, 5, 49)),
    "Whisper": ((12, 12, 1, 88), (12, 12, 1, 88)),
    "Mamba": ((6, 19, 1, 22), (6, 19, 1, 22)),
    "ResNet": ((0, 0, 7, 20), (0, 0, 7, 20)),
}
#: the same without styles once passes have packed them, by axes and dtypes
PACKED: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("GPT2", "Llama", "Qwen2"), (6, 5, 1, 1)),
    "Qwen3": (6, 5, 1, 2),
    "Gemma2": (6, 5, 1, 2),
}
EVERY = (True, False)  # with styles, and without
SAMPLE = EVERY if FULL else (True,)


def models(having: str = "model", styles: tuple[bool, ...] = EVERY, but: str = "") -> Any:
    """One test a model, with styles and without."""
    names = [name for name, case in CASES.items() if getattr(case, having) and name != but]
    ids = {True: "styles", False: "no styles"}
    cases = [pytest.param(name, styled, id=f"{name}, {ids[styled]}") for name in names for styled in styles]
    return pytest.mark.parametrize(("name", "styled"), cases)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh((2, 4), ("dp", "tp"), transport="simulation")


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    with Processes(4) as pool:
        yield pool


@pytest.mark.one_of(2)
@models()
def test_a_step_is_that_of_the_unsharded_model(name: str, styled: bool, mesh: Mesh) -> None:
    step, count = Placed(CASES[name], mesh, styled=styled).step()
    assert max(step.error(unsharded(name))) < CLOSE
    assert all(n <= most for n, most in zip(count, COUNTS[name][not styled], strict=True)), count


@pytest.mark.one_of(6)
@models(styles=SAMPLE)
def test_a_step_in_bfloat16_is_as_exact_as_that_of_the_unsharded_model(name: str, styled: bool, mesh: Mesh) -> None:
    step, _ = Placed(CASES[name], mesh, torch.bfloat16, styled).step()
    alone, exact = unsharded(name, torch.bfloat16), unsharded(name)
    assert step.error(alone)[0] < 0.1  # of the same dtypes
    assert step.deviation(exact) < 1.5 * alone.deviation(exact) + 0.01


@pytest.mark.one_of(6)
@models(styles=EVERY if FULL else (False,), but="Mixtral, a loop")
def test_jit_records_the_step(name: str, styled: bool, mesh: Mesh) -> None:
    step, count = Placed(CASES[name], mesh, styled=styled).recorded()
    assert max(step.error(unsharded(name))) < CLOSE
    most = COUNTS[name][not styled]
    assert sum(count) <= sum(most), count


@pytest.mark.parametrize("name", list(PACKED) if FULL else ["GPT2"])
def test_passes_leave_one_sum_of_gradients(name: str, mesh: Mesh) -> None:
    """Of the model as it is: what its embedding, cut by the vocabulary, looks up keeps no pass from its collectives."""
    passes = ["equal_steps", "rewrites", "dead_code", "coalesce"]
    step, _ = Placed(CASES[name], mesh, styled=False).recorded(passes)
    assert max(step.error(unsharded(name))) < CLOSE
    ranks = make_mesh((2, 4), ("dp", "tp"), transport="abstract")  # processes, each with a record of its own
    lowered = Placed(CASES[name], ranks, styled=False).lowered(passes)
    assert (lowered.program.unlike, lowered.program.uneven) == ("", "")
    found = [("dp" in one.axes, one.backward) for one in lowered.collectives()]
    assert Counter(found) == dict(zip(itertools.product((False, True), repeat=2), PACKED[name], strict=True))


def test_jit_records_a_loop_over_experts_that_runs_on_blocks(mesh: Mesh) -> None:
    name = "Mixtral, a loop"
    step, _ = Placed(CASES[name], mesh).recorded()
    assert max(step.error(unsharded(name))) < CLOSE
    with pytest.raises(
        RecordError, match=r"^jit cannot record nonzero, .*styles=\{\"model.layers.\*.mlp.experts\": On"
    ):
        Placed(CASES[name], mesh, styled=False).recorded()


def test_the_log_of_a_loop_over_experts_says_what_to_write(mesh: Mesh) -> None:
    name, others = "Mixtral, a loop", dict[str, Style]()
    for most in (COUNTS[name][1], (0, 0, 1, 21)):
        placed = Placed(dataclasses.replace(CASES[name], styles=others), mesh)
        with communication_log() as log:
            placed(placed.params, placed.buffers, placed.batch).loss.backward()
        assert all(n <= m for n, m in zip(counted(log), most, strict=True)), counted(log)
        for style in re.findall(r"^where\(\) gathers .* with styles=(\{.*\})$", str(log), re.MULTILINE):
            others = eval(style, {"OnBlocks": OnBlocks})
    step, _ = Placed(dataclasses.replace(CASES[name], styles=others), mesh).step()
    assert max(step.error(unsharded(name))) < CLOSE


@pytest.mark.one_of(6)
@models("checkpoints", SAMPLE)
def test_gradient_checkpointing_as_the_library_switches_it_on(name: str, styled: bool, mesh: Mesh) -> None:
    placed = Placed(CASES[name], mesh, styled=styled)
    placed.model.gradient_checkpointing_enable()  # type: ignore[operator]
    assert max(placed.step()[0].error(unsharded(name))) < CLOSE


@pytest.mark.one_of(6)
@models("generate", SAMPLE)
def test_generate_gives_the_tokens_of_the_unsharded_model(name: str, styled: bool, mesh: Mesh) -> None:
    assert torch.equal(generated(name, mesh, styled), generated(name))


def test_processes(four: Processes) -> None:
    """A sample; the simulation is the same code but for the transport."""
    names, styles = (list(CASES), EVERY) if FULL else (["Mixtral"], (True,))
    for styled in styles:
        for errors in four.run(on_processes, names, styled):
            assert max(map(max, errors.values())) < CLOSE


def test_folders_of_hugging_face_on_processes(four: Processes, tmp_path: Path) -> None:
    names = MODELS if FULL else ("Llama", "Mixtral", "tied Llama")
    save_models(names, tmp_path)
    for found in four.run(folders_on_processes, names, str(tmp_path)):
        assert [name for name, (different, error) in found.items() if different or error > CLOSE] == []
    for name in names:
        check_written(name, tmp_path / f"{name}, written", tmp_path / name)
    texts = four.run(complaints, str(tmp_path))
    assert len({*map(tuple, texts)}) == 1
    for text, part in zip(
        texts[0],
        (
            "none has neither model.safetensors nor",
            "'lm_head.weight' is in the files alone",
            "exists and is not empty",
            "'lm_head.weight' is not in params",
            "ranks have other values: ('lm_head.weight', ",
            "could not write /dev/null/new",
        ),
        strict=True,
    ):
        assert part in text
    assert not (tmp_path / "new").exists()
