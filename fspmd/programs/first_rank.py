"""The program of the first rank, made of a program that runs for all simulated ranks.

Where blocks differ in shape, a simulation has separate steps for each rank: `shard_of` gives the block of a rank, and
`LocalTensor` joins blocks. A process has the steps for its own block alone. A lowered program shows these.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from fspmd.programs.program import Program, rebuilt, remember
from fspmd.programs.steps import CASTS, JOINED, shard_of
from fspmd.transport.local_int import SYMBOLS, LocalInt


def of_first_rank(program: Program) -> Program:
    """The program without the steps of other ranks, as a process records it; the same program if it has none."""
    if not any(map(_is_simulated, program.graph.nodes)):
        return program
    others = _steps_of_other_ranks(program)
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        if node in others or node.op == "output":
            continue
        if (block := _block(node)) is not None:
            made = known[node] = known[block]
            if "spec" in node.meta:
                made.meta.setdefault("spec", node.meta["spec"])
            made.meta["frame"] = made.meta.get("frame") or node.meta.get("frame")  # passes read it
            continue
        args, kwargs = (_numbers(fx.map_arg(given, known.__getitem__)) for given in (node.args, node.kwargs))
        made = known[node] = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        remember(made, node, known)
    return rebuilt(program, graph, known)


def _is_simulated(node: fx.Node) -> bool:
    call = node.meta.get("call")
    return bool(node.meta.get("frame")) or (call is not None and call.mesh.transport == "simulation")


def _block(node: fx.Node) -> Any:
    """The first rank's value for a step that splits or joins blocks, or casts them; None for other steps."""
    if node.target is JOINED:
        return node.args[0][0]  # type: ignore[index]
    call = node.meta.get("call")
    is_cast = call and call.pair.kernel in CASTS and node.meta["waits"]  # a cast that does not wait has a wait step
    return node.args[0] if node.target is shard_of or is_cast else None


def _numbers(args: Any) -> Any:
    """Arguments in which the first rank's numbers replace numbers that differ from rank to rank."""

    def number(arg: Any) -> Any:
        local = arg.node if type(arg) in SYMBOLS else None
        return local.values[0] if type(local) is LocalInt else arg

    return map_aggregate(args, number)


def _steps_of_other_ranks(program: Program) -> set[fx.Node]:
    """Steps that use or serve only values of other ranks; and idle steps."""
    steps = [*program.steps, *program.deferred]
    others: set[fx.Node] = set()
    per_rank: set[fx.Node] = set()  # steps that a simulation has separately for each rank
    for node in steps:
        used = [_block(node)] if node.target is JOINED else node.all_input_nodes
        if not others.isdisjoint(used) or (node.target is shard_of and node.args[1] != 0):
            others.add(node)
        if node.target is shard_of or (node.target is not JOINED and not per_rank.isdisjoint(used)):
            per_rank.add(node)
    for node in reversed(steps):
        if node.users and all(user in others or _block(user) not in (None, node) for user in node.users):
            others.add(node)
    return others | _idle(steps, others, per_rank)


def _idle(steps: list[fx.Node], others: set[fx.Node], per_rank: set[fx.Node]) -> set[fx.Node]:
    """Steps of the first rank at the end of a repetition that goes on for other ranks; a process stops before them."""
    idle: set[fx.Node] = set()
    is_end = True  # whether no later step of this repetition belongs to the first rank
    for node in reversed(steps):
        if "repeats" not in node.meta:
            is_end = True
        elif node not in others:
            is_end = is_end and node in per_rank and node.users.keys() <= others | idle
            if is_end:
                idle.add(node)
    return idle
