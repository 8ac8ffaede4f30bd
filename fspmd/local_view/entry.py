"""Entries of a body: each turns an argument, a global tensor or a `Sharded`, into this rank's typed block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fspmd.body import Body
from fspmd.cache import Cache
from fspmd.errors import ArgumentError, ShapeError, SpecError
from fspmd.foreign import misfit
from fspmd.messages import Failure, described, holds_all_ranks, quoted
from fspmd.pairs import Call, apply, call
from fspmd.redistribution.cost import topology
from fspmd.redistribution.redistribute import cuts, moved, redistribute
from fspmd.sharded import Sharded, of_form
from fspmd.spec import P, TensorSpec, complain
from fspmd.torch_internals import transforms_active
from fspmd.tracing import outside_transforms
from fspmd.transport.local_tensor import is_simulated
from fspmd.variance import ATTRIBUTE, INVARIANT, Variance, get_variance, set_variance, variance_of_spec

Entry = Callable[[Any], Any]


def argument_failure(
    leaf: Any, partition: P | None, label: object, body: Body, outer_axes: frozenset[str]
) -> Failure | None:
    """Return the failure of an argument under its spec, or None."""
    if partition is None or leaf is None:
        return None
    if isinstance(leaf, Sharded):
        if outer_axes:
            advice = "pass it to the outer function, with its spec, and hand its block on"
            return Failure(f"{label} is {leaf!r}, but a nested shard_map takes blocks", ArgumentError, advice)
    elif is_simulated(leaf):
        if not outer_axes:
            return holds_all_ranks(str(label))
    elif not isinstance(leaf, Tensor):
        return Failure(f"{label} is {described(leaf)}, not a tensor; {_as_tensor(leaf)}", ArgumentError)
    elif problem := misfit(leaf):
        return Failure(f"{label} is {problem[0]}", ArgumentError, problem[1])
    return spec_failure(leaf, partition, label, body, outer_axes)


def spec_failure(
    x: Tensor | Sharded, partition: P, label: object, body: Body, outer_axes: frozenset[str]
) -> Failure | None:
    """Return the failure of an argument or a result whose spec does not fit its dims, or the axes of the body."""
    wrong = complain(partition, body.mesh, x.ndim) or _axes_complaint(partition, body, outer_axes)
    return Failure(f"{label} of shape {tuple(x.shape)}: {wrong}", SpecError) if wrong else None


def _axes_complaint(partition: P, body: Body, outer_axes: frozenset[str]) -> str:
    """Return the mistake in a spec that names axes other than the body's own, or ""."""
    if bound := sorted(partition.mentioned & outer_axes):
        return f"{partition!r} names the axis {quoted(bound)}, along which the enclosing body has cut it; leave it out"
    if other := sorted(partition.mentioned - body.axes):
        manual = quoted(sorted(body.axes - outer_axes))
        return (
            f"{partition!r} names the axis {quoted(other)}, which is not in axis_names={{{manual}}}: "
            "leave it out, or add it to axis_names"
        )
    return ""


def _as_tensor(leaf: Any) -> str:
    static = "give it None in in_specs (a static argument)"
    if isinstance(leaf, (int, float, complex)):
        return f"pass torch.tensor({leaf!r}), or {static}"
    if type(leaf).__name__ == "ndarray":
        return f"pass torch.from_numpy(array), or {static}"
    if isinstance(leaf, str):
        return static
    return f"{static}, or register {type(leaf).__name__} with optree if it is a tree of tensors"


def make_entry(
    leaf: Any, partition: P | None, label: object, body: Body, new_axes: frozenset[str], nested: bool
) -> Entry:
    """Return the entry of one leaf. It is made once per plan."""
    if partition is None and isinstance(leaf, Sharded):
        return functools.partial(of_form, leaf.form)
    if partition is None:
        return static
    variance = variance_of_spec(partition)
    widen = None
    if not body.checked and (absent := body.mesh.ordered(new_axes - partition.mentioned)):
        widen = call("invariant_to_varying", body.mesh, absent)
    if isinstance(leaf, Sharded):
        source = leaf.spec
        target = TensorSpec(body.mesh, partition, source.shape, source.dtype)
        return _sharded_entry(source, target, variance if body.checked else None, widen)
    return _plain_entry(partition, label, body, variance if body.checked else None, widen, nested)


def typed_entry(spec: TensorSpec) -> Entry:
    """Return the entry that types a block of a checked body."""
    return _sharded_entry(spec, spec, variance_of_spec(spec.partition), None)


def static(leaf: Any) -> Any:
    """Return a leaf as it is."""
    return leaf


def _sharded_entry(source: TensorSpec, target: TensorSpec, variance: Variance | None, widen: Call | None) -> Entry:
    if source is target and widen is None:
        if variance is None:
            return static

        def typed(local: Tensor) -> Tensor:
            have = getattr(local, ATTRIBUTE, None)
            if have is not variance:
                if have is not None:  # another Sharded shares this local tensor
                    local = local.view_as(local)
                setattr(local, ATTRIBUTE, variance)
            return local

        return typed

    def enter(local: Tensor) -> Tensor:
        x = redistribute(local, source, target)
        if widen is not None and (x.requires_grad or transforms_active()):
            x = apply(x, widen)
        return x if variance is None else set_variance(x, variance)

    return enter


def _plain_entry(
    partition: P, label: object, body: Body, variance: Variance | None, widen: Call | None, nested: bool
) -> Entry:
    cut = bool(partition.mentioned)
    cuts_of: Cache[Any, tuple[Call, ...]] = Cache()  # by shape and dtype

    def enter(x: Any) -> Any:
        if x is None:
            return None
        inherited = get_variance(x) if nested else INVARIANT
        y = x
        if cut:
            if body.outer is not None and body.outer.uneven:
                _check_even_blocks(x, partition, label, body)
            calls = cuts_of.get((x.shape, x.dtype))
            if calls is None:
                spec = TensorSpec(body.mesh, partition, x.shape, x.dtype)
                if not spec.even:
                    body.mark_uneven()
                calls = cuts_of[x.shape, x.dtype] = cuts(spec, topology())
            y = moved(x, calls)
        if widen is not None and (y.requires_grad or transforms_active()):
            y = apply(y, widen)
        if variance is None:
            return set_variance(y, inherited)
        if nested:
            return set_variance(
                y,
                Variance(
                    inherited.varying | variance.varying,
                    inherited.unreduced | variance.unreduced,
                    inherited.reduced | variance.reduced,
                ),
            )
        if not cut:
            return y
        if transforms_active():
            return set_variance(y, variance)
        setattr(y, ATTRIBUTE, variance)  # a new tensor
        return y

    return enter


def _check_even_blocks(x: Tensor, partition: P, label: object, body: Body) -> None:
    """Raise `ShapeError` on all ranks if a block that a nested map cuts again has several shapes."""
    with outside_transforms():
        layouts = body.transport.layouts([x], body.mesh)
    shapes = list(dict.fromkeys(layout[1] for (layout,) in layouts if layout is not None))
    if len(shapes) > 1:
        raise ShapeError(
            f"{body.name}: {label} has blocks of different shapes, {' and '.join(map(str, shapes[:2]))}, on different "
            f"ranks, so {partition!r} cannot cut them again; cut the whole value over all these axes in the outer "
            "map, or pad the blocks to one shape first"
        )
