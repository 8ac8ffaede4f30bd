"""Calls with ``out=``: the result is computed as usual, and then written into ``out``, which keeps its layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.copies import refuse_copy
from fspmd.errors import ArgumentError, ShapeError
from fspmd.global_view.operands import sharded_values, tensors_of
from fspmd.global_view.refusals import shown
from fspmd.redistribution.redistribute import redistribute
from fspmd.sharded import Sharded, call_torch
from fspmd.spec import P
from fspmd.torch_internals import OpOverload


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
    return tuple(arg.name for arg in func._schema.arguments if arg.is_out) if _is_aten(func) else ("out",)


def _is_aten(func: Any) -> bool:
    return isinstance(func, OpOverload) and func.namespace == "aten"


def written_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call and write its results into ``out``, a tensor or a tuple of tensors.

    An overload of an aten op that must have ``out``, such as ``aten.mm.out``, computes as the op without it does.

    Raises:
        ArgumentError: An operand or ``out`` requires grad, which torch does not support here; or the dtype of the
            result cannot be cast to that of ``out``.
        ShapeError: ``out`` has another shape. (torch would give it new memory.)
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
    if tuple(out.shape) != tuple(result.shape):
        raise ShapeError(
            f"{shown(func)} got out={out!r} for a result of shape {tuple(result.shape)}; give it a tensor of that "
            "shape, or take the result instead"
        )
    if not torch.can_cast(result.dtype, out.dtype):
        raise ArgumentError(
            f"{shown(func)} got out={out!r}: a result of {result.dtype} cannot be cast to it; take the result instead"
        )
    if isinstance(out, Sharded):
        refuse_copy(out.local, shown(func))


def _write(out: Any, result: Any) -> None:
    if isinstance(out, Sharded):
        call_torch(Tensor.copy_, (out, result), {})
    elif isinstance(result, Sharded):
        out.copy_(redistribute(result.local, result.spec, result.spec.with_partition(P())))
    else:
        out.copy_(result)
