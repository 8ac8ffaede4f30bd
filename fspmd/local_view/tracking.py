"""Types of values in a checked body. A mode sees each torch call, casts the operands to one type, and types results.

An invariant operand beside a varying one is cast to varying; the cast's backward is the all-reduce. A value is cast
once per body, and all its uses share the cast.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.body import Body, state
from fspmd.errors import VarianceError
from fspmd.local_view.empty_blocks import ConnectingMode, call_with_empty_blocks
from fspmd.local_view.indexing import IndexMode, index_by_tensor
from fspmd.local_view.modes import BodyMode, run_in
from fspmd.local_view.type_rules import (
    Borrowed,
    beside_pending,
    call_backward,
    check_known_to_vary,
    check_stays_sum,
    check_writes,
    first_seen,
    parts_by_type,
    pending_sum,
    refuse_branch,
    refuse_shared_draw,
)
from fspmd.local_view.uneven import (
    call_rank_by_rank,
    call_uneven,
    call_with_numbers,
    hold_alike,
    hold_each,
    numbers_frame,
    numbers_to_tensors,
)
from fspmd.ops.traits import OPS, Traits, learn, tensors_in
from fspmd.pairs import Call, apply, call
from fspmd.sharded import Sharded
from fspmd.torch_internals import ENDED, level_of, transforms_active, untyped_storage
from fspmd.transport import known_values
from fspmd.transport.frame import UNEVEN, Frame, frame_over
from fspmd.transport.randomness import draw_seed, one_stream
from fspmd.transport.simulation import draw_per_rank
from fspmd.variance import (
    ATTRIBUTE,
    BORROWED,
    INVARIANT,
    Variance,
    copied,
    get_variance,
    inherited,
    join,
    set_variance,
    show,
    storage_of,
)

_CASTS = (("I", "R", "invariant_to_reduced"), ("I", "V", "invariant_to_varying"), ("R", "V", "reduced_to_varying"))


class Tracker(BodyMode):
    """Types the values of one run of a checked body."""

    types_values = True
    marks_invariant = False  # in a custom Function, results must differ from tensors that no call has given

    def __init__(self, body: Body) -> None:
        self.body = body
        self.simulated = body.simulated
        self.casts: dict[int, tuple[Tensor, int, dict[Variance, Tensor]]] = {}
        self.borrowed: Borrowed = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if types and Sharded in types:
            return func(*args, **(kwargs or {}))  # which refuses it
        op = OPS.get(func) or learn(func)
        if op.asks:
            return func(*args, **kwargs) if kwargs else func(*args)
        if UNEVEN and (self.simulated or self.body.uneven):
            return (self._uneven if self.simulated else self._general)(op, func, args, kwargs or {})
        if op.special or (kwargs and "out" in kwargs):
            return self._general(op, func, args, kwargs or {})
        if op.sometimes is not None and op.sometimes(*args, **(kwargs or {})):
            return self._general(op, func, args, kwargs or {})
        plain = not kwargs or _PLAIN.issuperset(map(type, kwargs.values()))
        result, alike = _joined(args if plain else (*args, *kwargs.values()))
        if result is None or result is INVARIANT:
            return self._invariant(func, args, kwargs or {})
        if result.unreduced:
            return self._general(op, func, args, kwargs or {})
        if not alike:
            args = self.cast_all(args, result)
            if not plain:
                kwargs = dict(zip(kwargs, self.cast_all(kwargs.values(), result), strict=True))
        try:
            out = func(*args, **kwargs) if kwargs else func(*args)
        except VarianceError as error:
            out = self._rank_by_rank(error, op, func, args, kwargs or {})
        is_plain = isinstance(out, Tensor) and not transforms_active()
        if not alike and not (is_plain and out._base is None and id(out) not in map(id, args)):
            out = self._borrowing(out, (*args, *(kwargs or {}).values()), result)
        if is_plain:
            setattr(out, ATTRIBUTE, result)
        else:
            annotate(out, result)
        return out

    def _general(
        self, op: Traits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: Frame | None = None
    ) -> Any:
        """Handles any call. ``numbers`` is the frame of sizes among the arguments that differ from rank to rank."""
        tensors = list(tensors_in(args[1:] if op.constant else args))
        if kwargs:
            tensors.extend(tensors_in(kwargs.values()))
        if op.backward:
            return call_backward(self, op.backward, func, args, kwargs)
        if op.hook:
            return func(args[0], _typed_hook(args[0], args[1], self.body), *args[2:], **kwargs)
        if op.elementwise and (parts := parts_by_type(args)):
            return self._in_parts(op, func, args, kwargs, parts)
        variances = [getattr(x, ATTRIBUTE, None) or first_seen(x) for x in tensors]
        result = INVARIANT if numbers is None else Variance(varying=numbers.axes)
        for variance in variances:
            if variance is not result:
                result = join(result, variance)
        if op.calls and kwargs.get(op.calls) is not None:
            kwargs = {**kwargs, op.calls: self._seen(kwargs[op.calls], op.calls, result)}
        draws = op.draws is not None and op.draws(*args, **kwargs)
        if draws and (shared := self.body.unlike - result.varying):
            refuse_shared_draw(op, shared)
        if result is INVARIANT:
            out = self._invariant(func, args, kwargs)
            if draws and known_values.hear is not None:
                for x in tensors_in((out,)):
                    known_values.hear(self.body.mesh, f"what {op.shown} draws", x)
            return out
        if op.ragged is not None and op.ragged(*args, **kwargs):
            self.body.mark_uneven()
        if op.python_value is not None and result.varying and op.python_value(*args, **kwargs):
            refuse_branch(op, tensors, result)
        if result.unreduced:
            result = pending_sum(func, op, tensors, variances, args, kwargs, trusted=self.body.linear)
        if op.writes or "out" in kwargs:
            check_writes(func, op, args, kwargs, result, self.borrowed)
        alike = all(variance is result for variance in variances)
        if not alike:
            # beside an unreduced operand an invariant one becomes reduced: its gradient is a pending sum
            args = self.cast_all(args, result)
            kwargs = dict(zip(kwargs, self.cast_all(tuple(kwargs.values()), result), strict=True))
        if op.in_copies and self.simulated:
            args, kwargs = hold_alike(args, kwargs)
        if draws and (differing := result.varying - (self.body.mapped - self.body.unlike)):
            out = self._random(func, args, kwargs, self.body.mesh.ordered(differing))
        elif op.indexes:
            out = index_by_tensor(func, args, kwargs)
        elif UNEVEN and self.body.uneven and op.pure and not self.simulated:
            out = call_with_empty_blocks(func, *args, **kwargs)
        else:
            try:
                out = call_uneven(func, args, kwargs, op.pure) if UNEVEN and self.simulated else func(*args, **kwargs)
            except VarianceError as error:
                out = self._rank_by_rank(error, op, func, args, kwargs)
        if result.unreduced and op.linear != "metadata" and not self.body.linear:
            check_stays_sum(op, tensors, out)
        if not alike and not op.writes and "out" not in kwargs:
            out = self._borrowing(out, (*args, *kwargs.values()), result)
        annotate(out, result.dual if op.dual else result)
        return out

    def _rank_by_rank(
        self, error: VarianceError, op: Traits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Handles a call that fails on all blocks at once: torch writes into a tensor of its own, which is no block."""
        out = call_rank_by_rank(func, args, kwargs) if self.simulated and op.pure else NotImplemented
        if out is NotImplemented:
            raise error
        return out

    def _in_parts(
        self, op: Traits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parts: list[list[int]]
    ) -> Any:
        """Handles a call on lists of tensors of different types, such as ``torch._foreach_add_``."""
        count = sum(map(len, parts))
        results: dict[int, Any] = {}
        for positions in parts:
            chosen = tuple(
                [a[i] for i in positions] if type(a) in (list, tuple) and len(a) == count else a for a in args
            )
            out = self._general(op, func, chosen, kwargs)
            if out is not None:
                results.update(zip(positions, out, strict=True))
        return [results[i] for i in range(count)] if results else None

    def _invariant(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handles a call on invariant operands, whose result is invariant."""
        out = func(*args, **kwargs)
        if self.marks_invariant:
            mark_invariant(out)
        return out

    def _uneven(self, op: Traits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handles a call in a simulation of uneven blocks. Sizes that differ from rank to rank make the result vary."""
        numbers = numbers_frame((*args, *kwargs.values()))
        if numbers is None:
            return self._general(op, func, args, kwargs)
        operands = [*tensors_in(args), *tensors_in(kwargs.values())]
        if not operands:
            out = call_with_numbers(func, args, kwargs, numbers)
            annotate(out, Variance(varying=numbers.axes))
            return out
        if not self.body.linear:  # in which sizes agree over the axes of pending sums
            check_known_to_vary(op, operands, numbers)
        args, kwargs = numbers_to_tensors(op.name, args, kwargs, numbers)
        return self._general(op, func, args, kwargs, numbers)

    def _seen(self, function: Any, name: str, to: Variance) -> Any:
        """Wraps a function that torch calls: it runs as a part of the body, and its result is cast to type ``to``."""

        def called(*args: Any) -> Any:
            out = function(*args)
            if extra := get_variance(out).varying - to.varying:
                raise VarianceError(
                    f"{name} returned {show(out)}, which varies over {', '.join(map(repr, sorted(extra)))}, "
                    f"but the operands do not; cast one first: pcast(x, {min(extra)!r}, to='varying')"
                )
            return self.cast(out, to)

        def run(*args: Any) -> Any:
            return run_in(state.body, self, called, *args)

        return run

    def _borrowing(self, out: Any, operands: Iterable[Any], to: Variance) -> Any:
        """Marks results of type ``to`` that share memory with an operand of another type: writes must not reach it.

        A result that is the operand itself, as ``w.type_as(x)`` may be, becomes an alias: the operand keeps its type.
        """
        if isinstance(out, (list, tuple)):
            parts = [self._borrowing(x, operands, to) for x in out]
            return out if all(map(operator.is_, parts, out)) else type(out)(parts)
        if not isinstance(out, Tensor) or out.layout is not torch.strided:  # others have no storage to share
            return out
        for x in tensors_in(operands):
            source = get_variance(x)
            if source is not to and x.layout is torch.strided and storage_of(x) == storage_of(out):
                out = x.view_as(x) if out is x else out
                self.borrow(out, source)
        return out

    def borrow(self, x: Tensor, source: Variance) -> None:
        """Notes that ``x`` aliases a value of type ``source``. Writes into it, or into a view of it, are refused."""
        setattr(x, BORROWED, True)
        if not self.simulated:  # simulated values know it themselves
            self.borrowed[storage_of(x)] = x, source

    def unborrowed(self, results: Sequence[Any]) -> list[Any]:
        """Results of the body, with copies in place of those that alias a value of another type."""
        return [copied(x) if self._is_borrowed(x) else x for x in results]

    def _is_borrowed(self, x: Any) -> bool:
        known = self.borrowed.get(storage_of(x)) if isinstance(x, Tensor) and x.layout is torch.strided else None
        return known is not None and get_variance(x) is not known[1]

    def cast_all(self, values: Iterable[Any], to: Variance) -> tuple[Any, ...]:
        """Casts every tensor among the values, in lists and tuples too, to one type. Lists without tensors stay."""
        return tuple(
            [
                self.cast(value, to)
                if isinstance(value, Tensor)
                else value
                if not isinstance(value, (tuple, list)) or next(tensors_in(value), None) is None
                else list(self.cast_all(value, to))
                if isinstance(value, list)
                else self.cast_all(value, to)
                for value in values
            ]
        )

    def cast(self, x: Tensor, to: Variance) -> Tensor:
        """Casts ``x`` to type ``to``. The cast is made once per body, and all uses share it."""
        if getattr(x, ATTRIBUTE, None) is to or not torch.is_grad_enabled():
            return x
        if not (x.requires_grad or transforms_active()):
            return x
        known = self.casts.get(id(x))
        if known is None or known[0] is not x or known[1] != x._version:
            known = self.casts[id(x)] = (x, x._version, {})
        y = known[2].get(to)
        if y is None or level_of(y) == ENDED:
            y = known[2][to] = self._cast(x, to)
        return y

    def _cast(self, x: Tensor, to: Variance) -> Tensor:
        variance = get_variance(x)
        if to.unreduced:
            to = beside_pending(variance, to)
        if variance is to or not (x.is_floating_point() or x.is_complex()):
            return x
        return self.convert(x, variance, to)

    def convert(self, x: Tensor, variance: Variance, to: Variance) -> Tensor:
        """`convert`, in this body."""
        return convert(x, variance, to, self.body)

    def _random(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], axes: tuple[str, ...]) -> Any:
        """Draws from one stream per coordinate over axes, on every transport alike."""
        body, seed = self.body, draw_seed(kwargs.get("generator"))
        if known_values.hear is not None:
            known_values.hear(body.mesh, f"the seed of {getattr(func, '__name__', func)}", seed)
        kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
        if self.simulated:
            copies = call("per_rank", body.mesh, axes)
            args, kwargs = (
                tuple(hold_each(args, copies)),
                dict(zip(kwargs, hold_each(kwargs.values(), copies), strict=True)),
            )
            with draw_per_rank(frame_over(body.mesh, axes), seed):
                return func(*args, **kwargs)
        index = int(body.transport.index(body.mesh, axes))
        with one_stream(seed, index):
            return func(*args, **kwargs)


