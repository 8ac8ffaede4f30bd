"""The collectives and casts that lay an operand out for a call, and their price, backward included."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from fspmd.cache import cached
from fspmd.pairs import Call, call
from fspmd.redistribution.cost import Topology, price
from fspmd.redistribution.cost import moves as is_moving
from fspmd.redistribution.edges import Step, back
from fspmd.redistribution.routes import Route, route
from fspmd.redistribution.straight import are_many
from fspmd.spec import TensorSpec


class Leg(NamedTuple):
    """Calls that lead a block from one layout to another. ``own``: the block of a Sharded; fspmd knows all its uses."""

    source: TensorSpec
    reached: TensorSpec
    calls: tuple[Call, ...]
    communicates: bool
    own: bool = True


class Moves(NamedTuple):
    """The collectives of one operand, the casts after them, and their times in µs. Backward counts if it follows."""

    route: Route
    calls: tuple[Call, ...]
    casts: tuple[Call, ...]
    forward: float
    backward: float = 0.0  # of the transposed collectives
    casting: float = 0.0  # of the sums of gradients that casts bring

    @property
    def time(self) -> float:
        """The µs of all, forward and backward."""
        return self.forward + self.backward + self.casting

    @property
    def leg(self) -> Leg:
        """The collectives, without the casts."""
        partition = self.route.target.partition
        gathered = {axis for step in self.calls if step.pair.name == "all_gather_reduced" for axis in step.axes}
        reached = partition.with_entries(partition, reduced=partition.reduced | gathered)
        moving = [step for step in self.calls if is_moving(step.pair.kernel)]
        communicates = any(prod(step.mesh.shape[axis] for axis in step.axes) > 1 for step in moving)
        return Leg(self.route.source, self.route.target.with_partition(reached), self.calls, communicates)


@cached(maxsize=8192)
def moves(
    spec: TensorSpec,
    need: TensorSpec,
    axes: tuple[str, ...],
    topology: Topology,
    followed: bool = False,
    directly: bool = False,
) -> Moves:
    """Return the moves from one layout to another, then cast to varying over ``axes``.

    They follow the quickest route. If a gradient follows (``followed``), they follow the route that is quicker forward
    and backward together: that one or the direct one (`route`). ``directly`` asks for the direct one.
    """
    quickest = _along(route(spec, need, topology, directly), axes, topology, followed)
    if not followed or directly or spec is need or spec.mesh != need.mesh or are_many(spec.mesh):
        return quickest
    direct = moves(spec, need, axes, topology, followed, True)
    return direct if direct.time < quickest.time * (1 - 1e-9) else quickest


def _along(route: Route, axes: tuple[str, ...], topology: Topology, followed: bool) -> Moves:
    """Return the moves along a route, with their times."""
    steps, need = route.steps, route.target
    calls, gathered = _scattering_backward([step.call for step in steps], axes)
    cast = casts(need, axes, gathered) if axes else ()
    forward = sum([step.price.time for step in steps])
    if not followed:
        return Moves(route, calls, cast, forward)
    backward, casting, before = 0.0, 0.0, route.source
    for step, made in zip(steps, calls, strict=True):
        time = back(Step(made, step.spec, step.price), before, topology).time
        if made is step.call:
            backward += time
        else:
            casting += time
        before = step.spec
    size = prod(need.block_shape) * need.dtype.itemsize
    sums = [step.transposed for step in cast]
    casting += sum(price(step.pair.kernel, step.mesh, step.axes, size, size, topology).time for step in sums)
    return Moves(route, calls, cast, forward, backward, casting)


def _scattering_backward(steps: Sequence[Call], casts: tuple[str, ...]) -> tuple[tuple[Call, ...], frozenset[str]]:
    """Gather to reduced where a cast to varying follows: backward is then a reduce-scatter, half of an all-reduce.

    Returns the calls, and the axes that they gather to reduced.
    """
    calls, axes = list(steps), set[str]()
    if not casts:
        return tuple(calls), frozenset()
    for i, step in reversed(list(enumerate(steps))):
        if step.options.dims is not None:
            continue
        if step.pair.name != "all_gather_invariant" or not set(step.axes) <= set(casts):
            break
        calls[i] = call("all_gather_reduced", step.mesh, step.axes, step.options)
        axes.update(step.axes)
    return tuple(calls), frozenset(axes)


def casts(need: TensorSpec, axes: tuple[str, ...], gathered: frozenset[str] = frozenset()) -> tuple[Call, ...]:
    """Return the casts to varying over ``axes``, of which some were just ``gathered`` to reduced."""
    mesh = need.mesh
    reduced = tuple([axis for axis in axes if axis in need.partition.reduced or axis in gathered])
    others = tuple([axis for axis in axes if axis not in reduced])
    if mesh.transport == "simulation":
        rows = [("reduced_to_varying", reduced), ("invariant_to_varying", others)]
    else:  # each rank has its own block: the first cast does nothing, nor does the other where one rank has all
        rows = [("invariant_to_varying", tuple([axis for axis in others if mesh.shape[axis] > 1]))]
    return tuple([call(name, mesh, over) for name, over in rows if over])
