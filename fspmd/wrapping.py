"""Functions in the place of a user's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def wraps(f: Any) -> Callable[[F], F]:
    """``functools.wraps`` that leaves attributes behind.

    ``torch.compile`` says by attributes of a function what it was made of, and takes that in its place: around the
    wrapper it would compile the function inside, and the wrapper would be gone.

    >>> def f():
    ...     "A function."
    >>> f.mark = 1
    >>> g = wraps(f)(lambda: None)
    >>> g.__name__, g.__doc__, g.__wrapped__ is f, hasattr(g, "mark")
    ('f', 'A function.', True, False)
    """
    return functools.partial(functools.update_wrapper, wrapped=f, updated=())  # type: ignore[return-value]
