"""Installs the wrappers of fspmd in torch at its first use. An import of fspmd leaves torch as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

_waiting: Final[list[Callable[[], None]]] = []
_LOCK: Final = threading.RLock()


def at_first_use(*installs: Callable[[], None]) -> None:
    """Call ``installs`` when the first mesh or jitted function is made."""
    _waiting.extend(installs)


def begin() -> None:
    """Install all wrappers. Every function that needs them takes a mesh or is jitted."""
    if _waiting:
        with _LOCK:  # a second thread waits until all are installed
            for install in _waiting:
                install()
            _waiting.clear()
