"""How an argument enters a body: from a global tensor or a `Sharded` to this rank's typed block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fspmd.body import Body
from fspmd.errors import ArgumentError, SpecError
from fspmd.pairs import Call, apply, call
from fspmd.redistribute import redistribute, to_blocks
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec, complain
from fspmd.variance import ATTRIBUTE, INVARIANT, Variance, get_variance, set_variance, variance_of_spec

Entry = Callable[[Any], Any]


def complaint(leaf: Any, partition: Any, body: Body, nested: bool) -> str:
    """What is wrong with an argument and its spec, or ""."""
    if isinstance(leaf, Sharded):
        if nested:
            return (
                "is a Sharded inside another shard_map body; pass it as an argument of the outer function and hand the "
                "block on"
            )
        return complain(partition, body.mesh, leaf.ndim)
    if leaf is None:
        return complain(partition, body.mesh, None)
    if not isinstance(leaf, Tensor):
        return (
            f"is a {type(leaf).__name__}, not a tensor; mark a static argument with None in in_specs, or pass a tensor: "
            f"torch.tensor({leaf!r})"
            if isinstance(leaf, (int, float, complex, bool))
            else f"is a {type(leaf).__name__}, not a tensor; mark a static argument with None in in_specs"
        )
    return complain(partition, body.mesh, leaf.ndim)


def make_entry(leaf: Any, partition: P | None, body: Body, new_axes: frozenset[str], nested: bool, name: str) -> Entry:
    """The function that brings one leaf in; made once per plan."""
    if partition is None and isinstance(leaf, Sharded):
        spec = leaf.spec
        return lambda local: Sharded(local, spec)
    if partition is None or leaf is None:
        return _static
    variance = variance_of_spec(partition)
    absent = tuple(a for a in body.mesh.axis_names if a in new_axes and a not in partition.mentioned)
    widen = None if body.checked or not absent else call("invariant_to_varying", body.mesh, absent)
    if isinstance(leaf, Sharded):
        source = leaf.spec
        target = TensorSpec(body.mesh, partition, source.shape, source.dtype)
        return _sharded_entry(source, target, variance if body.checked else None, widen)
    return _plain_entry(partition, body, variance if body.checked else None, widen, nested, name)


def _static(leaf: Any) -> Any:
    return leaf


def _sharded_entry(source: TensorSpec, target: TensorSpec, variance: Variance | None, widen: Call | None) -> Entry:
    if source is target and widen is None:
        if variance is None:
            return _static

        def typed(local: Tensor) -> Tensor:
            if getattr(local, ATTRIBUTE, INVARIANT) is not variance:
                setattr(local, ATTRIBUTE, variance)
            return local

        return typed

    def moved(local: Tensor) -> Tensor:
        x = redistribute(local, source, target)
        if widen is not None and x.requires_grad:
            x = apply(x, widen)
        return x if variance is None else set_variance(x, variance)

    return moved


def _plain_entry(
    partition: P, body: Body, variance: Variance | None, widen: Call | None, nested: bool, name: str
) -> Entry:
    cut = bool(partition.mentioned)

    def enter(x: Any) -> Any:
        if not isinstance(x, Tensor):
            raise ArgumentError(f"{name} {complaint(x, partition, body, nested)}")
        inherited = get_variance(x) if nested else INVARIANT
        y = x
        if cut:
            if wrong := complain(partition, body.mesh, x.ndim):
                raise SpecError(f"{name} of shape {tuple(x.shape)}: {wrong}")
            spec = TensorSpec(body.mesh, partition, x.shape, x.dtype)
            if not spec.even:
                body.uneven = True
            y = to_blocks(x, spec)
        if widen is not None and y.requires_grad:
            y = apply(y, widen)
        if variance is None:
            return y
        if nested:
            return set_variance(
                y,
                Variance(
                    inherited.varying | variance.varying,
                    inherited.unreduced | variance.unreduced,
                    inherited.reduced | variance.reduced,
                ),
            )
        return set_variance(y, variance) if cut else y

    return enter
