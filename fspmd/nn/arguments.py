"""Checks of arguments by their annotations, so that a wrong kind is an error of fspmd in every function alike."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from numbers import Real
from typing import Annotated, Any, ParamSpec, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.foreign import loose_kind
from fspmd.messages import described
from fspmd.sharded import Sharded

Q = ParamSpec("Q")
R = TypeVar("R")
#: the words for a kind in an error, by its name
_WORDS = {
    "Tensor": "a tensor",
    "str": "a string",
    "tuple": "a tuple",
    "int": "an int",
    "Real": "a number",
    "bool": "True or False",
    "dtype": "a dtype, such as torch.bfloat16",
    "Callable": "a function",
    "Iterable": "a list",
    "Sequence": "a list",
    "NoneType": "None",
    "Mask": "a mask, such as Causal()",
    "SequenceLayout": "a layout, such as zigzag(length, ranks)",
    "PartialAttention": "a part, such as attend_block(q, k, v)",
    "Routing": "the result of route",
    "Dispatched": "the result of dispatch",
    "Precision": "a Precision, such as Precision(compute=torch.bfloat16)",
    "Optimizer": "an optimizer, such as adamw(1e-3)",
    "TensorSpec": "a TensorSpec, such as x.spec of a Sharded",
    "P": "a spec, such as P(None, 'tp')",
    "Mesh": "a mesh, make_mesh(...)",
    "Schedule": "a table, such as one_f_one_b(ranks, microbatches)",
    "Costs": "Costs(forward, input_gradient, weight_gradient)",
}


@dataclass(frozen=True, slots=True)
class Fits:
    """A note of ``Annotated``: the values of a kind that are taken, and the words for them."""

    words: str
    test: Callable[[Any], bool]


Size = Annotated[int, Fits("an int from 1 on", lambda n: type(n) is int and n > 0)]
Count = Annotated[int, Fits("an int from 0 on", lambda n: type(n) is int and n >= 0)]
Positive = Annotated[float, Fits("a number above 0", lambda x: 0 < x < torch.inf)]
Scale = Annotated[
    float,
    Fits("a finite number, and multiply queries by tensors", lambda x: type(x) in (int, float) and isfinite(x)),
]
Finite = Annotated[float, Fits("a finite number from 0 on", lambda x: 0 <= x < torch.inf)]
FloatDtype = Annotated[torch.dtype, Fits("a floating dtype, such as torch.bfloat16", lambda x: x.is_floating_point)]
Block = Annotated[
    Tensor,
    Fits("a tensor: in a body, the block of this rank (see shard_map)", lambda x: not isinstance(x, Sharded)),
]
Kind = tuple[type, Fits | None]


def checked(function: Callable[Q, R]) -> Callable[Q, R]:
    """The function, which raises `ArgumentError` for an argument of another kind than its annotation says.

    Python's errors for missing arguments and unknown names stay. ``Any``, and what is no class, is not checked. Of a
    kind that is annotated with `Fits`, the values are checked too.

    >>> from torch import Tensor
    >>> @checked
    ... def doubled(x: Tensor, times: int = 2) -> Tensor:
    ...     return x * times
    >>> doubled([1.0])
    Traceback (most recent call last):
        ...
    fspmd.errors.ArgumentError: doubled got the list [1.0] for x; give it a tensor
    """
    parameters = inspect.signature(function).parameters
    names: dict[str, Any] = inspect.unwrap(function).__globals__
    kinds_of = {name: _kinds(p.annotation, names) for name, p in parameters.items()}
    kinds = {name: kind for name, kind in kinds_of.items() if kind is not None}
    axes = {name for name, p in parameters.items() if "Axes" in str(p.annotation)}
    places = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    what = function.__qualname__.rpartition("<locals>.")[2]

    @functools.wraps(function)
    def call(*args: Q.args, **kwargs: Q.kwargs) -> R:
        for name, x in (*zip(places, args), *kwargs.items()):  # noqa: B905  Python refuses what is too much
            if name in axes:
                _check_axes(what, name, x, kinds[name])
            elif name in kinds:
                _check(what, name, x, kinds[name])
        return function(*args, **kwargs)

    return call


def check_fields(x: Any) -> None:
    """Raise `ArgumentError` for a field of a dataclass whose value is not what its annotation says."""
    for field in fields(x):
        kinds = _kinds(field.type, vars(inspect.getmodule(type(x))))
        _check(type(x).__name__, field.name, getattr(x, field.name), kinds or ((object, None),))


def _check(what: str, name: str, x: Any, kinds: tuple[Kind, ...]) -> None:
    if type(x) is Tensor and loose_kind(x):
        raise ArgumentError(f"{what} got {described(x)} for {name}; give it a dense one: x.to_dense()")
    for kind, note in kinds:
        if isinstance(x, kind) and (note is None or note.test(x)):
            return
    raise ArgumentError(f"{what} got {described(x)} for {name}; give it {wanted(kinds)}")


def _check_axes(what: str, name: str, x: object, kinds: tuple[Kind, ...]) -> None:
    """Raise unless a value is the name of a mesh axis, or names in a tuple or a list, or None where that is a kind."""
    names = x if isinstance(x, (tuple, list)) else [x]
    if not (x is None and (types.NoneType, None) in kinds) and not all(
        isinstance(axis, str) and axis for axis in names
    ):
        raise ArgumentError(
            f"{what} got {described(x)} for {name}; give it the name of a mesh axis, such as 'cp', or a tuple of names"
        )


def wanted(kinds: Iterable[Kind]) -> str:
    """What to give, in words."""
    words = (note.words if note else _WORDS.get(kind.__name__, f"a {kind.__name__}") for kind, note in kinds)
    return " or ".join(dict.fromkeys(words))


def _kinds(annotation: Any, names: Mapping[str, Any]) -> tuple[Kind, ...] | None:
    """The classes that an annotation names, with their notes; None for anything."""
    if annotation is inspect.Parameter.empty:
        return None
    return _flat(_value(annotation, names) if isinstance(annotation, str) else annotation)


def _value(annotation: str, names: Mapping[str, Any]) -> Any:
    """What an annotation stands for, without the kinds of items: ``list[KVCache]`` is a list."""
    known = {**vars(builtins), **names}

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp):
            return Union[value(node.left), value(node.right)]  # noqa: UP007  these are values
        if isinstance(node, ast.Subscript):
            return value(node.value)
        if isinstance(node, ast.Attribute):
            return getattr(value(node.value), node.attr)
        return known.get(node.id, Any) if isinstance(node, ast.Name) else None  # a class in its own methods is Any

    return value(ast.parse(annotation, mode="eval").body)


def _flat(kind: Any) -> tuple[Kind, ...] | None:
    if get_origin(kind) is Annotated:
        base, note = get_args(kind)
        return tuple((entry, note) for entry, _ in _flat(base) or ())
    if get_origin(kind) in (Union, types.UnionType):
        parts = [_flat(part) for part in get_args(kind)]
        return None if None in parts else tuple(dict.fromkeys(entry for part in parts for entry in part or ()))
    kind = get_origin(kind) or kind
    if kind is None:
        return ((types.NoneType, None),)
    if kind is float:
        return ((Real, None),)
    return ((kind, None),) if isinstance(kind, type) and kind is not Any else None
