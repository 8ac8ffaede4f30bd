"""How an operand of a call comes to lie as it must: collectives, casts, and what both cost, in backward too."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Final, NamedTuple

from fspmd.pairs import Call, call
from fspmd.redistribution.cost import Topology, price
from fspmd.redistribution.routes import Step, back, route
from fspmd.spec import TensorSpec


class Moves(NamedTuple):
    """The collectives of one operand, and the casts after them where it will have a gradient; µs forward."""

    calls: tuple[Call, ...]
    casts: tuple[Call, ...]
    forward: float


class Later(NamedTuple):
    """µs in backward."""

    backward: float  # of the transposed collectives
    casting: float  # of the sums of gradients that a cast brings


@functools.lru_cache(maxsize=8192)
def moves(
    spec: TensorSpec, need: TensorSpec, axes: tuple[str, ...], topology: Topology, directly: bool = False
) -> Moves:
    """From one layout to another, then cast to varying over axes; ``directly`` as of `route`."""
    if spec is need and not axes:
        return _STILL
    steps = route(spec, need, topology, directly).steps
    calls, gathered = _scattering_backward([step.call for step in steps], axes)
    return Moves(calls, casts(need, axes, gathered) if axes else (), sum([step.price.time for step in steps]))


@functools.lru_cache(maxsize=8192)
def later(
    spec: TensorSpec, need: TensorSpec, axes: tuple[str, ...], topology: Topology, directly: bool = False
) -> Later:
    """What `moves` take in backward."""
    way, before = moves(spec, need, axes, topology, directly), spec
    backward = casting = 0.0
    for step, one in zip(route(spec, need, topology, directly).steps, way.calls, strict=True):
        time = back(Step(one, step.spec, step.price), before, topology).time
        if one is step.call:
            backward += time
        else:
            casting += time
        before = step.spec
    size = prod(need.block_shape) * need.dtype.itemsize
    after = [one.transposed for one in way.casts]
    casting += sum(price(one.pair.kernel, one.mesh, one.axes, size, size, topology).time for one in after)
    return Later(backward, casting)


def there_and_back(
    spec: TensorSpec, need: TensorSpec, axes: tuple[str, ...], topology: Topology, directly: bool = False
) -> float:
    """µs of both."""
    asked = spec, need, axes, topology, directly
    return moves(*asked).forward + sum(later(*asked))


@functools.lru_cache(maxsize=8192)
def goes_directly(spec: TensorSpec, need: TensorSpec, axes: tuple[str, ...], topology: Topology) -> bool:
    """Whether the direct way is the quicker one of what gradients follow: what is quickest forward may not be."""
    direct, searched = (there_and_back(spec, need, axes, topology, one) for one in (True, False))
    return direct < searched * (1 - 1e-9)


_STILL: Final = Moves((), (), 0.0)


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
