"""What a function reaches: by its closure, globals, modules, defaults, ``self`` and its class, and what these hold."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.watching.causes import LIBRARIES

_DEPTH: Final = 8
_OF_PYTHON: Final = 1 << 9  # of classes that a class statement made, not C
_MOST: Final = 10_000  # things that are looked at


def reached(*given: Any) -> Iterator[Any]:
    """The things, each once, as far as eight steps from a function and from its arguments."""
    seen: dict[int, Any] = {}
    waiting: deque[tuple[Any, int]] = deque((x, 0) for x in given)
    while waiting and len(seen) < _MOST:
        x, depth = waiting.popleft()
        if id(x) in seen:
            continue
        seen[id(x)] = x
        yield x
        if depth < _DEPTH and not isinstance(x, torch.Generator):
            waiting += [(one, depth + 1) for one in _held(x)]


def _held(x: Any) -> Iterator[Any]:
    """What a thing holds, if generators may be among it."""
    if isinstance(x, types.FunctionType):
        yield from (cell.cell_contents for cell in x.__closure__ or () if _is_full(cell))
        yield from x.__defaults__ or ()
        yield from (x.__kwdefaults__ or {}).values()
        if not _is_of_library(x):  # they hold none that users gave
            yield from _named(x.__globals__, frozenset(_names(x.__code__)))
    elif isinstance(x, types.MethodType | types.BuiltinMethodType):
        yield from (getattr(x, "__func__", None), x.__self__)
    elif isinstance(x, functools.partial):
        yield from (x.func, *x.args, *x.keywords.values())
    elif isinstance(x, (list, tuple, set, frozenset, deque)):
        yield from x
    elif isinstance(x, dict):
        yield from x.values()
    elif isinstance(x, type):
        if not x.__flags__ & _OF_PYTHON:
            return
        yield from x.__bases__
        yield from map(_function, vars(x).values())
    elif not isinstance(x, (Tensor, types.ModuleType)):
        yield type(x)
        yield from getattr(x, "__dict__", {}).values()
        yield from (getattr(x, name, None) for kind in type(x).__mro__ for name in _slots(kind))


def _is_of_library(f: types.FunctionType) -> bool:
    return f.__code__.co_filename.startswith(LIBRARIES) or str(f.__module__).startswith(("numpy.", "scipy."))


def _function(x: Any) -> Any:
    """Of an attribute of a class the function, of properties and static methods, too."""
    return next((f for name in ("fget", "__func__") if isinstance(f := getattr(x, name, None), types.FunctionType)), x)


def _named(values: dict[str, Any], names: frozenset[str], depth: int = 0) -> Iterator[Any]:
    """What names mean among the globals of a function, and in modules that these name."""
    for name in names & values.keys():
        one = values[name]
        yield one
        if isinstance(one, types.ModuleType) and depth < _DEPTH and not _file(one).startswith(LIBRARIES):
            yield from _named(vars(one), names, depth + 1)


def _file(module: types.ModuleType) -> str:
    return getattr(module, "__file__", None) or ""


def _slots(kind: type) -> Iterator[str]:
    slots: Any = vars(kind).get("__slots__", ())
    yield from (slots,) if isinstance(slots, str) else slots


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # it has no value yet
        return False


def _names(code: types.CodeType) -> Iterator[str]:
    """Names that code, and functions that it makes, look up."""
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _names(one)
