"""What a move of layouts takes at least, by any route: the estimate of the search in `routes`.

An *island* is the ranks that fast links join. What an island lacks has to come over slower links, and is shared among
its ranks at best; what a rank lacks beyond that comes over fast ones, in another collective: one alone goes at the
speed of its slowest link. Pending sums that end are lacked whole.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from fspmd.entries import blocks
from fspmd.meshes.mesh import Mesh
from fspmd.redistribution.cost import Topology
from fspmd.spec import TensorSpec

T = TypeVar("T")
Axes = tuple[str, ...]
Rows = tuple[tuple[int, int], ...]  # of one dim: from, to


def bound(target: TensorSpec, topology: Topology) -> Callable[[TensorSpec], float]:
    """A function from a layout to µs that no route from there to ``target`` can beat.

    It looks at the ranks that stand first or last along each axis: as a bound that of some of them will do.
    """
    mesh = target.mesh
    levels = _levels(mesh, topology)
    latency, scale = min((level.latency for level in levels), default=0.0), target.dtype.itemsize
    lacked_by = [(_lacked_by(target, level.island), _received_by(target, level.island)) for level in levels]
    heard_by, cut, shape = _heard_by(target), target.partition.axes, tuple(target.shape)

    @functools.cache
    def least(spec: TensorSpec) -> float:
        lacked = [max(count(spec) for count in counts) for counts in lacked_by]
        if not any(lacked):
            return 0.0
        added = spec.partition.unreduced - target.partition.unreduced
        heard = heard_by(spec)
        terms = prod([mesh.shape[axis] for axis in added])
        rounds, ending = _ending(mesh, topology, added, cut, shape, heard)
        begun = max(_begun(max(2, heard * terms), latency, topology, 2), ending)
        at_once, apart = _times(levels, lacked, max(2, heard * terms, rounds + 1), begun, topology.launch, scale, _ONE)
        return float(apart if terms > 1 and heard > 1 else min(at_once, apart))

    return least


@dataclass(frozen=True, slots=True)
class _Level:
    """Links that are no quicker than some, and the axes of quicker ones, which join ranks to islands."""

    bandwidth: float
    latency: float  # the least of them
    island: frozenset[str]


@functools.lru_cache(maxsize=1024)
def _levels(mesh: Mesh, topology: Topology) -> tuple[_Level, ...]:
    """The slowest first."""
    links = {axis: topology.link(mesh, (axis,)) for axis, n in mesh.shape.items() if n > 1}
    found = []
    for speed in sorted({link.bandwidth for link in links.values()}):
        latency = min(link.latency for link in links.values() if link.bandwidth <= speed)
        found.append(_Level(speed, latency, frozenset(a for a, link in links.items() if link.bandwidth > speed)))
    return tuple(found)


def closely(spec: TensorSpec, target: TensorSpec, topology: Topology) -> float:
    """The same as a function of both."""
    return bounded(target, topology)(spec)


@functools.lru_cache(maxsize=256)
def bounded(target: TensorSpec, topology: Topology) -> Callable[[TensorSpec], float]:
    """`bound`, made once."""
    return bound(target, topology)


def least_times(sources: Sequence[TensorSpec], targets: Sequence[TensorSpec], topology: Topology) -> Tensor:
    """µs ``[sources, targets]`` that no route can beat, of many layouts of one tensor at a time.

    Of what the last rank, or its island, lacks; and of sums: where m are added up, and k ranks then have the sum,
    there are m - 1 messages until one has it, and k - 1 from there on. The last collective writes a block.
    """
    mesh, levels = targets[0].mesh, _levels(targets[0].mesh, topology)
    if mesh.size == 1 or any(spec.flat for spec in (*sources, *targets)):  # which have no windows
        return torch.zeros(len(sources), len(targets), dtype=torch.float64)
    latency, scale = min(level.latency for level in levels), targets[0].dtype.itemsize
    lacked_by = [[f(sources, targets, level.island) for f in (_lacks, _receives)] for level in levels]
    lacked = [torch.maximum(*counts) for counts in lacked_by]
    rounds, ending = _endings(sources, targets, topology)
    heard = _hears(sources, targets)
    counts, of = heard.unique(return_inverse=True)
    begun = torch.tensor([_begun(n, latency, topology, 2) for n in counts.tolist()], dtype=torch.float64)[of]
    heard, begun = torch.maximum(heard, rounds + 1), torch.maximum(begun, ending)
    least = torch.minimum(*_times(levels, lacked, heard, begun, topology.launch, scale, _MANY))
    written = torch.tensor([prod(spec.block_shape) for spec in targets], dtype=torch.float64)
    anything = functools.reduce(torch.maximum, lacked) > 0
    return torch.where(anything, least + written * scale / topology.memory, 0.0)


class _Kind(NamedTuple):
    """What reckons with numbers: with one, or with a table of them."""

    smaller: Any
    larger: Any
    chosen: Any  # of a condition, what holds where it does, and where not


_ONE: Final = _Kind(min, max, lambda condition, one, other: one if condition else other)
_MANY: Final = _Kind(torch.minimum, torch.maximum, torch.where)


def _times(
    levels: Sequence[_Level], lacked: Sequence[Any], heard: Any, begun: Any, launch: float, scale: int, of: _Kind
) -> tuple[Any, Any]:
    """µs of what is lacked at each level: all in one collective as slow as its slowest link; in two and more."""
    time = told = slow = speed = lacked[0] * 0.0
    for level, count in zip(levels, lacked, strict=True):  # of the first at which something is lacked:
        slow, speed = of.chosen(told > 0, slow, level.latency), of.chosen(told > 0, speed, level.bandwidth)
        most = of.larger(told, count)
        time, told = time + (most - told) * scale / level.bandwidth, most
    at_once = launch + slow * (heard - 1) + told * scale / speed
    return at_once, time + of.larger(begun, 2 * launch + slow)


def _summed(staying: Any, added: Any, then: Any, of: _Kind) -> Any:
    """Shares of a rank that are received where so many are added up and then held, ``staying`` times."""
    return of.smaller(staying * (added + then - 2), staying * added + then - 2)


def _dims(
    sources: Sequence[TensorSpec], targets: Sequence[TensorSpec], count: Callable[[int, Axes, Axes], int]
) -> Tensor:
    """The product over dims of what is counted of two layouts of a dim, of that size."""
    found = torch.ones(len(sources), len(targets), dtype=torch.float64)
    for d, size in enumerate(targets[0].shape):
        entries = [[spec.partition.dim_axes[d] for spec in specs] for specs in (sources, targets)]
        before, after = (list(dict.fromkeys(own)) for own in entries)
        table = torch.tensor([[count(size, one, other) for other in after] for one in before], dtype=torch.float64)
        rows = torch.tensor([before.index(one) for one in entries[0]])
        found *= table[rows][:, [after.index(one) for one in entries[1]]]
    return found


def _lacks(sources: Sequence[TensorSpec], targets: Sequence[TensorSpec], island: frozenset[str]) -> Tensor:
    """Elements that the last rank lacks of its block, shared among its island; all where sums end outside."""
    sizes = targets[0].mesh.shape

    def rows(size: int, axes: Axes) -> Rows:
        return _rows(size, _cuts(axes, sizes), tuple([None if axis in island else sizes[axis] - 1 for axis in axes]))

    def shared(size: int, one: Axes, other: Axes) -> int:
        return _common(rows(size, one), rows(size, other))

    common = _dims(sources, targets, shared)
    whole = _dims(targets[:1], targets, lambda n, _, other: shared(n, other, other))
    _, added, _, _ = _sums(sources, targets, island)
    return torch.where(added > 1, whole, whole - common) / prod(sizes[axis] for axis in island)


def _hears(sources: Sequence[TensorSpec], targets: Sequence[TensorSpec]) -> Tensor:
    """How many ranks' blocks are in what the last rank has in the end, 2 or more."""
    sizes = targets[0].mesh.shape
    found = _dims(sources, targets, lambda n, one, other: _overlapped(n, _cuts(one, sizes), _cuts(other, sizes)))
    _, added, _, _ = _sums(sources, targets, frozenset())
    return (found * added).long().clamp(min=2)


