"""Shorter replays: constants are made once, steps of one torch function are joined, and sums are written in place.

Torch shows a recorder the steps of its functions: `matmul` is a view, a product and a view. A replay pays for each step
on the host, so `in_few_steps` joins them again. Patterns propose calls; `runs` proves that torch would run
the very steps. Backends that compile steps get them one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fspmd.cache import cached
from fspmd.fake_mode import CachingFakeMode
from fspmd.inspection.watch import communicates
from fspmd.ops.traits import without_autocast
from fspmd.programs.program import by_memory, copy_node, device_of, dtype_of, owner, shape_of
from fspmd.programs.replay import ProgramPart, compiled, is_link, one_view
from fspmd.programs.steps import is_aten, is_collective, is_of_one_rank, made_once, written
from fspmd.redistribution.cost import moves
from fspmd.torch_internals import DisableTorchFunction, aten_unsafe_view
from fspmd.tracing import DispatchMode, unseen
from fspmd.transport.carriers import FLOATS

aten: Final = torch.ops.aten


#: kernels that return a copy where there is one rank
_COPIES: Final = ("gather", "gather_once", "exchange", "reduce", "reduce_once", "reduce_scatter")


class Joined(NamedTuple):
    """A call that may stand in place of steps. The last of them gives its result. None marks an operand not found."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    first: fx.Node  # the first step that reads a value in ``args``


def in_few_steps(part: ProgramPart) -> Callable[..., Any]:
    """Like `replay.compiled`, with fewer steps, which compute the same to the bit."""
    return compiled(_Shorter(part).part())


class _Shorter:
    """A part of a program, and what becomes of its steps."""

    def __init__(self, part: ProgramPart) -> None:
        self.given = part
        self.place = {node: i for i, node in enumerate(part.steps)}
        self.ends = {output for output in part.outputs if isinstance(output, fx.Node)}
        self.uses = Counter(x for node in part.steps for x in node.all_input_nodes)
        self.uses.update(self.ends)
        self.within = by_memory(part.steps)
        self.writes = {i: written(node) for i, node in enumerate(part.steps)}
        self.taking = dict.fromkeys(filter(self.takes, part.steps))
        self.reshapes = any(torch.Tag.inplace_view in getattr(node.target, "tags", ()) for node in part.steps)

    def part(self) -> ProgramPart:
        """The part with fewer steps."""
        values = self.values()
        joined, unused = self.joined(values)
        writers = {node: run for node in self.taking if self.may_write(node) and (run := node.meta["call"].writer())}
        if not (values or joined or writers):
            return self.given
        part = self.given._replace(constants={**self.given.constants, **values})
        graph, known = part.new_graph()
        for node in part.steps:
            if node in unused or node in values:
                continue
            if (joined_call := joined.get(node)) is None:
                known[node] = copy_node(graph, node, known.__getitem__)
                known[node].target = writers.get(node, node.target)
            elif joined_call.function is _itself:
                known[node] = known[joined_call.args[0]]
            else:
                known[node] = graph.create_node("call_function", joined_call.function)
                known[node].args = fx.map_arg(joined_call.args, known.__getitem__)
                known[node].meta = dict(node.meta)
        return part.in_graph(graph, known)

    def may_write(self, node: fx.Node) -> bool:
        """Whether a step is a collective that may write its sum into its operand."""
        return node in self.taking and dtype_of(node.all_input_nodes[0]) in FLOATS

    def takes(self, node: fx.Node) -> bool:
        """Whether a step is a collective of a new value that no other step reads."""
        if not node.meta.get("waits") or not is_collective(node):
            return False
        (x,) = node.all_input_nodes
        inner = self.within.get(owner(x), ())
        later = len(self.place)
        before = {value for value in inner if self.place.get(value, later) < self.place[node]}  # views, and writes
        return (
            owner(x) in self.place
            and is_aten(owner(x))
            and x.meta.get("strides") is None
            and self.ends.isdisjoint(inner)
            and all(user is node or user in before for value in inner for user in value.users)
        )

    def unmoved(self, node: fx.Node) -> Joined | None:
        """The operand of a collective over one rank that returns a copy. Other kernels give some ranks zeros."""
        if node not in self.taking or communicates(call := node.meta["call"]) or not moves(call.pair.kernel):
            return None
        is_copy = call.mesh.transport == "process_group" and call.pair.kernel in _COPIES and call.options.sizes is None
        is_same = is_copy and _is_alike(node.all_input_nodes[0], node)
        return Joined(_itself, (node.args[0],), node) if is_same or self.is_sum(node) else None

    def is_sum(self, node: fx.Node) -> bool:
        """Whether a step is a sum over ranks that may be written into its operand."""
        return self.may_write(node) and node.meta["call"].writer() is not None

    def values(self) -> dict[fx.Node, Any]:
        """The values of steps that need not run again."""
        values_of: dict[fx.Node, Any] = {}
        if not (once := made_once(self.given.steps, self.ends)):
            return values_of
        with torch.inference_mode(False), torch.no_grad(), without_autocast(), DisableTorchFunction():
            for node in once:
                if values_of.keys() >= set(node.all_input_nodes):
                    args, kwargs = fx.map_arg((node.args, node.kwargs), values_of.__getitem__)
                    value = node.target(*args, **kwargs)  # type: ignore[operator]
                    if type(value) is Tensor:  # and no fake one, in a mode of the user
                        values_of[node] = value
        return values_of

    def joined(self, values: dict[fx.Node, Any]) -> tuple[dict[fx.Node, Joined], set[fx.Node]]:
        """By the last of some steps, the call in their place; and the steps that nobody needs any longer."""
        calls, unused, left = dict[fx.Node, Joined](), set[fx.Node](), Counter(self.uses)
        for node in reversed(self.place):
            if node in values:
                continue
            if self.uses[node] and not left[node]:
                unused.add(node)
                left.subtract(node.all_input_nodes)
            elif (call := self.unmoved(node) or next(self.calls(node), None) or self.view(node)) is not None:
                calls[node] = call
                left.subtract(node.all_input_nodes)
                left.update(x for x in call.args if isinstance(x, fx.Node))
        return calls, unused

    def calls(self, node: fx.Node) -> Iterator[Joined]:
        """Calls that may stand in the place of a step and those before it that it alone needs.

        Where autograd follows values, some functions run other steps than where it does not. A value whose shape
        changes in place has another one at a later step.
        """
        matches = _MATCHES.get(node.target, ())
        if matches and not self.reshapes and (self.given.infers or node.target in _VIEWS) and is_of_one_rank(node):
            for match in matches:
                joined = match(self, node)
                if joined is not None and self.is_call(joined, node) and not self.is_interrupted(joined.first, node):
                    yield joined

    def view(self, node: fx.Node) -> Joined | None:
        """One call in the place of a view of views."""
        views, x = list[fx.Node](), node
        while x in self.place and owner(x) is not x and is_link(x) and (x is node or next(self.calls(x), None) is None):
            views.append(x)
            x = x.all_input_nodes[0]
        if len(views) < 2 or self.reshapes or (view := one_view(views[::-1])) is None:
            return None
        return Joined(view, (x,), node)

    def is_call(self, joined: Joined, node: fx.Node) -> bool:
        """Whether a call runs the very steps in whose place it shall stand, if any."""
        return joined.function is _itself or runs(joined.function, joined.args, node)

    def is_interrupted(self, first: fx.Node, last: fx.Node) -> bool:
        """Whether a step between two steps does more than compute a value, or write into one that lies between."""
        span = range(self.place[first], self.place[last])
        return any(
            self.given.steps[i].meta.get("effect")
            or any(self.place.get(owner(x), -1) not in span for x in self.writes[i])
            for i in span
        )

    def only(self, x: Any, *targets: Any) -> tuple[Any, ...] | None:
        """The arguments of a step of this part, if it has one of these targets, and one use."""
        return self.of(x, *targets) if isinstance(x, fx.Node) and self.uses[x] == 1 else None

    def of(self, x: Any, *targets: Any) -> tuple[Any, ...] | None:
        """The arguments of a step of this part, if it has one of these targets."""
        fits = isinstance(x, fx.Node) and x in self.place and x.target in targets and not x.kwargs
        return tuple(x.args) if fits else None


