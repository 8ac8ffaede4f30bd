"""Collectives under way, and the waits for their works."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final, NoReturn

from torch import Tensor

from fspmd.meshes import process_groups, world

SLICE: Final = timedelta(seconds=1)  # a wait that takes longer is a long one
_Waiter = Callable[[Any], None]
_waiter: _Waiter | None = None
_explain: Callable[[RuntimeError], Exception | None] | None = None
_go_on: _Waiter | None = None
_whole: _Waiter | None = None
_slice: tuple[timedelta, ...] = ()  # the arguments of the first wait for a work


def wait_with(waiter: _Waiter | None) -> None:
    """Let ``waiter`` wait for each work of c10d; with None, its own ``wait``."""
    global _waiter
    _waiter = waiter


def explain_with(explain: Callable[[RuntimeError], Exception | None]) -> None:
    """Let ``explain`` make the error of a work that has failed from torch's; None leaves torch's."""
    global _explain
    _explain = explain


def go_on_with(waiter: _Waiter, whole: _Waiter) -> None:
    """Let ``waiter`` go on with a wait that has taken longer than `SLICE`, and ``whole`` wait for a `Message` or a
    `Meeting`, whose wait cannot be cut. Only waits on Gloo are."""
    global _go_on, _whole
    _go_on, _whole = waiter, whole


def _choose_slice() -> None:
    """Choose whether waits are cut, for the backends of a new world. With NCCL a timed wait would hold up the host."""
    global _slice
    _slice = (SLICE,) if set(world.backends().values()) <= {"gloo"} else ()


process_groups.at_new_world(_choose_slice)


class Pending:
    """A collective under way. `wait` returns its result. One that has ended has no works."""

    __slots__ = ("_finish", "_value", "_works")

    def __init__(self, value: Any, works: tuple[Any, ...] = (), finish: Any = None) -> None:
        self._value = value
        self._works = works
        self._finish = finish

    def wait(self) -> Tensor:
        """Wait until the data has arrived, and return it. On NCCL the current stream waits, not the process.

        Raises:
            PeerError: another process has ended, or the backend has failed.
        """
        if self._works:
            wait_for(self._works)
            self._works = ()
            if _begun:
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


#: the result of a kernel, or the collective that will give it
Result = Tensor | Pending


def arrived(result: Result) -> Tensor:
    """Return the result of a kernel, after a wait if its collective is under way."""
    return result.wait() if isinstance(result, Pending) else result


def as_pending(result: Result) -> Pending:
    """Return what a kernel has returned as something to wait for."""
    return result if isinstance(result, Pending) else Pending(result)


class Message:
    """A work of c10d that sends to one peer, or receives from one.

    Gloo ends all works of a group if a message does not come within the time of a timed wait. `is_completed` is True
    only after a wait.
    """

    __slots__ = ("work",)

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait for it, however long that takes; with a limit, hear of other ranks meanwhile."""
        if limit is None or _whole is None:
            self.work.wait()
        else:
            _whole(self)

    def is_completed(self) -> bool:
        """Return whether it has arrived."""
        return bool(self.work.is_completed())


class Meeting:
    """The making of a group as a work: c10d waits for the members, as long as the limit of the group is."""

    __slots__ = ("_make", "made")

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.made: Any = None

    def wait(self, limit: timedelta | None = None) -> None:
        """Make it, however long that takes; with a limit, hear of other ranks meanwhile."""
        if limit is None or _whole is None:
            self.made = self._make()
        else:
            _whole(self)


def _meet(make: Callable[[], Any]) -> Any:
    """Make a group. A waiter bounds the wait for the members."""
    meeting = Meeting(make)
    wait_for((meeting,))
    return meeting.made


process_groups.meet_with(_meet)


def wait_for(works: tuple[Any, ...]) -> None:
    """Wait for works of c10d, and for collectives under way."""
    for work in works:
        try:
            if type(work) is Pending:
                work.wait()
            elif _waiter is None:
                work.wait(*_slice)
            else:
                _waiter(work)
        except RuntimeError as error:
            _late(work, error)


def _late(work: Any, error: RuntimeError) -> None:
    """Go on with a wait whose first slice is over, or raise the error of a work that has failed."""
    is_whole = not _slice or type(work) in (Pending, Message, Meeting)
    if _go_on is None or _waiter is not None or is_whole:
        fail(error)
    try:
        _go_on(work)
    except RuntimeError as failure:
        fail(failure)


def is_over(work: Any, limit: timedelta) -> bool:
    """Wait for a work of Gloo for some time, and return whether it is over. A work that has failed raises its error."""
    try:
        work.wait(limit)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it has failed, or has ended well just after the time was over
    return True


def fail(error: RuntimeError) -> NoReturn:
    """Raise the error of a work that has failed, or that has not begun."""
    if _explain is None or (explained := _explain(error)) is None:
        raise error
    raise explained from error


_begun: Final[dict[int, Pending]] = {}
_MANY: Final = 64


def begin(pending: Pending) -> Pending:
    """Keep a collective that nobody waits for yet. The end of the process waits for it, if nobody has."""
    if len(_begun) >= _MANY:
        under_way()
    if not pending.is_completed():
        process_groups.start_keeper()
        _begun[id(pending)] = pending
    return pending


def under_way() -> list[Pending]:
    """The collectives of handles that are not over. The others are forgotten."""
    for key, pending in list(_begun.items()):
        if pending.is_completed():
            _begun.pop(key, None)
    return list(_begun.values())


def _rest(seconds: float) -> list[Pending]:
    """Wait some seconds for the collectives of handles, and return those that are not over.

    A message of Gloo ends by a wait alone. One that does not come in time ends its group, which nobody uses any more.
    """
    end = time.monotonic() + seconds
    gloo = under_way() if _slice else []
    lost = [pending for pending in gloo if not all(_comes(each, end) for each in list(_messages(pending)))]
    while (left := under_way()) and time.monotonic() < end:
        time.sleep(0.02)
    return left or lost


def _messages(pending: Pending) -> Iterator[Message]:
    for work in (*pending._works, pending._value):
        if type(work) is Message:
            yield work
        elif type(work) is Pending:
            yield from _messages(work)


def _comes(message: Message, end: float) -> bool:
    try:
        message.work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
    except RuntimeError:
        return False
    return True


process_groups.end_after(_rest)
