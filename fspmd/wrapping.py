"""Wrappers of users' functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def wraps(f: Any) -> Callable[[F], F]:
    """``functools.wraps`` without the attributes of the function.

    ``torch.compile`` finds the original of a function by its attributes, and compiles the original. It would compile
    the wrapped function and drop the wrapper.

    >>> def f():
    ...     "A function."
    >>> f.mark = 1
    >>> g = wraps(f)(lambda: None)
    >>> g.__name__, g.__doc__, g.__wrapped__ is f, hasattr(g, "mark")
    ('f', 'A function.', True, False)
    """
    return functools.partial(functools.update_wrapper, wrapped=f, updated=())  # type: ignore[return-value]
