"""Backends of `jit`: straight Python, kernels of torch's inductor, CUDA graphs, or a function of the user."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from operator import getitem
from typing import Any, Final

from torch import Tensor, fx

from fspmd.errors import ArgumentError
from fspmd.inspection.replays import note
from fspmd.messages import described
from fspmd.programs.cuda_graphs import by_cuda_graphs, check_device
from fspmd.programs.program import value_of
from fspmd.programs.replay import Maker, ProgramPart, from_lists
from fspmd.programs.segments import is_plain, local_steps, segmented
from fspmd.programs.shortened import in_few_steps
from fspmd.torch_internals import OpOverload, inductor
from fspmd.transport.frame import spread
from fspmd.transport.local_tensor import common_frame, local_tensor, shards_of

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
Backend = str | Compiler


def maker(backend: Backend) -> Maker:
    """The maker of a backend.

    Raises:
        ArgumentError: the backend does not exist, or needs a GPU that this machine lacks.
    """
    if callable(backend):
        return partial(_by_function, backend)
    if (make := _BY_NAME.get(backend)) is None:
        raise ArgumentError(
            f"jit got {described(backend)} for backend; write 'replay', 'inductor', 'cudagraphs', or a function of a "
            "torch.fx.GraphModule and example inputs that returns a function of such inputs"
        )
    if make is by_cuda_graphs:
        check_device()
    return make


def _by_function(backend: Compiler, part: ProgramPart) -> Callable[..., Any]:
    """A function that the user's backend makes when the steps first run."""
    module, count = module_of(part), len(part.outputs)
    made: list[Callable[..., Any]] = []

    def run(*values: Any) -> Any:
        if part.replayed is not None:
            note(part.replayed)
        function = made[0] if made else backend(module, list(values))
        if not callable(function):
            raise ArgumentError(f"the backend of jit returned {described(function)}; it must return a function")
        out = function(*values)
        if not isinstance(out, (tuple, list)) or len(out) != count:
            raise ArgumentError(
                f"the function made by the backend of jit returned {described(out)}; it must return a tuple of {count} "
                "values, as the graph does"
            )
        if not made:
            for i, (x, node) in enumerate(zip(out, part.outputs, strict=True)):
                _check_result(i, x, node)
            made.append(function)
        return tuple(out)

    return from_lists(run) if part.donated else run


def _check_result(i: int, x: Any, node: Any) -> None:
    """Raise `ArgumentError` where a result has another shape or dtype than in the graph."""
    expected = node.meta.get("value") if isinstance(node, fx.Node) else None
    if expected is not None and (not isinstance(x, Tensor) or value_of(x) != expected):
        given = f"a tensor {value_of(x)}" if isinstance(x, Tensor) else described(x)
        raise ArgumentError(
            f"the function made by the backend of jit returned {given} for result {i}; it must return a tensor "
            f"{expected}, as the graph does"
        )


def module_of(part: ProgramPart) -> fx.GraphModule:
    """Steps as a module. Steps that are no functions of torch, such as collectives, are `Opaque`."""
    graph = fx.Graph()
    attributes: dict[str, Tensor] = {}
    known = {node: graph.placeholder(node.name) for node in part.inputs}

    def placed(node: fx.Node) -> fx.Node:
        if node not in known:
            known[node] = graph.create_node("get_attr", str(node.target))
            attributes[str(node.target)] = part.constants[node]
        return known[node]

    for step in part.steps:
        is_torch = step.target is getitem or isinstance(step.target, OpOverload)
        if is_torch and all(map(is_plain, (*step.args, *step.kwargs.values()))):
            known[step] = graph.node_copy(step, placed)
        else:
            given = tuple(map(placed, step.all_input_nodes))
            known[step] = graph.create_node("call_function", Opaque(step), given, name=step.name)
            known[step].meta = dict(step.meta)
    graph.output(tuple(placed(output) if isinstance(output, fx.Node) else output for output in part.outputs))
    return fx.GraphModule(attributes, graph)


