"""The parameters of torch functions, the arguments of a call in their order, and the numbers that bear on no layout."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from math import inf
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any, Final, NamedTuple, TypeVar

import torch

from fspmd.cache import cached
from fspmd.ops.traits import name_of
from fspmd.torch_internals import OpOverload, OpOverloadPacket, schema_of

T = TypeVar("T")
#: the place of a tensor: the number of its argument (positional ones first), or that and its index in a list there
Place = int | tuple[int, int]
#: other names that torch's functions in C accept -> names in their schemas
_ALSO: Final = {
    **dict.fromkeys(("input", "x", "a", "x1"), ("self", "input")),
    "x2": ("other",),
    "axis": ("dim",),
    "keepdims": ("keepdim",),
}


def at(values: Sequence[Any], place: Place) -> Any:
    """Return the value at a place."""
    return values[place[0]][place[1]] if isinstance(place, tuple) else values[place]


def argument_of(place: Place) -> int:
    """Return the number of the argument that a place is in."""
    return place[0] if isinstance(place, tuple) else place


def in_order(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments in the order of the parameters: positional up to the first that is missing.

    >>> in_order(torch.addmm, (), {"mat2": 3, "mat1": 2, "beta": 5, "input": 1})
    ((1, 2, 3, 5), {})
    >>> in_order(torch.sum, (1,), {"out": 3, "keepdims": 2})
    ((1,), {'keepdim': 2, 'out': 3})
    """
    if not kwargs:
        return args, kwargs
    order = parameters(func)
    named = {_parameter(order, name): value for name, value in kwargs.items()}
    placed = list(args)
    for name in order[len(args) :]:
        if name not in named:
            break
        placed.append(named.pop(name))
    return tuple(placed), {name: named[name] for name in sorted(named, key=_rank(order))}


