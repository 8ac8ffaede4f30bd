"""A module's forward as ordinary Python on each rank's blocks, for the style `OnBlocks`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import optree
import torch
from torch import Tensor, nn

from fspmd.collectives import pcast
from fspmd.entries import axes_within
from fspmd.errors import ArgumentError
from fspmd.local_view.rank_map import rank_map
from fspmd.local_view.shard_map import shard_map
from fspmd.meshes.mesh import Mesh
from fspmd.messages import described
from fspmd.modules.styles import Layout, laid_out
from fspmd.placement.reshard import with_spec
from fspmd.sharded import Sharded
from fspmd.spec import P


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
            return _call(hollow, tensors, args, kwargs)

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
    """Refuse rows that are cut over the axis beside a first tensor with as many rows, all of them on each rank."""
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
        elif name.endswith("_hooks") and isinstance(value, Mapping):
            state[name] = copy.copy(value)
    state["_modules"] = {key: None if part is None else _hollow(part) for key, part in module._modules.items()}
    return other


def _call(hollow: nn.Module, tensors: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
    """Call a hollow module with tensors in their places."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, x in tensors.items():
            path, _, key = name.rpartition(".")
            owner = hollow.get_submodule(path)
            slots: dict[str, Any] = owner._parameters if key in owner._parameters else owner._buffers
            replaced.append((slots, key, slots[key]))
            slots[key] = x
        return hollow(*args, **kwargs)
    finally:
        for slots, key, x in replaced:
            slots[key] = x
