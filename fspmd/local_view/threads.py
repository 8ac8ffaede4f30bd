"""Threads that a body starts belong to the body: axes are bound in them, and their torch calls are typed.

A mode of torch sees the calls of one thread. Daemon threads, which serve others and outlive the body, are left alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fspmd.body import state
from fspmd.local_view.modes import run_in
from fspmd.local_view.tracking import mode_for

#: modules whose threads run functions of many callers
_OF_MANY = ("concurrent.futures.", "fspmd.")


def wrap_threads() -> None:
    """Let the threads that a body starts, and the functions that it submits to a pool of threads, run in the body."""
    start: Any = threading.Thread.start
    submit: Any = ThreadPoolExecutor.submit

    def start_in_body(self: Any) -> None:
        target: Any = getattr(self, "_target", None)
        if state.body is not None and not self.daemon and not _module(target).startswith(_OF_MANY):
            self.run = in_this_body(self.run)
        start(self)

    def submit_in_body(self: Any, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        return submit(self, fn if state.body is None else in_this_body(fn), *args, **kwargs)

    threading.Thread.start = start_in_body  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = submit_in_body  # type: ignore[method-assign]


def in_this_body(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs in the body that runs now, on any thread."""
    body, tracker = state.body, state.tracker
    typed_by = None if tracker is None else tracker.body

    def run(*args: Any, **kwargs: Any) -> Any:
        return run_in(body, mode_for(body, typed_by), lambda: function(*args, **kwargs))

    return run


def _module(function: Any) -> str:
    return getattr(function, "__module__", None) or ""
