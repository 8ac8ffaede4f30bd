"""The immediate result of a kernel, which waits for the value."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Pending:
    """A collective under way. `wait` returns its result. A finished collective has no work."""

    __slots__ = ("_finish", "_value", "_works")

    def __init__(self, value: Any, works: tuple[Any, ...] = (), finish: Any = None) -> None:
        self._value = value
        self._works = works
        self._finish = finish

    def wait(self) -> Tensor:
        """Wait until the data has arrived, and return it. On NCCL the current stream waits, not the process."""
        for work in self._works:
            work.wait()
        self._works = ()
        if self._finish is not None:
            self._value = self._finish(self._value)
            self._finish = None
        result: Tensor = self._value
        return result