def _typed_hook(x: Tensor, hook: Any, typed_by: Body) -> Any:
    """Wraps a hook: it runs in the body again, with axes bound and a typed gradient."""
    body, dual = state.body, get_variance(x).dual

    def run(gradient: Tensor) -> Any:
        set_variance(gradient, dual)
        out = run_in(body, Tracker(typed_by), hook, gradient)
        if isinstance(out, Tensor) and (extra := get_variance(out).varying - dual.varying):
            raise VarianceError(
                f"a hook on {show(x)} returned {show(out)}, which varies over "
                f"{', '.join(map(repr, sorted(extra)))}; a gradient varies where its value does: psum it first"
            )
        return out

    return run


_PLAIN: Final = frozenset({int, float, bool, type(None), str, torch.dtype})  # told from tensors by their type alone


def _joined(values: Iterable[Any]) -> tuple[Variance | None, bool]:
    """Joins the types of the tensors among the values, in lists and tuples too.

    Returns the type of a result, None without tensors, and whether all tensors have it.
    """
    result: Variance | None = None
    alike = True
    for value in values:
        if (kind := type(value)) is Tensor:
            variance = getattr(value, ATTRIBUTE, None) or inherited(value)
        elif kind in _PLAIN:
            continue
        elif isinstance(value, Tensor):
            variance = getattr(value, ATTRIBUTE, None) or first_seen(value)
        elif isinstance(value, (tuple, list)):
            inner, same = _joined(value)
            if inner is None:
                continue
            variance, alike = inner, alike and same
        else:
            continue
        if result is None:
            result = variance
        elif variance is not result:
            result = join(result, variance)
            alike = False
    return result, alike


