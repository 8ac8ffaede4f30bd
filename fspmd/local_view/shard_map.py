"""`shard_map`, the local view: a function runs on the blocks of each rank."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from operator import call
from sys import modules
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from torch import Tensor, strided

from fspmd import collectives
from fspmd.body import RUNNING, state
from fspmd.cache import Cache, forgettable
from fspmd.errors import ArgumentError, AxisError
from fspmd.foreign import misfit
from fspmd.local_view.closures import holds_trainable, now, sum_closures
from fspmd.local_view.empty_blocks import ConnectingMode
from fspmd.local_view.indexing import IndexMode
from fspmd.local_view.modes import (
    BodyMode,
    be_eager_in_bodies,
    leave_to_python,
    mode_above,
    pop_ended_modes,
    restore_modes,
)
from fspmd.local_view.plan import Plan, make_plan
from fspmd.local_view.tracking import Tracker
from fspmd.meshes.mesh import Mesh, current_mesh, mesh_advice
from fspmd.messages import described
from fspmd.sharded import is_plain
from fspmd.torch_internals import (
    DYNAMO,
    EnableTorchFunction,
    count_dispatch_modes,
    frame_callback,
    function_mode_is_on,
    is_torch_function_enabled,
    pop_function_mode,
    push_function_mode,
    set_frame_callback,
    transforms_active,
)
from fspmd.tracing import JIT_TRACED, refuse_traced
from fspmd.transport import known_values
from fspmd.transport.local_tensor import BLOCKS
from fspmd.transport.reports import tell_failure
from fspmd.trees import flatten, flatten_args
from fspmd.wrappers import wraps

MISSING: Any = object()

for _name in collectives.__all__:
    if inspect.isfunction(_collective := getattr(collectives, _name)):
        leave_to_python(_collective, "collectives run as they are, between what is compiled")


Q = ParamSpec("Q")
R = TypeVar("R")


class _ShardMapDecorator(Protocol):
    def __call__(self, f: Callable[Q, R], /) -> Callable[Q, R]: ...


@overload
def shard_map(
    f: Callable[Q, R],
    *,
    mesh: Mesh | None = None,
    in_specs: Any,
    out_specs: Any,
    axis_names: Iterable[str] | None = None,
    check_vma: bool = True,
) -> Callable[Q, R]: ...
@overload
def shard_map(
    f: None = None,
    *,
    mesh: Mesh | None = None,
    in_specs: Any,
    out_specs: Any,
    axis_names: Iterable[str] | None = None,
    check_vma: bool = True,
) -> _ShardMapDecorator: ...
def shard_map(
    f: Callable[..., Any] | None = None,
    *,
    mesh: Mesh | None = None,
    in_specs: Any = MISSING,
    out_specs: Any = MISSING,
    axis_names: Iterable[str] | None = None,
    check_vma: bool = True,
) -> Any:
    """Map ``f`` over the blocks of its arguments, with one call per rank of the mesh. Also a decorator.

    Args:
        f: A function of pytrees. Its tensors are this rank's blocks. It communicates by collectives.
        mesh: The mesh. The default is the mesh of the enclosing body, or of `set_mesh`.
        in_specs: A pytree prefix of the tuple of arguments. A ``P`` says how a leaf is cut. ``None`` marks a static
            argument, which the body gets unchanged. Keyword arguments bind by name to the specs of their parameters.
        out_specs: A pytree prefix of the result.
        axis_names: The axes that are bound in the body. The default is all axes that are not bound yet. Over the other
            axes values are whole.
        check_vma: Whether types are checked. If True, the body tracks the axes over which each value varies, casts
            invariant operands (backward: the all-reduce), and refuses an output that varies over an axis missing in
            its spec. Functions compiled by ``torch.compile`` then run uncompiled; `jit` with ``backend="inductor"``
            compiles such bodies. If False, the semantics are those of JAX without checks: ``psum`` transposes to
            ``psum``, and an op costs nothing extra. Random functions then draw from the generator of each process, so
            ranks with one seed draw the same numbers, as all ranks of a simulation do.

    Arguments are plain tensors (a global value that every process has) or `Sharded` (moved only if the spec differs).
    Results are `Sharded`. Inside another body they are plain tensors, whole over the inner axes. If an argument neither
    moves nor is cut, its block is a view of it, and a write into the block on each rank writes into the argument. Other
    blocks are copies. A result that shares memory with an argument, or with a tensor that ``f`` closes over, becomes a
    copy if it may differ over more axes. An unchecked body on processes must write the same elements into a whole
    value on all ranks. `debug` and `check_replicas` find where it does not.

    The mapped function keeps a plan per structure of arguments, at most 4096. Its ``cache_info()`` counts them.

    Raises:
        SpecError, TreeError, MeshError, ArgumentError: Before any communication, naming every leaf that fails.
        VarianceError: An output varies over an axis that its spec does not name.

    >>> import torch
    >>> from fspmd import P, device_get, make_mesh, psum
    >>> mesh = make_mesh((4,), ("x",))
    >>> @shard_map(mesh=mesh, in_specs=(P("x"), P()), out_specs=P())
    ... def weighted_sum(x, w):
    ...     return psum((x * w).sum(), "x")
    >>> device_get(weighted_sum(torch.arange(8.0), torch.tensor(2.0)))
    tensor(56.)
    """
    if f is None:
        return functools.partial(
            shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axis_names, check_vma=check_vma
        )
    _check_options(f, mesh, in_specs, out_specs, check_vma)
    manual = None if axis_names is None else _axis_set(axis_names)
    plans: Cache[Any, Plan] = forgettable(Cache())
    function = f

    @wraps(f)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        names: tuple[str, ...] = ()
        if kwargs:
            args, names = _bind(function, args, kwargs)
        leaves, structure = flatten_args(args)
        here = state.__dict__
        outer = here["body"]
        if here["seeks_mesh"] is not None and (sought := _ambient(mesh)) is not None:
            here["seeks_mesh"](sought)
        key = structure
        if mesh is None or outer is not None or names:
            key = structure, names, outer, _ambient(mesh)
        plan = plans.get(key)
        if plan is None:
            plans.misses += 1
            plan = plans[key] = make_plan(function, args, names, mesh, in_specs, out_specs, manual, check_vma, outer)
        else:
            plans.hits += 1
        flat = type(structure) is tuple
        if not flat and plan.order is not None:  # all ranks move leaves in one order
            leaves = [leaves[i] for i in plan.order]
        return run(plan, function, leaves, names, flat)

    mapped.cache_info = plans.info  # type: ignore[attr-defined]
    leave_to_python(mapped, _COMPILED_BY_JIT)
    return mapped


_COMPILED_BY_JIT = "what shard_map runs is compiled by jit(f, backend='inductor')"
leave_to_python(shard_map, _COMPILED_BY_JIT)


def run(plan: Plan, function: Callable[..., Any], leaves: list[Any], names: tuple[str, ...], flat: bool) -> Any:
    """Run a body: leaves enter as blocks, and results leave as `Sharded`."""
    if not is_torch_function_enabled():  # a derivative has disabled it, and runs a hook or a custom backward
        with EnableTorchFunction():
            return run(plan, function, leaves, names, flat)
    body, here = plan.body, state.__dict__
    outer, outer_tracker, outer_mode = here["body"], here["tracker"], here["mode"]
    is_seen = function_mode_is_on()
    if is_seen or count_dispatch_modes() or JIT_TRACED:
        refuse_traced(body.name)
    for i, fewest in plan.plain:
        x = leaves[i]
        if x is None or (type(x) is Tensor and x.layout is strided and x.dim() >= fewest):
            continue
        if not (is_plain(x) and x.dim() >= fewest) or misfit(x):
            plan.refuse_arguments(leaves)
    if known_values.hear is not None and outer is None:
        function = plan.watched(function, leaves, flat)
    args = leaves if plan.enters_as_is else list(map(call, plan.entries, leaves))
    start = 0 if plan.widen is None else now()
    blocks = args
    if not flat:
        args = plan.treedef.unflatten(args)
    called = _by_name(function, len(args) - len(names), names) if names else function
    mode = Tracker(body) if body.checked else None if plan.nested else _unchecked_mode(plan)
    if is_seen and outer is None:
        pop_ended_modes()
    above = mode_above() if plan.nested and mode is not None else None
    callback, key = frame_callback() if mode is not None else None, mode or object()
    try:  # as in `run_in`, where the order of lines is explained
        RUNNING[key] = body
        here["body"] = body
        if mode is None:
            out = called(*args)
        else:
            if body.checked:
                here["tracker"] = mode
            here["mode"] = mode
            if above is not None:
                pop_function_mode()
            push_function_mode(mode)
            if DYNAMO in modules:
                be_eager_in_bodies()
            out = called(*args)
            pop_function_mode()
            if above is not None:
                push_function_mode(above)
        return _leave(plan, function, out, blocks, start, mode)
    except BaseException as error:
        try:
            restore_modes(above, mode)
        finally:
            restore_modes(above, mode)
        if body.mesh.transport == "process_group" and outer is None and isinstance(error, Exception):
            tell_failure(error, f"raised in {body.name}")
        raise
    finally:
        here["body"], here["tracker"], here["mode"] = outer, outer_tracker, outer_mode
        try:
            if callback is not None:
                set_frame_callback(callback)
        finally:
            RUNNING.pop(key, None)


def _unchecked_mode(plan: Plan) -> BodyMode | None:
    """Return the mode of an unchecked body. A nested body uses that of the enclosing body."""
    if plan.body.simulated:
        return IndexMode()
    # the first run shows whether a collective makes blocks uneven
    return ConnectingMode() if plan.body.uneven or not plan.exits else None


def _leave(
    plan: Plan, function: Callable[..., Any], out: Any, blocks: list[Any], start: int, mode: BodyMode | None
) -> Any:
    """Return the results of a body as `Sharded`.

    Args:
        plan: The plan of the call.
        function: The function of the body.
        out: What it has returned.
        blocks: The leaves of its arguments.
        start: When it began, by autograd's count.
        mode: The mode of the body.
    """
    kind = type(out)
    tree: Any  # Tensor for a block, the length of a tuple of blocks, or the treedef
    if kind in BLOCKS:
        leaves, tree = [out], Tensor
    elif kind is tuple and out and BLOCKS.issuperset(map(type, out)):
        leaves, tree = out, len(out)
    else:
        leaves, tree = flatten(out)
    widen = plan.widen
    if widen is not None and _may_close(plan, function, leaves):
        leaves = list(leaves)
        closes = sum_closures(leaves, blocks, plan.body, start, widen)
        plan.closes = plan.closes and closes is not False
    if isinstance(mode, Tracker) and mode.borrowed and plan.body.outer is None:
        leaves = mode.unborrowed(leaves)
    exits = plan.exits.get(tree)
    is_known = exits is not None
    if exits is None:
        exits = plan.exits[tree] = plan.make_exits(function, out)  # this checks the results
    if exits.shares:
        leaves = exits.unshared(leaves, blocks)
    results = exits.converted(leaves) if is_known else exits.leave(leaves)
    return results[0] if tree is Tensor else tuple(results) if type(tree) is int else tree.unflatten(results)


def _may_close(plan: Plan, function: Callable[..., Any], leaves: Iterable[Any]) -> bool:
    """Return whether results of an unchecked body may depend on a differentiable tensor that it closes over."""
    if transforms_active():
        return True
    for x in leaves:
        if getattr(x, "requires_grad", False):
            return plan.closes or holds_trainable(function)
    return False


def _by_name(function: Callable[..., Any], positional: int, names: tuple[str, ...]) -> Callable[..., Any]:
    """Return a function that passes its last arguments by name."""
    return lambda *args: function(*args[:positional], **dict(zip(names, args[positional:], strict=True)))


def _bind(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Return positional and then keyword arguments, in the order of the parameters, and the names of the latter."""
    try:
        order = {name: i for i, name in enumerate(inspect.signature(f).parameters)}
    except (TypeError, ValueError):  # the parameters of a builtin are not known
        order = {}
    names = tuple(sorted(kwargs, key=lambda name: order.get(name, len(order))))
    return (*args, *(kwargs[name] for name in names)), names