def _itself(x: Any) -> Any:
    """The function of a step that changes nothing."""
    return x


def _unchanged(steps: _Shorter, node: fx.Node) -> Joined | None:
    """A view of the shape that its operand has. Records may be wrong about strides of dims of size 1 in views."""
    x = node.args[0]
    if node in steps.ends or not isinstance(x, fx.Node) or not _is_alike(x, node) or 1 in shape_of(x):
        return None
    return Joined(_itself, (x,), node)


def _is_alike(x: fx.Node, y: fx.Node) -> bool:
    return all(x.meta.get(fact) == y.meta.get(fact) for fact in ("value", "strides", "frame")) and "value" in x.meta


def _matmul(steps: _Shorter, node: fx.Node) -> Joined | None:
    """``matmul(x, w)`` for ``_unsafe_view(mm(view(x), w))``, and ``linear(x, v)`` if ``w`` is ``t(v)``."""
    product: Any = node.args[0]
    rows, w = steps.only(product, aten.mm.default) or (None, None)
    (x, _) = steps.of(rows, aten.view.default) or (None, None)
    (v,) = steps.of(w, aten.t.default) or (None,)
    return Joined(torch.matmul, (x, w), product) if v is None else Joined(F.linear, (x, v), product)


def _linear(steps: _Shorter, node: fx.Node) -> Joined | None:
    """``linear(x, v, b)`` for ``view(addmm(b, view(x), t(v)))``."""
    product: Any = node.args[0]
    b, rows, w = steps.only(product, aten.addmm.default) or (None, None, None)
    (x, _), (v,) = steps.of(rows, aten.view.default) or (None, None), steps.of(w, aten.t.default) or (None,)
    return Joined(F.linear, (x, v, b), product)