def by_own_names(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a function in C under the names of its schema; the first becomes positional.

    >>> by_own_names(torch.sum, (), {"keepdims": True, "axis": 1, "input": 0})
    ((0,), {'keepdim': True, 'dim': 1})
    """
    order = parameters(func)
    meant = {name: _parameter(order, name) for name in kwargs}
    first = None
    if not args:
        overloads = [[argument.name for argument in schema.arguments] for schema in schemas(func)]
        first = next((names[0] for names in overloads if {*meant.values()} <= {*names}), "self")
    given = [kwargs[name] for name, parameter in meant.items() if parameter == first]
    rest = {name: parameter for name, parameter in meant.items() if parameter != first}
    return (*args, *given), {name if to == "self" else to: kwargs[name] for name, to in rest.items()}


def by_signature(
    func: Any, positional: int, names: list[str], operands: Sequence[tuple[Place, T]]
) -> Sequence[tuple[Place, T]] | None:
    """Return the operands in the order of the parameters; None if the names of some are unknown."""
    named = [operand for operand in operands if argument_of(operand[0]) >= positional]
    if len(named) < 2:
        return operands
    order = parameters(func)
    by_name = [_parameter(order, names[argument_of(place) - positional]) for place, _ in named]
    if not {*order}.issuperset(by_name):
        return None
    ranks = sorted(range(len(named)), key=lambda i: order.index(by_name[i]))
    return [*(each for each in operands if argument_of(each[0]) < positional), *(named[i] for i in ranks)]


def stand_in_order(local: Any, positional: int, names: tuple[str, ...]) -> bool:
    """Whether keyword arguments can be passed as positional ones, which is quicker, in all overloads."""
    end, agree = positional + len(names), False
    for before, after in _parameters_of(local):
        if len(before) >= end or not {*names}.isdisjoint((*before, *after)):
            if before[positional:end] != names:
                return False
            agree = True
    return agree


@cached
def may_view(func: Any) -> bool:
    """Whether a result may be a view of an operand, by the schemas. Those of `reshape` say so too."""
    aliases = [returned.alias_info for schema in schemas(func) for returned in schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


@cached
def parameters(func: Any) -> list[str]:
    """Return the names of a function's parameters; those of a function in C come from its schemas."""
    if isinstance(func, OpOverload):
        return [argument.name for argument in schema_of(func).arguments]
    if isinstance(func, OpOverloadPacket):
        return _of_any(schemas(func))
    try:
        return list(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return _of_any(schemas(func))


def _of_any(schemas: list[Any]) -> list[str]:
    return list(dict.fromkeys(argument.name for schema in schemas for argument in schema.arguments))


def required(func: Any) -> list[list[str]]:
    """Return the types of the required arguments of each overload. For a Python function all count as tensors."""
    if overloads := [schema_of(func)] if isinstance(func, OpOverload) else schemas(func):
        return [[str(arg.type) for arg in schema.arguments if not arg.has_default_value()] for schema in overloads]
    try:
        arguments = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return []
    return [["Tensor" for p in arguments if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]]


@cached
def _parameters_of(func: Any) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return, for each known overload, the names of parameters that may be positional, and of keyword-only ones."""
    if isinstance(func, FunctionType):
        code = func.__code__
        every = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return [(every[: code.co_argcount], every[code.co_argcount :])]
    if not isinstance(func, (BuiltinFunctionType, MethodDescriptorType)):
        return []
    overloads = [[(arg.name, arg.kwarg_only) for arg in schema.arguments] for schema in schemas(func)]
    return [(tuple(x for x, only in args if not only), tuple(x for x, only in args if only)) for args in overloads]


def schemas(func: Any) -> list[Any]:
    """Return the schemas of the overloads of a torch function in C."""
    packet: Any = getattr(torch.ops.aten, name_of(func), None)
    known = isinstance(packet, OpOverloadPacket)  # `__eq__`, for example, is a method of the namespace itself
    return [schema_of(getattr(packet, name)) for name in packet.overloads()] if known else []


def _parameter(order: list[str], name: str) -> str:
    """Return the parameter that the name of an argument stands for."""
    return name if name in order else next((other for other in _ALSO.get(name, ()) if other in order), name)


def _rank(order: list[str]) -> Any:
    return lambda name: order.index(name) if name in order else len(order)


# --- numbers that bear on no layout: keys of plans do not hold their values -----------------------------------------

Kinds = frozenset[type]

FLOATS: Final[Kinds] = frozenset((float, complex))
NUMBERS: Final[Kinds] = FLOATS | {int}
#: all numbers count: even floats bear on shapes, or on the dims that must be whole
NONE: Final[Kinds] = frozenset()


class Free(NamedTuple):
    """The numbers of a function that bear on no layout, so that calls with other such numbers share a plan."""

    kinds: Kinds = FLOATS  # the types of these numbers
    places: frozenset[int | str] = frozenset()  # places and names of ints among them
    distinct: frozenset[float] = frozenset()  # values that need a plan of their own


#: ints that are values, in functions whose other ints are dims or sizes
_VALUES: Final[dict[str, frozenset[int | str]]] = {
    **dict.fromkeys(("index_fill", "index_fill_", "scatter", "scatter_", "pad"), frozenset((3, "value"))),
    "constant_pad_nd": frozenset((2, "value")),
    "layer_norm": frozenset((4, "eps")),
    "rms_norm": frozenset((3, "eps")),
    "__setitem__": frozenset((2,)),
}
#: special values: a rate of 0 drops, smooths or adds nothing, and norms of order inf are maxima
_DISTINCT: Final = dict.fromkeys(
    (
        *("scaled_dot_product_attention", "cross_entropy", "linear_cross_entropy"),
        *("constant_pad_nd", "linalg_vector_norm", "_cdist_forward", "_pdist_forward"),
    ),
    frozenset((0.0, inf, -inf)),
)


def free(name: str, kinds: Kinds) -> Free:
    """Return the free numbers of a function by its name, given the types of its row."""
    distinct = _DISTINCT.get(name, frozenset[float]())
    return Free(kinds - {float} if distinct else kinds, _VALUES.get(name, frozenset()), distinct)
