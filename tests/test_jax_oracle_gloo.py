"""The programs of `test_jax_oracle.py` on real processes with Gloo: the same values, types and gradients as JAX."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator

import pytest
import test_jax_oracle as oracle
from full import FULL
from processes import Processes

PARTS = (
    32  # the programs of one mesh size are dealt to this many tests; a sample of these runs unless FSPMD_FULL is set
)
SIZES = sorted({math.prod(program.mesh_shape) for program in oracle.PROGRAMS.values()} - {1}) if FULL else [4]


def ranks(name: str) -> int:
    """The number of processes that a program's mesh has."""
    return math.prod(oracle.PROGRAMS[name].mesh_shape)


def failures(names: list[str]) -> list[str]:
    """Run on every rank: programs that do not give JAX's answers, and how."""
    checks = (
        (oracle.VALUED, oracle.test_values_and_types),
        (oracle.SMOOTH, oracle.test_gradients_by_backward),
        (oracle.SMOOTH, oracle.test_gradients_by_grad),
        (oracle.TWICE, oracle.test_second_gradients_by_backward),
        (oracle.TWICE, oracle.test_second_gradients_by_grad_of_grad),
        (oracle.JUDGED, oracle.test_acceptance),
    )
    found = []
    for name in names:
        for group, check in checks:
            if name in group:
                try:
                    check(name)
                except Exception:
                    found.append(f"{name}, {check.__name__}: {traceback.format_exc(limit=-3)}")
                    break
    return found


@pytest.fixture(scope="module", params=SIZES)
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[int, Processes]]:
    """Processes for all programs of one mesh size, kept until the next size."""
    with Processes(request.param) as processes:
        yield request.param, processes


@pytest.mark.parametrize("part", [*range(PARTS if FULL else 1), "pcast"])
def test_same_answers_on_processes(pool: tuple[int, Processes], part: int | str) -> None:
    """A part of the programs by number, or those whose names contain a word."""
    size, processes = pool
    names = [name for name in oracle.PROGRAMS if ranks(name) == size]
    names = [name for name in names if part in name] if isinstance(part, str) else names[part::PARTS]
    found = processes.run(failures, names)
    assert not any(found), "\n".join(line for one in found for line in one)
