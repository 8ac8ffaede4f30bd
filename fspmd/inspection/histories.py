"""What a rank ran in each of its groups: a history with a hash, and the error for ranks whose histories differ.

A history has collectives (`debug`, and the agreements on new records), or replays of records. Ranks compare histories
through the store: by hashes of what is due, and by the last entries of ranks that wait.
"""

from __future__ import annotations

import json
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch

from fspmd.cache import cached
from fspmd.errors import join_failures
from fspmd.inspection.causes import collective_text
from fspmd.inspection.watch import Communication, communicates
from fspmd.meshes.mesh import Mesh
from fspmd.pairs import Call
from fspmd.transport.call import DTYPES
from fspmd.user_code import UserLine, line_of

_RING: Final = 4096  # the last entries of a group that are kept
PATIENCE: Final = 3.0  # seconds for the last words of ranks that differ
_PAUSE: Final = 0.02  # seconds between two looks for what others tell
SHOWN: Final = 16  # ranks
DIGEST: Final = "with the bits"  # a word of the text of a value
#: the bits of a context that stay: each collective shifts it by eight, so it tells of the last eight
_WINDOW: Final = (1 << 64) - 1
#: facts of a call that moves nothing between processes
_SILENT: Final = (0, "", False)

PARTED: Final = (
    "all ranks must make the same calls in the same order, on equal shapes: take the calls of one rank alone out of "
    "their `if`, or make them on all ranks"
)
VALUES: Final = (
    "give all ranks the same seed and the same tensors: broadcast(tree, src=0), device_put(tree, specs, src=0), or "
    "from_process_local for parts that each rank has loaded; take out of closures what differs by rank"
)


class History:
    """The collectives of this rank in a group, or its replays. ``kept``: how many of the last can be told."""

    __slots__ = ("context", "count", "due", "hash", "key", "known", "met", "ranks", "ring", "told")

    def __init__(self, key: str, ranks: tuple[int, ...], kept: int = _RING) -> None:
        self.key, self.ranks = key, ranks
        self.count = self.hash = self.told = 0
        self.ring: deque[Any] = deque(maxlen=kept)  # the last: count, hash, call, line, dtype, shape, place, time
        #: by count, hashes and sites that were not compared yet; several threads drop them, each by its count
        self.due: dict[int, tuple[int, Any]] = {}
        self.context = 0  # the last eight collectives
        self.known: set[int] = set()  # contexts in which the ranks of the group have met
        self.met: Any = None  # where they met last

    def advance(
        self,
        step: int,
        what: Any,
        line: UserLine | None = None,
        dtype: torch.dtype | None = None,
        shape: tuple[int, ...] = (),
        place: int = 0,
        time: float = 0.0,
        value: int = 0,
    ) -> tuple[Any, ...]:
        """Come to the next collective, of which ``step`` is a hash, and return its entry in the ring.

        Or to a value. Its bits do not count for the context: other data at the same place are nothing new.
        """
        self.hash = hash((self.hash, step, value))
        self.context = (self.context << 8 ^ step) & _WINDOW
        self.count += 1
        entry = (self.count, self.hash, what, line, dtype, shape, place, time)
        self.ring.append(entry)
        return entry

    def compare_due(
        self, store: Any, me: int, kept: int, number_of: Callable[[int, Any], int] = lambda count, sites: 0
    ) -> Iterator[tuple[int, list[int], list[int], Any]]:
        """Compare what is due with the first rank of the group, which tells its own.

        Yields the count, the two numbers of this rank and of the first one, and the sites, where the numbers differ.

        Args:
            store: the store.
            me: this rank.
            kept: hashes of so many entries stay in the store.
            number_of: gives a second number, of the count and the sites, before the first rank tells both.
        """
        for count, (number, sites) in list(self.due.items()):
            key, mine = f"hash/{self.key}/{count}", [number, number_of(count, sites)]
            if self.ranks[0] == me:
                store.set(key, json.dumps(mine))
                store.delete_key(f"hash/{self.key}/{count - kept}")
            elif not store.check([key]):
                return
            elif (theirs := json.loads(store.get(key))) != mine:
                yield count, mine, theirs, sites
            self.due.pop(count, None)

    def tell(self, store: Any, me: int, last: int | None = None) -> None:
        """Tell the last entries, if there are some of which others were not told."""
        if self.told != self.count:
            self.told = self.count
            store.set(f"ring/{self.key}/{me}", ring_text(self, last))

    def differs(self, store: Any, rank: int) -> bool:
        """Whether another rank has told of other entries."""
        key = f"ring/{self.key}/{rank}"
        if not store.check([key]):
            return False
        mine = {count: number for count, number, *_ in list(self.ring)}
        return any(mine.get(count, number) != number for count, (number, _) in ring_of(store.get(key)).items())


