"""The collectives of a record, as ranks compare them before its first replay."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from fspmd.inspection.histories import DTYPES, History, facts_of
from fspmd.inspection.lines import line_of
from fspmd.programs.program import Program, Value


def histories(program: Program) -> list[History]:
    """For each group of processes the collectives of a program, forward and backward."""
    found: dict[str, History] = {}
    for nodes, is_backward in ((program.steps, False), (program.deferred, True)):
        _add(found, nodes, is_backward)
    return list(found.values())


def _add(found: dict[str, History], nodes: Iterable[fx.Node], is_backward: bool) -> None:
    for node in nodes:
        call = node.meta.get("call")
        if call is None:
            continue
        number, key, is_even = facts_of(call)
        if not number:
            continue
        history = found.get(key)
        if history is None:
            ranks = tuple(sorted(call.mesh.group_ranks(call.axes or call.mesh.axis_names)))
            history = found[key] = History(key, ranks)
        operand: Value = node.args[0].meta["value"]  # type: ignore[union-attr]
        line, dtype, shape = line_of(node.meta["cause"].where), operand.dtype, tuple(operand.shape)
        kind = number, line.number, shape if is_even else 0, DTYPES[dtype], is_backward
        history.hash = hash((history.hash, *kind))
        history.count += 1
        history.ring.append((history.count, history.hash, call, line, dtype, shape, 0.0))
