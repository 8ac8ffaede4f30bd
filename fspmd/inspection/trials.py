"""Sample calls of a function without a rule, for one mesh axis: layouts of operands and results, and collectives."""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodDescriptorType, WrapperDescriptorType
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.global_view.dispatch import dispatch
from fspmd.global_view.refusals import shown
from fspmd.inspection.communication_log import communication_log
from fspmd.meshes.mesh import Mesh
from fspmd.redistribution.redistribute import redistribute
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec


def is_tensor_method(func: Any) -> bool:
    """Whether it is a method of ``torch.Tensor`` in C, which cannot be called on a `Sharded` directly."""
    return isinstance(func, (MethodDescriptorType, WrapperDescriptorType))


def trials(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh) -> list[str]:
    """One line for each layout of the operands that the function accepts. Tensors without values count as zeros.

    Raises:
        ArgumentError: it accepts no layout. The message has its error for whole operands.
    """
    tree: Any = (args, kwargs)
    leaves, treedef = optree.tree_flatten(tree, none_is_leaf=True)
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    operands = [_with_values(leaves[i]) for i in places]
    lines: list[str] = []
    failed: Exception | None = None
    for title, partitions in _partitions(operands):
        for i, x, partition in zip(places, operands, partitions, strict=True):
            source = TensorSpec(mesh, P(), x.shape, x.dtype)
            target = source.with_partition(partition)
            leaves[i] = Sharded(redistribute(x, source, target), target)
        given, named = treedef.unflatten(leaves)
        try:
            with torch.random.fork_rng([]), torch.no_grad(), communication_log() as log:
                out = dispatch(Sharded, func, (), given, named) if is_tensor_method(func) else func(*given, **named)
        except Exception as error:  # the function may raise anything for this layout, or for zeros
            failed = error
            continue
        specs = [leaf.spec.partition for leaf in optree.tree_leaves(out) if isinstance(leaf, Sharded)]
        results = ", ".join(repr(partition.shortened) for partition in specs) or "the same on all ranks"
        moved = f" [{', '.join(dict.fromkeys(entry.kind for entry in log))}]" if log else ""
        lines.append(f"  {title:18} {', '.join(map(repr, partitions))} -> {results}{moved}")
    if failed is not None and not lines:
        raise ArgumentError(f"explain_rule calls {shown(func)}, which fails: {failed}") from failed
    return lines


def _with_values(x: Tensor | Sharded) -> Tensor:
    if isinstance(x, Sharded) or x.is_meta:
        return torch.zeros(x.shape, dtype=x.dtype)
    return x.detach()


def _partitions(operands: list[Tensor]) -> Iterator[tuple[str, list[P]]]:
    """One dim of one operand sharded, the others whole; and all whole."""
    whole = [P() for _ in operands]
    for i, x in enumerate(operands):
        for dim in range(x.ndim):
            title = f"dim {dim} sharded" if len(operands) == 1 else f"{i}, dim {dim} sharded"
            yield title, [*whole[:i], P(*[None] * dim, "x"), *whole[i + 1 :]]
    yield "whole", whole
