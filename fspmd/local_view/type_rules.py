"""What the types of operands allow: writes, pending sums, branches, sizes that differ from rank to rank.

Calls that run backward, such as `torch.autograd.grad`, cast cotangents and type gradients.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from fspmd.errors import ArgumentError, VarianceError
from fspmd.foreign import refuse_foreign
from fspmd.local_view.uneven import differentiated, per_rank_like
from fspmd.messages import WRITTEN_CAST, as_axis_name, one_python_value, quoted, written_in_place
from fspmd.ops.linearity import ADDED, BETWEEN, stay_sums
from fspmd.ops.signatures import in_order
from fspmd.ops.traits import Traits, plain_name, tensors_in, written_operands
from fspmd.remembered import wrote
from fspmd.spec import describe
from fspmd.torch_internals import DisableTorchFunction
from fspmd.transport.frame import UNEVEN, Frame
from fspmd.variance import BORROWED, INVARIANT, Variance, get_variance, inherited, join, set_variance, show, storage_of


def first_seen(x: Tensor) -> Variance:
    """The type of an operand that carries none itself; raises `ArgumentError` for what is no block."""
    if type(x) is not Tensor:
        refuse_foreign(x, "a shard_map body used")
    return inherited(x)


def parts_by_type(args: tuple[Any, ...]) -> list[list[int]] | None:
    """The positions of lists of tensors by the type that the entries at a position have together, if they differ."""
    lists = [arg for arg in args if type(arg) in (list, tuple) and arg]
    parts: dict[Variance, list[int]] = {}
    for i in range(len(lists[0]) if lists else 0):
        result = INVARIANT
        for x in tensors_in([each[i] for each in lists if i < len(each)]):
            result = join(result, get_variance(x))
        parts.setdefault(result, []).append(i)
    return list(parts.values()) if len(parts) > 1 else None


def pending_sum(
    func: Any,
    op: Traits,
    tensors: list[Tensor],
    variances: list[Variance],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    trusted: bool,
) -> Variance:
    """The type of a linear op on unreduced operands; raises `VarianceError` for any other op, unless it is ``trusted``
    to be a step of a linear function.
    """
    if kwargs:
        args, kwargs = in_order(func, args, kwargs)
        tensors = list(tensors_in((*args, *kwargs.values())))
        variances = [get_variance(x) for x in tensors]
    unreduced = [v for v in variances if v.unreduced]
    axes = frozenset[str]().union(*(v.unreduced for v in unreduced))
    others = [v for v in variances if not v.unreduced]
    name, first = plain_name(op.name), variances[0].unreduced == axes
    summands = (variances[0], variances[-1]) if name in BETWEEN else variances
    added = variances[ADDED[name]] if ADDED.get(name, len(variances)) < len(variances) else None
    factors = [v for i, v in enumerate(variances) if v.unreduced and i != ADDED.get(name)]
    allowed = {
        "sum": all(v is unreduced[0] for v in summands) and len(unreduced) == len(summands),
        "product": len(factors) == 1 and (added is None or added is factors[0]),
        "first": len(unreduced) == 1 and first,
        "metadata": True,
    }.get(op.linear, False) and not any(v.varying & axes for v in others)
    allowed = allowed and (first or not op.writes)  # else what is written into would become a pending sum
    allowed = allowed and op.linear_when(*args, **kwargs)
    if not (allowed or trusted):
        shown = ", ".join(show(x) for x in tensors)
        raise VarianceError(
            f"{op.name}({shown}): a value unreduced over {quoted(sorted(axes))} is a sum still pending, which only "
            f"linear ops keep so; add it up first: psum(x, {as_axis_name(sorted(axes))}), or psum_scatter"
        )
    if op.writes and not trusted:
        check_stays_sum(op, tensors, tensors[0])
    varying = frozenset[str]().union(*(v.varying for v in variances)) - axes
    reduced = frozenset[str]().union(*(v.reduced for v in variances)) - axes - varying
    return Variance(varying, axes, reduced)


def check_stays_sum(op: Traits, tensors: list[Tensor], out: Any) -> None:
    """A pending sum of floating-point numbers does not become one of integers, nor any one of truths."""
    result = next(tensors_in((out,)), None)
    if result is None:
        return
    for x in tensors:
        if get_variance(x).unreduced and not stay_sums(x.dtype, result.dtype):
            raise VarianceError(
                f"{op.name} of {show(x)} gives {result.dtype}: rounding a pending sum on each rank is not "
                "rounding the sum; reduce it first: psum or psum_scatter over the axis"
            )


def beside_pending(variance: Variance, to: Variance) -> Variance:
    """What an operand of an op with an unreduced result must be: unreduced itself, or reduced over those axes."""
    if variance.unreduced:
        return Variance(to.varying, to.unreduced, to.reduced)
    return Variance(to.varying, (), to.reduced | to.unreduced)


def check_known_to_vary(op: Traits, operands: list[Tensor], numbers: Frame) -> None:
    """Refuse what processes could not tell: an invariant, differentiated value beside a size that differs."""
    for x in operands:
        missing = [axis for axis in numbers.axes if axis not in get_variance(x).varying]
        if missing and torch.is_grad_enabled() and differentiated(x):
            axes = missing[0] if len(missing) == 1 else tuple(missing)
            raise VarianceError(
                f"{op.name} of {show(x)} and a size that differs from rank to rank over {axes!r}: ranks that run "
                "as processes see a plain int there and could not tell that the result varies, so the gradient would "
                f"not be summed; cast the value first: pcast(x, {axes!r}, to='varying')"
            )


Borrowed = dict[int, tuple[Tensor, Variance]]  # by storage: what pcast returned, and the type of its argument


def check_writes(
    func: Any, op: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], result: Variance, borrowed: Borrowed
) -> None:
    """A value is written into one that varies as much, and that is not an alias of another."""
    for target in written_operands(func, op, args, kwargs):
        have = get_variance(target)
        if missing := result.varying - have.varying:
            raise VarianceError(written_in_place(op.shown, show(target), missing, op.advice))
        known = borrowed.get(storage_of(target)) if borrowed else None
        if getattr(target, BORROWED, False) or (known is not None and have is not known[1]):
            raise VarianceError(WRITTEN_CAST.format(op.shown))
        wrote(target, soon=True)


def refuse_branch(op: Traits, tensors: list[Tensor], variance: Variance) -> NoReturn:
    """Python cannot branch on a value that differs from rank to rank."""
    x = next(x for x in reversed(tensors) if get_variance(x).varying)  # sizes and places come after what is cut
    with DisableTorchFunction():
        shown = describe(x.dtype, x.shape).replace(", ", ",")
    raise VarianceError(one_python_value(op.shown, shown, variance.varying, op.advice))


def refuse_shared_draw(op: Traits, axes: frozenset[str]) -> NoReturn:
    """What does not vary along a mapped dim would be drawn alike on all ranks, for elements that are to differ."""
    raise ArgumentError(
        f'{op.shown} draws in a function mapped over {quoted(sorted(axes))} with randomness="different", of no value '
        "that is mapped, so that ranks would draw the same; draw like a mapped value: torch.rand_like(x), or "
        "F.dropout(w + 0 * x) of a weight"
    )


def call_backward(
    tracker: Any, signature: tuple[str, int, str], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Handles a call that runs backward: casts cotangents to the dual types of outputs, and types the gradients.

    ``tracker``: of the body. The inputs of such a call are places in the graph, not operands.
    """
    name, place, cotangents = signature
    outputs = args[0] if args else kwargs[name]
    if len(args) > place:
        args = (*args[:place], _cotangents(tracker, outputs, args[place]), *args[place + 1 :])
    elif cotangents in kwargs:
        kwargs = {**kwargs, cotangents: _cotangents(tracker, outputs, kwargs[cotangents])}
    results = func(*args, **kwargs)
    if results is not None:
        inputs = args[1] if len(args) > 1 else kwargs["inputs"]
        for x, gradient in zip(tensors_in((inputs,)), results, strict=True):
            if gradient is not None:
                set_variance(gradient, get_variance(x).dual)
    return results


