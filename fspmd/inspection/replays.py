"""Replays: each rank keeps which recorded programs it ran in each of its groups, and ranks compare where they talk.

A replay appends to a list, and no more. The list is sorted into a history for each group, when it is long or when
somebody asks. A history has a hash of all replays, so ranks compare by one number; the last replays tell where they
parted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Final

from fspmd.cache import cached
from fspmd.errors import LockstepError
from fspmd.inspection.histories import (
    PATIENCE,
    History,
    key_of_ranks,
    over_in,
    parting_text,
    ring_of,
    ring_text,
    text_of,
    told_by_all,
)
from fspmd.meshes import process_groups, world
from fspmd.meshes.mesh import Mesh, groups_along
from fspmd.transport import reports
from fspmd.transport.reports import own_store, store_here, within

UNSORTED: Final = 1024  # replays that are kept unsorted
_BLOCK = 2048  # replays of a group after which its ranks compare through the store
_KEPT: Final = 16  # blocks whose hashes stay in the store
_SHORT: Final = 16  # replays that each rank tells in a long wait
_STORE: Final = "fspmd.replays"


class _ReplayedPart:
    """The replay of a record in a group, as errors show it."""

    __slots__ = ("first", "name")

    def __init__(self, name: str, first: str) -> None:
        self.name, self.first = name, first

    def __str__(self) -> str:
        return f"{self.name}, which begins with {self.first}"


class Replayed:
    """A part of a record that communicates: its forward, or its backward.

    Args:
        name: The recorded function and its line, as errors show them.
        histories: The collectives of the part, for each group.
    """

    __slots__ = ("groups",)

    def __init__(self, name: str, histories: Iterable[History]) -> None:
        #: by group: a hash of the collectives, which its ranks have agreed on; the ranks; the name and first collective
        self.groups = {
            each.key: (each.hash, each.ranks, _ReplayedPart(name, text_of(each.ring[0]))) for each in histories
        }


log: Final[list[Replayed]] = []  # replays that are not sorted
_trails: Final[dict[str, History]] = {}  # the replays of this rank, by group
_sorting: Final = threading.RLock()  # held while trails are read or written, and never over a word with the store
_left_out = False  # whether this rank has run a recorded function without its record


def note(step: Replayed) -> None:
    """Note a replay. `programs.replay` writes these lines into what it makes."""
    log.append(step)
    if len(log) >= UNSORTED:
        sort()


def _forget() -> None:
    """Begin anew, in a new world."""
    global _left_out
    with _sorting:
        log.clear()
        _trails.clear()
        _left_out = False


process_groups.let_go_with_groups(_forget)


def sort() -> None:
    """Sort the replays into trails. Where a block has ended, compare through the store.

    Raises:
        LockstepError: the ranks of a group have parted.
    """
    _sort()
    if any(trail.due for trail in list(_trails.values())):
        if world.has_peers() and (error := within(reports.PATIENCE + PATIENCE, _compare_blocks)):
            raise LockstepError(error)
        for trail in list(_trails.values()):
            for count in list(trail.due)[:-1]:  # the last stays, for which the first rank of the group may be late
                trail.due.pop(count, None)


def _sort() -> None:
    with _sorting:
        steps = log[:]
        del log[: len(steps)]
        for step in steps:
            for key, (number, ranks, part) in step.groups.items():
                if (trail := _trails.get(key)) is None:
                    trail = _trails[key] = _new_trail(key, ranks)
                trail.advance(number, part)
                if not trail.count % _BLOCK:
                    trail.due[trail.count] = trail.hash, None


def _new_trail(key: str, ranks: Sequence[int]) -> History:
    """The replays in a group. Of two blocks and the one that has begun, ranks can tell where they have parted."""
    return History(key, tuple(ranks), 3 * _BLOCK)


def leave_out() -> None:
    """Tell all ranks that this one runs a recorded function without its record, so replays are no longer comparable."""
    global _left_out
    if not _left_out and world.has_peers():
        _left_out = True
        store_here(_STORE).set("left out", "")


def _compare_blocks() -> str:
    """Compare the hashes at ends of blocks, and return the error if ranks have parted."""
    store, me = own_store(_STORE), world.process_rank()
    if store.check(["parting"]):
        return str(store.get("parting").decode())
    for trail in list(_trails.values()):
        for _ in trail.compare_due(store, me, _KEPT * _BLOCK):
            if text := parting(trail.ranks):
                return text
    return ""


def compare_long(with_all: bool = False) -> str:
    """In a long wait: tell the last replays of this rank, and return the error if ranks have parted, else "".

    Each rank compares with the first one of each group, or ``with_all``.
    """
    store, me = own_store(_STORE), world.process_rank()
    if store.check(["parting"]):
        return str(store.get("parting").decode())
    _sort()
    for trail in list(_trails.values()):
        trail.tell(store, me, _SHORT)
        others = [rank for rank in (trail.ranks if with_all else trail.ranks[:1]) if rank != me]
        is_parting = store.check([f"parts/{trail.key}"]) or any(trail.differs(store, rank) for rank in others)
        if is_parting and (text := parting(trail.ranks)):
            return text
    return ""


def parting(ranks: Sequence[int]) -> str:
    """The error for ranks of a group that have parted, or "" if replays are not comparable. All ranks make the same."""
    store, me, key = store_here(_STORE), world.process_rank(), key_of_ranks(ranks)
    if store.check(["left out"]):
        return ""
    _sort()
    if me in ranks:
        store.set(f"ring/{key}/{me}", ring_text(_trails.get(key) or _new_trail(key, ranks)))
        store.set(f"told/{key}/{me}", "")
    store.set(f"parts/{key}", "")
    told_by_all(store, {rank: f"told/{key}/{rank}" for rank in ranks}, over_in(PATIENCE))
    rings = told_by_all(store, {rank: f"ring/{key}/{rank}" for rank in ranks}, lambda: True)
    texts = {rank: ring_of(text) for rank, text in rings.items()}
    text = parting_text(texts, "ranks replayed different records", "", "replay")
    return str(store.compare_set("parting", "", text).decode())  # all tell the first text


def has_replays() -> bool:
    """Whether this rank has replayed records that communicate."""
    return bool(log or _trails)


def hash_of(key: str) -> int:
    """The hash of the replays in a group."""
    with _sorting:
        _sort()
        trail = _trails.get(key)
        return 0 if trail is None else trail.hash


@cached
def _keys(mesh: Mesh) -> tuple[str, ...]:
    """The groups of this rank along each set of axes of a mesh, in the order of `_sets`."""
    return tuple(key_of_ranks(mesh.group_ranks(axes)) for axes in _sets(mesh))


def _sets(mesh: Mesh) -> list[tuple[str, ...]]:
    """The sets of axes of a mesh."""
    live = [axis for axis, size in mesh.shape.items() if size > 1]
    return [tuple(axis for i, axis in enumerate(live) if bits >> i & 1) for bits in range(1, 1 << len(live))]


def replay_hashes(mesh: Mesh) -> list[int]:
    """The hashes of the replays of this rank along each set of axes of a mesh; [] if there were none.

    Their number depends on the mesh alone, else.
    """
    _sort()
    return [hash_of(key) for key in _keys(mesh)] if _trails and world.has_peers() else []


def compare_replays(rows: Sequence[Sequence[int]], mesh: Mesh) -> None:
    """Compare the `replay_hashes` of all ranks of a mesh, row-major. Each rank has the same rows.

    Raises:
        LockstepError: on all ranks alike, ranks of a group have parted.
    """
    if all(row == rows[0] for row in rows) or not world.has_peers():
        return
    for i, axes in enumerate(_sets(mesh)):
        for positions in groups_along(mesh, axes):
            if len({rows[at][i] if rows[at] else 0 for at in positions}) > 1:
                ranks = sorted(mesh.ranks[at] for at in positions)
                if text := parting(ranks):
                    raise LockstepError(text)


def last_replays(ranks: Sequence[int]) -> str:
    """``after 17 replays, the last of jit(f) (train.py:12)``: the replays of this rank in a group; "" for none."""
    with _sorting:
        _sort()
        trail = _trails.get(key_of_ranks(ranks)) if ranks else None
        return f", after {trail.count} replays, the last of {trail.ring[-1][2].name}" if trail else ""