def told_by_all(store: Any, keys: Mapping[int, str], is_over: Callable[[], bool]) -> dict[int, str]:
    """What ranks tell under these keys, once all have, or when waiting is over; "" where a rank has told nothing."""
    while not store.check(list(keys.values())) and not is_over():
        time.sleep(_PAUSE)
    return {rank: store.get(key).decode() if store.check([key]) else "" for rank, key in keys.items()}


def over_in(seconds: float) -> Callable[[], bool]:
    """A function that tells whether so many seconds are over."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


@cached
def key_of(mesh: Mesh, axes: tuple[str, ...]) -> str:
    """A short name of the ranks of a group."""
    return key_of_ranks(mesh.group_ranks(axes or mesh.axis_names))


def key_of_ranks(ranks: Iterable[int]) -> str:
    """The same for the ranks themselves."""
    ranks = sorted(ranks)
    return f"{len(ranks)}-{zlib.crc32(repr(ranks).encode()):08x}-{ranks[0]}"


def facts_of_call(call: Call) -> tuple[int, str, bool]:
    """A number for a call that all ranks of its group agree on, the name of the group, and whether blocks are even."""
    mesh, o = call.mesh, call.options
    if mesh.transport != "process_group" or mesh.coordinate() is None or not communicates(call):
        return _SILENT
    if o.index_groups is not None or o.move is not None:  # its ranks are not those of axes
        return _SILENT
    is_even = o.sizes is None and o.concat_sizes is None and o.routes is None
    given = call.pair.name, call.axes, mesh.axis_names, tuple(mesh.shape.values()), tuple(mesh.ranks), o.op, o.dim
    text = repr((*given, o.sizes, o.concat_dim, o.concat_sizes, o.perm, o.root))
    return zlib.crc32(text.encode()) + 1, key_of(mesh, call.axes), is_even


def number_of_line(number: int, line: UserLine) -> int:
    """A number for a call with this one at a line; 0 for none."""
    return number and hash((number, line.number))


def number_of_step(number: int, is_even: bool, dtype: torch.dtype, shape: tuple[int, ...], place: int) -> int:
    """A number for a call at a line on a block. Shapes that may be uneven do not count.

    ``place`` is its number among the collectives of a body or a record. A rank that takes the axes of a mesh in another
    order comes to as many collectives of each group, and may come to them at one line.
    """
    return hash((number, shape if is_even else 0, DTYPES[dtype], place))


def facts_in(communications: Iterable[Communication]) -> list[tuple[int, str, Communication, UserLine, int]]:
    """Of each collective of a record the number, the name of its group, the collective, its line, and its place.

    Outside of records it has another number: a record tells of all its collectives before the first one runs.
    """
    facts = []
    places: Counter[Mesh] = Counter()
    for each in communications:
        line = line_of(each.cause.where)
        number, key, is_even = _SILENT if each.call is None else facts_of_call(each.call)
        if number := number_of_line(number, line):
            places[each.mesh] += 1
            place = places[each.mesh]
            step = number_of_step(number, is_even, each.dtype, each.shape, place)
            facts.append((hash((step, 1)), key, each, line, place))
    return facts


def options_text(call: Call) -> str:
    """`` (max)``, `` (dim 1)``: those options of a call that are not the usual ones."""
    o = call.options
    words = [o.op] * (o.op != "sum")
    numbers = {"dim": o.dim, "to dim": o.concat_dim, "root": o.root}
    words += [f"{name} {value}" for name, value in numbers.items() if value]
    words += [f"{source} to {target}" for source, target in o.perm[:SHOWN]]
    if more := o.perm[SHOWN:]:
        words.append(f"and {len(more)} more, {zlib.crc32(repr(more).encode()):08x}")
    return f" ({', '.join(words)})" if words else ""


def text_of(entry: tuple[Any, ...]) -> str:
    _, _, call, line, dtype, shape, _, _ = entry
    if line is None:  # a replay
        return str(call)
    if isinstance(call, str):  # a value
        return f"{call} ({line.where})"
    plain = call if isinstance(call, Call) else call.call
    kind = f"{plain.pair.name}{options_text(plain)}"
    recorded = "" if plain is call else ", in a record"
    return f"{collective_text(kind, call.mesh, call.axes, dtype, tuple(shape))}{recorded} ({line.where})"


def _placed_text_of(entry: tuple[Any, ...]) -> str:
    """``psum over 'x' of ..., after 2 others``: the text of an entry with its place in the body or the record."""
    before = entry[-2] - 1
    others = "" if before < 1 else f", after {before} other{'s' * (before > 1)}"
    return f"{text_of(entry)}{others}"


def ring_text(group: History, last: int | None = None) -> str:
    """The last entries of a group: texts, and for each entry its count, hash, and the place of its text."""
    places: dict[str, int] = {}
    entries = list(group.ring)[-last if last else 0 :]
    ring = [(entry[0], entry[1], places.setdefault(_placed_text_of(entry), len(places))) for entry in entries]
    return json.dumps((list(places), ring))


def ring_of(text: bytes | str) -> dict[int, tuple[int, str]]:
    """By count the hash and the text of each entry; none for ""."""
    if not text:
        return {}
    texts, ring = json.loads(text)
    return {count: (number, texts[place]) for count, number, place in ring}


def parting_text(
    rings: dict[int, dict[int, tuple[int, str]]],
    what: str = "ranks ran different collectives",
    where: str = " in this block",
    noun: str = "collective",
) -> str:
    """The error for ranks of a group whose last collectives ``where`` differ, or whatever the ``noun`` names."""
    told = {rank: ring for rank, ring in rings.items() if ring}
    counts = sorted({count for ring in told.values() for count in ring})
    oldest = max((min(ring) for ring in told.values()), default=0)
    common = [count for count in counts if count >= oldest]
    other = next((count for count in common if len(_numbers(told, count)) > 1), None)  # a slow rank has fewer
    fewer = (c for c in common if len(told) < len(rings) or any(c not in ring for ring in told.values()))
    first = next(fewer, counts[-1] if counts else 0) if other is None else other
    known = first == 1 or all(first - 1 in ring for ring in told.values() if first in ring)
    ordinal = f"{noun} number {first} of their group{where}"
    head = f"{what}, from {ordinal} on:" if known else f"ranks parted before {ordinal}:"
    lines = []
    for rank in list(rings)[:SHOWN]:
        ring = told.get(rank)
        if ring is None:
            text = f"has told of no {noun} of this group"
        elif first in ring:
            text = ring[first][1]
        else:
            text = f"none; the last was {ring[max(ring)][1]}"
        lines.append(f"rank {rank}: {text}")
    if known and other and all(DIGEST in ring[first][1] for ring in told.values() if first in ring):
        head = "ranks pass other values where all must pass one global value:"
        return join_failures(head, lines, VALUES)
    return join_failures(head, lines, PARTED)


def _numbers(told: dict[int, dict[int, tuple[int, str]]], count: int) -> set[int]:
    """The hashes of the collective with this number."""
    return {ring[count][0] for ring in told.values() if count in ring}
