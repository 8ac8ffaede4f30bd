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
from collections.abc import Callable, Sequence
from math import inf, prod

import torch
from torch import Tensor

from fspmd.entries import blocks, entry_axes
from fspmd.meshes.mesh import Mesh
from fspmd.redistribution.cost import Topology
from fspmd.spec import TensorSpec
from fspmd.transport.windows import lacking, window

Rows = tuple[tuple[int, int], ...]  # of one dim: from, to


def bound(target: TensorSpec, topology: Topology) -> Callable[[TensorSpec], float]:
    """A function from a layout to µs that no route from there to ``target`` can beat.

    It looks at the ranks that stand first or last along each axis: as a bound that of some of them will do.
    """
    mesh = target.mesh
    links = {axis: topology.link(mesh, (axis,)) for axis, n in mesh.shape.items() if n > 1}
    speeds = sorted({link.bandwidth for link in links.values()})
    islands = [frozenset(axis for axis, link in links.items() if link.bandwidth > speed) for speed in speeds]
    latency = min((link.latency for link in links.values()), default=0.0)
    scale = target.dtype.itemsize
    lacked_by = [_lacked_by(target, island) for island in islands]

    @functools.cache
    def least(spec: TensorSpec) -> float:
        time = told = 0.0
        slowest = inf
        for speed, lacked_of in zip(speeds, lacked_by, strict=True):
            lacked = lacked_of(spec)
            if lacked > told:
                time, told = time + (lacked - told) * scale / speed, lacked
                slowest = min(slowest, speed)
        if not told:
            return 0.0
        count = _grown(spec, target)
        at_once = topology.launch + latency * (count - 1) + told * scale / slowest
        return min(at_once, time + _begun(count, latency, topology, 2))

    return least


def closely(spec: TensorSpec, target: TensorSpec, topology: Topology) -> float:
    """The same as a function of both."""
    return bounded(target, topology)(spec)


@functools.lru_cache(maxsize=256)
def bounded(target: TensorSpec, topology: Topology) -> Callable[[TensorSpec], float]:
    """`bound`, made once."""
    return bound(target, topology)


def at_least(spec: TensorSpec, target: TensorSpec, topology: Topology) -> float:
    """µs that no route can beat, told by what the last rank lacks: far quicker found than `bound`, and looser."""
    lacks: int = 0 if spec is target else lacking(spec, target) * target.dtype.itemsize
    if not lacks:
        return 0.0
    latency, bandwidth = _best_link(spec.mesh, topology)
    return _begun(_grown(spec, target), latency, topology) + float(lacks / bandwidth)


