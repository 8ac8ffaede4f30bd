"""Which code is the user's, and which line of it runs."""

from __future__ import annotations

import os
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import Final

import optree
import torch

#: folders of code that is not the user's: ours, torch's and optree's
LIBRARIES: Final = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__, optree.__file__) if file)
#: the library of Python; folders with these names within it have what is installed
_STANDARD: Final = (f"{Path(threading.__file__).parent}{os.sep}", "<frozen ")
_INSTALLED: Final = ("site-packages", "dist-packages")


class _Libraries(dict[str, bool]):
    def __missing__(self, path: str) -> bool:
        is_standard = path.startswith(_STANDARD) and not any(name in path for name in _INSTALLED)
        found = self[path] = is_standard or path.startswith(LIBRARIES)
        return found


#: by file whether its code is of a library, Python's included, that no line of a message names
is_library: Final = _Libraries()


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the nearest frame of the user at a frame or above it."""
    while frame is not None and is_library[frame.f_code.co_filename]:
        frame = frame.f_back
    return frame


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of the user in a traceback, ``train.py:12``; "" if there is none."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if not is_library[file]:
            return f"{Path(file).name}:{line}"
    return ""
