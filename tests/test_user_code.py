"""Which code is the user's, by the folder of its file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import fspmd
from fspmd.user_code import is_library, line_of_error, user_frame

PYTHON = str(Path(os.__file__).parent)


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        (f"{PYTHON}/contextlib.py", True),
        (f"{PYTHON}/concurrent/futures/thread.py", True),
        ("<frozen runpy>", True),
        (torch.__file__, True),
        (fspmd.__file__, True),
        (f"{PYTHON}/site-packages/mine/train.py", False),
        (f"{PYTHON}/dist-packages/mine/train.py", False),
        (f"{PYTHON}-mine/train.py", False),
        (f"{Path(torch.__file__).parent}vision/models.py", False),
        (f"{Path(fspmd.__file__).parent}_experiments/train.py", False),
        ("<stdin>", False),
        ("<string>", False),
        (__file__, False),
    ],
)
def test_the_folder_decides(path: str, is_one: bool) -> None:
    assert is_library[path] is is_one


def test_without_code_of_the_user_there_is_no_line() -> None:
    assert user_frame(None) is None
    assert line_of_error(ValueError()) == ""
