"""The passes by name, a function that runs them, and two passes: equal steps run once, unneeded steps go."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable
from functools import partial
from typing import Any, Final

import torch
from torch import fx

from fspmd.errors import ArgumentError
from fspmd.messages import described
from fspmd.programs.passes.chunked import Chunked
from fspmd.programs.passes.coalesce import Coalesce
from fspmd.programs.passes.overlap import Overlap
from fspmd.programs.passes.recompute import Recompute
from fspmd.programs.passes.rewrites import rewrites
from fspmd.programs.program import UNLIKE, Program, leave
from fspmd.programs.steps import (
    PARTS,
    Aliases,
    has_effect,
    is_collective,
    is_view,
    is_wait,
    repeatable,
    replace,
    written,
)

Pass = Callable[[Program], Any]
Passes = Iterable[str | Pass] | None
_LITERALS: Final = frozenset({fx.Node, bool, int, str, type(None), torch.dtype, torch.device})
#: options of new tensors that say what torch does without them; some of its functions write them out, others do not
_DEFAULTS: Final = {"layout": torch.strided, "pin_memory": False}


def equal_steps(program: Program) -> int:
    """Let the first of equal steps replace the others. Returns the number of removed steps.

    A step of forward and a step of backward never replace each other, so `checkpoint` still computes again. Nor do
    collectives before and after a backward: the gradients of microbatches gather parameters anew, since they would
    otherwise be held whole from the first to the last.

    A collective must be removed on all ranks or on none. So a collective stays if its operand equals another one
    because of a number that may be the size of an uneven block. All collectives stay if ranks may have other steps. If
    numbers may be places that differ from rank to rank, all steps with numbers stay, so that all ranks have the same
    steps.
    """
    memory: Aliases | None = None
    known: dict[Hashable, fx.Node] = {}
    ends = {*program.results, *program.gradients}
    removed = phase = 0
    in_backward = False
    shared = dict.fromkeys(repeatable(program.graph.nodes))
    for node in list(program.graph.nodes):
        if node.op == "call_function" and node.meta["backward"] is not in_backward:
            in_backward, phase = not in_backward, phase + 1
        key = _key(node, phase) if node in shared else None
        if key is None or (program.places and _has_numbers(node)):
            continue
        first = known.setdefault(key, node)
        if first is node:
            continue
        memory = memory or Aliases(program)
        by_size = any(x.meta.get("by_size") for x in node.all_input_nodes)
        if why := _why_kept(program, node, by_size) or _in_memory(memory, ends, first, node):
            known[key] = node
            if is_collective(node):
                leave(node, "equal_steps", why, first)
            continue
        memory.merge(node, first)
        replace(node, first)
        if by_size or (not program.even and _has_numbers(first)):
            first.meta["by_size"] = True
        removed += 1
    return removed


def _why_kept(program: Program, node: fx.Node, by_size: bool) -> str:
    """Why a collective must stay, since other ranks might keep it; empty if it may be removed."""
    if not is_collective(node):
        return ""
    if not program.alike:
        return f"{UNLIKE}; it is equal to"
    return "its operand may differ on other ranks, by the size of a block; here it is equal to" if by_size else ""


def _in_memory(memory: Aliases, ends: Container[fx.Node | None], first: fx.Node, node: fx.Node) -> str:
    """Why writes forbid that one of two equal steps replaces the other; empty if they do not."""
    if _is_changed(memory, first, node):
        return "its operand may be written into after"
    if node in ends or not memory.may_be(node, first):
        return "it needs separate memory, but is equal to"
    return ""


def _is_changed(memory: Aliases, first: fx.Node, node: fx.Node) -> bool:
    """Whether a common operand may be written into between two steps. Views show the write in both."""
    if is_view(node) and is_view(first):
        return False
    return any(memory.is_written(x, first, node) for x in node.all_input_nodes)


def _key(node: fx.Node, phase: int) -> Hashable | None:
    """What equal steps have in common. ``phase``: how often forward and backward have taken turns."""
    call = node.meta.get("call")
    target, part = (node.target, node.meta["backward"]) if call is None else (call, phase)
    options = {name: x for name, x in node.kwargs.items() if (name, x) not in _DEFAULTS.items()}
    key = target, _frozen(node.args), _frozen(options), node.meta["deferred"], part
    try:
        hash(key)
    except TypeError:  # an argument without a hash
        return None
    return key


def _has_numbers(node: fx.Node) -> bool:
    """Whether an argument of a step may be the size of a block."""
    literals: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), literals.append)
    return node.target not in PARTS and any(type(literal) in (int, float) for literal in literals)


def _frozen(value: Any) -> Any:
    """An argument as part of a key. Numbers are distinguished by type, and zeros by sign."""
    if type(value) in _LITERALS:
        return type(value), value
    if isinstance(value, (list, tuple)):
        return type(value).__name__, *map(_frozen, value)
    if isinstance(value, dict):
        return tuple((name, _frozen(entry)) for name, entry in value.items())
    if isinstance(value, slice):
        return slice, _frozen(value.start), _frozen(value.stop), _frozen(value.step)
    return (type(value), repr(value)) if isinstance(value, (float, complex)) else (type(value), value)


def dead_code(program: Program) -> int:
    """Remove steps whose results are unused, and writes that no step reads. Returns their number.

    Draws of random numbers stay, since later draws depend on them.
    """
    ends = [*program.results, *(g for g in program.gradients if g is not None)]
    wanted = set(ends)
    memory = Aliases(program) if any(map(written, program.graph.nodes)) else None
    read = set() if memory is None else {*memory.outside, *map(memory.of, ends)}
    removed = 0
    for node in reversed(program.graph.nodes):
        if node.op == "get_attr" and not node.users:
            program.constants.pop(node, None)
            program.graph.erase_node(node)
        if node.op != "call_function":
            continue
        is_read = memory is not None and any(memory.of(x) in read for x in written(node))
        is_needed = node in wanted or is_read or has_effect(node)
        is_joint = not is_needed and not program.alike and (is_collective(node) or is_wait(node))
        if is_joint:
            leave(node, "dead_code", f"{UNLIKE}, and may need it")
        if is_needed or is_joint:
            wanted.update(node.all_input_nodes)
            if memory is not None:
                read.update(map(memory.of, node.all_input_nodes))
        else:
            program.graph.erase_node(node)
            removed += 1
    return removed


#: the passes by name, with default options
PASSES: Final[dict[str, Pass]] = {
    "equal_steps": equal_steps,
    "rewrites": rewrites,
    "dead_code": dead_code,
    "chunked": Chunked(),
    "coalesce": Coalesce(),
    "overlap": Overlap(),
    "recompute": Recompute(),
}
#: passes that never make a program slower, and change numbers only by the order of sums
DEFAULT: Final = ("equal_steps", "rewrites", "dead_code")


def passes_of(given: Passes) -> tuple[Pass, ...]:
    """Passes as functions. ``given``: names, passes or both; None for the `DEFAULT` passes."""
    given = DEFAULT if given is None else given
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ArgumentError(f'jit got passes={described(given)}; expected a tuple such as passes=("dead_code",)')
    passes = []
    for entry in given:
        function = PASSES.get(entry) if isinstance(entry, str) else entry
        if isinstance(function, type):
            raise ArgumentError(f"jit got the class {function.__name__} for a pass; write {function.__name__}()")
        if not callable(function):
            raise ArgumentError(
                f"jit got {described(entry)} for a pass; expected one of {', '.join(PASSES)}, or a function"
            )
        passes.append(function)
    return tuple(passes)


def transform(program: Program, passes: Iterable[Pass], tries: bool = True) -> None:
    """Run passes in order.

    ``tries``: whether `Chunked`, and `Coalesce` before an `Overlap`, try their choices together with later passes.
    """
    passes = tuple(passes)
    for i, change in enumerate(passes):
        run, later = change, passes[i + 1 :]
        hides = any(isinstance(after, Overlap) for after in later)
        if tries and (isinstance(change, Chunked) or (isinstance(change, Coalesce) and hides)):
            run = change.before(program, partial(transform, passes=later, tries=False))
        run(program)
