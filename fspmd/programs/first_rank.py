"""The program of the first rank, of one that runs for all simulated ranks.

What a simulation does to blocks that differ in shape is put down for each rank apart: `shard_of` gives a rank's block,
`LocalTensor` puts blocks together. A process does it to its own block alone, which is what a lowered program tells of.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from fspmd.programs.program import Program, rebuilt, remember
from fspmd.programs.steps import JOINED, NAMES_ALONE, shard_of
from fspmd.transport.local_int import SYMBOLS, LocalInt


def of_first_rank(program: Program) -> Program:
    """The same program without the steps of other ranks, as a process would record it; itself where it is one's."""
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
            made.meta["held"] = made.meta.get("held") or node.meta.get("held")  # by which passes decide
            continue
        args, kwargs = (_numbers(fx.map_arg(given, known.__getitem__)) for given in (node.args, node.kwargs))
        made = known[node] = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        remember(made, node, known)
    return rebuilt(program, graph, known)


def _is_simulated(node: fx.Node) -> bool:
    call = node.meta.get("call")
    return bool(node.meta.get("held")) or (call is not None and call.mesh.transport == "simulation")


def _block(node: fx.Node) -> Any:
    """What the first rank has in the place of a step that takes blocks apart, puts them together, or names them."""
    if node.target is JOINED:
        return node.args[0][0]  # type: ignore[index]
    call = node.meta.get("call")
    names = call and call.pair.kernel in NAMES_ALONE and node.meta["waits"]  # others have a step that waits for them
    return node.args[0] if node.target is shard_of or names else None


def _numbers(args: Any) -> Any:
    """Arguments with what the first rank has in the place of numbers that differ from rank to rank."""

    def one(arg: Any) -> Any:
        local = arg.node if type(arg) in SYMBOLS else None
        return local.values[0] if type(local) is LocalInt else arg

    return map_aggregate(args, one)


def _steps_of_other_ranks(program: Program) -> set[fx.Node]:
    """Steps that use what other ranks alone have, and those whose results they alone use; idle repetitions."""
    steps = [*program.steps, *program.deferred]
    found: set[fx.Node] = set()
    apart: set[fx.Node] = set()  # put down for each rank
    for node in steps:
        used = [_block(node)] if node.target is JOINED else node.all_input_nodes
        if not found.isdisjoint(used) or (node.target is shard_of and node.args[1] != 0):
            found.add(node)
        if node.target is shard_of or (node.target is not JOINED and not apart.isdisjoint(used)):
            apart.add(node)
    for node in reversed(steps):
        if node.users and all(user in found or _block(user) not in (None, node) for user in node.users):
            found.add(node)
    return found | _idle(steps, found, apart)


def _idle(steps: list[fx.Node], others: set[fx.Node], apart: set[fx.Node]) -> set[fx.Node]:
    """What the first rank does at the end of a repetition while others still repeat theirs: alone it stops before."""
    found: set[fx.Node] = set()
    ends = True  # nothing that comes later in this repetition is the first rank's
    for node in reversed(steps):
        if "repeats" not in node.meta:
            ends = True
        elif node not in others:
            ends = ends and node in apart and node.users.keys() <= others | found
            if ends:
                found.add(node)
    return found