def _cotangents(tracker: Any, outputs: Any, cotangents: Any) -> Any:
    if isinstance(cotangents, Tensor):
        output = outputs if isinstance(outputs, Tensor) else outputs[0]
        return _cotangent(tracker, output, cotangents)
    if not isinstance(cotangents, (list, tuple)) or isinstance(outputs, Tensor) or len(cotangents) != len(outputs):
        return cotangents
    return [_cotangent(tracker, *row) for row in zip(outputs, cotangents, strict=True)]


def _cotangent(tracker: Any, output: Any, cotangent: Any) -> Any:
    if not isinstance(output, Tensor) or not isinstance(cotangent, Tensor):
        return cotangent
    if extra := get_variance(cotangent).varying - get_variance(output).varying:
        raise VarianceError(
            f"a cotangent {show(cotangent)} was given for an output {show(output)}: it varies "
            f"over {', '.join(map(repr, sorted(extra)))}, the output does not; psum it first"
        )
    to = get_variance(output).dual
    if not to.unreduced:
        given, cotangent = cotangent, tracker.cast(cotangent, to)
        if cotangent is given:  # autograd may return it as a gradient, which has another type
            cotangent = set_variance(given.view_as(given), get_variance(given))
    return per_rank_like(cotangent, output) if UNEVEN and tracker.simulated else cotangent
