"""Cotangents and tangents that a user gives: checked against the values they belong to, and cut into blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.autodiff.leaves import differentiable, flatten, gradient_like, local_of, show_leaf
from fspmd.body import state
from fspmd.errors import ArgumentError, TreeError, VarianceError
from fspmd.messages import Failure, as_axis_name, described, quoted, refuse
from fspmd.pairs import apply, call
from fspmd.redistribution.redistribute import redistribute, to_blocks
from fspmd.sharded import Sharded, is_plain
from fspmd.spec import TensorSpec, describe
from fspmd.trees import leaf_paths, tree_text
from fspmd.variance import Variance, get_variance


def cotangents_of(cotangent: Any, out: Any, outputs: Sequence[Any], what: str) -> list[Tensor]:
    """The blocks of the cotangents of all leaves of a result. One error names all that do not fit."""
    cotangent = _filled(cotangent, out)
    given, tree = flatten(cotangent)
    _, out_tree = flatten(out)
    if tree != out_tree:
        raise TreeError(
            f"{what} got a cotangent with the tree {tree_text(tree)}, but the result has the tree "
            f"{tree_text(out_tree)}; give one tensor per leaf of the result"
        )
    if any(_cotangent_failure(c, o, "", "") is not None for c, o in zip(given, outputs, strict=True)):
        paths = [
            leaf_paths(tree, root, none_is_leaf=False) for tree, root in ((cotangent, "cotangent"), (out, "result"))
        ]
        rows = zip(given, outputs, *paths, strict=True)
        failures = (_cotangent_failure(*row) for row in rows)
        refuse(f"{what}: cotangents that do not fit", [failure for failure in failures if failure is not None])
    return [
        _block(c, o.spec.dual) if isinstance(o, Sharded) else _cast(c, get_variance(o).dual)
        for c, o in zip(given, outputs, strict=True)
    ]


def _filled(cotangent: Any, out: Any) -> Any:
    """The cotangent with zeros in place of None, which stands for results that have no derivative."""
    given, tree = optree.tree_flatten(cotangent, none_is_leaf=True)
    outs, out_tree = optree.tree_flatten(out, none_is_leaf=True)
    if tree != out_tree or not any(c is None and o is not None for c, o in zip(given, outs, strict=True)):
        return cotangent
    filled = [
        gradient_like(o, torch.zeros_like(local_of(o).detach()))
        if c is None and isinstance(local_of(o), Tensor) and not differentiable(o)
        else c
        for c, o in zip(given, outs, strict=True)
    ]
    return tree.unflatten(filled)


def _cast(cotangent: Tensor, to: Variance) -> Tensor:
    """Cast a cotangent to the type of its result's cotangents. An invariant one counts on each rank."""
    cast: Tensor = cotangent if state.tracker is None else state.tracker.cast(cotangent, to)
    return cast


def cotangent_of(cotangent: Any, out: Sharded, what: str) -> Tensor:
    """The block of the cotangent of one `Sharded`."""
    if type(cotangent) is Sharded and cotangent.spec is out.spec.dual:
        return cotangent.local
    if failure := _cotangent_failure(cotangent, out, "the gradient", "the tensor"):
        refuse(f"{what}: a gradient that does not fit", [failure])
    return _block(cotangent, out.spec.dual)


def tangents_of(tangents: Sequence[Any], primals: Sequence[Any], labels: Sequence[str], what: str) -> list[Tensor]:
    """The blocks of the tangents of all leaves."""
    failures = [
        failure
        for t, primal, label in zip(tangents, primals, labels, strict=True)
        if (failure := _tangent_failure(t, primal, label.replace("primals", "tangents", 1), label)) is not None
    ]
    if failures:
        refuse(f"{what}: tangents that do not fit", failures)
    return [_block(t, getattr(primal, "spec", None)) for t, primal in zip(tangents, primals, strict=True)]


