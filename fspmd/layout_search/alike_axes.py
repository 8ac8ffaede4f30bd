"""Mesh axes that may replace each other: their sizes and links are equal."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

from fspmd.entries import entry_of
from fspmd.meshes.mesh import Mesh
from fspmd.redistribution.cost import Topology
from fspmd.spec import P, TensorSpec


@functools.lru_cache(maxsize=64)
def alike(mesh: Mesh, topology: Topology) -> tuple[dict[str, str], ...]:
    """The renamings of axes under which all sizes and links stay the same. The first is the identity."""
    axes = mesh.axis_names
    groups = [group for n in range(1, len(axes) + 1) for group in itertools.combinations(axes, n)]

    def links(names: Mapping[str, str]) -> list[Any]:
        named = [mesh.ordered({names[axis] for axis in group}) for group in groups]
        return [(mesh.axis_size(group), topology.link(mesh, group)) for group in named]

    renamings = [dict(zip(axes, names, strict=True)) for names in itertools.permutations(axes)]
    return tuple(names for names in renamings if links(names) == links(renamings[0]))


@functools.lru_cache(maxsize=1 << 14)
def _renaming(spec: TensorSpec, names: tuple[tuple[str, str], ...]) -> TensorSpec:
    named, partition = dict(names), spec.partition
    entries = [entry_of(tuple([named[axis] for axis in axes])) for axes in partition.dim_axes]
    pending, reduced = (frozenset([named[a] for a in axes]) for axes in (partition.unreduced, partition.reduced))
    return spec.with_partition(P(*entries, unreduced=pending, reduced=reduced))


def renamed(spec: TensorSpec, names: Mapping[str, str]) -> TensorSpec:
    """A layout with other names of axes. ``names``: new names by old names."""
    return spec if spec.flat else _renaming(spec, tuple(names.items()))
