"""What leads from one layout of a tensor to the next: each edge one row of the pair table.

Edges lead towards the target, into dims where it has an axis, or anywhere. What no native collective does in one step
(uneven dims that are cut partly anew, axes in another order, several dims at once, another mesh), ``reblock`` does:
each rank receives what it lacks, and no more.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from math import comb, perm

from fspmd.entries import Entry, blocks, entry_axes, entry_of
from fspmd.pairs import Call, call
from fspmd.redistribution.bundles import Axes, Bundles, bundled, orders, some
from fspmd.spec import P, TensorSpec
from fspmd.transport import Options
from fspmd.transport.windows import Reblock


def edges(
    spec: TensorSpec,
    target: TensorSpec,
    anywhere: bool,
    worth: Callable[[TensorSpec], bool] = lambda _: True,
    bundles: Bundles = (),
) -> Iterator[tuple[Call, TensorSpec]]:
    """The edges that leave a layout: into dims where the target has an axis, or ``anywhere``.

    ``worth``: whether a layout is worth a reblock to it; there are many. ``bundles``: axes that go together where the
    target does not say how they lie.
    """
    yield from _settlings(spec, target, anywhere, bundles)
    straight = bool(bundles) and not anywhere
    yield from _gathers(spec, target, straight)
    yield from _slices(spec, None if anywhere else target, bundles)
    yield from _exchanges(spec, None if anywhere else target, target if straight else None)
    yield from _reblocks(spec, target, anywhere, worth)


def _moved(
    spec: TensorSpec,
    entries: dict[int, Axes],
    unreduced: frozenset[str] | None = None,
    reduced: frozenset[str] | None = None,
) -> TensorSpec:
    """The layout with the axes of some dims replaced."""
    partition = spec.partition
    new: list[Entry] = list(partition)
    for dim, axes in entries.items():
        new[dim] = entry_of(axes)
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
    parts = tuple([spec.mesh.shape[axis] for axis in axes])
    if spec.shape[dim] % math.prod(parts) == 0:
        return None
    cut = tuple(length for _, length in blocks(spec.shape[dim], parts))
    return None if len(set(cut)) == 1 else cut


def _splits(axes: Axes, wanted: Entry | None = None, straight: bool = False) -> Iterator[tuple[Axes, Axes]]:
    """The axes that stay, and the minor ones that go; ``straight``: all of those that are not ``wanted``."""
    places: Iterable[int] = range(len(axes))
    if straight:
        then = entry_axes(wanted)
        common = next((i for i, axis in enumerate(axes) if then[i : i + 1] != (axis,)), len(axes))
        places = (common,) if common < len(axes) else ()
    return ((axes[:i], axes[i:]) for i in places)


def _can_part(spec: TensorSpec, dim: int, kept: Axes, axes: Axes) -> bool:
    """Whether the minor axes of a dim can go alone: all of them always, else where all blocks are of one length."""
    return not kept or (lengths(spec, dim, kept) is None and lengths(spec, dim, (*kept, *axes)) is None)


def _gathers(spec: TensorSpec, target: TensorSpec, straight: bool) -> Iterator[tuple[Call, TensorSpec]]:
    for dim, entry in enumerate(spec.partition):
        for kept, gone in _splits(entry_axes(entry), target.partition[dim], straight):
            if not _can_part(spec, dim, kept, gone):
                yield reblock(spec, _moved(spec, {dim: kept}))
                continue
            options = Options(dim=dim, sizes=None if kept else lengths(spec, dim, gone))
            yield call("all_gather_invariant", spec.mesh, gone, options), _moved(spec, {dim: kept})
            if target.partition.reduced.issuperset(gone):
                reduced = spec.partition.reduced.union(gone)
                yield call("all_gather_reduced", spec.mesh, gone, options), _moved(spec, {dim: kept}, reduced=reduced)


def _cuts(
    spec: TensorSpec, free: Axes, target: TensorSpec | None, whole: bool = False, bundles: Bundles = ()
) -> Iterator[tuple[int, Axes, Axes, Options]]:
    """Where free axes, ``whole``: all of them as they are, may cut further: as the target has them, None: anywhere.

    (dim, its axes, the new ones, how).
    """
    anyhow = (free,) if whole else orders(bundled(free, bundles)) if target is None else ()
    for dim, entry in enumerate(spec.partition):
        now, news = entry_axes(entry), anyhow
        if target is not None:
            wanted = tuple(a for a in entry_axes(target.partition[dim]) if a in free)
            news = tuple(wanted[i:j] for i, j in itertools.combinations(range(len(wanted) + 1), 2))
        for new in news:
            if (new == free or not whole) and not set(now).intersection(new) and _can_part(spec, dim, now, new):
                yield dim, now, new, Options(dim=dim, sizes=None if now else lengths(spec, dim, new))


def _free(spec: TensorSpec) -> Axes:
    return spec.mesh.ordered(frozenset(spec.mesh.axis_names) - spec.partition.mentioned)


def _slices(spec: TensorSpec, target: TensorSpec | None, bundles: Bundles) -> Iterator[tuple[Call, TensorSpec]]:
    for dim, now, new, options in _cuts(spec, _free(spec), target, bundles=bundles):
        yield call("slice", spec.mesh, new, options), _moved(spec, {dim: (*now, *new)})


def _exchanges(
    spec: TensorSpec, target: TensorSpec | None, straight: TensorSpec | None
) -> Iterator[tuple[Call, TensorSpec]]:
    for source, entry in enumerate(spec.partition):
        wanted = None if straight is None else straight.partition[source]
        for kept, gone in _splits(entry_axes(entry), wanted, straight is not None):
            if not _can_part(spec, source, kept, gone):
                continue
            concat_sizes = None if kept else lengths(spec, source, gone)
            for dim, now, new, cut in _cuts(spec, gone, target, True):
                options = Options(dim=dim, sizes=cut.sizes, concat_dim=source, concat_sizes=concat_sizes)
                yield call("all_to_all", spec.mesh, gone, options), _moved(spec, {source: kept, dim: (*now, *new)})


def _settlings(
    spec: TensorSpec, target: TensorSpec, anywhere: bool, bundles: Bundles
) -> Iterator[tuple[Call, TensorSpec]]:
    """Ends and beginnings of pending sums."""
    mesh, have, want = spec.mesh, spec.partition, target.partition
    if not (have.unreduced or have.reduced or want.unreduced or want.reduced):
        return
    pending = mesh.ordered(have.unreduced if anywhere else have.unreduced - want.unreduced)
    anyhow = orders(bundled(pending, bundles))
    own = [axes for axes in _wanted(pending, target) if axes not in anyhow] if bundles else []
    for axes in (*anyhow, *own):
        left = have.unreduced.difference(axes)
        summed = mesh.ordered(frozenset(axes))
        yield call("psum_unreduced", mesh, summed), _moved(spec, {}, left)
        if want.reduced.issuperset(axes):
            yield call("psum_to_reduced", mesh, summed), _moved(spec, {}, left, have.reduced.union(axes))
        there = target if axes in own else None  # parts are fewer bytes to move on
        for dim, now, new, options in _cuts(spec, axes, there, True):
            after = _moved(spec, {dim: (*now, *new)}, left)
            yield call("psum_scatter_unreduced", mesh, new, options), after
    free = frozenset(_free(spec))
    reduced = mesh.ordered(have.reduced if anywhere else have.reduced - want.reduced)
    for axes in some(bundled(reduced, bundles), anywhere):
        yield call("reduced_to_invariant", mesh, axes), _moved(spec, {}, None, have.reduced.difference(axes))
    for axes in some(bundled(mesh.ordered(free & want.reduced), bundles), anywhere):
        yield call("invariant_to_reduced", mesh, axes), _moved(spec, {}, None, have.reduced.union(axes))
    for axes in some(bundled(mesh.ordered(free & want.unreduced), bundles), anywhere):
        yield call("invariant_to_unreduced", mesh, axes), _moved(spec, {}, have.unreduced.union(axes))


def _wanted(pending: Axes, target: TensorSpec) -> Iterator[Axes]:
    """The pending axes that the target has in one dim, and those over which it is whole."""
    cut = [tuple(axis for axis in entry_axes(entry) if axis in pending) for entry in target.partition]
    reduced = tuple(axis for axis in pending if axis in target.partition.reduced)
    whole = tuple(axis for axis in pending if axis not in target.partition.axes and axis not in reduced)
    return (axes for axes in (*cut, reduced, whole) if axes)


def _reblocks(
    spec: TensorSpec, target: TensorSpec, anywhere: bool, worth: Callable[[TensorSpec], bool]
) -> Iterator[tuple[Call, TensorSpec]]:
    """All dims at once to how the target has them, as far as axes are not pending.

    Axes over which the target is reduced go, or they stay, for a gather whose gradient is scattered. ``anywhere``: to
    every other placement, too.
    """
    now = [entry_axes(entry) for entry in spec.partition]
    held, reduced = spec.partition.unreduced | spec.partition.reduced, target.partition.reduced
    goal = [tuple(axis for axis in entry_axes(entry) if axis not in held) for entry in target.partition]
    stay = [(*axes, *(axis for axis in entry if axis in reduced)) for axes, entry in zip(goal, now, strict=True)]
    # in order: every rank must take the same of equal routes
    goals = dict.fromkeys(_moved(spec, dict(enumerate(axes))) for axes in (goal, stay))
    if anywhere:
        goals |= _placements(spec.with_partition(P(unreduced=spec.partition.unreduced, reduced=spec.partition.reduced)))
    for after in goals:
        if after is spec or not worth(after):
            continue
        uneven = not (spec.even and after.even)  # a gather of such waits for the longest block
        if (anywhere and uneven) or not _is_native(spec, now, after):
            yield reblock(spec, after)


_MANY = 500  # placements, of which only those are looked at that lead towards the target


@functools.lru_cache(maxsize=64)
def _placements(spec: TensorSpec) -> dict[TensorSpec, None]:
    """Every way to cut the dims of a whole tensor over axes that are free, in every order, unless they are too many."""
    axes, ndim = _free(spec), spec.ndim
    found: dict[TensorSpec, None] = {}
    few = sum(perm(len(axes), n) * comb(n + max(ndim, 1) - 1, n) for n in range(len(axes) + 1)) <= _MANY
    for order in itertools.permutations(axes) if few else ():
        for places in itertools.product([*range(ndim), None], repeat=len(order)):
            cuts = (tuple(a for a, p in zip(order, places, strict=True) if p == dim) for dim in range(ndim))
            found[_moved(spec, dict(enumerate(cuts)))] = None
    return found


def reblock(spec: TensorSpec, after: TensorSpec) -> tuple[Call, TensorSpec]:
    """From any placement to any other, and where it leads."""
    move = Reblock(spec, after)
    return call("reblock", spec.mesh, move.axes, Options(move=move)), after


def _is_native(spec: TensorSpec, now: list[Axes], after: TensorSpec) -> bool:
    """Whether a change is one gather or one slice."""
    wanted = after.partition.entries
    changed = [dim for dim, entry in enumerate(spec.partition.entries) if entry != wanted[dim]]
    if len(changed) > 1:
        return False
    (dim,) = changed
    few, many = sorted((now[dim], entry_axes(wanted[dim])), key=len)
    return many[: len(few)] == few and _can_part(spec, dim, few, many[len(few) :])
