"""The results of a call that runs as several calls: strides and ``requires_grad``, as torch says; and ``out=``.

``torch.fill(x, 1.0)`` runs as a call that makes new ones. For torch its result depends on x, with a gradient of zeros.
With ``out=`` the result is computed as usual, and then written into ``out``, which keeps its layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.copies import as_copies, refuse_copy, share_memory
from fspmd.errors import ArgumentError, ShapeError
from fspmd.forms import Laid, packed
from fspmd.global_view.kernels import GlobalCall
from fspmd.global_view.op_plan import OpPlan, opaque_plan
from fspmd.global_view.question import places_of, sharded_values, tensors_of
from fspmd.global_view.refusals import shown
from fspmd.global_view.result_types import Outcome, memory_of, on_meta
from fspmd.local_view.empty_blocks import zero_depending_on
from fspmd.ops.signatures import at
from fspmd.ops.traits import writes
from fspmd.redistribution.redistribute import redistribute
from fspmd.rules import ENGINE
from fspmd.saved_tensor_hooks import without_saved_tensor_hooks
from fspmd.sharded import Sharded, alike, call_torch, laid, lies, relay
from fspmd.spec import P
from fspmd.torch_internals import DisableTorchFunction, OpOverload, plain_apply, schema_of, transforms_active
from fspmd.tracing import hidden, outside_transforms


@hidden
def with_strides(plan: OpPlan, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpPlan:
    """Return the plan, with results that have the strides of torch."""
    if plan.whole is None or (outcome := _outcome(func, args, kwargs)) is None:
        return plan
    run = plan.whole

    def relaid(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = run(args, kwargs)
        results = [out] if type(out) is Sharded else out
        if isinstance(results, (tuple, list)) and len(results) == len(outcome.results):
            given = (*args, *kwargs.values())
            _mark_copies(results, outcome, given, shown(func))
            _relay(results, outcome, given)
        return out

    return opaque_plan(relaid, in_parts=plan.in_parts)


def _outcome(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome | None:
    """Return the outcome of a call, or None if it is unknown, is an operand, or comes from a function of the user."""
    tensors = tensors_of(args, kwargs)
    if writes(func) or func in ENGINE or kwargs.get("out") is not None or kwargs.get("inplace"):
        return None
    if any(callable(x) for x in (*args, *kwargs.values())):
        return None
    operands = places_of(args, kwargs, next(x for x in tensors if type(x) is Sharded).spec.mesh)
    try:
        return on_meta(GlobalCall(func, args, kwargs, operands)) if len(operands) == len(tensors) else None
    except Exception:  # the call itself will raise
        return None


def _mark_copies(results: Sequence[Any], outcome: Outcome, given: Sequence[Any], name: str) -> None:
    """Mark results as copies if they would be views of an operand in torch, and are not."""
    for x, place in zip(results, outcome.bases, strict=True):
        base = None if place is None else at(given, place)
        if type(x) is type(base) is Sharded and not share_memory(x.local, base.local):
            x.block = as_copies(x.local, base.local, name)


def _relay(results: Sequence[Any], outcome: Outcome, given: Sequence[Any]) -> None:
    for i, x in enumerate(results):
        if type(x) is not Sharded or x.spec.shape != outcome.results[i][0] or any(x is arg for arg in given):
            continue
        if outcome.memory is None:
            if lies(x) != Laid(packed(x.spec.shape)):
                relay(x, Sharded(x.local, x.spec))
        elif lies(x) != (memory := memory_of(outcome.memory[i], x.dtype, given)):
            relay(x, laid(x.local, x.spec, memory))


class Followed:
    """Gives the results of a function the ``requires_grad`` that torch gives the global tensors."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        self._known: dict[tuple[bool, ...], list[bool] | None] = {}

    def results(self, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return ``out``, the results of a call, with the right ``requires_grad``. Nothing is communicated."""
        if not torch.is_grad_enabled() or transforms_active():
            return out
        leaves, treedef = optree.tree_flatten((args, kwargs), none_is_leaf=True)
        flags = tuple([isinstance(x, Tensor) and x.requires_grad for x in leaves])
        if True not in flags:
            return out
        if flags not in self._known:
            self._known[flags] = _requires_grad(self.func, leaves, treedef, flags)
        required = self._known[flags]
        results, structure = optree.tree_flatten(out, none_is_leaf=True)
        if required is None or len(required) != len(results):
            return out
        operands = [x for x, flag in zip(leaves, flags, strict=True) if flag]
        return structure.unflatten([_with_gradient(*row, operands) for row in zip(results, required, strict=True)])


@hidden
def _requires_grad(func: Any, leaves: list[Any], treedef: Any, flags: tuple[bool, ...]) -> list[bool] | None:
    """Return ``requires_grad`` of each result, or None if the function fails on the meta device."""
    try:
        with outside_transforms(), DisableTorchFunction(), without_saved_tensor_hooks():
            made = [
                torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=flag) if isinstance(x, Tensor) else x
                for x, flag in zip(leaves, flags, strict=True)
            ]
            args, kwargs = treedef.unflatten(made)
            if writes(func):
                args = (args[0].clone(), *args[1:])
            out = func(*args, **kwargs)
            out = [args[0]] if writes(func) else optree.tree_leaves(out, none_is_leaf=True)
    except Exception:
        return None
    return [isinstance(x, Tensor) and x.requires_grad for x in out]


def _with_gradient(x: Any, required: bool, operands: list[Any]) -> Any:
    if not isinstance(x, Sharded) or x.requires_grad == required:
        return x
    if not required:
        return alike(x.local.detach(), x)
    zeros = [zero_depending_on(operand.local if isinstance(operand, Sharded) else operand) for operand in operands]
    return alike(_tied(x.local, *zeros), x)


class _Tied(torch.autograd.Function):
    """The first operand, made to depend on the others too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *zeros: Tensor) -> Tensor:
        ctx.zeros = [zero.detach() for zero in zeros]
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        return g, *map(torch.zeros_like, ctx.zeros)


