"""From one layout of a tensor to another: the cheapest sequence of collectives, by shortest path over layouts.

A node of the graph is a `TensorSpec`, an edge one row of the pair table. Edges lead towards the target: an axis is cut
into a dim only where the target has it. Where ways round can pay all edges are searched: beside a pending sum (scatter
it first), and where links differ in speed (fetch a part over the slow axis, and gather it over the fast one).
What no native collective does in one step (uneven dims that are cut partly anew, axes in another order, several dims at
once, another mesh), ``reblock`` does: each rank receives what it lacks, and no more.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import comb, perm, prod

from fspmd.bounds import bound
from fspmd.cost import FREE, Price, Topology, price
from fspmd.pairs import Call, call
from fspmd.spec import Entry, P, TensorSpec, blocks, entry_axes
from fspmd.transport import Options
from fspmd.transport.windows import Reblock, lacking, traffic

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One collective, the layout it leads to, and what it costs each rank."""

    call: Call
    spec: TensorSpec
    price: Price

    def __str__(self) -> str:
        over = ", ".join(map(repr, self.call.axes or self.call.mesh.axis_names))
        cost = f"{self.price.moved:,.0f} B, {self.price.time:.3g} µs, holds {self.price.peak:,} B"
        return f"{self.call.pair.name} over {over} -> {_short(self.spec)}: {cost}"


@dataclass(frozen=True, slots=True)
class Route:
    """The steps between two layouts of one tensor."""

    source: TensorSpec
    target: TensorSpec
    steps: tuple[Step, ...]

    @property
    def price(self) -> Price:
        """Of all steps: bytes and times add up, the peak is the highest."""
        return sum((step.price for step in self.steps), Price(0.0, 0.0, _bytes(self.source)))

    def __str__(self) -> str:
        where = repr(self.source.mesh)
        if self.target.mesh != self.source.mesh:
            where += f", then {self.target.mesh!r}"
        return "\n".join(
            (
                f"{_short(self.source)} -> {_short(self.target)} on {where}",
                *(f"{i:3}. {step}" for i, step in enumerate(self.steps, 1)),
                str(self.price),
            )
        )

    __repr__ = __str__


def _short(spec: TensorSpec) -> str:
    return repr(spec).partition(" on ")[0]


@functools.lru_cache(maxsize=8192)
def _bytes(spec: TensorSpec) -> int:
    return prod(spec.block_shape) * spec.dtype.itemsize


@functools.lru_cache(maxsize=8192)
def route(source: TensorSpec, target: TensorSpec, topology: Topology) -> Route:
    """The cheapest way; of equally quick ones that which holds less, then that of fewer steps."""
    if source is target:
        return Route(source, target, ())
    steps = _across(source, target, topology) if source.mesh != target.mesh else _within(source, target, topology)
    return Route(source, target, steps)


def _within(source: TensorSpec, target: TensorSpec, topology: Topology) -> tuple[Step, ...]:
    """By Dijkstra's algorithm over edges that lead towards the target; then, where ways round may pay, over all."""
    if (one := _direct(source, target, topology)) is not None:
        return (one,)
    order = itertools.count()
    queue: list[tuple[float, int, int, int, TensorSpec, tuple[Step, ...]]] = [(0.0, 0, 0, next(order), source, ())]
    done: set[TensorSpec] = set()
    while True:
        time, peak, length, _, spec, steps = heapq.heappop(queue)
        if spec is target:
            break
        if spec in done:
            continue
        done.add(spec)
        for move, after in _moves(spec, target, False):
            if after not in done:
                step = _step(move, spec, after, topology)
                label = (round(time + step.price.time, 9), max(peak, step.price.peak), length + _weight(move))
                heapq.heappush(queue, (*label, next(order), after, (*steps, step)))
    return _round(source, target, topology, steps) if _round_pays(source, target, topology) else steps


def _direct(source: TensorSpec, target: TensorSpec, topology: Topology) -> Step | None:
    """The collective from the one to the other that no route beats, if it is plain to see."""
    for move, after in _moves(source, target, False):
        if after is target and move.pair.name != "reblock":
            step = _step(move, source, target, topology)
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
    return spared * latency <= topology.launch and not _links_differ(source, topology)


