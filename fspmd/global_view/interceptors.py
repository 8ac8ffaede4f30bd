"""Functions that take the calls of one thread on `Sharded` values, in place of `dispatch`: recorders, for example.

One more hears of the calls of all threads, before they run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from fspmd.local_view.modes import leave_to_python
from fspmd.sharded import Sharded

Dispatch = Callable[..., Any]  # called as ``(func, types, args, kwargs)``
_plain: list[Dispatch] = []  # the dispatch of threads that intercept nothing, while nobody hears
_interceptors: dict[int, list[Dispatch]] = {}  # thread -> its interceptors; the last one gets the calls
_hear: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None
_in_call: set[int] = set()  # threads
_changing = threading.Lock()


@contextmanager
def intercept_dispatch(over: Callable[[Dispatch], Dispatch]) -> Iterator[None]:
    """While the block runs, ``over(below)`` gets this thread's calls on `Sharded` values in place of ``below``."""
    thread = threading.get_ident()
    with _changing:
        stack = _interceptors.setdefault(thread, [])
        stack.append(over(stack[-1] if stack else _lowest()))
        _choose()
    try:
        yield
    finally:
        with _changing:
            _interceptors[thread].pop()
            if not _interceptors[thread]:
                del _interceptors[thread]
            _choose()


def hear_calls_with(hear: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None) -> None:
    """Let ``hear`` hear of the function and the arguments of each call that the user makes; with None, nobody."""
    global _hear
    with _changing:
        _lowest()
        _hear = hear
        _choose()


def _lowest() -> Dispatch:
    """The dispatch of threads that intercept nothing."""
    if not _plain:
        _plain.append(Sharded.__torch_function__)
    return _plain[0] if _hear is None else MethodType(_heard, Sharded)


def _choose() -> None:
    """Put what is needed into the place of `dispatch`, so that nothing stands before it otherwise."""
    Sharded.__torch_function__ = MethodType(_dispatch_by_thread, Sharded) if _interceptors else _lowest()


def _dispatch_by_thread(_: type[Sharded], func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    stack = _interceptors.get(threading.get_ident())
    return (stack[-1] if stack else _lowest())(func, types, args, kwargs)


def _heard(_: type[Sharded], func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Let `_hear` hear of a call, unless another call makes it."""
    thread, hear = threading.get_ident(), _hear
    if hear is None or thread in _in_call:
        return _plain[0](func, types, args, kwargs)
    try:
        _in_call.add(thread)
        hear(func, args, kwargs or {})
        return _plain[0](func, types, args, kwargs)
    finally:
        _in_call.discard(thread)


leave_to_python(_heard, "torch functions on Sharded values are not compiled")
