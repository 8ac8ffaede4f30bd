"""The edges from one layout of a tensor to the next. Each edge is a row of the pair table.

Edges lead towards the target, that is, an axis moves to the dim that it cuts there, or they lead anywhere. The row
``reblock`` does the changes that no native collective does in one step: uneven dims that are partly cut anew, axes in
another order, several dims at once, another mesh. Each rank receives only the elements that it lacks.

A step of a route is a collective, the layout it leads to, and its price.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from math import comb, perm, prod
from typing import NamedTuple

from fspmd.cache import cached
from fspmd.entries import Axes, Entry, entry_of, uneven_lengths
from fspmd.meshes.mesh import Mesh
from fspmd.messages import micros
from fspmd.pairs import Call, call
from fspmd.redistribution.cost import Price, Topology, price
from fspmd.spec import P, TensorSpec
from fspmd.transport import Options
from fspmd.transport.windows import Reblock, traffic


class Step(NamedTuple):
    """A collective, the layout it leads to, and its price for each rank."""

    call: Call
    spec: TensorSpec
    price: Price

    def __str__(self) -> str:
        if self.call.options.dims is not None:
            return f"view -> {self.spec.text}: nothing moves"
        over = ", ".join(map(repr, self.call.axes or self.call.mesh.axis_names))
        cost = f"{self.price.moved:,.0f} B, {micros(self.price.time)}, holds {self.price.peak:,} B"
        return f"{self.call.pair.name} over {over} -> {self.spec.text}: {cost}"


def priced(move: Call, before: TensorSpec, after: TensorSpec, topology: Topology) -> Step:
    """Return the step of a collective from ``before`` to ``after``, with its price."""
    reblock = move.options.move
    busiest = None if reblock is None else traffic(reblock)
    received = None if busiest is None else (busiest.messages, busiest.elements * before.dtype.itemsize)
    size, message = 0 if move.options.dims is not None else before.block_bytes, None
    if not (before.even and after.even) and busiest is None:
        message = prod(map(min, before.block_shape, after.block_shape)) * before.dtype.itemsize
    cost = price(move.pair.kernel, before.mesh, move.axes, size, after.block_bytes, topology, received, message=message)
    return Step(move, after, cost)


def back(step: Step, before: TensorSpec, topology: Topology) -> Price:
    """Return the price of the transpose of a step, which leads back to ``before``."""
    return priced(step.call.transposed, step.spec, before, topology).price


def edges(
    spec: TensorSpec,
    target: TensorSpec,
    anywhere: bool,
    worth: Callable[[TensorSpec], bool] = lambda _: True,
) -> Iterator[tuple[Call, TensorSpec]]:
    """Yield the edges that leave a layout: towards the target, or ``anywhere``.

    ``worth(layout)`` says whether to yield a reblock to a layout. There are many of them.
    """
    yield from _settlings(spec, target, anywhere)
    yield from gathers(spec, target)
    yield from _slices(spec, target, anywhere)
    yield from exchanges(spec, target, anywhere)
    yield from reblocks(spec, target, anywhere, worth)


def moved(
    spec: TensorSpec,
    entries: dict[int, Axes],
    unreduced: frozenset[str] | None = None,
    reduced: frozenset[str] | None = None,
) -> TensorSpec:
    """Return the layout with the axes of some dims replaced."""
    partition = spec.partition
    new: list[Entry] = list(partition.entries)
    for dim, axes in entries.items():
        new[dim] = entry_of(axes)
    return spec.with_partition(partition.with_entries(new, unreduced, reduced))


def is_cut_evenly(spec: TensorSpec, dim: int, axes: Axes) -> bool:
    """Return whether the blocks of a dim cut by ``axes`` have one length."""
    return spec.shape[dim] % math.prod([spec.mesh.shape[axis] for axis in axes]) == 0


def _splits(mesh: Mesh, axes: Axes, wanted: Axes, straight: bool) -> Iterator[tuple[Axes, Axes]]:
    """Yield the axes that stay and the minor axes that go. ``straight``: only the split at the first unwanted axis.

    Axes of one rank stay where they begin a dim of both layouts.
    """
    stays = next((i for i, axis in enumerate(axes) if mesh.shape[axis] > 1 or wanted[i : i + 1] != (axis,)), len(axes))
    places: Iterable[int] = range(stays, len(axes))
    if straight:
        common = next((i for i, axis in enumerate(axes) if wanted[i : i + 1] != (axis,)), len(axes))
        places = (common,) if common < len(axes) else ()
    return ((axes[:i], axes[i:]) for i in places)


def can_part(spec: TensorSpec, dim: int, kept: Axes, axes: Axes) -> bool:
    """Return whether the minor ``axes`` of a dim can be removed, or added, while ``kept`` stay.

    That needs blocks of one length, with and without them. Where no ``kept`` axis cuts the dim it is always possible.
    """
    cut = _wide(spec.mesh, kept)
    return not cut or is_cut_evenly(spec, dim, (*kept, *axes))


def sizes_over(spec: TensorSpec, dim: int, kept: Axes, axes: Axes) -> tuple[int, ...] | None:
    """Return the lengths that a collective over the minor ``axes`` of a dim must know: of uneven blocks."""
    if _wide(spec.mesh, kept):
        return None
    return uneven_lengths(spec.shape[dim], tuple([spec.mesh.shape[axis] for axis in axes]))


def gathers(spec: TensorSpec, target: TensorSpec, straight: bool = False) -> Iterator[tuple[Call, TensorSpec]]:
    """Yield gathers of minor axes of a dim. ``straight``: only of all axes that do not cut it in the target."""
    for dim, (now, wanted) in enumerate(zip(spec.partition.dim_axes, target.partition.dim_axes, strict=True)):
        for kept, gone in _splits(spec.mesh, now, wanted, straight):
            if not can_part(spec, dim, kept, gone):
                yield reblock(spec, moved(spec, {dim: kept}))
                continue
            options = Options(dim=dim, sizes=sizes_over(spec, dim, kept, gone))
            yield call("all_gather_invariant", spec.mesh, gone, options), moved(spec, {dim: kept})
            if target.partition.reduced.issuperset(gone):
                reduced = spec.partition.reduced.union(gone)
                yield call("all_gather_reduced", spec.mesh, gone, options), moved(spec, {dim: kept}, reduced=reduced)


def _cuts(
    spec: TensorSpec, free: Axes, target: TensorSpec | None, whole: bool = False
) -> Iterator[tuple[int, Axes, Axes, Options]]:
    """Yield the further cuts that free axes allow: (dim, its axes, its new axes, the options of the call).

    Cuts are those of the target, or all if ``target`` is None. ``whole``: only cuts by all free axes, in their order.
    """
    anyhow = (free,) if whole else _orders(free) if target is None else ()
    for dim, now in enumerate(spec.partition.dim_axes):
        news = anyhow
        if target is not None:
            wanted = tuple([a for a in target.partition.dim_axes[dim] if a in free])
            news = tuple(wanted[i:j] for i, j in itertools.combinations(range(len(wanted) + 1), 2))
        for new in news:
            if (new == free or not whole) and not set(now).intersection(new) and can_part(spec, dim, now, new):
                yield dim, now, new, Options(dim=dim, sizes=sizes_over(spec, dim, now, new))


def free_axes(spec: TensorSpec) -> Axes:
    """Return the axes over which a value is invariant, in the order of the mesh."""
    return spec.mesh.ordered(frozenset(spec.mesh.axis_names) - spec.partition.mentioned)


def _wide(mesh: Mesh, axes: Iterable[str]) -> Axes:
    """Return the axes of more than one rank. An axis of one rank goes where the target has it: elsewhere is no gain."""
    return tuple([axis for axis in axes if mesh.shape[axis] > 1])


def _slices(spec: TensorSpec, target: TensorSpec, anywhere: bool) -> Iterator[tuple[Call, TensorSpec]]:
    free, mesh = free_axes(spec), spec.mesh
    cuts: Iterable[tuple[int, Axes, Axes, Options]]
    if anywhere:
        wide = _wide(mesh, free)
        towards = (cut for cut in _cuts(spec, free, target) if len(_wide(mesh, cut[2])) < len(cut[2]))
        cuts = itertools.chain(_cuts(spec, wide, None), towards if wide != free else ())
    else:
        cuts = _cuts(spec, free, target)
    for dim, now, new, options in cuts:
        yield call("slice", mesh, new, options), moved(spec, {dim: (*now, *new)})


def exchanges(
    spec: TensorSpec, target: TensorSpec, anywhere: bool, straight: bool = False
) -> Iterator[tuple[Call, TensorSpec]]:
    """Yield all-to-alls, after which minor axes of a dim cut another dim.

    ``straight``: only of all axes that do not cut the first dim in the target.
    """
    for source, (present, wanted) in enumerate(zip(spec.partition.dim_axes, target.partition.dim_axes, strict=True)):
        for kept, gone in _splits(spec.mesh, present, wanted, straight):
            if not can_part(spec, source, kept, gone):
                continue
            concat_sizes = sizes_over(spec, source, kept, gone)
            for dim, now, new, cut in _cuts(spec, gone, None if anywhere else target, True):
                options = Options(dim=dim, sizes=cut.sizes, concat_dim=source, concat_sizes=concat_sizes)
                yield call("all_to_all", spec.mesh, gone, options), moved(spec, {source: kept, dim: (*now, *new)})


def _settlings(spec: TensorSpec, target: TensorSpec, anywhere: bool) -> Iterator[tuple[Call, TensorSpec]]:
    """Yield the edges that change over which axes a value is unreduced or reduced."""
    mesh, have, want = spec.mesh, spec.partition, target.partition
    if not (have.unreduced or have.reduced or want.unreduced or want.reduced):
        return
    for axes in _orders(mesh.ordered(have.unreduced if anywhere else have.unreduced - want.unreduced)):
        yield from sums(spec, target, mesh.ordered(frozenset(axes)))
        for dim, now, new, options in _cuts(spec, axes, None, True):
            yield scatter(spec, dim, now, new, options)
    free = frozenset(free_axes(spec))
    for axes in _some(mesh, have.reduced if anywhere else have.reduced - want.reduced, anywhere):
        yield call("reduced_to_invariant", mesh, axes), moved(spec, {}, None, have.reduced.difference(axes))
    for axes in _some(mesh, free & want.reduced, anywhere):
        yield call("invariant_to_reduced", mesh, axes), moved(spec, {}, None, have.reduced.union(axes))
    for axes in _some(mesh, free & want.unreduced, anywhere):
        yield call("invariant_to_unreduced", mesh, axes), moved(spec, {}, have.unreduced.union(axes))


def sums(spec: TensorSpec, target: TensorSpec, axes: Axes) -> Iterator[tuple[Call, TensorSpec]]:
    """Yield the calls that settle sums over ``axes`` on every rank."""
    left = spec.partition.unreduced.difference(axes)
    yield call("psum_unreduced", spec.mesh, axes), moved(spec, {}, left)
    if target.partition.reduced.issuperset(axes):
        yield call("psum_to_reduced", spec.mesh, axes), moved(spec, {}, left, spec.partition.reduced.union(axes))


def scatter(spec: TensorSpec, dim: int, now: Axes, new: Axes, options: Options) -> tuple[Call, TensorSpec]:
    """Return the call that settles sums over ``new`` and scatters them along a dim, which the axes ``now`` cut."""
    after = moved(spec, {dim: (*now, *new)}, spec.partition.unreduced.difference(new))
    return call("psum_scatter_unreduced", spec.mesh, new, options), after


@cached(maxsize=1024)
def _orders(axes: Axes) -> tuple[Axes, ...]:
    """Return every choice of axes in every order."""
    return tuple(itertools.chain.from_iterable(itertools.permutations(axes, n + 1) for n in range(len(axes))))


def _some(mesh: Mesh, axes: frozenset[str], any_of_them: bool) -> Iterator[Axes]:
    """Yield the choice of all axes, or every choice. Axes of one rank are in each."""
    wide = _wide(mesh, mesh.ordered(axes)) if any_of_them else ()
    rest = axes.difference(wide)
    for count in range(len(wide) + 1):
        for chosen in itertools.combinations(wide, count):
            if chosen or rest:
                yield mesh.ordered(rest.union(chosen))


def reblocks(
    spec: TensorSpec, target: TensorSpec, anywhere: bool, worth: Callable[[TensorSpec], bool] = lambda _: True
) -> Iterator[tuple[Call, TensorSpec]]:
    """Yield reblocks of all dims at once, to the axes that cut them in the target and are not pending.

    Axes over which the target is reduced are gathered, or stay for a later gather whose gradient is scattered.
    ``anywhere``: also to every other placement.
    """
    now = spec.partition.dim_axes
    pending, reduced = spec.partition.unreduced | spec.partition.reduced, target.partition.reduced
    goal = [tuple([axis for axis in axes if axis not in pending]) for axes in target.partition.dim_axes]
    stay = [(*axes, *[axis for axis in present if axis in reduced]) for axes, present in zip(goal, now, strict=True)]
    # a dict keeps the order: of equal routes every rank must take the same
    goals = dict.fromkeys(moved(spec, dict(enumerate(axes))) for axes in (goal, stay))
    if anywhere:
        whole = spec.with_partition(P(unreduced=spec.partition.unreduced, reduced=spec.partition.reduced))
        goals |= _placements(whole, tuple([_leading(spec.mesh, axes) for axes in goal]))
    for after in goals:
        if after is spec or not worth(after):
            continue
        uneven = not (spec.even and after.even)  # a native gather of uneven blocks waits for the longest
        if (anywhere and uneven) or not _is_native(spec, after):
            yield reblock(spec, after)


_MANY = 500  # of more placements, only those that lead towards the target are considered


def _leading(mesh: Mesh, axes: Axes) -> Axes:
    """Return the axes of one rank before all others."""
    return tuple(itertools.takewhile(lambda axis: mesh.shape[axis] == 1, axes))


@cached(maxsize=64)
def _placements(spec: TensorSpec, begin: tuple[Axes, ...]) -> dict[TensorSpec, None]:
    """Return every cut of the dims of a whole tensor by free axes, in every order, or none if there are too many.

    ``begin``: the axes of one rank that cut each dim before.
    """
    axes, ndim = _wide(spec.mesh, free_axes(spec)), spec.ndim
    placements: dict[TensorSpec, None] = {}
    few = sum(perm(len(axes), n) * comb(n + max(ndim, 1) - 1, n) for n in range(len(axes) + 1)) <= _MANY
    for order in itertools.permutations(axes) if few else ():
        for places in itertools.product([*range(ndim), None], repeat=len(order)):
            cuts = [tuple(a for a, p in zip(order, places, strict=True) if p == dim) for dim in range(ndim)]
            placements[moved(spec, {dim: (*begin[dim], *cut) for dim, cut in enumerate(cuts)})] = None
    return placements


def reblock(spec: TensorSpec, after: TensorSpec) -> tuple[Call, TensorSpec]:
    """Return the call that leads from one placement to another, and the other."""
    move = Reblock(spec, after)
    return call("reblock", spec.mesh, move.axes, Options(move=move)), after


def _is_native(spec: TensorSpec, after: TensorSpec) -> bool:
    """Return whether a change is one gather or one slice."""
    now, then = spec.partition.dim_axes, after.partition.dim_axes
    changed = [dim for dim, axes in enumerate(now) if axes != then[dim]]
    if len(changed) > 1:
        return False
    (dim,) = changed
    few, many = sorted((now[dim], then[dim]), key=len)
    return many[: len(few)] == few and can_part(spec, dim, few, many[len(few) :])