def _weight(move: Call) -> int:
    return 3 if move.pair.name == "reblock" else 1  # of equals rather two native collectives


_EFFORT = 20_000  # edges that are looked at, before what is known is good enough


def _round(source: TensorSpec, target: TensorSpec, topology: Topology, known: tuple[Step, ...]) -> tuple[Step, ...]:
    """A quicker way than a known one, by way of any layouts: A*, with `bound` for what is still to come.

    An edge whose traffic has to be counted is queued at what it takes at least, and priced when its turn comes.
    """
    least, limit = bound(target, topology), sum(step.price.time for step in known) - 1e-6
    order, looked = itertools.count(), 0
    reached: dict[TensorSpec, tuple[float, int, int]] = {}
    queue: list[tuple[float, int, int, int, float, TensorSpec, tuple[Step, ...], Call | None]] = []

    def push(
        label: tuple[float, int, int], spec: TensorSpec, steps: tuple[Step, ...], edge: Call | None = None
    ) -> None:
        time, peak, length = label
        ahead = least(spec)
        if edge is not None:
            ahead += _least(edge, steps[-1].spec if steps else source, spec, topology)
        if time + ahead < limit and reached.get(spec, (limit, 0, 0)) > label:
            heapq.heappush(queue, (round(time + ahead, 9), peak, length, next(order), time, spec, steps, edge))

    def priced(label: tuple[float, int, int], move: Call, after: TensorSpec, steps: tuple[Step, ...]) -> None:
        step = _step(move, steps[-1].spec if steps else source, after, topology)
        time, peak, length = label
        push((time + step.price.time, max(peak, step.price.peak), length + _weight(move)), after, (*steps, step))

    push((0.0, 0, 0), source, ())
    while queue and looked < _EFFORT:
        _, peak, length, _, time, spec, steps, move = heapq.heappop(queue)
        label = (time, peak, length)
        if move is not None:
            priced(label, move, spec, steps)
        elif spec is target:
            return steps
        elif reached.get(spec, (limit, 0, 0)) > label:
            reached[spec] = label
            for edge, after in _moves(spec, target, True):
                looked += 1
                if edge.options.move is None:
                    priced(label, edge, after, steps)
                else:
                    push(label, after, steps, edge)
    return known


def _least(move: Call, before: TensorSpec, after: TensorSpec, topology: Topology) -> float:
    """What a reblock takes at least: what its last rank receives, or whose block grows."""
    size = _bytes(after)
    lacks = max(lacking(before, after) * before.dtype.itemsize, size - _bytes(before))
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
        or _links_differ(source, topology)
    )


def _links_differ(spec: TensorSpec, topology: Topology) -> bool:
    mesh = spec.mesh
    axes = tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)
    groups = [(axis,) for axis in axes] + [axes] * (len(axes) > 1)
    return len({topology.link(mesh, group) for group in groups}) > 1


def _step(move: Call, before: TensorSpec, after: TensorSpec, topology: Topology) -> Step:
    reblock = move.options.move
    moved = None if reblock is None else traffic(reblock)
    received = None if moved is None else (moved.messages, moved.elements * before.dtype.itemsize)
    cost = price(move.pair.kernel, before.mesh, move.axes, _bytes(before), _bytes(after), topology, received)
    return Step(move, after, cost)


def back(step: Step, before: TensorSpec, topology: Topology) -> Price:
    """What the transpose of a step costs, which leads back to ``before``."""
    return _step(step.call.transposed, step.spec, before, topology).price


def _across(source: TensorSpec, target: TensorSpec, topology: Topology) -> tuple[Step, ...]:
    """To another mesh in one move, before which pending sums end unless both meshes have them on the same ranks."""
    starts, end = [source], target
    if not Reblock(source, target).carries:
        starts, end = list(_settled_layouts(source)), target.with_partition(P(*target.partition))
    leave = _within(end, target, topology)
    ways = []
    for start in starts:
        step = _step(_reblock(start, end)[0], start, end, topology)
        ways.append((*_within(source, start, topology), step, *leave))
    return min(ways, key=lambda steps: sum((step.price for step in steps), FREE).rank)


