"""What a layout or a way does over each mesh axis, and which axes may stand for each other."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fspmd.entries import axes_within, entry_axes, entry_of
from fspmd.meshes.mesh import Mesh
from fspmd.redistribution.cost import Topology
from fspmd.spec import P, TensorSpec


def over_axes(specs: Sequence[TensorSpec], casts: Sequence[Collection[str]]) -> tuple[Any, ...]:
    """For each axis where it stands in the specs, and in which casts."""
    rows = [_places(spec) for spec in specs]
    rows += [tuple([axis in one for axis in specs[0].mesh.axis_names]) for one in casts]
    return tuple(zip(*rows, strict=True))


@functools.lru_cache(maxsize=1 << 14)
def _places(spec: TensorSpec) -> tuple[int | str | None, ...]:
    """For each axis the dim that it shards, or whether it has pending sums."""
    partition = spec.partition
    found: dict[str, int | str] = {axis: d for d, entry in enumerate(partition) for axis in axes_within(entry)}
    found |= dict.fromkeys(partition.unreduced, "U") | dict.fromkeys(partition.reduced, "R")
    return tuple(map(found.get, spec.mesh.axis_names))


@functools.lru_cache(maxsize=64)
def alike(mesh: Mesh, topology: Topology) -> tuple[dict[str, str], ...]:
    """The axes under other names, by which no size and no link differs; first under their own."""
    axes = mesh.axis_names
    groups = [group for n in range(1, len(axes) + 1) for group in itertools.combinations(axes, n)]

    def links(names: Mapping[str, str]) -> list[Any]:
        named = [mesh.ordered({names[axis] for axis in group}) for group in groups]
        return [(mesh.axis_size(group), topology.link(mesh, group)) for group in named]

    every = [dict(zip(axes, names, strict=True)) for names in itertools.permutations(axes)]
    return tuple(names for names in every if links(names) == links(every[0]))


@functools.lru_cache(maxsize=1 << 14)
def _renaming(spec: TensorSpec, names: tuple[tuple[str, str], ...]) -> TensorSpec:
    named, partition = dict(names), spec.partition
    entries = [entry_of(tuple([named[axis] for axis in entry_axes(entry)])) for entry in partition]
    pending, reduced = (frozenset([named[a] for a in axes]) for axes in (partition.unreduced, partition.reduced))
    return spec.with_partition(P(*entries, unreduced=pending, reduced=reduced))


def renamed(spec: TensorSpec, names: Mapping[str, str]) -> TensorSpec:
    """A layout over other axes."""
    return spec if spec.flat else _renaming(spec, tuple(names.items()))
