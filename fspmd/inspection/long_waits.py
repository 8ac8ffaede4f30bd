"""Long waits: a rank that waits for long tells the others where, and hears of those that have failed or ended.

Each process tells once where it runs, so others on its machine can see whether it has ended. The error of a collective
whose backend has failed names the collective, and what other ranks have told.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Final

from fspmd.cache import cached
from fspmd.errors import FspmdError, LockstepError, PeerError, join_failures
from fspmd.inspection.causes import Rendezvous, position
from fspmd.inspection.replays import compare_long, has_replays, last_replays
from fspmd.inspection.watch import compares
from fspmd.meshes import process_groups, world
from fspmd.transport.pending import SLICE, Meeting, Message, explain_with, go_on_with, is_over
from fspmd.transport.reports import (
    PATIENCE,
    beside,
    failures,
    last_failure,
    own_store,
    store_here,
    tell_failure,
    within,
)

_PROCESSES: Final = Path("/proc")
_STORE: Final = "fspmd.lives"


@cached
def _machine() -> str:
    """A name of this machine, and of the numbers that processes have on it: a container has its own."""
    try:
        boot = (_PROCESSES / "sys/kernel/random/boot_id").read_text().strip()
        return f"{platform.node()} {boot} {os.readlink(_PROCESSES / 'self/ns/pid')}"
    except OSError:
        return platform.node()


def _facts(process: int) -> tuple[str, str]:
    """The state of a process of this machine, and when it began; "X" for one that has ended, "?" if it is not known."""
    with contextlib.suppress(PermissionError):
        try:
            os.kill(process, 0)  # which sends nothing
        except ProcessLookupError:
            return "X", ""
    try:
        fields = (_PROCESSES / str(process) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "?", ""
    return fields[0], fields[19]


def _tell() -> None:
    """Tell the other processes of a new world where this one runs."""
    if world.has_peers():
        told = _machine(), os.getpid(), _facts(os.getpid())[1]
        with contextlib.suppress(RuntimeError):
            store_here(_STORE).set(str(world.process_rank()), json.dumps(told))


def ended(ranks: Iterable[int], or_stopped: bool = False) -> dict[int, str]:
    """Those of some ranks on this machine whose process has ended, ``or_stopped``: a text by rank."""
    causes, store = {}, own_store(_STORE)
    for rank in ranks:
        if store.check([str(rank)]):
            machine, process, began = json.loads(store.get(str(rank)))
            if machine != _machine():
                continue
            state, since = _facts(process)
            if state in "XZ" or (state != "?" and since != began):
                causes[rank] = f"has ended: its process {process} is gone"
            elif state in "Tt" and or_stopped:
                causes[rank] = f"is stopped: its process {process}"
    return causes


_PERIOD: Final = 0.5  # seconds between two looks
#: a rank that has told of a failure may have gone on; then it comes within so many seconds
_GRACE: Final = 3.0
_AT_ONCE: Final = timedelta(milliseconds=1)
_SKEW: Final = 5.0  # seconds before the wait in which a failure counts
#: seconds without an answer of the store, after which ranks that can only meet there wait in vain; to open a connection
#: may take five
_SILENCE: Final = 12.0
_PAUSE: Final = 3.0  # seconds between two checks, which come once in a second or sooner
STORE_ENDED: Final = (
    "the store of torch.distributed does not answer: the process that holds it, rank 0 without torchrun, has ended or "
    "is stopped"
)
_PATIENCE: Final = 1.0  # seconds for the end of a thread, which a store that is gone may hold up


class Lookout:
    """Looks out for a wait, which is the context. When it has taken a slice, a thread tells the other ranks of it, and
    hears of their failures.

    Args:
        needs_all: The wait ends only when all ranks of the group have come to the store.
        waited: The seconds until now.
    """

    thread: threading.Thread | None = None

    def __init__(self, needs_all: bool = False, waited: float = 0.0) -> None:
        self.needs_all, self.begin = needs_all, time.monotonic() - waited

    def start(self, frame: FrameType | None = None) -> None:
        """Start the thread. ``frame``: the innermost frame of the thread that waits, if it is another one."""
        self.where, self.ranks = position(frame)
        self.parted = ""  # the error of ranks that have parted
        self.news: list[str] = []  # of ranks that have failed
        self.over = threading.Event()
        self.answered = self.checked = time.monotonic()  # when the store did, and when this rank last asked
        self.thread = beside(self._run, "fspmd-lookout")

    @property
    def is_vain(self) -> bool:
        """Whether this rank waits in vain."""
        return self.thread is not None and bool(self.parted or self.news)

    def __enter__(self) -> Lookout:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """End the thread. One that is in a call of C++ when the interpreter ends would abort the process."""
        if isinstance(error, (PeerError, LockstepError)):
            process_groups.abandon_groups()
        if self.thread is not None:
            self.over.set()
            self.thread.join(_PATIENCE)

    def check(self) -> None:
        """Raise an error if this rank waits in vain."""
        now = time.monotonic()
        if self.thread is None:
            if now - self.begin > SLICE.total_seconds():
                self.start()
            return
        if self.parted:
            raise LockstepError(self.parted)
        if now - self.checked > _PAUSE:  # this process was stopped, and the thread with it
            self.answered += now - self.checked
        self.checked = now
        is_silent = self.needs_all and now - self.answered > _SILENCE
        if news := self.news or [STORE_ENDED] * is_silent:
            raise PeerError(join_failures(f"rank {world.process_rank()} waits in vain at {self.where}:", news, ADVICE))

    def _run(self) -> None:
        me = world.process_rank()
        others = [rank for rank in self.ranks or range(world.world_size()) if rank != me]
        try:
            store = own_store("fspmd.waits")
            while not self.over.wait(_PERIOD):
                waited = time.monotonic() - self.begin
                at = self.where + last_replays(self.ranks)
                told = {"at": at, "ranks": self.ranks, "waits": waited, "time": time.time()}
                store.set(str(me), json.dumps(told))
                if not compares():  # `debug` compares more
                    self.parted = compare_long()
                news = [
                    f"rank {rank} {text}, {age:.1f} s ago"
                    for rank, (age, text) in failures(others).items()
                    if _GRACE < age < waited + _SKEW and text != last_failure()
                ]
                if self.needs_all and not news:
                    news = [f"rank {rank} {text}" for rank, text in ended(others).items()]
                self.news = news
                self.answered = time.monotonic()
            store.delete_key(str(me))
        except Exception:  # the store has ended
            self.answered -= _SILENCE


def wait_long(work: Any) -> None:
    """Go on with a wait that has taken a slice.

    Raises:
        PeerError: another rank has failed since.
        LockstepError: ranks have replayed different records.
    """
    with Lookout(isinstance(work, Rendezvous), SLICE.total_seconds()) as lookout:
        lookout.start()
        while not is_over(work, SLICE):
            lookout.check()


_message_waits: Final[dict[int, tuple[Message, Lookout]]] = {}  # by thread
_watcher: threading.Thread | None = None


def wait_whole(work: Message | Meeting) -> None:
    """Wait for a work whose wait cannot be cut.

    Raises:
        PeerError, LockstepError: as with `wait_long`.
    """
    if isinstance(work, Meeting):
        with Lookout(needs_all=True) as lookout:
            wait_beside(work, lookout.check, _PERIOD)
        return
    global _watcher
    if _watcher is None:
        _watcher = threading.Thread(target=_watch, name="fspmd-watch", daemon=True)
        _watcher.start()
    me = threading.get_ident()
    if me == threading.main_thread().ident:
        _forget_interrupts()
    with Lookout() as lookout:
        _message_waits[me] = work, lookout
        try:
            work.wait()
        except RuntimeError:
            if lookout.is_vain:
                lookout.where, _ = position()
                lookout.check()
            raise
        finally:
            del _message_waits[me]  # no call comes before it: Python raises an interrupt after a call


def _watch() -> None:
    while True:
        time.sleep(_PERIOD)
        for thread in list(_message_waits):
            _look_after(thread)


def _look_after(thread: int) -> None:
    """Look out for a thread whose message takes long. If it waits in vain or is interrupted, end its group's works."""
    if (watched := _message_waits.get(thread)) is None:
        return
    work, lookout = watched
    is_interrupted = thread == threading.main_thread().ident and _is_interrupted()
    if is_interrupted or (lookout.is_vain and _message_waits.get(thread) is watched):
        with contextlib.suppress(RuntimeError):
            work.work.wait(_AT_ONCE)
    elif lookout.thread is None and time.monotonic() - lookout.begin > SLICE.total_seconds():
        lookout.start(sys._current_frames().get(thread))


