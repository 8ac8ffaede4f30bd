"""Layers that repeat: ops that do the same with values that stand to each other alike, period after period."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fspmd.layout_search.op_graph import OpGraph
from fspmd.spec import P


@dataclass(frozen=True, slots=True)
class Ties:
    """Ops and values that are as an earlier one is, each with that one."""

    ops: dict[int, int] = field(default_factory=dict)
    values: dict[int, int] = field(default_factory=dict)


def ties(graph: OpGraph, fixed: Mapping[int, P]) -> Ties:
    """Of the longest run of periods; none where nothing repeats."""
    signs = _signs(graph, fixed)
    start, period, length = _longest(signs)
    found = Ties()
    for i in range(start + period, start + length):
        first = start + (i - start) % period
        found.ops[i] = first
        now, then = graph.ops[i], graph.ops[first]
        found.values.update(zip(now.results, then.results, strict=True))
        pairs = zip(now.operands, then.operands, strict=True)
        found.values.update((n, m) for n, m in pairs if n != m and n in graph.leaves and m in graph.leaves)
    return found


def _signs(graph: OpGraph, fixed: Mapping[int, P]) -> list[Any]:
    """What each op is, and where its operands were last seen, told from it."""
    seen: dict[int, tuple[int, int]] = {}
    leaves = set(graph.leaves)
    found = []
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
        found.append((op.name, id(op.question), op.followed, op.trips, op.pinned, tuple(rows)))
    return found


def _longest(signs: list[Any]) -> tuple[int, int, int]:
    """Where the longest run of whole periods begins, the period, and the length; of equals the shortest period."""
    numbers: dict[Any, int] = {}
    row = [numbers.setdefault(sign, len(numbers)) for sign in signs]
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
