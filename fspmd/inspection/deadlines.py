"""`deadline` bounds the waits of a block, and `debug` compares the collectives of all ranks as they go.

Both have a monitor of this rank: it knows the rank's last collectives, tells other ranks of them, and bounds its waits.
A wait is cut into slices. Between two of them it may end with an error: it has taken too long, another rank has left
by an error, or the ranks have parted. The error says where all ranks stand.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

from fspmd.errors import ArgumentError, DeadlineError, FspmdError, LockstepError, PeerError, join_failures
from fspmd.global_view.interceptors import hear_calls_with
from fspmd.inspection.causes import position
from fspmd.inspection.comparison import LATE, Comparison
from fspmd.inspection.long_waits import Lookout, told_by, wait_beside, what_failed
from fspmd.inspection.presence import FAREWELL, PERIOD
from fspmd.inspection.watch import check_seconds, note_with
from fspmd.meshes import process_groups, world
from fspmd.messages import described
from fspmd.transport.known_values import hear_with
from fspmd.transport.pending import Meeting, Message, is_over, wait_with
from fspmd.transport.reports import failure_text, store_needed, within
from fspmd.user_code import line_of_error, user_line

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
        self.timed = True

    def __enter__(self) -> None:
        """Begin to monitor this process."""
        global _active
        self.outer, _active = _active, self
        note_with(self)
        wait_with(self.wait)
        self._hear_values()
        if world.initialised():
            self.begin()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
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
            elif _active is not None:  # another thread has entered a block since
                for inner in _active._with_outer():
                    if inner.outer is self:
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

    def _with_outer(self) -> Iterator[Monitor]:
        """This monitor, and those around it."""
        monitor: Monitor | None = self
        while monitor is not None:
            yield monitor
            monitor = monitor.outer

    def compares(self) -> bool:
        """Whether this monitor compares, or one around it does."""
        return any(monitor.every for monitor in self._with_outer())

    def _hear_values(self) -> None:
        """Hear of values if the active monitor compares, or one around it does."""
        active = () if _active is None else _active._with_outer()
        monitor = next((monitor for monitor in active if monitor.every), None)
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
        is_over, lookout = False, Lookout(type(work) is Meeting)
        self._set_waiting(lookout.begin)
        try:
            if type(work) is Meeting or (type(work) is Message and self.timed):
                wait_beside(work, functools.partial(self.check, lookout), self.period)
            else:
                self._wait_in_slices(work.work if type(work) is Message else work, lookout)
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
            if lookout.thread is not None:
                lookout.over.set()

    def _wait_in_slices(self, work: Any, lookout: Lookout) -> None:
        if self.timed:
            while not is_over(work, self.slice):
                self.check(lookout)
            return
        pause = 2e-5
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, self.period / 4)
            self.check(lookout)
        work.wait()

    def _set_waiting(self, begin: float | None) -> None:
        for monitor in self._with_outer():
            monitor.waiting = begin

    def check(self, lookout: Lookout) -> None:
        """Raise the error of a wait that goes on for too long, or in vain."""
        if self.failure:
            raise LockstepError(self.failure)
        waited = time.monotonic() - lookout.begin
        lookout.check()
        if self.gone and (self.seconds is None or waited + 2 * self.period < self.seconds):
            self._raise_if_parted()
            where, _ = position()
            head = f"rank {world.process_rank()} waits in vain at {where}:"
            rows = sorted(self._all_gone().items())
            raise PeerError(join_failures(head, [f"rank {rank} {text}" for rank, text in rows]))
        if self.seconds is not None and waited > self.seconds:
            raise DeadlineError(self._report(waited))
        if self.outer is not None:
            self.outer.check(lookout)

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
        for monitor in self._with_outer():
            monitor.hurries = True  # let its thread listen and compare from now on, as in a long wait
        while time.monotonic() < end and not (text := self._parted()):
            time.sleep(self.period / 8)
            if self.gone:  # if it has parted, the thread is about to hear of that
                end = min(end, time.monotonic() + self.period)
        if text:
            return LockstepError(text)
        head = f"rank {me} failed at {where}: {what_failed(error)}:"
        return PeerError(join_failures(head, self._states(ranks), _FAILED))

    def _parted(self) -> str:
        """What this monitor, or one around it, knows of ranks that have parted."""
        return next((monitor.failure for monitor in self._with_outer() if monitor.failure), "")

    def _all_gone(self) -> dict[int, str]:
        """The ranks that have left this block, or one around it, by an error. If some only waited for others that have,
        these others."""
        gone = dict(self.gone)
        for monitor in self.outer._with_outer() if self.outer is not None else ():
            within(1.0, functools.partial(monitor._hear, world.process_rank()))
            gone |= monitor.gone
        return {rank: text for rank, text in gone.items() if f" {PeerError.__name__}: " not in text} or gone


_active: Monitor | None = None


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Within the block a collective that waits for more than ``seconds`` raises an error on each rank that waits.

    The error says at which collective the rank stood: its kind, axes, mesh, dtype and shape, and the user's line; in
    backward also the line of its forward call. For each other rank of the group it says where that rank stood when it
    last told: at another collective, outside of collectives, in a block that an error has ended, or nowhere, since it
    has ended or is stopped. A rank that waits for one whose block was ended by an error raises `PeerError` at once.

    The collective cannot be taken back: after the error, end the process, or destroy the process group. Blocks may be
    nested; each wait ends with the shortest time. Ranks hear of each other in blocks that they enter at the same line.
    A rank may have blocks at lines of its own. In a simulation, where nobody waits, the block does nothing.

    A call of a collective costs some 4 µs more within the block. A thread tells the others twice a second that this
    rank lives. With NCCL, the host waits for each collective within the block.

    Args:
        seconds: The time that a wait may take.

    Communication: none but messages through the store of torch.distributed.

    Raises:
        DeadlineError: within the block, a wait took longer.
        LockstepError: within the block, ranks wait for each other in a circle, over different axes.
        PeerError: within the block, another rank has left its block by an error.
        ArgumentError: ``seconds`` is no number above 0.

    >>> with deadline(30):
    ...     pass
    """
    check_seconds("deadline", seconds)
    with Monitor(seconds, 0, user_line(sys._getframe(1)).where):
        yield


