"""All-gather and reduce-scatter, into new tensors or into a tensor of the caller, without allocation or copy."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fspmd.body import Body, bound_body, resolve_axes, state
from fspmd.collectives.checks import (
    block_lengths,
    check_alike,
    check_dim,
    check_index_groups,
    check_size,
    check_size_use,
    check_tiles,
)
from fspmd.collectives.collective import AxisName, Build, Groups, as_varying, collective, one_state, varying_operand
from fspmd.collectives.steps import Handle, LeafCollective, Operand, Rows, T
from fspmd.errors import ArgumentError, ShapeError, VarianceError
from fspmd.foreign import refuse_misfit
from fspmd.messages import as_axis_name, quoted
from fspmd.pairs import call, watched
from fspmd.torch_internals import NOT_MAPPED, DisableTorchFunction, batch_dim_of
from fspmd.transport import Options
from fspmd.transport.carriers import check_adds
from fspmd.transport.local_tensor import held_frame
from fspmd.transport.pending import begin
from fspmd.transport.stacks import padded, stack, unstack
from fspmd.variance import BORROWED, INVARIANT, Variance, get_variance, set_variance, show


@overload
def all_gather(
    x: T,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    size: int | None = None,
    wait: Literal[True] = True,
) -> T: ...
@overload
def all_gather(
    x: T,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    size: int | None = None,
    wait: Literal[False],
) -> Handle[T]: ...
def all_gather(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    size: int | None = None,
    wait: bool = True,
) -> Any:
    """Gather the blocks of all ranks onto every rank: ``[A] [B] => [A,B] [A,B]``.

    With ``tiled``, the blocks are joined along the dim ``axis``. Without it, they are stacked along a new dim. For
    ``axis=0``, n blocks ``[b, ...]`` make ``[n * b, ...]`` with ``tiled``, and ``[n, b, ...]`` without.

    ``to`` is the type of the result over the axes: "varying" (backward a reduce-scatter), "invarying" (backward a
    slice) or "reduced" (backward a reduce-scatter of pending sums). ``size`` requires ``tiled`` and is the global size
    of ``axis``; it allows uneven blocks, as torch.chunk cuts them. Nothing is copied if the gathered dim is leading.

    Raises:
        ShapeError: the dim does not exist; blocks differ in shape and ``size`` is missing or wrong.
        AxisError: the axis is not bound.
        VarianceError: the value is unreduced, or it is invariant and ``to="reduced"``.

    >>> import torch
    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ("x",))
    >>> f = lambda x: all_gather(x, "x", tiled=True, to="invarying", size=5)
    >>> device_get(shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P())(torch.arange(5)))
    tensor([0, 1, 2, 3, 4])
    """
    return collective("all_gather", _gather, x, axis_name, (axis_index_groups, axis, tiled, to, size), wait)


def _gather(operand: Operand, axis_index_groups: Any, axis: int, tiled: bool, to: str, size: Any) -> Build | None:
    what, body, axes, leaves, n = operand.what, operand.body, operand.axes, operand.leaves, operand.ranks
    if to not in _GATHER_ROWS:
        raise ArgumentError(f"all_gather got to={to!r}; expected one of {quoted(_GATHER_ROWS)}")
    index_groups = check_index_groups(axis_index_groups, n, what, equal=True)
    if index_groups and to != "varying":
        raise ArgumentError(
            f"all_gather got axis_index_groups with to={to!r}, but groups gather different values; write to='varying'"
        )
    if not axes:
        return None
    check_size_use(size, tiled, index_groups, what)
    check_alike(body, leaves, axes, what, axis, size)
    name, letter = _GATHER_ROWS[to] if body.checked else _GATHER_ROWS["varying"]

    def build(i: int, leaf: Tensor) -> LeafCollective:
        variance = varying_operand(body, leaf, axes, what)
        if letter == "R" and body.checked and not variance.varying.intersection(axes):
            axis_name = as_axis_name(axes)
            raise VarianceError(
                f"all_gather of {show(leaf)} over {axis_name} to='reduced': the value is equal on all ranks, so "
                f"there is nothing to gather; write pcast(x, {axis_name}, to='reduced')"
            )
        dim = check_dim(axis, leaf.ndim + (not tiled), what, "axis")
        lengths = None
        if size is not None:
            lengths = block_lengths(body, axes, size)
        after = variance.moved(axes, letter) if body.checked else INVARIANT
        leaves[i] = as_varying(body, leaf, variance.moved(axes, "V"))
        return _gather_step(body, leaf, axes, name, dim, tiled, lengths, index_groups, after)

    return build


_GATHER_ROWS = {
    "varying": ("all_gather", "V"),
    "invarying": ("all_gather_invariant", "I"),
    "reduced": ("all_gather_reduced", "R"),
}


def _gather_step(
    body: Body,
    x: Tensor,
    axes: tuple[str, ...],
    name: str,
    dim: int,
    tiled: bool,
    lengths: tuple[int, ...] | None,
    index_groups: Any,
    after: Variance,
) -> LeafCollective:
    """The step of a leaf. In row form a block is one row; uneven blocks are padded to the longest."""
    o = Options(dim=dim, sizes=lengths, index_groups=index_groups)
    before = None if tiled else (lambda leaf: leaf.unsqueeze(dim))
    step = LeafCollective(call(name, body.mesh, axes, o), after, before)
    if body.transport.coalesces:
        shape = list(x.shape)
        if lengths is not None:
            shape[dim] = max(lengths)

        def into(leaf: Tensor) -> Tensor:
            return (leaf if lengths is None else padded(leaf, dim, shape[dim])).reshape(1, -1)

        def back(rows: Tensor) -> Tensor:
            blocks = rows.unflatten(1, shape) if shape else rows.squeeze(1)
            return unstack(blocks, dim, lengths) if tiled else blocks.movedim(0, dim)

        step.rows = Rows(call(name, body.mesh, axes, Options(index_groups=index_groups)), into, back)
    return step


@overload
def psum_scatter(
    x: T,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    size: int | None = None,
    wait: Literal[True] = True,
) -> T: ...
@overload
def psum_scatter(
    x: T,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    size: int | None = None,
    wait: Literal[False],
) -> Handle[T]: ...
def psum_scatter(
    x: Any,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    size: int | None = None,
    wait: bool = True,
) -> Any:
    """Sum over ranks. Each rank keeps its block of the sum: ``[A0,A1] [B0,B1] => [A0+B0] [A1+B1]``.

    Forward is a reduce-scatter, backward an all-gather. With ``tiled``, the scattered dim is kept and its size divided.
    Without it, the size of the dim must be the number of ranks, and the dim is dropped. ``size`` allows a dim that does
    not divide; blocks are then those of torch.chunk. An unreduced value becomes varying.

    Raises:
        ShapeError: the dim does not exist, or does not divide and ``size`` is missing.
        AxisError: the axis is not bound.
        VarianceError: the value is reduced.

    >>> import torch
    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ("x",))
    >>> f = lambda x: psum_scatter(x, "x", tiled=True, size=5)
    >>> device_get(shard_map(f, mesh=mesh, in_specs=P(), out_specs=P("x"))(torch.arange(5)))
    tensor([ 0,  4,  8, 12, 16])
    """
    return collective("psum_scatter", _scatter, x, axis_name, (scatter_dimension, axis_index_groups, tiled, size), wait)


def _scatter(operand: Operand, scatter_dimension: int, axis_index_groups: Any, tiled: bool, size: Any) -> Build | None:
    what, body, axes, leaves, n = operand.what, operand.body, operand.axes, operand.leaves, operand.ranks
    index_groups = check_index_groups(axis_index_groups, n, what, equal=True)
    if not axes:
        return None
    check_size_use(size, tiled, index_groups, what)
    check_alike(body, leaves, axes, what)
    count = len(index_groups[0]) if index_groups else n

    def build(i: int, leaf: Tensor) -> LeafCollective:
        variance = get_variance(leaf)
        letter = one_state(leaf, variance, axes, what) if body.checked else "V"
        if letter == "R":
            raise VarianceError(
                f"psum_scatter of {show(leaf)} over {as_axis_name(axes)}: it is reduced, equal on all ranks; to add "
                f"up equal copies, psum_scatter(pcast(x, {as_axis_name(axes)}, to='varying'), ...)"
            )
        check_adds(leaf.dtype, what)
        dim = check_dim(scatter_dimension, leaf.ndim, what, "scatter_dimension")
        lengths = None
        if size is not None:
            lengths = block_lengths(body, axes, check_size(size, what))
            if leaf.shape[dim] != size:
                raise ShapeError(
                    f"psum_scatter of {show(leaf)} got size={size}, but dim {dim} is {leaf.shape[dim]}; pass that"
                )
        else:
            remedy = f"for uneven blocks pass size={leaf.shape[dim]}"
            check_tiles(leaf, dim, count, tiled, what, remedy)
        name = "psum_scatter_unreduced" if letter == "U" else "psum_scatter"
        after = variance.moved(axes, "V") if body.checked else INVARIANT
        if letter == "I" and body.checked:
            leaves[i] = as_varying(body, leaf, after)
        o = Options(dim=dim, sizes=lengths, index_groups=index_groups)
        squeeze = None if tiled else (lambda y: y.squeeze(dim))
        rows = _scatter_rows(body, leaf, axes, name, o, tiled, count) if body.transport.coalesces else None
        return LeafCollective(call(name, body.mesh, axes, o), after, after=squeeze, rows=rows)

    return build


def _scatter_rows(body: Body, x: Tensor, axes: tuple[str, ...], name: str, o: Options, tiled: bool, n: int) -> Rows:
    """Into rows: one row for each block. Back: this rank's block. Uneven blocks are padded to the longest."""
    dim, shape = o.dim, list(x.shape)
    shape[dim] = shape[dim] // n if o.sizes is None else max(o.sizes)
    mine = None if o.sizes is None else o.sizes[int(body.transport.index(body.mesh, axes))]

    def back(row: Tensor) -> Tensor:
        block = row.reshape(shape)
        if mine is not None:
            return block.narrow(dim, 0, mine)
        return block if tiled else block.squeeze(dim)

    on_rows = call(name, body.mesh, axes, Options(index_groups=o.index_groups))
    return Rows(on_rows, lambda leaf: stack(leaf, dim, o.sizes, n).reshape(n, -1), back)


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
    frame = held_frame(x)
    return frozenset() if frame is None else frozenset(frame.axes)
