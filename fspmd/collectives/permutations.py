"""Blocks sent from rank to rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

from torch import Tensor

from fspmd.body import Body, bound_body, resolve_axes
from fspmd.collectives.checks import check_alike, check_permutation, check_position, check_shuffle
from fspmd.collectives.operands import (
    AxisName,
    as_varying,
    done,
    elementwise_step,
    steps_of,
    tensor_leaves,
    varying_operand,
)
from fspmd.collectives.steps import Handle, LeafCollective, T, run
from fspmd.pairs import Call, call
from fspmd.torch_internals import DisableTorchFunction
from fspmd.transport import Options
from fspmd.variance import INVARIANT


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
    return _permute(x, axis_name, lambda size: check_permutation(perm, size, "ppermute"), wait, "ppermute")


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

    return _permute(x, axis_name, lambda size: check_shuffle(perm, size, "pshuffle"), wait, "pshuffle")


def _permute(x: Any, axis_name: AxisName, pairs: Callable[[int], Any], wait: bool, what: str) -> Any:
    body = bound_body(what)
    axes = resolve_axes(body, axis_name, what)
    leaves, treedef = tensor_leaves(x, what)
    if not axes:
        return x if wait else done(x)
    check_alike(body, leaves, axes, what)
    the_call = call("ppermute", body.mesh, axes, Options(perm=pairs(math.prod(body.sizes(axes)))))
    return _moved(body, leaves, treedef, axes, the_call, wait, what)


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
    what = "pbroadcast"
    body = bound_body(what)
    axes = resolve_axes(body, axis_name, what)
    leaves, treedef = tensor_leaves(x, what)
    n = math.prod(body.sizes(axes))
    root = check_position(source, n, axes, what, "source")
    if not axes:
        return x if wait else done(x)
    check_alike(body, leaves, axes, what)
    return _moved(body, leaves, treedef, axes, call(what, body.mesh, axes, Options(root=root)), wait, what)


def _moved(
    body: Body, leaves: list[Tensor], treedef: Any, axes: tuple[str, ...], the_call: Call, wait: bool, what: str
) -> Any:
    def build(i: int, leaf: Tensor) -> LeafCollective:
        after = varying_operand(body, leaf, axes, what).moved(axes, "V") if body.checked else INVARIANT
        leaves[i] = as_varying(body, leaf, after)
        return elementwise_step(the_call, after, leaf)

    with DisableTorchFunction():  # no mode need see questions about operands
        steps = steps_of(leaves, treedef, what, build)
    return run(body, leaves, steps, treedef, wait, what)
