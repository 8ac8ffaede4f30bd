"""Replays: each rank keeps which recorded programs it ran in each of its groups, and ranks compare where they talk.

A replay appends to a list, and no more. The list is sorted into *trails*, one for each group, when it is long or when
somebody asks. A trail has a hash of all replays, so ranks compare by one number; the last replays tell where they
parted.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from fspmd.cache import cached
from fspmd.errors import LockstepError
from fspmd.inspection.histories import History, key_of_ranks, parting_text, ring_of, text_of
from fspmd.meshes import process_groups, world
from fspmd.meshes.mesh import Mesh, groups_along
from fspmd.transport.reports import PATIENCE, own_store, store_here, within

UNSORTED: Final = 1024  # replays that are kept unsorted
_BLOCK = 2048  # replays of a group after which its ranks compare through the store
_KEPT: Final = 16  # blocks whose hashes stay in the store
_SHORT: Final = 16  # replays that each rank tells in a long wait
_PATIENCE: Final = 3.0  # seconds for the last words of ranks that differ
_STORE: Final = "fspmd.replays"


class Replayed:
    """A part of a record that communicates: its forward, or its backward.

    Args:
        name: The recorded function and its line, as errors show them.
        histories: The collectives of the part, for each group.
    """

    __slots__ = ("groups", "name")

    def __init__(self, name: str, histories: Iterable[History]) -> None:
        self.name = name
        #: by group: a hash of the collectives, which its ranks have agreed on; the ranks; the first collective
        self.groups = {each.key: (each.hash, each.ranks, text_of(each.ring[0])) for each in histories}


log: Final[list[Replayed]] = []  # replays that are not sorted
_trails: Final[dict[str, Trail]] = {}  # by group
_sorting: Final = threading.RLock()  # held while trails are read or written, and never over a word with the store
_left_out = False  # whether this rank has run a recorded function without its record


class Trail:
    """The replays of this rank in a group.

    The hash after ``p`` replays is that of the hash at the last end of a block before them, and of the replays since.
    So it depends on the replays alone, and not on when they were sorted.
    """

    __slots__ = ("base", "due", "hash", "key", "ranks", "steps", "told")

    def __init__(self, key: str, ranks: tuple[int, ...]) -> None:
        self.key, self.ranks = key, ranks
        self.steps: list[Replayed] = []  # the last
        self.base = self.hash = 0  # how many came before them, and the hash there
        self.told = 0  # how many the others were told of
        self.due: list[tuple[int, int]] = []  # ends of blocks and hashes there, which are not compared yet

    @property
    def count(self) -> int:
        """How many there were."""
        return self.base + len(self.steps)

    def extend(self, steps: Iterable[Replayed]) -> None:
        """Add replays. Two blocks and the one that has begun stay, so that ranks can tell where they have parted."""
        done = self.count // _BLOCK
        self.steps += steps
        for block in range(done + 1, self.count // _BLOCK + 1):
            self.due.append((block * _BLOCK, self.hash_after(block * _BLOCK)))
        while len(self.steps) >= 3 * _BLOCK:
            self.hash = self.hash_after(self.base + _BLOCK)
            del self.steps[:_BLOCK]
            self.base += _BLOCK

    def hash_after(self, count: int) -> int:
        """The hash after so many replays, of which the last must be among those that are kept."""
        if count == self.base:
            return self.hash
        begin = self.base + (count - self.base - 1) // _BLOCK * _BLOCK
        steps = self.steps[begin - self.base : count - self.base]
        return hash((self.hash_after(begin), *[step.groups[self.key][0] for step in steps]))

    def compared(self, end: int) -> None:
        """Note that ranks have compared up to the end of a block."""
        self.due = [each for each in self.due if each[0] > end]

    def news(self) -> str:
        """The last replays, if there are some of which others were not told; else "". They are told now."""
        if self.told == self.count:
            return ""
        self.told = self.count
        return self.ring_text(_SHORT)

    def ring_text(self, last: int) -> str:
        """The last replays, in the form of `histories.ring_text`."""
        places: dict[str, int] = {}
        ring = []
        for count in range(max(self.base, self.count - last) + 1, self.count + 1):
            step = self.steps[count - self.base - 1]
            text = f"{step.name}, which begins with {step.groups[self.key][2]}"
            ring.append((count, self.hash_after(count), places.setdefault(text, len(places))))
        return json.dumps((list(places), ring))


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
        if world.has_peers() and (error := within(PATIENCE + _PATIENCE, _compare_blocks)):
            raise LockstepError(error)
        with _sorting:
            for trail in _trails.values():
                del trail.due[:-1]  # the last, for which the first rank of the group may be late


def _sort() -> None:
    with _sorting:
        steps = log[:]
        del log[: len(steps)]
        for key, ranks in {key: ranks for step in {*steps} for key, (_, ranks, _) in step.groups.items()}.items():
            trail = _trails.get(key) or _trails.setdefault(key, Trail(key, ranks))
            trail.extend([step for step in steps if key in step.groups])


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
    with _sorting:
        trails = [(trail, list(trail.due)) for trail in _trails.values()]
    for trail, due in trails:
        key = f"hash/{trail.key}"
        for end, mine in due:
            if trail.ranks[0] == me:
                store.set(f"{key}/{end}", str(mine))
                store.delete_key(f"{key}/{end - _KEPT * _BLOCK}")
            elif not store.check([f"{key}/{end}"]):
                break
            elif int(store.get(f"{key}/{end}")) != mine and (text := parting(trail.ranks)):
                return text
            with _sorting:
                trail.compared(end)
    return ""


def compare_long(with_all: bool = False) -> str:
    """In a long wait: tell the last replays of this rank, and return the error if ranks have parted, else "".

    Each rank compares with the first one of each group, or ``with_all``.
    """
    store, me = own_store(_STORE), world.process_rank()
    if store.check(["parting"]):
        return str(store.get("parting").decode())
    with _sorting:
        _sort()
        told = [(trail, trail.news()) for trail in _trails.values()]
    for trail, news in told:
        if news:
            store.set(f"told/{trail.key}/{me}", news)
        others = [rank for rank in (trail.ranks if with_all else trail.ranks[:1]) if rank != me]
        is_parting = store.check([f"parts/{trail.key}"]) or any(_differs(store, trail, rank) for rank in others)
        if is_parting and (text := parting(trail.ranks)):
            return text
    return ""


def _differs(store: Any, trail: Trail, rank: int) -> bool:
    """Whether another rank has told of other replays."""
    if not store.check([f"told/{trail.key}/{rank}"]):
        return False
    theirs = ring_of(store.get(f"told/{trail.key}/{rank}"))
    with _sorting:
        return any(
            trail.base <= count <= trail.count and trail.hash_after(count) != number
            for count, (number, _) in theirs.items()
        )


def parting(ranks: Sequence[int]) -> str:
    """The error for ranks of a group that have parted, or "" if replays are not comparable. All ranks make the same."""
    store, me, key = store_here(_STORE), world.process_rank(), key_of_ranks(ranks)
    if store.check(["left out"]):
        return ""
    _sort()
    if me in ranks:
        with _sorting:
            ring = (_trails.get(key) or Trail(key, tuple(ranks))).ring_text(3 * _BLOCK)
        store.set(f"ring/{key}/{me}", ring)
    store.set(f"parts/{key}", "")
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end and not store.check([f"ring/{key}/{rank}" for rank in ranks]):
        time.sleep(0.02)
    rings = {}
    for rank in ranks:
        told = next((name for name in ("ring", "told") if store.check([f"{name}/{key}/{rank}"])), "")
        rings[rank] = ring_of(store.get(f"{told}/{key}/{rank}")) if told else {}
    text = parting_text(rings, "ranks replayed different records", "", "replay")
    return str(store.compare_set("parting", "", text).decode())  # all tell the first text


def has_replays() -> bool:
    """Whether this rank has replayed records that communicate."""
    return bool(log or _trails)


def hash_of(key: str) -> int:
    """The hash of the replays in a group."""
    with _sorting:
        _sort()
        trail = _trails.get(key)
        return 0 if trail is None else trail.hash_after(trail.count)


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
        return f", after {trail.count} replays, the last of {trail.steps[-1].name}" if trail else ""
