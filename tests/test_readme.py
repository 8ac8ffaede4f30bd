"""The programs of the README and of pages in docs print what these say."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from fspmd import FspmdError

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PENDING = (ROOT / "docs" / "pending.md").read_text()
ADD_AN_OP = (ROOT / "docs" / "add_an_op.md").read_text()
SEQUENCES = (ROOT / "docs" / "sequences.md").read_text()
STATE = (ROOT / "docs" / "state.md").read_text()
EXPERTS = (ROOT / "docs" / "experts.md").read_text()
DECODING = (ROOT / "docs" / "decoding.md").read_text()
PIPELINES = (ROOT / "docs" / "pipelines.md").read_text()
CHECKPOINTS = (ROOT / "docs" / "checkpoints.md").read_text()


def test_programs_print_what_the_readme_shows() -> None:
    check(README, 5)


def test_programs_print_what_is_said_of_other_reductions() -> None:
    check(PENDING, 4)


def test_programs_print_what_is_said_of_rules() -> None:
    check(ADD_AN_OP, 4)


def test_programs_print_what_is_said_of_sequences() -> None:
    check(SEQUENCES, 1)
    check(EXPERTS, 1)


def test_programs_print_what_is_said_of_decoding() -> None:
    check(DECODING, 3)


def test_programs_print_what_is_said_of_pipelines() -> None:
    check(PIPELINES, 3)


def test_programs_print_what_is_said_of_state() -> None:
    check(STATE, 2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_programs_print_what_is_said_of_checkpoints() -> None:
    check(CHECKPOINTS, 3)


def check(text: str, count: int) -> None:
    scope: dict[str, Any] = {}
    pairs = re.findall(r"```python\n(.*?)```\s+```\n(.*?)```", text, re.DOTALL)
    assert len(pairs) == count
    assert all(len(program.strip().splitlines()) <= 15 for program, _ in pairs)
    for program, shown in pairs:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                exec(program, scope)
            except FspmdError as error:
                print(f"{type(error).__name__}: {error}")
        assert printed.getvalue() == shown
