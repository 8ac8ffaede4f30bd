"""All-to-all collectives and permutations: each rank sends blocks to other ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

from torch import Tensor

from fspmd.body import Body
from fspmd.collectives.checks import (
    block_lengths,
    check_alike,
    check_dim,
    check_index_groups,
    check_permutation,
    check_shuffle,
    check_size_use,
    check_source,
    check_tiles,
)
from fspmd.collectives.collective import AxisName, Build, Groups, as_varying, collective, varying_operand
from fspmd.collectives.steps import Handle, LeafCollective, Operand, Reshape, Rows, T, elementwise_step
from fspmd.errors import ShapeError
from fspmd.pairs import call
from fspmd.transport import Options
from fspmd.transport.stacks import padded, stack, unstack
from fspmd.variance import INVARIANT


@overload
def all_to_all(
    x: T,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    size: int | None = None,
    wait: Literal[True] = True,
) -> T: ...
@overload
def all_to_all(
    x: T,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    size: int | None = None,
    wait: Literal[False],
) -> Handle[T]: ...
def all_to_all(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    size: int | None = None,
    wait: bool = True,
) -> Any:
    """Transpose blocks between ranks: ``[A0,A1] [B0,B1] => [A0,B0] [A1,B1]``.

    With ``tiled``, the dim ``split_axis`` is split into one block per rank, and the received blocks are joined along
    ``concat_axis``. Without it, the size of ``split_axis`` must be the number of ranks; that dim is dropped, and the
    blocks are stacked along a new dim ``concat_axis``. ``size`` requires ``tiled`` and is the global size of
    ``concat_axis``; it allows uneven blocks along both dims. Backward is the inverse all-to-all.

    Raises:
        ShapeError: the dim does not exist, or does not divide and ``size`` is missing; blocks differ in shape.
        AxisError: the axis is not bound.
        VarianceError: the value is unreduced or reduced.

    >>> import torch
    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> mesh = make_mesh((2,), ("x",))
    >>> f = lambda x: all_to_all(x, "x", 1, 0, tiled=True)  # from sharded rows to sharded columns
    >>> device_get(shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P(None, "x"))(torch.arange(4).view(2, 2)))
    tensor([[0, 1],
            [2, 3]])
    """
    options = split_axis, concat_axis, axis_index_groups, tiled, size
    return collective("all_to_all", _all_to_all, x, axis_name, options, wait)


def _all_to_all(
    operand: Operand, split_axis: int, concat_axis: int, groups: Groups, tiled: bool, size: Any
) -> Build | None:
    what, body, axes, leaves, n = operand.what, operand.body, operand.axes, operand.leaves, operand.ranks
    index_groups = check_index_groups(groups, n, what, equal=True)
    if not axes:
        return None
    check_size_use(size, tiled, index_groups, what)
    check_alike(body, leaves, axes, what, concat_axis, size)
    count = len(index_groups[0]) if index_groups else n
    names = ("axis", "axis") if what == "pswapaxes" else ("split_axis", "concat_axis")

    def build(i: int, leaf: Tensor) -> LeafCollective:
        variance = varying_operand(body, leaf, axes, what)
        split = check_dim(split_axis, leaf.ndim, what, names[0])
        concat = check_dim(concat_axis, leaf.ndim, what, names[1])
        if size is None:
            check_tiles(leaf, split, count, tiled, what, "for uneven blocks pass size=, the global size of concat_axis")
        o, before, back = _options(body, leaf, axes, (split, concat), index_groups, tiled, size, what)
        leaves[i] = as_varying(body, leaf, variance.moved(axes, "V"))
        after = variance.moved(axes, "V") if body.checked else INVARIANT
        rows = _exchange_rows(body, leaf, axes, o, back) if body.transport.coalesces else None
        return LeafCollective(call("all_to_all", body.mesh, axes, o), after, before, back, rows)

    return build


def _options(
    body: Body,
    x: Tensor,
    axes: tuple[str, ...],
    dims: tuple[int, int],
    index_groups: Any,
    tiled: bool,
    size: Any,
    what: str,
) -> tuple[Options, Reshape | None, Reshape | None]:
    """The dims and block sizes of the exchange, and the changes of shape before and after it."""
    split, concat = dims
    n = math.prod(body.sizes(axes))
    if size is not None:
        joined = block_lengths(body, axes, size) or (size // n,) * n
        if split == concat and len(set(joined)) > 1:
            raise ShapeError(f"{what} of uneven blocks got {split} for both split_axis and concat_axis; name two dims")
        pieces = block_lengths(body, axes, x.shape[split]) or (x.shape[split] // n,) * n
        if len(set(pieces)) == len(set(joined)) == 1:
            return Options(dim=split, concat_dim=concat), None, None
        return Options(dim=split, sizes=pieces, concat_dim=concat, concat_sizes=joined), None, None
    if tiled:
        return Options(dim=split, concat_dim=concat, index_groups=index_groups), None, None
    # received blocks are joined along a new dim of size 1; the split dim shrinks to size 1 and is dropped
    new = concat if concat <= split else concat + 1
    gone = split + 1 if concat <= split else split
    o = Options(dim=gone, concat_dim=new, index_groups=index_groups)
    return o, lambda leaf: leaf.unsqueeze(new), lambda y: y.squeeze(gone)


def _exchange_rows(body: Body, x: Tensor, axes: tuple[str, ...], o: Options, squeeze: Any) -> Rows | None:
    """Into rows: one row for each piece. Back: the pieces of ``n`` rows, joined. Uneven pieces are padded."""
    n = len(o.index_groups[0]) if o.index_groups else math.prod(body.sizes(axes))
    shape = list(x.shape)
    if squeeze is not None:
        shape.insert(o.concat_dim, 1)
    if o.concat_sizes is not None:
        if o.dim == o.concat_dim:
            return None
        shape[o.concat_dim] = max(o.concat_sizes)
    piece = list(shape)
    piece[o.dim] = shape[o.dim] // n if o.sizes is None else max(o.sizes)
    mine = None if o.sizes is None else o.sizes[int(body.transport.index(body.mesh, axes))]

    def into(leaf: Tensor) -> Tensor:
        wide = leaf.reshape(shape) if o.sizes is None else padded(leaf, o.concat_dim, shape[o.concat_dim])
        return stack(wide, o.dim, o.sizes, n).reshape(n, -1)

    def back(rows: Tensor) -> Tensor:
        pieces = rows.reshape(n, *piece)
        y = unstack(pieces if mine is None else pieces.narrow(o.dim + 1, 0, mine), o.concat_dim, o.concat_sizes)
        return y if squeeze is None else squeeze(y)

    return Rows(call("all_to_all", body.mesh, axes, Options(index_groups=o.index_groups)), into, back)


@overload
def pswapaxes(
    x: T, axis_name: AxisName, axis: int, *, axis_index_groups: Groups = None, wait: Literal[True] = True
) -> T: ...
@overload
def pswapaxes(
    x: T, axis_name: AxisName, axis: int, *, axis_index_groups: Groups = None, wait: Literal[False]
) -> Handle[T]: ...
def pswapaxes(x: Any, axis_name: AxisName, axis: int, *, axis_index_groups: Groups = None, wait: bool = True) -> Any:
    """Swap a mesh axis with a dim of its size: ``all_to_all(x, axis_name, axis, axis)``. Backward: the same swap.

    Raises:
        ShapeError: the size of the dim is not the number of ranks. Other errors are those of `all_to_all`.

    >>> import torch
    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> f = shard_map(
    ...     lambda x: pswapaxes(x, "x", 0), mesh=make_mesh((2,), ("x",)), in_specs=P(None, "x"), out_specs=P("x")
    ... )
    >>> device_get(f(torch.arange(4).view(2, 2)))
    tensor([[0],
            [1],
            [2],
            [3]])
    """
    options = axis, axis, axis_index_groups, False, None
    return collective("pswapaxes", _all_to_all, x, axis_name, options, wait)


@overload
def ppermute(x: T, axis_name: AxisName, perm: Sequence[tuple[int, int]], *, wait: Literal[True] = True) -> T: ...
@overload
def ppermute(x: T, axis_name: AxisName, perm: Sequence[tuple[int, int]], *, wait: Literal[False]) -> Handle[T]: ...
def ppermute(x: Any, axis_name: AxisName, perm: Sequence[tuple[int, int]], *, wait: bool = True) -> Any:
    """Send blocks along (source, destination) pairs. A rank that receives nothing gets zeros.

    All blocks have one shape, which is the shape of the result. Over a tuple of axes, ranks are numbered in the order
    of the tuple. Backward sends along the inverse pairs.

    Raises:
        ShapeError: a position is outside the axis; a source or destination occurs twice; blocks differ in shape.
        ArgumentError: ``perm`` is not a list of pairs of ints.
        AxisError: the axis is not bound.
        VarianceError: the value is unreduced or reduced.

    >>> import torch
    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ("x",))
    >>> ring = [(i, (i + 1) % 4) for i in range(4)]
    >>> f = shard_map(lambda x: ppermute(x, "x", ring), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    >>> device_get(f(torch.arange(4)))
    tensor([3, 0, 1, 2])
    """
    return collective("ppermute", _permute, x, axis_name, _hashable(perm), wait)


@overload
def pshuffle(x: T, axis_name: AxisName, perm: Sequence[int], *, wait: Literal[True] = True) -> T: ...
@overload
def pshuffle(x: T, axis_name: AxisName, perm: Sequence[int], *, wait: Literal[False]) -> Handle[T]: ...
def pshuffle(x: Any, axis_name: AxisName, perm: Sequence[int], *, wait: bool = True) -> Any:
    """`ppermute` with a full permutation: position ``i`` receives from ``perm[i]``. Backward is the inverse.

    Raises:
        ShapeError: ``perm`` does not name each position once. Other errors are those of `ppermute`.

    >>> import torch
    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> f = lambda x: pshuffle(x, "x", [3, 2, 1, 0])
    >>> device_get(shard_map(f, mesh=make_mesh((4,), ("x",)), in_specs=P("x"), out_specs=P("x"))(torch.arange(4)))
    tensor([3, 2, 1, 0])
    """
    return collective("pshuffle", _permute, x, axis_name, _hashable(perm), wait)


def _hashable(perm: Any) -> tuple[Any, bool]:
    """A permutation without lists around pairs, and whether it was one."""
    is_list = type(perm) is list
    return tuple(perm) if is_list else perm, is_list


def _permute(operand: Operand, perm: Any, is_list: bool) -> Build | None:
    if not operand.axes:
        return None
    check_alike(operand.body, operand.leaves, operand.axes, operand.what)
    check = check_shuffle if operand.what == "pshuffle" else check_permutation
    return _moved(operand, "ppermute", Options(perm=check(list(perm) if is_list else perm, operand.ranks)))


@overload
def pbroadcast(x: T, axis_name: AxisName, source: int, *, wait: Literal[True] = True) -> T: ...
@overload
def pbroadcast(x: T, axis_name: AxisName, source: int, *, wait: Literal[False]) -> Handle[T]: ...
def pbroadcast(x: Any, axis_name: AxisName, source: int, *, wait: bool = True) -> Any:
    """Send the block of position ``source`` to every rank. Backward sends the sum of all cotangents to the source.

    All blocks have one shape, which is the shape of the result. The result varies over the axes.

    Raises:
        ShapeError: ``source`` is not a position along the axes. Other errors are those of `ppermute`.

    >>> import torch
    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> f = lambda x: pbroadcast(x, "x", 2)
    >>> device_get(shard_map(f, mesh=make_mesh((4,), ("x",)), in_specs=P("x"), out_specs=P("x"))(torch.arange(4)))
    tensor([2, 2, 2, 2])
    """
    return collective("pbroadcast", _broadcast, x, axis_name, (source,), wait)


def _broadcast(operand: Operand, source: int) -> Build | None:
    root = check_source(source, operand.ranks, operand.axes)
    if not operand.axes:
        return None
    check_alike(operand.body, operand.leaves, operand.axes, operand.what)
    return _moved(operand, "pbroadcast", Options(root=root))


def _moved(operand: Operand, name: str, options: Options) -> Build:
    body, axes = operand.body, operand.axes
    the_call = call(name, body.mesh, axes, options)

    def build(i: int, leaf: Tensor) -> LeafCollective:
        after = varying_operand(body, leaf, axes, operand.what).moved(axes, "V") if body.checked else INVARIANT
        operand.leaves[i] = as_varying(body, leaf, after)
        return elementwise_step(the_call, after, leaf)

    return build
