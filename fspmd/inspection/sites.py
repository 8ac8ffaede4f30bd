"""Sites: the lines at which a rank passes global values and layouts, and what it has passed there.

A rank may make a call alone that does not communicate: it prints, for example. So calls are not numbered, as
collectives are. Ranks compare what they have passed at the same line, where both have come to it equally often.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from fspmd.digests import of_bytes
from fspmd.errors import join_failures
from fspmd.inspection.histories import SHOWN, VALUES, key_of
from fspmd.meshes.mesh import Mesh
from fspmd.ops.traits import name_of
from fspmd.transport.known_values import ArgumentRow
from fspmd.user_code import UserLine

#: of each site: how often this rank has come, and the hash of what it has passed
Table = dict[str, list[int]]

#: tells what was passed
Rows = Callable[[], Iterable[ArgumentRow]]

_KEPT: Final = 64  # the last changes of a site
_LEAVES: Final = 4  # that a line of a message shows
_LAYOUTS: Final = "the layout of a value must not depend on the rank: give all ranks the same shapes, dtypes and specs"


class Change(NamedTuple):
    """What a rank passes from a coming on, other than before."""

    came: int
    number: int
    rows: Rows


class _Told(NamedTuple):
    """The same, as another rank has read it."""

    came: int
    number: int
    rows: list[tuple[str, str, bool]]


class CallSite:
    """A line that passes values, under one line that calls its function, and what it has passed."""

    __slots__ = ("changes", "count", "hash", "key", "number", "ranks", "where")

    def __init__(self, key: str, ranks: tuple[int, ...], where: str) -> None:
        self.key, self.ranks, self.where = key, ranks, where
        self.count = self.hash = 0
        self.number: int | None = None  # of what was passed last
        self.changes: deque[Change] = deque(maxlen=_KEPT)

    def come(self, number: int, rows: Callable[[], Rows]) -> None:
        """Come to the line once more, and pass what has this number."""
        self.count += 1
        if number != self.number:
            self.number, self.hash = number, hash((self.hash, self.count, number))
            self.changes.append(Change(self.count, number, rows()))

    def text(self) -> str:
        """What other ranks read of it."""
        return json.dumps([self.where, [(came, number, [*rows()]) for came, number, rows in list(self.changes)]])


class CallSites:
    """All sites of a rank."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[Mesh, Any, int], CallSite] = {}
        self._by_ranks: dict[tuple[int, ...], dict[str, CallSite]] = {}

    def come(self, mesh: Mesh, to: Any, place: tuple[UserLine, int], number: int, rows: Callable[[], Rows]) -> None:
        """Come to a line that passes values on a mesh to a torch function, or to the function with a name."""
        line, number_of_place = place
        site = self._by_place.get((mesh, to, number_of_place))
        if site is None:
            ranks, name = tuple(sorted(mesh.ranks)), to if isinstance(to, str) else name_of(to)
            key = f"{of_bytes(f'{key_of(mesh, ())} {name} {number_of_place}'.encode()):x}"
            site = self._by_ranks.setdefault(ranks, {}).setdefault(key, CallSite(key, ranks, line.where))
            self._by_place[mesh, to, number_of_place] = site
        site.come(number, rows)

    def find(self, key: str) -> CallSite | None:
        """The site with a key."""
        return next((sites[key] for sites in list(self._by_ranks.values()) if key in sites), None)

    def ranks(self) -> set[int]:
        """All ranks that may have one of the sites."""
        return set().union(*self._by_ranks)

    def table(self, ranks: Iterable[int] = ()) -> Table:
        """The sites of meshes that have all of these ranks."""
        wanted = {*ranks}
        found = [sites for of_mesh, sites in list(self._by_ranks.items()) if wanted.issubset(of_mesh)]
        return {key: [site.count, site.hash] for sites in found for key, site in list(sites.items())}


def parted(mine: Table, theirs: Table) -> str:
    """The key of the first site at which two ranks have passed other values; "" if there is none."""
    for key, (count, number) in mine.items():
        if key in theirs and theirs[key][0] == count and theirs[key][1] != number:
            return key
    return ""


def site_text(told: dict[int, str]) -> str:
    """The error for ranks that have passed other values at a site, by what each tells of it ("": nothing)."""
    sites = {rank: json.loads(text) for rank, text in told.items() if text}
    changes = {rank: [_Told(*each) for each in rows] for rank, (_, rows) in sites.items()}
    oldest = max(each[0].came for each in changes.values())
    comings = sorted({change.came for each in changes.values() for change in each if change.came >= oldest})
    passed = [{rank: _passed(each, came) for rank, each in changes.items()} for came in comings]
    first = next((now for now in passed if len({change.number for change in now.values()}) > 1), passed[-1])
    rows = {rank: {label: (text, is_layout) for label, text, is_layout in now.rows} for rank, now in first.items()}
    every = dict.fromkeys(label for each in rows.values() for label in each)
    others = [label for label in every if len({each.get(label) for each in rows.values()}) > 1]
    lines = []
    for rank in list(told)[:SHOWN]:
        if rank not in rows:
            lines.append(f"rank {rank}: has told of no such call")
            continue
        texts = [label + rows[rank][label][0] for label in others if label in rows[rank]]
        shown = "; ".join(texts[:_LEAVES]) or f"other values before its last {_KEPT}"
        more = f"; and {len(texts) - _LEAVES} more" if len(texts) > _LEAVES else ""
        lines.append(f"rank {rank}: {shown}{more} ({sites[rank][0]})")
    if any(each[label][1] for each in rows.values() for label in others if label in each):
        return join_failures("ranks pass values of other layouts:", lines, _LAYOUTS)
    return join_failures("ranks pass other values where all must pass one global value:", lines, VALUES)


def _passed(changes: list[_Told], came: int) -> _Told:
    """What was passed at a coming."""
    return [change for change in changes if change.came <= came][-1]
