"""A monitor of this rank: it knows the rank's last collectives, tells other ranks of them, and bounds its waits.

A thread beside the program tells the other ranks every half second, through the store of torch.distributed, that this
rank lives and where it stands. While this rank waits for long, the thread listens to the others. So a wait that has
taken too long ends with an error that says where all ranks stand.

A monitor that *compares* keeps for each group a running hash of its collectives. The first rank of the group tells its
hash after every N-th, and the other ranks compare. If one differs, all ranks of the group tell their last collectives,
which show where they parted.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor

from fspmd.digests import digests
from fspmd.errors import DeadlineError, FspmdError, LockstepError, PeerError, join_failures
from fspmd.inspection.histories import (
    DIGEST,
    DTYPES,
    SHOWN,
    History,
    fact_of,
    facts_of,
    key_of,
    parting_text,
    ring_of,
    ring_text,
    text_of,
)
from fspmd.inspection.lines import user_line
from fspmd.inspection.long_waits import Lookout
from fspmd.inspection.lost_peers import told_by
from fspmd.inspection.positions import position
from fspmd.inspection.values import is_told, number_of
from fspmd.inspection.watch import Communication, Note, Noted, note_with
from fspmd.meshes import world
from fspmd.meshes.mesh import Mesh
from fspmd.messages import counted
from fspmd.spec import describe
from fspmd.torch_internals import transforms_active
from fspmd.tracing import is_recording
from fspmd.transport.known_values import hear_with
from fspmd.transport.pending import SLICE, Meeting, Message, wait_with
from fspmd.transport.reports import failure_text, own_store, within
from fspmd.transport.reports import user_line as user_line_of

_PERIOD: Final = 0.25  # seconds between two signs of life
_KEPT: Final = 64  # hashes of each group that stay in the store
_FAREWELL: Final = 1.5  # seconds in which the others may read what the first rank has told: its process has the store
_MEETING: Final = 60.0  # seconds that ranks wait for each other at the end
_entries: Final[dict[str, Iterator[int]]] = {}  # how often each line was entered
LATE: Final = (
    "if a rank only takes longer, allow more seconds; debug() finds ranks that do not run the same collectives, and "
    "lockstep() the first line where they part"
)
_FAILED: Final = (
    "see the output of the ranks that have ended. gloo::EnforceNotMet there means that ranks sent different sizes: "
    "lockstep() finds the line"
)


class Monitor(Note):
    """The monitor of a block of code.

    Args:
        seconds: The time that a wait may take; None for no bound.
        every: After how many collectives of a group its ranks compare; 0 for no comparison.
        line: Where the block begins. Ranks meet in the block that each of them enters there for the same time.
    """

    def __init__(self, seconds: float | None, every: int, line: str) -> None:
        self.seconds, self.every = seconds, every
        self.line, self.number = line, next(_entries.setdefault(line, itertools.count()))
        self.period = min(_PERIOD, seconds / 8) if seconds else _PERIOD
        self.slice = timedelta(seconds=self.period)
        self.groups: dict[str, History] = {}
        self.facts: dict[tuple[int, ...], tuple[Any, list[Any]]] = {}
        self.last: tuple[Any, ...] | None = None  # the last collective, as in a ring, and its time
        self.waiting: float | None = None  # since when this rank waits
        self.hurries = False  # the backend has failed
        self.failure = ""  # ranks have parted
        self.thread: threading.Thread | None = None
        self.ended = threading.Event()
        self.heard: dict[int, tuple[float, dict[str, Any]]] = {}  # by rank: when it changed, what it told
        self.gone: dict[int, str] = {}  # ranks that left by an error
        self.answered = 0.0  # when the store did
        self.outer: Monitor | None = None
        self.store: Any = None
        self.lookout: Lookout | None = None  # of a wait that takes long
        self.timed = True

    # --- what the program does --------------------------------------------------------------------------------------

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
            if self.thread is not None and self.every and error is None:
                self._meet()
        except dist.DistError as lost:
            text = f"the store of torch.distributed has ended: {str(lost).splitlines()[0]}"
            error = PeerError(f"rank {world.process_rank()} has come to the end of the block alone: {text}")
            raise error from lost
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
            if self.thread is not None:
                line = f" ({line})" if error and (line := user_line_of(error)) else ""
                text = f"has left the block with {failure_text(error)}{line}" if error else ""
                within(2 * _FAREWELL, lambda: self._last_words(text))

    def _hear_values(self) -> None:
        """Hear of values if this monitor compares, or one around it does."""
        monitor = _active
        while monitor is not None and not monitor.every:
            monitor = monitor.outer
        hear_with(None if monitor is None else monitor.value)

    def begin(self) -> None:
        """Start the thread."""
        self.answered = time.monotonic()
        self.timed = set(world.backends().values()) <= {"gloo"}
        self.thread = threading.Thread(target=self._run, name="fspmd-monitor", daemon=True)
        self.thread.start()

    def call(self, call: Noted, x: Tensor) -> None:
        number, plain = call.number, call.plain
        if number is None:
            plain.facts = plain.facts or facts_of(plain)
            number = call.number = plain.facts[0] and hash((plain.facts[0], call.by.number))
        if not number:
            return
        if self.failure:
            raise LockstepError(self.failure)
        _, key, is_even = plain.facts
        group = self.groups.get(key)
        if group is None:
            group = self._group(plain.mesh, plain.axes, key)
        shape, dtype = x.shape, x.dtype
        group.hash = now = hash((group.hash, number, shape if is_even else 0, DTYPES[dtype]))
        group.count = count = group.count + 1
        self.last = entry = (count, now, plain, call.by, dtype, shape, time.monotonic())
        group.ring.append(entry)
        if self.every and not count % self.every:
            group.due.append((count, now))
        if self.outer is not None:
            self.outer.call(call, x)

    def value(self, mesh: Mesh, label: str, x: Any) -> None:
        """A value that must be equal on all processes of a mesh comes in. Its digest counts as a collective."""
        if mesh.transport != "process_group" or mesh.coordinate() is None or mesh.size == 1 or is_recording():
            return
        if isinstance(x, Tensor):
            if not is_told(x) or transforms_active():
                return
            text, number = f"{label}, {describe(x.dtype, x.shape)}", digests([x])[0]
        elif isinstance(x, bool):  # one rank may be told to print
            return
        else:
            text, number = label, x if type(x) is int else number_of(x)
        if self.failure:
            raise LockstepError(self.failure)
        line, key = user_line(sys._getframe(1)), key_of(mesh, ())
        group = self.groups.get(key) or self._group(mesh, (), key)
        group.hash = now = hash((group.hash, number, zlib.crc32(text.encode()), line.number))
        group.count = count = group.count + 1
        value = f"{text}, {DIGEST} {number & (1 << 64) - 1:016x}"
        group.ring.append((count, now, value, line, None, (), time.monotonic()))
        if not count % self.every:
            group.due.append((count, now))

    def record(self, communications: Sequence[Communication]) -> None:
        known = self.facts.get((id(communications),))
        if known is None:
            known = communications, [fact_of(each) for each in communications]
            if isinstance(communications, tuple):
                self.facts[(id(communications),)] = known
        for number, key, each, line in known[1]:
            if not number:
                continue
            if self.failure:
                raise LockstepError(self.failure)
            group = self.groups.get(key)
            if group is None:
                group = self._group(each.mesh, each.axes, key)
            group.hash = now = hash((group.hash, number))
            group.count = count = group.count + 1
            self.last = entry = (count, now, each, line, each.dtype, each.shape, time.monotonic())
            group.ring.append(entry)
            if self.every and not count % self.every:
                group.due.append((count, now))
        if self.outer is not None:
            self.outer.record(communications)

    def _group(self, mesh: Mesh, axes: tuple[str, ...], key: str) -> History:
        if self.thread is None:
            self.begin()
        ranks = tuple(sorted(mesh.group_ranks(axes or mesh.axis_names)))
        group = self.groups[key] = History(key, ranks)
        return group

    def wait(self, work: Any) -> None:
        """Wait for a work of c10d."""
        if self.thread is None:
            self.begin()
        begin = time.monotonic()
        self._set_waiting(begin)
        is_over = False
        try:
            if type(work) is Meeting or (type(work) is Message and self.timed):
                self._wait_beside(work, begin)
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
                world.abandon_groups()
            self._set_waiting(None)
            if self.lookout is not None:
                self.lookout.over.set()
                self.lookout = None

    def _wait_in_slices(self, work: Any, begin: float) -> None:
        pause = 2e-5
        while not (self.timed and self._waited(work)) and not work.is_completed():
            if not self.timed:
                time.sleep(pause)
                pause = min(2 * pause, self.period / 4)
            self.check(begin)
        work.wait()

    def _wait_beside(self, work: Any, begin: float) -> None:
        """Wait in a thread, since the wait must not be timed."""
        failed: list[BaseException] = []

        def wait() -> None:
            try:
                work.wait()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        thread.join(self.period)
        while thread.is_alive():
            self.check(begin)
            thread.join(self.period)
        if failed:
            raise failed[0]

    def _waited(self, work: Any) -> bool:
        """Wait for a work of Gloo for a while. Return whether it has ended well."""
        try:
            work.wait(self.slice)
        except RuntimeError:  # it has failed, or time is up
            return False
        return True

    def _all_gone(self) -> dict[int, str]:
        """The ranks that have left this block, or one around it, by an error. If some only waited for others that have,
        these others."""
        gone, monitor = dict(self.gone), self.outer
        while monitor is not None:
            within(1.0, functools.partial(monitor._hear, world.process_rank()))
            gone, monitor = {**gone, **monitor.gone}, monitor.outer
        return {rank: text for rank, text in gone.items() if f" {PeerError.__name__}: " not in text} or gone

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
        head = f"rank {me} failed at {where}: {str(error).splitlines()[0]}"
        return PeerError(join_failures(head, self._states(ranks), _FAILED))

    def _hurry(self) -> None:
        """Let the threads listen and compare from now on, as in a long wait."""
        self.hurries = True
        if self.outer is not None:
            self.outer._hurry()

    def _parted(self) -> str:
        """What this monitor, or one around it, knows of ranks that have parted."""
        return self.failure or ("" if self.outer is None else self.outer._parted())

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
            self.lookout = Lookout(waited)
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

    # --- what is said of ranks --------------------------------------------------------------------------------------

    def _report(self, waited: float) -> str:
        where, ranks = position()
        me = world.process_rank()
        lines = [*self._states(ranks), *told_by(ranks, waited + 60)]
        head = f"rank {me} has waited {waited:.1f} s at {where}, longer than the deadline of {self.seconds} s:"
        return join_failures(head, lines, LATE)

    def _states(self, ranks: Sequence[int]) -> list[str]:
        """Where other ranks stand, all if ``ranks`` is empty."""
        me, now = world.process_rank(), time.monotonic()
        lines = []
        silence = now - self.answered
        if silence > 3 * self.period + 1:
            lines.append(
                f"the store of torch.distributed has not answered for {silence:.1f} s: the process that holds it, rank "
                "0 without torchrun, has ended or is stopped"
            )
        others = [rank for rank in ranks or range(world.world_size()) if rank != me]
        states = [f"rank {rank} {self._state(rank, now)}" for rank in others]
        lines += sorted(states, key=lambda state: " has waited " in state)[:SHOWN]  # first those that others wait for
        return lines + ([f"and {counted(len(others) - SHOWN, 'other rank')}"] if len(others) > SHOWN else [])

    def _state(self, rank: int, now: float) -> str:
        if rank not in self.heard:
            return self.gone.get(rank, "has told nothing: it has not come to this block, or has ended")
        changed, told = self.heard[rank]
        age = now - changed
        where = f"it was last at {told['at']}" if told["at"] else "it has come to no collective there"
        if rank in self.gone:
            return f"{self.gone[rank]}; {where}"
        if told["left"]:
            return f"has left the block; {where}"
        if age > max(0.6, 4 * self.period) and age > now - self.answered + self.period:
            return f"has given no sign of life for {age:.1f} s: it has ended, or is stopped; {where}"
        if told["waits"] is not None:
            return f"has waited {told['waits'] + age:.1f} s; {where}"
        return f"runs outside of collectives; {where}"

    def _told(self, left: bool = False) -> str:
        """What this rank tells the others."""
        last, waiting, now = self.last, self.waiting, time.monotonic()
        at = "" if last is None else f"{text_of(last)}, {now - last[-1]:.1f} s ago"
        waits = None if waiting is None else now - waiting
        return json.dumps({"at": at, "waits": waits, "left": left, "time": now})

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        me = world.process_rank()
        try:
            self.store = self._channel(self.number)
        except Exception:
            return
        while True:
            try:
                self.store.set(f"at/{me}", self._told())
                waiting = self.waiting
                is_long = self.hurries or (waiting is not None and time.monotonic() - waiting > 2 * self.period)
                if is_long:
                    self._hear(me)
                if self.every and not self.failure:
                    self._compare(me, is_long)
                self.answered = time.monotonic()
            except Exception:
                if self.ended.is_set():
                    return
            if self.ended.wait(self.period):
                return

    def _hear(self, me: int) -> None:
        """Read what other ranks tell."""
        size = world.world_size()
        ranks = range(size) if size <= 64 or self.last is None else self._last_group().ranks
        gone = dict(self.gone)
        for rank in ranks:
            if rank != me and self.store.check([f"at/{rank}"]):
                told = json.loads(self.store.get(f"at/{rank}"))
                if rank not in self.heard or self.heard[rank][1] != told:
                    self.heard[rank] = (time.monotonic(), told)
                if self.store.check([f"left/{rank}"]):
                    gone[rank] = self.store.get(f"left/{rank}").decode()
        self.gone = gone  # all at once: the first to leave is among them

    def _last_group(self) -> History:
        assert self.last is not None
        call = self.last[2]
        return self.groups[key_of(call.mesh, call.axes)]

    def _compare(self, me: int, is_long: bool) -> None:
        """Compare the hashes that are due, and if this rank waits for long, the last collectives of its groups."""
        store = self.store
        if store.check(["parting"]):
            self.failure = store.get("parting").decode()
            return
        for group in list(self.groups.values()):
            parts = False
            while group.due:
                count, mine = group.due[0]
                key = f"hash/{group.key}/{count}"
                if group.ranks[0] == me:
                    store.set(key, str(mine))
                    store.delete_key(f"hash/{group.key}/{count - _KEPT * self.every}")
                elif not store.check([key]):
                    break
                elif int(store.get(key)) != mine:
                    parts = True
                group.due.popleft()
            if is_long:  # perhaps for a rank that waits in another group
                if group.told != group.count:
                    group.told = group.count
                    store.set(f"ring/{group.key}/{me}", ring_text(group))
                parts = parts or self._has_parted(group, me)
            if parts or store.check([f"parted/{group.key}"]):
                self._part(group, me)

    def _has_parted(self, group: History, me: int) -> bool:
        """Whether the last collectives of a waiting rank of the group are others, or a rank has ended with fewer."""
        mine = {count: number for count, number, *_ in group.ring}
        for rank in group.ranks:
            if rank == me:
                continue
            if self.store.check([f"ring/{group.key}/{rank}"]):
                theirs = ring_of(self.store.get(f"ring/{group.key}/{rank}"))
                if any(mine.get(count, number) != number for count, (number, _) in theirs.items()):
                    return True
            if self.store.check([f"end/{rank}"]):
                count, _ = json.loads(self.store.get(f"end/{rank}")).get(group.key, (0, 0))
                if count < group.count:
                    return True
        return False

    def _part(self, group: History, me: int) -> None:
        """Tell the last collectives to all ranks of a group, and make the error of theirs."""
        store = self.store
        for each in list(self.groups.values()):  # other groups may part as well, when this rank has left
            store.set(f"ring/{each.key}/{me}", ring_text(each))
            store.set(f"told/{each.key}/{me}", "")
        store.set(f"parted/{group.key}", "")
        keys = {rank: f"told/{group.key}/{rank}" for rank in group.ranks}
        end = time.monotonic() + 6 * _PERIOD
        while time.monotonic() < end and not store.check(list(keys.values())):
            store.set(f"at/{me}", self._told())
            time.sleep(0.02)
        rings = {
            rank: ring_of(store.get(f"ring/{group.key}/{rank}")) if store.check([keys[rank]]) else {}
            for rank in group.ranks
        }
        self.failure = parting_text(rings)
        store.set("parting", self.failure)

    def _raise_if_parted(self) -> None:
        """Raise the error of ranks that have parted, which this rank's thread may be about to make.

        A rank that has left with it is then no news.
        """
        keys = ["parting", *(f"parted/{group.key}" for group in list(self.groups.values()))]
        if self.every and any(self.store.check([key]) for key in keys):
            end = time.monotonic() + 10 * _PERIOD
            while not self.failure and time.monotonic() < end:
                time.sleep(0.005)
        if self.failure:
            raise LockstepError(self.failure)

    def _meet(self) -> None:
        """Wait for all ranks of this rank's groups, and compare once more."""
        me, limit = world.process_rank(), self.seconds or _MEETING
        counts = {group.key: (group.count, group.hash) for group in self.groups.values()}
        ranks = sorted({rank for group in self.groups.values() for rank in group.ranks} - {me})
        end = time.monotonic() + limit
        while self.store is None and time.monotonic() < end:
            time.sleep(0.001)
        store = self.store
        if store is None:
            return
        store.set(f"end/{me}", json.dumps(counts))
        self._await_all("end", ranks, end)
        ends = {rank: json.loads(store.get(f"end/{rank}")) for rank in ranks}
        for group in list(self.groups.values()):
            mine = [group.count, group.hash]
            if any(ends[rank].get(group.key, [0, 0]) != mine for rank in group.ranks if rank != me):
                self._part(group, me)
                raise LockstepError(self.failure)
        store.set(f"agreed/{me}", "")
        self._await_all("agreed", ranks, end)  # their other groups may have parted

    def _await_all(self, what: str, ranks: list[int], end: float) -> None:
        """Wait until ranks have told something of their end, or one has told of another error."""
        me, store, late = world.process_rank(), self.store, list(ranks)
        while late := [rank for rank in late if not store.check([f"{what}/{rank}"])]:
            if self.failure:
                raise LockstepError(self.failure)
            if gone := [rank for rank in late if store.check([f"left/{rank}"])]:
                self._raise_if_parted()
                lines = [f"rank {rank} {store.get(f'left/{rank}').decode()}" for rank in gone]
                raise PeerError(join_failures(f"rank {me} has come to the end of the block alone:", lines))
            if time.monotonic() > end:
                self._hear(me)
                now = time.monotonic()
                lines = [f"rank {rank} {self._state(rank, now)}" for rank in late[:SHOWN]]
                limit = self.seconds or _MEETING
                head = f"rank {me} has waited {limit} s at the end of the block for {counted(len(late), 'rank')}:"
                raise DeadlineError(join_failures(head, lines, LATE))
            time.sleep(0.005)

    def _last_words(self, text: str) -> None:
        me = world.process_rank()
        store = self._channel(self.number)
        if text:
            store.set(f"left/{me}", text)
        store.set(f"at/{me}", self._told(left=True))
        store.add("ended", 1)
        end = time.monotonic() + _FAREWELL
        while text and me == 0 and store.add("ended", 0) < world.world_size() and time.monotonic() < end:
            time.sleep(0.02)
        self._channel(self.number - 2).delete_key(f"at/{me}")

    def _channel(self, number: int) -> Any:
        return own_store(f"fspmd.monitor/{self.line}/{number}")


_active: Monitor | None = None
