"""Torch functions on `Sharded` values: one flatten, one look-up, one local call above autograd, one wrap."""

from __future__ import annotations

import functools
import itertools
import weakref
from math import isnan
from types import MethodType
from typing import Any, NamedTuple, NoReturn

import optree
import torch
from torch import Tensor

from fspmd.body import state
from fspmd.copies import refuse_copy
from fspmd.decompose import Graph, NotTraceable, WritesOperand, decompose, tensors_of, written
from fspmd.errors import ArgumentError, FspmdError, MeshError, ShapeError
from fspmd.mesh import Mesh
from fspmd.messages import described
from fspmd.op_kinds import name_of
from fspmd.pairs import Call, apply
from fspmd.propagate import NoRuleError, OpPlan, Place, as_whole, propagate, refuse_rule, shown
from fspmd.redistribute import redistribute
from fspmd.rules import composite_of, handler_of, is_ragged, row_of, writes
from fspmd.sharded import Sharded, above, is_sharded
from fspmd.spec import P, TensorSpec
from fspmd.transport.local_tensor import LocalTensor

_transforms_active = torch._C._are_functorch_transforms_active
_grad_enabled = torch.is_grad_enabled
_autocast = torch._C._is_any_autocast_enabled
_new = object.__new__
_CASTS = "_fspmd_casts"


class _Casts(dict[Call, tuple["weakref.ref[Tensor]", int]]):
    """The casts of a tensor that are alive, and its version when they were made; a copy of the tensor has none."""

    def __reduce__(self) -> Any:
        return _Casts, ()

    def __deepcopy__(self, memo: Any) -> _Casts:
        return _Casts()


class CacheInfo(NamedTuple):
    """Like that of ``functools.lru_cache``."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


class _Cache:
    """Plans by what decides them: at most ``maxsize``, of which the oldest goes first."""

    __slots__ = ("hits", "maxsize", "misses")

    def __init__(self) -> None:
        self.hits = self.misses = 0
        self.maxsize = 65536

    def plan(self, key: tuple[Any, ...], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpPlan:
        """Of a call that the cache does not have."""
        plan = _miss(func, args, kwargs)
        self.misses += 1
        if not _by_default_dtype(plan, _values(args, kwargs)):
            _plans[key] = plan
            self.shrink()
        return plan

    def shrink(self) -> None:
        """To the size it may have."""
        for key in list(itertools.islice(_plans, max(0, len(_plans) - self.maxsize))):
            del _plans[key]


_cache = _Cache()
_plans: dict[Any, OpPlan] = {}
_free: dict[Any, bool] = {}  # by function: Python numbers among its arguments do not bear on layouts


def propagation_cache_info() -> CacheInfo:
    """Hits, misses and size of the cache of plans for torch functions on `Sharded` values."""
    return CacheInfo(_cache.hits, _cache.misses, _cache.maxsize, len(_plans))


def propagation_cache_clear() -> None:
    """Forget all plans, and count from zero."""
    _plans.clear()
    _cache.hits = _cache.misses = 0


def forget_plans() -> None:
    """Plan every call anew: a rule has changed."""
    _plans.clear()
    _free.clear()


def propagation_cache_resize(maxsize: int) -> None:
    """Keep at most so many plans, 65536 unless set; the oldest go first, and none is kept where it is 0.

    Raises:
        ArgumentError: ``maxsize`` is no int, or below 0.
    """
    if type(maxsize) is not int or maxsize < 0:
        raise ArgumentError(f"propagation_cache_resize got {described(maxsize)}; give it a number of plans, 0 or more")
    _cache.maxsize = maxsize
    _cache.shrink()


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` on values of which some are `Sharded`; plain tensors are global values that every rank has."""
    if state.body is not None:
        _refuse_in_body(func, args, kwargs)
    key: list[Any] = [func]
    blocks: list[Any] = []
    for arg in args:
        if type(arg) is Sharded:
            key.append(arg.spec)
            blocks.append(arg.local)
        else:
            key.append(_part(func, arg, blocks))
    if kwargs:
        key.append(tuple(kwargs))
        for arg in kwargs.values():
            key.append(_part(func, arg, blocks))
    cached = tuple(key)
    plan = _plans.get(cached)
    if plan is None:
        plan = _cache.plan(cached, func, args, kwargs)
    else:
        _cache.hits += 1
    if plan.needs_redistribute:
        if plan.whole is not None:
            return plan.whole(args, kwargs)
        _move_operands(plan, blocks)
    casts = _cast_operands(plan, blocks) if plan.casts else None
    if not kwargs:
        out = plan.local(*blocks)
    elif plan.by_name:
        out = plan.local(*blocks[: len(args)], **dict(zip(kwargs, blocks[len(args) :], strict=True)))
    else:
        out = plan.local(*blocks[: len(args)], **kwargs)
    if plan.writes:
        return args[0]
    if casts:
        for one in (out,) if isinstance(out, Tensor) else out:
            if one.grad_fn is not None:
                metadata: Any = one.grad_fn.metadata
                metadata[_CASTS] = casts  # alive as long as the graph is, and no longer
    results = plan.results
    if type(results) is tuple or _autocast():
        return _wrapped(out, results)
    value = _new(Sharded)  # without the checks of its constructor
    value.local = out
    value.spec = results  # type: ignore[assignment]
    return value


