"""Who has the calls on `Sharded` values of one thread, in place of what runs them: recorders, reckoners."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from fspmd.sharded import Sharded

Dispatch = Callable[..., Any]  # of a function, types, arguments by place, and by name
_below: list[Dispatch] = []  # what runs them
_instead: dict[int, list[Dispatch]] = {}  # by thread, the last is asked
_changing = threading.Lock()


@contextmanager
def intercept_dispatch(over: Callable[[Dispatch], Dispatch]) -> Iterator[None]:
    """While the block runs, ``over(below)`` has the calls of this thread on `Sharded` values, in place of ``below``."""
    thread = threading.get_ident()
    with _changing:
        if not _instead:
            _below[:] = [Sharded.__torch_function__]
            Sharded.__torch_function__ = MethodType(_either, Sharded)
        others = _instead.setdefault(thread, [])
        others.append(over(others[-1] if others else _below[0]))
    try:
        yield
    finally:
        with _changing:
            _instead[thread].pop()
            if not _instead[thread]:
                del _instead[thread]
            if not _instead:
                Sharded.__torch_function__ = _below[0]


def _either(_: type[Sharded], func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    others = _instead.get(threading.get_ident())
    return (others[-1] if others else _below[0])(func, types, args, kwargs)
