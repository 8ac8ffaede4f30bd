"""Steps whose results nothing needs, collectives among them, and writes into memory that nobody reads."""

from __future__ import annotations

from torch import fx

from fspmd.programs.calls import is_collective, is_wait
from fspmd.programs.facts import draws, is_pure
from fspmd.programs.passes.aliases import Memory, written
from fspmd.programs.passes.skipped import UNLIKE, leave
from fspmd.programs.program import Program
from fspmd.torch_internals import OpOverload


def dead_code(program: Program) -> int:
    """Leave them out; how many. Draws of random numbers stay: those that follow depend on them."""
    ends = [*program.results, *(g for g in program.gradients if g is not None)]
    wanted = set(ends)
    memory = Memory(program) if any(map(written, program.graph.nodes)) else None
    read = set() if memory is None else {*memory.outside, *map(memory.of, ends)}
    gone = 0
    for node in reversed(program.graph.nodes):
        if node.op == "get_attr" and not node.users:
            program.constants.pop(node, None)
            program.graph.erase_node(node)
        if node.op != "call_function":
            continue
        is_read = memory is not None and any(memory.of(x) in read for x in written(node))
        is_needed = node in wanted or is_read or has_effect(node)
        is_of_all = not is_needed and not program.alike and _is_of_all(node)
        if is_of_all:
            leave(node, "dead_code", f"{UNLIKE}, and may need it")
        if is_needed or is_of_all:
            wanted.update(node.all_input_nodes)
            if memory is not None:
                read.update(map(memory.of, node.all_input_nodes))
        else:
            program.graph.erase_node(node)
            gone += 1
    return gone


def _is_of_all(node: fx.Node) -> bool:
    """Whether a step is one that other ranks may need, too."""
    return is_collective(node) or is_wait(node)


def has_effect(node: fx.Node) -> bool:
    """Whether a step does more than give its result and write into what it is given."""
    target = node.target
    if not isinstance(target, OpOverload):
        return bool(node.meta.get("effect"))
    schema = target._schema
    checks = not schema.returns and not schema.is_mutable
    return checks or draws(target) or (target.namespace != "aten" and not is_pure(target))
