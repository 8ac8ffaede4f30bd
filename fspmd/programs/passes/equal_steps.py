"""One step for several that give the same: collectives of equal inputs, and functions of torch."""

from __future__ import annotations

import operator
from collections.abc import Container, Hashable
from typing import Any, Final

import torch
from torch import fx

from fspmd.programs.calls import is_aten, is_collective, replace
from fspmd.programs.facts import is_pure, shard_of
from fspmd.programs.passes.aliases import Memory, is_view
from fspmd.programs.passes.skipped import UNLIKE, leave
from fspmd.programs.program import Program
from fspmd.transport.local_tensor import LocalTensor

_PARTS: Final = (shard_of, operator.getitem, LocalTensor)  # steps that name parts, or put them together
_LITERALS: Final = frozenset({fx.Node, bool, int, str, type(None), torch.dtype, torch.device})


def equal_steps(program: Program) -> int:
    """Let the first of equal steps stand for the others; how many go.

    Steps of forward and of backward stay apart: what `checkpoint` computes again is computed again. Collectives go on
    all ranks or on none: those of steps that are equal because of a number, where it may be the size of a block that is
    another one on other ranks, stay, and all where ranks may have other steps. Where a number may be a place that each
    rank has for itself, steps with numbers stay apart, so that all ranks have the same steps.
    """
    memory: Memory | None = None
    known: dict[Hashable, fx.Node] = {}
    ends = {*program.results, *program.gradients}
    gone = 0
    for node in list(program.graph.nodes):
        key = _key(node) if _may_stand_for_others(node) else None
        if key is None or (program.places and _has_numbers(node)):
            continue
        first = known.setdefault(key, node)
        if first is node:
            continue
        memory = memory or Memory(program)
        by_size = any(x.meta.get("by_size") for x in node.all_input_nodes)
        if why := _apart(program, node, by_size) or _in_memory(memory, ends, first, node):
            known[key] = node
            if is_collective(node):
                leave(node, "equal_steps", why, first)
            continue
        memory.merge(node, first)
        replace(node, first)
        if by_size or (not program.even and _has_numbers(first)):
            first.meta["by_size"] = True
        gone += 1
    return gone


def _apart(program: Program, node: fx.Node, by_size: bool) -> str:
    """Why a collective may not go, for other ranks might keep theirs."""
    if not is_collective(node):
        return ""
    if not program.alike:
        return f"{UNLIKE}; it is equal to"
    return "its operand may differ on other ranks, by the size of a block; here it is equal to" if by_size else ""


def _in_memory(memory: Memory, ends: Container[fx.Node | None], first: fx.Node, node: fx.Node) -> str:
    """Why one of two equal steps may not stand for the other: who writes where."""
    if _is_changed(memory, first, node):
        return "its operand may be written into after"
    if node in ends or not memory.may_be(node, first):
        return "it needs memory of its own, but is equal to"
    return ""


def _may_stand_for_others(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if is_collective(node):
        return bool(node.meta["waits"])
    return node.target in _PARTS or (is_aten(node) and is_pure(node.target))


def _is_changed(memory: Memory, first: fx.Node, node: fx.Node) -> bool:
    """Whether what both are made of may be written into between them; a view sees that."""
    if is_view(node) and is_view(first):
        return False
    return any(memory.is_written(x, first, node) for x in node.all_input_nodes)


def _key(node: fx.Node) -> Hashable | None:
    target: Any = node.meta.get("call", node.target)
    key = target, _frozen(node.args), _frozen(node.kwargs), node.meta["deferred"], node.meta["backward"]
    try:
        hash(key)
    except TypeError:  # an argument that is no literal
        return None
    return key


def _has_numbers(node: fx.Node) -> bool:
    """Whether an argument of a step may be the size of a block."""
    literals: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), literals.append)
    return node.target not in _PARTS and any(type(one) in (int, float) for one in literals)


def _frozen(value: Any) -> Any:
    """An argument by value; numbers with their types, and zeros with their signs."""
    if type(value) in _LITERALS:
        return type(value), value
    if isinstance(value, (list, tuple)):
        return type(value).__name__, *map(_frozen, value)
    if isinstance(value, dict):
        return tuple((name, _frozen(one)) for name, one in value.items())
    if isinstance(value, slice):
        return slice, _frozen(value.start), _frozen(value.stop), _frozen(value.step)
    return (type(value), repr(value)) if isinstance(value, (float, complex)) else (type(value), value)
