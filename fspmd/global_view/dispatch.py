"""Torch functions on `Sharded` values: make the key, look up the plan, call torch on the blocks, wrap the result.

All of this runs above autograd, which follows the call on the blocks.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, Final, NoReturn

import optree
import torch
from torch import Tensor

from fspmd.body import RUNNING, state
from fspmd.cache import Cache, CacheInfo, forgettable
from fspmd.copies import as_copies, refuse_copy
from fspmd.errors import ArgumentError
from fspmd.forms import Laid, Strided, as_made, packed
from fspmd.global_view.call_keys import CONSTANT, COUNTING, FLOATING, add_argument, forget_functions, keyed
from fspmd.global_view.composed import cheaper
from fspmd.global_view.op_plan import OpPlan, cast_operands, move_operands
from fspmd.global_view.planning import plan_call
from fspmd.global_view.question import sharded_values
from fspmd.global_view.refusals import shown
from fspmd.global_view.result_types import memory_of
from fspmd.global_view.results import with_strides
from fspmd.global_view.spellings import tell_call
from fspmd.local_view.modes import leave_to_python
from fspmd.messages import described
from fspmd.ops.signatures import at
from fspmd.ops.traits import INSTEAD_OF_COMPILED
from fspmd.redistribution.cost import replan_with
from fspmd.redistribution.redistribute import keep
from fspmd.remembered import wrote
from fspmd.rules import IN_C
from fspmd.sharded import Sharded, formed, held_as, is_sharded, laid, pair, shell
from fspmd.spec import TensorSpec, is_float
from fspmd.tracing import is_jit_traced, untraceable


def _plan(key: tuple[Any, ...], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpPlan:
    """Plan a call that is not in the cache."""
    by_default = (torch.get_default_dtype(), *key)
    plan = _plans.get(by_default)
    if plan is not None:
        _plans.hits += 1
        return plan
    if is_jit_traced():  # sizes are tensors then
        raise untraceable(sharded_values(args, kwargs)[0])
    plan = plan_call(func, args, kwargs)
    if plan.whole is not None:
        plan = with_strides(cheaper(plan, func, args, kwargs), func, args, kwargs)
    _plans.misses += 1
    _plans[by_default if _by_default_dtype(plan, key) else key] = plan
    return plan


_plans: Final[Cache[Any, OpPlan]] = forgettable(Cache())


def propagation_cache_info() -> CacheInfo:
    """Return hits, misses and size of the cache of plans for torch functions on `Sharded` values."""
    return _plans.info()


def propagation_cache_clear() -> None:
    """Forget all plans, and set the counters to zero."""
    _plans.clear()


def forget_plans() -> None:
    """Forget all plans because a rule or the topology has changed."""
    _plans.forget()
    forget_functions()


replan_with(forget_plans)


def propagation_cache_resize(maxsize: int) -> None:
    """Keep at most ``maxsize`` plans (default: 4096); 0 turns the cache off. The oldest plans go first.

    Raises:
        ArgumentError: ``maxsize`` is not an int, or is negative.
    """
    if type(maxsize) is not int or maxsize < 0:
        raise ArgumentError(f"propagation_cache_resize got {described(maxsize)}; give it a number of plans, 0 or more")
    _plans.maxsize = maxsize
    _plans.shrink()


def dispatch(_: type[Sharded], func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Call ``func`` on `Sharded` values. Plain tensors among the arguments are global values that every rank has.

    This is ``Sharded.__torch_function__`` itself, so every line counts in every call.
    """
    if RUNNING and state.body is not None:
        _refuse_in_body(func, args, kwargs or {})
    cached: tuple[Any, ...] | None = None
    blocks: Any = None
    count = len(args)
    if kwargs:
        if func in IN_C and kwargs["dtype"] is None and type(dim := kwargs["dim"]) is int:
            x, func, kwargs = args[0], IN_C[func], None
            cached, blocks, args = (func, x.form, dim), (x.block, dim), (x, dim)
    elif count == 2:  # as below, in half the time; the same for one argument, and for three
        x, y = args
        if type(x) is Sharded:
            kind = type(y)
            if kind is Sharded:
                cached, blocks = (func, x.form, y.form), (x.block, y.block)
            elif kind is int and func in COUNTING:
                cached, blocks = (func, x.form, y), (x.block, y)
            elif kind is float and func in FLOATING:
                cached, blocks = (func, x.form, float), (x.block, y)
    elif count == 1:
        if type(x := args[0]) is Sharded:
            cached, blocks = (func, x.form), (x.block,)
    elif count == 3 and type(x := args[0]) is type(y := args[1]) is type(z := args[2]) is Sharded:
        cached, blocks = (func, x.form, y.form, z.form), (x.block, y.block, z.block)
    if cached is None:
        key: list[Any] = [func]
        blocks = []
        for arg in args:
            kind = type(arg)
            if kind is Sharded:
                key.append(arg.form)
                blocks.append(arg.block)
            elif kind is list:
                values: list[Any] = []
                key.append(list)
                for item in arg:
                    if type(item) is Sharded:
                        key.append(item.form)
                        values.append(item.block)
                    else:
                        key.append(keyed(func, item))
                        values.append(item)
                key.append(list)  # the end of the list
                blocks.append(values)
            elif (kind is int and func in COUNTING) or kind in CONSTANT:
                key.append(arg)
                blocks.append(arg)
            else:
                add_argument(func, arg, kind, key, blocks)
        if kwargs:
            key.append(dict)  # names follow, each with its value
            for name, arg in kwargs.items():
                key.append(name)
                kind = type(arg)
                if kind is Sharded:
                    key.append(arg.form)
                    blocks.append(arg.block)
                elif (kind is int and func in COUNTING) or kind in CONSTANT:
                    key.append(arg)
                    blocks.append(arg)
                else:
                    add_argument(func, arg, kind, key, blocks, name)
        cached, blocks = tuple(key), tuple(blocks)  # f(*tuple) is quicker than f(*list)
    try:
        plan = _plans[cached]
        _plans.hits += 1
    except KeyError:
        plan = None
    except TypeError:  # an argument has no hash
        return _with_arrays(func, args, kwargs or {})
    if plan is None:
        plan = _plan(cached, func, args, kwargs or {})
    casts = None
    if not plan.at_once:
        if plan.whole is not None:
            return plan.whole(args, kwargs or {})
        blocks = list(blocks)
        if plan.choose is not None:
            plan = plan.choose(blocks)
        if not plan.at_once:
            if plan.writes:
                memory = refuse_copy(blocks[0], plan.name)
            if plan.copies is not None:
                viewed = at(blocks, plan.copies)
            casts = move_operands(plan, blocks) if plan.moves else []
            if plan.casts:
                casts += cast_operands(plan, blocks)
        blocks = tuple(blocks)
    try:
        if plan.in_order:
            out = plan.local(*blocks)
        elif plan.by_name:
            out = plan.local(*blocks[: len(args)], **dict(zip(kwargs, blocks[len(args) :], strict=True)))
        else:
            out = plan.local(*blocks[: len(args)], **kwargs)
    except Exception as error:
        tell_call(error, func, args, kwargs or {})
        raise
    if casts is not None:
        if plan.writes:
            wrote(blocks[0], False, memory)
            return args[0]
        if casts:
            keep(casts, out)
        if plan.copies is not None:
            out = as_copies(out, viewed, plan.name)
    if not plan.single or out.dtype is not plan.dtype:
        return _wrapped(out, plan, (*args, *kwargs.values()) if kwargs else args)
    value = shell(*plan.shell)  # as `pair` does
    value.block = out
    value.spec = plan.results  # type: ignore[assignment]
    value.form = plan.form
    return value


