"""Choices that may replace each other: layers that repeat, and mesh axes with equal sizes and links.

Layers repeat where ops are equal, on values with equal relations, period after period.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fspmd.cache import cached
from fspmd.entries import entry_of
from fspmd.layout_search.op_graph import OpGraph
from fspmd.meshes.mesh import Mesh
from fspmd.redistribution.cost import Topology
from fspmd.spec import P, TensorSpec


@cached(maxsize=64)
def alike(mesh: Mesh, topology: Topology) -> tuple[dict[str, str], ...]:
    """The renamings of axes under which all sizes and links stay the same. The first is the identity."""
    axes = mesh.axis_names
    groups = [group for n in range(1, len(axes) + 1) for group in itertools.combinations(axes, n)]

    def links(names: Mapping[str, str]) -> list[Any]:
        named = [mesh.ordered({names[axis] for axis in group}) for group in groups]
        return [(mesh.axis_size(group), topology.link(mesh, group)) for group in named]

    renamings = [dict(zip(axes, names, strict=True)) for names in itertools.permutations(axes)]
    return tuple(names for names in renamings if links(names) == links(renamings[0]))


@cached(maxsize=1 << 14)
def _renaming(spec: TensorSpec, names: tuple[tuple[str, str], ...]) -> TensorSpec:
    named, partition = dict(names), spec.partition
    entries = [entry_of(tuple([named[axis] for axis in axes])) for axes in partition.dim_axes]
    pending, reduced = (frozenset([named[a] for a in axes]) for axes in (partition.unreduced, partition.reduced))
    return spec.with_partition(P(*entries, unreduced=pending, reduced=reduced))


def renamed(spec: TensorSpec, names: Mapping[str, str]) -> TensorSpec:
    """A layout with other names of axes. ``names``: new names by old names."""
    return spec if spec.flat else _renaming(spec, tuple(names.items()))


@dataclass(frozen=True, slots=True)
class Ties:
    """Repeated ops and values, each with the first op or value that it repeats."""

    ops: dict[int, int] = field(default_factory=dict)
    values: dict[int, int] = field(default_factory=dict)


def ties(graph: OpGraph, fixed: Mapping[int, P]) -> Ties:
    """The ties of the longest run of periods; empty if nothing repeats. ``fixed``: given layouts by value."""
    start, period, length = _longest(_signatures(graph, fixed))
    tied = Ties()
    for i in range(start + period, start + length):
        first = start + (i - start) % period
        tied.ops[i] = first
        op, earlier = graph.ops[i], graph.ops[first]
        tied.values.update(zip(op.results, earlier.results, strict=True))
        pairs = zip(op.operands, earlier.operands, strict=True)
        tied.values.update((n, m) for n, m in pairs if n != m and n in graph.leaves and m in graph.leaves)
    return tied


def _signatures(graph: OpGraph, fixed: Mapping[int, P]) -> list[Any]:
    """For each op a signature: its function, and the last uses of its operands, counted back from the op."""
    seen: dict[int, tuple[int, int]] = {}
    leaves = set(graph.leaves)
    signatures = []
    for i, op in enumerate(graph.ops):
        rows: list[Any] = []
        for k, n in enumerate(op.operands):
            if n in seen:
                at, place = seen[n]
                rows.append((i - at, place, fixed.get(n)))
            else:
                rows.append((graph.values[n], n in leaves, n in graph.followed, fixed.get(n)))
            seen[n] = i, k
        seen |= {n: (i, -1 - k) for k, n in enumerate(op.results)}
        signatures.append((op.name, id(op.question), op.followed, op.trips, op.pinned, tuple(rows)))
    return signatures


def _longest(signatures: list[Any]) -> tuple[int, int, int]:
    """The start, the period and the length of the longest run of complete periods.

    Of runs of equal length, the run with the shortest period.
    """
    numbers: dict[Any, int] = {}
    row = [numbers.setdefault(signature, len(numbers)) for signature in signatures]
    best = (0, 1, 1)
    for period in range(1, len(row) // 2 + 1):
        run = 0
        for i in range(len(row) - period + 1):
            if i < len(row) - period and row[i] == row[i + period]:
                run += 1
                continue
            length = (run // period + 1) * period
            if run >= period and length > best[2]:
                best = (i - run, period, length)
            run = 0
    return best