def _wrapped(out: Any, results: TensorSpec | tuple[TensorSpec, ...]) -> Any:
    """Several results, or such as autocast may have given another dtype."""
    if isinstance(results, TensorSpec):
        return Sharded(out, _of_dtype(results, out.dtype))
    found = [Sharded(one, _of_dtype(spec, one.dtype)) for one, spec in zip(out, results, strict=True)]
    return type(out)(found)


def _move_operands(plan: OpPlan, blocks: list[Any]) -> None:
    for place, steps in plan.moves:
        x = _at(blocks, place)
        for step in steps:
            x = apply(x, step)
        _set(blocks, place, x)


def _at(blocks: list[Any], place: Place) -> Any:
    return blocks[place[0]][place[1]] if isinstance(place, tuple) else blocks[place]


def _set(blocks: list[Any], place: Place, x: Tensor) -> None:
    if isinstance(place, tuple):
        blocks[place[0]] = [*blocks[place[0]]]  # it may be the caller's own list
        blocks[place[0]][place[1]] = x
    else:
        blocks[place] = x


def _of_dtype(spec: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    return spec if spec.dtype == dtype else TensorSpec(spec.mesh, spec.partition, spec.shape, dtype)


def _by_default_dtype(plan: OpPlan, values: list[Sharded]) -> bool:
    """Whether the dtype of the result is torch's default one, which may change: integers divided, for example."""
    results = plan.results if isinstance(plan.results, tuple) else (plan.results,)
    made = any(spec.dtype.is_floating_point or spec.dtype.is_complex for spec in results)
    return made and not any(x.dtype.is_floating_point or x.dtype.is_complex for x in values)


def _is_free(func: Any) -> bool:
    row = row_of(func)
    return row is not None and row.free


#: of types whose values stand for themselves in a key; True and 1.0 are equal to 1, so bool and float are none
_PLAIN = frozenset((int, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format))


def _hashable(arg: Any) -> Any:
    """What an argument is in a key."""
    kind = type(arg)
    if kind in _PLAIN:
        return arg
    if kind is slice:
        start, stop, step = arg.start, arg.stop, arg.step
        if type(start) in _PLAIN and type(stop) in _PLAIN and type(step) in _PLAIN:
            return slice, start, stop, step
        return slice, _hashable(start), _hashable(stop), _hashable(step)
    if kind is Sharded:
        return arg.spec
    if kind is float and (arg == 0 or isnan(arg)):
        return float, str(arg)  # two zeros, and nan, which equals nothing
    if isinstance(arg, dict):
        return dict, *((name, _hashable(value)) for name, value in arg.items())
    if isinstance(arg, Tensor):
        return (kind, arg.dtype, arg.shape) if kind is not LocalTensor else LocalTensor
    if isinstance(arg, (tuple, list)):
        return kind, *map(_hashable, arg)
    return kind, arg


def _part(func: Any, arg: Any, blocks: list[Any]) -> Any:
    """What an argument is in the key of a call; its block, or blocks, are appended."""
    kind = type(arg)
    if kind is Sharded:
        blocks.append(arg.local)
        return arg.spec
    if kind is tuple or kind is list:
        return _part_of_list(arg, kind, blocks)
    blocks.append(arg)
    if kind is int or kind is float:
        free = _free.get(func)
        if free is None:
            free = _free[func] = _is_free(func)
        if free:
            return kind
    return arg if kind in _PLAIN else _hashable(arg)


def _part_of_list(given: Any, kind: Any, blocks: list[Any]) -> tuple[Any, ...]:
    key, held, sharded = [kind], [], False
    for one in given:
        if type(one) is Sharded:
            key.append(one.spec)
            held.append(one.local)
            sharded = True
        else:
            key.append(_hashable(one))
            held.append(one)
    blocks.append(held if sharded else given)
    return tuple(key)


def _miss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpPlan:
    values = _values(args, kwargs)
    mesh = values[0].spec.mesh
    for x in values:
        if x.spec.mesh != mesh:
            raise MeshError(
                f"{shown(func)} got values on two meshes, {mesh!r} and {x.spec.mesh!r}; move one with device_put"
            )
    if any(type(one) is LocalTensor for one in tensors_of(args, kwargs)):
        raise ArgumentError(
            f"{shown(func)} got the blocks of all simulated ranks beside a Sharded (x.local, or what a body "
            "computed); pass the Sharded itself, or a global tensor"
        )
    specs = [x.spec for x in values]
    if kwargs.get("out") is not None:
        refuse_rule(func, specs)
    if (handler := handler_of(func)) is not None:
        return as_whole(lambda args, kwargs: handler(*args, **kwargs))
    if is_ragged(func, len(tensors_of(args, kwargs))):
        return as_whole(functools.partial(_gathered, func))
    if (composite := composite_of(func, kwargs)) is not None:
        return as_whole(lambda args, kwargs: composite(*args, **kwargs))
    operands, all_found = _operands(args, kwargs, mesh)
    plan = propagate(func, args, kwargs, operands) if all_found else None
    if plan is not None:
        return plan
    try:
        if writes(func):
            return as_whole(functools.partial(_write, func, written(func, args, kwargs)))
        graph = decompose(func, args, kwargs)
    except WritesOperand:
        refuse_rule(func, specs)
    except NotTraceable:
        if writes(func):
            refuse_rule(func, specs)
        return as_whole(functools.partial(_gathered, func))
    except FspmdError:
        raise
    except NotImplementedError:  # no kernel for fake tensors
        refuse_rule(func, specs)
    except Exception as error:
        given = ", ".join(f"Sharded {spec!r}" for spec in specs)
        raise ArgumentError(f"{shown(func)} of {given} fails on the global tensors: {error}") from error
    if graph is None:
        refuse_rule(func, specs)
    return as_whole(functools.partial(_composed, func, graph))


def _composed(func: Any, graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function without a rule, by what it is made of."""
    try:
        return graph.run(dispatch, tensors_of(args, kwargs))
    except NoRuleError as error:
        refuse_rule(func, [x.spec for x in _values(args, kwargs)], error)


def _operands(args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh) -> tuple[list[tuple[Place, TensorSpec]], bool]:
    """The tensors among the arguments and in lists there, and whether that is all of them."""
    found: list[tuple[Place, TensorSpec]] = []
    for i, arg in enumerate((*args, *kwargs.values())):
        listed = isinstance(arg, (list, tuple))
        for k, one in enumerate(arg if listed else (arg,)):
            if isinstance(one, (Tensor, Sharded)):
                spec = one.spec if isinstance(one, Sharded) else TensorSpec(mesh, P(), one.shape, one.dtype)
                found.append(((i, k) if listed else i, spec))
    return found, len(found) == len(tensors_of(args, kwargs))


def _write(func: Any, graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sharded:
    """A write by a function without a rule: the new value, laid out as the operand, is copied into its blocks."""
    x: Sharded = args[0]
    refuse_copy(x.local, shown(func))
    new = _composed(func, graph, args, kwargs)
    if (new.shape, new.dtype) != (x.shape, x.dtype):
        raise ShapeError(f"{shown(func)} would make {x!r} a {new!r}; write x = x.{name_of(func).rstrip('_')}(...)")
    x.local.copy_(redistribute(new.local, new.spec, x.spec))
    return x


def _gathered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call on global tensors: what it gives, or its shape, depends on values."""
    mesh = _values(args, kwargs)[0].spec.mesh

    def gathered(x: Any) -> Any:
        if not isinstance(x, Sharded):
            return x
        return redistribute(x.local, x.spec, x.spec.with_partition(P()))

    def wrapped(x: Any) -> Any:
        return Sharded(x, TensorSpec(mesh, P(), x.shape, x.dtype)) if isinstance(x, Tensor) else x

    whole: Any = optree.tree_map(gathered, (args, kwargs), is_leaf=is_sharded, none_is_leaf=True)
    try:
        out = func(*whole[0], **whole[1])
    except Exception as error:
        given = ", ".join(f"Sharded {x.spec!r}" for x in _values(args, kwargs))
        raise ArgumentError(f"{shown(func)} of {given} fails on the global tensors: {error}") from error
    return optree.tree_map(wrapped, out, none_is_leaf=True)


def _values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Sharded]:
    tree: Any = (args, kwargs)
    return [x for x in optree.tree_leaves(tree, is_leaf=is_sharded) if isinstance(x, Sharded)]


def _refuse_in_body(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    assert state.body is not None
    x = _values(args, kwargs)[0]
    raise ArgumentError(
        f"{shown(func)} was used on {x!r} inside {state.body.name}, whose values are this rank's blocks; pass it as "
        "an argument, with its spec in in_specs, instead of closing over it"
    )


def _cast_operands(plan: OpPlan, blocks: list[Any]) -> list[Tensor]:
    """Cast what will have a gradient; gives the casts."""
    found = []
    for place, casts in plan.casts:
        x = _at(blocks, place)
        if (x.requires_grad and _grad_enabled()) or _transforms_active():
            for cast in casts:
                x = _cast(x, cast)
            _set(blocks, place, x)
            found.append(x)
    return found


def _cast(x: Tensor, cast: Call) -> Tensor:
    """An invariant operand beside a varying one: one cast serves all uses whose graph is alive, forward for free."""
    known = x.__dict__.get(_CASTS)
    if known is not None and (found := known.get(cast)) is not None and found[1] == x._version:
        y: Tensor | None = found[0]()
        if y is not None:
            return y
    y = apply(x, cast)
    if not _transforms_active():
        if known is None:
            known = _Casts()
            setattr(x, _CASTS, known)
        known[cast] = weakref.ref(y), x._version
    return y


def _torch_function(_: type[Sharded], func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return dispatch(func, args, kwargs or {})


above.dispatch = dispatch
Sharded.__torch_function__ = MethodType(_torch_function, Sharded)
