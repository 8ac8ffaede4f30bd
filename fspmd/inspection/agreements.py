"""Agreements: the ranks of a group compare their next collectives through the store, before they run them."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

from torch.distributed import distributed_c10d as c10d

from fspmd.cache import Cache
from fspmd.errors import DeadlineError, LockstepError, join_failures
from fspmd.inspection.causes import Rendezvous, position
from fspmd.inspection.histories import (
    PARTED,
    PATIENCE,
    SHOWN,
    History,
    over_in,
    parting_text,
    ring_of,
    ring_text,
    told_by_all,
)
from fspmd.inspection.long_waits import waits
from fspmd.inspection.replays import hash_of, parting
from fspmd.inspection.watch import compares
from fspmd.meshes import world
from fspmd.messages import counted
from fspmd.torch_internals import time_limit
from fspmd.transport.pending import under_way, wait_for
from fspmd.transport.reports import store_here, store_needed, tell_failure

_LIMIT: Final = timedelta(minutes=30)  # where the backend tells none
_SHORTEST, _LONGEST = 2e-4, 0.02  # seconds between two looks
_IN_VAIN: Final = 3.0  # seconds that another rank has waited for this one


class _Agreed:
    """What the groups of a world have agreed on."""

    def __init__(self) -> None:
        self.last: dict[str, Agreement] = {}  # of each group
        self.known: dict[str, Cache[int, None]] = {}  # hashes


@functools.lru_cache(maxsize=1)
def _agreed_in(default: Any) -> _Agreed:
    """What was agreed on under a default group, of which this gets a weak reference."""
    return _Agreed()


class Gathering:
    """The ranks of a group come with a hash of their collectives. It is waited for like a work of c10d.

    Args:
        history: The collectives of this rank in the group.
        topic: A prefix of the keys in the store.
        number: The number of the gathering, among those of the group and topic.
        more: Other words that the ranks come with.
    """

    def __init__(self, history: History, topic: str, number: int, *more: str) -> None:
        self.ranks, self.words = history.ranks, (str(history.hash), *more)
        self.store = store_here(f"fspmd.{topic}/{history.key}")
        self.number, self.me = number, world.process_rank()
        for word in self.words:
            self.store.add(f"{number}/{word}", 1)
        self.store.add(f"{number}", 1)

    def has_all(self) -> bool:
        """Whether all ranks have come."""
        return bool(self.store.add(f"{self.number}", 0) >= len(self.ranks))

    def is_completed(self) -> bool:
        """Whether nobody waits any longer."""
        return self.has_all()

    def is_one(self, i: int = 0) -> bool:
        """Whether all ranks that have come bring the same collectives; instead: their other word ``i``."""
        return bool(self.store.add(f"{self.number}/{self.words[i]}", 0) >= len(self.ranks))

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait until it is completed.

        Raises:
            RuntimeError: the time is over.
        """
        end = None if limit is None else time.monotonic() + limit.total_seconds()
        pause = _SHORTEST
        while not self.is_completed():
            now = time.monotonic()
            self.look(now)
            if end is not None and now > end:
                raise RuntimeError("the time is over")
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST)

    def look(self, now: float) -> None:
        """Raise an error if this rank waits in vain."""

    def forget(self) -> None:
        """Delete the keys. All ranks have read them, if they have come to a later gathering."""
        if self.me == self.ranks[0]:
            for word in self.words:
                self.store.delete_key(f"{self.number}/{word}")
            self.store.delete_key(f"{self.number}")


class Agreement(Gathering, Rendezvous):
    """A comparison of the collectives that each rank of a group is about to run."""

    def __init__(self, history: History, what: str, number: int) -> None:
        Rendezvous.__init__(self, what, history.ranks)
        Gathering.__init__(self, history, "agreements", number, f"after {hash_of(history.key)}")
        self.history = history
        self.begin = self.looked = time.monotonic()
        limit = time_limit(c10d.GroupMember.WORLD) or _LIMIT
        self.limit = limit.total_seconds()
        self.store.set(f"{number}/{self.me}", "")

    def look(self, now: float) -> None:
        """Look once a second for the ranks that have not come.

        Raises:
            LockstepError: a rank that has not come waits for this one.
            DeadlineError: a rank has not come within the time limit of the process group.
        """
        if now - self.looked > 1:
            self.looked = now
            self._look(now - self.begin)

    def _look(self, waited: float) -> None:
        late = [rank for rank in self.ranks if not self.store.check([f"{self.number}/{rank}"])]
        waiting = waits(late)
        in_vain = any(self.me in told["ranks"] and told["waits"] > _IN_VAIN for told in waiting.values())
        is_over = waited > self.limit
        if not is_over and (not in_vain or waited < _IN_VAIN or under_way()):
            return
        lines = []
        for rank in late[:SHOWN]:
            told = waiting.get(rank)
            waits_at = (
                f"has waited {told['waits']:.1f} s at {told['at']}" if told else "has not come, and waits for nobody"
            )
            lines.append(f"rank {rank} {waits_at}")
        where, _ = position()
        head = f"rank {self.me} has come to {where}, but in {waited:.1f} s {counted(len(late), 'rank')} did not:"
        raise (DeadlineError if is_over else LockstepError)(join_failures(head, lines, PARTED))

    def differ(self) -> LockstepError:
        """The error for ranks that bring different collectives. All ranks make the same."""
        keys = {rank: f"{self.number}/ring/{rank}" for rank in self.ranks}
        self.store.set(keys[self.me], ring_text(self.history))
        told = told_by_all(self.store, keys, over_in(PATIENCE))
        rings = {rank: ring_of(text) for rank, text in told.items()}
        return LockstepError(parting_text(rings, "ranks have recorded different collectives", " in the record"))

    def forget(self) -> None:
        super().forget()
        self.store.delete_key(f"{self.number}/{self.me}")


@store_needed()
def agree(histories: Iterable[History], what: str) -> None:
    """Wait until all ranks of each group have come with the same collectives, unless they have agreed on them before.

    ``what`` is about to run them. The store has a few messages of each rank for each group, once.

    Raises:
        LockstepError: ranks come with other collectives, or after other replays, or wait elsewhere for those that have
            come.
        DeadlineError: a rank does not come within the time limit of the process group, or of `deadline`.
        PeerError: another rank has failed.
    """
    default = c10d.GroupMember.WORLD
    if default is None or not world.has_peers() or compares():  # `debug` compares more
        return
    agreed = _agreed_in(weakref.ref(default))
    agreements = []
    for history in histories:
        if history.hash not in agreed.known.setdefault(history.key, Cache()):
            last = agreed.last.get(history.key)
            agreement = agreed.last[history.key] = Agreement(history, what, last.number + 1 if last else 1)
            agreements.append((last, agreement))
    try:
        for last, agreement in agreements:
            if not agreement.is_completed():
                wait_for((agreement,))
            if not agreement.is_one(1) and (parted := parting(agreement.ranks)):
                raise LockstepError(parted)
            if not agreement.is_one():
                raise agreement.differ()
            if last is not None:
                last.forget()
            agreed.known[agreement.history.key][agreement.history.hash] = None
    except (LockstepError, DeadlineError) as error:
        tell_failure(error)
        raise
