"""The path of the module that runs, in the model that a function such as `functional_call` got. The stack tells it."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Final
from weakref import WeakKeyDictionary

from torch import nn

from fspmd.torch_internals import module_call

_CALL: Final = module_call.__code__
#: model -> module -> its path in the model; None for a module of another model
_paths: Final[WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, str | None]]] = WeakKeyDictionary()


def name_modules_of(model: nn.Module) -> None:
    """Make the modules of a model known to `path_of`, from now on."""
    if model not in _paths:
        _paths[model] = WeakKeyDictionary()


def path_of(frame: FrameType | None) -> str:
    """The path of the innermost module that runs at a frame, such as ``layers.0.mlp.up``.

    It is empty for a model itself, and where no module runs. The path of a module of no known model begins at the
    outermost module that runs.
    """
    running = []
    for module in _running(frame):
        running.append(module)
        if (path := _known(module)) is not None:
            return path
    if not running:
        return ""
    name_modules_of(running[-1])
    return next((path for module in running if (path := _known(module)) is not None), "")


def _running(frame: FrameType | None) -> Iterator[nn.Module]:
    """The modules whose calls are on the stack, innermost first."""
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back


def _known(module: nn.Module) -> str | None:
    """The longest path of a module in any known model. A part of a model may have been called as a model, too."""
    models = [model for ref in _paths.keyrefs() if (model := ref()) is not None]
    return max((path for model in models if (path := _path(model, module)) is not None), key=len, default=None)


def _path(model: nn.Module, module: nn.Module) -> str | None:
    """The path of a module in a model, which may have got other modules since the last call."""
    paths = _paths[model]
    if module not in paths or ((path := paths[module]) is not None and not _is_path_of(model, path, module)):
        paths.update({part: path for path, part in model.named_modules()})
        if module not in paths or not _is_path_of(model, paths[module] or "", module):
            paths[module] = None
    return paths[module]


def _is_path_of(model: nn.Module, path: str, module: nn.Module) -> bool:
    try:
        return model.get_submodule(path) is module
    except AttributeError:
        return False
