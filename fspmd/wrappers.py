"""Wrappers of functions: of users' functions, and of torch's functions, which get them at the first use of fspmd.

An import of fspmd leaves torch as it is.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

from fspmd.errors import RecordError

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


def replace_everywhere(module: Any, name: str, new: Any) -> None:
    """Put ``new`` in the place of a module's function, and in that of its copies in libraries that are imported.

    tensordict has copies of functions of ``torch.func``, and puts functions that call them into torch.
    """
    old = getattr(module, name)
    for key, other in list(sys.modules.items()):
        if not key.startswith(("torch.", "fspmd")) and getattr(other, "__dict__", {}).get(name) is old:
            setattr(other, name, new)
    setattr(module, name, new)


_waiting: Final[list[Callable[[], None]]] = []
_LOCK: Final = threading.RLock()


def at_first_use(*installs: Callable[[], None]) -> None:
    """Call ``installs`` when the first mesh or jitted function is made."""
    _waiting.extend(installs)


def begin() -> None:
    """Install all wrappers. Every function that needs them takes a mesh or is jitted."""
    if _waiting:
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            raise RecordError(
                "the first mesh or jitted function of this process was made while torch.jit.trace writes down a graph, "
                "in which there would be no collectives; make it before the trace"
            )
        with _LOCK:  # a second thread waits until all are installed
            for install in _waiting:
                install()
            _waiting.clear()
