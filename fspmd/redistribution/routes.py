"""From one layout of a tensor to another: the cheapest sequence of collectives, by shortest path over layouts.

A node of the graph is a `TensorSpec`; `edges` has its edges. Where ways round can pay all of them are searched: beside
a pending sum (scatter it first), and where links differ in speed (fetch a part over the slow axis, and gather it over
the fast one); else those that lead towards the target.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any, Final

from fspmd.entries import Axes, Flat, axes_within, entry_axes, refined
from fspmd.meshes.mesh import Mesh
from fspmd.messages import micros
from fspmd.pairs import Call, call
from fspmd.redistribution.bounds import bounded, closely
from fspmd.redistribution.cost import FREE, Price, Topology, links_differ
from fspmd.redistribution.edges import edges, reblock
from fspmd.redistribution.steps import Step, held, priced, short
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

    ``looked``: how many edges the search looked at. ``bound``: where it was cut short, the µs that no route can beat;
    else None.
    """

    source: TensorSpec
    target: TensorSpec
    steps: tuple[Step, ...]
    looked: int = 0
    bound: float | None = None

    @property
    def price(self) -> Price:
        """Of all steps: bytes and times add up, the peak is the highest."""
        return sum((step.price for step in self.steps), Price(0.0, 0.0, held(self.source)))

    def __str__(self) -> str:
        where = repr(self.source.mesh)
        if self.target.mesh != self.source.mesh:
            where += f", then {self.target.mesh!r}"
        return "\n".join(
            (
                f"{short(self.source)} -> {short(self.target)} on {where}",
                *(f"{i:3}. {step}" for i, step in enumerate(self.steps, 1)),
                str(self.price),
                *self._told(),
            )
        )

    def _told(self) -> list[str]:
        if self.bound is None:
            return []
        return [f"there are too many routes to look at all of them; none takes less than {micros(self.bound)}"]

    __repr__ = __str__


@functools.lru_cache(maxsize=8192)
def route(source: TensorSpec, target: TensorSpec, topology: Topology, directly: bool = False) -> Route:
    """The cheapest way; of equally quick ones that which holds less, then that of fewer steps.

    ``directly``: that of `straight`, which is found far sooner.
    """
    if source is target:
        return Route(source, target, ())
    if source.flat or target.flat:
        return _by_views(source, target, topology, directly)
    if source.mesh != target.mesh:
        return Route(source, target, _across(source, target, topology))
    return _within(source, target, topology, directly)


def _by_views(source: TensorSpec, target: TensorSpec, topology: Topology, directly: bool) -> Route:
    """Where dims are `Flat`: between views of both that have the same dims, in which each is in blocks of its own.

    A dim that has no such views is whole on the way.
    """
    views = [_alike(source, target, dim) for dim in range(source.ndim)]
    if None in views:
        entries = [None if view is None else entry for view, entry in zip(views, target.partition, strict=True)]
        after = target.partition
        middle = target.with_partition(P(*entries, unreduced=after.unreduced, reduced=after.reduced))
        halves = route(source, middle, topology, directly), route(middle, target, topology, directly)
        cut = any(half.bound is not None for half in halves)
        least = sum(half.price.time if half.bound is None else half.bound for half in halves)
        looked = sum(half.looked for half in halves)
        return Route(source, target, halves[0].steps + halves[1].steps, looked, least if cut else None)
    known = [view for view in views if view is not None]
    sizes = [found for found, _, _ in known]
    first, last = (
        source.viewed(sizes, [axes for _, axes, _ in known]),
        target.viewed(sizes, [axes for *_, axes in known]),
    )
    found = route(first, last, topology, directly)
    begins = () if first is source else (_viewing(source, first, topology),)
    ends = () if last is target else (_viewing(last, target, topology),)
    return Route(source, target, (*begins, *found.steps, *ends), found.looked, found.bound)


def _alike(source: TensorSpec, target: TensorSpec, dim: int) -> tuple[Sizes, tuple[Axes, ...], tuple[Axes, ...]] | None:
    """Of which dims one dim of both layouts can be viewed, and the axes of each before and after; None: of none."""
    now, then, size = source.partition[dim], target.partition[dim], source.shape[dim]
    if not (isinstance(now, Flat) or isinstance(then, Flat)):
        return (size,), (entry_axes(now),), (entry_axes(then),)
    if now is then and source.mesh is target.mesh:
        sizes, axes = zip(*source.factors[dim], strict=True)
        return sizes, axes, axes
    for spec, other in ((source, then), (target, now)):
        if not axes_within(other):  # whole, which can be viewed as anything
            sizes, axes = zip(*spec.factors[dim], strict=True)
            nothing = ((),) * len(sizes)
            return (sizes, axes, nothing) if spec is source else (sizes, nothing, axes)
    finer = refined(*([n for n, _ in spec.factors[dim]] for spec in (source, target)))
    if finer is None:
        return None
    before, after = (spec.unflattened_axes(dim, finer) for spec in (source, target))
    return None if before is None or after is None else (finer, before, after)


def _viewing(before: TensorSpec, after: TensorSpec, topology: Topology) -> Step:
    return priced(call("view", before.mesh, (), Options(dims=Regroup(before, after))), before, after, topology)


