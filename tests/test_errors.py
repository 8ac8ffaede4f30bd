"""Every mistake raises its error with exactly its text, in simulation and on four Gloo processes, all ranks alike."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import mistakes
import pytest
import torch
from mistakes import MISTAKES, Setting
from processes import Processes

from fspmd import P, device_get, psum

MODULES = [module.name for module in pkgutil.iter_modules(mistakes.__path__)]
for _module in MODULES:
    importlib.import_module(f"mistakes.{_module}")
SIMULATED = [
    (name, check)
    for name, mistake in MISTAKES.items()
    for check, transport in mistake.settings
    if transport == "simulation"
]
ON_GLOO = [
    (name, check) for name, mistake in MISTAKES.items() for check, transport in mistake.settings if transport == "gloo"
]


def outcome(name: str, check_vma: bool) -> tuple[str, str]:
    """The class and the text of what a program raises."""
    try:
        MISTAKES[name].program(Setting(check_vma))
    except Exception as error:
        kind = MISTAKES[name].error
        return (kind.__name__ if isinstance(error, kind) else type(error).__name__), str(error)
    return "nothing", "was raised"


@pytest.mark.parametrize(
    ("name", "check_vma"), SIMULATED, ids=[f"{name}-{'checked' if check else 'unchecked'}" for name, check in SIMULATED]
)
def test_message(name: str, check_vma: bool) -> None:
    assert outcome(name, check_vma) == (MISTAKES[name].error.__name__, MISTAKES[name].text_for(check_vma))


# --- real processes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[Processes]:
    with Processes(4) as processes:
        yield processes


def outcomes(programs: list[tuple[str, bool]]) -> list[tuple[str, str]]:
    """What each program raises on this rank; after each, a sum over ranks shows that all are in step."""
    found = []
    for name, check_vma in programs:
        found.append(outcome(name, check_vma))
        line = Setting(check_vma).line
        total = Setting(check_vma).map(lambda x: psum(x, "x"), P("x"), P(), mesh=line)(torch.arange(4.0))
        assert device_get(total).tolist() == [6.0], name
    return found


@pytest.mark.one_of(2)
@pytest.mark.parametrize("module", MODULES)
def test_all_ranks_raise_the_same(pool: Processes, module: str) -> None:
    programs = [(name, check) for name, check in ON_GLOO if name.startswith(f"{module}.")]
    wanted = [(MISTAKES[name].error.__name__, MISTAKES[name].text_for(check)) for name, check in programs]
    for rank, found in enumerate(pool.run(outcomes, programs)):
        for program, one, expected in zip(programs, found, wanted, strict=True):
            assert one == expected, f"{program} on rank {rank}"