def _check_options(f: Any, mesh: Any, in_specs: Any, out_specs: Any, check_vma: Any) -> None:
    if not callable(f):
        raise ArgumentError(f"shard_map got {described(f)} for f; give it a function: {_CALL}")
    for name, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
        if specs is MISSING:
            raise ArgumentError(f"shard_map got no {name}, which says how values lie on the mesh: {_CALL}")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ArgumentError(f"shard_map got {described(mesh)} for mesh; make one: {mesh_advice(mesh)}")
    if not isinstance(check_vma, bool):
        raise ArgumentError(f"shard_map got {described(check_vma)} for check_vma; expected True or False")


_CALL = "shard_map(f, mesh=mesh, in_specs=(P('x'), P()), out_specs=P('x'))"


def _axis_set(axis_names: Any) -> frozenset[str]:
    if isinstance(axis_names, str):
        raise ArgumentError(f"shard_map got axis_names={axis_names!r}; write a set of names: {{{axis_names!r}}}")
    if not isinstance(axis_names, Iterable):
        raise ArgumentError(
            f"shard_map got {described(axis_names)} for axis_names; write a set of names, such as {{'x'}}"
        )
    names = list(axis_names)
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise ArgumentError(f"shard_map got {described(wrong[0])} in axis_names; name an axis by a string")
    if not names:
        raise AxisError("shard_map got an empty axis_names; name the axes bound in f, or leave it out for all of them")
    return frozenset(names)


def _ambient(mesh: Mesh | None) -> Mesh | None:
    return mesh if mesh is not None else current_mesh()
