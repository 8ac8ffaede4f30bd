"""How an operand of a call comes to lie as it must: collectives, casts, and what both cost in backward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from fspmd.pairs import Call, call
from fspmd.redistribution.cost import Topology, price
from fspmd.redistribution.routes import Step, back, route
from fspmd.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Moves:
    """The collectives of one operand, and the casts after them where it will have a gradient; µs of each."""

    calls: tuple[Call, ...]
    casts: tuple[Call, ...]
    forward: float
    backward: float  # of the transposed collectives
    casting: float  # of the sums of gradients that a cast brings


@functools.lru_cache(maxsize=8192)
def moves(spec: TensorSpec, need: TensorSpec, axes: tuple[str, ...], topology: Topology) -> Moves:
    """From one layout to another, then cast to varying over axes."""
    if spec is need and not axes:
        return _STILL
    way = route(spec, need, topology)
    calls, gathered = _scattering_backward([step.call for step in way.steps], axes)
    after = casts(need, axes, gathered)
    backward, casting, before = 0.0, 0.0, spec
    for step, one in zip(way.steps, calls, strict=True):
        time = back(Step(one, step.spec, step.price), before, topology).time
        if one is step.call:
            backward += time
        else:
            casting += time
        before = step.spec
    size = prod(need.block_shape) * need.dtype.itemsize
    casting += sum(price(one.transposed.pair.kernel, one.mesh, one.axes, size, size, topology).time for one in after)
    return Moves(calls, after, way.price.time, backward, casting)


_STILL: Final = Moves((), (), 0.0, 0.0, 0.0)


def _scattering_backward(steps: Sequence[Call], casts: tuple[str, ...]) -> tuple[tuple[Call, ...], frozenset[str]]:
    """Gathers of what is then cast to varying: to reduced, so backward is a reduce-scatter and not twice as much."""
    found, axes = list(steps), set[str]()
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
