"""From one layout of a tensor to another: the cheapest sequence of collectives, by shortest path over layouts.

A node of the graph is a `TensorSpec`, an edge one row of the pair table. Edges lead towards the target: an axis is cut
into a dim only where the target has it, so no step gathers what a later one would cut away again if that is cheaper.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from fspmd.cost import FREE, Price, Topology, price
from fspmd.pairs import Call, call
from fspmd.spec import Entry, P, TensorSpec, blocks, entry_axes
from fspmd.transport import Options

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One collective, the layout it leads to, and what it costs each rank."""

    call: Call
    spec: TensorSpec
    price: Price


@dataclass(frozen=True, slots=True)
class Route:
    """The steps between two layouts of one tensor on one mesh."""

    source: TensorSpec
    target: TensorSpec
    steps: tuple[Step, ...]

    @property
    def price(self) -> Price:
        """Of all steps."""
        return sum((step.price for step in self.steps), FREE)

    @property
    def peak(self) -> int:
        """The most bytes a rank holds at once: the blocks before and after a step."""
        specs = [self.source, *(step.spec for step in self.steps)]
        return max(map(_bytes, specs)) if len(specs) == 1 else max(map(_held, specs, specs[1:]))

    def __str__(self) -> str:
        lines = [f"{_short(self.source)} -> {_short(self.target)} on {self.source.mesh!r}"]
        for i, step in enumerate(self.steps, 1):
            over = ", ".join(map(repr, step.call.axes))
            cost = f"{step.price.moved:,.0f} B, {step.price.time:.3g} µs"
            lines.append(f"{i:3}. {step.call.pair.name} over {over} -> {_short(step.spec)}: {cost}")
        total = self.price
        lines.append(f"each rank sends {total.moved:,.0f} B in {total.time:.3g} µs and holds {self.peak:,} B at most")
        return "\n".join(lines)


def _short(spec: TensorSpec) -> str:
    return repr(spec).partition(" on ")[0]


def _bytes(spec: TensorSpec) -> int:
    return prod(spec.local_shape((0,) * len(spec.mesh.axis_names))) * spec.dtype.itemsize


def _held(before: TensorSpec, after: TensorSpec) -> int:
    return _bytes(before) + _bytes(after)


@functools.lru_cache(maxsize=4096)
def route(source: TensorSpec, target: TensorSpec, topology: Topology) -> Route:
    """The cheapest way, by Dijkstra's algorithm; of equally cheap ones that of the fewest steps."""
    order = itertools.count()
    queue: list[tuple[float, int, int, TensorSpec, tuple[Step, ...]]] = [(0.0, 0, next(order), source, ())]
    done: set[TensorSpec] = set()
    while True:
        time, length, _, spec, steps = heapq.heappop(queue)
        if spec is target:
            return Route(source, target, steps)
        if spec in done:
            continue
        done.add(spec)
        for move, after in _moves(spec, target):
            if after not in done:
                cost = price(move.pair.kernel, spec.mesh, move.axes, _bytes(spec), _bytes(after), topology)
                step = Step(move, after, cost)
                heapq.heappush(queue, (time + cost.time, length + 1, next(order), after, (*steps, step)))


def _moves(spec: TensorSpec, target: TensorSpec) -> Iterator[tuple[Call, TensorSpec]]:
    """The edges that leave a layout."""
    yield from _settlings(spec, target)
    yield from _gathers(spec, target)
    yield from _slices(spec, target)
    yield from _exchanges(spec, target)
    yield from _permutations(spec, target)


def _moved(
    spec: TensorSpec,
    entries: dict[int, Axes],
    unreduced: frozenset[str] | None = None,
    reduced: frozenset[str] | None = None,
) -> TensorSpec:
    """The layout with the axes of some dims replaced."""
    partition = spec.partition
    new: list[Entry] = [entries.get(dim, entry) for dim, entry in enumerate(partition)]
    return spec.with_partition(
        P(
            *new,
            unreduced=partition.unreduced if unreduced is None else unreduced,
            reduced=partition.reduced if reduced is None else reduced,
        )
    )


def lengths(spec: TensorSpec, dim: int, axes: Axes) -> tuple[int, ...] | None:
    """The block lengths of a dim cut by axes, in rank order; None where they are equal."""
    cut = tuple(length for _, length in blocks(spec.shape[dim], tuple(spec.mesh.shape[axis] for axis in axes)))
    return None if len(set(cut)) == 1 else cut


def _splits(axes: Axes) -> Iterator[tuple[Axes, Axes]]:
    """The axes that stay, and the minor ones that go."""
    return ((axes[:i], axes[i:]) for i in range(len(axes)))


def _can_part(spec: TensorSpec, dim: int, kept: Axes, axes: Axes) -> bool:
    """Whether the minor axes of a dim can go alone: all of them always, else where all blocks are of one length."""
    return not kept or (lengths(spec, dim, kept) is None and lengths(spec, dim, (*kept, *axes)) is None)


def _gathers(spec: TensorSpec, target: TensorSpec) -> Iterator[tuple[Call, TensorSpec]]:
    for dim, entry in enumerate(spec.partition):
        for kept, gone in _splits(entry_axes(entry)):
            if not _can_part(spec, dim, kept, gone):
                continue
            options = Options(dim=dim, sizes=None if kept else lengths(spec, dim, gone))
            yield call("all_gather_invariant", spec.mesh, gone, options), _moved(spec, {dim: kept})
            if target.partition.reduced.issuperset(gone):
                reduced = spec.partition.reduced.union(gone)
                yield call("all_gather_reduced", spec.mesh, gone, options), _moved(spec, {dim: kept}, reduced=reduced)


