"""What a function reaches: by its closure, globals, defaults, attributes of ``self``, and what these hold."""

from __future__ import annotations

import functools
import inspect
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.watching.causes import LIBRARIES

_DEPTH: Final = 8
_MOST: Final = 10_000  # things that are looked at


def reached(f: Callable[..., Any]) -> Iterator[Any]:
    """The things, each once, as far as eight steps from the function."""
    seen: dict[int, Any] = {}
    waiting: deque[tuple[Any, int]] = deque([(f, 0)])
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
        if not x.__code__.co_filename.startswith(LIBRARIES):  # they hold none that users gave
            yield from (x.__globals__[name] for name in _names(x.__code__) if name in x.__globals__)
    elif isinstance(x, types.MethodType):
        yield from (x.__func__, x.__self__)
    elif isinstance(x, functools.partial):
        yield from (x.func, *x.args, *x.keywords.values())
    elif isinstance(x, (list, tuple, set, frozenset)):
        yield from x
    elif isinstance(x, dict):
        yield from x.values()
    elif not isinstance(x, (Tensor, type, types.ModuleType)):
        yield vars(type(x)).get("__call__")
        if isinstance(x, torch.nn.Module):
            yield inspect.getattr_static(type(x), "forward", None)  # that of TorchScript cannot be had of a type
        yield from getattr(x, "__dict__", {}).values()


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
