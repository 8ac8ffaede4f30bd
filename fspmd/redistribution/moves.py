"""How an operand of a call comes to lie as it must: collectives, casts, and what both cost, in backward too."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from fspmd.pairs import Call, call
from fspmd.redistribution.cost import Topology, price
from fspmd.redistribution.cost import moves as is_moving
from fspmd.redistribution.routes import Route, route
from fspmd.redistribution.steps import Step, back
from fspmd.redistribution.straight import are_many
from fspmd.spec import P, TensorSpec


class Leg(NamedTuple):
    """Calls that lead a block from one layout to another; ``own``: that of a Sharded, of which fspmd knows all uses."""

    source: TensorSpec
    reached: TensorSpec
    calls: tuple[Call, ...]
    communicates: bool
    own: bool = True


class Moves(NamedTuple):
    """The collectives of one operand, and the casts after them; what they take in µs, in backward where one follows."""

    route: Route
    calls: tuple[Call, ...]
    casts: tuple[Call, ...]
    forward: float
    backward: float = 0.0  # of the transposed collectives
    casting: float = 0.0  # of the sums of gradients that a cast brings

    @property
    def time(self) -> float:
        """µs of all, there and back."""
        return self.forward + self.backward + self.casting

    @property
    def leg(self) -> Leg:
        """The collectives, without the casts."""
        lies = self.route.target.partition
        gathered = {axis for one in self.calls if one.pair.name == "all_gather_reduced" for axis in one.axes}
        reached = P(*lies, unreduced=lies.unreduced, reduced=lies.reduced | gathered)
        moving = [one for one in self.calls if is_moving(one.pair.kernel)]
        communicates = any(prod(one.mesh.shape[axis] for axis in one.axes) > 1 for one in moving)
        return Leg(self.route.source, self.route.target.with_partition(reached), self.calls, communicates)


@functools.lru_cache(maxsize=8192)
def moves(
    spec: TensorSpec,
    need: TensorSpec,
    axes: tuple[str, ...],
    topology: Topology,
    followed: bool = False,
    directly: bool = False,
) -> Moves:
    """From one layout to another, then cast to varying over axes.

    By the quickest route; ``followed`` by a gradient by that or the direct one (`route`), whichever is quicker there
    and back; ``directly`` by that in any case.
    """
    found = _along(route(spec, need, topology, directly), axes, topology, followed)
    if not followed or directly or spec is need or spec.mesh != need.mesh or are_many(spec.mesh):
        return found
    direct = moves(spec, need, axes, topology, followed, True)
    return direct if direct.time < found.time * (1 - 1e-9) else found


def _along(way: Route, axes: tuple[str, ...], topology: Topology, followed: bool) -> Moves:
    steps, need = way.steps, way.target
    calls, gathered = _scattering_backward([step.call for step in steps], axes)
    cast = casts(need, axes, gathered) if axes else ()
    forward = sum([step.price.time for step in steps])
    if not followed:
        return Moves(way, calls, cast, forward)
    backward, casting, before = 0.0, 0.0, way.source
    for step, one in zip(steps, calls, strict=True):
        time = back(Step(one, step.spec, step.price), before, topology).time
        if one is step.call:
            backward += time
        else:
            casting += time
        before = step.spec
    size = prod(need.block_shape) * need.dtype.itemsize
    after = [one.transposed for one in cast]
    casting += sum(price(one.pair.kernel, one.mesh, one.axes, size, size, topology).time for one in after)
    return Moves(way, calls, cast, forward, backward, casting)


def _scattering_backward(steps: Sequence[Call], casts: tuple[str, ...]) -> tuple[tuple[Call, ...], frozenset[str]]:
    """Gathers of what is then cast to varying: to reduced, so backward is a reduce-scatter and not twice as much."""
    found, axes = list(steps), set[str]()
    if not casts:
        return tuple(found), frozenset()
    for i, step in reversed(list(enumerate(steps))):
        if step.options.dims is not None:
            continue
        if step.pair.name != "all_gather_invariant" or not set(step.axes) <= set(casts):
            break
        found[i] = call("all_gather_reduced", step.mesh, step.axes, step.options)
        axes.update(step.axes)
    return tuple(found), frozenset(axes)


def casts(need: TensorSpec, axes: tuple[str, ...], gathered: frozenset[str] = frozenset()) -> tuple[Call, ...]:
    """To varying, over axes of which some were just ``gathered``, to reduced."""
    reduced = tuple(axis for axis in axes if axis in need.partition.reduced | gathered)
    others = tuple(axis for axis in axes if axis not in reduced)
    rows = [("invariant_to_varying", others)]
    if need.mesh.transport == "simulation":  # elsewhere the blocks are apart, and nothing is left to do, backward too
        rows.insert(0, ("reduced_to_varying", reduced))
    return tuple(call(name, need.mesh, over) for name, over in rows if over)
