"""Replay: the steps of a program as straight-line Python, which frees each value after its last use."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx
from torch.profiler import record_function

from fspmd.cache import cached
from fspmd.inspection.causes import CAUSES, Cause
from fspmd.inspection.replays import UNSORTED, Replayed, log, sort
from fspmd.inspection.watch import communicates, label
from fspmd.ops.schemas import facts_of
from fspmd.ops.traits import without_autocast
from fspmd.pairs import Call
from fspmd.programs.program import dtype_of, shape_of, strides_of
from fspmd.programs.steps import is_aten, is_of_one_rank
from fspmd.torch_internals import OpOverload, TensorBase, VariableFunctions, aten_to_copy, nn_functions, profiler
from fspmd.tracing import unseen
from fspmd.transport.randomness import draw_seed

_Link = tuple[Any, tuple[Any, ...]]  # a function of aten that gives a view, and its arguments after the tensor


def is_link(node: Any) -> bool:
    """Whether a value is a step that gives a view of one tensor, with its elements in the same dtype."""
    if not isinstance(node, fx.Node) or not is_aten(node) or node.kwargs or not is_of_one_rank(node):
        return False
    facts, operands = facts_of(node.target), node.all_input_nodes
    if not (facts.view and facts.pure) or facts.strided or len(operands) != 1 or node.args[0] is not operands[0]:
        return False
    return dtype_of(operands[0]) is dtype_of(node) and not dtype_of(node).is_complex


class OneView:
    """A view of views of a tensor with these strides as one call. Other tensors are viewed step by step.

    A record may be wrong about the strides of a kernel's result. A replay compares them in its own lines, and calls
    `as_strided` with ``after``, which takes 0.3 µs less than to call this.
    """

    def __init__(self, before: tuple[int, ...], after: tuple[Any, ...], links: tuple[_Link, ...]) -> None:
        self.__name__ = self.__qualname__ = "one_view"
        self.before, self.after = before, after
        self.calls = [(callable_of(target), args) for target, args in links]

    def __call__(self, x: Tensor) -> Tensor:
        for call, args in self.calls:
            x = call(x, *args)
        return x


def one_view(views: list[fx.Node]) -> OneView | None:
    """The view of the operand of the first of some steps, each a view of the one before, that gives the last.

    None if the last does not begin where the operand does, since the operand may itself begin anywhere in its memory,
    or if its elements are negated.
    """
    x = views[0].all_input_nodes[0]
    links = tuple((view.target, _hashable(view.args[1:])) for view in views)
    return _made(links, shape_of(x), strides_of(x))


@cached
def _made(links: tuple[_Link, ...], shape: tuple[int, ...], strides: tuple[int, ...]) -> OneView | None:
    with unseen(), torch.no_grad(), without_autocast():
        last = torch.empty_strided(shape, strides, device="meta")
        for target, args in links:
            last = target(last, *args)
    if last.storage_offset() or last.is_neg():
        return None
    return OneView(tuple(strides), (tuple(last.shape), last.stride()), links)


def _hashable(arg: Any) -> Any:
    return tuple(map(_hashable, arg)) if isinstance(arg, (list, tuple)) else arg


aten: Final = torch.ops.aten


def _named(text: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in text.split())


#: aten functions that are faster, by some 0.5 µs, through torch's Python functions and methods with the same arguments
PUBLIC: Final = _named(
    "abs add.Tensor add_.Tensor addmm amax amin argmax bitwise_not bmm cat clamp clone constant_pad_nd copy_ cos "
    "div.Tensor div_.Tensor eq.Tensor exp expand gather ge.Scalar gt.Scalar index_select le.Scalar le.Tensor log "
    "logical_not lt.Scalar lt.Tensor masked_fill.Scalar max.dim maximum mean.dim minimum mm mul.Tensor mul_.Tensor "
    "native_layer_norm neg permute pow.Tensor_Scalar reciprocal relu rsqrt scatter_.src select.int sigmoid silu sin "
    "split.Tensor sqrt squeeze.dim stack sub.Tensor sub_.Tensor sum sum.dim_IntList t tanh transpose.int unsqueeze "
    "view where.self zero_"
) | {
    "aten::_log_softmax",
    "aten::_log_softmax_backward_data",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_softmax",
    "aten::_softmax_backward_data",
}


@cached
def callable_of(overload: Any) -> Callable[..., Any]:
    """The fastest function that calls an aten function.

    In place of ``view`` it is ``reshape``: a record may be wrong about the strides of a kernel's result. Torch's shape
    functions are, for some kernels that compute gradients. A reshape then copies, as it does in the function itself.
    """
    if overload is aten.view.default:
        return TensorBase.reshape  # type: ignore[no-any-return]
    if overload.name() not in PUBLIC:
        return overload.op  # type: ignore[no-any-return]
    name, places = overload.overloadpacket.__name__, (VariableFunctions, TensorBase, nn_functions)
    public: Any = next(getattr(place, name) for place in places if hasattr(place, name))
    return public  # type: ignore[no-any-return]


class Spelling(NamedTuple):
    """A call of a method of ``x``. ``text`` follows the operand, and has {} for each of ``args``."""

    x: Any
    text: str
    args: tuple[Any, ...] = ()


def spelling(node: fx.Node) -> Spelling | None:
    """Another spelling of a step that does the same, and is faster by some 1 to 2 µs, if there is one."""
    find = _FOUND.get(node.target)
    return None if find is None else find(node)


def _cast(node: fx.Node) -> Spelling | None:
    """``x.double()`` for a copy in another dtype."""
    x, *rest = node.args
    method = _CASTS.get(node.kwargs.get("dtype"))
    if method is None or rest or len(node.kwargs) > 1 or dtype_of(x) in (None, dtype_of(node)):
        return None
    return Spelling(x, f".{method}()")


def _indexed(node: fx.Node) -> Spelling | None:
    """``x[:, i]``. torch would read the values of an index without dims."""
    x, indices = node.args
    given: Any = indices
    if node.meta.get("frame", False) is not None or not all(i is None or shape_of(i) for i in given):
        return None
    return Spelling(
        x, f"[{', '.join(':' if i is None else '{}' for i in given)}]", tuple(i for i in given if i is not None)
    )


def _pieces(node: fx.Node) -> Spelling | None:
    """``x.split_with_sizes((3, 3, 1), dim)``"""
    given: Any = *node.args, 0
    x, size, dim, *_ = given
    shape = shape_of(x)
    if node.kwargs or not is_of_one_rank(x) or not shape or not size or not shape[dim]:
        return None  # the blocks of simulated ranks may have other sizes
    sizes = tuple(min(size, shape[dim] - at) for at in range(0, shape[dim], size))
    return Spelling(x, ".split_with_sizes({}, {})", (sizes, dim))


_CASTS: Final[dict[Any, str]] = {
    getattr(torch, name): name for name in ("double", "float", "half", "bfloat16", "long", "int", "bool")
}
_FOUND: Final[dict[Any, Callable[[fx.Node], Spelling | None]]] = {
    aten_to_copy: _cast,
    aten.index.Tensor: _indexed,
    aten.split.Tensor: _pieces,
}


class ProgramPart(NamedTuple):
    """Steps of a program that run together, as a function of the values of ``inputs``."""

    steps: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    outputs: Sequence[Any]  # nodes, or plain values
    constants: dict[fx.Node, Any]  # the values of nodes that are neither inputs nor steps
    donated: Sequence[fx.Node] = ()  # inputs that are passed in lists of length 1, and freed after their last use
    replayed: Replayed | None = None  # what each run notes, if the steps communicate
    infers: bool = False  # whether autograd has followed none of the steps

    def new_graph(self) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
        """A graph with nodes for the inputs and the constants alone, and these nodes by those of this part."""
        graph = fx.Graph()
        known = {node: graph.placeholder(node.name) for node in self.inputs}
        for node in self.constants:
            known[node] = graph.create_node("get_attr", node.name if node.op == "get_attr" else f"{node.name}_value")
        for node, made in known.items():
            made.meta = dict(node.meta)
        return graph, known

    def in_graph(self, graph: fx.Graph, known: dict[fx.Node, fx.Node]) -> ProgramPart:
        """This part with the steps of another graph. ``known``: nodes of that graph by those of this part."""
        return self._replace(
            steps=[node for node in graph.nodes if node.op == "call_function"],
            inputs=[known[node] for node in self.inputs],
            outputs=[known[output] if isinstance(output, fx.Node) else output for output in self.outputs],
            constants={known[node]: x for node, x in self.constants.items()},
            donated=[known[node] for node in self.donated],
        )


#: makes a function of a part, which returns a tuple of the values of its outputs
Maker = Callable[[ProgramPart], Callable[..., Any]]

_FILE: Final = __file__.replace("replay.py", "<replay>")  # so that frames of replays count as ours
#: aten functions whose list of sizes torch takes faster, by some 0.5 µs, as arguments of their own
_SPREAD: Final = (torch.ops.aten.view.default, torch.ops.aten.expand.default)
_PLAIN: Final = (bool, int, str, type(None))


def compiled(part: ProgramPart) -> Callable[..., Any]:
    """A function that runs the steps one by one; a `Maker`."""
    return _Writer(part).function()


def below_autograd(replay: Callable[..., Any]) -> Callable[..., Any]:
    """``replay`` in the grad mode of `torch.no_grad`."""

    def run(*values: Any) -> Any:
        if not _grad_enabled():
            return replay(*values)
        with torch.no_grad():
            return replay(*values)

    return run


_grad_enabled = torch.is_grad_enabled


def from_lists(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, with donated values passed in lists. ``run`` gets the values themselves."""
    return lambda *values: run(*(x.pop() if type(x) is list else x for x in values))


