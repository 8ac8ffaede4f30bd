"""A module's forward as ordinary Python on each rank's blocks: what `OnBlocks` asks for."""

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
    """Have a module's forward run on blocks, until the stack ends.

    Each rank runs it on the blocks of its tensors and arguments, rank by rank in a simulation, and under `jit` as one
    step of Python. Its results lie as its first tensor does, and over ``axis``, where anything is cut, as ``result``
    says. Where nothing is cut at all, every rank has the whole, and forward runs as ever.

    Raises:
        ArgumentError: when it is called, of no tensor, or of rows that are cut over ``axis`` beside whole ones.
    """
    hollow = _hollow(module)  # holds nothing of a record
    before, on_global = vars(module).get("forward"), module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = optree.tree_flatten((args, kwargs), none_is_leaf=True)
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        if not places:
            raise ArgumentError(
                f"OnBlocks: forward of {type(module).__name__} got no tensor, so nothing says how its result lies; "
                "give the style to a module that takes one"
            )
        given = [_settled(leaves[i]) for i in places]
        others = [None if i in places else x for i, x in enumerate(leaves)]
        _check_rows(given, axis, module)
        tensors = {name: _settled(x) for name, x in _tensors_of(module).items()}
        hollow.train(module.training)

        def run(given: list[Tensor], tensors: dict[str, Tensor]) -> Any:
            values = list(others)
            for i, x in zip(places, given, strict=True):
                values[i] = x
            args, kwargs = treedef.unflatten(values)
            return _called(hollow, tensors, args, kwargs)

        def body(given: list[Tensor], tensors: dict[str, Tensor]) -> Any:
            out = rank_map(run, given, tensors)
            return pcast(out, axis, to="unreduced") if layout == "unreduced" else out

        of_given, of_tensors = list(map(_lies, given)), {name: _lies(x) for name, x in tensors.items()}
        axes = set[str]().union(*(lies.axes for lies in (*of_given, *of_tensors.values())))
        if not axes:
            return on_global(*args, **kwargs)
        layout = result if axis in axes or isinstance(result, P) else None
        out = laid_out(of_given[0], len(of_given[0]), axis, layout)
        mapped = shard_map(body, mesh=mesh, in_specs=(of_given, of_tensors), out_specs=out, axis_names=axes)
        return mapped(given, tensors)

    module.forward = forward
    stack.callback(_restore, module, before)


def _check_rows(given: list[Any], axis: str, module: nn.Module) -> None:
    """Refuse rows that are cut beside a first tensor with as many rows, which every rank has."""
    first, *others = given
    if first.dim() and not _is_cut(first, axis):
        for x in others:
            if x.dim() and len(x) == len(first) and _is_cut(x, axis):
                raise ArgumentError(
                    f"OnBlocks: forward of {type(module).__name__} got {described(first)}, all rows on each rank, but "
                    f'{x!r}; write input=("replicated", ...) with one for each argument, or, for rows that '
                    "stay as they lie, OnBlocks(input=None, result=None, output=None)"
                )


def _is_cut(x: Any, axis: str) -> bool:
    """Whether rows are cut over an axis."""
    return axis in axes_within((*_lies(x), None)[0])


def _restore(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    if forward is None:
        del module.forward
    else:
        module.forward = forward


def _lies(x: Tensor | Sharded) -> P:
    return x.spec.partition if isinstance(x, Sharded) else P(*(None,) * x.dim())


def _settled(x: Any) -> Any:
    """Without pending sums: a body's Python sees true values."""
    lies = _lies(x)
    return with_spec(x, P(*lies)) if lies.unreduced | lies.reduced else x


def _tensors_of(module: nn.Module) -> dict[str, Any]:
    """Those that it has, by qualified name."""
    return {
        f"{path}.{key}" if path else key: x
        for path, owner in module.named_modules()
        for held in (owner._parameters, owner._buffers)
        for key, x in held.items()
        if x is not None
    }


def _hollow(module: nn.Module) -> nn.Module:
    """The module without its tensors; its parts, too, and what else they are made of is shared."""
    other = copy.copy(module)
    state = vars(other)
    for name, held in state.items():
        if name in ("_parameters", "_buffers"):
            state[name] = {key: None if x is None else torch.empty(0, device="meta") for key, x in held.items()}
        elif name.endswith("_hooks") and isinstance(held, Mapping):
            state[name] = copy.copy(held)
    state["_modules"] = {key: None if part is None else _hollow(part) for key, part in module._modules.items()}
    return other


def _called(hollow: nn.Module, tensors: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
    held: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, x in tensors.items():
            path, _, key = name.rpartition(".")
            owner = hollow.get_submodule(path)
            where: dict[str, Any] = owner._parameters if key in owner._parameters else owner._buffers
            held.append((where, key, where[key]))
            where[key] = x
        return hollow(*args, **kwargs)
    finally:
        for where, key, x in held:
            where[key] = x
