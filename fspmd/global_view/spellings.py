"""Calls that run as another call: with Python numbers, with torch's own names, by a composite, on a copy."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from numbers import Integral, Number, Real
from types import FunctionType
from typing import Any, Final

import optree
import torch
from torch import Tensor

from fspmd.body import check_member
from fspmd.copies import refuse_copy
from fspmd.errors import ArgumentError
from fspmd.global_view.question import sharded_values, tensors_of
from fspmd.global_view.refusals import PASSING, refuse_global, shown
from fspmd.messages import described
from fspmd.ops.signatures import by_own_names, parameters
from fspmd.ops.traits import name_of
from fspmd.rules import ENGINE
from fspmd.sharded import Sharded, call_torch, is_sharded

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_NUMBERS: Final = ("alpha", "beta")
INDEXING: Final = frozenset((Tensor.__getitem__, Tensor.__setitem__))


def respelled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]) -> Run | None:
    """Return a function that repeats a call in the spelling that rules know, or None if it has this spelling.

    ``leaves`` are the values among the arguments, at any depth.
    """
    if kwargs:
        if any(isinstance(kwargs.get(name), Tensor) for name in _numbers_of(func)):
            return functools.partial(with_numbers, func)
        if not isinstance(func, FunctionType) and by_own_names(func, args, kwargs) != (args, kwargs):
            return lambda args, kwargs: call_torch(func, *by_own_names(func, args, kwargs))
    if any(map(_is_of_numpy, leaves)):
        return functools.partial(_with_own_numbers, func)
    if func in INDEXING:
        indices = _indices(args[1])
        if any(map(_is_truth, tensors_of(indices, {}))) or any(map(_has_bounds, indices)):
            return functools.partial(_with_index_values, func)
    return None


def _numbers_of(func: Any) -> tuple[str, ...]:
    """Return the names of keyword arguments that are numbers, for which torch also takes tensors."""
    return (*_NUMBERS, "value") if name_of(func).rstrip("_") in ("addcmul", "addcdiv") else _NUMBERS


def _is_of_numpy(x: Any) -> bool:
    return isinstance(x, Number) and not isinstance(x, (int, float, complex)) and hasattr(x, "dtype")


def _with_own_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeat the call with Python numbers for those of NumPy: ``x.sum(np.int64(0))``."""

    def number(x: Any) -> Any:
        if not _is_of_numpy(x):
            return x
        return int(x) if isinstance(x, Integral) else float(x) if isinstance(x, Real) else complex(x)

    args, kwargs = optree.tree_map(number, (args, kwargs), none_is_leaf=True)
    return call_torch(func, args, kwargs)


def with_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeat the call with Python numbers for 0-d tensors: ``x[i]``, ``x.roll(i)``, ``alpha=t``."""

    def number(x: Any) -> Any:
        return x.item() if is_index(x) else x

    rest: Any = optree.tree_map(number, (args[1:], kwargs), none_is_leaf=True)
    named = (name for name in _numbers_of(func) if isinstance(kwargs.get(name), Tensor))
    numbers = {name: kwargs[name].item() for name in named}
    return _again(func, (args[0], *rest[0]), {**rest[1], **numbers})


def is_index(x: Any) -> bool:
    """Whether a value is a 0-d tensor of an integer dtype."""
    kind = x.dtype if isinstance(x, Tensor) and not x.ndim else torch.bool
    return not (kind.is_floating_point or kind.is_complex or kind is torch.bool)


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a call with other arguments, of which perhaps none is a `Sharded`."""
    has_sharded = any(map(is_sharded, tensors_of(args, kwargs)))
    return call_torch(func, args, kwargs) if has_sharded else func(*args, **kwargs)


