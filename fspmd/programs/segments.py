"""Segments: local steps in a row, of which a backend makes one function.

A local step is a function of torch that neither writes nor draws, on tensors that no step makes and a later one writes
into. Collectives and steps with effects, such as writes into arguments, separate segments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

import torch
from torch import fx

from fspmd.ops.schemas import facts_of
from fspmd.programs.program import copy_node, owner
from fspmd.programs.replay import Maker, ProgramPart, compiled
from fspmd.programs.steps import OF_RANKS
from fspmd.programs.steps import written as written_by
from fspmd.torch_internals import OpOverload

_PLAIN: Final = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_FEWEST: Final = 2  # steps of the shortest segment


def segmented(part: ProgramPart, fit: Collection[fx.Node], make: Maker) -> Callable[..., Any]:
    """Like `replay.compiled`, with each segment as one function made by ``make``. ``fit``: the steps of segments.

    Each output of such a function has separate memory. Views that other steps need are made again after the segment.
    """
    graph, known = part.new_graph()
    ends = {output for output in part.outputs if isinstance(output, fx.Node)}
    live = set(part.steps)
    segment: dict[fx.Node, None] = {}

    def copied(nodes: Iterable[fx.Node]) -> None:
        known.update((node, copy_node(graph, node, known.__getitem__)) for node in nodes)

    def close() -> None:
        if sum(not _is_view(node) for node in segment) < _FEWEST:
            copied(segment)
        else:
            given = list(dict.fromkeys(x for node in segment for x in node.all_input_nodes if x not in segment))
            wanted = _wanted(segment, ends, live)
            made = [node for node in wanted if not _is_view(node)]
            call = graph.call_function(
                make(ProgramPart(list(segment), given, made, {})), tuple(known[x] for x in given)
            )
            known.update((node, graph.call_function(operator.getitem, (call, i))) for i, node in enumerate(made))
            copied(filter(_is_view, wanted))
        segment.clear()

    for step in part.steps:
        if step in known or step in segment:
            continue
        if step in fit:
            segment[step] = None
            if "value" not in step.meta:  # a step with several results, which belong to the segment
                segment.update(dict.fromkeys(x for x in step.users if x in fit))
        else:
            close()
            copied([step])
    close()
    return compiled(part.in_graph(graph, known))


def _wanted(segment: dict[fx.Node, None], ends: set[fx.Node], live: set[fx.Node]) -> list[fx.Node]:
    """The results of a segment that other steps need, in order, and the bases of views among them."""
    wanted: set[fx.Node] = set()
    waiting = [x for x in segment if x in ends or any(y in live and y not in segment for y in x.users)]
    while waiting:
        node = waiting.pop()
        if node not in wanted:
            wanted.add(node)
            waiting += [x for x in node.all_input_nodes if x in segment] if _is_view(node) else ()
    return [node for node in segment if node in wanted]


def _is_view(node: fx.Node) -> bool:
    """Whether a local step has several results, or a result in the memory of another value."""
    return "value" not in node.meta or owner(node) is not node


def local_steps(steps: Sequence[fx.Node], suits: Callable[[fx.Node], bool] = lambda node: True) -> set[fx.Node]:
    """The steps that may be part of a segment: local steps for which ``suits`` is true."""
    live, local = set(steps), set[fx.Node]()
    written = live & {owner(x) for node in steps for x in written_by(node)}
    written |= {owner(x) for node in steps if node.target in OF_RANKS for x in node.all_input_nodes}

    def is_unwritten(x: fx.Node) -> bool:
        return "value" in x.meta and owner(x) not in written

    for node in steps:
        parts = results_of(node, live)
        if node.target is operator.getitem:
            fits = node.args[0] in local
        else:
            fits = (
                isinstance(node.target, OpOverload)
                and node.target is not torch.ops.aten.as_strided.default  # it reads all of a storage
                and facts_of(node.target).is_pure(node.args, node.kwargs)
                and bool(parts)  # else it returns no tensor
                and all(map(is_unwritten, (*parts, *node.all_input_nodes)))
                and all(map(is_plain, (*node.args, *node.kwargs.values())))
                and suits(node)
            )
        if fits:
            local.add(node)
    return local


def results_of(node: fx.Node, live: Collection[fx.Node]) -> list[fx.Node]:
    """The tensors that a step returns: its result, or its parts among ``live``."""
    return [node] if "value" in node.meta else [x for x in node.users if x in live]


def is_plain(arg: Any) -> bool:
    """Whether an argument is a node or a literal, which every graph may contain."""
    if isinstance(arg, (list, tuple)):
        return all(map(is_plain, arg))
    return isinstance(arg, fx.Node) or type(arg) in _PLAIN