def _settled_layouts(spec: TensorSpec) -> Iterator[TensorSpec]:
    """Without pending sums: added up on every rank, or each dim's parts where they will lie."""
    entries, pending = list(spec.partition), spec.mesh.ordered(spec.partition.unreduced)
    yield spec.with_partition(P(*entries))
    for dim in range(spec.ndim if pending else 0):
        cut = (*entry_axes(entries[dim]), *pending)
        yield spec.with_partition(P(*entries[:dim], cut, *entries[dim + 1 :]))


# --- the edges ------------------------------------------------------------------------------------------------------


def _moves(spec: TensorSpec, target: TensorSpec, anywhere: bool) -> Iterator[tuple[Call, TensorSpec]]:
    """The edges that leave a layout: into dims where the target has an axis, or ``anywhere``."""
    yield from _settlings(spec, target, anywhere)
    yield from _gathers(spec, target)
    yield from _slices(spec, None if anywhere else target)
    yield from _exchanges(spec, None if anywhere else target)
    yield from _reblocks(spec, target, anywhere)


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


@functools.lru_cache(maxsize=8192)
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
                yield _reblock(spec, _moved(spec, {dim: kept}))
                continue
            options = Options(dim=dim, sizes=None if kept else lengths(spec, dim, gone))
            yield call("all_gather_invariant", spec.mesh, gone, options), _moved(spec, {dim: kept})
            if target.partition.reduced.issuperset(gone):
                reduced = spec.partition.reduced.union(gone)
                yield call("all_gather_reduced", spec.mesh, gone, options), _moved(spec, {dim: kept}, reduced=reduced)


def _cuts(
    spec: TensorSpec, free: Axes, target: TensorSpec | None, whole: bool = False
) -> Iterator[tuple[int, Axes, Axes, Options]]:
    """Where free axes, ``whole``: all of them as they are, may cut further: as the target has them, None: anywhere.

    (dim, its axes, the new ones, how).
    """
    anyhow = (free,) if whole else _orders(free)
    for dim, entry in enumerate(spec.partition):
        now, news = entry_axes(entry), anyhow
        if target is not None:
            wanted = tuple(a for a in entry_axes(target.partition[dim]) if a in free)
            news = tuple(wanted[i:j] for i, j in itertools.combinations(range(len(wanted) + 1), 2))
        for new in news:
            if (new == free or not whole) and _can_part(spec, dim, now, new):
                yield dim, now, new, Options(dim=dim, sizes=None if now else lengths(spec, dim, new))


@functools.lru_cache(maxsize=256)
def _orders(axes: Axes) -> tuple[Axes, ...]:
    """Every choice of the axes in every order."""
    return tuple(itertools.chain.from_iterable(itertools.permutations(axes, n + 1) for n in range(len(axes))))


def _free(spec: TensorSpec) -> Axes:
    return spec.mesh.ordered(frozenset(spec.mesh.axis_names) - spec.partition.mentioned)


def _slices(spec: TensorSpec, target: TensorSpec | None) -> Iterator[tuple[Call, TensorSpec]]:
    for dim, now, new, options in _cuts(spec, _free(spec), target):
        yield call("slice", spec.mesh, new, options), _moved(spec, {dim: (*now, *new)})


def _exchanges(spec: TensorSpec, target: TensorSpec | None) -> Iterator[tuple[Call, TensorSpec]]:
    for source, entry in enumerate(spec.partition):
        for kept, gone in _splits(entry_axes(entry)):
            if not _can_part(spec, source, kept, gone):
                continue
            concat_sizes = None if kept else lengths(spec, source, gone)
            for dim, now, new, cut in _cuts(spec, gone, target, True):
                if dim != source:
                    options = Options(dim=dim, sizes=cut.sizes, concat_dim=source, concat_sizes=concat_sizes)
                    yield call("all_to_all", spec.mesh, gone, options), _moved(spec, {source: kept, dim: (*now, *new)})