def _batched(steps: _Shorter, node: fx.Node) -> Joined | None:
    """``matmul(x, w)`` for ``_unsafe_view(bmm(x, expand(w)))``, which torch runs where ``x`` has unusual strides."""
    product: Any = node.args[0]
    a, b = steps.only(product, aten.bmm.default) or (None, None)
    return Joined(torch.matmul, (_below(steps, a), _below(steps, b)), product)


def _below(steps: _Shorter, x: Any) -> fx.Node | None:
    """The value of which the operand of a batched product is an expanded view."""
    (expanded, _) = steps.of(x, aten.view.default) or (None, None)
    below: fx.Node | None = (steps.of(expanded, aten.expand.default) or (None,))[0]
    return below


def _rms_norm(steps: _Shorter, node: fx.Node) -> Joined | None:
    """``rms_norm(x, shape, w, eps)`` for its six steps, which it runs on CPUs."""
    normed, w = node.args
    x, root = steps.only(normed, aten.mul.Tensor) or (None, None)
    (sums,) = steps.only(root, aten.rsqrt.default) or (None,)
    mean, eps, *_ = steps.only(sums, aten.add_.Scalar, aten.add.Scalar, aten.add_.Tensor) or (None, None)
    square, *_ = steps.only(mean, aten.mean.dim) or (None,)
    if not isinstance(x, fx.Node) or not isinstance(w, fx.Node) or not isinstance(square, fx.Node):
        return None
    if dtype_of(x) != dtype_of(w):  # torch would warn
        return None
    return Joined(torch.rms_norm, (x, shape_of(w), w, eps), square)


_VIEWS: Final = (aten.view.default, aten.expand.default)
_Match = Callable[[_Shorter, fx.Node], Joined | None]
#: by the last of some steps, what may stand in their place
_MATCHES: Final[dict[Any, Sequence[_Match]]] = {
    aten_unsafe_view: (_matmul, _batched, _unchanged),
    aten.view.default: (_linear, _unchanged),
    aten.expand.default: (_unchanged,),
    aten.mul.Tensor: (_rms_norm,),
}


class EmptyTensor(NamedTuple):
    """An operand without values. ``strides``: None if it is contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None
    device: torch.device

    def empty(self) -> Tensor:
        """A tensor of this kind."""
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


class _OperandAt(NamedTuple):
    """The operand at a place of a call."""

    place: int


class _AtenStep(NamedTuple):
    """A step. Its arguments hold an `_OperandAt` or a `_AtenStep` for each tensor."""

    target: Any
    args: Any
    kwargs: Any


def runs(function: Callable[..., Any], args: tuple[Any, ...], last: fx.Node) -> bool:
    """Whether ``last`` is the result of the steps that torch runs for a call below autograd, on these very nodes."""
    kinds = [_kind(x) if isinstance(x, fx.Node) else x for x in args]
    return None not in kinds and _equal(_shown(function, *kinds), last, args)


def _kind(node: fx.Node) -> EmptyTensor | None:
    value, device = node.meta.get("value"), device_of(node)
    if value is None or device is None:
        return None
    return EmptyTensor(value.shape, value.dtype, node.meta.get("strides"), device)


def _equal(expected: Any, actual: Any, operands: tuple[Any, ...]) -> bool:
    """Whether an argument of a step of torch is that of a step of a program."""
    if isinstance(expected, _OperandAt):
        return actual is operands[expected.place]
    if isinstance(expected, _AtenStep):
        return (
            isinstance(actual, fx.Node)
            and actual.target is expected.target
            and _equal(expected.args, tuple(actual.args), operands)
            and _equal([*expected.kwargs.items()], [*actual.kwargs.items()], operands)
        )
    if isinstance(expected, (list, tuple)):
        return (
            isinstance(actual, (list, tuple))
            and len(expected) == len(actual)
            and all(_equal(x, y, operands) for x, y in zip(expected, actual, strict=True))
        )
    return type(expected) is type(actual) and bool(expected == actual)


@cached
def _shown(function: Callable[..., Any], *args: Any) -> Any:
    """The steps of a call; None where torch refuses it. Each `EmptyTensor` stands for an operand."""
    with unseen(), torch.no_grad(), without_autocast(), CachingFakeMode():
        tensors = [x.empty() if isinstance(x, EmptyTensor) else x for x in args]
        seen = _StepsSeen(tensors)
        try:
            with seen:
                result = function(*tensors)
        except (RuntimeError, TypeError, ValueError):
            return None
    return seen.told(result)


class _StepsSeen(DispatchMode):
    """Sees the steps that make each tensor."""

    def __init__(self, operands: list[Any]) -> None:
        super().__init__()
        self.kept: list[Any] = [*operands]  # so that no id is given anew
        self.made: dict[int, Any] = {id(x): _OperandAt(i) for i, x in enumerate(operands) if isinstance(x, Tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = _AtenStep(func, self.told(args), self.told(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):  # a function of several results is none that is looked for
            self.kept.append(out)
            self.made[id(out)] = call
        return out

    def told(self, value: Any) -> Any:
        """A value with the step that made it for each tensor; None for a tensor that no step has made."""
        if isinstance(value, Tensor):
            return self.made.get(id(value))
        if isinstance(value, dict):
            return {name: self.told(entry) for name, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [*map(self.told, value)]
        return value
