"""The values that a function reaches through its closure, globals, modules, defaults, ``self`` and its class.

The search runs none of the user's Python: the garbage collector lists the objects that an object holds. Python that
runs as one step, as in `rank_map`, must not reach values of the record. Random draws are steps; the function must not
set the seeds of the generators that it reaches.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.errors import RecordError, ValuesNeededError
from fspmd.local_view.rank_map import write_of_python
from fspmd.ops.traits import tensors_in
from fspmd.programs.program import memory_of
from fspmd.programs.refusals import line, written_by
from fspmd.sharded import Sharded
from fspmd.torch_internals import address_of
from fspmd.tracing import DispatchMode, unseen
from fspmd.transport.local_tensor import blocks_of
from fspmd.transport.randomness import go_on, kept_states
from fspmd.user_code import LIBRARIES

_DEPTH: Final = 12
_OF_PYTHON: Final = 1 << 9  # a flag of classes that a class statement made
_MOST: Final = 10_000  # objects that are searched
_ATOMS: Final = frozenset({bool, int, float, complex, str, bytes, type(None), types.CodeType})
_CLOSED: Final = (Tensor, types.ModuleType)  # kinds that are not searched
_Cached: Final = type(functools.cache(len))
_WRAPPERS: Final = (types.MethodType, types.BuiltinMethodType, property, staticmethod, classmethod, functools.partial)
_HOLDERS: Final = (*_WRAPPERS, list, tuple, set, frozenset, deque, dict)  # made in C


def reachable_from(*given: Any) -> Iterator[Any]:
    """The objects within ``_DEPTH`` references of those given, each once."""
    seen: dict[int, Any] = {}
    waiting: deque[tuple[Any, int]] = deque((x, 0) for x in given)
    while waiting and len(seen) < _MOST:
        x, depth = waiting.popleft()
        if id(x) in seen:
            continue
        seen[id(x)] = x
        yield x
        if depth < _DEPTH:
            waiting += [(y, depth + 1) for y in _referents(x) if type(y) not in _ATOMS]


def _referents(x: Any) -> Iterator[Any]:
    """The objects that an object refers to."""
    kind = type(x)
    if kind is types.FunctionType:
        yield from (cell.cell_contents for cell in x.__closure__ or () if _is_full(cell))
        yield from (x.__defaults__, x.__kwdefaults__, x.__dict__)
        if not _is_of_library(x):  # globals of libraries hold no values of users
            yield from _named(x.__globals__, frozenset(_names(x.__code__)))
    elif issubclass(kind, type):
        if _FLAGS(x) & _OF_PYTHON:
            yield from _BASES(x)  # a library may derive a class from that of a user, as torch's parametrizations do
            yield from _members(x)
    elif kind is _Cached:
        yield x.__wrapped__
    elif issubclass(kind, _HOLDERS) or (_FLAGS(kind) & _OF_PYTHON and not issubclass(kind, _CLOSED)):
        yield kind
        yield from gc.get_referents(x)[:_MOST]


def _of_type(name: str) -> Any:
    """A function that reads an attribute of a class without its metaclass."""
    return type.__dict__[name].__get__


_FLAGS, _BASES, _ATTRIBUTES = map(_of_type, ("__flags__", "__bases__", "__dict__"))


def _members(x: type) -> Iterator[Any]:
    """The attributes of a class. Of a library's class only functions and generators that users have put there."""
    attributes = _ATTRIBUTES(x)
    home = attributes.get("__module__")
    if not (type(home) is str and _is_library(sys.modules.get(home))):
        return (value for name, value in attributes.items() if name != "__annotations__")
    functions = (value for value in attributes.values() if type(value) is types.FunctionType)
    generators = (value for value in attributes.values() if issubclass(type(value), torch.Generator))
    return itertools.chain((f for f in functions if not _is_of_library(f)), generators)


def _is_of_library(f: types.FunctionType) -> bool:
    return f.__code__.co_filename.startswith(LIBRARIES) or str(f.__module__).startswith(("numpy.", "scipy."))


def _is_library(module: Any) -> bool:
    """Whether a module is of a library, whose globals hold no values of users."""
    if not issubclass(type(module), types.ModuleType):
        return False
    attributes = object.__getattribute__(module, "__dict__")  # `getattr` would load a lazy module
    return str(attributes.get("__file__")).startswith(LIBRARIES)


def _named(values: dict[str, Any], names: frozenset[str], depth: int = 0) -> Iterator[Any]:
    """The values of names among the globals of a function, and in modules among these values."""
    for name in names & values.keys():
        value = values[name]
        yield value
        if issubclass(type(value), types.ModuleType) and depth < _DEPTH and not _is_library(value):
            yield from _named(object.__getattribute__(value, "__dict__"), names, depth + 1)


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # the cell has no value yet
        return False


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that code and its inner functions look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def check_reachable(function: Callable[..., Any], recorder: Any) -> None:
    """Raise `RecordError` where a function that has not run yet reaches values of the record."""
    if recorder.is_fake:
        raise recorder.refusal(
            ValuesNeededError(
                "jit(f).lower(...) has shapes alone, but got a call of rank_map, whose results may depend on values; "
                f"call jit(f), or lower the parts before and after it{line()}"
            )
        )
    for x in reachable_from(function):
        _check_no_value(x.local if type(x) is Sharded else x, recorder)


