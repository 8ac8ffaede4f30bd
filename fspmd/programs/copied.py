"""Another program with the same steps, which may be changed while the first one stays as it is."""

from __future__ import annotations

import warnings

from torch import fx

from fspmd.programs.program import Program, owner


def copied(program: Program) -> Program:
    """The same program of nodes of its own."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    with warnings.catch_warnings():  # of sizes that differ from rank to rank
        warnings.simplefilter("ignore")
        for node in program.graph.nodes:
            if node.op != "output":
                known[node] = graph.node_copy(node, known.__getitem__)
                remember(known[node], node, known)
    return rebuilt(program, graph, known)


def remember(made: fx.Node, node: fx.Node, known: dict[fx.Node, fx.Node]) -> None:
    """What is known of a node is known of the one that stands for it."""
    made.meta = dict(node.meta)
    if "memory" in made.meta:
        made.meta["memory"] = known[owner(node)]


def rebuilt(program: Program, graph: fx.Graph, known: dict[fx.Node, fx.Node]) -> Program:
    """A program of another graph, in which other nodes stand for those that are ``known``."""
    inputs, results, cotangents = (
        [known[node] for node in many] for many in (program.inputs, program.results, program.cotangents)
    )
    gradients = [one if one is None else known[one] for one in program.gradients]
    constants = {known[node]: x for node, x in program.constants.items()}
    made = Program.of(graph, inputs, results, constants, cotangents, gradients)
    made.uneven, made.unlike, made.places = program.uneven, program.unlike, program.places
    return made
