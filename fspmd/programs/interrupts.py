"""Recordings that an interrupt, such as Ctrl-C, or a `RecursionError` may end between any two calls.

Torch's own contexts then leave modes behind, or take away modes that are not theirs: a fake mode would stay active, in
which no later tensor has values.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from itertools import takewhile
from traceback import clear_frames
from typing import Final, ParamSpec, TypeVar

from fspmd import tracing
from fspmd.torch_internals import (
    count_function_modes,
    dispatch_mode_stack,
    function_mode_at,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
)

Q = ParamSpec("Q")
R = TypeVar("R")


def unwound(record: Callable[Q, R]) -> Callable[Q, R]:
    """Return a function that records, and after an exception leaves torch's modes as they were before.

    An interrupt is raised itself, and not the error of a context that it has kept from ending.
    """

    @functools.wraps(record)
    def run(*args: Q.args, **kwargs: Q.kwargs) -> R:
        modes, depth, handled = [entered() for entered, _, _ in _STACKS], tracing.depth(), sys.exc_info()[1]
        try:
            return record(*args, **kwargs)
        except BaseException as error:
            errors = list(takewhile(lambda each: each is not handled, _behind(error)))
            try:
                for each in filter(_is_stray, errors):
                    clear_frames(each.__traceback__)  # contexts that wait there would end later, and push modes then
            finally:
                try:
                    _restore(modes, depth)
                finally:
                    _restore(modes, depth)
            interrupt = next((each for each in errors if not isinstance(each, (Exception, GeneratorExit))), error)
            if interrupt is error:
                raise
            raise interrupt from None

    return run


def _is_stray(error: BaseException) -> bool:
    """Return whether an error may be raised between any two calls."""
    return isinstance(error, (RecursionError, MemoryError)) or not isinstance(error, Exception)


def _behind(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those in whose handling it was raised."""
    while error is not None:
        yield error
        error = error.__context__


def _function_modes() -> list[object]:
    return [function_mode_at(i) for i in range(count_function_modes())]


#: of dispatch modes and of function modes: what lists those that are entered, leaves the last one, and enters one
_STACKS: Final[tuple[tuple[Callable[[], list[object]], Callable[[], object], Callable[[object], object]], ...]] = (
    (dispatch_mode_stack, pop_dispatch_mode, push_dispatch_mode),
    (_function_modes, pop_function_mode, push_function_mode),
)


def _restore(modes: list[list[object]], depth: int) -> None:
    tracing.go_back(depth)
    for (entered, leave, enter), before in zip(_STACKS, modes, strict=True):
        now = entered()
        if list(map(id, now)) != list(map(id, before)):
            for _ in now:
                leave()
            for mode in before:
                enter(mode)
