"""Axes that a search over many axes moves together, so that it ends in time: bundles.

Orders of n axes are n! ways to cut a dim. Up to three axes all of them are looked at; beyond that axes with the same
part in a move (pending before, cut into the same dim after, over links of one kind) go together.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Final

from fspmd.entries import entry_axes
from fspmd.meshes.mesh import Mesh
from fspmd.redistribution.cost import Topology
from fspmd.spec import TensorSpec

Axes = tuple[str, ...]
Bundles = tuple[Axes, ...]  # none: each axis goes by itself

#: axes of more than one rank that may each go by itself
MOST: Final = 3


def are_many(mesh: Mesh) -> bool:
    """Whether a mesh has too many axes for each to go by itself."""
    return sum(n > 1 for n in mesh.shape.values()) > MOST


def bundles_of(source: TensorSpec, target: TensorSpec, topology: Topology, most: int = MOST) -> Bundles:
    """The axes of a move in ``most`` bundles at most, those together that have most in common."""
    mesh = source.mesh
    place = {axis: d for d, entry in enumerate(target.partition) for axis in entry_axes(entry)}
    order = [axis for entry in target.partition for axis in entry_axes(entry)]
    axes = (*order, *(axis for axis in mesh.axis_names if axis not in place))
    states = [getattr(spec.partition, state) for spec in (source, target) for state in ("unreduced", "reduced")]

    def link(axis: str) -> Any:
        return topology.link(mesh, (axis,))

    kinds: list[Callable[[str], Any]] = [
        lambda axis: (link(axis), place.get(axis), [axis in state for state in states]),
        lambda axis: (link(axis), axis in place, axis in source.partition.unreduced),
        lambda axis: (link(axis), axis in source.partition.unreduced),
        link,
    ]
    for kind in kinds:
        found: list[tuple[Any, Axes]] = []
        for axis in axes:
            at = next((i for i, (own, _) in enumerate(found) if own == kind(axis)), None)
            if at is None:
                found.append((kind(axis), (axis,)))
            else:
                found[at] = found[at][0], (*found[at][1], axis)
        if len(found) <= most:
            return tuple(bundle for _, bundle in found)
    return (axes,)


def bundled(axes: Axes, bundles: Bundles) -> Bundles:
    """Some axes as far as they go together."""
    if not bundles:
        return tuple((axis,) for axis in axes)
    parts = (tuple(axis for axis in bundle if axis in axes) for bundle in bundles)
    return tuple(part for part in parts if part)


@functools.lru_cache(maxsize=1024)
def orders(bundles: Bundles) -> tuple[Axes, ...]:
    """Every choice of bundles in every order."""
    rows = itertools.chain.from_iterable(itertools.permutations(bundles, n + 1) for n in range(len(bundles)))
    return tuple(tuple(itertools.chain.from_iterable(row)) for row in rows)


def some(bundles: Bundles, any_of_them: bool) -> list[Axes]:
    """All of the bundles, or every choice of them."""
    counts = range(1 if any_of_them else max(1, len(bundles)), len(bundles) + 1)
    rows = itertools.chain.from_iterable(itertools.combinations(bundles, n) for n in counts)
    return [tuple(itertools.chain.from_iterable(row)) for row in rows]
