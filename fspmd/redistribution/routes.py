"""The cheapest sequence of collectives from one layout of a tensor to another: a shortest path over layouts.

A node of the graph is a `TensorSpec`, and `edges` gives its edges. Normally the search follows the edges that lead
towards the target. It follows all edges where a detour can pay: with a pending sum (scatter it first), and where links
differ in speed (fetch a part over the slow axis, and gather it over the fast one).
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any, Final

from fspmd.cache import cached
from fspmd.entries import Axes, Flat, axes_within, entry_axes, refined
from fspmd.meshes.mesh import Mesh
from fspmd.messages import micros
from fspmd.pairs import Call, call
from fspmd.redistribution.bounds import bound, closely
from fspmd.redistribution.cost import FREE, Price, Topology, links_differ
from fspmd.redistribution.edges import Step, edges, priced, reblock
from fspmd.redistribution.straight import are_many, leaving, straight
from fspmd.spec import P, TensorSpec
from fspmd.transport import Options
from fspmd.transport.windows import Reblock, Regroup, lacking

Sizes = tuple[int, ...]
Label = tuple[float, int, int]  # µs, bytes held, steps by weight
_UNREACHED: Final[Label] = (inf, 0, 0)


@dataclass(frozen=True, slots=True)
class Route:
    """The steps between two layouts of one tensor.

    ``looked`` is the number of edges that the search looked at. ``bound`` is None after a complete search; otherwise it
    is the µs that no route can beat.
    """

    source: TensorSpec
    target: TensorSpec
    steps: tuple[Step, ...]
    looked: int = 0
    bound: float | None = None

    @property
    def price(self) -> Price:
        """The price of all steps: bytes and times add up, and the peak is the highest."""
        return sum((step.price for step in self.steps), Price(0.0, 0.0, self.source.block_bytes))

    def __str__(self) -> str:
        where = repr(self.source.mesh)
        if self.target.mesh != self.source.mesh:
            where += f", then {self.target.mesh!r}"
        lines = [
            f"{self.source.text} -> {self.target.text} on {where}",
            *(f"{i:3}. {step}" for i, step in enumerate(self.steps, 1)),
            str(self.price),
        ]
        if self.bound is not None:
            lines.append(f"there are too many routes to look at all of them; none takes less than {micros(self.bound)}")
        return "\n".join(lines)

    __repr__ = __str__


@cached(maxsize=8192)
def route(source: TensorSpec, target: TensorSpec, topology: Topology, directly: bool = False) -> Route:
    """Return the quickest route. Of equally quick routes the one that holds less wins, then the one of fewer steps.

    ``directly`` asks for the route of `straight`, which is found far sooner.
    """
    if source is target:
        return Route(source, target, ())
    if source.flat or target.flat:
        return _by_views(source, target, topology, directly)
    if source.mesh != target.mesh:
        return Route(source, target, _across(source, target, topology))
    return _within(source, target, topology, directly)


def _by_views(source: TensorSpec, target: TensorSpec, topology: Topology, directly: bool) -> Route:
    """Return a route between layouts with flat dims. It runs between views of both that have the same factors as dims.

    A dim without common factors becomes whole on the way.
    """
    views = [_common_factors(source, target, dim) for dim in range(source.ndim)]
    if None in views:
        entries = [None if view is None else entry for view, entry in zip(views, target.partition, strict=True)]
        middle = target.with_partition(target.partition.with_entries(entries))
        halves = route(source, middle, topology, directly), route(middle, target, topology, directly)
        incomplete = any(half.bound is not None for half in halves)
        least = sum(half.price.time if half.bound is None else half.bound for half in halves)
        looked = sum(half.looked for half in halves)
        return Route(source, target, halves[0].steps + halves[1].steps, looked, least if incomplete else None)
    factors = [view for view in views if view is not None]
    sizes = [dim_sizes for dim_sizes, _, _ in factors]
    first, last = (
        source.viewed(sizes, [axes for _, axes, _ in factors]),
        target.viewed(sizes, [axes for *_, axes in factors]),
    )
    between = route(first, last, topology, directly)
    begins = () if first is source else (_viewing(source, first, topology),)
    ends = () if last is target else (_viewing(last, target, topology),)
    return Route(source, target, (*begins, *between.steps, *ends), between.looked, between.bound)


def _common_factors(
    source: TensorSpec, target: TensorSpec, dim: int
) -> tuple[Sizes, tuple[Axes, ...], tuple[Axes, ...]] | None:
    """Return sizes as which both layouts can view a dim, and the axes that cut each before and after; None if none."""
    now, then, size = source.partition[dim], target.partition[dim], source.shape[dim]
    if not (isinstance(now, Flat) or isinstance(then, Flat)):
        return (size,), (entry_axes(now),), (entry_axes(then),)
    if now is then and source.mesh is target.mesh:
        sizes, axes = zip(*source.factors[dim], strict=True)
        return sizes, axes, axes
    for spec, other in ((source, then), (target, now)):
        if not axes_within(other):  # a whole dim can be viewed as any factors
            sizes, axes = zip(*spec.factors[dim], strict=True)
            uncut = ((),) * len(sizes)
            return (sizes, axes, uncut) if spec is source else (sizes, uncut, axes)
    finer = refined(*([n for n, _ in spec.factors[dim]] for spec in (source, target)))
    if finer is None:
        return None
    before, after = (spec.unflattened_axes(dim, finer) for spec in (source, target))
    return None if before is None or after is None else (finer, before, after)


def _viewing(before: TensorSpec, after: TensorSpec, topology: Topology) -> Step:
    return priced(call("view", before.mesh, (), Options(dims=Regroup(before, after))), before, after, topology)


def _within(source: TensorSpec, target: TensorSpec, topology: Topology, directly: bool = False) -> Route:
    """Return a route on one mesh: a plain collective, else the route of `straight`, improved unless axes are many."""
    if (step := _direct(source, target, topology)) is not None:
        return Route(source, target, (step,))
    known = Route(source, target, *straight(source, target, topology))
    if not (directly or are_many(source.mesh)):
        return _search(known, topology, anywhere=_detour_may_pay(source, target, topology))
    least = closely(source, target, topology)
    return replace(known, bound=least) if known.price.time > least + _ROUNDING else known


def _direct(source: TensorSpec, target: TensorSpec, topology: Topology) -> Step | None:
    """Return the native collective between two layouts if plainly no route beats it, else None."""
    for move, after in leaving(source, target):
        if after is target and move.pair.name != "reblock":
            step = priced(move, source, target, topology)
            return step if _is_unbeaten(step, source, topology) else None
    return None


def _is_unbeaten(step: Step, source: TensorSpec, topology: Topology) -> bool:
    """Return whether plainly no route beats a native collective that leads to the target.

    A collective that takes no longer than two launches is not beaten by two. Over links of one speed it sends exactly
    the data that ranks lack, so a longer route can only save rounds, by passing fewer axes at a time. The exception is
    a sum that ranks with copies can share.
    """
    mesh, before, after = source.mesh, source.partition, step.spec.partition
    if not (source.even and step.spec.even):
        return False
    if step.price.time <= 2 * topology.launch:
        return True
    axes = frozenset(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)
    copied = not axes <= before.axes | before.unreduced
    if (before.unreduced - after.unreduced and copied) or (len(axes) > 2 and after.unreduced | after.reduced):
        return False
    sizes = [mesh.shape[axis] for axis in step.call.axes]
    spared = 2 * (prod(sizes) - 1 - sum(n - 1 for n in sizes))  # rounds, by one step per axis
    latency = topology.link(mesh, step.call.axes).latency
    return spared * latency <= topology.launch and not links_differ(source.mesh, topology)


def _weight(move: Call) -> int:
    return 3 if move.pair.name == "reblock" else 1  # two native collectives are preferred to an equally quick reblock


_ROUNDING: Final = 1e-6  # µs
_EFFORT: Final = 2000  # edges that a search looks at before it takes the best route so far


def _search(known: Route, topology: Topology, *, anywhere: bool) -> Route:
    """Return the best route, given a known one: over edges that lead towards the target, or ``anywhere``.

    The search is an A*, with `bound` as the estimate of the time ahead. A reblock is queued with a bound for any
    reblock, then with a bound for its last rank, and priced when its turn comes again. A search that is cut short
    returns the best route so far.
    """
    source, target = known.source, known.target
    least, limit = bound(target, topology), known.price.time + _ROUNDING
    order, looked, begin = itertools.count(), known.looked, _begins(source.mesh, topology)
    reached: dict[TensorSpec, Label] = {}
    queue: list[tuple[float, int, int, int, float, TensorSpec, tuple[Step, ...], Call | bool]] = []

    def push(label: Label, spec: TensorSpec, steps: tuple[Step, ...], more: float = 0.0, edge: Any = False) -> None:
        time, peak, length = label
        estimate = more + least(spec)
        if time + estimate < limit and reached.get(spec, _UNREACHED) > label:
            heapq.heappush(queue, (round(time + estimate, 9), peak, length, next(order), time, spec, steps, edge))

    def offer(label: Label, before: TensorSpec, steps: tuple[Step, ...], after: TensorSpec) -> bool:
        start = begin if before.even and after.even else 0.0  # an even reblock moves data, or slices do the same
        push(label, after, steps, start, True)
        return False

    def take(label: Label, move: Call, before: TensorSpec, after: TensorSpec, steps: tuple[Step, ...]) -> None:
        nonlocal looked
        looked += 1
        step = priced(move, before, after, topology)
        time, peak, length = label
        label = round(time + step.price.time, 9), max(peak, step.price.peak), length + _weight(move)
        push(label, after, (*steps, step))

    push((0.0, 0, 0), source, ())
    while queue and looked < _EFFORT:
        _, peak, length, _, time, spec, steps, edge = heapq.heappop(queue)
        label, before = (time, peak, length), steps[-1].spec if steps else source
        if edge is True:
            move, _ = reblock(before, spec)
            push(label, spec, steps, _least(move, before, spec, topology), move)
        elif edge is not False:
            take(label, edge, before, spec, steps)
        elif spec is target:
            return Route(source, target, steps, looked)
        elif reached.get(spec, _UNREACHED) > label:
            reached[spec] = label
            for move, after in edges(spec, target, anywhere, functools.partial(offer, label, spec, steps)):
                take(label, move, spec, after, steps)
    arrived = [(*node[4:5], *node[1:4], node[6]) for node in queue if node[5] is target and node[7] is False]
    steps = min(arrived)[-1] if arrived else known.steps
    return Route(source, target, steps, looked, queue[0][0] if queue else None)


@cached(maxsize=1024)
def _begins(mesh: Mesh, topology: Topology) -> float:
    """Return the µs until the first data of any collective arrives."""
    return topology.launch + min(topology.link(mesh, (axis,)).latency for axis in mesh.axis_names)


def _least(move: Call, before: TensorSpec, after: TensorSpec, topology: Topology) -> float:
    """Return the least µs of a reblock: its last rank receives the elements that it lacks, or its block grows by."""
    size = after.block_bytes
    lacks = max(lacking(before, after) * before.dtype.itemsize, size - before.block_bytes)
    link = topology.link(move.mesh, move.axes)
    sending = topology.launch + link.latency + lacks / link.bandwidth if lacks > 0 else 0.0
    return sending + 2 * size / topology.memory


def _detour_may_pay(source: TensorSpec, target: TensorSpec, topology: Topology) -> bool:
    """Return whether a detour may pay: from a pending sum, to a sum on many axes, and where links differ in speed."""
    mesh, before, after = source.mesh, source.partition, target.partition
    many = sum(n > 1 for n in mesh.shape.values()) > 2
    return bool(
        before.unreduced - after.unreduced
        or (many and after.unreduced | after.reduced)
        or links_differ(source.mesh, topology)
    )


def _across(source: TensorSpec, target: TensorSpec, topology: Topology) -> tuple[Step, ...]:
    """Return the steps to another mesh: a reblock.

    Pending sums are settled before it, unless both meshes have them on the same ranks.
    """
    starts, end = [source], target
    if not Reblock(source, target).carries:
        starts, end = list(_settled_layouts(source)), target.with_partition(P(*target.partition))
    leave = _within(end, target, topology).steps
    candidates = []
    for start in starts:
        step = priced(reblock(start, end)[0], start, end, topology)
        candidates.append((*_within(source, start, topology).steps, step, *leave))
    return min(candidates, key=lambda steps: sum((step.price for step in steps), FREE).rank)


def _settled_layouts(spec: TensorSpec) -> Iterator[TensorSpec]:
    """Yield layouts without pending sums: settled on every rank, or scattered to one of the dims."""
    entries, pending = spec.partition.entries, spec.mesh.ordered(spec.partition.unreduced)
    yield spec.with_partition(P(*entries))
    for dim, axes in enumerate(spec.partition.dim_axes if pending else ()):
        cut = (*axes, *pending)
        yield spec.with_partition(P(*entries[:dim], cut, *entries[dim + 1 :]))
