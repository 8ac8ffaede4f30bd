"""What a function reaches: by its closure, globals, modules, defaults, ``self`` and its class, and what these hold.

None of the user's Python is run for that: the garbage collector says what objects hold; their classes are not asked.
"""

from __future__ import annotations

import functools
import gc
import types
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from torch import Tensor

from fspmd.watching.causes import LIBRARIES

_DEPTH: Final = 12
_OF_PYTHON: Final = 1 << 9  # of classes that a class statement made, not C
_MOST: Final = 10_000  # things that are looked at
_ATOMS: Final = frozenset({bool, int, float, complex, str, bytes, type(None), types.CodeType})
_CLOSED: Final = (Tensor, types.ModuleType)  # kinds, also of the user's, of which nobody looks inside
_Cached: Final = type(functools.cache(len))
_WRAPPERS: Final = (types.MethodType, types.BuiltinMethodType, property, staticmethod, classmethod, functools.partial)
_HOLDERS: Final = (*_WRAPPERS, list, tuple, set, frozenset, deque, dict)  # which C made


def reached(*given: Any) -> Iterator[Any]:
    """The things, each once, as far as twelve steps from a function and from its arguments."""
    seen: dict[int, Any] = {}
    waiting: deque[tuple[Any, int]] = deque((x, 0) for x in given)
    while waiting and len(seen) < _MOST:
        x, depth = waiting.popleft()
        if id(x) in seen:
            continue
        seen[id(x)] = x
        yield x
        if depth < _DEPTH:
            waiting += [(one, depth + 1) for one in _held(x) if type(one) not in _ATOMS]


def _held(x: Any) -> Iterator[Any]:
    kind = type(x)
    if kind is types.FunctionType:
        yield from (cell.cell_contents for cell in x.__closure__ or () if _is_full(cell))
        yield from (x.__defaults__, x.__kwdefaults__, x.__dict__)
        if not _is_of_library(x):  # they hold none that users gave
            yield from _named(x.__globals__, frozenset(_names(x.__code__)))
    elif issubclass(kind, type):
        if _FLAGS(x) & _OF_PYTHON:
            yield from _BASES(x)
            yield from (one for name, one in _ATTRIBUTES(x).items() if name != "__annotations__")
    elif kind is _Cached:
        yield x.__wrapped__
    elif issubclass(kind, _HOLDERS) or (_FLAGS(kind) & _OF_PYTHON and not issubclass(kind, _CLOSED)):
        yield kind
        yield from gc.get_referents(x)[:_MOST]


def _of_type(name: str) -> Any:
    """What tells something of a class, where its metaclass may have its own say."""
    return type.__dict__[name].__get__


_FLAGS, _BASES, _ATTRIBUTES = map(_of_type, ("__flags__", "__bases__", "__dict__"))


def _is_of_library(f: types.FunctionType) -> bool:
    return f.__code__.co_filename.startswith(LIBRARIES) or str(f.__module__).startswith(("numpy.", "scipy."))


def _named(values: dict[str, Any], names: frozenset[str], depth: int = 0) -> Iterator[Any]:
    """What names mean among the globals of a function, and in modules that these name."""
    for name in names & values.keys():
        one = values[name]
        yield one
        if issubclass(type(one), types.ModuleType) and depth < _DEPTH:
            inside = object.__getattribute__(one, "__dict__")  # lazy modules load when they are asked for it
            if not str(inside.get("__file__")).startswith(LIBRARIES):
                yield from _named(inside, names, depth + 1)


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
