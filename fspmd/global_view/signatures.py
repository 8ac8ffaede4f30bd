"""The parameters of torch functions, and how the arguments of a call stand to them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any

import torch

from fspmd.global_view.outcomes import Place
from fspmd.op_kinds import name_of
from fspmd.spec import TensorSpec
from fspmd.torch_internals import OpOverload, OpOverloadPacket


def by_signature(
    func: Any, positional: int, names: list[str], operands: Sequence[tuple[Place, TensorSpec]]
) -> Sequence[tuple[Place, TensorSpec]] | None:
    """The operands in the order of the parameters, however they were named; None where that is not known."""
    if not names:
        return operands

    def place_of(operand: tuple[Place, TensorSpec]) -> int:
        place = operand[0]
        return place[0] if isinstance(place, tuple) else place

    named = [operand for operand in operands if place_of(operand) >= positional]
    if len(named) < 2:
        return operands
    order = parameters(func)
    if not all(names[place_of(operand) - positional] in order for operand in named):
        return None
    named.sort(key=lambda operand: order.index(names[place_of(operand) - positional]))
    return [*(operand for operand in operands if place_of(operand) < positional), *named]


def stand_in_order(local: Any, positional: int, names: tuple[str, ...]) -> bool:
    """Whether keyword arguments can be given as positional ones, which is quicker: no overload has them elsewhere."""
    if not names:
        return True
    end, agree = positional + len(names), False
    for before, after in _parameters_of(local):
        if len(before) >= end or not {*names}.isdisjoint((*before, *after)):
            if before[positional:end] != names:
                return False
            agree = True
    return agree


@functools.cache
def may_view(func: Any) -> bool:
    """Whether a result may be a view of an operand, as schemas say it, which say so of `reshape`, too."""
    given = [returned.alias_info for schema in schemas(func) for returned in schema.returns]
    return any(alias is not None and not alias.is_write for alias in given)


@functools.cache
def parameters(func: Any) -> list[str]:
    """The names of a function's parameters; torch's own in C are known by their schemas."""
    if isinstance(func, OpOverload):
        return [argument.name for argument in func._schema.arguments]
    try:
        return list(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return list(dict.fromkeys(argument.name for schema in schemas(func) for argument in schema.arguments))


def required(func: Any) -> list[list[str]]:
    """The types of the arguments that a call must have, of each overload; of a Python function all are tensors."""
    if found := [func._schema] if isinstance(func, OpOverload) else schemas(func):
        return [[str(one.type) for one in schema.arguments if not one.has_default_value()] for schema in found]
    try:
        own = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return []
    return [["Tensor" for one in own if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]]


@functools.cache
def _parameters_of(func: Any) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The names of the parameters that may be positional, and of the others, of each overload that is known."""
    if isinstance(func, FunctionType):
        code = func.__code__
        every = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return [(every[: code.co_argcount], every[code.co_argcount :])]
    if not isinstance(func, (BuiltinFunctionType, MethodDescriptorType)):
        return []
    found = [[(one.name, one.kwarg_only) for one in schema.arguments] for schema in schemas(func)]
    return [(tuple(x for x, only in one if not only), tuple(x for x, only in one if only)) for one in found]


def schemas(func: Any) -> list[Any]:
    """Of the overloads of torch's own functions in C."""
    packet: Any = getattr(torch.ops.aten, name_of(func), None)
    known = isinstance(packet, OpOverloadPacket)  # not a method of the namespace, as `__eq__` is
    return [getattr(packet, name)._schema for name in packet.overloads()] if known else []
