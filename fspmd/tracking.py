"""Types of values in a checked body: every torch call is seen, its operands cast to one type, its results typed.

An invariant operand beside a varying one is cast to varying; the cast's backward is the all-reduce. A value is cast
once per body and all its uses share the cast.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fspmd.body import Body
from fspmd.errors import VarianceError
from fspmd.indexing import index_by_tensor
from fspmd.op_kinds import OPS, Op, learn, written_operands
from fspmd.pairs import apply, call
from fspmd.transport.frame import UNEVEN, Frame, frame
from fspmd.transport.randomness import draw_seed, one_stream, streams
from fspmd.uneven import call_uneven, call_with_numbers, differentiated, hold_each, numbers_frame, numbers_to_tensors
from fspmd.variance import ATTRIBUTE, BORROWED, INVARIANT, Variance, get_variance, join, set_variance, show

_transforms_active = torch._C._are_functorch_transforms_active

_CASTS = (("I", "R", "invariant_to_reduced"), ("I", "V", "invariant_to_varying"), ("R", "V", "reduced_to_varying"))


class Tracker(TorchFunctionMode):
    """Sees the torch calls of one run of a body."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.simulated = body.mesh.transport == "simulation"
        self.marks_invariant = False  # inside a custom Function: results must be told from tensors never seen
        self.casts: dict[int, tuple[Tensor, int, dict[Variance, Tensor]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        op = OPS.get(func) or learn(func)
        if UNEVEN and self.simulated:
            return self._uneven(op, func, args, kwargs or {})
        if op.special or kwargs:
            return self._general(op, func, args, kwargs or {})
        common: Variance | None = None
        for arg in args:
            if isinstance(arg, Tensor):
                variance = getattr(arg, ATTRIBUTE, None) or get_variance(arg)
                if common is None:
                    common = variance
                elif variance is not common:
                    return self._general(op, func, args, {})
            elif type(arg) is list or type(arg) is tuple:
                return self._general(op, func, args, {})
        if common is None or common is INVARIANT:
            return self._invariant(func, args, {})
        if common.unreduced:
            return self._general(op, func, args, {})
        out = func(*args)
        if isinstance(out, Tensor) and not _transforms_active():
            setattr(out, ATTRIBUTE, common)
        else:
            annotate(out, common)
        return out

    def _general(
        self, op: Op, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: Frame | None = None
    ) -> Any:
        """Any call. ``numbers``: the frame of sizes among the arguments that differ from rank to rank."""
        tensors = list(_tensors(args))
        if kwargs:
            tensors.extend(_tensors(kwargs.values()))
        if op.gradient:
            return self._gradient(func, args, kwargs)
        variances = [get_variance(x) for x in tensors]
        result = INVARIANT if numbers is None else Variance(varying=numbers.axes)
        for variance in variances:
            if variance is not result:
                result = join(result, variance)
        if result is INVARIANT:
            return self._invariant(func, args, kwargs)
        if op.ragged is not None and op.ragged(*args, **kwargs):
            self.body.uneven = True
        if op.python_value and result.varying:
            refuse_branch(op.name, tensors[0], result)
        if result.unreduced:
            result = pending_sum(op, tensors, variances, args)
        if op.writes or "out" in kwargs:
            _check_writes(func, op, args, kwargs, result)
        if any(variance is not result for variance in variances):
            # beside an unreduced operand an invariant one becomes reduced: its gradient is a pending sum
            args = self.cast_all(args, result)
            kwargs = dict(zip(kwargs, self.cast_all(tuple(kwargs.values()), result), strict=True))
        if op.draws and result.varying and op.draws(*args, **kwargs):
            out = self._random(func, args, kwargs, result)
        elif op.indexes:
            out = index_by_tensor(func, args, kwargs)
        elif UNEVEN and self.simulated:
            out = call_uneven(func, args, kwargs, numbers, op.pure)
        else:
            out = func(*args, **kwargs)
        annotate(out, result.dual if op.dual else result)
        return out

    def _invariant(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Invariant operands give an invariant result."""
        out = func(*args, **kwargs)
        if self.marks_invariant:
            mark_invariant(out)
        return out

    def _uneven(self, op: Op, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call in a simulation of uneven blocks: sizes that differ from rank to rank make the result vary."""
        numbers = numbers_frame((*args, *kwargs.values()))
        if numbers is None:
            return self._general(op, func, args, kwargs)
        operands = [*_tensors(args), *_tensors(kwargs.values())]
        if not operands:
            out = call_with_numbers(func, args, kwargs, numbers)
            annotate(out, Variance(varying=numbers.axes))
            return out
        _check_known_to_vary(op, operands, numbers)
        args, kwargs = numbers_to_tensors(op.name, args, kwargs, numbers)
        return self._general(op, func, args, kwargs, numbers)

    def cast_all(self, values: tuple[Any, ...], to: Variance) -> tuple[Any, ...]:
        """Every tensor among the values, in lists and tuples too, cast to one type."""
        return tuple(
            self.cast(value, to)
            if isinstance(value, Tensor)
            else type(value)(self.cast_all(tuple(value), to))
            if type(value) in (list, tuple)
            else value
            for value in values
        )

    def cast(self, x: Tensor, to: Variance) -> Tensor:
        """``x`` as a value of type ``to``; made once per body, shared by all uses."""
        variance = get_variance(x)
        if to.unreduced:
            to = _beside_pending(variance, to)
        if variance is to or not (x.is_floating_point() or x.is_complex()):
            return x
        if not torch.is_grad_enabled() or not (x.requires_grad or _transforms_active()):
            return x
        known = self.casts.get(id(x))
        if known is not None and known[0] is x and known[1] == x._version:
            found = known[2].get(to)
            if found is not None:
                return found
        else:
            known = self.casts[id(x)] = (x, x._version, {})
        result = convert(x, variance, to, self.body)
        known[2][to] = result
        return result

    def _random(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], variance: Variance) -> Any:
        """Draw from one stream per coordinate over the axes the value varies over, on every transport alike."""
        body, seed = self.body, draw_seed(kwargs.get("generator"))
        kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
        axes = tuple(axis for axis in body.mesh.axis_names if axis in variance.varying)
        if self.simulated:
            apart = call("apart", body.mesh, axes)
            args, kwargs = (
                tuple(hold_each(args, apart)),
                dict(zip(kwargs, hold_each(kwargs.values(), apart), strict=True)),
            )
            with streams(frame(body.mesh, axes), seed):
                return func(*args, **kwargs)
        index = int(body.transport.index(body.mesh, axes))
        with one_stream(seed, index):
            return func(*args, **kwargs)

    def _gradient(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch.autograd.grad: each gradient has the dual type of its input."""
        outputs = args[0] if args else kwargs["outputs"]
        inputs = args[1] if len(args) > 1 else kwargs["inputs"]
        cotangents = args[2] if len(args) > 2 else kwargs.get("grad_outputs")
        if cotangents is not None:
            pairs = zip(_tensors((outputs,)), _tensors((cotangents,)), strict=False)
            for output, cotangent in pairs:
                if extra := get_variance(cotangent).varying - get_variance(output).varying:
                    raise VarianceError(
                        f"a cotangent {show_value(cotangent)} was given for an output {show_value(output)}: it varies "
                        f"over {', '.join(map(repr, sorted(extra)))}, the output does not; psum it first"
                    )
        results = func(*args, **kwargs)
        for x, gradient in zip(_tensors((inputs,)), results, strict=True):
            if gradient is not None:
                set_variance(gradient, get_variance(x).dual)
        return results


def _check_known_to_vary(op: Op, operands: list[Tensor], numbers: Frame) -> None:
    for x in operands:
        missing = [axis for axis in numbers.axes if axis not in get_variance(x).varying]
        if missing and torch.is_grad_enabled() and differentiated(x):
            axes = missing[0] if len(missing) == 1 else tuple(missing)
            raise VarianceError(
                f"{op.name} of {show_value(x)} and a size that differs from rank to rank over {axes!r}: ranks that run "
                "as processes see a plain int there and could not tell that the result varies, so the gradient would "
                f"not be summed; cast the value first: pcast(x, {axes!r}, to='varying')"
            )


def _check_writes(func: Any, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], result: Variance) -> None:
    for target in written_operands(func, op, args, kwargs):
        if missing := result.varying - get_variance(target).varying:
            axes = ", ".join(map(repr, sorted(missing)))
            raise VarianceError(
                f"{op.name} would write a value that varies over {axes} in place into {show_value(target)}, which is "
                "invariant there; compute a new tensor instead (x = x + y, not x += y), or start from one that "
                "varies: torch.zeros_like(y), y.new_zeros(shape)"
            )
        if getattr(target, BORROWED, False):
            raise VarianceError(
                f"{op.name} would write in place into the result of a pcast, which aliases its argument; "
                "write into a copy: x = pcast(x, ...).clone()"
            )


def pending_sum(op: Op, tensors: list[Tensor], variances: list[Variance], args: tuple[Any, ...]) -> Variance:
    """The type of a linear op on unreduced operands; raises `VarianceError` for any other op."""
    unreduced = [v for v in variances if v.unreduced]
    axes = frozenset[str]().union(*(v.unreduced for v in unreduced))
    others = [v for v in variances if not v.unreduced]
    numbers = any(isinstance(arg, (int, float, complex)) for arg in args)
    alike = not others and all(v is unreduced[0] for v in unreduced)
    allowed = {
        "sum": alike and not numbers,
        "collect": alike,
        "product": len(unreduced) == 1 and (op.name != "linear" or len(tensors) == 2),
        "first": len(unreduced) == 1 and variances[0].unreduced == axes,
        "metadata": True,
    }.get(op.linear, False) and not any(v.varying & axes for v in others)
    if not allowed:
        shown = ", ".join(show_value(x) for x in tensors)
        raise VarianceError(
            f"{op.name}({shown}): a value unreduced over {', '.join(map(repr, sorted(axes)))} is a pending sum, and "
            "only linear ops keep it one (sums of values unreduced alike, products with a value that is not "
            "unreduced and does not vary there); reduce it first: psum or psum_scatter over the axis"
        )
    varying = frozenset[str]().union(*(v.varying for v in variances)) - axes
    reduced = frozenset[str]().union(*(v.reduced for v in variances)) - axes - varying
    return Variance(varying, axes, reduced)


def _beside_pending(variance: Variance, to: Variance) -> Variance:
    """What an operand of an op with an unreduced result must be: unreduced itself, or reduced over those axes."""
    if variance.unreduced:
        return Variance(to.varying, to.unreduced, to.reduced)
    return Variance(to.varying, (), to.reduced | to.unreduced)


def convert(x: Tensor, variance: Variance, to: Variance, body: Body) -> Tensor:
    """Differentiable casts from one type to another."""
    for source, target, name in _CASTS:
        axes = tuple(a for a in body.mesh.axis_names if variance.state(a) == source and to.state(a) == target)
        if axes:
            x = apply(x, call(name, body.mesh, axes))
    return set_variance(x, to)


def annotate(out: Any, variance: Variance) -> None:
    """Keep the type on every tensor of a result."""
    if isinstance(out, Tensor):
        set_variance(out, variance)
    elif isinstance(out, (tuple, list)):
        for one in out:
            annotate(one, variance)


def mark_invariant(out: Any) -> None:
    """Say of a result that it was seen, and is invariant."""
    for x in _tensors((out,)):
        setattr(x, ATTRIBUTE, INVARIANT)


def refuse_branch(name: str, x: Tensor, variance: Variance) -> NoReturn:
    """Python cannot branch on a value that differs from rank to rank."""
    axes = ", ".join(map(repr, sorted(variance.varying)))
    raise VarianceError(
        f"{name} asks for one Python value of {show_value(x)}, which varies over {axes}: ranks would take "
        "different branches; make it equal first (psum, pmax, all_gather(to='invarying')), choose with torch.where, "
        "or run per-rank Python with rank_map"
    )


def show_value(x: Tensor) -> str:
    """A tensor's dtype, shape and type, for messages."""
    with torch._C.DisableTorchFunction():
        return show(x)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (list, tuple) or (isinstance(value, tuple)):
            yield from _tensors(value)
        elif type(value) is slice:
            yield from _tensors((value.start, value.stop, value.step))
