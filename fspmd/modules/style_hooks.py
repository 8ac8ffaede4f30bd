"""Hooks that apply styles to the modules at their patterns, and to modules that share parameters with these.

`OnBlocks` runs a forward as ordinary Python on the blocks of each rank.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from weakref import ref

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fspmd.cache import cached
from fspmd.collectives import pcast
from fspmd.entries import axes_within
from fspmd.errors import ArgumentError, TreeError
from fspmd.local_view.rank_map import rank_map
from fspmd.local_view.shard_map import shard_map
from fspmd.meshes.mesh import Mesh
from fspmd.messages import Failure, described, refuse
from fspmd.modules.paths import matches, near
from fspmd.modules.plans import ParallelPlan, Placed
from fspmd.modules.styles import Layout, laid_out
from fspmd.placement.reshard import with_spec
from fspmd.sharded import Sharded
from fspmd.spec import P
from fspmd.torch_internals import HOOKS_OF_MODULES


def run_on_blocks(module: nn.Module, axis: str, result: Layout, mesh: Mesh, stack: ExitStack) -> None:
    """Make a module's forward run on blocks until the stack ends.

    Each rank runs it on the blocks of the module's tensors and of the arguments. A simulation runs it rank by rank, and
    `jit` records it as one step of Python. The results have the layout of the first tensor among the arguments. If
    anything is cut over ``axis``, ``result`` is their layout over it. If nothing is cut at all, forward runs unchanged
    on the whole values.

    Raises:
        ArgumentError: by the call, no argument is a tensor; or an argument has rows cut over ``axis`` beside a first
            argument with all rows.
    """
    hollow = _hollow(module)  # has no tensors, so that a record of it keeps none
    before, on_global = vars(module).get("forward"), module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = optree.tree_flatten((args, kwargs), none_is_leaf=True)
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        if not places:
            raise ArgumentError(
                f"OnBlocks: forward of {type(module).__name__} got no tensor, from which its result would have its "
                "layout; write the style for a module that takes a tensor"
            )
        arguments = [_settled(leaves[i]) for i in places]
        others = [None if i in places else x for i, x in enumerate(leaves)]
        _check_rows(arguments, axis, module)
        tensors = {name: _settled(x) for name, x in _tensors_of(module).items()}
        hollow.train(module.training)

        def run(arguments: list[Tensor], tensors: dict[str, Tensor]) -> Any:
            values = list(others)
            for i, x in zip(places, arguments, strict=True):
                values[i] = x
            args, kwargs = treedef.unflatten(values)
            return functional_call(hollow, tensors, args, kwargs)

        def body(arguments: list[Tensor], tensors: dict[str, Tensor]) -> Any:
            out = rank_map(run, arguments, tensors)
            return pcast(out, axis, to="unreduced") if layout == "unreduced" else out

        in_specs = [_partition_of(x) for x in arguments], {name: _partition_of(x) for name, x in tensors.items()}
        axes = set[str]().union(*(partition.axes for partition in (*in_specs[0], *in_specs[1].values())))
        if not axes:
            return on_global(*args, **kwargs)
        layout = result if axis in axes or isinstance(result, P) else None
        first = in_specs[0][0]
        out_specs = laid_out(first, len(first), axis, layout)
        mapped = shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes)
        return mapped(arguments, tensors)

    module.forward = forward
    stack.callback(_restore, module, before)


def _check_rows(arguments: list[Any], axis: str, module: nn.Module) -> None:
    """Refuse a tensor whose rows are cut over the axis if the first tensor has the same rows, uncut."""
    first, *others = arguments
    if first.dim() and not _is_cut(first, axis):
        for x in others:
            if x.dim() and len(x) == len(first) and _is_cut(x, axis):
                raise ArgumentError(
                    f"OnBlocks: forward of {type(module).__name__} got {described(first)} with all rows on each rank, "
                    f'but {x!r} with cut rows; write input=("replicated", ...) with a layout for each argument, or, to '
                    "keep the layout of rows, OnBlocks(input=None, result=None, output=None)"
                )


def _is_cut(x: Any, axis: str) -> bool:
    """Whether rows are cut over an axis."""
    return axis in axes_within((*_partition_of(x), None)[0])


def _restore(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    if forward is None:
        del module.forward
    else:
        module.forward = forward


def _partition_of(x: Tensor | Sharded) -> P:
    """The partition of a tensor, with an entry for each dim."""
    return x.spec.partition if isinstance(x, Sharded) else P(*(None,) * x.dim())


def _settled(x: Any) -> Any:
    """The value without pending sums, so that Python in a body sees true values."""
    partition = _partition_of(x)
    return with_spec(x, P(*partition)) if partition.unreduced | partition.reduced else x


def _tensors_of(module: nn.Module) -> dict[str, Any]:
    """The parameters and buffers of a module, by qualified name."""
    return {
        f"{path}.{key}" if path else key: x
        for path, owner in module.named_modules()
        for tensors in (owner._parameters, owner._buffers)
        for key, x in tensors.items()
        if x is not None
    }


def _hollow(module: nn.Module) -> nn.Module:
    """A copy of a module and its submodules, without tensors. It shares all other attributes."""
    other = copy.copy(module)
    state = vars(other)
    for name, value in state.items():
        if name in ("_parameters", "_buffers"):
            state[name] = {key: None if x is None else torch.empty(0, device="meta") for key, x in value.items()}
        elif name in HOOKS_OF_MODULES:
            state[name] = copy.copy(value)
    state["_modules"] = {key: None if part is None else _hollow(part) for key, part in module._modules.items()}
    return other


def styled_modules(module: nn.Module, plan: ParallelPlan, what: str) -> list[tuple[ref[nn.Module], Placed]]:
    """The submodules to which styles apply.

    Raises:
        TreeError: a pattern matches no module, or forward has no argument of a name in ``kwargs``.
        ArgumentError: ``plan`` is no plan.
    """
    if not isinstance(plan, ParallelPlan):
        raise ArgumentError(
            f"{what} got {described(plan)} for styles; give it the plan of params, plan = parallelize(params, styles)"
        )
    owners = list(module.named_modules(remove_duplicate=False))
    styled = [(path, owner, placed) for path, owner in owners if (placed := plan.at(path)) is not None]
    failures = [failure for _, owner, placed in styled for failure in _unknown_names(owner, placed)]
    used = {pattern for _, _, placed in styled for pattern in placed.styles}
    for pattern in plan.styles:
        if pattern not in used and not any(matches(pattern, row.name) for row in plan.rows):
            text = f"no module at {pattern!r}{near(pattern, [path for path, _ in owners][1:])}"
            failures.append(Failure(text, TreeError))
    if failures:
        refuse(f"{what} of {type(module).__name__}: styles do not fit the module", failures)
    return [(ref(owner), placed) for _, owner, placed in (*styled, *_tied(owners, styled, plan))]


def _tied(owners: Any, styled: Any, plan: ParallelPlan) -> Iterator[tuple[str, nn.Module, Placed]]:
    """Modules that no pattern matches and that share a parameter with a styled module, and the styles for them."""
    users: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, owner in owners:
        for x in owner._parameters.values():
            if x is not None and plan.at(path) is None:
                users.setdefault(id(x), []).append((path, owner))
    seen = {id(owner) for _, owner, _ in styled}
    for _, first, placed in styled:
        for x in first._parameters.values():
            for path, owner in users.get(id(x), ()) if x is not None else ():
                alike = type(owner).forward is type(first).forward
                shared = None if id(owner) in seen else placed.elsewhere(path, alike)
                if shared is not None:
                    seen.add(id(owner))
                    yield path, owner, shared


def _unknown_names(owner: nn.Module, placed: Placed) -> Iterator[Failure]:
    """Failures for names in ``kwargs`` of a style that are no parameters of forward."""
    for pattern, style in placed.styles.items():
        for key in style.kwargs:
            names, takes_more = _parameters_of(getattr(owner.forward, "__func__", owner.forward))
            if key not in names and not takes_more:
                text = f"{pattern!r}: forward of {type(owner).__name__} has no argument {key!r}, which kwargs lays out"
                yield Failure(f"{text}{near(key, names)}", TreeError)


@cached(maxsize=1024)
def _parameters_of(forward: Any) -> tuple[tuple[str, ...], bool]:
    """The names of the parameters of a forward without ``self``, and whether it takes any other by name."""
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return (), True
    names = [x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    takes_more = any(x.kind is x.VAR_KEYWORD for x in parameters)
    return tuple(names[1:] if names[:1] == ["self"] else names), takes_more


def hook(owner: nn.Module, placed: Placed, plan: ParallelPlan, stack: ExitStack) -> None:
    """Apply styles to a module until the stack ends."""
    names, _ = _parameters_of(getattr(owner.forward, "__func__", owner.forward))
    if (style := placed.block_style) is not None and style.axis is not None:
        run_on_blocks(owner, style.axis, style.result, placed.mesh, stack)

    before = functools.partial(_lay_out_arguments, plan, placed, names)
    stack.callback(owner.register_forward_pre_hook(before, with_kwargs=True).remove)
    stack.callback(owner.register_forward_hook(functools.partial(_lay_out_results, placed)).remove)


# hooks that can be pickled, since torch.save(module) saves a module's hooks


def _lay_out_arguments(
    plan: ParallelPlan, placed: Placed, names: tuple[str, ...], _: nn.Module, args: Any, kwargs: Any
) -> Any:
    plan.mark_used(placed)
    return placed.inputs(args, kwargs, names)


def _lay_out_results(placed: Placed, _: nn.Module, args: Any, out: Any) -> Any:
    return placed.outputs(out)
