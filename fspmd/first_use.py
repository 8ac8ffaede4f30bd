"""What fspmd replaces in torch, it replaces when it is first used. To import it leaves torch as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

_waiting: Final[list[Callable[[], None]]] = []
_LOCK: Final = threading.RLock()


def at_first_use(*installs: Callable[[], None]) -> None:
    """Call them when the first mesh, or jitted function, is made."""
    _waiting.extend(installs)


def begin() -> None:
    """Install what waits. Whatever needs it is of a mesh, or jitted."""
    if _waiting:
        with _LOCK:  # a second thread waits until all is there
            for install in _waiting:
                install()
            _waiting.clear()
