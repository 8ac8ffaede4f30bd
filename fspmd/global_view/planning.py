"""The plan of a call that is not in the cache.

A call runs by a handler, a composite, a gather, a rule, or the graph of its function: the first of these that applies.
"""

from __future__ import annotations

import functools
import inspect
import operator
from numbers import Integral, Number, Real
from types import FunctionType
from typing import Any, Final

import optree
import torch
from torch import Tensor
from torch.nn import functional as F

from fspmd.body import check_member
from fspmd.copies import refuse_copy
from fspmd.errors import ArgumentError, MeshError, VarianceError
from fspmd.foreign import refuse_misfit
from fspmd.global_view.op_plan import OpPlan, opaque_plan
from fspmd.global_view.question import ask, places_of, sharded_values, tensors_of
from fspmd.global_view.refusals import PASSING, refuse_global, refuse_higher_order, shown
from fspmd.global_view.results import outs_of, written_into
from fspmd.global_view.unruled import gathered, unruled
from fspmd.global_view.variants import propagate
from fspmd.messages import described
from fspmd.ops.operators import BINARY, REFLECTED
from fspmd.ops.signatures import by_own_names, parameters
from fspmd.ops.traits import name_of
from fspmd.rules import ENGINE, composite_of, handler_of, is_ragged, is_registered, is_ruled
from fspmd.sharded import Sharded, call_torch, is_sharded
from fspmd.torch_internals import HigherOrderOperator
from fspmd.tracing import hidden
from fspmd.transport.local_tensor import is_simulated

_NUMBERS: Final = ("alpha", "beta")
_INDEXING: Final = (Tensor.__getitem__, Tensor.__setitem__)


@hidden
def plan_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpPlan:
    """Decide how a call with `Sharded` values runs.

    This leaves inference mode too, in which torch does not say which results are views.

    Raises:
        ArgumentError: The call cannot run, or it fails on the global tensors too.
        MeshError: The values lie on several meshes.
    """
    if isinstance(func, HigherOrderOperator):
        refuse_higher_order(func, [x.spec for x in sharded_values(args, kwargs)])
    if kwargs:
        if any(isinstance(kwargs.get(name), Tensor) for name in _numbers_of(func)):
            return opaque_plan(functools.partial(_with_numbers, func))
        if not isinstance(func, FunctionType) and by_own_names(func, args, kwargs) != (args, kwargs):
            return opaque_plan(lambda args, kwargs: call_torch(func, *by_own_names(func, args, kwargs)))
    leaves = optree.tree_leaves((*args, *kwargs.values()), none_is_leaf=True)
    if any(map(_is_of_numpy, leaves)):
        return opaque_plan(functools.partial(_with_own_numbers, func))
    if func in _INDEXING and any(map(_is_truth, tensors_of(_indices(args[1]), {}))):
        return opaque_plan(functools.partial(_with_index_values, func))
    if func in _INDEXING and any(map(_has_bounds, _indices(args[1]))):
        return opaque_plan(functools.partial(_with_index_values, func))
    try:
        return _plan(func, args, kwargs, [x for x in leaves if isinstance(x, Tensor)])
    except ArgumentError:
        if any(map(_is_index, tensors_of(args[1:], kwargs))):
            return opaque_plan(functools.partial(_with_numbers, func))
        raise
    except VarianceError:
        if is_sharded(args[0]):  # if the operand is a copy in place of a view, this error says more
            refuse_copy(args[0].local, shown(func))
        raise