@contextmanager
def debug(every: int = 100, *, seconds: float | None = None) -> Iterator[None]:
    """Within the block the ranks of each group compare their collectives as they go, and raise an error if they differ.

    Each rank keeps a running hash of the collectives of each group: the row of the pair table, the axes, the mesh, the
    options, the shape, the dtype, the user's line, and in a body how many collectives came before it, over any axes.
    Shapes that may be uneven do not count. Ranks that run the same collective at different lines count as different, so
    write it once, after the `if`. Ranks compare after every ``every`` collectives of a group, at the end of the block,
    and when a rank waits for long. Within about two seconds of a difference all ranks of the group raise an error at
    their next collective, or in the one that they wait for. It has the first collective that differs, with its line, on
    each rank. Ranks that wait for each other in a circle, over different axes, are named in the same time.

    A collective that is new after the seven before it in its group waits until all ranks of the group have come to it.
    So a rank that takes another branch sends nothing that others do not expect. Steps of training repeat, so later ones
    wait for nobody. Shapes that change in each step make each step new: a call then costs a message to the store and
    back, a fraction of a millisecond.

    `lockstep` compares before each collective, which is slow, but no wrong number is computed. Here a call costs some
    4 µs more; what was computed since ranks parted may be wrong. A recorded program (`jit`) counts as its collectives.
    The environment variable ``FSPMD_DEBUG=N`` does the same for the whole process, as ``debug(every=N)``.

    Values that all processes must have alike are compared in the same way, by digests, in each call: arguments of
    `shard_map` and `jit` that are no `Sharded`, static ones too; values that `device_put` lays out; seeds of random
    functions, and what a body draws that is equal on all ranks; the plain tensors that a body or a jitted function
    closes over, parameters and buffers of its modules among them, and attributes that it names of the user's objects;
    and the numbers that it closes over or names itself; and after an unchecked body the replicas that it has written
    into. A body that closes over its rank is therefore told of: write ``axis_index``, or call ``dist.get_rank()`` in
    it. A bool alone does not count, since one rank may be told to print. Each tensor is read once. A jitted function is
    compared over the meshes of its record and its arguments. Containers and objects count by their parts, but an object
    that is equal to itself alone, or that cannot be pickled, by its type. The order of keys in arguments is compared,
    too, since a body iterates over dicts in the order of its rank.

    Three things more are compared: the global shapes, dtypes and specs of the arguments of `shard_map` and `jit`, the
    ``in_specs``, and all that a torch function on `Sharded` values gets, namely layouts, plain tensors, numbers and
    options. A call of one Sharded alone passes nothing else, so it is not heard. These are no collectives, so they wait
    for the next comparison of a group. Ranks compare them line by line, where they have come to a line equally often.
    So one rank may call a function that does not communicate. A torch function then costs some 10 µs more, and 5 to
    50 µs for each plain tensor of up to 64 KiB. Only the thread that has entered the block is heard.

    Specs that `device_put` gives are compared as these are. So a difference of values or layouts is told after up to
    ``every`` collectives, or at the end of the block.

    A rank that the backend fails says which ranks of the group have given no sign of life.

    All ranks enter the block at the same line, around the same calls. In a simulation it does nothing. Collectives
    of parts of an axis (``axis_index_groups``) and moves between meshes are not compared.

    Args:
        every: After how many collectives of a group its ranks compare. The error shows where they parted if that is
            among the last 4,096.
        seconds: The time that a wait may take, as with `deadline`. By default there is no bound; ranks meet at the end
            of the block within 60 seconds.

    Communication: a few messages through the store of torch.distributed, by a thread.

    Raises:
        LockstepError: within the block or at its end, ranks have run different collectives.
        DeadlineError, PeerError: as with `deadline`.
        ArgumentError: ``every`` is no integer above 0, or ``seconds`` no number above 0.

    >>> with debug(every=10):
    ...     pass
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ArgumentError(f"debug got every={described(every)}; give it an integer above 0")
    if seconds is not None:
        check_seconds("debug", seconds, ", or None")
    with Monitor(seconds, every, user_line(sys._getframe(1)).where):
        yield


def install() -> None:
    """Begin `debug` for the whole process, if the environment says so."""
    given = os.environ.get("FSPMD_DEBUG", "")
    if given in ("", "0"):
        return
    if not given.isdecimal():
        raise ArgumentError(f"the environment variable FSPMD_DEBUG is {given!r}; set it to an integer, such as 100")
    monitor = Monitor(None, int(given) if int(given) > 1 else 100, "FSPMD_DEBUG")
    monitor.__enter__()
    atexit.register(lambda: monitor.__exit__(None, getattr(sys, "last_value", None), None))
