"""Which torch function mode sees the calls of a body: one at a time, the innermost body's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fspmd.body import Body, state
from fspmd.indexing import IndexMode
from fspmd.tracking import Tracker

_mode_count, _mode_at = torch._C._len_torch_function_stack, torch._C._get_function_stack_at
_push_mode, _pop_mode = torch._C._push_on_torch_function_stack, torch._C._pop_torch_function_stack


def lift_mode() -> Tracker | IndexMode | None:
    """Take off the mode of the enclosing body, if it is the topmost, so that one body alone sees each call."""
    count = _mode_count()
    if not count or type(_mode_at(count - 1)) not in (Tracker, IndexMode):
        return None
    mode: Tracker | IndexMode = _pop_mode()
    return mode


@contextmanager
def again(body: Body | None, typed_by: Body | None) -> Iterator[None]:
    """Run in a body again, in backward: its axes bound, types tracked as in ``typed_by``, each call seen once."""
    before = state.body, state.tracker
    mode: Tracker | IndexMode | None = None
    if typed_by is not None:
        mode = Tracker(typed_by)
    elif body is not None and body.mesh.transport == "simulation":
        mode = IndexMode()
    state.body, state.tracker = body, mode if isinstance(mode, Tracker) else None
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
