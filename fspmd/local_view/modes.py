"""Which torch function mode sees the calls of a body: one at a time, the innermost body's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode

from fspmd.body import RUNNING, Body, state

_mode_count, _mode_at = torch._C._len_torch_function_stack, torch._C._get_function_stack_at
_push_mode, _pop_mode = torch._C._push_on_torch_function_stack, torch._C._pop_torch_function_stack


class BodyMode(TorchFunctionMode):
    """Sees the torch calls of a body."""

    types_values = False


def lift_mode() -> BodyMode | None:
    """Take off the mode of the enclosing body, if it is the topmost, so that one body alone sees each call."""
    count = _mode_count()
    if not count or not isinstance(_mode_at(count - 1), BodyMode):
        return None
    mode: BodyMode = _pop_mode()
    return mode


def is_active(mode: BodyMode) -> bool:
    """Whether the mode sees torch calls now: it sees none inside a torch function that it was asked about."""
    return any(_mode_at(i) is mode for i in range(_mode_count()))


@contextmanager
def again(body: Body | None, mode: BodyMode | None) -> Iterator[None]:
    """Run in a body again, in backward: its axes bound, each call seen once, by ``mode``."""
    before = state.body, state.tracker
    RUNNING.append(body)
    state.body, state.tracker = body, mode if mode is not None and mode.types_values else None
    with torch._C._EnableTorchFunction():  # backward may have been started with it disabled
        below = lift_mode()
        if mode is not None:
            _push_mode(mode)
        try:
            yield
        finally:
            if mode is not None:
                _pop_mode()
            if below is not None:
                _push_mode(below)
            state.body, state.tracker = before
            RUNNING.pop()
