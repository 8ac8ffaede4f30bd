"""The collectives of a program, for each group of processes, by which ranks compare records and replays."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import fx

from fspmd.inspection.histories import DTYPES, History, facts_of
from fspmd.inspection.replays import Replayed
from fspmd.meshes.mesh import Mesh
from fspmd.programs.program import Value
from fspmd.user_code import line_of


def histories(*parts: tuple[Iterable[fx.Node], bool]) -> list[History]:
    """For each group of processes the collectives of parts of a program: steps, and whether they are of backward."""
    found: dict[str, History] = {}
    places: Counter[Mesh] = Counter()
    for nodes, is_backward in parts:
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
            places[call.mesh] += 1
            place = places[call.mesh]
            history.advance(hash((number, line.number, shape if is_even else 0, DTYPES[dtype], is_backward, place)))
            history.ring.append((history.count, history.hash, call, line, dtype, shape, place, 0.0))
    return list(found.values())


def replayed_by(name: str, nodes: Iterable[fx.Node], is_backward: bool = False) -> Replayed | None:
    """What a run of steps notes; None if they do not communicate. ``name``: of the program."""
    found = histories((nodes, is_backward))
    return Replayed(f"{'the backward of ' * is_backward}{name}", found) if found else None


def name_of(function: Callable[..., Any]) -> str:
    """``jit(f) of train.py:12``: a recorded function and its line, as errors show them."""
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None)
    where = f" of {Path(code.co_filename).name}:{code.co_firstlineno}" if code else ""
    return f"jit({getattr(inner, '__name__', type(inner).__name__)}){where}"
