"""Ranks that have parted: each tells its last collectives, or what it has passed at a site, and all raise one error.

The error is that of the first rank which has heard them all. Ranks that wait for each other in a circle raise one, too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Final

from fspmd.errors import LockstepError, join_failures
from fspmd.inspection.histories import (
    PARTED,
    History,
    parting_text,
    ring_of,
    ring_text,
)
from fspmd.inspection.presence import Presence, circle
from fspmd.inspection.sites import CallSites, Table, parted, site_text

_TELLING: Final = 1.5  # seconds that ranks which have parted wait for a rank to tell of itself
_LIVING: Final = 4.0  # the same, for a rank that gives signs of life
AT_SITE: Final = "parted at"  # a key of the store: the site at which ranks have parted
NEWS: Final = "news"  # a key of the store that is set before any other that tells of ranks which have parted


class Parting(Presence):
    """What this rank has passed within a block, and how it finds with the others where they have parted.

    Args:
        seconds: The time that the meeting at the end may take; None for a minute.
        every: After how many collectives of a group its ranks compare; 0 for no comparison.
        line: Where the block begins.
        period: The seconds between two signs of life.
    """

    def __init__(self, seconds: float | None, every: int, line: str, period: float) -> None:
        super().__init__(line, period)
        self.seconds, self.every = seconds, every
        self.failure = ""  # ranks have parted
        self.sites = CallSites()

    def _fail(self, text: str) -> None:
        """Let all ranks raise an error: this one, or the first that a rank has made."""
        self.store.set(NEWS, "")
        self.failure = self.store.compare_set("parting", "", text).decode()

    def _compare_sites(self, mine: Table, key: str) -> bool:
        """Compare with the sites that another rank has told under a key. Let all tell of the first that differs."""
        found = parted(mine, json.loads(self.store.get(key))) if self.store.check([key]) else ""
        if found:
            self.store.set(NEWS, "")
            self.store.compare_set(AT_SITE, "", found)
        return bool(found)

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
        store = self.store
        store.set(f"{topic}/{me}", text)
        keys = {rank: f"{topic}/{rank}" for rank in ranks}
        begin = time.monotonic()
        while not store.check(list(keys.values())):
            waited = time.monotonic() - begin
            late = [rank for rank in ranks if rank != me and not store.check([keys[rank]])]
            if waited > max(map(self._patience, late), default=0) or store.check(["parting"]):
                break  # no text is to come, or another rank has made the error
            store.set(f"at/{me}", self._told())
            self._hear(me)
            self.answered = time.monotonic()
            time.sleep(0.02)
        return {rank: store.get(key).decode() if store.check([key]) else "" for rank, key in keys.items()}

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
