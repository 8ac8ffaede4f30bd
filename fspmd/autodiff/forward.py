"""Derivatives along a direction: `jvp`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.autodiff.leaves import (
    DIFFERENTIATING,
    Function,
    check_function,
    check_leaves,
    check_results,
    flatten,
    like,
    local_of,
    rewrapped,
    tangents_of,
    typed,
)
from fspmd.body import state
from fspmd.errors import ArgumentError, TreeError
from fspmd.messages import described
from fspmd.torch_internals import NO_LEVEL, NOT_MAPPED, batch_dim_of, level_of, wrapped_by
from fspmd.transport.local_tensor import is_uneven
from fspmd.trees import leaf_paths, tree_text
from fspmd.variance import unwrapped


def jvp(f: Function, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """``f(*primals)`` and its derivative along ``tangents``. Both have the layout of the result.

    Each collective in ``f`` runs twice: for the value, and for the tangent.

    Args:
        f: A function of pytrees with plain and `Sharded` leaves.
        primals: The positional arguments of ``f``.
        tangents: A tree like ``primals``.

    Raises:
        ArgumentError: a primal has no derivative.
        TreeError, VarianceError: a tangent has another tree, shape, dtype or layout, or varies where its primal does
            not.

    >>> from fspmd import P, device_get, make_mesh, psum, shard_map
    >>> f = shard_map(lambda x: psum(x * x, "x"), mesh=make_mesh((4,), ("x",)), in_specs=P("x"), out_specs=P())
    >>> out, tangent = jvp(f, (torch.arange(4.0),), (torch.ones(4),))
    >>> device_get(tangent)
    tensor([12.])
    """
    check_function(f, "jvp")
    for name, given in (("primals", primals), ("tangents", tangents)):
        if not isinstance(given, (tuple, list)):
            raise ArgumentError(
                f"jvp got {described(given)} as {name}; give a tuple with one entry per argument: jvp(f, (x,), (t,))"
            )
    primals, tangents = tuple(primals), tuple(tangents)
    leaves, treedef = flatten(primals)
    given, tree = flatten(tangents)
    if tree != treedef:
        raise TreeError(
            f"jvp got tangents with the tree {tree_text(tree)}, but the primals have the tree {tree_text(treedef)}; "
            "give one tangent per leaf of the primals"
        )
    labels = leaf_paths(primals, "primals", none_is_leaf=False)
    check_leaves(leaves, lambda: list(zip(leaves, labels, strict=True)), "jvp")
    blocks = list(map(local_of, leaves))
    duals = list(map(_laid_alike, blocks, tangents_of(given, leaves, labels)))
    outs: list[Any] = []
    out_tree: Any = None

    def flat(*xs: Tensor) -> tuple[Tensor, ...]:
        nonlocal out_tree
        xs = tuple(typed(x, local_of(leaf)) for x, leaf in zip(xs, leaves, strict=True))
        out = f(*treedef.unflatten([like(leaf, x) for leaf, x in zip(leaves, xs, strict=True)]))
        check_results(out, "jvp")
        outs[:], out_tree = flatten(out)
        return tuple(map(local_of, outs))

    with DIFFERENTIATING:
        outputs: Any = torch.func.jvp(flat, tuple(x for x, _ in duals), tuple(t for _, t in duals))
    value, tangent = (out_tree.unflatten(rewrapped(outs, values)) for values in outputs)
    return value, tangent


def _laid_alike(primal: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks of a primal and of its tangent with equal strides. Torch sees to them unless blocks are uneven."""
    if not is_uneven(unwrapped(primal)) or state.body is not None:
        return primal, tangent
    if _is_mapped(primal):  # the copy below would write into a view, which an outer jvp cannot follow
        return primal.clone(memory_format=_PACKED), tangent.clone(memory_format=_PACKED)
    return primal, torch.empty_like(primal).copy_(tangent)


_PACKED: Final = torch.contiguous_format


def _is_mapped(x: Tensor) -> bool:
    """Whether `vmap` maps a value at some level."""
    while level_of(x) != NO_LEVEL:
        if batch_dim_of(x) != NOT_MAPPED:
            return True
        x = wrapped_by(x)
    return False
