"""The op graph of a function of global tensors: the function runs once, on values of global shape without data.

A value is identified by the memory of its stand-in, a meta tensor. So a tensor that autodiff detaches is the same
value, and zeros like a value are its gradient, which has its layout. Where gradients have gradients, the function runs
a second time with the graph that autograd makes (`move_counts.py`). Gradients are then the tensors that come back to a
value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.autodiff.leaves import DEPTH
from fspmd.body import state
from fspmd.errors import ArgumentError, FspmdError, RecordError
from fspmd.global_view.composed import Calls, operands_of
from fspmd.global_view.interceptors import intercept_dispatch
from fspmd.global_view.kernels import GlobalCall
from fspmd.global_view.question import Question, places_of, tensors_of
from fspmd.global_view.refusals import shown
from fspmd.global_view.result_types import joined, on_meta
from fspmd.global_view.unruled import gathered
from fspmd.layout_search.move_counts import Counting, MoveCounts
from fspmd.meshes.mesh import Mesh
from fspmd.ops.schemas import facts_of
from fspmd.ops.traits import writes
from fspmd.pairs import Call, StandIn, is_watched, watch_with
from fspmd.placement.reshard import with_reshard_as
from fspmd.rules import ENGINE, Factors, Row
from fspmd.rules.factors import elementwise
from fspmd.sharded import Sharded, is_plain
from fspmd.spec import P, TensorSpec, is_float
from fspmd.torch_internals import DisableTorchFunction, address_of, transforms_active
from fspmd.tracing import DispatchMode, RecomputeContext, recomputed_in
from fspmd.transport import Pending
from fspmd.transport.local_tensor import is_simulated


@dataclass(frozen=True, slots=True)
class Op:
    """A call in an op graph.

    An op without a question has replicated operands, unless it is ``pinned`` or ``carried``.

    Attributes:
        name: the name of the function.
        question: the question that the call asks of its rule.
        operands: the numbers of the values that it reads.
        results: the numbers of the values that it makes.
        followed: the places of operands that have gradients.
        pinned: the partition to which the op moves its operand.
        carried: whether the op moves its operand, a result, to the layout of an argument of the next call. Its
            ``results`` have this argument.
        counts: the numbers of moves of each operand, where gradients have gradients.
    """

    name: str
    question: Question | None
    operands: tuple[int, ...]
    results: tuple[int, ...]
    followed: frozenset[int]
    pinned: P | None = None
    carried: bool = False
    counts: tuple[MoveCounts, ...] = ()


@dataclass(slots=True)
class OpGraph:
    """The ops of a function in order, and its values by number."""

    mesh: Mesh
    values: list[TensorSpec] = field(default_factory=list)  # the specs of global tensors
    ops: list[Op] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)  # the tensors among the arguments
    outputs: list[int] = field(default_factory=list)  # the tensors among the results
    results: list[str] = field(default_factory=list)  # the key path of each output
    constants: set[int] = field(default_factory=set)  # values that are replicated on every rank
    gradients: list[tuple[int, int]] = field(default_factory=list)  # gradients, and the values with their layouts
    written: list[tuple[int, int]] = field(default_factory=list)  # results of writes, and the operands written into
    followed: set[int] = field(default_factory=set)  # leaves that will have a gradient
    sums: dict[tuple[int, int], int] = field(default_factory=dict)  # by value and copy, how often gradients come back


class Recorder(DispatchMode):
    """Records calls on stand-ins in an `OpGraph`. As a dispatch mode it sees the calls of autodiff below them."""

    def __init__(self, mesh: Mesh, name: str, counts: bool = False) -> None:
        super().__init__()
        self.nested = False  # whether some gradients have gradients
        self._counting = Counting(mesh, self._arrived) if counts else None
        self._gradients: dict[int, int] = {}  # gradients that no op has read: their values, by memory
        self.graph = OpGraph(mesh)
        self.name = name
        self._numbers: dict[int, int] = {}  # numbers of values, by memory
        self._moved: dict[tuple[int, P], int] = {}  # pinned values, by value and partition
        self._kept: list[Tensor] = []  # tensors that must live, so that memory identifies values
        self._calls = Calls(mesh)

    # --- values -------------------------------------------------------------------------------------------------------

    def value(
        self, shape: Sequence[int], dtype: torch.dtype, followed: bool = False, local: Tensor | None = None
    ) -> Sharded:
        """A new value. The function sees it as replicated."""
        spec = TensorSpec(self.graph.mesh, P(), shape, dtype)
        if local is None:
            local = torch.empty(spec.shape, dtype=dtype, device="meta").requires_grad_(followed)
        self._numbers[_memory(local)] = len(self.graph.values)
        self._kept.append(local)
        self.graph.values.append(spec)
        return Sharded(local, spec)

    def number(self, x: Sharded | Tensor) -> int:
        """The number of a value. A tensor that no op made is a constant, replicated on every rank."""
        local = x.local if isinstance(x, Sharded) else x
        has_layout = isinstance(x, Sharded) and bool(x.spec.partition.mentioned)
        if self._gradients and (source := self._gradients.pop(_memory(local), None)) is not None:
            self._add_gradient(local, source)
        number = self._numbers.get(_memory(local)) if type(local) is Tensor else None
        if number is not None and self.graph.values[number].shape != tuple(x.shape):
            raise self._in_body("a function")
        if number is None:
            number = self.number(self.value(x.shape, x.dtype))
            self.graph.constants.add(number)
            if not has_layout:
                self._numbers[_memory(local)] = number
                self._kept.append(local)
        return self._pin(number, x, x.spec.partition) if isinstance(x, Sharded) and has_layout else number

    def _pin(self, number: int, x: Sharded, partition: P) -> int:
        """The number of a value in the layout that the function itself gives it."""
        if (number, partition) not in self._moved:
            followed = frozenset((0,) if x.requires_grad and torch.is_grad_enabled() else ())
            moved = self.number(self.value(x.shape, x.dtype))
            self.graph.ops.append(Op("with_spec", None, (number,), (moved,), followed, partition))
            self._moved[number, partition] = moved
        return self._moved[number, partition]

    def _in_body(self, name: str) -> RecordError:
        return RecordError(
            f"auto_spec cannot record {name} run by shard_map: its layouts are written already; leave it out of the "
            "function"
        )

    def reshard(self, x: Sharded, target: TensorSpec) -> Sharded:
        """Record a `reshard` of the function, which pins a value to a layout."""
        if target.mesh != self.graph.mesh:
            raise RecordError(
                f"auto_spec cannot record a move of {x!r} to {target.mesh!r}; leave moves to another mesh out of the "
                "function"
            )
        if self._counting is not None and self._counting.repeats:
            return x
        number, follows = self.number(x), x.requires_grad and torch.is_grad_enabled()
        local = None if self._counting is None else self._counting.read(x, number, len(self.graph.ops), 0).clone()
        moved = self.value(x.shape, x.dtype, follows, local)
        followed = frozenset((0,) if follows else ())
        self.graph.ops.append(Op("with_spec", None, (number,), (self.number(moved),), followed, target.partition))
        return moved

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if state.body is not None and any(_memory(x) in self._numbers for x in tensors_of(args, kwargs or {})):
            raise self._in_body(state.body.name)
        if facts_of(func).gives_values and _memory(args[0]) in self._numbers:
            raise RecordError(
                f"auto_spec cannot record {self.name}: it reads a value, and auto_spec runs it on values without data; "
                "write torch.where instead of a branch on a value"
            )
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default and _memory(args[0]) in self._numbers:  # the same value
            self._numbers[_memory(out)] = self._numbers[_memory(args[0])]
            self._kept.append(out)
        elif func is torch.ops.aten.zeros_like.default and _memory(args[0]) in self._numbers:
            self.nested |= DEPTH.value > 1
            self._add_gradient(out, self._numbers[_memory(args[0])])
        elif self._gradients and func is torch.ops.aten.add.Tensor:
            sources = {self._gradients.get(_memory(x), -1) for x in args if is_plain(x)}
            if len(sources) == 1 and -1 not in sources:
                self._arrived(out, *sources)
        return out

    def _add_gradient(self, gradient: Tensor, source: int) -> None:
        """Add a value: the gradient of ``source``, which has the layout of ``source``."""
        number = self._numbers[_memory(gradient)] = len(self.graph.values)
        self._kept.append(gradient)
        self.graph.values.append(self.graph.values[source])
        self.graph.gradients.append((number, source))

    def _arrived(self, gradient: Tensor, source: int) -> None:
        """Note a gradient of ``source``. It becomes a value when an op reads it."""
        self._gradients[_memory(gradient)] = source
        self._kept.append(gradient)

    def watched(self, x: Any, call: Call) -> Call:
        """The call to run. A collective of a stand-in moves nothing."""
        if type(x) is not Tensor or _memory(x) not in self._numbers:
            return call
        if state.body is not None:
            raise self._in_body(state.body.name)
        return _NoMove(call, self)

    def recompute_context(self) -> RecomputeContext:
        """The context of calls that `checkpoint` repeats. They are no further ops."""
        return nullcontext if self._counting is None else self._counting.repeating

    # --- calls --------------------------------------------------------------------------------------------------------

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Record a call, in place of the dispatch that runs it."""
        if transforms_active():
            raise RecordError(f"auto_spec cannot record {shown(func)} under vmap or jvp; pass the function within")
        kwargs = kwargs or {}
        if any(map(is_simulated, tensors_of(args, kwargs))):
            raise RecordError(f"{shown(func)} got the blocks of all simulated ranks; pass the Sharded itself")
        asked = self._calls.ask(func, args, kwargs)
        if asked.run is not None:
            try:
                return asked.run(*_without_data(args, kwargs))
            except RuntimeError as error:
                if func not in ENGINE:
                    raise
                raise RecordError(
                    f"auto_spec cannot record {shown(func)}: no graph of autograd leads through values without data; "
                    "write fspmd.grad, value_and_grad or vjp of a function"
                ) from error
        if self._counting is not None and self._counting.repeats:
            return self._counting.repeated(func, args, kwargs)
        if asked.gathers:
            return self._gathered(func, args, kwargs)
        if asked.question is None:
            return self._like(func, args, kwargs)
        return self._row(func, asked.question, args, kwargs)

    def _row(self, func: Any, question: Question, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an op with a rule. A write returns its operand."""
        operands = operands_of(question, args, kwargs)
        numbers = tuple(map(self.number, operands))
        following = torch.is_grad_enabled()
        followed = frozenset(i for i, x in enumerate(operands) if following and x.requires_grad)
        if self._counting is None or not followed:
            values = [
                self.value(spec.shape, spec.dtype, bool(followed) and is_float(spec.dtype)) for spec in question.results
            ]
        else:
            locals_ = self._counting.results(func, question, args, kwargs, numbers, len(self.graph.ops))
            rows = zip(question.results, locals_, strict=True)
            values = [self.value(spec.shape, spec.dtype, local=local) for spec, local in rows]
        results = tuple(map(self.number, values))
        self.graph.ops.append(Op(shown(func), question, numbers, results, followed))
        if question.fixed:
            self.graph.written.append((results[0], numbers[0]))
            return args[0]
        return joined(question.kind, values)

    def _like(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a draw, or new values. If results have the shape of an operand, they are elementwise in it."""
        if writes(func):
            return args[0]
        operands = places_of(args, kwargs, self.graph.mesh)
        outcome = on_meta(GlobalCall(func, args, kwargs, operands))
        if outcome is None:
            raise RecordError(
                f"auto_spec cannot record {shown(func)}: its result depends on values; leave it out of the function"
            )
        place, first = operands[0]
        if any(shape != first.shape for shape, _ in outcome.results):  # replicated
            values = [self.value(shape, dtype) for shape, dtype in outcome.results]
            self.graph.constants.update(map(self.number, values))
            return joined(outcome.kind, values)
        dims = tuple(range(first.ndim))
        results = [TensorSpec(first.mesh, P(), shape, dtype) for shape, dtype in outcome.results]
        factors = Factors((dims,), (dims,) * len(results))
        names = tuple(kwargs)
        question = Question(
            func, Row(elementwise), len(args), names, [place], [first], results, outcome.kind, factors, ""
        )
        return self._row(func, question, args, kwargs)

    def count(self) -> None:
        """Note the numbers of moves of all operands."""
        if self._counting is not None:
            for i, op in enumerate(self.graph.ops):
                counts = tuple([self._counting.of_operand(i, k) for k in range(len(op.operands))])
                self.graph.ops[i] = replace(op, counts=counts)
            self.graph.sums = self._counting.of_values()

    def _gathered(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call whose operands are gathered."""
        numbers = tuple(self.number(x) for x in tensors_of(args, kwargs))
        try:
            out: Any = gathered(func, args, kwargs)
        except ArgumentError as error:
            raise RecordError(
                f"auto_spec cannot record {shown(func)}: its result, or the shape of it, depends on values; leave it "
                "out of the function"
            ) from error
        values = [x for x in optree.tree_leaves(out) if isinstance(x, Sharded)]
        for x in values:
            self._numbers[_memory(x.local)] = len(self.graph.values)
            self._kept.append(x.local)
            self.graph.values.append(x.spec)
        results = tuple(map(self.number, values))
        self.graph.ops.append(Op(shown(func), None, numbers, results, frozenset()))
        return out


def record(f: Callable[..., Any], mesh: Mesh, leaves: Sequence[Any], treedef: Any) -> OpGraph:
    """The op graph of ``f``, which runs once, or twice where gradients have gradients.

    Args:
        f: the function.
        mesh: the mesh.
        leaves: the leaves of its arguments. Tensors, `Sharded` and `TensorSpec` become stand-ins.
        treedef: the tree of its arguments.

    Raises:
        RecordError: ``f`` does something that is impossible on values without data.
    """
    recorder = _recorded(f, mesh, leaves, treedef, False)
    return (_recorded(f, mesh, leaves, treedef, True) if recorder.nested else recorder).graph


def _recorded(f: Callable[..., Any], mesh: Mesh, leaves: Sequence[Any], treedef: Any, counts: bool) -> Recorder:
    """The recorder after a run of ``f``. ``counts``: whether it counts moves."""
    name = getattr(f, "__name__", type(f).__name__)
    recorder = Recorder(mesh, name, counts)
    given = [recorder.value(x.shape, x.dtype, _is_followed(x)) if is_value(x) else x for x in leaves]
    recorder.graph.leaves = [recorder.number(x) for x in given if isinstance(x, Sharded)]
    pairs = zip(recorder.graph.leaves, filter(is_value, leaves), strict=True)
    recorder.graph.followed = {number for number, x in pairs if _is_followed(x)}
    if is_watched():
        raise RecordError("auto_spec cannot run within explicit() or communication_log(); call it outside of them")
    watch_with(recorder.watched)
    try:
        with (
            recorder,
            intercept_dispatch(lambda _: recorder.dispatch),
            with_reshard_as(recorder.reshard),
            recomputed_in(recorder.recompute_context),
        ):
            out = f(*treedef.unflatten(given))
    except FspmdError:
        raise
    except Exception as error:
        raise RecordError(
            f"auto_spec cannot record {name}: on values without data it raised {type(error).__name__}: {error}"
        ) from error
    finally:
        watch_with(None)
    paths, outputs, _ = optree.tree_flatten_with_path(out)
    recorder.graph.outputs = [recorder.number(x) for x in outputs if isinstance(x, Sharded)]
    named = zip(paths, outputs, strict=True)
    recorder.graph.results = [".".join(map(str, path)) for path, x in named if isinstance(x, Sharded)]
    recorder.count()
    return recorder


def is_value(x: Any) -> bool:
    """Whether an argument is a tensor or a `TensorSpec`."""
    return isinstance(x, (Tensor, TensorSpec))


def _is_followed(x: Any) -> bool:
    return not isinstance(x, TensorSpec) and bool(x.requires_grad)


def _without_data(args: Any, kwargs: Any) -> Any:
    """Arguments with plain tensors on the meta device, where stand-ins are."""
    if all(isinstance(x, Sharded) or x.is_meta for x in tensors_of(args, kwargs)):
        return args, kwargs

    def moved(x: Any) -> Any:
        return x.to("meta") if is_plain(x) else x

    return optree.tree_map(moved, (args, kwargs), none_is_leaf=True)


def _memory(x: Tensor) -> int:
    with DisableTorchFunction():
        return id(x) if is_simulated(x) else int(address_of(x.untyped_storage()))


class _NoMove(StandIn):
    """A collective of a stand-in, which always has the global shape."""

    __slots__ = ()

    def start(self, x: Tensor) -> Pending:
        return Pending(self.run(x))

    def run(self, x: Tensor) -> Tensor:
        return x.view_as(x)
