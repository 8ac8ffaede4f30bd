"""Generators of random numbers while a program is recorded: which are known, and whether they are left alone."""

from __future__ import annotations

import functools
import inspect
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fspmd.errors import RecordError
from fspmd.programs.escapes import constant_of, line
from fspmd.transport.randomness import outside_transforms
from fspmd.watching.causes import LIBRARIES


class Generators:
    """Whether generators are left alone between the steps that draw from them.

    Between steps each has a state that nobody knows, so that whoever sets one is found out, though it be to the state
    that it had: the same call would set it in a replay, too, when it has another.
    """

    def __init__(self, given: Iterable[torch.Generator]) -> None:
        # by number, since torch gives dispatch another object
        self.known: dict[int, torch.Generator] = {_number(one): one for one in (torch.default_generator, *given)}
        self.python = random.getstate()
        self.own: dict[int, Tensor] = {}  # the states that they are to have
        self.secret = int.from_bytes(b"secrets", "big")  # the seed that they have between steps
        self.before: dict[tuple[int, int], Tensor] = {}  # what they were to have at earlier ones

    def hide(self) -> None:
        """A step has ended."""
        self.secret += 1
        for key, one in self.known.items():
            self.own[key] = self.before[key, self.secret] = _state(one)
            one.manual_seed(self.secret)

    def restore(self) -> None:
        """Whatever was set since, they are left alone again."""
        for one in self.known.values():
            one.manual_seed(self.secret)

    def show(self) -> None:
        """A step, or what follows the record, begins."""
        for key, one in self.known.items():
            if self._is_hidden(key):
                one.set_state(self.own[key])

    def check(self, used: Iterable[Any] = ()) -> None:
        """Raises where somebody has set one between steps, or where a step draws from one that is not known."""
        if not all(map(self._is_hidden, self.known)):
            raise RecordError(
                "jit cannot record what sets the state of a generator, as torch.manual_seed, set_rng_state and "
                f"fork_rng do; do it outside of the jitted function{line()}"
            )
        for generator in used:
            if _number(generator) not in self.known:
                raise RecordError(
                    "jit cannot record random numbers of a torch.Generator that is made within the function, or lies "
                    "too deep in what it closes over to be found before, since it could not tell whether it is made or "
                    f"seeded anew each time; pass it as an argument, or close over it{line()}"
                )

    def check_python(self) -> None:
        """Raises where Python's own generator was used."""
        if random.getstate() != self.python:
            raise constant_of("numbers of Python's module random, which torch does not know")

    def _is_hidden(self, key: int) -> bool:
        """Whether one has the state that it was left with; or was left with earlier, when it was to have the same."""
        one = self.known[key]
        with outside_transforms(), _disable_current_modes(), torch._C.DisableTorchFunction():  # states have values
            was = self.before.get((key, one.initial_seed()))
            if was is None or not torch.equal(was, self.own[key]):
                return False
            return torch.equal(_state(one), _state(torch.Generator(one.device).manual_seed(one.initial_seed())))


def _number(generator: Any) -> int:
    return generator._cdata  # type: ignore[no-any-return]


def _state(generator: torch.Generator) -> Tensor:
    with outside_transforms(), torch._C.DisableTorchFunction():
        return generator.get_state()


def generators_of(values: Iterable[Any]) -> list[torch.Generator]:
    """Those among arguments, and in containers of them."""
    found: list[torch.Generator] = []
    for value in values:
        if isinstance(value, torch.Generator):
            found.append(value)
        elif isinstance(value, dict):
            found += generators_of(value.values())
        elif type(value) in (list, tuple):
            found += generators_of(value)
    return found


_DEPTH: Final = 8
_MOST: Final = 10_000  # things that are looked at


def closed_over(f: Callable[..., Any]) -> list[torch.Generator]:
    """Those that a function reaches: by its closure, globals, defaults, attributes of ``self``, and what these hold."""
    seen: dict[int, Any] = {}
    found = []
    waiting: deque[tuple[Any, int]] = deque([(f, 0)])
    while waiting and len(seen) < _MOST:
        x, depth = waiting.popleft()
        if id(x) in seen:
            continue
        seen[id(x)] = x
        if isinstance(x, torch.Generator):
            found.append(x)
        elif depth < _DEPTH:
            waiting += [(one, depth + 1) for one in _held(x)]
    return found


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