def has_randomness(node: fx.Node) -> bool:
    """Whether a step draws from a generator."""
    target: Any = node.target
    if isinstance(target, OpOverload):
        return facts_of(target).draws(node.args, node.kwargs)
    return _draws_seed(target)


def draws_seed(node: fx.Node) -> bool:
    """Whether a step draws a seed from torch's own generator."""
    return _draws_seed(node.target) and not any(x is not None for x in (*node.args, *node.kwargs.values()))


def _draws_seed(target: Any) -> bool:
    return getattr(target, "__wrapped__", target) is draw_seed.__wrapped__  # type: ignore[attr-defined]


def _ranged(call: Call, cause: Cause, run: Callable[..., Any], *args: Any) -> Any:
    """Run a collective within a range of torch's profiler."""
    with record_function(label(call, cause)):
        return run(*args)


class _Writer:
    """Writes the Python source of a replay, and holds the values of its names."""

    def __init__(self, part: ProgramPart) -> None:
        self.part = part
        self.scope: dict[str, Any] = {}
        self.constants: dict[int, str] = {}  # names by the ids of their values
        self.names: dict[fx.Node, str] = {node: f"v{i}" for i, node in enumerate(part.inputs)}
        self.count = len(self.names)

    def function(self) -> Callable[..., Any]:
        """The function of the steps."""
        steps, _, outputs, constants, donated, replayed, _ = self.part
        last = dict.fromkeys(donated, -1)
        for i, node in enumerate(steps):
            for used in (*node.all_input_nodes, node):
                last[used] = i
        kept = {node for node in outputs if isinstance(node, fx.Node)}
        freed: dict[int, list[fx.Node]] = {}  # by step, values whose last use it is
        for node, i in last.items():
            if node not in kept and node not in constants:
                freed.setdefault(i, []).append(node)
        causes = self.scope[CAUSES] = dict[int, Cause]()
        lines = [f"def replay({', '.join(self.names.values())}):"]
        first = None  # a run that fails before it has communicated is no replay
        if replayed is not None:
            self.scope.update(note=log.append, log=log, replayed=replayed, sort=sort)
            first = next((node for node in steps if "call" in node.meta and communicates(node.meta["call"])), None)
        lines += [f"    {self.names[node]} = {self.names[node]}.pop()" for node in donated]
        lines += [f"    del {self.names[node]}" for node in freed.get(-1, ())]
        for i, node in enumerate(steps):
            call = self.call(node)
            name = self.names[node] = f"v{self.count}"
            self.count += 1
            if node is first:
                lines += ["    note(replayed)", f"    if len(log) >= {UNSORTED}: sort()"]
            lines.append(f"    {name} = {call}")
            if (cause := node.meta.get("cause")) is not None:
                causes[len(lines)] = cause
            if names := ", ".join(self.names[value] for value in freed.get(i, ())):
                lines.append(f"    del {names}")
        lines.append(f"    return ({''.join(self.value(output) + ', ' for output in outputs)})")
        exec(compile("\n".join(lines), _FILE, "exec"), self.scope)
        replay: Callable[..., Any] = self.scope["replay"]
        return replay

    def call(self, node: fx.Node) -> str:
        """The expression of a step."""
        if node.target is operator.getitem:
            return f"{self.value(node.args[0])}[{node.args[1]}]"
        if (spelled := spelling(node)) is not None:
            return self.value(spelled.x) + spelled.text.format(*map(self.value, spelled.args))
        if isinstance(view := node.target, OneView):
            x, strides, run = self.value(node.args[0]), self.value(view.before), self.constant(view, "f")
            strided = f"{self.constant(torch.as_strided, 'f')}({x}, {', '.join(map(self.value, view.after))})"
            return f"{strided} if {x}.stride() == {strides} else {run}({x})"
        given: Sequence[Any] = node.args
        if node.target in _SPREAD and len(given) == 2 and given[1]:
            given = given[0], *given[1]
        arguments = [self.value(arg) for arg in given]
        arguments += [f"{name}={self.value(arg)}" for name, arg in node.kwargs.items()]
        target: Any = node.target
        if isinstance(target, OpOverload):
            target = callable_of(target)
        expression = f"{self.constant(target, 'f')}({', '.join(arguments)})"
        call, cause = (node.meta.get(name) for name in ("call", "cause"))
        if call is None or cause is None or not communicates(call):
            return expression
        self.scope.update(profiler=profiler, ranged=_ranged)
        named = [self.constant(value, "c") for value in (call, cause, target)]
        return f"{expression} if not profiler._is_profiler_enabled else ranged({', '.join((*named, *arguments))})"

    def value(self, arg: Any) -> str:
        """The expression of an argument."""
        if isinstance(arg, fx.Node):
            return self.names[arg] if arg in self.names else self.constant(self.part.constants[arg], "c")
        if isinstance(arg, list) or type(arg) is tuple:  # fx has list types of its own
            inner = "".join(self.value(entry) + ", " for entry in arg)
            return f"[{inner}]" if isinstance(arg, list) else f"({inner})"
        if type(arg) in _PLAIN or (type(arg) is float and isfinite(arg)):
            return repr(arg)
        return self.constant(arg, "c")

    def constant(self, value: Any, letter: str) -> str:
        """The name of a value that is no literal."""
        name = self.constants.get(id(value))
        if name is None:
            name = self.constants[id(value)] = f"{letter}{len(self.scope)}"
            self.scope[name] = value
        return name
