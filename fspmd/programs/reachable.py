"""The values that a function reaches: by its closure, globals, modules, defaults, ``self`` and its class.

The search runs none of the user's Python: the garbage collector says which objects an object holds. Python that runs as
one step, as `rank_map` does, must not reach values of the record.
"""

from __future__ import annotations

import functools
import gc
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor

from fspmd.errors import RecordError, ValuesNeededError
from fspmd.inspection.causes import LIBRARIES
from fspmd.local_view.python_step import write_of_python
from fspmd.local_view.type_rules import tensors_of
from fspmd.programs.program import memory_of
from fspmd.programs.refusals import line, written_by
from fspmd.sharded import Sharded
from fspmd.tracing import DispatchMode
from fspmd.transport.local_tensor import blocks_of

_DEPTH: Final = 12
_OF_PYTHON: Final = 1 << 9  # a flag of classes that a class statement made
_MOST: Final = 10_000  # objects that are looked at
_ATOMS: Final = frozenset({bool, int, float, complex, str, bytes, type(None), types.CodeType})
_CLOSED: Final = (Tensor, types.ModuleType)  # kinds that are not searched
_Cached: Final = type(functools.cache(len))
_WRAPPERS: Final = (types.MethodType, types.BuiltinMethodType, property, staticmethod, classmethod, functools.partial)
_HOLDERS: Final = (*_WRAPPERS, list, tuple, set, frozenset, deque, dict)  # made in C


def reachable_from(*given: Any) -> Iterator[Any]:
    """The objects, each once, at most twelve steps from those given."""
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
        if not _is_of_library(x):  # libraries hold none that users gave
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
    """Reads an attribute of a class without asking its metaclass."""
    return type.__dict__[name].__get__


_FLAGS, _BASES, _ATTRIBUTES = map(_of_type, ("__flags__", "__bases__", "__dict__"))


def _is_of_library(f: types.FunctionType) -> bool:
    return f.__code__.co_filename.startswith(LIBRARIES) or str(f.__module__).startswith(("numpy.", "scipy."))


def _named(values: dict[str, Any], names: frozenset[str], depth: int = 0) -> Iterator[Any]:
    """The values of names among the globals of a function, and in the modules among them."""
    for name in names & values.keys():
        one = values[name]
        yield one
        if issubclass(type(one), types.ModuleType) and depth < _DEPTH:
            inside = object.__getattribute__(one, "__dict__")  # asking a lazy module would load it
            if not str(inside.get("__file__")).startswith(LIBRARIES):
                yield from _named(inside, names, depth + 1)


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # the cell has no value yet
        return False


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that code, and functions within, look up."""
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _names(one)


def check_reachable(function: Callable[..., Any], recorder: Any) -> None:
    """Raise `RecordError` where a function, before it runs, reaches values of the record."""
    if recorder.is_fake:
        raise recorder.refusal(
            ValuesNeededError(
                "jit(f).lower(...) knows shapes alone, and the results of rank_map may depend on values; call jit(f), "
                f"or lower the parts before and after it{line()}"
            )
        )
    for x in reachable_from(function):
        _check_stranger(x.local if type(x) is Sharded else x, recorder)


@contextmanager
def given_alone(given: Any, recorder: Any) -> Iterator[None]:
    """Within, using other values of the record than those given, or writing into these, raises `RecordError`."""
    blocks = [block for x in tensors_of(given) for block in blocks_of(x)]
    objects, memory = set(map(id, (*tensors_of(given), *blocks))), set(map(memory_of, blocks))

    def check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for x in tensors_of((*args, *kwargs.values())):
            if id(x) not in objects:
                _check_stranger(x, recorder)
        if any(memory_of(block) in memory for x in written_by(func, args, kwargs) for block in blocks_of(x)):
            raise recorder.refusal(write_of_python())

    with _Looks(check):
        yield


def _check_stranger(x: Any, recorder: Any) -> None:
    """Raise `RecordError` for a value of the record."""
    if isinstance(x, Tensor) and recorder.is_value(x):
        raise recorder.refusal(
            RecordError(
                f"jit cannot record a function that rank_map runs and that closes over a tensor of shape "
                f"{tuple(x.shape)} which the jitted function was given or has computed: it would be a constant of "
                f"the record. Pass it as an argument: rank_map(fn, x, y){line()}"
            )
        )


class _Looks(DispatchMode):
    """A mode that checks each call."""

    def __init__(self, check: Callable[..., None]) -> None:
        super().__init__()
        self.check = check

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.check(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
