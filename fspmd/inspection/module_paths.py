"""Which module runs: its path in the model that `functional_call` and its kin were given, read off the stack."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Final
from weakref import WeakKeyDictionary

from torch import nn

from fspmd.torch_internals import module_call

_CALL: Final = module_call.__code__
#: by model, the path of each of its modules; None for a module of another model
_paths: Final[WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, str | None]]] = WeakKeyDictionary()


def name_modules_of(model: nn.Module) -> None:
    """Have `path_of` name the modules of a model from here on."""
    if model not in _paths:
        _paths[model] = WeakKeyDictionary()


def path_of(frame: FrameType | None) -> str:
    """``layers.0.mlp.up`` of the innermost module whose call this frame is a part of; empty for a model itself, and
    where no module runs.

    A module of no known model is named from the outermost module that runs.
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
    """The modules that are called, innermost first."""
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back


def _known(module: nn.Module) -> str | None:
    """The longest path: a part of a model may have been called as a model of its own."""
    models = [model for ref in _paths.keyrefs() if (model := ref()) is not None]
    return max((path for model in models if (path := _path(model, module)) is not None), key=len, default=None)


def _path(model: nn.Module, module: nn.Module) -> str | None:
    known = _paths[model]
    if module not in known or ((path := known[module]) is not None and not _leads(model, path, module)):
        known.update({one: path for path, one in model.named_modules()})
        if module not in known or not _leads(model, known[module] or "", module):
            known[module] = None
    return known[module]


def _leads(model: nn.Module, path: str, module: nn.Module) -> bool:
    try:
        return model.get_submodule(path) is module
    except AttributeError:
        return False