_tied = plain_apply(_Tied)


def outs_of(func: Any, kwargs: dict[str, Any]) -> list[str]:
    """Return the names of the arguments that take the results of a call.

    >>> outs_of(torch.mm, {"out": torch.eye(2)}), outs_of(torch.mm, {})
    (['out'], [])
    >>> outs_of(torch.ops.aten.topk.values, {"values": torch.ones(1), "indices": torch.ones(1)})
    ['values', 'indices']
    """
    return [name for name in _names_of(func) if kwargs.get(name) is not None]


@cached
def _names_of(func: Any) -> tuple[str, ...]:
    return tuple(arg.name for arg in schema_of(func).arguments if arg.is_out) if _is_aten(func) else ("out",)


def _is_aten(func: Any) -> bool:
    return isinstance(func, OpOverload) and func.namespace == "aten"


def written_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call and write its results into ``out``, a tensor or a tuple of tensors.

    An overload of an aten op that must have ``out``, such as ``aten.mm.out``, computes as the op without it does.

    Raises:
        ArgumentError: An operand or ``out`` requires grad, which torch does not support here; or the dtype of the
            result cannot be cast to that of ``out``.
        ShapeError: ``out`` has elements, and another shape. (torch warns, and gives it new memory.)
    """
    outs = outs_of(func, kwargs)
    target = kwargs[outs[0]] if len(outs) == 1 else tuple([kwargs[name] for name in outs])
    named = {name: value for name, value in kwargs.items() if name not in outs}
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors_of(args, kwargs)):
        raise ArgumentError(
            f"{shown(func)} got out= and a value that requires grad: functions with out= do not support automatic "
            "differentiation; take the result instead, or write within torch.no_grad()"
        )
    compute = func.overloadpacket if _is_aten(func) else func
    results = call_torch(compute, args, named) if sharded_values(args, named) else compute(*args, **named)
    pairs = [(target, results)] if isinstance(target, Tensor) else list(zip(target, results, strict=True))
    for out, result in pairs:
        _check(func, out, result)
    for out, result in pairs:
        _write(out, result)
    return target if isinstance(target, Tensor) else type(results)([out for out, _ in pairs])


def _check(func: Any, out: Any, result: Any) -> None:
    if out.shape != result.shape and out.numel():
        raise ShapeError(
            f"{shown(func)} got out={out!r} for a result of shape {tuple(result.shape)}; give it a tensor of that "
            "shape or without elements, or take the result instead"
        )
    if not torch.can_cast(result.dtype, out.dtype):
        raise ArgumentError(
            f"{shown(func)} got out={out!r}: a result of {result.dtype} cannot be cast to it; take the result instead"
        )
    if isinstance(out, Sharded):
        refuse_copy(out.local, shown(func))


def _write(out: Any, result: Any) -> None:
    if out.shape != result.shape:  # it has no elements
        if isinstance(out, Sharded) and isinstance(result, Sharded):
            result = result.to(out.dtype, copy=True)
            out.block = result.local
            return relay(out, result)
        out.resize_(result.shape)
    if isinstance(out, Sharded):
        call_torch(Tensor.copy_, (out, result), {})
    elif isinstance(result, Sharded):
        out.copy_(redistribute(result.local, result.spec, result.spec.with_partition(P())))
    else:
        out.copy_(result)
