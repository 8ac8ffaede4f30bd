"""The torch function mode that sees the calls of a body: one mode at a time, that of the innermost body.

While a mode is active, functions compiled by ``torch.compile`` run uncompiled. Where Dynamo breaks a graph, calls do
not reach the mode (torch 2.11 to 2.15), and values would have wrong types.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from fspmd.body import RUNNING, Body, state
from fspmd.errors import ArgumentError
from fspmd.torch_internals import (
    EnableTorchFunction,
    compiled_frames,
    count_function_modes,
    eval_frame,
    function_mode_at,
    pop_function_mode,
    push_function_mode,
)


class BodyMode(TorchFunctionMode):
    """The base of modes that see the torch calls of a body."""

    types_values = False


def lift_mode() -> BodyMode | None:
    """Pop the mode of the enclosing body, if it is the topmost mode, so that only one body sees each call."""
    count = count_function_modes()
    if not count or not isinstance(function_mode_at(count - 1), BodyMode):
        return None
    mode: BodyMode = pop_function_mode()
    return mode


def put_back(mode: BodyMode) -> None:
    """Push the mode that `lift_mode` returned."""
    push_function_mode(mode)


class _Stance:
    """The stance of torch's compiler, one for all threads. The first mode sets it, and the last mode resets it."""

    lock: Final = threading.Lock()
    count = 0
    before: Any = None


_DYNAMO: Final = "torch._dynamo.eval_frame"  # it takes seconds to import; before its import no function is compiled


def push_mode(mode: BodyMode) -> Any:
    """Activate a mode, and let compiled functions run uncompiled. Returns the argument of `pop_mode`."""
    push_function_mode(mode)
    if _DYNAMO not in sys.modules:
        return None
    with _Stance.lock:
        callback = eval_frame.set_eval_frame(None)
        if not _Stance.count:
            _Stance.before = torch.compiler.set_stance("force_eager")
        _Stance.count += 1
    return (callback,)


def pop_mode(pushed: Any) -> None:
    """Deactivate the mode that `push_mode` activated."""
    pop_function_mode()
    if pushed is not None:
        with _Stance.lock:
            _Stance.count -= 1
            if not _Stance.count:
                _Stance.before.__exit__(None, None, None)
            eval_frame.set_eval_frame(pushed[0])


def check_not_compiled(pushed: Any, name: str) -> None:
    """Raise `ArgumentError` if the first compilation of this process was in a body: its mode has not prevented it."""
    if pushed is None and _DYNAMO in sys.modules and compiled_frames():
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


@contextmanager
def again(body: Body | None, mode: BodyMode | None) -> Iterator[None]:
    """Enter a body again in backward: its axes are bound, and ``mode`` sees each call once."""
    before = state.body, state.tracker
    RUNNING.append(body)
    state.body, state.tracker = body, mode if mode is not None and mode.types_values else None
    with EnableTorchFunction():  # backward may have started with torch functions disabled
        below = lift_mode()
        pushed = None if mode is None else push_mode(mode)
        try:
            yield
        finally:
            if mode is not None:
                pop_mode(pushed)
            if below is not None:
                put_back(below)
            state.body, state.tracker = before
            RUNNING.pop()