def _plan(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> OpPlan:
    specs = [x.spec for x in tensors if type(x) is Sharded]
    mesh = specs[0].mesh
    if len(specs) < len(tensors):
        _check_beside(func, tensors)
    for spec in specs:
        if spec.mesh is not mesh and spec.mesh != mesh and not _takes_meshes(func):
            raise MeshError(
                f"{shown(func)} got values on two meshes, {mesh!r} and {spec.mesh!r}; move one with device_put"
            )
    if kwargs and func is not F.normalize and outs_of(func, kwargs):
        return opaque_plan(functools.partial(written_into, func))
    if kwargs or _is_not_defined(func, args) or not is_ruled(func):
        plan = _aside(func, args, kwargs, len(tensors))
        if plan is not None:
            return plan
    operands = places_of(args, kwargs, mesh)
    question = ask(func, args, kwargs, operands) if len(operands) == len(tensors) else None
    plan = None if question is None else propagate(question, args, kwargs)
    if plan is not None:
        return plan
    run, in_parts = unruled(func, specs, args, kwargs)
    return opaque_plan(run, in_parts=in_parts)


def _check_beside(func: Any, tensors: list[Tensor]) -> None:
    """Raise unless the plain tensors beside a `Sharded` are global values."""
    for x in tensors:
        refuse_misfit(x, f"{shown(func)} got, beside a Sharded,")
    if any(map(is_simulated, tensors)):
        raise ArgumentError(
            f"{shown(func)} got the blocks of all simulated ranks beside a Sharded (x.local, or what a body "
            "computed); pass the Sharded itself, or a global tensor"
        )


def _aside(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: int) -> OpPlan | None:
    """Return the plan of a call if something other than a row decides it; ``tensors`` is the number of tensors."""
    _check_device(func, args, kwargs)
    if _is_not_defined(func, args):
        return opaque_plan(lambda args, kwargs: NotImplemented)
    registered = is_registered(func)
    if not registered and (handler := handler_of(func)) is not None:
        return opaque_plan(functools.partial(_tried, func, handler))
    if args and type(args[0]) is Sharded and _says_inplace(func, args, kwargs):
        return opaque_plan(functools.partial(_in_place, func))
    if registered:
        return None
    if name_of(func) in ("to", "type_as") and isinstance(args[1] if len(args) > 1 else kwargs.get("other"), Tensor):
        return opaque_plan(_to_kind_of)
    if (composite := composite_of(func, args, kwargs)) is not None:
        if isinstance(func, FunctionType) and not _names_all(composite, kwargs):
            return opaque_plan(functools.partial(_by_place, composite, inspect.signature(func)), in_parts=True)
        return opaque_plan(functools.partial(_tried, func, composite), in_parts=True)
    if is_ragged(func, tensors, args):
        by_tensor = name_of(func) == "narrow" and any(map(_is_index, tensors_of(args[1:], kwargs)))
        return opaque_plan(functools.partial(_with_numbers if by_tensor else gathered, func))
    return None


def _takes_meshes(func: Any) -> bool:
    """Whether operands may lie on several meshes, since the function treats each by itself."""
    return func in ENGINE or name_of(func).startswith("_foreach_")


def _tried(func: Any, instead: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``instead`` in place of a function. If it fails and torch fails too, raise with torch's message."""
    try:
        return instead(*args, **kwargs)
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


def _names_all(composite: Any, kwargs: dict[str, Any]) -> bool:
    names = inspect.signature(composite).parameters
    return kwargs.keys() <= names.keys() or any(name.kind is name.VAR_KEYWORD for name in names.values())


def _by_place(composite: Any, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a composite that has other parameter names, with positional arguments where possible."""
    given = signature.bind(*args, **kwargs)
    return composite(*given.args, **given.kwargs)


def _is_not_defined(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a tensor leaves an operator to its other operand: ``x == "a"`` is False, ``x + "a"`` fails."""
    if len(args) != 2 or isinstance(args[1], (Tensor, int, float, complex)):
        return False
    name = name_of(func)
    operator = name.startswith("__") and name.strip("_") in (*BINARY, *REFLECTED)
    return operator and getattr(torch.empty((), device="meta"), name)(args[1]) is NotImplemented


def _check_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for a move of a sharded value to another device: its mesh communicates on one device."""
    name = name_of(func)
    if name not in ("to", "cpu", "cuda", "_to_copy") or not is_sharded(args[0]) or not args[0].spec.partition.mentioned:
        return
    given = [name] if name in ("cpu", "cuda") else [kwargs.get("device"), *args[1:2]]
    try:
        device = next((torch.device(x) for x in given if isinstance(x, (str, torch.device))), None)
    except RuntimeError as error:
        raise ArgumentError(f"{shown(func)} of {args[0]!r} got {given}: {error}") from error
    home = args[0].spec.mesh.device
    if device is None:
        return
    if device.type != home.type or (None not in (device.index, home.index) and device.index != home.index):
        raise ArgumentError(
            f"{shown(func)} would take {args[0]!r} to {str(device)!r}, but its mesh communicates on {str(home)!r}; "
            f"write device_get(x).to({str(device)!r})"
        )


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


def _with_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeat the call with Python numbers for 0-d tensors: ``x[i]``, ``x.roll(i)``, ``alpha=t``."""

    def number(x: Any) -> Any:
        return x.item() if _is_index(x) else x

    rest: Any = optree.tree_map(number, (args[1:], kwargs), none_is_leaf=True)
    named = (name for name in _numbers_of(func) if isinstance(kwargs.get(name), Tensor))
    numbers = {name: kwargs[name].item() for name in named}
    return _again(func, (args[0], *rest[0]), {**rest[1], **numbers})


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


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a call with other arguments, of which perhaps none is a `Sharded`."""
    has_sharded = any(map(is_sharded, tensors_of(args, kwargs)))
    return call_torch(func, args, kwargs) if has_sharded else func(*args, **kwargs)


def _has_bounds(x: Any) -> bool:
    return type(x) is slice and any(isinstance(i, Tensor) for i in (x.start, x.stop, x.step))


def _indices(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_truth(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.ndim and x.dtype is torch.bool


def _numbers_of(func: Any) -> tuple[str, ...]:
    """Return the names of keyword arguments that are numbers, for which torch also takes tensors."""
    return (*_NUMBERS, "value") if name_of(func).rstrip("_") in ("addcmul", "addcdiv") else _NUMBERS


def _is_index(x: Any) -> bool:
    kind = x.dtype if isinstance(x, Tensor) and not x.ndim else torch.bool
    return not (kind.is_floating_point or kind.is_complex or kind is torch.bool)


def _says_inplace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an activation has ``inplace=True``, as a keyword or as its last positional argument."""
    if "inplace" in kwargs or not isinstance(func, FunctionType):
        return kwargs.get("inplace") is True
    return args[-1] is True and parameters(func)[len(args) - 1 :] == ["inplace"]


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sharded:
    """Run an activation with ``inplace=True`` on a copy of its operand, since backward may need the old values."""
    args = args if "inplace" in kwargs else args[:-1]
    x: Sharded = args[0]
    refuse_copy(x.local, shown(func))
    copy = call_torch(Tensor.clone, (x,), {})
    new: Sharded = call_torch(func, (copy, *args[1:]), {**kwargs, "inplace": False})
    call_torch(Tensor.copy_, (x, new), {})
    return x


def _to_kind_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``x.to(y)`` or ``x.type_as(y)``: the dtype and the device of y count, its layout does not."""
    if "other" in kwargs:
        args, kwargs = (*args, kwargs["other"]), {name: value for name, value in kwargs.items() if name != "other"}
    x, like, *others = args
    device = () if x.device == like.device else (like.device,)
    return x.to(*device, like.dtype, *others, **kwargs)


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
