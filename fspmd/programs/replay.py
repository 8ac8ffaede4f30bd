"""Replay: the steps of a program as straight-line Python, which frees each value after its last use."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, Final, NamedTuple

import torch
from torch import fx
from torch.profiler import record_function

from fspmd.cache import cached
from fspmd.inspection.causes import CAUSES, Cause
from fspmd.inspection.replays import UNSORTED, Replayed, log, sort
from fspmd.inspection.watch import communicates, label
from fspmd.ops.schemas import facts_of
from fspmd.pairs import Call
from fspmd.torch_internals import OpOverload, TensorBase, VariableFunctions, nn_functions, profiler, set_grad_enabled
from fspmd.transport.randomness import draw_seed


class ProgramPart(NamedTuple):
    """Steps of a program that run together, as a function of the values of ``inputs``."""

    steps: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    outputs: Sequence[Any]  # nodes, or plain values
    constants: dict[fx.Node, Any]  # the values of nodes that are neither inputs nor steps
    donated: Sequence[fx.Node] = ()  # inputs that are passed in lists of length 1, and freed after their last use
    replayed: Replayed | None = None  # what each run notes, if the steps communicate
    infers: bool = False  # whether autograd has followed none of the steps


#: makes a function of a part, which returns a tuple of the values of its outputs
Maker = Callable[[ProgramPart], Callable[..., Any]]

_FILE: Final = __file__.replace("replay.py", "<replay>")  # so that frames of replays count as ours
_PLAIN: Final = (bool, int, str, type(None))


def _named(text: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in text.split())


#: aten functions that are faster, by some 0.5 µs, through torch's Python functions and methods with the same arguments
PUBLIC: Final = _named(
    "abs add.Tensor add_.Tensor addmm amax amin argmax bitwise_not bmm cat clamp clone constant_pad_nd copy_ cos "
    "div.Tensor div_.Tensor eq.Tensor exp expand gather ge.Scalar gt.Scalar index_select le.Scalar le.Tensor log "
    "logical_not lt.Scalar lt.Tensor masked_fill.Scalar max.dim maximum mean.dim minimum mm mul.Tensor mul_.Tensor "
    "native_layer_norm neg permute pow.Tensor_Scalar reciprocal relu rsqrt scatter_.src select.int sigmoid silu sin "
    "split.Tensor sqrt squeeze.dim stack sub.Tensor sub_.Tensor sum sum.dim_IntList t tanh transpose.int unsqueeze "
    "view where.self zero_ _log_softmax _log_softmax_backward_data _scaled_dot_product_flash_attention_for_cpu "
    "_softmax _softmax_backward_data"
)


#: aten functions whose list of sizes torch takes faster, by some 0.5 µs, as arguments of their own
_SPREAD: Final = (torch.ops.aten.view.default, torch.ops.aten.expand.default)


@cached
def callable_of(overload: Any) -> Callable[..., Any]:
    """The fastest function that calls an aten function.

    In place of ``view`` it is ``reshape``: a record may be wrong about the strides of a kernel's result. Torch's shape
    functions are, for some kernels that compute gradients. A reshape then copies, as it does in the function itself.
    """
    name = overload._schema.name.removeprefix("aten::")
    if overload is torch.ops.aten.view.default:
        return TensorBase.reshape  # type: ignore[no-any-return]
    if overload.name() not in PUBLIC:
        return overload._op  # type: ignore[no-any-return]
    places = (VariableFunctions, TensorBase, nn_functions)
    public: Any = next(getattr(place, name) for place in places if hasattr(place, name))
    return public  # type: ignore[no-any-return]


def compiled(part: ProgramPart) -> Callable[..., Any]:
    """A function that runs the steps one by one; a `Maker`."""
    return _Writer(part).function()


def below_autograd(replay: Callable[..., Any]) -> Callable[..., Any]:
    """``replay`` in the grad mode of `torch.no_grad`."""

    def run(*values: Any) -> Any:
        before = _grad_enabled()
        set_grad_enabled(False)
        try:
            return replay(*values)
        finally:
            set_grad_enabled(before)

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
