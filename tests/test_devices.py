"""The programs that `make gpu` runs on a GPU, on the CPU; so they are known to be right when there is one."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import device_programs
import pytest
import stand_in_programs
import torch
import torch.utils.backend_registration as registration
from device_programs import PROGRAMS
from full import FULL
from processes import Processes

ELSEWHERE = {"a group of one rank", "Gloo on four processes"}  # they make process groups
ON_GPUS = {"CUDA graphs", "inductor"}  # which other tests try on a CPU


@pytest.mark.skipif(not hasattr(registration, "_setup_privateuseone_for_python_backend"), reason="torch 2.9 has it")
def test_nothing_waits_for_the_device_or_takes_it_for_a_cpu() -> None:
    """On a stand-in, since it takes no GPU: bodies, the global view, replays, optimizers, new and random values."""
    with Processes(1) as pool:
        (found,) = pool.run(stand_in_programs.outcomes)
    assert len(found) == 2 * len(stand_in_programs.PROGRAMS)
    assert {name: why for name, why in found.items() if why} == {}


BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def _program() -> Any:
    spec = importlib.util.spec_from_file_location("gpu", BENCHMARKS / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu"] = module
    spec.loader.exec_module(module)
    return module


GPU = _program()


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - ELSEWHERE - ON_GPUS))
def test_on_the_cpu(name: str) -> None:
    PROGRAMS[name]("cpu")


@pytest.mark.skipif(not FULL, reason="it takes long, and other tests have groups of processes")
def test_in_a_group_of_one_rank() -> None:
    with Processes(1) as pool:
        pool.run(device_programs.of_one_rank, "cpu")


def test_make_gpu_runs_every_program() -> None:
    assert set(GPU.TESTS) == set(PROGRAMS)
    parts = re.findall(r'^    "(\w+)": \(\w+, "', (BENCHMARKS / "one_gpu.py").read_text(), re.MULTILINE)
    assert [one.part for one in GPU.TIMES] == parts


def test_make_gpu_ends_where_there_is_no_gpu() -> None:
    results = (BENCHMARKS / "RESULTS.md").read_bytes()
    command = [sys.executable, BENCHMARKS / "gpu.py"]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(command, capture_output=True, text=True, env=hidden, check=False)
    assert found.returncode == 1
    assert "needs a machine with an NVIDIA GPU" in found.stderr
    assert (BENCHMARKS / "RESULTS.md").read_bytes() == results


def test_its_section_takes_the_place_of_the_last_one() -> None:
    text = "# Results\n\none\n\n## Others\n\ntwo\n"
    once = GPU.written(text, "## On one GPU\n\nfirst\n")
    assert once == text + "\n## On one GPU\n\nfirst\n"
    assert GPU.written(once + "\n## More\n", "## On one GPU\n\nsecond\n") == (
        text + "\n## On one GPU\n\nsecond\n\n## More\n"
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_on_a_gpu(name: str) -> None:
    PROGRAMS[name]("cuda")
