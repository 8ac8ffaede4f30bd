"""Routes by a search that looks at few layouts. Many axes allow too many layouts: n axes cut a dim in n! orders.

On few axes the search of `routes` starts from this route.

Steps that move nothing are taken at once between two collectives: slices as in the target, and casts. Sums are settled
over runs of the pending axes, in the order of the target: on every rank, or scattered, to the dim of the target or to
one other dim. Everything else moves straight to its place in the target.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from math import inf
from typing import Final

from fspmd.entries import Axes
from fspmd.meshes.mesh import Mesh
from fspmd.pairs import Call, call
from fspmd.redistribution.bounds import bound
from fspmd.redistribution.cost import Topology
from fspmd.redistribution.edges import (
    Step,
    can_part,
    exchanges,
    free_axes,
    gathers,
    is_cut_evenly,
    moved,
    priced,
    reblocks,
    scatter,
    sizes_over,
    sums,
)
from fspmd.spec import TensorSpec
from fspmd.transport import Options

#: the most axes of more than one rank for which `routes` looks at all orders
MOST: Final = 3
_PATIENCE: Final = 60  # collectives that are priced before the search turns greedy
_HASTE: Final = 1.5  # the weight of the bound on the time ahead


def are_many(mesh: Mesh) -> bool:
    """Return whether a mesh has too many axes to look at all their orders."""
    return sum(n > 1 for n in mesh.shape.values()) > MOST


def straight(source: TensorSpec, target: TensorSpec, topology: Topology) -> tuple[tuple[Step, ...], int]:
    """Return the steps from one layout to another, and how many collectives were looked at.

    The search is a weighted A*. After ``_PATIENCE`` collectives it goes on from the most promising layout alone.
    """
    order, looked, done = itertools.count(), 0, set[TensorSpec]()
    queue: list[tuple[float, float, int, int, int, TensorSpec, tuple[Step, ...]]] = []

    def push(time: float, peak: int, before: TensorSpec, steps: tuple[Step, ...]) -> None:
        free = _free_steps(before, target, topology)
        steps, spec = (*steps, *free), free[-1].spec if free else before
        if spec not in done:
            time = round(time + sum(step.price.time for step in free), 9)
            estimate = _HASTE * bound(target, topology)(spec)
            heapq.heappush(queue, (time + estimate, time, peak, len(steps), next(order), spec, steps))

    push(0.0, 0, source, ())
    while True:
        _, time, peak, _, _, spec, steps = heapq.heappop(queue)
        if spec is target:
            return steps, looked
        if spec in done:
            continue
        done.add(spec)
        if looked > _PATIENCE:  # each collective leads on, so this ends
            done.clear()
            queue.clear()
        for move, after in leaving(spec, target):
            looked += 1
            step = priced(move, spec, after, topology)
            push(time + step.price.time, max(peak, step.price.peak), after, (*steps, step))


def leaving(spec: TensorSpec, target: TensorSpec) -> Iterator[tuple[Call, TensorSpec]]:
    """Yield the collectives that lead from ``spec`` straight towards ``target``."""
    pending = _pending(spec, target)
    for i, j in itertools.combinations(range(len(pending) + 1), 2):
        run = pending[i:j]
        yield from sums(spec, target, spec.mesh.ordered(frozenset(run)))
        for dim in _for_parts(spec, target, run):
            now = spec.partition.dim_axes[dim]
            options = Options(dim=dim, sizes=sizes_over(spec, dim, now, run))
            yield scatter(spec, dim, now, run, options)
    if not pending:
        yield from gathers(spec, target, True)
        yield from exchanges(spec, target, False, True)
        yield from reblocks(spec, target, False)


def _pending(spec: TensorSpec, target: TensorSpec) -> Axes:
    """Return the axes whose sums must be settled.

    Axes that cut a dim of the target come first, in its order; then those over which it is reduced; then the others.
    """
    want, ends = target.partition, spec.partition.unreduced - target.partition.unreduced
    if not ends:
        return ()
    cut = [axis for axes in want.dim_axes for axis in axes]
    rest = [axis for axis in spec.mesh.axis_names if axis not in cut]
    return tuple(axis for axis in (*cut, *sorted(rest, key=lambda axis: axis not in want.reduced)) if axis in ends)


def _for_parts(spec: TensorSpec, target: TensorSpec, run: Axes) -> Iterator[int]:
    """Yield the dims to which sums over ``run`` may be scattered: as in the target, and one other, in equal parts."""
    other, least = None, (inf, 0.0)
    for dim, (now, then) in enumerate(zip(spec.partition.dim_axes, target.partition.dim_axes, strict=True)):
        if not can_part(spec, dim, now, run):
            continue
        if run == tuple(axis for axis in then if axis in run):
            yield dim
        elif is_cut_evenly(spec, dim, (*now, *run)):
            rank = len(now) + len(then), -spec.block_shape[dim]
            other, least = (dim, rank) if rank < least else (other, least)
    if other is not None:
        yield other


def _free_steps(spec: TensorSpec, target: TensorSpec, topology: Topology) -> tuple[Step, ...]:
    """Return the steps towards the target that move nothing."""
    steps: list[Step] = []
    mesh, want = spec.mesh, target.partition

    def take(name: str, axes: Axes, after: TensorSpec, options: Options = Options()) -> None:  # noqa: B008
        nonlocal spec
        steps.append(priced(call(name, mesh, axes, options), spec, after, topology))
        spec = after

    have = spec.partition
    if axes := mesh.ordered(have.reduced - want.reduced):
        take("reduced_to_invariant", axes, moved(spec, {}, None, have.reduced & want.reduced))
    free = frozenset(free_axes(spec))
    if not free:
        return tuple(steps)
    for dim, (now, then) in enumerate(zip(have.dim_axes, want.dim_axes, strict=True)):
        if len(then) == len(now) or then[: len(now)] != now:
            continue
        new = tuple(itertools.takewhile(free.__contains__, then[len(now) :]))
        if new and can_part(spec, dim, now, new):
            options = Options(dim=dim, sizes=sizes_over(spec, dim, now, new))
            take("slice", new, moved(spec, {dim: (*now, *new)}), options)
    have = spec.partition
    if axes := mesh.ordered(free & want.reduced):
        take("invariant_to_reduced", axes, moved(spec, {}, None, have.reduced.union(axes)))
    if axes := mesh.ordered(free & want.unreduced):
        take("invariant_to_unreduced", axes, moved(spec, {}, have.unreduced.union(axes)))
    return tuple(steps)