class Opaque:
    """A step as a function of its operands alone, with a name that is a Python identifier."""

    def __init__(self, step: fx.Node) -> None:
        call = step.meta.get("call")
        self.__name__ = self.__qualname__ = call.pair.name if call else getattr(step.target, "__name__", "step")
        self.function: Any = step.target
        self.args, self.kwargs = step.args, step.kwargs
        self.operands = step.all_input_nodes

    def __call__(self, *values: Any) -> Any:
        given = dict(zip(self.operands, values, strict=True))
        return self.function(*_filled(self.args, given), **_filled(self.kwargs, given))


def _filled(arg: Any, given: dict[fx.Node, Any]) -> Any:
    """An argument with values in place of nodes."""
    if isinstance(arg, fx.Node):
        return given[arg]
    if isinstance(arg, dict):
        return {name: _filled(entry, given) for name, entry in arg.items()}
    if isinstance(arg, list) or type(arg) is tuple:  # fx has its own list types
        return (list if isinstance(arg, list) else tuple)(_filled(entry, given) for entry in arg)
    return arg


def by_inductor(part: ProgramPart) -> Callable[..., Any]:
    """Like `replay.compiled`. Inductor compiles each segment when it first runs."""
    return segmented(part, local_steps(part.steps), Segment)


class Segment:
    """A segment as a function of tensors. In a simulation it runs rank by rank."""

    def __init__(self, part: ProgramPart) -> None:
        self.__name__ = "segment"
        self.graph = module_of(part).graph
        sources = {node: frozenset({i}) for i, node in enumerate(part.inputs)}
        for step in part.steps:
            sources[step] = frozenset[int]().union(*(sources[x] for x in step.all_input_nodes))
        self.sources = [sorted(sources[node]) for node in part.outputs]  # places of the inputs of each output
        self.made: dict[Any, Callable[..., Any]] = {}  # by shapes and strides of the inputs

    def __call__(self, *values: Tensor) -> Sequence[Tensor]:
        frame = common_frame(values, None)
        if frame is None:
            return self.run(values)
        rows = zip(*(shards_of(x, frame) for x in values), strict=True)
        columns = list(zip(*map(self.run, rows), strict=True))
        results: list[Tensor] = []
        for column, sources in zip(columns, self.sources, strict=True):
            frame_of_result = common_frame([values[i] for i in sources], None)
            if frame_of_result is None:
                results.append(column[0])
                continue
            shards = list(column)
            if frame_of_result is not frame:
                places = spread(
                    frame_of_result, frame
                )  # of the equal shard of the result, for each of the larger frame
                shards = [column[places.index(i)] for i in range(frame_of_result.volume)]
            is_borrowed = any(getattr(values[i], "borrowed", False) for i in sources)
            results.append(local_tensor(shards, frame_of_result, is_borrowed))
        return results

    def run(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """The outputs for the blocks of one rank."""
        key = tuple([(x.shape, x.stride()) for x in values])
        run = self.made.get(key)
        if run is None:
            run = self.made[key] = _compiled(fx.GraphModule({}, self.graph), values)
        outputs: Sequence[Tensor] = run(*values)
        return outputs


def _compiled(module: fx.GraphModule, values: Sequence[Tensor]) -> Callable[..., Any]:
    torch_inductor = inductor()
    try:
        return torch_inductor.compile(copy.deepcopy(module), list(values))  # type: ignore[no-any-return]
    except torch_inductor.exc.InvalidCxxCompiler as error:
        raise ArgumentError(
            "jit(backend='inductor') needs a C++ compiler for tensors on the CPU, but found none; install g++ or "
            "clang, set CXX, or write backend='replay'"
        ) from error


_BY_NAME: Final[dict[str, Maker]] = {"replay": in_few_steps, "inductor": by_inductor, "cudagraphs": by_cuda_graphs}
