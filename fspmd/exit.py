"""How a result leaves a body: the check of its type against its spec, and the `Sharded` it becomes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fspmd.body import Body
from fspmd.errors import ArgumentError, ShapeError, SpecError, VarianceError
from fspmd.pairs import apply, call
from fspmd.redistribute import from_blocks
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec, complain, entry_axes
from fspmd.transport import Options
from fspmd.transport.frame import frame
from fspmd.transport.local_tensor import LocalTensor, frame_of
from fspmd.variance import ATTRIBUTE, INVARIANT, Variance, get_variance, show, variance_of_spec

Exit = Callable[[Any], Any]


def type_complaint(x: Tensor, partition: P, body: Body, outer_axes: frozenset[str]) -> str:
    """Why a value of this type cannot leave under this spec, or ""."""
    variance = get_variance(x)
    inner = body.axes - outer_axes
    if extra := sorted(variance.varying & inner - partition.axes - partition.unreduced):
        axes = ", ".join(map(repr, extra))
        one = repr(extra[0]) if len(extra) == 1 else tuple(extra)
        return (
            f"{show(x)} varies over {axes}, but its spec {partition!r} does not name {'it' if len(extra) == 1 else 'them'}; "
            f"make it equal first: psum(x, {one}), pmean(x, {one}) or all_gather(x, {one}, tiled=True, to='invarying'); "
            f"or name the axis in the spec: {_with_axis(partition, extra, x.ndim)!r}"
        )
    for letter, word, have, want, mend in (
        ("U", "unreduced", variance.unreduced & inner, partition.unreduced, "psum or psum_scatter it first"),
        ("R", "reduced", variance.reduced & inner, partition.reduced, "pcast(x, axis, to='varying') it first"),
    ):
        if have - want:
            axes = ", ".join(map(repr, sorted(have - want)))
            return f"{show(x)} is {word} over {axes}, but its spec {partition!r} is not; {mend}, or write {word}={{{axes}}}"
        allowed = have | (variance.varying if letter == "U" else frozenset())
        if want - allowed:
            axes = ", ".join(map(repr, sorted(want - allowed)))
            how = "pcast a varying value to='unreduced'" if letter == "U" else "pcast an invariant value to='reduced'"
            return f"{show(x)} is not {word} over {axes}, but its spec {partition!r} is; {how}, or drop {word}= from the spec"
    return ""


def _with_axis(partition: P, axes: list[str], ndim: int) -> P:
    entries = [*partition.entries, *(None,) * (ndim - len(partition))]
    if not entries:
        return P(unreduced=partition.unreduced, reduced=partition.reduced)
    entries[0] = (*entry_axes(entries[0]), *axes)
    return P(*entries, unreduced=partition.unreduced, reduced=partition.reduced)


def make_exit(partition: P | None, body: Body, outer_axes: frozenset[str], nested: bool, name: str) -> Exit:
    """The function that takes one leaf out; made once per plan and output tree."""
    if partition is None:
        return lambda x: x
    target = variance_of_spec(partition)
    specs: dict[Any, TensorSpec] = {}
    simulated = body.mesh.transport == "simulation"
    inner_absent = tuple(
        a for a in body.mesh.axis_names if a in body.axes - outer_axes and a not in partition.mentioned
    )
    share = None
    if inner_absent and not body.checked:
        share = call("leave_unchecked", body.mesh, inner_absent, Options(factor=1 / body.mesh.axis_size(inner_absent)))

    def leave_known(x: Any) -> Any:
        """The common case: a plain tensor of the right type and of a shape seen before."""
        if type(x) is Tensor and not body.uneven and (share is None or not x.requires_grad):
            if getattr(x, ATTRIBUTE, INVARIANT) is target or not body.checked:
                spec = specs.get((x.shape, x.dtype))
                if spec is not None:
                    return Sharded(x, spec)
        return leave(x)

    def leave(x: Any) -> Any:
        if x is None:
            return None
        if not isinstance(x, Tensor):
            if not isinstance(x, (int, float, complex, bool)) or partition.mentioned:
                raise ArgumentError(
                    f"{name} is a {type(x).__name__}, not a tensor; return a tensor, or mark a static result with None "
                    "in out_specs"
                )
            x = torch.tensor(x, device=body.mesh.device)
        if wrong := len(partition) > x.ndim and complain(partition, body.mesh, x.ndim):
            raise SpecError(f"{name} of shape {tuple(x.shape)}: {wrong}")
        if body.checked:
            if getattr(x, ATTRIBUTE, INVARIANT) is not target:
                x = _typed(x, target, partition, body, outer_axes, name)
        elif share is not None and (x.requires_grad or simulated):
            x = apply(x, share)
        if simulated and not nested:
            x = _held(x, partition, body)
        if x.uneven if type(x) is LocalTensor else body.uneven and not simulated:
            spec = spec_of_blocks(x, partition, body.mesh, name)
        else:
            spec = _even_spec(x, partition, body)
            if not nested and not simulated:
                specs[x.shape, x.dtype] = spec
        return _whole(x, spec, body) if nested else Sharded(x, spec)

    return leave if nested or simulated else leave_known


def _typed(x: Tensor, target: Variance, partition: P, body: Body, outer_axes: frozenset[str], name: str) -> Tensor:
    if wrong := type_complaint(x, partition, body, outer_axes):
        raise VarianceError(f"{name}: {wrong}")
    variance = get_variance(x)
    for axes, row in (
        (target.varying - variance.varying, "invariant_to_varying"),
        (target.unreduced & variance.varying, "varying_to_unreduced"),
    ):
        if axes:
            ordered = tuple(a for a in body.mesh.axis_names if a in axes)
            with torch._C.DisableTorchFunction():
                x = apply(x, call(row, body.mesh, ordered))
    setattr(x, ATTRIBUTE, Variance(target.varying | (variance.varying & outer_axes), target.unreduced, target.reduced))
    return x


def _held(x: Tensor, partition: P, body: Body) -> Tensor:
    """A simulated result is held apart over exactly the axes its spec names, in memory of its own."""
    want = frame(body.mesh, partition.axes | partition.unreduced)
    if frame_of(x, body.mesh) is want:
        return x
    with torch._C.DisableTorchFunction():
        return apply(x, call("apart", body.mesh, want.axes)).clone()


def _even_spec(x: Tensor, partition: P, body: Body) -> TensorSpec:
    shape = list(x.shape)
    for dim, entry in enumerate(partition):
        shape[dim] *= math.prod(body.sizes(entry_axes(entry)))
    return TensorSpec(body.mesh, partition, shape, x.dtype)


def spec_of_blocks(x: Tensor, partition: P, mesh: Any, name: str) -> TensorSpec:
    """The spec whose blocks the ranks hold; raises on all ranks alike, naming the first that differs."""
    from fspmd.transport import transport_of

    found = transport_of(mesh).layouts(x, mesh)
    coordinates = list(frame(mesh, mesh.axis_names).coordinates())
    dtype, first = found[0]
    for at, (kind, shape) in zip(coordinates, found, strict=True):
        if kind != dtype or len(shape) != len(first):
            raise ShapeError(
                f"{name}: the rank at {_where(mesh, at)} holds {kind} of shape {shape}, but the first rank holds {dtype} "
                f"of shape {first}; all ranks must hold the same dtype and number of dims"
            )
    total = list(first)
    for dim, entry in enumerate(partition):
        axes = entry_axes(entry)
        total[dim] = sum(
            shape[dim]
            for at, (_, shape) in zip(coordinates, found, strict=True)
            if all(c == 0 or axis in axes for axis, c in zip(mesh.axis_names, at, strict=True))
        )
    spec = TensorSpec(mesh, partition, total, dtype)
    for at, (_, shape) in zip(coordinates, found, strict=True):
        if shape != spec.local_shape(at):
            raise ShapeError(
                f"{name}: the rank at {_where(mesh, at)} holds a block of shape {shape}, but a tensor {spec!r} has "
                f"{spec.local_shape(at)} there (blocks as torch.chunk cuts them)"
            )
    return spec


def _where(mesh: Any, at: tuple[int, ...]) -> str:
    return ", ".join(f"{axis}={c}" for axis, c in zip(mesh.axis_names, at, strict=True)) + f" (rank {mesh.rank_at(at)})"


def _whole(x: Tensor, spec: TensorSpec, body: Body) -> Tensor:
    """In an enclosing body a result is whole over the inner axes."""
    outer = get_variance(x)
    with torch._C.DisableTorchFunction():
        y = from_blocks(x, spec)
    if body.checked:
        inner = spec.partition.mentioned
        setattr(y, ATTRIBUTE, outer.moved(inner, "I"))
    return y
