"""The op graph of a function of global tensors: it runs once, on values of global shape without data.

A value is known by the memory of its stand-in, a meta tensor; so what autodiff detaches is the value itself, and
zeros like it are a gradient, which lies as it does. Where gradients have gradients the function runs once more, with
the graph that autograd makes of it (`move_counts.py`); gradients are then what comes back to a value.
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
from fspmd.global_view.calls import Calls, operands_of
from fspmd.global_view.interceptors import intercept_dispatch
from fspmd.global_view.operands import places_of, tensors_of
from fspmd.global_view.propagate import Question
from fspmd.global_view.refusals import shown
from fspmd.global_view.result_types import joined, on_meta
from fspmd.global_view.unruled import gathered
from fspmd.layout_search.move_counts import Counting, Trips
from fspmd.meshes.mesh import Mesh
from fspmd.pairs import Call, StandIn, is_watched, watch_with
from fspmd.placement.reshard import with_reshard_as
from fspmd.rules import ENGINE, Factors, Row, writes
from fspmd.rules.elementwise import elementwise
from fspmd.sharded import Sharded, is_plain
from fspmd.spec import P, TensorSpec, is_float
from fspmd.torch_internals import DisableTorchFunction, aten_number, transforms_active
from fspmd.tracing import DispatchMode, RecomputeContext, recomputed_in
from fspmd.transport import Pending
from fspmd.transport.local_tensor import is_simulated


@dataclass(frozen=True, slots=True)
class Op:
    """One call: what its rule asks, the numbers of the values it reads and makes, and which operands have gradients.

    Without a question its operands are whole; or the one operand is ``pinned``, moved to a layout; or it is ``carried``
    to the layout of what the op seems to make, an argument: that of the next call.
    """

    name: str
    question: Question | None
    operands: tuple[int, ...]
    results: tuple[int, ...]
    followed: frozenset[int]
    pinned: P | None = None
    carried: bool = False
    trips: tuple[Trips, ...] = ()  # of each operand, where gradients have gradients


@dataclass(slots=True)
class OpGraph:
    """Values by number, as specs of whole tensors; the ops in order; which values are what."""

    mesh: Mesh
    values: list[TensorSpec] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)  # the tensors among the arguments
    outputs: list[int] = field(default_factory=list)
    results: list[str] = field(default_factory=list)  # the key path of each output
    constants: set[int] = field(default_factory=set)  # that are whole on every rank
    gradients: list[tuple[int, int]] = field(default_factory=list)  # and of what; they lie as that does
    written: list[tuple[int, int]] = field(default_factory=list)  # results that are an operand, and which
    followed: set[int] = field(default_factory=set)  # leaves that will have a gradient
    sums: dict[tuple[int, int], int] = field(default_factory=dict)  # by value and copy how often gradients come


class Recorder(DispatchMode):
    """Puts calls on stand-ins down in an `OpGraph`; the dispatch mode sees what autodiff does below them."""

    def __init__(self, mesh: Mesh, name: str, counts: bool = False) -> None:
        super().__init__()
        self.nested = False  # some gradients have gradients
        self._counting = Counting(mesh, self._arrived) if counts else None
        self._gradients: dict[int, int] = {}  # that nobody has read, by memory, and of what
        self.graph = OpGraph(mesh)
        self.name = name
        self._numbers: dict[int, int] = {}  # by memory
        self._moved: dict[tuple[int, P], int] = {}
        self._kept: list[Tensor] = []  # so that memory is not used again
        self._calls = Calls(mesh)

    # --- values -------------------------------------------------------------------------------------------------------

    def value(
        self, shape: Sequence[int], dtype: torch.dtype, followed: bool = False, local: Tensor | None = None
    ) -> Sharded:
        """A new value, whole as far as the function can see."""
        spec = TensorSpec(self.graph.mesh, P(), shape, dtype)
        if local is None:
            local = torch.empty(spec.shape, dtype=dtype, device="meta").requires_grad_(followed)
        self._numbers[_memory(local)] = len(self.graph.values)
        self._kept.append(local)
        self.graph.values.append(spec)
        return Sharded(local, spec)

    def number(self, x: Sharded | Tensor) -> int:
        """Of a value; what nobody recorded is whole on every rank."""
        local = x.local if isinstance(x, Sharded) else x
        laid = isinstance(x, Sharded) and bool(x.spec.partition.mentioned)
        if self._gradients and (of := self._gradients.pop(_memory(local), None)) is not None:
            self._lies_as(local, of)
        found = self._numbers.get(_memory(local)) if type(local) is Tensor else None
        if found is not None and self.graph.values[found].shape != tuple(x.shape):
            raise self._in_body("a function")
        if found is None:
            found = self.number(self.value(x.shape, x.dtype))
            self.graph.constants.add(found)
            if not laid:
                self._numbers[_memory(local)] = found
                self._kept.append(local)
        return self._pin(found, x, x.spec.partition) if isinstance(x, Sharded) and laid else found

    def _pin(self, number: int, x: Sharded, partition: P) -> int:
        """The value where the function itself says how it lies."""
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

    def told(self, x: Sharded, target: TensorSpec) -> Sharded:
        """The function itself says how a value lies."""
        if target.mesh != self.graph.mesh:
            raise RecordError(f"auto_spec cannot record a move of {x!r} to {target.mesh!r}; it solves for one mesh")
        if self._counting is not None and self._counting.again:
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
        if func is aten_number and _memory(args[0]) in self._numbers:
            raise RecordError(f"auto_spec cannot record {self.name}: on values without data it asks what one is")
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.zeros_like.default and _memory(args[0]) in self._numbers:
            self.nested |= DEPTH.value > 1
            self._lies_as(out, self._numbers[_memory(args[0])])
        elif self._gradients and func is torch.ops.aten.add.Tensor:
            of = {self._gradients.get(_memory(x), -1) for x in args if is_plain(x)}
            if len(of) == 1 and -1 not in of:
                self._arrived(out, *of)
        return out

    def _lies_as(self, gradient: Tensor, of: int) -> None:
        """A gradient is a value that lies as another."""
        own = self._numbers[_memory(gradient)] = len(self.graph.values)
        self._kept.append(gradient)
        self.graph.values.append(self.graph.values[of])
        self.graph.gradients.append((own, of))

    def _arrived(self, gradient: Tensor, of: int) -> None:
        """It is a value once somebody reads it."""
        self._gradients[_memory(gradient)] = of
        self._kept.append(gradient)

    def watched(self, x: Any, call: Call) -> Call:
        """A move of a stand-in moves nothing."""
        if type(x) is not Tensor or _memory(x) not in self._numbers:
            return call
        if state.body is not None:
            raise self._in_body(state.body.name)
        return _Still(call, self)

    def recompute_context(self) -> RecomputeContext:
        """What `checkpoint` computes again is no other op."""
        return nullcontext if self._counting is None else self._counting.repeating

    # --- calls --------------------------------------------------------------------------------------------------------

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """In place of the one that runs calls."""
        if transforms_active():
            raise RecordError(f"auto_spec cannot record {shown(func)} under vmap or jvp; give it the function within")
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
                    f"auto_spec cannot record {shown(func)}: no graph leads through values that stand for others; "
                    "write fspmd.grad, value_and_grad or vjp of a function"
                ) from error
        if self._counting is not None and self._counting.again:
            return self._counting.repeated(func, args, kwargs)
        if asked.gathers:
            return self._gathered(func, args, kwargs)
        if asked.question is None:
            return self._like(func, args, kwargs)
        return self._row(func, asked.question, args, kwargs)

    def _row(self, func: Any, question: Question, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One op; a write gives its operand."""
        operands = operands_of(question, args, kwargs)
        numbers = tuple(map(self.number, operands))
        following = torch.is_grad_enabled()
        followed = frozenset(i for i, x in enumerate(operands) if following and x.requires_grad)
        if self._counting is None or not followed:
            made = [
                self.value(one.shape, one.dtype, bool(followed) and is_float(one.dtype)) for one in question.results
            ]
        else:
            locals_ = self._counting.results(func, question, args, kwargs, numbers, len(self.graph.ops))
            rows = zip(question.results, locals_, strict=True)
            made = [self.value(one.shape, one.dtype, local=local) for one, local in rows]
        results = tuple(map(self.number, made))
        self.graph.ops.append(Op(shown(func), question, numbers, results, followed))
        if question.fixed:
            self.graph.written.append((results[0], numbers[0]))
            return args[0]
        return joined(question.kind, made)

    def _like(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A draw, or new values: elements of the place of an operand's."""
        if writes(func):
            return args[0]
        operands = places_of(args, kwargs, self.graph.mesh)
        outcome = on_meta(func, args, kwargs, operands)
        if outcome is None:
            raise RecordError(f"auto_spec cannot record {shown(func)}: what it gives depends on values")
        place, first = operands[0]
        if any(shape != first.shape for shape, _ in outcome.results):  # of another shape it is whole
            made = [self.value(shape, dtype) for shape, dtype in outcome.results]
            self.graph.constants.update(map(self.number, made))
            return joined(outcome.kind, made)
        dims = tuple(range(first.ndim))
        results = [TensorSpec(first.mesh, P(), shape, dtype) for shape, dtype in outcome.results]
        factors = Factors((dims,), (dims,) * len(results))
        question = Question(
            Row(elementwise), [(place, first)], results, outcome.kind, factors, "", False, False, (), None
        )
        return self._row(func, question, args, kwargs)

    def count(self) -> None:
        """The trips that were made."""
        if self._counting is not None:
            for i, op in enumerate(self.graph.ops):
                trips = tuple([self._counting.of_operand(i, k) for k in range(len(op.operands))])
                self.graph.ops[i] = replace(op, trips=trips)
            self.graph.sums = self._counting.of_values()

    def _gathered(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call on whole operands."""
        numbers = tuple(self.number(x) for x in tensors_of(args, kwargs))
        try:
            out: Any = gathered(func, args, kwargs)
        except ArgumentError as error:
            raise RecordError(
                f"auto_spec cannot record {shown(func)}: what it gives, or its shape, depends on values; leave it out "
                "of the function"
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
    """Run ``f`` once; ``leaves`` are its arguments, of which tensors, `Sharded` and `TensorSpec` become stand-ins.

    Raises:
        RecordError: ``f`` does what cannot be done on values without data.
    """
    by = _recorded(f, mesh, leaves, treedef, False)
    return (_recorded(f, mesh, leaves, treedef, True) if by.nested else by).graph


def _recorded(f: Callable[..., Any], mesh: Mesh, leaves: Sequence[Any], treedef: Any, counts: bool) -> Recorder:
    name = getattr(f, "__name__", type(f).__name__)
    by = Recorder(mesh, name, counts)
    given = [by.value(x.shape, x.dtype, _is_followed(x)) if is_value(x) else x for x in leaves]
    by.graph.leaves = [by.number(x) for x in given if isinstance(x, Sharded)]
    pairs = zip(by.graph.leaves, filter(is_value, leaves), strict=True)
    by.graph.followed = {number for number, x in pairs if _is_followed(x)}
    if is_watched():
        raise RecordError("auto_spec cannot record while explicit() or communication_log() watches; call it outside")
    watch_with(by.watched)
    try:
        with (
            by,
            intercept_dispatch(lambda _: by.dispatch),
            with_reshard_as(by.told),
            recomputed_in(by.recompute_context),
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
    paths, found, _ = optree.tree_flatten_with_path(out)
    by.graph.outputs = [by.number(x) for x in found if isinstance(x, Sharded)]
    named = zip(paths, found, strict=True)
    by.graph.results = [".".join(map(str, path)) for path, x in named if isinstance(x, Sharded)]
    by.count()
    return by


def is_value(x: Any) -> bool:
    """Whether an argument is a tensor, or stands for one."""
    return isinstance(x, (Tensor, TensorSpec))


def _is_followed(x: Any) -> bool:
    return not isinstance(x, TensorSpec) and bool(x.requires_grad)


def _without_data(args: Any, kwargs: Any) -> Any:
    """Arguments whose plain tensors are on the device that stand-ins are on."""
    if all(isinstance(x, Sharded) or x.is_meta for x in tensors_of(args, kwargs)):
        return args, kwargs

    def moved(x: Any) -> Any:
        return x.to("meta") if is_plain(x) else x

    return optree.tree_map(moved, (args, kwargs), none_is_leaf=True)


def _memory(x: Tensor) -> int:
    with DisableTorchFunction():
        return id(x) if is_simulated(x) else int(x.untyped_storage()._cdata)


class _Still(StandIn):
    """A collective of a stand-in, which is whole whatever the function calls its layout."""

    __slots__ = ()

    def start(self, x: Tensor) -> Pending:
        return Pending(self.run(x))

    def run(self, x: Tensor) -> Tensor:
        return x.view_as(x)
