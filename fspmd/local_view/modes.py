"""Which torch function mode sees the calls of a body: one at a time, the innermost body's.

While a mode sees them, functions that ``torch.compile`` has made run as they are. Where Dynamo breaks a graph, calls do
not reach the mode (torch 2.11 to 2.15), so values would have wrong types.
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
    """Sees the torch calls of a body."""

    types_values = False


def lift_mode() -> BodyMode | None:
    """Take off the mode of the enclosing body, if it is the topmost, so that one body alone sees each call."""
    count = count_function_modes()
    if not count or not isinstance(function_mode_at(count - 1), BodyMode):
        return None
    mode: BodyMode = pop_function_mode()
    return mode


def put_back(mode: BodyMode) -> None:
    """What `lift_mode` took off."""
    push_function_mode(mode)


class _Stance:
    """That of torch's compiler is one for all threads: the first mode sets it, the last sets it back."""

    lock: Final = threading.Lock()
    count = 0
    before: Any = None


_DYNAMO: Final = "torch._dynamo.eval_frame"  # it takes seconds to import, and without it nothing is compiled


def push_mode(mode: BodyMode) -> Any:
    """Have the mode see torch's calls, and functions run as they are; gives what `pop_mode` takes."""
    push_function_mode(mode)
    if _DYNAMO not in sys.modules:
        return None
    with _Stance.lock:
        found = eval_frame.set_eval_frame(None)
        if not _Stance.count:
            _Stance.before = torch.compiler.set_stance("force_eager")
        _Stance.count += 1
    return (found,)


def pop_mode(pushed: Any) -> None:
    """The end of it."""
    pop_function_mode()
    if pushed is not None:
        with _Stance.lock:
            _Stance.count -= 1
            if not _Stance.count:
                _Stance.before.__exit__(None, None, None)
            eval_frame.set_eval_frame(pushed[0])


def check_not_compiled(pushed: Any, name: str) -> None:
    """Raise `ArgumentError` where a body was the first of this process to compile anything, which nobody stopped."""
    if pushed is None and _DYNAMO in sys.modules and compiled_frames():
        raise ArgumentError(
            f"{name} called torch.compile before anything else in this process did, so its body was compiled; compile "
            "the function outside of the body, before the body runs"
        )


def leave_to_python(function: Any, why: str) -> None:
    """``torch.compile`` calls the function as it is and compiles nothing within; with fullgraph=True it raises.

    As ``torch.compiler.disable``, which would wrap it.
    """
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, why
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


def is_active(mode: BodyMode) -> bool:
    """Whether the mode sees torch calls now: it sees none inside a torch function that it was asked about."""
    return any(function_mode_at(i) is mode for i in range(count_function_modes()))


@contextmanager
def again(body: Body | None, mode: BodyMode | None) -> Iterator[None]:
    """Run in a body again, in backward: its axes bound, each call seen once, by ``mode``."""
    before = state.body, state.tracker
    RUNNING.append(body)
    state.body, state.tracker = body, mode if mode is not None and mode.types_values else None
    with EnableTorchFunction():  # backward may have been started with it disabled
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