@contextmanager
def given_alone(given: Any, recorder: Any) -> Iterator[None]:
    """Within, a use of a value of the record that is not given, or a write into a given value, raises `RecordError`."""
    blocks = [block for x in tensors_in(given) for block in blocks_of(x)]
    objects, memory = set(map(id, (*tensors_in(given), *blocks))), set(map(memory_of, blocks))

    def check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for x in tensors_in((*args, *kwargs.values())):
            if id(x) not in objects:
                _check_no_value(x, recorder)
        if any(memory_of(block) in memory for x in written_by(func, args, kwargs) for block in blocks_of(x)):
            raise recorder.refusal(write_of_python())

    with _CheckingMode(check):
        yield


def _check_no_value(x: Any, recorder: Any) -> None:
    """Raise `RecordError` for a value of the record."""
    if isinstance(x, Tensor) and recorder.is_value(x):
        raise recorder.refusal(
            RecordError(
                f"jit cannot record a function that rank_map runs: the function closes over a tensor of shape "
                f"{tuple(x.shape)} that is an argument of the jitted function or was computed in it, and that would "
                f"be a constant of the record. Pass it as an argument: rank_map(fn, x, y){line()}"
            )
        )


class _CheckingMode(DispatchMode):
    """A mode that checks each call."""

    def __init__(self, check: Callable[..., None]) -> None:
        super().__init__()
        self.check = check

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.check(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Generators:
    """torch's default generator, and the generators that the function gets or reaches.

    A draw is a step of the record. A seed or a state that the function reads is a constant of the record.
    """

    def __init__(self, given: Iterable[Any], is_fake: bool) -> None:
        """``given``: values with generators among them. ``is_fake``: steps draw nothing while they are recorded."""
        generators = [torch.default_generator, *(x for x in given if issubclass(type(x), torch.Generator))]
        # by number, since torch passes another object to dispatch
        self._known: dict[int, torch.Generator] = {_number(generator): generator for generator in generators}
        self._seeds = {key: generator.initial_seed() for key, generator in self._known.items()}
        self._is_fake = is_fake

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within, each generator has drawn one number more, so its state equals that of its seed only after seeding."""
        with self.kept(draws=True):
            yield

    @contextmanager
    def kept(self, draws: bool = False) -> Iterator[None]:
        """Restore the states of the generators at the end. ``draws``: each draws one number at the beginning."""
        with unseen():
            default_states = kept_states()
            states: dict[int, Tensor] = {key: generator.get_state() for key, generator in self._known.items()}
            for generator in self._known.values() if draws else ():
                torch.empty((), device=generator.device).uniform_(generator=generator)
        try:
            yield
        finally:
            with unseen():
                go_on(default_states)
                for key, generator in self._known.items():
                    generator.set_state(states[key])

    def check_draw(self, arguments: Iterable[Any]) -> None:
        """Raise `RecordError` where a step draws from a generator that the function has made or seeded."""
        if self._is_fake:  # steps that run on values set seeds, and restore them
            self._check_seeds()
        for generator in generators_of(arguments):
            if _number(generator) not in self._known:
                raise RecordError(
                    "jit cannot record random numbers of a torch.Generator that the function makes, or that lies too "
                    "deep in its closure to be found, since the function might make or seed it anew in each call; "
                    f"pass it as an argument, or close over it{line()}"
                )

    def check_end(self) -> None:
        """Raise `RecordError` where the function has seeded a generator, also where the seed is the same as before.

        Modes must not see the call.
        """
        self._check_seeds()
        for generator in self._known.values() if self._is_fake else ():
            seeded = torch.Generator(generator.device).manual_seed(generator.initial_seed())
            if torch.equal(seeded.get_state(), generator.get_state()):
                raise _sets_state()

    def _check_seeds(self) -> None:
        if any(generator.initial_seed() != self._seeds[key] for key, generator in self._known.items()):
            raise _sets_state()


def _sets_state() -> RecordError:
    return RecordError(
        "jit cannot record a function that sets the state of a generator, as torch.manual_seed and set_rng_state do; "
        f"set it outside of the jitted function{line()}"
    )


def _number(generator: Any) -> int:
    return address_of(generator)  # type: ignore[no-any-return]


def generators_of(values: Iterable[Any]) -> Iterator[torch.Generator]:
    """The generators among values, and in their lists, tuples and dicts."""
    for value in values:
        if isinstance(value, torch.Generator):
            yield value
        elif isinstance(value, dict):
            yield from generators_of(value.values())
        elif type(value) in (list, tuple):
            yield from generators_of(value)