def scalar_of(out: Any, what: str) -> Tensor:
    """The block of a real scalar that is equal on all ranks. Such a value needs no cotangent.

    For a pending sum of the global view it is this rank's term, whose cotangent is that of the sum. For a reduced value
    it is an equal invariant value, whose cotangent is no pending sum.

    Raises:
        ArgumentError: the value is no real scalar.
        VarianceError: the value is reduced, in a body.
    """
    x = local_of(out)
    if isinstance(out, Sharded) and out.spec.partition.reduced:
        mesh = out.spec.mesh
        x = apply(x, call("reduced_to_invariant", mesh, mesh.ordered(out.spec.partition.reduced)))
    if not isinstance(x, Tensor) or x.ndim or not x.is_floating_point():
        given = show_leaf(out) if isinstance(x, Tensor) else described(out)
        more = "" if what == "backward()" else ", return (scalar, aux) with has_aux=True, or use vjp"
        raise ArgumentError(
            f"{what} needs a real scalar, a 0-d floating-point tensor, but the result is {given}; reduce it with "
            f".sum() or .mean(){more}"
        )
    if state.tracker is not None and (reduced := get_variance(x).reduced):
        axis = as_axis_name(sorted(reduced))
        raise VarianceError(
            f"{what} needs a scalar that is invariant or varying, but the result is {show_leaf(out)}: its cotangent "
            f"is a pending sum; return pmean(pcast(value, {axis}, to='varying'), {axis})"
        )
    return x


def _block(x: Any, spec: TensorSpec | None) -> Tensor:
    """The block of ``x`` in a layout; None for a plain tensor."""
    if spec is not None and isinstance(x, Sharded) and x.spec is not spec:
        return redistribute(x.local, x.spec, spec)
    if spec is None or isinstance(x, Sharded):
        block: Tensor = local_of(x)
        return block
    return to_blocks(x, spec)


def _cotangent_failure(c: Any, out: Any, where: str, of: str) -> Failure | None:
    if isinstance(out, Sharded):
        return _sharded_failure(c, out.spec.dual, where, of)
    return _plain_failure(c, out, get_variance(out).dual, where, of)


def _tangent_failure(t: Any, primal: Any, where: str, of: str) -> Failure | None:
    if isinstance(primal, Sharded):
        return _sharded_failure(t, primal.spec, where, of)
    return _plain_failure(t, primal, get_variance(primal), where, of)


def _sharded_failure(x: Any, spec: TensorSpec, where: str, of: str) -> Failure | None:
    if isinstance(x, Sharded):
        alike = x.spec.mesh == spec.mesh and (x.spec.shape, x.spec.dtype) == (spec.shape, spec.dtype)
        fits = x.spec is spec or alike  # another partition fits, too: `_block` moves the value
    else:
        fits = is_plain(x) and tuple(x.shape) == spec.shape and x.dtype == spec.dtype
    if fits:
        return None
    plain = describe(spec.dtype, spec.shape)
    return Failure(f"{where} is {show_leaf(x)}; {of} takes Sharded {spec!r}, or a global tensor {plain}", TreeError)


def _plain_failure(x: Any, like: Tensor, want: Variance, where: str, of: str) -> Failure | None:
    if not is_plain(x) or x.shape != like.shape or x.dtype != like.dtype:
        return Failure(f"{where} is {show_leaf(x)}; {of} takes {_text(like, want)}", TreeError)
    if state.body is None or not state.body.checked:
        return None
    have = get_variance(x)
    takes = f"{where} is {show_leaf(x)}; {of} takes {_text(like, want)}"
    if extra := have.varying - want.varying:
        advice = "psum it first, or pcast the value it belongs to with to='varying'"
        return Failure(f"{takes}, equal on all ranks of {quoted(sorted(extra))}", VarianceError, advice)
    return Failure(takes, VarianceError, "psum or pcast it first") if have.unreduced != want.unreduced else None


def _text(like: Tensor, variance: Variance) -> str:
    return describe(like.dtype, like.shape).replace(", ", ",") + (repr(variance) if repr(variance) != "{}" else "")
