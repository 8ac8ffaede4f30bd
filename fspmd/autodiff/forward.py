"""Derivatives along a direction: `jvp`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fspmd.autodiff.leaves import (
    Function,
    check_leaf,
    differentiating,
    flatten,
    like,
    local_of,
    show_leaf,
    typed,
)
from fspmd.body import state
from fspmd.errors import TreeError, VarianceError
from fspmd.redistribute import to_blocks
from fspmd.sharded import Sharded
from fspmd.trees import key_path
from fspmd.variance import get_variance, set_variance, show


def jvp(f: Function, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """``f(*primals)`` and its derivative along ``tangents``, a tree like ``primals``; both have the result's layout.

    >>> from fspmd import P, device_get, make_mesh, psum, shard_map
    >>> f = shard_map(lambda x: psum(x * x, "x"), mesh=make_mesh((4,), ("x",)), in_specs=P("x"), out_specs=P())
    >>> out, tangent = jvp(f, (torch.arange(4.0),), (torch.ones(4),))
    >>> device_get(tangent)
    tensor([12.])
    """
    primals, tangents = tuple(primals), tuple(tangents)
    leaves, treedef = flatten(primals)
    given, tree = flatten(tangents)
    if tree != treedef:
        raise TreeError(
            f"jvp got tangents of the tree {tree}, but the primals have {treedef}; give tangents of that tree"
        )
    locals_: list[Tensor] = []
    for path, leaf, t in zip(treedef.paths(), leaves, given, strict=True):
        check_leaf(leaf, path[1:], "jvp", f"primals[{path[0]}]")
        locals_.append(_tangent(leaf, t, path))
    kept: dict[str, Any] = {}

    def flat(*xs: Tensor) -> tuple[Tensor, ...]:
        xs = tuple(typed(x, local_of(leaf)) for x, leaf in zip(xs, leaves, strict=True))
        kept["outs"], kept["tree"] = flatten(
            f(*treedef.unflatten([like(o, x) for o, x in zip(leaves, xs, strict=True)]))
        )
        kept["variances"] = [get_variance(local_of(o)) for o in kept["outs"]]
        return tuple(local_of(o) for o in kept["outs"])

    with differentiating():
        both: Any = torch.func.jvp(flat, tuple(local_of(leaf) for leaf in leaves), tuple(locals_))
    values, derivatives = both
    sides = []
    for side in (values, derivatives):
        for value, variance in zip(side, kept["variances"], strict=True):
            set_variance(value, variance)
        sides.append(kept["tree"].unflatten([like(o, v) for o, v in zip(kept["outs"], side, strict=True)]))
    return sides[0], sides[1]


def _tangent(leaf: Any, t: Any, path: tuple[Any, ...]) -> Tensor:
    where = f"jvp: the tangent{key_path(path)}"
    if isinstance(leaf, Sharded):
        if isinstance(t, Sharded) and t.spec is leaf.spec:
            return t.local
        if isinstance(t, Tensor) and tuple(t.shape) == leaf.shape and t.dtype == leaf.dtype:
            return to_blocks(t, leaf.spec)
        raise TreeError(
            f"{where} is {show_leaf(t)}, but the primal is {leaf!r}; give a Sharded of that spec or a global tensor"
        )
    if not isinstance(t, Tensor) or t.shape != leaf.shape or t.dtype != leaf.dtype:
        raise TreeError(
            f"{where} is {show_leaf(t)}, but the primal is {show_leaf(leaf)}; give a tensor of that shape and dtype"
        )
    if (
        state.body is not None
        and state.body.checked
        and (extra := get_variance(t).varying - get_variance(leaf).varying)
    ):
        raise VarianceError(
            f"{where} is {show(t)}, but the primal is {show(leaf)}: a tangent may vary only where its primal does, "
            f"and this one does over {', '.join(sorted(extra))}; pcast the primal to varying first"
        )
    return t
