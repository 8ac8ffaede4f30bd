"""Functions that take the calls of one thread on `Sharded` values, in place of `dispatch`: recorders, for example."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from fspmd.sharded import Sharded

Dispatch = Callable[..., Any]  # called as ``(func, types, args, kwargs)``
_below: list[Dispatch] = []  # the dispatch of threads that intercept nothing
_interceptors: dict[int, list[Dispatch]] = {}  # thread -> its interceptors; the last one gets the calls
_changing = threading.Lock()


@contextmanager
def intercept_dispatch(over: Callable[[Dispatch], Dispatch]) -> Iterator[None]:
    """While the block runs, ``over(below)`` gets this thread's calls on `Sharded` values in place of ``below``."""
    thread = threading.get_ident()
    with _changing:
        if not _interceptors:
            _below[:] = [Sharded.__torch_function__]
            Sharded.__torch_function__ = MethodType(_dispatch_by_thread, Sharded)
        stack = _interceptors.setdefault(thread, [])
        stack.append(over(stack[-1] if stack else _below[0]))
    try:
        yield
    finally:
        with _changing:
            _interceptors[thread].pop()
            if not _interceptors[thread]:
                del _interceptors[thread]
            if not _interceptors:
                Sharded.__torch_function__ = _below[0]


def _dispatch_by_thread(_: type[Sharded], func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    stack = _interceptors.get(threading.get_ident())
    return (stack[-1] if stack else _below[0])(func, types, args, kwargs)