def _settlings(spec: TensorSpec, target: TensorSpec, anywhere: bool) -> Iterator[tuple[Call, TensorSpec]]:
    """Ends and beginnings of pending sums."""
    mesh, have, want = spec.mesh, spec.partition, target.partition
    pending = mesh.ordered(have.unreduced if anywhere else have.unreduced - want.unreduced)
    for n in range(1, len(pending) + 1):
        for axes in itertools.permutations(pending, n):
            left = have.unreduced.difference(axes)
            yield call("psum_unreduced", mesh, axes), _moved(spec, {}, left)
            if want.reduced.issuperset(axes):
                yield call("psum_to_reduced", mesh, axes), _moved(spec, {}, left, have.reduced.union(axes))
            for dim, now, new, options in _cuts(spec, axes, None, True):  # parts are fewer bytes to move on
                after = _moved(spec, {dim: (*now, *new)}, left)
                yield call("psum_scatter_unreduced", mesh, new, options), after
    free = frozenset(_free(spec))
    for axes in _some(mesh.ordered(have.reduced if anywhere else have.reduced - want.reduced), anywhere):
        yield call("reduced_to_invariant", mesh, axes), _moved(spec, {}, None, have.reduced.difference(axes))
    for axes in _some(mesh.ordered(free & want.reduced), anywhere):
        yield call("invariant_to_reduced", mesh, axes), _moved(spec, {}, None, have.reduced.union(axes))
    for axes in _some(mesh.ordered(free & want.unreduced), anywhere):
        yield call("invariant_to_unreduced", mesh, axes), _moved(spec, {}, have.unreduced.union(axes))


def _some(axes: Axes, any_of_them: bool) -> Iterator[Axes]:
    """All of the axes, or every choice of them."""
    for n in range(1 if any_of_them else len(axes), len(axes) + 1):
        if n:
            yield from itertools.combinations(axes, n)


def _reblocks(spec: TensorSpec, target: TensorSpec, anywhere: bool) -> Iterator[tuple[Call, TensorSpec]]:
    """All dims at once to how the target has them, as far as axes are not pending.

    Axes over which the target is reduced go, or they stay, for a gather whose gradient is scattered. ``anywhere``: to
    every other placement, too.
    """
    now = [entry_axes(entry) for entry in spec.partition]
    held, reduced = spec.partition.unreduced | spec.partition.reduced, target.partition.reduced
    goal = [tuple(axis for axis in entry_axes(entry) if axis not in held) for entry in target.partition]
    stay = [(*axes, *(axis for axis in entry if axis in reduced)) for axes, entry in zip(goal, now, strict=True)]
    goals = {tuple(goal), tuple(stay)}
    if anywhere:
        goals |= _placements(spec.mesh.ordered(frozenset(spec.mesh.axis_names) - held), spec.ndim)
    for wanted in goals:
        after = _moved(spec, dict(enumerate(wanted)))
        if after is not spec and not _is_native(spec, now, wanted):
            yield _reblock(spec, after)


_MANY = 500  # placements, of which only those are looked at that lead towards the target


@functools.lru_cache(maxsize=256)
def _placements(axes: Axes, ndim: int) -> frozenset[tuple[Axes, ...]]:
    """Every way to cut dims over some of the axes, in every order, unless they are too many."""
    found = set()
    few = sum(perm(len(axes), n) * comb(n + max(ndim, 1) - 1, n) for n in range(len(axes) + 1)) <= _MANY
    for order in itertools.permutations(axes) if few else ():
        for places in itertools.product([*range(ndim), None], repeat=len(order)):
            found.add(tuple(tuple(a for a, p in zip(order, places, strict=True) if p == dim) for dim in range(ndim)))
    return frozenset(found)


def _reblock(spec: TensorSpec, after: TensorSpec) -> tuple[Call, TensorSpec]:
    move = Reblock(spec, after)
    return call("reblock", spec.mesh, move.axes, Options(move=move)), after


def _is_native(spec: TensorSpec, now: list[Axes], wanted: tuple[Axes, ...]) -> bool:
    """Whether a change is one gather or one slice."""
    changed = [dim for dim, axes in enumerate(wanted) if axes != now[dim]]
    if len(changed) > 1:
        return False
    (dim,) = changed
    few, many = sorted((now[dim], wanted[dim]), key=len)
    return many[: len(few)] == few and _can_part(spec, dim, few, many[len(few) :])