def _receives(sources: Sequence[TensorSpec], targets: Sequence[TensorSpec], island: frozenset[str]) -> Tensor:
    """Elements that a rank receives at least from other islands, on average."""
    staying, added, now, then = _sums(sources, targets, island)
    copies = torch.minimum(staying * (then - now), staying + then - 2).clamp(min=0)
    shares = torch.where(added > 1, _summed(staying, added, then, _MANY), copies)
    return shares * (prod(targets[0].shape) / targets[0].mesh.size)


def _sums(
    sources: Sequence[TensorSpec], targets: Sequence[TensorSpec], island: frozenset[str]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Over axes outside of islands: how many sums stay, how many are added up, how often each is held before, after."""
    sizes = {axis: n for axis, n in targets[0].mesh.shape.items() if n > 1 and axis not in island}
    counts = [float(prod(itertools.compress(sizes.values(), bits))) for bits in _bits(len(sizes))]
    ranks = torch.tensor(counts, dtype=torch.float64)

    def mask(chosen: Set[str]) -> int:
        return sum((axis in chosen) << i for i, axis in enumerate(sizes))

    pending = [torch.tensor([mask(spec.partition.unreduced) for spec in specs]) for specs in (sources, targets)]
    cut = [torch.tensor([mask(spec.partition.axes) for spec in specs]) for specs in (sources, targets)]
    every = len(ranks) - 1
    now, then = (ranks[every & ~own & ~also] for own, also in zip(pending, cut, strict=True))
    return ranks[pending[0][:, None] & pending[1]], ranks[pending[0][:, None] & ~pending[1]], now[:, None], then


@functools.lru_cache(maxsize=1 << 12)
def _ending(
    mesh: Mesh, topology: Topology, added: frozenset[str], cut: frozenset[str], shape: tuple[int, ...], heard: int = 1
) -> tuple[int, float]:
    """Of sums over axes of a tensor that is ``cut`` by some in the end: the rounds of one collective, and µs.

    Each axis is gone through once, and where ranks then have whole sums once more, or their parts are put together by
    other collectives. These do not end sums, and those fetch no other blocks, of which so many are ``heard``.
    """
    latency = {axis: topology.link(mesh, (axis,)).latency for axis, n in mesh.shape.items() if n > 1}
    axes = [axis for axis in latency if axis in added]
    if not axes:
        return 0, 0.0
    quickest, parts = min(latency.values()), prod(mesh.shape[axis] for axis in cut)
    fetching = _begun(heard, quickest, topology) if heard > 1 else 0.0

    def joining(scattered: Axes) -> float:
        if cut.issuperset(scattered):
            return fetching
        slowest, counts = max(latency[axis] for axis in scattered if axis not in cut), map(ranks, _choices(scattered))
        pieces = max(n for n in counts if not any(size % n for size in shape))
        count = max(2, heard, -(-pieces // parts))
        at_once = topology.launch + slowest * (count - 1)
        return min(at_once, _begun(count, quickest, topology, 2) + slowest - quickest)

    def adding(scattered: Axes) -> float:
        passed = sorted([(latency[axis], mesh.shape[axis], axis not in scattered) for axis in axes])
        return _passing(topology.launch, tuple(passed))

    def ranks(over: Sequence[str]) -> int:
        return prod([mesh.shape[axis] for axis in over])

    time = min(adding(scattered) + joining(scattered) for scattered in _choices(axes))
    return (1 if cut.issuperset(axes) else 2) * (ranks(axes) - 1), time


@functools.lru_cache(maxsize=1 << 12)
def _passing(launch: float, axes: tuple[tuple[float, int, bool], ...]) -> float:
    """µs of going through axes in one collective or in several: of each its latency, its size, and whether twice."""
    if not axes:
        return 0.0
    found = []
    for also in _choices(range(1, len(axes))):
        group = [axes[0], *[axes[i] for i in also]]
        left = tuple([axis for i, axis in enumerate(axes) if i and i not in also])
        rounds = (prod([n for _, n, _ in group]) - 1) * (2 if any(twice for *_, twice in group) else 1)
        found.append(launch + rounds * max(group)[0] + _passing(launch, left))
    return min(found)


def _choices(axes: Sequence[T]) -> Iterable[tuple[T, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(len(axes) + 1))


def _endings(sources: Sequence[TensorSpec], targets: Sequence[TensorSpec], topology: Topology) -> tuple[Tensor, Tensor]:
    """The same for many layouts."""
    mesh = targets[0].mesh
    before = [spec.partition.unreduced for spec in sources]
    after = [(spec.partition.unreduced, spec.partition.axes) for spec in targets]
    rows, columns, shape = list(dict.fromkeys(before)), list(dict.fromkeys(after)), tuple(targets[0].shape)
    found = [[_ending(mesh, topology, own - pending, cut, shape) for pending, cut in columns] for own in rows]
    table = torch.tensor(found, dtype=torch.float64)
    of = torch.tensor([rows.index(one) for one in before]), torch.tensor([columns.index(one) for one in after])
    rounds, time = table[of[0]][:, of[1]].unbind(-1)
    return rounds.long(), time


def _bits(count: int) -> list[list[int]]:
    return [[one >> i & 1 for i in range(count)] for one in range(1 << count)]


def _heard_by(target: TensorSpec) -> Callable[[TensorSpec], int]:
    """How many blocks of a layout are in what the last rank has in the end."""
    sizes = target.mesh.shape

    @functools.cache
    def overlapped(dim: int, before: Axes) -> int:
        return _overlapped(target.shape[dim], _cuts(before, sizes), _cuts(target.partition.dim_axes[dim], sizes))

    def heard(spec: TensorSpec) -> int:
        return prod(map(overlapped, itertools.count(), spec.partition.dim_axes))

    return heard


@functools.lru_cache(maxsize=1 << 14)
def _overlapped(size: int, before: tuple[int, ...], after: tuple[int, ...]) -> int:
    """How many blocks of one way to cut a dim the last block of another one overlaps."""
    if not size:
        return 1
    start, length = blocks(size, after)[-1]
    return max(1, sum(begin < start + length and start < begin + own for begin, own in blocks(size, before) if own))


def _received_by(target: TensorSpec, island: frozenset[str]) -> Callable[[TensorSpec], float]:
    """Elements that the ranks of islands receive from others at least, on average."""
    sizes = {axis: n for axis, n in target.mesh.shape.items() if axis not in island}
    pending, cut = target.partition.unreduced, target.partition.axes
    having = prod(n for axis, n in sizes.items() if axis not in pending and axis not in cut)
    share = prod(target.shape) / target.mesh.size

    def received(spec: TensorSpec) -> float:
        sums = [(axis, n) for axis, n in sizes.items() if axis in spec.partition.unreduced]
        added = prod(n for axis, n in sums if axis not in pending)
        if added == 1:
            return 0.0
        staying = prod(n for axis, n in sums if axis in pending)
        summed: float = share * _summed(staying, added, having, _ONE)
        return summed

    return received


def _begun(count: int, latency: float, topology: Topology, fewest: int = 1) -> float:
    """µs until a rank has so many blocks, its own among them, by ``fewest`` collectives or more.

    In a round it receives at most what another one holds, so after collectives of r, s ... rounds it has at most
    (1 + r)(1 + s) ... blocks; the rounds are fewest where all have as many.
    """
    ways = range(fewest, max(fewest + 1, count.bit_length()))
    return min(n * (topology.launch + latency * (math.pow(count, 1 / n) - 1)) for n in ways)


def _lacked_by(target: TensorSpec, island: frozenset[str]) -> Callable[[TensorSpec], float]:
    """Elements that the ranks of an island lack of the target, for each of its ranks; of the island that lacks most.

    Of the islands at the corners, at the first ranks along pending axes.
    """
    names, sizes, pending = target.mesh.axis_names, target.mesh.shape, target.partition.unreduced
    corners = ({None} if a in island else {0, 0 if a in pending else n - 1} for a, n in sizes.items())
    islands, ranks = list(itertools.product(*corners)), prod(sizes[axis] for axis in island)

    def rows(dim: int, axes: Axes) -> list[Rows]:
        cuts, own = _cuts(axes, sizes), [names.index(axis) for axis in axes]
        return [_rows(target.shape[dim], cuts, tuple([at[i] for i in own])) for at in islands]

    needed = list(itertools.starmap(rows, enumerate(target.partition.dim_axes)))

    @functools.cache
    def shared(dim: int, axes: Axes) -> list[int]:
        return list(map(_common, rows(dim, axes), needed[dim]))

    def held(spec: TensorSpec) -> Iterable[int]:
        dims = map(shared, itertools.count(), spec.partition.dim_axes)
        return functools.reduce(functools.partial(map, operator.mul), dims, [1] * len(islands))

    whole = list(held(target))

    def lacked(spec: TensorSpec) -> float:
        if any(sizes[axis] > 1 for axis in (spec.partition.unreduced - pending) - island):
            return float(max(whole) / ranks)
        return float(max(map(operator.sub, whole, held(spec))) / ranks)

    return lacked


def _cuts(axes: Axes, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """How axes cut a dim."""
    return tuple([sizes[axis] for axis in axes])


@functools.lru_cache(maxsize=1 << 14)
def _rows(size: int, cuts: tuple[int, ...], places: tuple[int | None, ...]) -> Rows:
    """The rows of the blocks at some places, None for all of an axis; neighbours joined."""
    found: list[tuple[int, int]] = []
    all_blocks = blocks(size, cuts)
    chosen = [0]
    for place, n in zip(places, cuts, strict=True):
        chosen = [i * n + own for i in chosen for own in (range(n) if place is None else (place,))]
    for start, length in (all_blocks[i] for i in chosen):
        if length:
            joins = found and found[-1][1] == start
            found.append((found.pop()[0] if joins else start, start + length))
    return tuple(found)


@functools.lru_cache(maxsize=1 << 14)
def _common(some: Rows, others: Rows) -> int:
    """How many rows two sets share."""
    found = i = k = 0
    while i < len(some) and k < len(others):
        a, b = some[i], others[k]
        found += max(0, min(a[1], b[1]) - max(a[0], b[0]))
        i, k = (i + 1, k) if a[1] <= b[1] else (i, k + 1)
    return found
