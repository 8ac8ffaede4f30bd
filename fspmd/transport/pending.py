"""The immediate result of a kernel, which waits for the value."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from fspmd.meshes import world


class Pending:
    """A collective under way. `wait` returns its result. A finished collective has no work."""

    __slots__ = ("_finish", "_value", "_works")

    def __init__(self, value: Any, works: tuple[Any, ...] = (), finish: Any = None) -> None:
        self._value = value
        self._works = works
        self._finish = finish

    def wait(self) -> Tensor:
        """Wait until the data has arrived, and return it. On NCCL the current stream waits, not the process."""
        if self._works:
            for work in self._works:
                work.wait()
            self._works = ()
            _begun.pop(id(self), None)
        if self._finish is not None:
            self._value = self._finish(self._value)
            self._finish = None
        result: Tensor = self._value
        return result

    def is_completed(self) -> bool:
        """Return whether the data has arrived."""
        inner = self._value
        return all(work.is_completed() for work in self._works) and (type(inner) is not Pending or inner.is_completed())


_begun: Final[dict[int, Pending]] = {}
_MANY: Final = 64


def begin(pending: Pending) -> Pending:
    """Keep a collective that nobody waits for yet. The end of the process waits for it, if nobody has."""
    if len(_begun) >= _MANY:
        _under_way()
    if not pending.is_completed():
        _begun[id(pending)] = pending
    return pending


def _under_way() -> list[Pending]:
    """Forget the collectives that are over, and return the others."""
    for key, pending in list(_begun.items()):
        if pending.is_completed():
            _begun.pop(key, None)
    return list(_begun.values())


world.end_after(_under_way)