_signals: int | None = None  # the end of a pipe to which Python writes signals; -1 if it writes them elsewhere


def _forget_interrupts() -> None:
    """Hear of signals from now on, in the main thread. Python itself raises an interrupt only after a wait of torch."""
    global _signals
    if _signals is None:
        _signals, into = os.pipe()
        for end in (_signals, into):
            os.set_blocking(end, False)
        before = signal.set_wakeup_fd(into, warn_on_full_buffer=False)
        if before != -1:  # an event loop hears of them
            signal.set_wakeup_fd(before)
            _signals = -1
    _is_interrupted()


def _is_interrupted() -> bool:
    """Return whether Ctrl-C has come since the last question, and will raise ``KeyboardInterrupt``."""
    if _signals is None or _signals == -1:
        return False
    try:
        came = signal.SIGINT in os.read(_signals, 1 << 16)
    except BlockingIOError:
        return False
    return came and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def wait_beside(work: Any, check: Callable[[], None], period: float) -> None:
    """Wait for a work in another thread, and call ``check`` every few seconds, which may raise an error."""
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            work.wait()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(period)
    try:
        while thread.is_alive():
            check()
            thread.join(period)
    except BaseException:
        for over in [each for each in _left if not each.is_alive()]:
            del _left[over]
        _left[thread] = work
        raise
    if failed:
        raise failed[0]


