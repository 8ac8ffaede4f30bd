"""The comparison of ranks: a running hash for each group of the collectives that this rank has come to.

The first rank of a group tells its hash after every N-th collective, and the other ranks compare. If one differs, all
ranks of the group tell their last collectives, which show where they parted. They also compare what they have passed at
each line: see `sites.py`.

A rank that has never come to a collective after the seven before it waits for the other ranks of the group first, so
none gets a message of a size that it does not expect. Steps of training repeat, so later ones wait for nobody.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from torch import Tensor

from fspmd.body import state
from fspmd.cache import cached
from fspmd.digests import digests, of_bytes
from fspmd.errors import DeadlineError, LockstepError, PeerError, join_failures
from fspmd.inspection.agreements import Gathering
from fspmd.inspection.histories import (
    DIGEST,
    SHOWN,
    History,
    facts_in,
    facts_of_call,
    key_of,
    number_of_line,
    number_of_step,
)
from fspmd.inspection.presence import AT_SITE, NEWS, Presence
from fspmd.inspection.sites import Rows, Table, arguments, is_told, kept_rows, number_of, numbers_of
from fspmd.inspection.watch import Communication, Noted
from fspmd.meshes import world
from fspmd.meshes.mesh import Mesh
from fspmd.messages import counted
from fspmd.sharded import Sharded
from fspmd.spec import describe
from fspmd.torch_internals import transforms_active
from fspmd.tracing import is_recording
from fspmd.transport.known_values import ArgumentRow
from fspmd.transport.pending import wait_for
from fspmd.transport.reports import store_needed
from fspmd.user_code import user_line, user_place

_KEPT: Final = 64  # hashes of each group that stay in the store
_CONTEXTS: Final = 65536  # contexts of each group that are kept
_SILENT: Final = 2.0  # seconds after which ranks do not wait for one that gives no sign of life
_MEETING: Final = 60.0  # seconds that ranks wait for each other at the end
_SITES: Final = "sites"  # a topic of the store
LATE: Final = (
    "if a rank only takes longer, allow more seconds; debug() finds ranks that do not run the same collectives, and "
    "lockstep() the first line where they part"
)


@cached
def _number_of_rows(rows: tuple[ArgumentRow, ...]) -> int:
    return of_bytes(repr(rows).encode())


def _number_of_table(table: Table) -> int:
    return zlib.crc32(json.dumps(sorted(table.items())).encode())


@cached
def _has_peers(mesh: Mesh) -> bool:
    return mesh.transport == "process_group" and mesh.coordinate() is not None and mesh.size > 1


class _Assembly(Gathering):
    """A gathering that ends early if a rank gives no sign of life. The backend may then tell that it has ended."""

    def __init__(self, history: History, presence: Presence) -> None:
        super().__init__(history, f"debug/{presence.line}/{presence.number}", history.count)
        self.presence, self.begin = presence, time.monotonic()

    def is_completed(self) -> bool:
        now = time.monotonic()
        if self.has_all():
            return True
        return now - self.begin > _SILENT and any(map(self.presence.is_silent, self.ranks))


class Comparison(Presence):
    """The collectives of this rank within a block of code, and whether those of other ranks are the same.

    It takes the arguments of `Presence`.
    """

    outer: Comparison | None

    def __init__(self, seconds: float | None, every: int, line: str, period: float) -> None:
        super().__init__(seconds, every, line, period)
        self.facts: dict[tuple[int, ...], tuple[Any, list[Any]]] = {}
        self.caller = threading.get_ident()  # calls in other threads may come in any order

    def call(self, call: Noted, x: Tensor, place: int | None = None) -> None:
        """A collective of the program. ``place``: its number in the run of a body, if a block within has found it."""
        number, plain = call.number, call.plain
        if number is None:
            plain.facts = plain.facts or facts_of_call(plain)
            number = call.number = number_of_line(plain.facts[0], call.by)
        if not number:
            return
        if self.failure:
            raise LockstepError(self.failure)
        _, key, is_even = plain.facts
        group = self.groups.get(key) or self._group(plain.mesh, plain.axes, key)
        shape, dtype = x.shape, x.dtype
        if place is None:
            place, here = 0, state.__dict__
            if here["body"] is not None:
                place = here["collectives"] = here["collectives"] + 1
        step = number_of_step(number, is_even, dtype, shape, place)
        self.last = group.advance(step, plain, call.by, dtype, shape, place, time.monotonic())
        if self.outer is not None:
            self.outer.call(call, x, place)
        self._check_step(group)

    def _check_step(self, group: History) -> None:
        """Meet the other ranks of a group in a new context, and let the thread compare every so many collectives."""
        if self.every:
            self._set_due(group)
            if group.context not in group.known:
                self._meet_first(group)

    def _set_due(self, group: History) -> None:
        """Let the thread compare what this rank has come to, if it is time."""
        if not group.count % self.every:
            group.due[group.count] = group.hash, self.sites.table(group.ranks)

    def _is_compared(self, mesh: Mesh) -> bool:
        """Whether other processes pass what this one does, now and on this mesh."""
        return _has_peers(mesh) and not is_recording()

    def value(self, mesh: Mesh, label: str, x: Any) -> None:
        """A value that must be equal on all processes of a mesh comes in. Its digest counts as a collective."""
        if not self._is_compared(mesh):
            return
        if isinstance(x, Tensor):
            if not is_told(x) or transforms_active():
                return
            text, number = f"{label}, {describe(x.dtype, x.shape)}", digests([x])[0]
        elif isinstance(x, bool):  # one rank may be told to print
            return
        else:
            text, number = label, number_of(x)  # hash(-1) == hash(-2)
        if self.failure:
            raise LockstepError(self.failure)
        line, key = user_line(sys._getframe(1)), key_of(mesh, ())
        group = self.groups.get(key) or self._group(mesh, (), key)
        step = hash((zlib.crc32(text.encode()), line.number))
        value = f"{text}, {DIGEST} {number & (1 << 64) - 1:016x}"
        group.advance(step, value, line, time=time.monotonic(), value=number)
        self._set_due(group)

    def layouts(self, mesh: Mesh, to: str, rows: tuple[ArgumentRow, ...]) -> None:
        """The layouts of arguments, of which all processes of a mesh pass the same to a function."""
        if threading.get_ident() == self.caller and self._is_compared(mesh):
            self._pass(mesh, to, _number_of_rows(rows), lambda: partial(iter, rows))

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The user calls a torch function on `Sharded` values, whose arguments must be alike on all processes.

        A call of one Sharded alone passes no global value. If its layout differs, so does the next collective.
        """
        if len(args) == 1 and not kwargs and type(args[0]) is Sharded:
            return
        given = arguments(args, kwargs)
        mesh = None
        for x in given:
            if type(x) is Sharded:
                mesh = x.spec.mesh
                break
        if mesh is None or threading.get_ident() != self.caller or not self._is_compared(mesh):
            return
        numbers = numbers_of(given)
        self._pass(mesh, func, hash(numbers), lambda: kept_rows(func, args, kwargs, numbers))

    def _pass(self, mesh: Mesh, to: Any, number: int, rows: Callable[[], Rows]) -> None:
        """Pass arguments to a function at the user's line."""
        if self.failure:
            raise LockstepError(self.failure)
        if self.thread is None:
            self.begin()
        self.sites.come(mesh, to, user_place(sys._getframe(2)), number, rows)

    def record(self, communications: Sequence[Communication]) -> None:
        known = self.facts.get((id(communications),))
        if known is None:
            known = communications, facts_in(communications)
            if isinstance(communications, tuple):
                self.facts[(id(communications),)] = known
        for number, key, each, line, place in known[1]:
            if self.failure:
                raise LockstepError(self.failure)
            group = self.groups.get(key) or self._group(each.mesh, each.axes, key)
            self.last = group.advance(number, each, line, each.dtype, each.shape, place, time.monotonic())
            self._check_step(group)
        if self.outer is not None:
            self.outer.record(communications)

    @store_needed()
    def _meet_first(self, group: History) -> None:
        """Wait until all ranks of a group have come to this collective, in a context that is new to them.

        Raises:
            LockstepError: they come to different ones.
        """
        if not world.has_peers():
            return
        last, meeting = group.met, _Assembly(group, self)
        if not meeting.is_completed():
            wait_for((meeting,))
        if len(group.known) >= _CONTEXTS:
            group.known.clear()
        group.known.add(group.context)  # also if a rank is silent: it may come yet, and then will not meet here again
        if not meeting.has_all():
            return
        if not meeting.is_one():
            self._part(group, world.process_rank())
            raise LockstepError(self.failure)
        if last is not None:
            last.forget()
        group.met = meeting

    def _group(self, mesh: Mesh, axes: tuple[str, ...], key: str) -> History:
        if self.thread is None:
            self.begin()
        ranks = tuple(sorted(mesh.group_ranks(axes or mesh.axis_names)))
        group = self.groups[key] = History(key, ranks)
        return group

    def _compare(self, me: int, is_long: bool) -> None:
        """Compare the hashes that are due, and if this rank waits for long, the last collectives of its groups."""
        store = self.store
        if self.failure:
            return
        has_news = store.check([NEWS])
        if has_news and store.check(["parting"]):
            self.failure = store.get("parting").decode()
            return
        if is_long and (text := self._circle_text(me)):
            self._fail(text)
            return
        if not self.every:
            return
        if has_news and store.check(["parted"]) and (key := store.get("parted").decode()) not in self.groups:
            # this rank has come to no collective of theirs, so nobody need wait for it, unless it comes right now
            store.compare_set(f"told/{key}/{me}", "", "")
        for group in list(self.groups.values()):
            parts, kept, number_of = False, _KEPT * self.every, partial(self._number_of_sites, group, me)
            for count, mine, theirs, table in group.compare_due(store, me, kept, number_of):
                parts = parts or theirs[0] != mine[0]
                if not parts:
                    self._compare_sites(table, f"{_SITES}/{group.key}/{count}")
            if is_long:  # perhaps for a rank that waits in another group
                group.tell(store, me)
                parts = parts or self._has_parted(group, me)
            if parts or (has_news and store.check([f"parted/{group.key}"])):
                self._part(group, me)
        if has_news and not self.failure and store.check([AT_SITE]):
            self._part_at_site(me)

    def _number_of_sites(self, group: History, me: int, count: int, table: Table) -> int:
        """A number of the sites, which the first rank of the group tells."""
        if group.ranks[0] == me:
            self.store.set(f"{_SITES}/{group.key}/{count}", json.dumps(table))
            self.store.delete_key(f"{_SITES}/{group.key}/{count - _KEPT * self.every}")
        return _number_of_table(table)

    def _meet(self) -> None:
        """Wait for all ranks of this rank's groups, and compare once more."""
        if self.failure:
            raise LockstepError(self.failure)
        me, limit = world.process_rank(), self.seconds or _MEETING
        counts = {group.key: (group.count, group.hash) for group in self.groups.values()}
        table = self.sites.table()
        in_groups = {rank for group in self.groups.values() for rank in group.ranks}
        ranks = sorted((in_groups | self.sites.ranks()) - {me})
        end, store = time.monotonic() + limit, self.store
        store.set(f"{_SITES}/{me}", json.dumps(table))
        store.set(f"end/{me}", json.dumps({**counts, _SITES: _number_of_table(table)}))
        self._await_all("end", ranks, end)
        ends = {rank: json.loads(store.get(f"end/{rank}")) for rank in ranks}
        for group in list(self.groups.values()):
            mine = [group.count, group.hash]
            if any(ends[rank].get(group.key, [0, 0]) != mine for rank in group.ranks if rank != me):
                self._part(group, me)
                raise LockstepError(self.failure)
        others = [rank for rank in ranks if ends[rank][_SITES] != _number_of_table(table)]
        if any(self._compare_sites(table, f"{_SITES}/{rank}") for rank in others):
            self._part_at_site(me)
            self._raise_if_parted()
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
