"""What a move of layouts takes at least, by any route: the estimate of the search in `routes`.

An *island* is the ranks that fast links join. What an island lacks has to come over slower links, and is shared among
its ranks at best; what a rank lacks beyond that comes over fast ones. Pending sums that end are lacked whole.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from math import prod

from fspmd.redistribution.cost import Topology
from fspmd.spec import TensorSpec, blocks, entry_axes
from fspmd.transport.windows import lacking

Rows = tuple[tuple[int, int], ...]  # of one dim: from, to


def bound(target: TensorSpec, topology: Topology) -> Callable[[TensorSpec], float]:
    """A function from a layout to µs that no route from there to ``target`` can beat."""
    mesh = target.mesh
    links = {axis: topology.link(mesh, (axis,)) for axis, n in mesh.shape.items() if n > 1}
    speeds = sorted({link.bandwidth for link in links.values()})
    islands = [frozenset(axis for axis, link in links.items() if link.bandwidth > speed) for speed in speeds]
    start = topology.launch + min((link.latency for link in links.values()), default=0.0)
    scale = target.dtype.itemsize * _trust(target)

    @functools.cache
    def least(spec: TensorSpec) -> float:
        time = told = 0.0
        for speed, island in zip(speeds, islands, strict=True):
            lacked = _lacked(spec, target, island)
            if lacked > told:
                time, told = time + (lacked - told) * scale / speed, lacked
        return time + start if told else 0.0

    return least


def at_least(spec: TensorSpec, target: TensorSpec, topology: Topology) -> float:
    """µs that no route can beat, told by what the last rank lacks: far quicker found than `bound`, and looser."""
    lacks = 0 if spec is target else lacking(spec, target) * target.dtype.itemsize
    if not lacks:
        return 0.0
    links = [topology.link(spec.mesh, (axis,)) for axis, n in spec.mesh.shape.items() if n > 1]
    start = topology.launch + min(link.latency for link in links)
    return start + lacks * _trust(target) / max(link.bandwidth for link in links)


def _trust(spec: TensorSpec) -> float:
    """How much of what uneven blocks lack the formulas of even ones reckon at least."""
    size = spec.mesh.size
    return 1.0 if all(n % size == 0 for n in spec.shape) else 0.25 if all(n >= size for n in spec.shape) else 0.0


def _lacked(spec: TensorSpec, target: TensorSpec, island: frozenset[str]) -> float:
    """Elements that the ranks of an island lack of the target, for each of its ranks; of the island that lacks most."""
    mesh, pending = spec.mesh, target.partition.unreduced
    ending = bool((spec.partition.unreduced - pending) - island)
    spans = [(0,) if axis in island or axis in pending else range(n) for axis, n in mesh.shape.items()]
    most = 0
    for at in itertools.product(*spans):
        needed = _held(target, island, at)
        lacks = prod(_common(rows, rows) for rows in needed)
        if not ending:
            lacks -= prod(map(_common, _held(spec, island, at), needed))
        most = max(most, lacks)
    return most / prod(mesh.shape[axis] for axis in island)


@functools.lru_cache(maxsize=1 << 14)
def _held(spec: TensorSpec, island: frozenset[str], at: tuple[int, ...]) -> tuple[Rows, ...]:
    """Of each dim the rows that some rank of an island holds."""
    index = dict(zip(spec.mesh.axis_names, at, strict=True))
    found = []
    for size, entry in zip(spec.shape, spec.partition, strict=True):
        axes = entry_axes(entry)
        places = tuple(None if axis in island else index[axis] for axis in axes)
        found.append(_rows(size, tuple(spec.mesh.shape[axis] for axis in axes), places))
    return tuple(found)


@functools.lru_cache(maxsize=1 << 14)
def _rows(size: int, cuts: tuple[int, ...], places: tuple[int | None, ...]) -> Rows:
    """The rows of the blocks at some places, None for all of an axis; neighbours joined."""
    found: list[tuple[int, int]] = []
    for (start, length), at in zip(blocks(size, cuts), itertools.product(*map(range, cuts)), strict=True):
        if length and all(place is None or place == i for place, i in zip(places, at, strict=True)):
            joins = found and found[-1][1] == start
            found.append((found.pop()[0] if joins else start, start + length))
    return tuple(found)


@functools.lru_cache(maxsize=1 << 14)
def _common(some: Rows, others: Rows) -> int:
    """How many rows two sets share."""
    return sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in some for b in others)
