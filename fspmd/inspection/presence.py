"""Messages of ranks about their positions, through the store of torch.distributed.

A thread beside the program tells every quarter of a second that this rank lives, at which collective it was last, and
since when it waits. While this rank waits for long, the thread reads what the others tell.

Where ranks have parted, each tells its last collectives, or what it has passed at a site, and all raise one error: that
of the first rank which has heard them all. Ranks that wait for each other in a circle raise one, too.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from fspmd.errors import LockstepError, join_failures
from fspmd.inspection.histories import (
    PARTED,
    SHOWN,
    History,
    key_of,
    parting_text,
    ring_of,
    ring_text,
    text_of,
    told_by_all,
)
from fspmd.inspection.sites import CallSites, Table, parted, site_text
from fspmd.inspection.watch import Note
from fspmd.meshes import world
from fspmd.messages import counted
from fspmd.transport.pending import under_way
from fspmd.transport.reports import beside, store_here


@dataclass(frozen=True, slots=True)
class Wait:
    """The wait of a rank, as it told.

    Attributes:
        group: The name of the group that it waits in.
        count: The number of the collective, among those of the group, that it must leave before it goes on.
        ranks: The ranks of the group.
        counts: By group, how many collectives the rank has come to.
        at: The collective, and its line.
    """

    group: str
    count: int
    ranks: tuple[int, ...]
    counts: Mapping[str, int]
    at: str = ""


def circle(me: int, waits: Mapping[int, Wait]) -> list[int]:
    """Return ranks of which each waits for the next, and the last for the first; [] if ``me`` waits for no such ranks.

    A rank waits for those of its group that have come to fewer collectives of the group. What ranks told may be old: if
    one of a circle had gone on since, the next would have told of a higher count. So a circle is no false alarm.

    >>> x, y = (0, 1), (1, 2)
    >>> first = Wait("x", 5, x, {"x": 5})
    >>> circle(0, {0: first, 1: Wait("y", 7, y, {"x": 4, "y": 7}), 2: Wait("z", 1, (0, 2), {"y": 6, "z": 1})})
    [0, 1, 2]
    >>> circle(0, {0: first, 1: Wait("y", 7, y, {"x": 4, "y": 7})})
    []
    """
    path: list[int] = []
    seen: set[int] = set()

    def search(rank: int) -> list[int]:
        if rank in path:
            return path[path.index(rank) :]
        if rank in seen or rank not in waits:
            return []
        seen.add(rank)
        path.append(rank)
        wait = waits[rank]
        for other in wait.ranks:
            is_late = other in waits and waits[other].counts.get(wait.group, 0) < wait.count
            if is_late and (chain := search(other)):
                return chain
        path.pop()
        return []

    return search(me)


PERIOD: Final = 0.25  # seconds between two signs of life
_MANY: Final = 64  # of so many ranks each is heard, and named
_LONG: Final = 1.0  # seconds after which a wait is told in full
FAREWELL: Final = 1.5  # seconds in which the others may read what the first rank has told: its process has the store
_TELLING: Final = 1.5  # seconds that ranks which have parted wait for a rank to tell of itself
_LIVING: Final = 4.0  # the same, for a rank that gives signs of life
AT_SITE: Final = "parted at"  # a key of the store: the site at which ranks have parted
NEWS: Final = "news"  # a key of the store that is set before any other that tells of ranks which have parted
_entries: Final[dict[str, Iterator[int]]] = {}  # how often each line was entered


class Presence(Note):
    """This rank within a block of code, as it tells of itself, and the other ranks there, as they have told.

    Args:
        seconds: The time that the meeting at the end may take; None for a minute.
        every: After how many collectives of a group its ranks compare; 0 for no comparison.
        line: Where the block begins. Ranks meet in the block that each of them enters there for the same time.
        period: The seconds between two signs of life.
    """

    def __init__(self, seconds: float | None, every: int, line: str, period: float) -> None:
        self.seconds, self.every = seconds, every
        self.failure = ""  # ranks have parted
        self.sites = CallSites()
        self.line, self.number = line, next(_entries.setdefault(line, itertools.count()))
        self.period = period
        self.groups: dict[str, History] = {}
        self.last: tuple[Any, ...] | None = None  # the last collective, as in a ring, and its time
        self.waiting: float | None = None  # since when this rank waits
        self.hurries = False  # the backend has failed
        self.thread: threading.Thread | None = None
        self.ended = threading.Event()
        self.heard: dict[int, tuple[float, dict[str, Any]]] = {}  # by rank: when it changed, what it told
        self.gone: dict[int, str] = {}  # ranks that left by an error
        self.answered = 0.0  # when the store did
        self.opened: Any = None  # the store over a connection of our own

    @property
    def store(self) -> Any:
        """The store of this block. While the thread opens its connection, the main thread uses that of torch."""
        return self._channel(self.number) if self.opened is None else self.opened

    def has_store(self) -> bool:
        """Whether there is a store: that of the world, or what a connection has kept of it."""
        return self.opened is not None or world.initialised()

    def begin(self) -> None:
        """Start the thread."""
        self.answered = time.monotonic()
        self.thread = beside(self._run, "fspmd-monitor")

    def _run(self) -> None:
        me = world.process_rank()
        if self.ended.is_set():  # the store may have ended, too
            return
        try:
            self.opened = self._channel(self.number)
        except Exception:
            return
        while not self.ended.is_set():
            try:
                self.store.set(f"at/{me}", self._told())
                waiting = self.waiting
                is_long = self.hurries or (waiting is not None and time.monotonic() - waiting > 2 * self.period)
                if is_long:
                    self._hear(me)
                self._compare(me, is_long)
                self.answered = time.monotonic()
            except Exception:
                if self.ended.is_set():
                    return
            self.ended.wait(self.period)

    def _compare(self, me: int, is_long: bool) -> None:
        """What the thread does besides. ``is_long``: this rank waits for long."""

    def _told(self, left: bool = False) -> str:
        """What this rank tells the others."""
        last, waiting, now = self.last, self.waiting, time.monotonic()
        at = "" if last is None else f"{text_of(last)}, {now - last[-1]:.1f} s ago"
        waits = None if waiting is None else now - waiting
        told: dict[str, Any] = {"at": at, "waits": waits, "left": left, "time": now}
        if waits and waits > _LONG and (wait := self._wait()) is not None:
            told["wait"] = asdict(wait)
        return json.dumps(told)

    def _wait(self) -> Wait | None:
        """The wait of this rank for others; None if others could not tell which it waits for.

        It may wait for an older collective than the last, by a handle.
        """
        begin = self.waiting
        if begin is None or self.last is None or under_way():
            return None
        group = self._last_group()
        if len(group.ranks) > _MANY:
            return None
        counts = {each.key: each.count for each in list(self.groups.values())}
        wait = Wait(group.key, group.count, group.ranks, counts, text_of(self.last))
        return wait if self.waiting is begin else None

    def _waits(self, me: int) -> dict[int, Wait]:
        """The waits of all ranks that have told of one, and of this rank."""
        mine = self._wait()
        told = {rank: Wait(**told["wait"]) for rank, (_, told) in self.heard.items() if told.get("wait")}
        return told if mine is None else {**told, me: mine}

    def _hear(self, me: int) -> None:
        """Read what other ranks tell."""
        size = world.world_size()
        ranks = range(size) if size <= _MANY or self.last is None else self._last_group().ranks
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

    def _states(self, ranks: Sequence[int]) -> list[str]:
        """Where other ranks stand, all if ``ranks`` is empty."""
        me, now = world.process_rank(), time.monotonic()
        lines = []
        silence = now - self.answered
        if self.opened is None:
            lines.append("this rank still opens its connection to the store of torch.distributed")
        elif silence > 3 * self.period + 1:
            lines.append(
                f"the store of torch.distributed has not answered for {silence:.1f} s: the process that holds it, rank "
                "0 without torchrun, has ended or is stopped"
            )
        others = [rank for rank in ranks or range(world.world_size()) if rank != me]
        others += [rank for rank in self.heard if rank not in others and self.is_silent(rank)]  # others wait for them
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
        if self.is_silent(rank):
            return f"has given no sign of life for {age:.1f} s: it has ended, or is stopped; {where}"
        if told["waits"] is not None:
            return f"has waited {told['waits'] + age:.1f} s; {where}"
        return f"runs outside of collectives; {where}"

    def is_silent(self, rank: int) -> bool:
        """Whether another rank has told nothing of late, or nothing at all. This rank listens while it waits."""
        if rank == world.process_rank():
            return False
        now = time.monotonic()
        age = now - self.heard[rank][0] if rank in self.heard else math.inf
        return age > max(0.6, 4 * self.period) and age > now - self.answered + self.period

    def lives(self, rank: int) -> bool:
        """Whether another rank is in this block, and has given a sign of life of late."""
        return rank in self.heard and not (rank in self.gone or self.heard[rank][1]["left"] or self.is_silent(rank))

    def _last_words(self, text: str, store: Any) -> None:
        """Tell the others that this rank leaves; ``store``: None if only this thread can open it."""
        me, store = world.process_rank(), store or self.store
        if text:
            store.set(f"left/{me}", text)
        store.set(f"at/{me}", self._told(left=True))
        store.add("ended", 1)
        end = time.monotonic() + FAREWELL
        while text and me == 0 and store.add("ended", 0) < world.world_size() and time.monotonic() < end:
            time.sleep(0.02)
        if self.opened is not None:
            self._channel(self.number - 2).delete_key(f"at/{me}")

    def _channel(self, number: int) -> Any:
        return store_here(f"fspmd.monitor/{self.line}/{number}")

    # --- ranks that have parted ---------------------------------------------------------------------------------------

    def _fail(self, text: str) -> None:
        """Let all ranks raise an error: this one, or the first that a rank has made."""
        self.store.set(NEWS, "")
        self.failure = self.store.compare_set("parting", "", text).decode()

    def _compare_sites(self, mine: Table, key: str) -> bool:
        """Compare with the sites that another rank has told under a key. Let all tell of the first that differs."""
        text = parted(mine, json.loads(self.store.get(key))) if self.store.check([key]) else ""
        if text:
            self.store.set(NEWS, "")
            self.store.compare_set(AT_SITE, "", text)
        return bool(text)

    def _part_at_site(self, me: int) -> None:
        """Tell what was passed at the site where ranks have parted, and make the error of what all tell."""
        site = self.sites.find(self.store.get(AT_SITE).decode())
        if site is None:  # the ranks that have it make the error
            self.store.set(f"site/{me}", "")
        else:
            told = self._exchange("site", site.ranks, site.text(), me)
            self._fail(site_text(told))

    def _exchange(self, topic: str, ranks: Sequence[int], text: str, me: int) -> dict[int, str]:
        """Tell a text, and wait a while for those of other ranks. Return all; "" where a rank has told none."""
        store, begin = self.store, time.monotonic()
        store.set(f"{topic}/{me}", text)
        keys = {rank: f"{topic}/{rank}" for rank in ranks}

        def is_over() -> bool:
            waited = time.monotonic() - begin
            late = [rank for rank in ranks if rank != me and not store.check([keys[rank]])]
            if waited > max(map(self._patience, late), default=0) or store.check(["parting"]):
                return True  # no text is to come, or another rank has made the error
            store.set(f"at/{me}", self._told())
            self._hear(me)
            self.answered = time.monotonic()
            return False

        return told_by_all(store, keys, is_over)

    def _patience(self, rank: int) -> float:
        """The seconds in which a rank tells of itself."""
        seconds = _LIVING if self.lives(rank) else _TELLING
        return seconds if self.seconds is None else min(seconds, self.seconds / 2)

    def _circle_text(self, me: int) -> str:
        """The error for ranks that wait for each other in a circle; "" if this rank waits for none."""
        waits = self._waits(me)
        ranks = circle(me, waits)
        if not ranks:
            return ""
        lines = [
            f"rank {rank} waits for rank {after} at {waits[rank].at}"
            for rank, after in zip(ranks, [*ranks[1:], ranks[0]], strict=True)
        ]
        return join_failures("ranks wait for each other in a circle:", lines, PARTED)

    def _has_parted(self, group: History, me: int) -> bool:
        """Whether the last collectives of a waiting rank of the group are others, or a rank has ended with fewer."""
        for rank in group.ranks:
            if rank == me:
                continue
            if group.differs(self.store, rank):
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
            store.set(f"told/{each.key}/{me}", "told")
        for key, value in ((NEWS, ""), (f"parted/{group.key}", ""), ("parted", group.key)):
            store.set(key, value)
        told = self._exchange(f"told/{group.key}", group.ranks, "told", me)
        rings = {rank: ring_of(store.get(f"ring/{group.key}/{rank}")) if word else {} for rank, word in told.items()}
        self._fail(parting_text(rings))

    def _raise_if_parted(self) -> None:
        """Raise the error of ranks that have parted, which this rank's thread may be about to make.

        A rank that has left with it is then no news.
        """
        keys = ["parting", AT_SITE, *(f"parted/{group.key}" for group in list(self.groups.values()))]
        if self.every and any(self.store.check([key]) for key in keys):
            end = time.monotonic() + _LIVING + _TELLING
            while not self.failure and time.monotonic() < end:
                time.sleep(0.005)
        if self.failure:
            raise LockstepError(self.failure)