def least_times(sources: Sequence[TensorSpec], targets: Sequence[TensorSpec], topology: Topology) -> Tensor:
    """µs ``[sources, targets]`` that no route can beat, of many layouts of one tensor at a time.

    As `at_least` tells it. Of sums that end a rank receives its whole block, and the last collective writes one.
    """
    mesh = targets[0].mesh
    if mesh.size == 1 or any(spec.flat for spec in (*sources, *targets)):  # which have no windows
        return torch.zeros(len(sources), len(targets), dtype=torch.float64)
    at, ndim = tuple([n - 1 for n in mesh.shape.values()]), targets[0].ndim
    held, wanted = (
        torch.tensor([window(spec, at) for spec in specs]).reshape(len(specs), ndim, 2) for specs in (sources, targets)
    )
    begin = torch.maximum(held[:, None, :, 0], wanted[None, :, :, 0])
    end = torch.minimum(held.sum(-1)[:, None], wanted.sum(-1)[None])
    whole = wanted[:, :, 1].prod(-1)
    lacks = whole - (end - begin).clamp(min=0).prod(-1)
    axes = [axis for axis, n in mesh.shape.items() if n > 1]
    sums, stay = (
        torch.tensor([sum((axis in spec.partition.unreduced) << i for i, axis in enumerate(axes)) for spec in specs])
        for specs in (sources, targets)
    )
    lacks = torch.where((sums[:, None] & ~stay) != 0, whole, lacks) * targets[0].dtype.itemsize
    blocks_of = [torch.tensor([prod(spec.block_shape) for spec in specs]).clamp(min=1) for specs in (sources, targets)]
    even = torch.tensor([spec.even for spec in sources])
    grown = torch.where(even[:, None], (blocks_of[1] // blocks_of[0][:, None]).clamp(min=2), 2)
    latency, bandwidth = _best_link(mesh, topology)
    counts, of = grown.unique(return_inverse=True)
    begun = torch.tensor([_begun(count, latency, topology) for count in counts.tolist()], dtype=torch.float64)[of]
    writing = torch.tensor([prod(spec.block_shape) for spec in targets]) * targets[0].dtype.itemsize / topology.memory
    return torch.where(lacks > 0, begun + lacks / bandwidth + writing, 0.0)


def _grown(spec: TensorSpec, target: TensorSpec) -> int:
    """How many blocks like its own a rank has in the end; 2 where that is fewer, or not the same for all."""
    return max(2, prod(target.block_shape) // prod(spec.block_shape)) if spec.even else 2


def _begun(count: int, latency: float, topology: Topology, fewest: int = 1) -> float:
    """µs until a rank has so many blocks, its own among them, by ``fewest`` collectives or more.

    In a round it receives at most what another one holds, so after collectives of r, s ... rounds it has at most
    (1 + r)(1 + s) ... blocks; the rounds are fewest where all have as many.
    """
    ways = range(fewest, max(fewest + 1, count.bit_length()))
    return min(n * (topology.launch + latency * (math.pow(count, 1 / n) - 1)) for n in ways)


@functools.lru_cache(maxsize=1024)
def _best_link(mesh: Mesh, topology: Topology) -> tuple[float, float]:
    """The least latency and the greatest bandwidth along any axis."""
    links = [topology.link(mesh, (axis,)) for axis, n in mesh.shape.items() if n > 1]
    return min(link.latency for link in links), max(link.bandwidth for link in links)


def _lacked_by(target: TensorSpec, island: frozenset[str]) -> Callable[[TensorSpec], float]:
    """Elements that the ranks of an island lack of the target, for each of its ranks; of the island that lacks most."""
    mesh, pending = target.mesh, target.partition.unreduced
    needed = _held(target, island, pending)
    sizes: list[int] = [prod(map(_common, rows, rows)) for rows in needed]
    ranks = prod(mesh.shape[axis] for axis in island)

    def lacked(spec: TensorSpec) -> float:
        if any(mesh.shape[axis] > 1 for axis in (spec.partition.unreduced - pending) - island):
            return float(max(sizes) / ranks)
        pairs = zip(_held(spec, island, pending), needed, strict=True)
        shared: list[int] = [prod(map(_common, own, rows)) for own, rows in pairs]
        return float(max(map(operator.sub, sizes, shared)) / ranks)

    return lacked


@functools.lru_cache(maxsize=1 << 14)
def _held(spec: TensorSpec, island: frozenset[str], pending: frozenset[str]) -> list[tuple[Rows, ...]]:
    """Of each island at the corners, at the first ranks along pending axes, the rows of each dim that it holds."""
    names, sizes = spec.mesh.axis_names, spec.mesh.shape
    corners = ({0, 0 if axis in island or axis in pending else n - 1} for axis, n in sizes.items())
    islands = list(itertools.product(*map(sorted, corners)))
    dims = []
    for size, entry in zip(spec.shape, spec.partition, strict=True):
        axes = entry_axes(entry)
        cuts, places = tuple([sizes[axis] for axis in axes]), [None if a in island else names.index(a) for a in axes]
        dims.append([_rows(size, cuts, tuple([None if i is None else at[i] for i in places])) for at in islands])
    return list(zip(*dims, strict=True)) if dims else [()] * len(islands)


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
