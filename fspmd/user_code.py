"""Which code is the user's, and which line of it runs."""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sys
import threading
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import optree
import torch

from fspmd.cache import cached

#: folders of code that is not the user's: ours, torch's and optree's
LIBRARIES: Final = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__, optree.__file__) if file)
#: the library of Python; folders with these names within it have what is installed
_STANDARD: Final = (f"{Path(threading.__file__).parent}{os.sep}", "<frozen ")
_INSTALLED: Final = ("site-packages", "dist-packages")


class _Libraries(dict[str, bool]):
    def __missing__(self, path: str) -> bool:
        is_standard = path.startswith(_STANDARD) and not any(name in path for name in _INSTALLED)
        known = self[path] = is_standard or path.startswith(LIBRARIES)
        return known


#: by file whether its code is of a library, Python's included, that no line of a message names
is_library: Final = _Libraries()


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the nearest frame of the user at a frame or above it."""
    while frame is not None and is_library[frame.f_code.co_filename]:
        frame = frame.f_back
    return frame


def place_of_call() -> tuple[CodeType | None, int]:
    """Return the code that called fspmd, and the place of the instruction in it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES[0]):
        frame = frame.f_back
    return (None, 0) if frame is None else (frame.f_code, frame.f_lasti)


@cached
def augmented_items(code: CodeType) -> list[tuple[range, range]]:
    """Return for each ``x[i] += y`` of a code the places of two instructions: that which reads ``x[i]``, and ``+=``.

    Python copies ``x`` and ``i`` on its stack before the first, and stores the result of the second into ``x[i]`` at
    once. Other operators are the same.
    """
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    ends = [step.offset for step in steps[1:]]  # a frame may be at the caches behind an instruction
    places: list[tuple[range, range]] = []
    read = None
    for i, step in enumerate(steps[2:-1], start=2):
        place = range(step.offset, ends[i])
        if all(other.opname == "COPY" and other.arg != 1 for other in steps[i - 2 : i]) and step.opname != "COPY":
            read = place
        elif step.opname == "BINARY_OP" and step.argrepr.endswith("="):
            after = next(other.opname for other in steps[i + 1 :] if other.opname != "SWAP")
            if read is not None and after in ("STORE_SUBSCR", "STORE_SLICE"):
                places.append((read, place))
            read = None
    return places


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of the user in a traceback, ``train.py:12``; "" if there is none."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if not is_library[file]:
            return f"{Path(file).name}:{line}"
    return ""


@dataclass(frozen=True, slots=True)
class UserLine:
    """A line of the user, and a number for it that all processes agree on."""

    where: str  # ``train.py:12``
    number: int


_UNKNOWN: Final = UserLine("?", 0)
_lines: Final[dict[tuple[int, int], tuple[CodeType, UserLine]]] = {}  # by the id of the code, which is kept


def user_line(frame: FrameType | None) -> UserLine:
    """The nearest line of the user at a frame or above it."""
    frame = user_frame(frame)
    return _UNKNOWN if frame is None else _line_at(frame)


def user_place(frame: FrameType | None) -> tuple[UserLine, int]:
    """The nearest line of the user at a frame or above it, and a number for the instruction and that of its caller."""
    frame = user_frame(frame)
    if frame is None:
        return _UNKNOWN, 0
    line, caller = _line_at(frame), user_frame(frame.f_back)
    called_at = (0, 0) if caller is None else (_line_at(caller).number, caller.f_lasti)
    return line, hash((line.number, frame.f_lasti, *called_at))


def _line_at(frame: FrameType) -> UserLine:
    code = frame.f_code
    known = _lines.get((id(code), frame.f_lasti))
    if known is None:
        known = _lines[id(code), frame.f_lasti] = (code, line_of(f"{Path(code.co_filename).name}:{frame.f_lineno}"))
    return known[1]


@cached
def code_of(function: Callable[..., Any]) -> CodeType | None:
    """The code of a function that may be wrapped or partial; None for one that is not Python's."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(inspect.unwrap(function), "__code__", None)


def line_of(where: str) -> UserLine:
    """The line with this text."""
    return UserLine(where, zlib.crc32(where.encode()))