def convert(
    x: Tensor, variance: Variance, to: Variance, body: Body, cast: Callable[[Tensor, Call], Tensor] = apply
) -> Tensor:
    """Casts a value from one type to another, differentiably."""
    for source, target, name in _CASTS:
        axes = tuple(a for a in body.mesh.axis_names if variance.state(a) == source and to.state(a) == target)
        if axes:
            x = cast(x, call(name, body.mesh, axes))
    return set_variance(x, to)


def own(x: Any) -> Any:
    """Casts a value to differentiate by: where axes stand for a mapped dim, each element gets its own gradient."""
    body, tracker = state.body, state.tracker
    if tracker is None or body is None or not body.mapped or not isinstance(x, Tensor):
        return x
    variance = get_variance(x)
    axes = body.mapped - variance.varying - variance.unreduced
    return convert(x, variance, variance.moved(axes, "V"), tracker.body) if axes else x


def annotate(out: Any, variance: Variance) -> None:
    """Sets the type of every tensor of a result."""
    if isinstance(out, Tensor):
        set_variance(out, variance)
    elif isinstance(out, (tuple, list)):
        for x in out:
            annotate(x, variance)
    elif isinstance(out, (torch.UntypedStorage, torch.TypedStorage)):
        setattr(untyped_storage(out), ATTRIBUTE, variance)  # torch gives one object to all who ask


def mark_invariant(out: Any) -> None:
    """Marks a result as invariant, and as given by a call."""
    for x in tensors_in((out,)):
        setattr(x, ATTRIBUTE, INVARIANT)


def mode_for(body: Body | None, typed_by: Body | None) -> BodyMode | None:
    """Returns the mode of a body that runs again, in backward: a tracker where ``typed_by`` is given."""
    if typed_by is not None:
        return Tracker(typed_by)
    if body is None:
        return None
    if body.simulated:
        return IndexMode()
    return ConnectingMode() if body.uneven else None
