"""The local view: run a function on every rank's blocks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch

from fspmd.body import state
from fspmd.closures import check_no_closures, now
from fspmd.errors import ArgumentError
from fspmd.exit import Exit
from fspmd.indexing import IndexMode
from fspmd.mesh import Mesh
from fspmd.plan import Plan, make_plan
from fspmd.tracking import Tracker
from fspmd.trees import flatten


@overload
def shard_map(
    f: Callable[..., Any],
    *,
    mesh: Mesh | None = None,
    in_specs: Any,
    out_specs: Any,
    axis_names: Iterable[str] | None = None,
    check_vma: bool = True,
) -> Callable[..., Any]: ...
@overload
def shard_map(
    f: None = None,
    *,
    mesh: Mesh | None = None,
    in_specs: Any,
    out_specs: Any,
    axis_names: Iterable[str] | None = None,
    check_vma: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
def shard_map(
    f: Callable[..., Any] | None = None,
    *,
    mesh: Mesh | None = None,
    in_specs: Any,
    out_specs: Any,
    axis_names: Iterable[str] | None = None,
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Map ``f`` over the blocks of its arguments, one call per rank of the mesh; also a decorator.

    Args:
        f: A function of pytrees. Its tensors are this rank's blocks; it communicates by collectives.
        mesh: The mesh; by default that of `set_mesh`, or of the enclosing body.
        in_specs: A pytree prefix of the tuple of arguments. ``P`` says how a leaf is cut; ``None`` marks a static
            argument, handed on as it is. Keyword arguments bind by name to the specs of their parameters.
        out_specs: A pytree prefix of the result.
        axis_names: The axes that are manual in the body; by default all that are not bound yet. Over the others
            values are whole.
        check_vma: Track over which axes each value varies, cast invariant operands (backward: the all-reduce), and
            refuse an output that varies over an axis its spec leaves out. With False: JAX's unchecked semantics, in
            which ``psum`` transposes to ``psum``, and no cost per op.

    Arguments are plain tensors (a global value known to every process) or `Sharded` (moved only if the spec
    differs). Results are `Sharded`; inside another body, plain tensors that are whole over the inner axes.

    Raises:
        SpecError, TreeError, MeshError, ArgumentError: before any communication, naming every leaf that fails.
        VarianceError: an output varies over an axis that its spec does not name.

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
    if not callable(f):
        raise ArgumentError(
            f"shard_map got f of type {type(f).__name__}; expected a function, or mesh= and the specs by keyword: "
            "shard_map(f, mesh=mesh, in_specs=..., out_specs=...)"
        )
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ArgumentError(f"shard_map got mesh={mesh!r} of type {type(mesh).__name__}; make one with make_mesh")
    manual = None if axis_names is None else _axis_set(axis_names)
    plans: dict[Any, Plan] = {}
    function = f

    @functools.wraps(f)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        names: tuple[str, ...] = ()
        if kwargs:
            args, names = _bind(function, args, kwargs)
        leaves, treedef = flatten(args)
        outer = state.body
        key = treedef if mesh is not None and outer is None and not names else (treedef, names, outer, _ambient(mesh))
        plan = plans.get(key)
        if plan is None:
            plan = plans[key] = make_plan(function, args, names, mesh, in_specs, out_specs, manual, check_vma, outer)
        return run(plan, function, leaves, names)

    return mapped


def run(plan: Plan, function: Callable[..., Any], leaves: list[Any], names: tuple[str, ...]) -> Any:
    """Blocks in, the body, `Sharded` out."""
    outer, outer_tracker = state.body, state.tracker
    blocks = [enter(leaf) for enter, leaf in zip(plan.entries, leaves, strict=True)]
    args = plan.treedef.unflatten(blocks)
    start = 0 if plan.searched else now()
    state.body = plan.body
    state.tracker = Tracker(plan.body) if plan.body.checked else None
    mode: Tracker | IndexMode | None = state.tracker
    if mode is None and plan.simulated:
        mode = IndexMode()
    try:
        if mode is None:
            out = function(*args) if not names else _call_by_name(function, args, names)
        else:
            _push_mode(mode)
            try:
                out = function(*args) if not names else _call_by_name(function, args, names)
            finally:
                _pop_mode()
        out_leaves, out_treedef = flatten(out)
        if not plan.searched:
            plan.searched = check_no_closures(out_leaves, blocks, start, plan.body.name)
        exits: list[Exit] | None = plan.exits.get(out_treedef)
        if exits is None:
            exits = plan.exits[out_treedef] = plan.make_exits(out, out_treedef)
        return out_treedef.unflatten([leave(x) for leave, x in zip(exits, out_leaves, strict=True)])
    finally:
        state.body, state.tracker = outer, outer_tracker


_push_mode, _pop_mode = torch._C._push_on_torch_function_stack, torch._C._pop_torch_function_stack


def _call_by_name(function: Callable[..., Any], args: tuple[Any, ...], names: tuple[str, ...]) -> Any:
    positional = len(args) - len(names)
    return function(*args[:positional], **dict(zip(names, args[positional:], strict=True)))


def _bind(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Keyword arguments after the positional ones, in the order of the parameters, and their names."""
    try:
        inspect.signature(f).bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(
            f"{getattr(f, '__name__', f)} was called with arguments that do not fit it: {error}"
        ) from None
    order = {name: i for i, name in enumerate(inspect.signature(f).parameters)}
    names = tuple(sorted(kwargs, key=lambda name: order.get(name, len(order))))
    return (*args, *(kwargs[name] for name in names)), names


def _axis_set(axis_names: Any) -> frozenset[str]:
    if isinstance(axis_names, str):
        raise ArgumentError(f"shard_map got axis_names={axis_names!r}; write a set of names: {{{axis_names!r}}}")
    return frozenset(axis_names)


def _ambient(mesh: Mesh | None) -> Mesh | None:
    from fspmd.mesh import current_mesh

    return mesh if mesh is not None else current_mesh()
