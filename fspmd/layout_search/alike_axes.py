"""Mesh axes that may stand for each other: by no size and no link they differ."""

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
    entries = [entry_of(tuple([named[axis] for axis in axes])) for axes in partition.dim_axes]
    pending, reduced = (frozenset([named[a] for a in axes]) for axes in (partition.unreduced, partition.reduced))
    return spec.with_partition(P(*entries, unreduced=pending, reduced=reduced))


def renamed(spec: TensorSpec, names: Mapping[str, str]) -> TensorSpec:
    """A layout over other axes."""
    return spec if spec.flat else _renaming(spec, tuple(names.items()))
