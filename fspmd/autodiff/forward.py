"""Derivatives along a direction: `jvp`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fspmd.autodiff.cotangents import tangents_of
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
    typed,
)
from fspmd.body import state
from fspmd.errors import ArgumentError, TreeError
from fspmd.messages import described
from fspmd.transport.local_tensor import LocalTensor
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
    locals_ = list(map(_laid_as, tangents_of(given, leaves, labels, "jvp"), blocks))
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
        outputs: Any = torch.func.jvp(flat, tuple(blocks), tuple(locals_))
    value, tangent = (out_tree.unflatten(rewrapped(outs, values)) for values in outputs)
    return value, tangent


def _laid_as(tangent: Tensor, primal: Tensor) -> Tensor:
    """The tangent of uneven blocks of the global view, with the strides of each block. Otherwise torch sees to them."""
    block = unwrapped(primal)
    if type(block) is not LocalTensor or not block.uneven or state.body is not None:
        return tangent
    return torch.empty_like(primal).copy_(tangent)
