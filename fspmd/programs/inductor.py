"""The steps between collectives as kernels that torch's inductor makes of them; collectives stay as they are."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx

from fspmd.errors import ArgumentError
from fspmd.programs.facts import is_pure, shard_of
from fspmd.programs.passes.aliases import written as written_by
from fspmd.programs.program import owner
from fspmd.programs.replay import compiled
from fspmd.transport.frame import Frame, spread
from fspmd.transport.local_tensor import LocalTensor, common_frame, shards_of

_PLAIN: Final = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_FEWEST: Final = 2  # steps that are worth a kernel


def by_inductor(
    nodes: Iterable[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[Any],
    constants: dict[fx.Node, Any],
    donated: Sequence[fx.Node] = (),
) -> Callable[..., Any]:
    """Like `replay.compiled`, with each run of local steps as one function that inductor compiles when it first runs.

    Local are functions of torch that write nothing and draw nothing, of tensors that nobody writes into.
    """
    steps = list(nodes)
    fit = _fit(steps)
    graph = fx.Graph()
    known = {node: graph.placeholder(node.name) for node in inputs}
    known.update((node, graph.create_node("get_attr", str(node.target))) for node in constants)
    wanted = {one for one in outputs if isinstance(one, fx.Node)}
    alive = set(steps)
    segment: dict[fx.Node, None] = {}

    def close() -> None:
        if len(segment) < _FEWEST:
            for node in segment:
                known[node] = graph.node_copy(node, known.__getitem__)
        else:
            given = list(dict.fromkeys(x for node in segment for x in node.all_input_nodes if x not in segment))
            kept = [x for x in segment if x in wanted or any(y in alive and y not in segment for y in x.users)]
            call = graph.call_function(Segment(segment, given, kept), tuple(known[x] for x in given))
            known.update((x, graph.call_function(operator.getitem, (call, i))) for i, x in enumerate(kept))
            known.update((x, call) for x in segment if x not in known)
        segment.clear()

    for step in steps:
        if step in known or step in segment:
            continue
        if step in fit:
            segment[step] = None
            if "value" not in step.meta:  # its parts
                segment.update(dict.fromkeys(x for x in step.users if x in fit))
        else:
            close()
            with warnings.catch_warnings():  # of sizes that differ from rank to rank
                warnings.simplefilter("ignore")
                known[step] = graph.node_copy(step, known.__getitem__)
    close()
    return compiled(
        [node for node in graph.nodes if node.op == "call_function"],
        [known[node] for node in inputs],
        [known[one] if isinstance(one, fx.Node) else one for one in outputs],
        {known[node]: x for node, x in constants.items()},
        [known[node] for node in donated],
    )


def _fit(steps: list[fx.Node]) -> set[fx.Node]:
    """The local steps."""
    written = {owner(x) for node in steps for x in written_by(node)}
    written |= {owner(x) for node in steps if node.target in (LocalTensor, shard_of) for x in node.all_input_nodes}

    def is_left(x: fx.Node) -> bool:
        return "value" in x.meta and owner(x) not in written

    alive, found = set(steps), set[fx.Node]()
    for node in steps:
        parts = [node] if "value" in node.meta else [x for x in node.users if x in alive]
        if node.target is operator.getitem:
            fits = node.args[0] in found
        else:
            fits = (
                isinstance(node.target, torch._ops.OpOverload)
                and node.target is not torch.ops.aten.as_strided.default  # of a whole storage
                and is_pure(node.target)
                and bool(parts)  # else it gives no tensor
                and all(map(is_left, (*parts, *node.all_input_nodes)))
                and all(map(is_plain, (*node.args, *node.kwargs.values())))
            )
        if fits:
            found.add(node)
    return found


def is_plain(arg: Any) -> bool:
    """Whether an argument is such as anybody's graph may have: nodes, and what Python can write."""
    if isinstance(arg, (list, tuple)):
        return all(map(is_plain, arg))
    return isinstance(arg, fx.Node) or type(arg) in _PLAIN


class Segment:
    """Local steps in a row, of tensors; in a simulation they run rank by rank."""

    def __init__(self, steps: Iterable[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> None:
        self.__name__ = "segment"
        self.graph = fx.Graph()
        known = {node: self.graph.placeholder(node.name) for node in inputs}
        reach = {node: frozenset({i}) for i, node in enumerate(inputs)}
        for step in steps:
            known[step] = self.graph.create_node(
                "call_function",
                step.target,
                fx.map_arg(step.args, known.__getitem__),
                fx.map_arg(step.kwargs, known.__getitem__),
                step.name,
            )
            reach[step] = frozenset[int]().union(*(reach[x] for x in step.all_input_nodes))
        self.graph.output(tuple(known[node] for node in outputs))
        self.reach = [sorted(reach[node]) for node in outputs]  # which inputs an output is made of
        self.made: dict[Any, Callable[..., Any]] = {}  # by how the inputs lie in memory

    def __call__(self, *values: Tensor) -> Sequence[Tensor]:
        held = common_frame(values, None)
        if held is None:
            return self.run(values)
        rows = zip(*(shards_of(x, held) for x in values), strict=True)
        columns = list(zip(*map(self.run, rows), strict=True))
        found: list[Tensor] = []
        for column, reach in zip(columns, self.reach, strict=True):
            own = common_frame([values[i] for i in reach], None)
            if own is None:
                found.append(column[0])
                continue
            shards = list(column) if own is held else [column[i] for i in _firsts(own, held)]
            found.append(LocalTensor(shards, own, any(getattr(values[i], "borrowed", False) for i in reach)))
        return found

    def run(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """On the blocks of one rank."""
        key = tuple([(x.shape, x.stride()) for x in values])
        run = self.made.get(key)
        if run is None:
            run = self.made[key] = _compiled(fx.GraphModule({}, self.graph), values)
        found: Sequence[Tensor] = run(*values)
        return found


def _firsts(own: Frame, held: Frame) -> list[int]:
    """For each shard of a frame the first of those of a larger one that equal it."""
    places = spread(own, held)
    return [places.index(i) for i in range(own.volume)]


def _compiled(module: fx.GraphModule, values: Sequence[Tensor]) -> Callable[..., Any]:
    from torch._inductor.exc import InvalidCxxCompiler  # some seconds, for those who ask for it

    try:
        return torch._inductor.compile(copy.deepcopy(module), list(values))  # type: ignore[no-any-return]
    except InvalidCxxCompiler as error:
        raise ArgumentError(
            "jit(backend='inductor') needs a C++ compiler for tensors on the CPU, and found none; install g++ or "
            "clang, set CXX, or write backend='replay'"
        ) from error
