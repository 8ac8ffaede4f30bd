"""What must come before what: of values, of reads and writes of one memory, of steps with effects."""

from __future__ import annotations

from torch import fx

from fspmd.programs.calls import is_wait
from fspmd.programs.passes.aliases import Memory, written
from fspmd.programs.passes.dead_code import has_effect
from fspmd.programs.program import Program


def dependencies(program: Program) -> dict[fx.Node, set[fx.Node]]:
    """For each step those before it that it cannot overtake."""
    memory = Memory(program)
    found: dict[fx.Node, set[fx.Node]] = {}
    writer: dict[fx.Node, fx.Node] = {}  # of each memory the last one
    readers: dict[fx.Node, list[fx.Node]] = {}  # and who has read it since
    effect: fx.Node | None = None
    for node in program.graph.nodes:
        before = set(node.all_input_nodes)
        uses = set(map(memory.of, before))
        if is_wait(node):  # until then the operand is being read
            uses.update(memory.of(x) for begun in node.all_input_nodes for x in begun.all_input_nodes)
        before.update(writer[one] for one in uses if one in writer)
        for one in set(map(memory.of, written(node))):
            before.update(readers.pop(one, ()))
            writer[one] = node
        for one in uses:
            readers.setdefault(one, []).append(node)
        if node.op == "call_function" and has_effect(node):
            if effect is not None:
                before.add(effect)
            effect = node
        before.discard(node)
        found[node] = before
    return found
