"""The torch function mode that sees the calls of a body: one mode at a time, that of the innermost body.

While a mode is active, functions compiled by ``torch.compile`` run uncompiled. Where Dynamo breaks a graph, calls do
not reach the mode (torch 2.11 to 2.15), and values would have wrong types.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from sys import modules
from typing import Any, Final, TypeVar

from torch.overrides import TorchFunctionMode

from fspmd.body import RUNNING, Body, state
from fspmd.errors import ArgumentError
from fspmd.torch_internals import (
    EnableTorchFunction,
    compiled_frames,
    compiler_stances,
    count_function_modes,
    eval_frame,
    function_mode_at,
    pop_function_mode,
    push_function_mode,
)

R = TypeVar("R")


class BodyMode(TorchFunctionMode):
    """The base of modes that see the torch calls of a body."""

    types_values = False


_stance_lock: Final = threading.Lock()
#: the stance that torch's compiler had before; it is one for all threads: the first mode sets it, the last resets it
_STANCE: Final[list[Any]] = []
#: key of a run, as in `RUNNING` -> the callback of Dynamo before it
_CALLBACKS: Final[dict[object, Any]] = {}
_get_callback, _set_callback = eval_frame.get_eval_frame_callback, eval_frame.set_eval_frame
_DYNAMO: Final = "torch._dynamo.eval_frame"  # it takes seconds to import; before its import no function is compiled


def mode_above() -> BodyMode | None:
    """Return the mode of the enclosing body, if it is the topmost mode. `run_in` lifts it: one body sees each call."""
    count = count_function_modes()
    mode = function_mode_at(count - 1) if count else None
    return mode if isinstance(mode, BodyMode) else None


#: not empty once an interrupt has ended a body of this process
INTERRUPTED: Final[list[bool]] = []


def pop_ended_modes() -> None:
    """Pop modes of bodies, where no body runs.

    Torch takes a mode off while it runs a function that is written in Python. If this is interrupted, torch may put the
    mode back when the traceback is freed, after the body has ended.
    """
    while mode_above() is not None:
        pop_function_mode()


def push_mode(mode: BodyMode, run: object) -> None:
    """Activate a mode, and let compiled functions run uncompiled, for the run of a body with this key in `RUNNING`."""
    push_function_mode(mode)
    if _DYNAMO in modules:
        with _stance_lock:
            _CALLBACKS[run] = callback = _get_callback()
            if callback is not None:
                _set_callback(None)
            if not _STANCE:
                compiler, eager = compiler_stances()
                _STANCE.append(compiler._stance)
                compiler._stance = eager


def pop_mode(run: object) -> None:
    """Deactivate the mode that `push_mode` activated."""
    pop_function_mode()
    if _CALLBACKS:
        _let_compile(run)


def _let_compile(run: object) -> None:
    """Reset what `push_mode` set in torch's compiler. A second call changes nothing."""
    with _stance_lock:
        if run not in _CALLBACKS:
            return
        if _CALLBACKS[run] is not None:
            _set_callback(_CALLBACKS[run])
        if len(_CALLBACKS) == 1 and _STANCE:
            compiler_stances()[0]._stance = _STANCE[0]
            _STANCE.clear()
        del _CALLBACKS[run]


def restore_modes(error: BaseException, above: BodyMode | None, mode: BodyMode | None, run: object) -> None:
    """Restore the modes after an exception in a body, which an interrupt may have raised between any two calls.

    Args:
        error: The exception.
        above: The mode that was lifted.
        mode: The mode of the body.
        run: The key of the run.
    """
    if not isinstance(error, Exception):
        INTERRUPTED[:] = [True]
    while mode is not None and is_active(mode):
        pop_function_mode()
    if above is not None and not is_active(above):
        push_function_mode(above)
    if _CALLBACKS:
        _let_compile(run)


def check_not_compiled(run: object, name: str) -> None:
    """Raise `ArgumentError` if the first compilation of this process was in a body: its mode has not prevented it."""
    if _DYNAMO in modules and run not in _CALLBACKS and compiled_frames():
        raise ArgumentError(
            f"{name} called torch.compile before anything else in this process did, so its body was compiled; compile "
            "the function outside of the body, before the body runs"
        )


def leave_to_python(function: Any, why: str) -> None:
    """Make ``torch.compile`` call a function uncompiled, or raise with ``fullgraph=True``.

    This is ``torch.compiler.disable`` without a wrapper.
    """
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, why
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


def is_active(mode: BodyMode) -> bool:
    """Return whether a mode sees torch calls now. It sees none while it handles a torch function."""
    return any(function_mode_at(i) is mode for i in range(count_function_modes()))


def run_in(body: Body | None, mode: BodyMode | None, function: Callable[..., R], *args: Any) -> R:
    """Run a function in a body again, in backward for example: its axes are bound, and ``mode`` sees each call once.

    Python raises an interrupt after a call, and at the start of a function. So what is set is restored in this
    function, by assignments, and by calls that may be repeated.
    """
    outer, outer_tracker, above = state.body, state.tracker, mode_above()
    run = object()
    try:
        RUNNING[run] = body
        state.body, state.tracker = body, mode if mode is not None and mode.types_values else None
        with EnableTorchFunction():  # backward may have started with torch functions disabled
            if above is not None:
                pop_function_mode()
            if mode is not None:
                push_mode(mode, run)
            out = function(*args)
            if mode is not None:
                pop_mode(run)
            if above is not None:
                push_function_mode(above)
        return out
    except BaseException as error:
        try:
            restore_modes(error, above, mode, run)
        finally:
            restore_modes(error, above, mode, run)
        raise
    finally:
        state.body, state.tracker = outer, outer_tracker
        RUNNING.pop(run, None)