def _wrapped(out: Any, plan: OpPlan, given: tuple[Any, ...]) -> Any:
    """Wrap several results, or one whose dtype autocast changed, or whose storage offset depends on an operand."""
    results = plan.results
    if isinstance(results, TensorSpec):
        spec = _of_dtype(results, out.dtype)
        if plan.memory is None:
            return pair(out, spec)
        value = laid(out, spec, memory_of(plan.memory[0], out.dtype, given))
        if plan.made:
            value.form = as_made(value.form)
        return value
    values = []
    for i, (x, spec) in enumerate(zip(out, results, strict=True)):
        # one result may be equal on ranks whose other results differ: `info` of a factorisation with cut columns
        block = x if type(x) is Tensor else held_as(x, spec)
        if plan.parts is not None and x.dtype is spec.dtype:
            values.append(formed(block, spec, *plan.parts[i]))
        else:
            lies = Laid(packed(spec.shape)) if plan.memory is None else memory_of(plan.memory[i], x.dtype, given)
            values.append(laid(block, _of_dtype(spec, x.dtype), lies))
    return type(out)(values)


def _of_dtype(spec: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    return spec if spec.dtype == dtype else TensorSpec(spec.mesh, spec.partition, spec.shape, dtype)


def _by_default_dtype(plan: OpPlan, key: tuple[Any, ...]) -> bool:
    """Whether the result has torch's default dtype, which may change: a quotient of integers, for example."""
    if any(map(_has_float, key)):
        return False
    results = plan.results if isinstance(plan.results, tuple) else (plan.results,)
    return any(is_float(spec.dtype) for spec in results)


def _has_float(part: Any) -> bool:
    if type(part) is Strided:
        part = part.spec
    return any(map(_has_float, part)) if type(part) is tuple else type(part) is TensorSpec and is_float(part.dtype)


def _with_arrays(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeat the call with NumPy arrays as tensors: global values, as plain tensors are."""
    tree: Any = (args, kwargs)
    leaves, treedef = optree.tree_flatten(tree, none_is_leaf=True)
    try:
        tensors = [torch.as_tensor(x) if type(x).__name__ == "ndarray" else x for x in leaves]
    except TypeError as error:
        raise ArgumentError(f"{shown(func)} got an array that cannot become a tensor: {error}") from error
    if all(new is old for new, old in zip(tensors, leaves, strict=True)):
        given = " and ".join(repr(x) if is_sharded(x) else described(x) for x in (*args, *kwargs.values()))
        raise ArgumentError(f"{shown(func)} got {given}; give it tensors and numbers")
    args, kwargs = treedef.unflatten(tensors)
    return dispatch(Sharded, func, (), args, kwargs)


def _refuse_in_body(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    assert state.body is not None
    x, name = sharded_values(args, kwargs)[0], state.body.name
    how = "None for it in in_dims" if name.startswith("vmap(") else "its spec in in_specs"
    raise ArgumentError(
        f"{shown(func)} was used on {x!r} inside {name}, whose values are this rank's blocks; pass it as an argument, "
        f"with {how}, instead of closing over it"
    )


leave_to_python(
    dispatch,
    "torch functions on Sharded values are not compiled. Functions that torch compiles as a whole take no Sharded. "
    f"{INSTEAD_OF_COMPILED}",
)
Sharded.__torch_function__ = MethodType(dispatch, Sharded)
