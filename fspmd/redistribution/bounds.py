"""Lower bounds on the time of a move between layouts, over all routes: the estimate of the search in `routes`.

An *island* is a set of ranks that fast links join. The data that an island lacks must come over slower links; at best
its ranks share the receiving. The data that a rank lacks beyond that comes over fast links, in another collective,
because one collective runs at the speed of its slowest link. A rank lacks the whole of each sum that must be settled.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.entries import block_at
from fspmd.meshes.mesh import Mesh
from fspmd.redistribution.cost import Topology
from fspmd.spec import TensorSpec

T = TypeVar("T")
Axes = tuple[str, ...]
Rows = tuple[tuple[int, int], ...]  # intervals of one dim: (start, stop)


@cached(maxsize=256)
def bound(target: TensorSpec, topology: Topology) -> Callable[[TensorSpec], float]:
    """Return a function from a layout to µs that no route from there to ``target`` can beat.

    The function looks only at the ranks that stand first or last along each axis. A bound for some ranks is a bound.
    """
    mesh = target.mesh
    levels = _levels(mesh, topology)
    latency, scale = min((level.latency for level in levels), default=0.0), target.dtype.itemsize
    counters = [(_lacked_by(target, level.island), _received_by(target, level.island)) for level in levels]
    senders_of, cut, shape = _senders_of(target), target.partition.axes, tuple(target.shape)

    @functools.cache
    def least(spec: TensorSpec) -> float:
        lacked = [max(count(spec) for count in counts) for counts in counters]
        if not any(lacked):
            return 0.0
        added = spec.partition.unreduced - target.partition.unreduced
        senders = senders_of(spec)
        terms = prod([mesh.shape[axis] for axis in added])
        rounds, settling = _settling(mesh, topology, added, cut, shape, senders)
        start = max(_gathering(max(2, senders * terms), latency, topology, 2), settling)
        senders_and_terms = max(2, senders * terms, rounds + 1)
        single, several = _times(levels, lacked, senders_and_terms, start, topology.launch, scale, _NUMBERS)
        return float(several if terms > 1 and senders > 1 else min(single, several))

    return least


@dataclass(frozen=True, slots=True)
class _Level:
    """The links up to a bandwidth. ``island`` has the axes of faster links, which join ranks to islands."""

    bandwidth: float
    latency: float  # the least of these links
    island: frozenset[str]


@cached(maxsize=1024)
def _levels(mesh: Mesh, topology: Topology) -> tuple[_Level, ...]:
    """Return the levels of a mesh, the slowest first."""
    links = {axis: topology.link(mesh, (axis,)) for axis, n in mesh.shape.items() if n > 1}
    levels = []
    for speed in sorted({link.bandwidth for link in links.values()}):
        latency = min(link.latency for link in links.values() if link.bandwidth <= speed)
        levels.append(_Level(speed, latency, frozenset(a for a, link in links.items() if link.bandwidth > speed)))
    return tuple(levels)


def closely(spec: TensorSpec, target: TensorSpec, topology: Topology) -> float:
    """Return the µs that no route from ``spec`` to ``target`` can beat."""
    return bound(target, topology)(spec)


def least_times(sources: Sequence[TensorSpec], targets: Sequence[TensorSpec], topology: Topology) -> Tensor:
    """Return a table ``[sources, targets]`` of µs that no route can beat, for many layouts of one tensor.

    It bounds the time by the data that the last rank, or its island, lacks, and by the messages of sums. Where m terms
    are added up and k ranks then have the sum, one rank has it after m - 1 messages, and all after k - 1 more. The last
    collective writes a block.
    """
    mesh, levels = targets[0].mesh, _levels(targets[0].mesh, topology)
    if mesh.size == 1 or any(spec.flat for spec in (*sources, *targets)):  # the blocks of flat dims are no windows
        return torch.zeros(len(sources), len(targets), dtype=torch.float64)
    latency, scale = min(level.latency for level in levels), targets[0].dtype.itemsize
    counts_by_level = [[f(sources, targets, level.island) for f in (_lacks, _receives)] for level in levels]
    lacked = [torch.maximum(*counts) for counts in counts_by_level]
    rounds, settling = _settlings(sources, targets, topology)
    senders = _senders(sources, targets)
    counts, index = senders.unique(return_inverse=True)
    start = torch.tensor([_gathering(n, latency, topology, 2) for n in counts.tolist()], dtype=torch.float64)[index]
    senders, start = torch.maximum(senders, rounds + 1), torch.maximum(start, settling)
    least = torch.minimum(*_times(levels, lacked, senders, start, topology.launch, scale, _TABLES))
    written = torch.tensor([prod(spec.block_shape) for spec in targets], dtype=torch.float64)
    lacks_any = functools.reduce(torch.maximum, lacked) > 0
    return torch.where(lacks_any, least + written * scale / topology.memory, 0.0)


class _Arithmetic(NamedTuple):
    """Functions of numbers, or of tables of numbers."""

    smaller: Any
    larger: Any
    where: Any  # (condition, value if true, value if false)


_NUMBERS: Final = _Arithmetic(min, max, lambda condition, x, y: x if condition else y)
_TABLES: Final = _Arithmetic(torch.minimum, torch.maximum, torch.where)


def _times(
    levels: Sequence[_Level],
    lacked: Sequence[Any],
    senders: Any,
    start: Any,
    launch: float,
    scale: int,
    of: _Arithmetic,
) -> tuple[Any, Any]:
    """Return the µs of one collective, and of two or more, that bring the lacked elements of each level.

    One collective is as slow as its slowest link. Of several collectives, each level has its own.
    """
    time = counted = latency = bandwidth = lacked[0] * 0.0
    for level, count in zip(levels, lacked, strict=True):  # latency and bandwidth of the first level that lacks some
        latency = of.where(counted > 0, latency, level.latency)
        bandwidth = of.where(counted > 0, bandwidth, level.bandwidth)
        most = of.larger(counted, count)
        time, counted = time + (most - counted) * scale / level.bandwidth, most
    single = launch + latency * (senders - 1) + counted * scale / bandwidth
    return single, time + of.larger(start, 2 * launch + latency)


def _summed(sums: Any, terms: Any, holders: Any, of: _Arithmetic) -> Any:
    """Return how many shares of a rank are received where each of ``sums`` has ``terms`` and ends on ``holders``."""
    return of.smaller(sums * (terms + holders - 2), sums * terms + holders - 2)


def _dims(
    sources: Sequence[TensorSpec], targets: Sequence[TensorSpec], count: Callable[[int, Axes, Axes], int]
) -> Tensor:
    """Return a table ``[sources, targets]``: the product over dims of ``count(size, axes before, axes after)``."""
    product = torch.ones(len(sources), len(targets), dtype=torch.float64)
    for d, size in enumerate(targets[0].shape):
        entries = [[spec.partition.dim_axes[d] for spec in specs] for specs in (sources, targets)]
        before, after = (list(dict.fromkeys(axes)) for axes in entries)
        table = torch.tensor([[count(size, now, then) for then in after] for now in before], dtype=torch.float64)
        rows = torch.tensor([before.index(axes) for axes in entries[0]])
        product *= table[rows][:, [after.index(axes) for axes in entries[1]]]
    return product


def _lacks(sources: Sequence[TensorSpec], targets: Sequence[TensorSpec], island: frozenset[str]) -> Tensor:
    """Return the elements that the last rank lacks of its block, shared among its island.

    Where a sum over axes outside of the island is settled, the rank lacks the whole block.
    """
    sizes = targets[0].mesh.shape

    def rows(size: int, axes: Axes) -> Rows:
        return _rows(size, _cuts(axes, sizes), tuple([None if axis in island else sizes[axis] - 1 for axis in axes]))

    def shared(size: int, now: Axes, then: Axes) -> int:
        return _common(rows(size, now), rows(size, then))

    common = _dims(sources, targets, shared)
    needed = _dims(targets[:1], targets, lambda n, _, then: shared(n, then, then))
    _, terms, _, _ = _sums(sources, targets, island)
    return torch.where(terms > 1, needed, needed - common) / prod(sizes[axis] for axis in island)


def _senders(sources: Sequence[TensorSpec], targets: Sequence[TensorSpec]) -> Tensor:
    """Return how many ranks' blocks are in the last block of a target, at least 2."""
    sizes = targets[0].mesh.shape
    overlapped = _dims(sources, targets, lambda n, now, then: _overlapped(n, _cuts(now, sizes), _cuts(then, sizes)))
    _, terms, _, _ = _sums(sources, targets, frozenset())
    return (overlapped * terms).long().clamp(min=2)


