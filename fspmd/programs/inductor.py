"""The steps between collectives as kernels that torch's inductor makes of them; collectives stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from fspmd.errors import ArgumentError
from fspmd.programs.replay import Part
from fspmd.programs.segments import local_steps, segmented
from fspmd.torch_internals import inductor
from fspmd.transport.frame import Frame, spread
from fspmd.transport.local_tensor import LocalTensor, common_frame, shards_of


def by_inductor(part: Part) -> Callable[..., Any]:
    """Like `replay.compiled`, with local steps in a row as one function that inductor compiles when it first runs."""
    return segmented(part, local_steps(part.steps), Segment)


class Segment:
    """Local steps in a row, of tensors; in a simulation they run rank by rank."""

    def __init__(self, part: Part) -> None:
        self.__name__ = "segment"
        self.graph = fx.Graph()
        known = {node: self.graph.placeholder(node.name) for node in part.inputs}
        reach = {node: frozenset({i}) for i, node in enumerate(part.inputs)}
        for step in part.steps:
            known[step] = self.graph.create_node(
                "call_function",
                step.target,
                fx.map_arg(step.args, known.__getitem__),
                fx.map_arg(step.kwargs, known.__getitem__),
                step.name,
            )
            reach[step] = frozenset[int]().union(*(reach[x] for x in step.all_input_nodes))
        self.graph.output(tuple(known[node] for node in part.outputs))
        self.reach = [sorted(reach[node]) for node in part.outputs]  # which inputs an output is made of
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
    torch_inductor = inductor()
    try:
        return torch_inductor.compile(copy.deepcopy(module), list(values))  # type: ignore[no-any-return]
    except torch_inductor.exc.InvalidCxxCompiler as error:
        raise ArgumentError(
            "jit(backend='inductor') needs a C++ compiler for tensors on the CPU, and found none; install g++ or "
            "clang, set CXX, or write backend='replay'"
        ) from error
