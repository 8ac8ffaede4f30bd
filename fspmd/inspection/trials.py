"""What calls without a rule do, found by calling: for one mesh axis, layouts of operands, results, and what moves."""

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


def takes_tensors_alone(func: Any) -> bool:
    """Whether it is a method of ``torch.Tensor``, which a `Sharded` is not."""
    return isinstance(func, (MethodDescriptorType, WrapperDescriptorType))


def trials(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh) -> list[str]:
    """One line for each layout that the function takes; tensors that have no values are zero.

    Raises:
        ArgumentError: it takes none; what it says of whole operands.
    """
    tree: Any = (args, kwargs)
    leaves, treedef = optree.tree_flatten(tree, none_is_leaf=True)
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    operands = [_with_values(leaves[i]) for i in places]
    lines: list[str] = []
    failed: Exception | None = None
    for what, layouts in _layouts(operands):
        for i, x, spec in zip(places, operands, layouts, strict=True):
            whole = TensorSpec(mesh, P(), x.shape, x.dtype)
            laid = whole.with_partition(spec)
            leaves[i] = Sharded(redistribute(x, whole, laid), laid)
        given, named = treedef.unflatten(leaves)
        try:
            with torch.random.fork_rng([]), torch.no_grad(), communication_log() as log:
                out = dispatch(Sharded, func, (), given, named) if takes_tensors_alone(func) else func(*given, **named)
        except Exception as error:  # whatever it says of such a layout, or of zeros
            failed = error
            continue
        found = [one for one in optree.tree_leaves(out) if isinstance(one, Sharded)]
        results = ", ".join(repr(one.spec.partition.shortened) for one in found) or "the same on all ranks"
        moved = f" [{', '.join(dict.fromkeys(one.kind for one in log))}]" if log else ""
        lines.append(f"  {what:18} {', '.join(map(repr, layouts))} -> {results}{moved}")
    if failed is not None and not lines:
        raise ArgumentError(f"explain_rule calls {shown(func)}, which fails: {failed}") from failed
    return lines


def _with_values(x: Tensor | Sharded) -> Tensor:
    if isinstance(x, Sharded) or x.is_meta:
        return torch.zeros(x.shape, dtype=x.dtype)
    return x.detach()


def _layouts(operands: list[Tensor]) -> Iterator[tuple[str, list[P]]]:
    """One dim of one operand sharded, the others whole; and all whole."""
    whole = [P() for _ in operands]
    for i, x in enumerate(operands):
        for dim in range(x.ndim):
            named = f"dim {dim} sharded" if len(operands) == 1 else f"{i}, dim {dim} sharded"
            yield named, [*whole[:i], P(*[None] * dim, "x"), *whole[i + 1 :]]
    yield "whole", whole
