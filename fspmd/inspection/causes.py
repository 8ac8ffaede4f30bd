"""The cause of a communication. It is read off the stack, so that it costs nothing while nobody watches."""

from __future__ import annotations

import functools
import linecache
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

import optree
import torch

from fspmd.global_view.refusals import shown
from fspmd.inspection.module_paths import path_of
from fspmd.torch_internals import current_autograd_node

_HERE: Final = str(Path(__file__).parents[1])
_RECORDERS: Final = f"{_HERE}/programs/"  # runs functions of the user
#: folders of code that is not the user's
LIBRARIES: Final = (_HERE, *(str(Path(file).parent) for file in (torch.__file__, optree.__file__) if file))
_DISPATCH: Final = f"{_HERE}/global_view/dispatch.py"
#: the function that lays out values for a style
_STYLES: Final = f"{_HERE}/modules/plans.py", "_arranged"
#: the function that runs torch functions whose results depend on values, on global tensors
_GATHERED: Final = f"{_HERE}/global_view/unruled.py", "gathered"
#: file -> the function in it whose argument ``func`` is a torch function
_OPS: Final = {_DISPATCH: "dispatch", f"{_HERE}/local_view/tracking.py": "__torch_function__"}
#: file -> the public name, where the outermost of our functions has another name
_NAMES: Final = {
    "entry.py": "shard_map entry",
    "exit.py": "shard_map exit",
    "shard_map.py": "shard_map",
    "parallel.py": "parallelize",
    "hooks.py": "autograd.Function.apply",
    "transforms.py": "torch.func",
}


@dataclass(frozen=True, slots=True)
class Cause:
    """The torch function or the function of fspmd that the user called, and the user's line.

    Attributes:
        what: The name of the function.
        written: The user asked for the communication itself, and not for a computation that implies it.
        why: The reason why no plan moves less; empty where there is none.
        module: The path of the module that ran, ``layers.0.mlp.up``; empty for the model itself, and where no module
            ran.
    """

    what: str
    written: bool
    file: str = ""
    line: int = 0
    why: str = ""
    module: str = field(default="", compare=False)

    @property
    def by(self) -> str:
        """``layers.0.mlp.up: linear()``: the module, and the function that it called."""
        named = not self.module or self.what.startswith(f"{self.module}: ")  # the cause is a style of the module
        return self.what if named else f"{self.module}: {self.what}"

    @property
    def where(self) -> str:
        """``train.py:12``."""
        return f"{Path(self.file).name}:{self.line}" if self.file else "?"

    @property
    def text(self) -> str:
        """The user's line."""
        return linecache.getline(self.file, self.line).strip()


@dataclass(frozen=True, slots=True)
class Trace:
    """The frames between a communication and the user's line that caused it."""

    dispatches: tuple[FrameType, ...]  # frames of `dispatch`, innermost first
    user: FrameType | None
    cause: Cause


class _File(NamedTuple):
    """The owner of the code in a file."""

    is_library: bool  # torch's, optree's or ours, and not the user's
    is_ours: bool  # a public function may be in it, or code that a public function calls
    op: str  # the function that `_OPS` names
    name: str


@functools.lru_cache(maxsize=4096)
def _file(path: str) -> _File:
    is_ours = path.startswith(_HERE) and not path.startswith(_RECORDERS)
    return _File(path.startswith(LIBRARIES), is_ours, _OPS.get(path, ""), Path(path).name)


def trace() -> Trace:
    """Find the cause of the call that runs: the nearest frame that is neither ours nor torch's, and the function that
    it called."""
    dispatches: list[FrameType] = []
    op: FrameType | None = None
    outermost: FrameType | None = None
    style = edges = why = ""  # the style that lays out values; the file of a body's entries or exits
    frame: FrameType | None = sys._getframe(1)
    innermost = frame
    while frame is not None and (file := _file((code := frame.f_code).co_filename)).is_library:
        if file.is_ours:
            outermost = frame
            if code.co_name == file.op:
                op = frame
                if code.co_filename == _DISPATCH:
                    dispatches.append(frame)
            elif (code.co_filename, code.co_name) == _STYLES:
                style = f"{frame.f_locals['self'].path or 'the module'}: {type(frame.f_locals['style']).__name__}"
            elif (code.co_filename, code.co_name) == _GATHERED:
                why = "its result, or the shape of it, depends on values"
            elif file.name in ("entry.py", "exit.py"):
                edges = file.name
        frame = frame.f_back
    what = shown(op.f_locals["func"]) if op is not None else style or _name(outermost, edges)
    written = op is None and what != _NAMES["hooks.py"]
    place = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)
    return Trace(tuple(dispatches), frame, Cause(what, written, *place, why, path_of(innermost)))


def _name(outermost: FrameType | None, edges: str) -> str:
    """The public name of the outermost of our functions."""
    if outermost is None or current_autograd_node() is not None:
        return "backward()"
    file = _file(outermost.f_code.co_filename).name
    if file == "shard_map.py" and edges:
        return _NAMES[edges]
    return _NAMES.get(file) or outermost.f_code.co_qualname.partition(".<locals>")[0]