_left: Final[dict[threading.Thread, Any]] = {}  # threads that still wait for a work, which nobody else does


@atexit.register
def _end_waits() -> None:
    """End the waits of threads for messages. One that ended with the interpreter would abort the process."""
    for thread, work in _left.items():
        if thread.is_alive() and type(work) is Message:
            with contextlib.suppress(RuntimeError):
                work.work.wait(_AT_ONCE)  # this ends all works of the group
            thread.join(_PATIENCE)


def waits(ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
    """The long waits that ranks have told of, by rank: at which place, for which ranks, and for how many seconds."""

    def ask() -> dict[int, dict[str, Any]]:
        store = own_store("fspmd.waits")
        told_by = {rank: json.loads(store.get(str(rank))) for rank in ranks if store.check([str(rank)])}
        for told in told_by.values():
            told["waits"] += time.time() - told["time"]
        return told_by

    return within(PATIENCE, ask, {})  # type: ignore[no-any-return]


def waits_told_by(ranks: Sequence[int]) -> list[str]:
    """A line for each other rank that has told of a long wait."""
    told_by = waits(_others(ranks))
    return [f"rank {rank} has waited {told['waits']:.1f} s at {told['at']}" for rank, told in sorted(told_by.items())]


ADVICE: Final = (
    "see the output of the ranks that have ended; fspmd.deadline(seconds) and fspmd.debug() tell where all ranks stand"
)


_LAST_WORDS: Final = 2.0  # seconds in which other ranks may tell why they have ended
_SHOWN: Final = 8  # ranks
#: parts of the texts of Gloo and NCCL for a lost connection
_LOST: Final = ("onnection closed", "onnection reset", "roken pipe", "ead error", "rite error", "ocket", "onnect")


def told_by(ranks: Sequence[int], since: float = 600.0) -> list[str]:
    """What other ranks have told of their failures in the last seconds: a line for each."""
    told = within(PATIENCE, lambda: failures(_others(ranks)), {})
    return [f"rank {rank} {text}, {age:.1f} s ago" for rank, (age, text) in sorted(told.items()) if age < since]


def _others(ranks: Sequence[int]) -> list[int]:
    me = world.process_rank()
    return [rank for rank in ranks or range(world.world_size()) if rank != me]


def what_failed(error: RuntimeError) -> str:
    """What has failed, in our words, if a connection is lost or time is over; else the text of the backend."""
    text = str(error).splitlines()[0]
    if any(part in text for part in _LOST):
        return "the connection to another rank is lost"
    return "the time limit of the process group is over" if "imed out" in text else text


def gone(ranks: Sequence[int]) -> list[str]:
    """A line for each other rank that is known to have ended, or to be stopped."""
    causes = within(PATIENCE, lambda: ended(_others(ranks), or_stopped=True))
    return [STORE_ENDED] if causes is None else [f"rank {rank} {text}" for rank, text in sorted(causes.items())]


def _causes(ranks: Sequence[int]) -> list[str]:
    """A line for each other rank that has ended, or has told of an error that is not the loss of another rank."""
    told = told_by(ranks)
    return [*gone(ranks), *(line for line in told if f" {PeerError.__name__}: " not in line)] or told


def _silent(ranks: Sequence[int]) -> list[str]:
    """The other ranks that have told neither of a lost connection, nor of a long wait, nor of an error."""
    store = own_store("fspmd.lost")
    told = {*waits(ranks or range(world.world_size())), *failures(_others(ranks))}
    silent = [rank for rank in _others(ranks) if rank not in told and not store.check([str(rank)])]
    return [f"rank {rank} has told nothing: it has ended, is stopped, or computes" for rank in silent]


def _explained(error: RuntimeError) -> FspmdError | None:
    """The error in the place of torch's."""
    if isinstance(error, FspmdError):
        return None
    where, ranks = position()
    end, me = time.monotonic() + _LAST_WORDS, world.process_rank()
    lines = gone(ranks)
    if lines != [STORE_ENDED]:
        within(PATIENCE, lambda: own_store("fspmd.lost").set(str(me), where))
        while not (causes := _causes(ranks)) or has_replays():
            if parted := within(PATIENCE, lambda: compare_long(with_all=True), ""):
                return LockstepError(parted)
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        lines = [*(causes or within(PATIENCE, lambda: _silent(ranks), [])), *waits_told_by(ranks)][:_SHOWN]
    head = f"rank {me} failed at {where}: {what_failed(error)}{':' * bool(lines)}"
    failure = PeerError(join_failures(head, lines, ADVICE))
    tell_failure(failure)
    return failure


def install() -> None:
    """Tell in each world where this process runs; let errors of c10d become `PeerError`s, and long waits hear of other
    ranks."""
    process_groups.at_new_world(_tell)
    explain_with(_explained)
    go_on_with(wait_long, wait_whole)