def _receives(sources: Sequence[TensorSpec], targets: Sequence[TensorSpec], island: frozenset[str]) -> Tensor:
    """Return the elements that a rank receives at least from other islands, on average."""
    sums, terms, before, after = _sums(sources, targets, island)
    copies = torch.minimum(sums * (after - before), sums + after - 2).clamp(min=0)
    shares = torch.where(terms > 1, _summed(sums, terms, after, _TABLES), copies)
    return shares * (prod(targets[0].shape) / targets[0].mesh.size)


def _sums(
    sources: Sequence[TensorSpec], targets: Sequence[TensorSpec], island: frozenset[str]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Count along the axes outside of islands.

    Returns:
        how many sums stay pending; how many terms each has that are added up; how many ranks hold an element of the
        source; how many hold an element of the target.
    """
    sizes = {axis: n for axis, n in targets[0].mesh.shape.items() if n > 1 and axis not in island}
    counts = [float(prod(itertools.compress(sizes.values(), bits))) for bits in _bits(len(sizes))]
    ranks = torch.tensor(counts, dtype=torch.float64)

    def mask(chosen: Set[str]) -> int:
        return sum((axis in chosen) << i for i, axis in enumerate(sizes))

    pending = [torch.tensor([mask(spec.partition.unreduced) for spec in specs]) for specs in (sources, targets)]
    cut = [torch.tensor([mask(spec.partition.axes) for spec in specs]) for specs in (sources, targets)]
    every = len(ranks) - 1
    before, after = (ranks[every & ~unreduced & ~sharded] for unreduced, sharded in zip(pending, cut, strict=True))
    return ranks[pending[0][:, None] & pending[1]], ranks[pending[0][:, None] & ~pending[1]], before[:, None], after


@cached
def _settling(
    mesh: Mesh, topology: Topology, added: frozenset[str], cut: frozenset[str], shape: tuple[int, ...], senders: int = 1
) -> tuple[int, float]:
    """Return the rounds of one collective, and the µs of any, that settle sums over the axes ``added``.

    ``cut`` are the axes that cut the target. Each added axis is passed once. Where ranks need whole sums, it is passed
    once more, or other collectives join the parts. These do not settle sums, and those that settle sums fetch no other
    blocks, of which ``senders`` meet in a block of the target.
    """
    latency = {axis: topology.link(mesh, (axis,)).latency for axis, n in mesh.shape.items() if n > 1}
    axes = [axis for axis in latency if axis in added]
    if not axes:
        return 0, 0.0
    quickest, parts = min(latency.values()), prod(mesh.shape[axis] for axis in cut)
    fetching = _gathering(senders, quickest, topology) if senders > 1 else 0.0
    divisor = gcd(*shape)

    def joining(scattered: Axes) -> float:
        if cut.issuperset(scattered):
            return fetching
        slowest = max(latency[axis] for axis in scattered if axis not in cut)
        pieces = max([n for n in map(ranks, _choices(scattered)) if not divisor % n])
        count = max(2, senders, -(-pieces // parts))
        single = topology.launch + slowest * (count - 1)
        return min(single, _gathering(count, quickest, topology, 2) + slowest - quickest)

    def adding(scattered: Axes) -> float:
        passed = sorted([(latency[axis], mesh.shape[axis], axis not in scattered) for axis in axes])
        return _passing(topology.launch, tuple(passed))

    def ranks(over: Sequence[str]) -> int:
        return prod([mesh.shape[axis] for axis in over])

    time = min(adding(scattered) + joining(scattered) for scattered in _choices(axes))
    return (1 if cut.issuperset(axes) else 2) * (ranks(axes) - 1), time


@cached
def _passing(launch: float, axes: tuple[tuple[float, int, bool], ...]) -> float:
    """Return the least µs to pass axes, in one collective or in several.

    An axis is its latency, its size, and whether it is passed twice.
    """
    if not axes:
        return 0.0
    times = []
    for others in _choices(range(1, len(axes))):
        group = [axes[0], *[axes[i] for i in others]]
        left = tuple([axis for i, axis in enumerate(axes) if i and i not in others])
        rounds = (prod([n for _, n, _ in group]) - 1) * (2 if any(twice for *_, twice in group) else 1)
        times.append(launch + rounds * max(group)[0] + _passing(launch, left))
    return min(times)


def _choices(axes: Sequence[T]) -> Iterable[tuple[T, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(len(axes) + 1))


def _settlings(
    sources: Sequence[TensorSpec], targets: Sequence[TensorSpec], topology: Topology
) -> tuple[Tensor, Tensor]:
    """Return `_settling` for all pairs, without other senders: rounds and µs, each ``[sources, targets]``."""
    mesh = targets[0].mesh
    before = [spec.partition.unreduced for spec in sources]
    after = [(spec.partition.unreduced, spec.partition.axes) for spec in targets]
    rows, columns, shape = list(dict.fromkeys(before)), list(dict.fromkeys(after)), tuple(targets[0].shape)
    entries = [[_settling(mesh, topology, row - pending, cut, shape) for pending, cut in columns] for row in rows]
    table = torch.tensor(entries, dtype=torch.float64)
    i, j = torch.tensor([rows.index(row) for row in before]), torch.tensor([columns.index(column) for column in after])
    rounds, time = table[i][:, j].unbind(-1)
    return rounds.long(), time


def _bits(count: int) -> list[list[int]]:
    return [[number >> i & 1 for i in range(count)] for number in range(1 << count)]


def _senders_of(target: TensorSpec) -> Callable[[TensorSpec], int]:
    """Return a function from a layout to the number of its blocks that are in the last block of ``target``."""
    sizes = target.mesh.shape

    @functools.cache
    def overlapped(dim: int, before: Axes) -> int:
        return _overlapped(target.shape[dim], _cuts(before, sizes), _cuts(target.partition.dim_axes[dim], sizes))

    def senders(spec: TensorSpec) -> int:
        return prod(map(overlapped, itertools.count(), spec.partition.dim_axes))

    return senders


@cached(maxsize=1 << 14)
def _overlapped(size: int, before: tuple[int, ...], after: tuple[int, ...]) -> int:
    """Return how many blocks of a dim cut by ``before`` the last block of the dim cut by ``after`` overlaps."""
    start, length = block_at(size, after, [n - 1 for n in after])
    if not length:
        return 1
    return 1 + _starts_before(size, before, start + length) - _starts_before(size, before, start + 1)


def _starts_before(size: int, cuts: tuple[int, ...], end: int) -> int:
    """Return how many blocks of a dim that are not empty start before a row."""
    if end <= 0:
        return 0
    if not cuts:
        return 1
    step = -(-size // cuts[0])
    whole, rest = divmod(end, step)
    count = whole * _starts_before(step, cuts[1:], step)
    return count + _starts_before(min(step, size - whole * step), cuts[1:], rest)


def _received_by(target: TensorSpec, island: frozenset[str]) -> Callable[[TensorSpec], float]:
    """Return a function from a layout to the elements that a rank receives at least from other islands, on average."""
    sizes = {axis: n for axis, n in target.mesh.shape.items() if axis not in island}
    pending, cut = target.partition.unreduced, target.partition.axes
    holders = prod(n for axis, n in sizes.items() if axis not in pending and axis not in cut)
    share = prod(target.shape) / target.mesh.size

    def received(spec: TensorSpec) -> float:
        unreduced = [(axis, n) for axis, n in sizes.items() if axis in spec.partition.unreduced]
        terms = prod(n for axis, n in unreduced if axis not in pending)
        if terms == 1:
            return 0.0
        sums = prod(n for axis, n in unreduced if axis in pending)
        summed: float = share * _summed(sums, terms, holders, _NUMBERS)
        return summed

    return received


def _gathering(count: int, latency: float, topology: Topology, fewest: int = 1) -> float:
    """Return the µs until a rank has ``count`` blocks, its own among them, by ``fewest`` collectives or more.

    In a round a rank receives at most as many blocks as another rank holds. After collectives of r, s, ... rounds it
    has at most (1 + r)(1 + s)... blocks. The rounds are fewest where all collectives have equally many.
    """
    collectives = range(fewest, max(fewest + 1, count.bit_length()))
    return min(n * (topology.launch + latency * (math.pow(count, 1 / n) - 1)) for n in collectives)


def _lacked_by(target: TensorSpec, island: frozenset[str]) -> Callable[[TensorSpec], float]:
    """Return a function from a layout to the elements of ``target`` that an island lacks, for each of its ranks.

    It takes the island that lacks most, among those at the corners of the mesh and first along pending axes.
    """
    names, sizes, pending = target.mesh.axis_names, target.mesh.shape, target.partition.unreduced
    corners = ({None} if a in island else {0, 0 if a in pending else n - 1} for a, n in sizes.items())
    islands, ranks = list(itertools.product(*corners)), prod(sizes[axis] for axis in island)

    places = dict(zip(names, zip(*islands, strict=True), strict=True))  # axis -> the place of each island

    @functools.cache
    def shared(dim: int, axes: Axes) -> list[int]:
        """Return for each island how many rows of its blocks of a dim cut by ``axes`` it needs."""
        needed = target.partition.dim_axes[dim]
        cuts, cuts_needed = _cuts(axes, sizes), _cuts(needed, sizes)
        at = list(zip(*[places[axis] for axis in (*axes, *needed)], strict=True)) or [()] * len(islands)
        size, n = target.shape[dim], len(axes)
        known = {a: _common(_rows(size, cuts, a[:n]), _rows(size, cuts_needed, a[n:])) for a in set(at)}
        return list(map(known.__getitem__, at))

    def elements_of(spec: TensorSpec) -> Iterable[int]:
        dims = map(shared, itertools.count(), spec.partition.dim_axes)
        return functools.reduce(functools.partial(map, operator.mul), dims, [1] * len(islands))

    needed = list(elements_of(target))

    def lacked(spec: TensorSpec) -> float:
        if any(sizes[axis] > 1 for axis in (spec.partition.unreduced - pending) - island):
            return float(max(needed) / ranks)
        return float(max(map(operator.sub, needed, elements_of(spec))) / ranks)

    return lacked


def _cuts(axes: Axes, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the sizes of the axes that cut a dim."""
    return tuple([sizes[axis] for axis in axes])


@cached(maxsize=1 << 14)
def _rows(size: int, cuts: tuple[int, ...], places: tuple[int | None, ...]) -> Rows:
    """Return the rows of the blocks at ``places`` along the cuts. None stands for all places. Neighbours are joined."""
    rows: list[tuple[int, int]] = []
    while places and places[-1] is None:  # the minor blocks of a block follow one another
        cuts, places = cuts[:-1], places[:-1]
    spans = [range(n) if place is None else (place,) for place, n in zip(places, cuts, strict=True)]
    for start, length in (block_at(size, cuts, chosen) for chosen in itertools.product(*spans)):
        if length:
            joins = rows and rows[-1][1] == start
            rows.append((rows.pop()[0] if joins else start, start + length))
    return tuple(rows)


@cached(maxsize=1 << 14)
def _common(some: Rows, others: Rows) -> int:
    """Return how many rows two sets share."""
    count = i = k = 0
    while i < len(some) and k < len(others):
        a, b = some[i], others[k]
        count += max(0, min(a[1], b[1]) - max(a[0], b[0]))
        i, k = (i + 1, k) if a[1] <= b[1] else (i, k + 1)
    return count
