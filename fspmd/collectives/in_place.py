"""All-gather and reduce-scatter into a tensor of the caller, without allocation or copy."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fspmd.body import Body, bound_body, resolve_axes, state
from fspmd.collectives.checks import check_alike
from fspmd.collectives.steps import Handle
from fspmd.errors import ArgumentError, ShapeError, VarianceError
from fspmd.foreign import refuse_misfit
from fspmd.messages import as_axis_name
from fspmd.pairs import call, watched
from fspmd.torch_internals import NOT_MAPPED, DisableTorchFunction, batch_dim_of
from fspmd.transport.local_tensor import held_frame
from fspmd.transport.pending import begin
from fspmd.variance import BORROWED, Variance, get_variance, set_variance, show


@overload
def all_gather_into(out: Tensor, x: Tensor, axis_name: Any, *, wait: Literal[True] = True) -> Tensor: ...
@overload
def all_gather_into(out: Tensor, x: Tensor, axis_name: Any, *, wait: Literal[False]) -> Handle[Tensor]: ...
def all_gather_into(out: Tensor, x: Tensor, axis_name: Any, *, wait: bool = True) -> Any:
    """Write every rank's block into ``out``, along dim 0: ``[A] [B] => out = [A,B]``.

    ``x`` is ``[b, ...]``; ``out`` is ``[n * b, ...]`` or ``[n, b, ...]``. Both are contiguous. Afterwards ``out``
    varies over the axes. Not differentiable. Returns ``out``; with ``wait=False``, a handle.

    Raises:
        ShapeError: shapes or dtypes do not fit, or a tensor is not contiguous.
        ArgumentError: a tensor requires grad, or is mapped by `vmap`; use `all_gather`.

    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> def body(x):
    ...     return all_gather_into(torch.empty(4), x, "x")
    >>> f = shard_map(body, mesh=make_mesh((4,), ("x",)), in_specs=P("x"), out_specs=P("x"))
    >>> device_get(f(torch.arange(4.0)))[:4]
    tensor([0., 1., 2., 3.])
    """
    return _into("all_gather_into", out, x, axis_name, wait, gather=True)


@overload
def psum_scatter_into(out: Tensor, x: Tensor, axis_name: Any, *, wait: Literal[True] = True) -> Tensor: ...
@overload
def psum_scatter_into(out: Tensor, x: Tensor, axis_name: Any, *, wait: Literal[False]) -> Handle[Tensor]: ...
def psum_scatter_into(out: Tensor, x: Tensor, axis_name: Any, *, wait: bool = True) -> Any:
    """Write this rank's block of the sum over ranks into ``out``: ``[A0,A1] [B0,B1] => out = [A0+B0] [A1+B1]``.

    ``x`` is ``[n * b, ...]`` or ``[n, b, ...]``; ``out`` is ``[b, ...]``. Both are contiguous. ``out`` must vary over
    the axes: make it with ``x.new_empty(...)``. Not differentiable. Returns ``out``; with ``wait=False``, a handle.

    Raises:
        ShapeError, ArgumentError: as for `all_gather_into`.
        VarianceError: ``out`` is equal on all ranks, or ``x`` is unreduced or reduced.

    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> def body(x):
    ...     return psum_scatter_into(x.new_empty(1), x, "x")
    >>> f = shard_map(body, mesh=make_mesh((4,), ("x",)), in_specs=P("x"), out_specs=P("x"))
    >>> device_get(f(torch.ones(16)))
    tensor([4., 4., 4., 4.])
    """
    return _into("psum_scatter_into", out, x, axis_name, wait, gather=False)


def _into(what: str, out: Tensor, x: Tensor, axis_name: Any, wait: bool, gather: bool) -> Any:
    body = bound_body(what)
    axes = resolve_axes(body, axis_name, what)
    with DisableTorchFunction():
        check_alike(body, (out, x), axes, what)
        _check(what, body, axes, out, x, gather)
        moves = watched(x, call("all_gather" if gather else "psum_scatter", body.mesh, axes))
        pending = moves.into(x.detach(), out.detach())
        if not wait:
            begin(pending)
        if body.checked:
            before = get_variance(x)
            set_variance(out, Variance(before.varying | frozenset(axes), before.unreduced, before.reduced))

    def finish() -> Tensor:
        with DisableTorchFunction():
            pending.wait()
        return out

    return finish() if wait else Handle(finish, (x,))


def _check(what: str, body: Body, axes: tuple[str, ...], out: Any, x: Any, gather: bool) -> None:
    for name, value in (("out", out), ("x", x)):
        if not isinstance(value, Tensor):
            raise ArgumentError(f"{what} got {name} of type {type(value).__name__}; expected a torch.Tensor")
        refuse_misfit(value, f"{what} got for {name}")
        if not value.is_contiguous():
            raise ShapeError(
                f"{what}: {name}, {show(value)} with strides {tuple(value.stride())}, is not contiguous: moving it in "
                f"one piece would take a copy; pass a contiguous {name}"
            )
        if batch_dim_of(value) != NOT_MAPPED or forward_ad.unpack_dual(value, level=0).tangent is not None:
            raise ArgumentError(f"{what} writes in place and takes no part in vmap or jvp; use {what[:-5]}")
    n = math.prod(body.sizes(axes))
    block, whole = (x, out) if gather else (out, x)
    tiled = (n * block.shape[0], *block.shape[1:]) if block.ndim else None
    stacked = (n, *block.shape)
    if tuple(whole.shape) not in (tiled, stacked) or out.dtype != x.dtype:
        names = ("x", "out") if gather else ("out", "x")
        raise ShapeError(
            f"{what} over {n} ranks: {names[0]} is {show(block)}, so {names[1]} must be {block.dtype} of shape "
            f"{' or '.join(map(str, filter(None, (tiled, stacked))))}, but it is {show(whole)}"
        )
    for name, value in (("out", out), ("x", x)):
        if value.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(f"{what} writes in place and has no gradient; pass {name}.detach(), or use {what[:-5]}")
    if getattr(out, BORROWED, False):
        raise VarianceError(
            f"{what}: out is the result of a pcast, which aliases its argument; pass a tensor of its own"
        )
    if not gather and body.mesh.transport == "simulation" and _axes_of(out).isdisjoint(axes):
        model = f"pcast(x, {as_axis_name(axes)}, to='varying')" if _axes_of(x).isdisjoint(axes) else "x"
        raise VarianceError(
            f"{what}: out, {show(out)}, is equal on all ranks of {as_axis_name(axes)}, and the result is not; make it "
            f"with {model}.new_empty(shape)"
        )
    if state.body is not None and body.checked and (extra := get_variance(x).unreduced | get_variance(x).reduced):
        raise VarianceError(f"{what} of {show(x)}: unreduced or reduced over {sorted(extra)}; use {what[:-5]}")


def _axes_of(x: Tensor) -> frozenset[str]:
    held = held_frame(x)
    return frozenset() if held is None else frozenset(held.axes)
