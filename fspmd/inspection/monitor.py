"""A monitor of this rank: it knows the rank's last collectives, tells other ranks of them, and bounds its waits.

A wait is cut into slices. Between two of them it may end with an error: it has taken too long, another rank has left
by an error, or the ranks have parted. The error says where all ranks stand.
"""

from __future__ import annotations

import functools
import threading
import time
from datetime import timedelta
from typing import Any, Final

from fspmd.errors import DeadlineError, FspmdError, LockstepError, PeerError, join_failures
from fspmd.global_view.interceptors import hear_calls_with
from fspmd.inspection.causes import position
from fspmd.inspection.comparison import LATE, Comparison
from fspmd.inspection.long_waits import Lookout, wait_beside
from fspmd.inspection.lost_peers import told_by, what_failed
from fspmd.inspection.presence import FAREWELL, PERIOD
from fspmd.inspection.watch import note_with
from fspmd.meshes import process_groups, world
from fspmd.transport.known_values import hear_with
from fspmd.transport.pending import SLICE, Meeting, Message, is_over, wait_with
from fspmd.transport.reports import failure_text, store_needed, within
from fspmd.user_code import line_of_error

_FAILED: Final = (
    "see the output of the ranks that have ended. gloo::EnforceNotMet there means that ranks sent different sizes: "
    "lockstep() finds the line"
)


