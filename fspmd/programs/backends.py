"""What runs the steps of a program: straight Python, or what somebody else makes of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import getitem
from typing import Any, Final

from torch import Tensor, fx

from fspmd.errors import ArgumentError
from fspmd.messages import described
from fspmd.programs.cuda_graphs import by_cuda_graphs, check_device
from fspmd.programs.inductor import by_inductor
from fspmd.programs.program import value_of
from fspmd.programs.replay import Maker, Part, compiled, taken
from fspmd.programs.segments import is_plain
from fspmd.torch_internals import OpOverload

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
Backend = str | Compiler
_BY_NAME: Final[dict[str, Maker]] = {"replay": compiled, "inductor": by_inductor, "cudagraphs": by_cuda_graphs}


def maker(backend: Backend) -> Maker:
    """What makes functions of steps.

    Raises:
        ArgumentError: there is no such backend, or not on this machine.
    """
    if callable(backend):
        return partial(_by_function, backend)
    if (found := _BY_NAME.get(backend)) is None:
        raise ArgumentError(
            f"jit got {described(backend)} for backend, which is 'replay', 'inductor', 'cudagraphs', or a function of "
            "a torch.fx.GraphModule and example inputs that gives a function of such inputs"
        )
    if found is by_cuda_graphs:
        check_device()
    return found


def _by_function(backend: Compiler, part: Part) -> Callable[..., Any]:
    """What a function of the user makes, of the inputs with which the steps first run."""
    module, count = module_of(part), len(part.outputs)
    made: list[Callable[..., Any]] = []

    def run(*values: Any) -> Any:
        function = made[0] if made else backend(module, list(values))
        if not callable(function):
            raise ArgumentError(f"the backend of jit gave {described(function)}; it must give a function")
        out = function(*values)
        if not isinstance(out, (tuple, list)) or len(out) != count:
            raise ArgumentError(
                f"what the backend of jit made gave {described(out)}; it must give a tuple of {count} values, "
                "as the graph does"
            )
        if not made:
            for i, (x, node) in enumerate(zip(out, part.outputs, strict=True)):
                _check_result(i, x, node)
            made.append(function)
        return tuple(out)

    return taken(run) if part.donated else run


def _check_result(i: int, x: Any, node: Any) -> None:
    """Raises where a result is no tensor of the shape and the dtype that the graph gives."""
    expected = node.meta.get("value") if isinstance(node, fx.Node) else None
    if expected is not None and (not isinstance(x, Tensor) or value_of(x) != expected):
        given = f"a tensor {value_of(x)}" if isinstance(x, Tensor) else described(x)
        raise ArgumentError(
            f"what the backend of jit made gave {given} for result {i}; expected a tensor {expected}, "
            "as the graph gives"
        )


def module_of(part: Part) -> fx.GraphModule:
    """Steps as a module of their own; collectives, and what else is no function of torch, are `Opaque`."""
    graph = fx.Graph()
    attributes: dict[str, Tensor] = {}
    known = {node: graph.placeholder(node.name) for node in part.inputs}

    def placed(node: fx.Node) -> fx.Node:
        if node not in known:
            known[node] = graph.create_node("get_attr", str(node.target))
            attributes[str(node.target)] = part.constants[node]
        return known[node]

    for step in part.steps:
        torchs = step.target is getitem or isinstance(step.target, OpOverload)
        if torchs and all(map(is_plain, (*step.args, *step.kwargs.values()))):
            known[step] = graph.node_copy(step, placed)
        else:
            given = tuple(map(placed, step.all_input_nodes))
            known[step] = graph.create_node("call_function", Opaque(step), given, name=step.name)
            known[step].meta = dict(step.meta)
    graph.output(tuple(placed(one) if isinstance(one, fx.Node) else one for one in part.outputs))
    return fx.GraphModule(attributes, graph)


class Opaque:
    """A step as a function of its operands alone, with a name that Python can write."""

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
    """An argument with values in the places of nodes."""
    if isinstance(arg, fx.Node):
        return given[arg]
    if isinstance(arg, dict):
        return {name: _filled(one, given) for name, one in arg.items()}
    if isinstance(arg, list) or type(arg) is tuple:  # fx has lists of its own
        return (list if isinstance(arg, list) else tuple)(_filled(one, given) for one in arg)
    return arg