def _with_index_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeat ``x[mask]`` and ``x[:n]`` with Python values for 0-d masks and bounds, which decide the result's shape.

    A bool adds a dim of size 1 if it is True, and of size 0 if not.
    """
    index = tuple(map(_index_value, _indices(args[1])))
    return _again(func, (args[0], index if isinstance(args[1], tuple) else index[0], *args[2:]), kwargs)


def _index_value(x: Any) -> Any:
    if _has_bounds(x):
        return slice(*(operator.index(i) if isinstance(i, Tensor) else i for i in (x.start, x.stop, x.step)))
    return x.item() if _is_truth(x) else x


def _indices(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _has_bounds(x: Any) -> bool:
    return type(x) is slice and any(isinstance(i, Tensor) for i in (x.start, x.stop, x.step))


def _is_truth(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.ndim and x.dtype is torch.bool


def says_inplace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an activation has ``inplace=True``, as a keyword or as its last positional argument."""
    if "inplace" in kwargs or not isinstance(func, FunctionType):
        return kwargs.get("inplace") is True
    return args[-1] is True and parameters(func)[len(args) - 1 :] == ["inplace"]


def in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sharded:
    """Run an activation with ``inplace=True`` on a copy of its operand, since backward may need the old values."""
    args = args if "inplace" in kwargs else args[:-1]
    x: Sharded = args[0]
    refuse_copy(x.local, shown(func))
    copy = call_torch(Tensor.clone, (x,), {})
    new: Sharded = call_torch(func, (copy, *args[1:]), {**kwargs, "inplace": False})
    call_torch(Tensor.copy_, (x, new), {})
    return x


def to_kind_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``x.to(y)`` or ``x.type_as(y)``: the dtype and the device of y count, its layout does not."""
    if "other" in kwargs:
        args, kwargs = (*args, kwargs["other"]), {name: value for name, value in kwargs.items() if name != "other"}
    x, like, *others = args
    device = () if x.device == like.device else (like.device,)
    return x.to(*device, like.dtype, *others, **kwargs)


def as_composite(func: Any, composite: Any, kwargs: dict[str, Any]) -> Run:
    """Return a function that runs a composite; by place, if torch has other names for the parameters."""
    names = inspect.signature(composite).parameters
    knows_all = kwargs.keys() <= names.keys() or any(name.kind is name.VAR_KEYWORD for name in names.values())
    if not isinstance(func, FunctionType) or knows_all:
        return functools.partial(tried, func, composite)
    signature = inspect.signature(func)

    def by_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = signature.bind(*args, **kwargs)
        return composite(*given.args, **given.kwargs)

    return by_place


def tried(func: Any, replacement: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``replacement`` in place of a function. If it fails and torch fails too, raise with torch's message."""
    try:
        return replacement(*args, **kwargs)
    except PASSING:
        raise
    except Exception as error:
        if func in ENGINE and isinstance(error, RuntimeError):  # about the graph, which tensors without data lack
            raise
        tree: Any = (args, kwargs)
        whole: Any = optree.tree_map(_without_data, tree, none_is_leaf=True)
        try:
            func(*whole[0], **whole[1])
        except Exception as complaint:
            if func not in ENGINE or not isinstance(complaint, RuntimeError):  # else the error is that of a backward
                refuse_global(func, [x.spec for x in sharded_values(args, kwargs)], complaint)
        tell_call(error, func, args, kwargs)
        raise


def _without_data(x: Any) -> Any:
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def tell_call(error: Exception, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Add the call to an error that torch raised for blocks. Only torch knows errors in values, such as an index."""
    if isinstance(error, PASSING) or getattr(error, "__notes__", None):
        return
    if "convert all Tensors to FakeTensors" in str(error):
        given = ", ".join(map(repr, sharded_values(args, kwargs)))
        raise ArgumentError(
            f"{shown(func)} of {given} was called under torch's FakeTensorMode, but its blocks are not fake tensors; "
            "call it outside of the mode, or for shapes without values write fspmd.jit(f).lower(spec)"
        ) from error
    check_member(sharded_values(args, kwargs)[0].spec.mesh, shown(func), error)
    given = ", ".join(repr(x) if is_sharded(x) else described(x) for x in tensors_of(args, kwargs))
    error.add_note(f"raised by {shown(func)} of {given}; sizes and places are those of a rank's block")