class Monitor(Comparison):
    """The monitor of a block of code.

    Args:
        seconds: The time that a wait may take; None for no bound.
        every: After how many collectives of a group its ranks compare; 0 for no comparison.
        line: Where the block begins. Ranks meet in the block that each of them enters there for the same time.
    """

    def __init__(self, seconds: float | None, every: int, line: str) -> None:
        super().__init__(seconds, every, line, min(PERIOD, seconds / 8) if seconds else PERIOD)
        self.slice = timedelta(seconds=self.period)
        self.outer: Monitor | None = None
        self.lookout: Lookout | None = None  # of a wait that takes long
        self.timed = True
        self.meets = False  # whether this rank waits for others to make a group

    def enter(self) -> None:
        """Begin to monitor this process."""
        global _active
        self.outer, _active = _active, self
        note_with(self)
        wait_with(self.wait)
        self._hear_values()
        if world.initialised():
            self.begin()

    def leave(self, error: BaseException | None = None) -> None:
        """End. A monitor that compares meets the other ranks first, unless there is an error."""
        global _active
        try:
            if self.thread is not None and self.every and error is None and self.has_store():
                with store_needed():
                    self._meet()
        except BaseException as late:
            error = late
            raise
        finally:
            if _active is self:
                _active = self.outer
            else:  # another thread has entered a block since
                inner = _active
                while inner is not None and inner.outer is not self:
                    inner = inner.outer
                if inner is not None:
                    inner.outer = self.outer
            note_with(_active)
            wait_with(None if _active is None else _active.wait)
            self._hear_values()
            self.ended.set()
            if self.thread is not None and world.initialised():
                line = f" ({line})" if error and (line := line_of_error(error)) else ""
                text = f"has left the block with {failure_text(error)}{line}" if error else ""
                store = self.store if threading.current_thread() is threading.main_thread() else self.opened
                within(2 * FAREWELL, functools.partial(self._last_words, text, store))

    def compares(self) -> bool:
        """Whether this monitor compares, or one around it does."""
        return bool(self.every) or (self.outer is not None and self.outer.compares())

    def _hear_values(self) -> None:
        """Hear of values if the active monitor compares, or one around it does."""
        monitor = _active
        while monitor is not None and not monitor.every:
            monitor = monitor.outer
        if monitor is None:
            hear_with(None)
            hear_calls_with(None)
        else:
            hear_with(monitor.value, monitor.layouts)
            hear_calls_with(monitor.called)

    def begin(self) -> None:
        """Start the thread."""
        self.timed = set(world.backends().values()) <= {"gloo"}
        super().begin()

    def wait(self, work: Any) -> None:
        """Wait for a work of c10d."""
        if self.thread is None:
            self.begin()
        begin = time.monotonic()
        self._set_waiting(begin)
        self.meets = type(work) is Meeting
        is_over = False
        try:
            if type(work) is Meeting or (type(work) is Message and self.timed):
                wait_beside(work, functools.partial(self.check, begin), self.period)
            else:
                self._wait_in_slices(work.work if type(work) is Message else work, begin)
            is_over = True
        except RuntimeError as error:
            is_over = not isinstance(error, PeerError)  # the work has failed
            if is_over:
                raise self._failed(error) from error
            raise
        finally:
            if not is_over:
                process_groups.abandon_groups()
            self._set_waiting(None)
            if self.lookout is not None:
                self.lookout.over.set()
                self.lookout = None

    def _wait_in_slices(self, work: Any, begin: float) -> None:
        if self.timed:
            while not is_over(work, self.slice):
                self.check(begin)
            return
        pause = 2e-5
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, self.period / 4)
            self.check(begin)
        work.wait()

    def _set_waiting(self, begin: float | None) -> None:
        self.waiting = begin
        if self.outer is not None:
            self.outer._set_waiting(begin)

    def check(self, begin: float) -> None:
        """Raise the error of a wait that goes on for too long, or in vain."""
        if self.failure:
            raise LockstepError(self.failure)
        waited = time.monotonic() - begin
        if self.lookout is not None:
            self.lookout.check()
        elif waited > SLICE.total_seconds():
            self.lookout = Lookout(waited, needs_all=self.meets)
        if self.gone and (self.seconds is None or waited + 2 * self.period < self.seconds):
            self._raise_if_parted()
            where, _ = position()
            head = f"rank {world.process_rank()} waits in vain at {where}:"
            rows = sorted(self._all_gone().items())
            raise PeerError(join_failures(head, [f"rank {rank} {text}" for rank, text in rows]))
        if self.seconds is not None and waited > self.seconds:
            raise DeadlineError(self._report(waited))
        if self.outer is not None:
            self.outer.check(begin)

    def _report(self, waited: float) -> str:
        where, ranks = position()
        me = world.process_rank()
        lines = [*self._states(ranks), *told_by(ranks, waited + 60)]
        head = f"rank {me} has waited {waited:.1f} s at {where}, longer than the deadline of {self.seconds} s:"
        return join_failures(head, lines, LATE)

    def _failed(self, error: RuntimeError) -> FspmdError:
        """The error in the place of the backend's, once the other ranks have told where they stand."""
        where, ranks = position()
        me, end = world.process_rank(), time.monotonic() + 8 * self.period
        self._hurry()
        while time.monotonic() < end and not (found := self._parted()):
            time.sleep(self.period / 8)
            if self.gone:  # if it has parted, the thread is about to hear of that
                end = min(end, time.monotonic() + self.period)
        if found:
            return LockstepError(found)
        head = f"rank {me} failed at {where}: {what_failed(error)}:"
        return PeerError(join_failures(head, self._states(ranks), _FAILED))

    def _hurry(self) -> None:
        """Let the threads listen and compare from now on, as in a long wait."""
        self.hurries = True
        if self.outer is not None:
            self.outer._hurry()

    def _parted(self) -> str:
        """What this monitor, or one around it, knows of ranks that have parted."""
        return self.failure or ("" if self.outer is None else self.outer._parted())

    def _all_gone(self) -> dict[int, str]:
        """The ranks that have left this block, or one around it, by an error. If some only waited for others that have,
        these others."""
        gone, monitor = dict(self.gone), self.outer
        while monitor is not None:
            within(1.0, functools.partial(monitor._hear, world.process_rank()))
            gone, monitor = {**gone, **monitor.gone}, monitor.outer
        return {rank: text for rank, text in gone.items() if f" {PeerError.__name__}: " not in text} or gone


_active: Monitor | None = None
