"""The torch function mode that sees the calls of a body: one mode at a time, that of the innermost body.

While a mode is active, functions compiled by ``torch.compile`` run uncompiled. Where Dynamo breaks a graph, calls do
not reach the mode (torch 2.11 to 2.15), and values would have wrong types.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from sys import modules
from typing import Any, TypeVar

from torch.overrides import TorchFunctionMode

from fspmd.body import RUNNING, Body, state
from fspmd.torch_internals import (
    DYNAMO,
    SETS_STANCE,
    STANCE,
    EnableTorchFunction,
    frame_callback,
    function_modes,
    never_compile,
    pop_function_mode,
    push_function_mode,
    set_frame_callback,
)
from fspmd.tracing import is_traced

R = TypeVar("R")


class BodyMode(TorchFunctionMode):
    """The base of modes that see the torch calls of a body."""

    types_values = False


class _EagerInBodies:
    """A stance of torch's compiler, in whose place ``force_eager`` stands for a thread while its body has a mode."""

    __slots__ = ("_outside",)

    def __init__(self, outside: Any) -> None:
        self._outside = outside

    @property
    def stance(self) -> str:
        return "force_eager" if state.mode is not None else self._outside.stance

    def __getattr__(self, name: str) -> Any:
        if name == "_outside":  # a copy that is being made
            raise AttributeError(name)
        return getattr(self._outside, name)


def mode_above() -> BodyMode | None:
    """Return the mode of the enclosing body, if it is the topmost mode. `run_in` lifts it: one body sees each call."""
    modes = function_modes()  # also where a derivative has disabled them
    return modes[-1] if modes and isinstance(modes[-1], BodyMode) else None


def pop_ended_modes() -> None:
    """Pop modes of bodies, where no body runs.

    Torch takes a mode off while it runs a function that is written in Python. If this is interrupted, torch may put the
    mode back when the traceback is freed, after the body has ended. A body may also enter a mode and not leave it.
    """
    while mode_above() is not None:
        pop_function_mode()


def be_eager_in_bodies() -> None:
    """Let compiled functions run uncompiled in bodies with a mode, also where a compiled function has called the body.

    Called once the mode is on, if `DYNAMO` is imported. The caller restores the callback of its thread.
    """
    if frame_callback() is not None:
        set_frame_callback(None)
    compiler, name = modules[STANCE[0]], STANCE[1]
    stance = getattr(compiler, name, None)  # another thread may be importing it
    if stance is not None and type(stance) is not _EagerInBodies:
        setattr(compiler, name, _EagerInBodies(stance))
        _wrap_set_stance()


def _wrap_set_stance() -> None:
    """Let a stance that a body sets stand outside of bodies alone, as any other."""
    decorators, name = modules[SETS_STANCE[0]], SETS_STANCE[1]
    set_stance = getattr(decorators, name)
    if hasattr(set_stance, "__wrapped__"):
        return

    @functools.wraps(set_stance)  # with torch's mark that no compiled function may call it
    def set_outside(stance: Any) -> Any:
        return set_stance(stance if type(stance) is _EagerInBodies else _EagerInBodies(stance))

    setattr(decorators, name, set_outside)


def restore_modes(above: BodyMode | None, mode: BodyMode | None) -> None:
    """Restore the modes after an exception in a body, which an interrupt may have raised between any two calls.

    Args:
        above: The mode that was lifted.
        mode: The mode of the body.
    """
    while mode is not None and is_active(mode):
        pop_function_mode()
    if above is not None and not is_active(above):
        push_function_mode(above)


def leave_to_python(function: Any, why: str, *, all_within: bool = True) -> None:
    """Make ``torch.compile`` call a function uncompiled, or raise with ``fullgraph=True`` and under strict export.

    This is ``torch.compiler.disable`` without a wrapper. Dynamo's error says what to write, and ``why``. Functions that
    this one calls are not compiled either, unless ``all_within`` is False.
    """
    write = "write torch.compile(f) without fullgraph=True, and fspmd.jit(f).lower(*args) instead of torch.export"
    never_compile(function, f"{write}: {why}", all_within=all_within)


leave_to_python(is_traced, "a graph of torch has no collectives")


def is_active(mode: BodyMode) -> bool:
    """Return whether a mode sees torch calls now. It sees none while it handles a torch function."""
    return any(active is mode for active in function_modes())


def run_in(body: Body | None, mode: BodyMode | None, function: Callable[..., R], *args: Any) -> R:
    """Run a function in a body again, in backward for example: its axes are bound, and ``mode`` sees each call once.

    Python raises an interrupt after a call, and at the start of a function. So what is set is restored in this
    function, by assignments, and by calls that may be repeated.
    """
    outer, outer_tracker, outer_mode, above = state.body, state.tracker, state.mode, mode_above()
    callback, run = frame_callback(), object()
    try:
        RUNNING[run] = body
        state.body, state.tracker = body, mode if mode is not None and mode.types_values else None
        state.mode = mode
        if outer is None:
            state.collectives = 0
        with EnableTorchFunction():  # backward may have started with torch functions disabled
            if above is not None:
                pop_function_mode()
            if mode is not None:
                push_function_mode(mode)
                if DYNAMO in modules:
                    be_eager_in_bodies()
            out = function(*args)
            if mode is not None:
                pop_function_mode()
            if above is not None:
                push_function_mode(above)
        return out
    except BaseException:
        try:
            restore_modes(above, mode)
        finally:
            restore_modes(above, mode)
        raise
    finally:
        state.body, state.tracker, state.mode = outer, outer_tracker, outer_mode
        try:
            if callback is not None:
                set_frame_callback(callback)
        finally:
            RUNNING.pop(run, None)
