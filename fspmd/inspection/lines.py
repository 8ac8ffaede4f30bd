"""Lines of the user, found in a fraction of a microsecond."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

from fspmd.cache import cached
from fspmd.inspection.causes import LIBRARIES


@dataclass(frozen=True, slots=True)
class UserLine:
    """A line of the user, and a number for it that all processes agree on."""

    where: str  # ``train.py:12``
    number: int


_UNKNOWN: Final = UserLine("?", 0)
_lines: Final[dict[tuple[int, int], tuple[CodeType, UserLine]]] = {}  # by the id of the code, which is kept


class _Libraries(dict[str, bool]):
    """By file whether it is of a library."""

    def __missing__(self, path: str) -> bool:
        found = self[path] = path.startswith(LIBRARIES)
        return found


is_library: Final = _Libraries()  # by file


def user_line(frame: FrameType | None) -> UserLine:
    """The nearest line of the user at a frame or above it."""
    return user_place(frame)[0]


def user_place(frame: FrameType | None) -> tuple[UserLine, int]:
    """The nearest line of the user at a frame or above it, and the instruction there."""
    while frame is not None and is_library[frame.f_code.co_filename]:
        frame = frame.f_back
    if frame is None:
        return _UNKNOWN, 0
    code = frame.f_code
    known = _lines.get((id(code), frame.f_lasti))
    if known is None:
        known = _lines[id(code), frame.f_lasti] = (code, line_of(f"{Path(code.co_filename).name}:{frame.f_lineno}"))
    return known[1], frame.f_lasti


@cached
def line_of(where: str) -> UserLine:
    """The line with this text."""
    return UserLine(where, zlib.crc32(where.encode()))