def _cuts(spec: TensorSpec, target: TensorSpec, free: Axes) -> Iterator[tuple[int, Axes, Axes, Options]]:
    """Where free axes may cut further: (dim, its axes, the new ones, how)."""
    for dim, (entry, goal) in enumerate(zip(spec.partition, target.partition, strict=True)):
        now, wanted = entry_axes(entry), tuple(axis for axis in entry_axes(goal) if axis in free)
        for i, j in itertools.combinations(range(len(wanted) + 1), 2):
            new = wanted[i:j]
            if _can_part(spec, dim, now, new):
                yield dim, now, new, Options(dim=dim, sizes=None if now else lengths(spec, dim, new))


def _slices(spec: TensorSpec, target: TensorSpec) -> Iterator[tuple[Call, TensorSpec]]:
    free = tuple(axis for axis in spec.mesh.axis_names if axis not in spec.partition.mentioned)
    for dim, now, new, options in _cuts(spec, target, free):
        yield call("slice", spec.mesh, new, options), _moved(spec, {dim: (*now, *new)})


def _exchanges(spec: TensorSpec, target: TensorSpec) -> Iterator[tuple[Call, TensorSpec]]:
    for source, entry in enumerate(spec.partition):
        for kept, gone in _splits(entry_axes(entry)):
            if not _can_part(spec, source, kept, gone):
                continue
            concat_sizes = None if kept else lengths(spec, source, gone)
            for dim, now, new, cut in _cuts(spec, target, gone):
                if dim != source and new == gone:
                    options = Options(dim=dim, sizes=cut.sizes, concat_dim=source, concat_sizes=concat_sizes)
                    yield call("all_to_all", spec.mesh, gone, options), _moved(spec, {source: kept, dim: (*now, *new)})


def _settlings(spec: TensorSpec, target: TensorSpec) -> Iterator[tuple[Call, TensorSpec]]:
    """Ends and beginnings of pending sums."""
    mesh, have, want = spec.mesh, spec.partition, target.partition
    pending = tuple(axis for axis in mesh.axis_names if axis in have.unreduced - want.unreduced)
    for n in range(1, len(pending) + 1):
        for axes in itertools.combinations(pending, n):
            left = have.unreduced.difference(axes)
            yield call("psum_unreduced", mesh, axes), _moved(spec, {}, left)
            if want.reduced.issuperset(axes):
                yield call("psum_to_reduced", mesh, axes), _moved(spec, {}, left, have.reduced.union(axes))
    for dim, now, new, options in _cuts(spec, target, pending):
        after = _moved(spec, {dim: (*now, *new)}, have.unreduced.difference(new))
        yield call("psum_scatter_unreduced", mesh, new, options), after
    free = frozenset(mesh.axis_names) - have.mentioned
    if axes := tuple(axis for axis in mesh.axis_names if axis in have.reduced - want.reduced):
        yield call("reduced_to_invariant", mesh, axes), _moved(spec, {}, None, have.reduced.difference(axes))
    if axes := tuple(axis for axis in mesh.axis_names if axis in free & want.reduced):
        yield call("invariant_to_reduced", mesh, axes), _moved(spec, {}, None, have.reduced.union(axes))
    if axes := tuple(axis for axis in mesh.axis_names if axis in free & want.unreduced):
        yield call("invariant_to_unreduced", mesh, axes), _moved(spec, {}, have.unreduced.union(axes))


def _permutations(spec: TensorSpec, target: TensorSpec) -> Iterator[tuple[Call, TensorSpec]]:
    """The same blocks on other ranks: axes of one dim in another order, or dims that change places."""
    wholes = [target] if spec.partition.axes == target.partition.axes else []
    goals = [_moved(spec, {dim: entry_axes(entry) for dim, entry in enumerate(g.partition)}) for g in wholes]
    for dim, (entry, goal) in enumerate(zip(spec.partition, target.partition, strict=True)):
        now, wanted = entry_axes(entry), entry_axes(goal)
        ordered = tuple(axis for axis in wanted if axis in now) + tuple(axis for axis in now if axis not in wanted)
        if ordered != now:
            goals.append(_moved(spec, {dim: ordered}))
    for after in goals:
        if after is not spec and spec.even and after.even and _block_shape(spec) == _block_shape(after):
            axes = tuple(axis for axis in spec.mesh.axis_names if axis in spec.partition.axes)
            yield call("ppermute", spec.mesh, axes, Options(perm=_pairs(spec, after, axes))), after


def _block_shape(spec: TensorSpec) -> tuple[int, ...]:
    return spec.local_shape((0,) * len(spec.mesh.axis_names))


def _pairs(before: TensorSpec, after: TensorSpec, axes: Axes) -> tuple[tuple[int, int], ...]:
    """(source, destination) for each rank along the axes: who holds its new block."""
    mesh = before.mesh
    spans = [range(mesh.shape[axis]) if axis in axes else range(1) for axis in mesh.axis_names]
    coordinates = list(itertools.product(*spans))
    holder = {_at(before, at): place for place, at in enumerate(coordinates)}
    return tuple((holder[_at(after, at)], place) for place, at in enumerate(coordinates))


def _at(spec: TensorSpec, coordinate: tuple[int, ...]) -> tuple[int, ...]:
    """Which block a rank holds: its number along each dim."""
    index = dict(zip(spec.mesh.axis_names, coordinate, strict=True))
    numbers = [0] * spec.ndim
    for dim, axes, sizes in spec.cuts:
        for axis, n in zip(axes, sizes, strict=True):
            numbers[dim] = numbers[dim] * n + index[axis]
    return tuple(numbers)
