"""Between a global tensor and its blocks, and from one spec to another, differentiably.

Every move is a row of the pair table, so backward communicates what the table says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fspmd.pairs import Call, apply, call
from fspmd.spec import P, TensorSpec, blocks, entry_axes
from fspmd.transport import Options, carriers, transport_of


def _dim_call(name: str, spec: TensorSpec, dim: int, axes: tuple[str, ...]) -> Call:
    sizes = tuple(spec.mesh.shape[axis] for axis in axes)
    lengths = tuple(length for _, length in blocks(spec.shape[dim], sizes))
    return call(name, spec.mesh, axes, Options(dim=dim, sizes=None if len(set(lengths)) == 1 else lengths))


def to_blocks(x: Tensor, spec: TensorSpec) -> Tensor:
    """This rank's block of a global tensor that every rank holds. Nothing moves; backward gathers the gradient."""
    for dim, axes, _ in spec.cuts:
        x = apply(x, _dim_call("slice", spec, dim, axes))
    return _to_pending(x, spec)


def _to_pending(x: Tensor, spec: TensorSpec) -> Tensor:
    if axes := _ordered(spec, spec.partition.reduced):
        x = apply(x, call("invariant_to_reduced", spec.mesh, axes))
    if axes := _ordered(spec, spec.partition.unreduced):  # the first rank has the value, the others zero
        index = transport_of(spec.mesh).index(spec.mesh, axes)
        spread = apply(x, call("invariant_to_varying", spec.mesh, axes))
        x = carriers.where(index == 0, spread, torch.zeros((), dtype=x.dtype, device=x.device))
    return x


def from_blocks(x: Tensor, spec: TensorSpec) -> Tensor:
    """The global tensor on every rank: an all-gather per sharded dim, a psum where unreduced. Backward slices."""
    x = _settle(x, spec)
    for dim, axes, _ in reversed(spec.cuts):
        x = apply(x, _dim_call("all_gather_invariant", spec, dim, axes))
    return x


def _settle(x: Tensor, spec: TensorSpec) -> Tensor:
    """Unreduced and reduced to invariant."""
    if axes := _ordered(spec, spec.partition.unreduced):
        x = apply(x, call("psum_unreduced", spec.mesh, axes))
    if axes := _ordered(spec, spec.partition.reduced):
        x = apply(x, call("leave_unchecked", spec.mesh, axes, Options(factor=1 / spec.mesh.axis_size(axes))))
    return x


def _ordered(spec: TensorSpec, axes: frozenset[str]) -> tuple[str, ...]:
    return tuple(axis for axis in spec.mesh.axis_names if axis in axes)


def redistribute(x: Tensor, source: TensorSpec, target: TensorSpec) -> Tensor:
    """The blocks of ``target`` from those of ``source``: gathers the dims whose axes differ, then slices them anew."""
    if source is target:
        return x
    if source.mesh != target.mesh:
        return to_blocks(from_blocks(x, source), target)
    before, after = source.partition, target.partition
    if before.unreduced != after.unreduced or before.reduced != after.reduced:
        x = _settle(x, source)
    for dim in reversed(range(source.ndim)):
        axes = entry_axes(before[dim])
        kept = _kept(source, axes, entry_axes(after[dim]), dim)
        if axes[kept:]:
            x = apply(x, _within(source, dim, axes, kept, "all_gather_invariant"))
    for dim in range(target.ndim):
        axes = entry_axes(after[dim])
        kept = _kept(source, entry_axes(before[dim]), axes, dim)
        if axes[kept:]:
            x = apply(x, _within(target, dim, axes, kept, "slice"))
    if before.unreduced != after.unreduced or before.reduced != after.reduced:
        x = _to_pending(x, target)
    return x


def _kept(spec: TensorSpec, before: tuple[str, ...], after: tuple[str, ...], dim: int) -> int:
    """How many leading axes of a dim stay as they are; uneven dims that change are gathered whole."""
    if before == after:
        return len(before)
    n = 0
    while n < min(len(before), len(after)) and before[n] == after[n]:
        n += 1
    even = all(
        len({length for _, length in blocks(spec.shape[dim], tuple(spec.mesh.shape[a] for a in axes))}) == 1
        for axes in (before, after)
    )
    return n if even else 0


def _within(spec: TensorSpec, dim: int, axes: tuple[str, ...], kept: int, name: str) -> Call:
    if kept:
        return call(name, spec.mesh, axes[kept:], Options(dim=dim))
    return _dim_call(name, spec, dim, axes)


def spec_of(x: Tensor, partition: P, mesh: object) -> TensorSpec:
    """The spec of a global tensor."""
    return TensorSpec(mesh, partition, tuple(x.shape), x.dtype)  # type: ignore[arg-type]