def _within(source: TensorSpec, target: TensorSpec, topology: Topology, directly: bool = False) -> Route:
    """By few layouts (`straight`); then, unless axes are many, a better way by all edges that may be part of one."""
    if (one := _direct(source, target, topology)) is not None:
        return Route(source, target, (one,))
    known = Route(source, target, *straight(source, target, topology))
    if not (directly or are_many(source.mesh)):
        return _search(known, topology, anywhere=_round_pays(source, target, topology))
    least = closely(source, target, topology)
    return replace(known, bound=least) if known.price.time > least + _ROUNDING else known


def _direct(source: TensorSpec, target: TensorSpec, topology: Topology) -> Step | None:
    """The collective from the one to the other that no route beats, if it is plain to see."""
    for move, after in leaving(source, target):
        if after is target and move.pair.name != "reblock":
            step = priced(move, source, target, topology)
            return step if _is_unbeaten(step, source, topology) else None
    return None


def _is_unbeaten(step: Step, source: TensorSpec, topology: Topology) -> bool:
    """Whether no route beats a native collective that leads to the target, as far as that is plain to see.

    What is over when two collectives have only begun is not beaten by two. Over links that are alike it sends what
    ranks lack, and no less will do; more steps have fewer rounds only over fewer axes at a time. But those that hold
    copies may share a sum.
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
    return 3 if move.pair.name == "reblock" else 1  # of equals rather two native collectives


_ROUNDING: Final = 1e-6  # µs
_EFFORT: Final = 2000  # edges that are looked at, before what is known is good enough


def _search(known: Route, topology: Topology, *, anywhere: bool) -> Route:
    """The best way, given one: by edges that lead towards the target, or by way of ``anywhere``.

    A*, with `bound` for what is still to come. A reblock is queued at what any takes, then at what its last rank
    receives, and priced when its turn comes again. Where the search is cut short, the best so far.
    """
    source, target = known.source, known.target
    least, limit = bounded(target, topology), known.price.time + _ROUNDING
    order, looked, begin = itertools.count(), known.looked, _begins(source.mesh, topology)
    reached: dict[TensorSpec, Label] = {}
    queue: list[tuple[float, int, int, int, float, TensorSpec, tuple[Step, ...], Call | bool]] = []

    def push(label: Label, spec: TensorSpec, steps: tuple[Step, ...], more: float = 0.0, edge: Any = False) -> None:
        time, peak, length = label
        ahead = more + least(spec)
        if time + ahead < limit and reached.get(spec, _UNREACHED) > label:
            heapq.heappush(queue, (round(time + ahead, 9), peak, length, next(order), time, spec, steps, edge))

    def offer(label: Label, before: TensorSpec, steps: tuple[Step, ...], after: TensorSpec) -> bool:
        begun = begin if before.even and after.even else 0.0  # something moves, or slices do the same
        push(label, after, steps, begun, True)
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
    arrived = [(*way[4:5], *way[1:4], way[6]) for way in queue if way[5] is target and way[7] is False]
    steps = min(arrived)[-1] if arrived else known.steps
    return Route(source, target, steps, looked, queue[0][0] if queue else None)


@functools.lru_cache(maxsize=1024)
def _begins(mesh: Mesh, topology: Topology) -> float:
    """µs until anything that moves has begun to arrive."""
    return topology.launch + min(topology.link(mesh, (axis,)).latency for axis in mesh.axis_names)


def _least(move: Call, before: TensorSpec, after: TensorSpec, topology: Topology) -> float:
    """What a reblock takes at least: what its last rank receives, or whose block grows."""
    size = held(after)
    lacks = max(lacking(before, after) * before.dtype.itemsize, size - held(before))
    link = topology.link(move.mesh, move.axes)
    sending = topology.launch + link.latency + lacks / link.bandwidth if lacks > 0 else 0.0
    return sending + 2 * size / topology.memory


def _round_pays(source: TensorSpec, target: TensorSpec, topology: Topology) -> bool:
    """Whether a way round may: past a pending sum, where links differ in speed, and on many axes to a pending sum."""
    mesh, before, after = source.mesh, source.partition, target.partition
    many = sum(n > 1 for n in mesh.shape.values()) > 2
    return bool(
        before.unreduced - after.unreduced
        or (many and after.unreduced | after.reduced)
        or links_differ(source.mesh, topology)
    )


def _across(source: TensorSpec, target: TensorSpec, topology: Topology) -> tuple[Step, ...]:
    """To another mesh in one move, before which pending sums end unless both meshes have them on the same ranks."""
    starts, end = [source], target
    if not Reblock(source, target).carries:
        starts, end = list(_settled_layouts(source)), target.with_partition(P(*target.partition))
    leave = _within(end, target, topology).steps
    ways = []
    for start in starts:
        step = priced(reblock(start, end)[0], start, end, topology)
        ways.append((*_within(source, start, topology).steps, step, *leave))
    return min(ways, key=lambda steps: sum((step.price for step in steps), FREE).rank)


def _settled_layouts(spec: TensorSpec) -> Iterator[TensorSpec]:
    """Without pending sums: added up on every rank, or each dim's parts where they will lie."""
    entries, pending = spec.partition.entries, spec.mesh.ordered(spec.partition.unreduced)
    yield spec.with_partition(P(*entries))
    for dim, axes in enumerate(spec.partition.dim_axes if pending else ()):
        cut = (*axes, *pending)
        yield spec.with_partition(P(*entries[:dim], cut, *entries[dim + 1 :]))
