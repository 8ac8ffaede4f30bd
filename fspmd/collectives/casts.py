"""Casts between types, and the position of a rank along an axis."""

from __future__ import annotations

import math
from typing import Any

import optree
from torch import Tensor

from fspmd.body import Body, bound_body, resolve_axes, state
from fspmd.collectives.collective import WORDS, AxisName, one_state, operand_of
from fspmd.collectives.steps import T
from fspmd.errors import ArgumentError, VarianceError
from fspmd.messages import as_axis_name, quoted
from fspmd.pairs import applied, apply, call
from fspmd.torch_internals import DisableTorchFunction
from fspmd.variance import Variance, get_variance, set_variance, show

_PCASTS = {
    ("I", "varying"): ("invariant_to_varying", "V"),
    ("I", "reduced"): ("invariant_to_reduced", "R"),
    ("R", "varying"): ("reduced_to_varying", "V"),
    ("V", "unreduced"): ("varying_to_unreduced", "U"),
}


_NOT_CASTS = dict.fromkeys(("invariant", "invarying"), "; to make a value equal on all ranks use psum or all_gather")


def pcast(x: T, axis_name: AxisName, *, to: str) -> T:
    """Cast a value to another type. Nothing moves forward.

    After a cast from invariant to varying, operations on the result have gradients of their own on each rank; the
    backward of the cast is an all-reduce. After a cast to reduced the gradient is a pending sum. Casts from reduced to
    varying and from varying to unreduced are free both ways. The result aliases ``x``.

    Raises:
        VarianceError: there is no such cast. The message names the collective to use instead.
        AxisError: the call is outside a body, or the axis is not bound.

    >>> import torch
    >>> from fspmd import P, make_mesh, shard_map, typeof
    >>> mesh = make_mesh((4,), ("x",))
    >>> def f(w):
    ...     print(typeof(w), typeof(pcast(w, "x", to="varying")))
    ...     return w
    >>> _ = shard_map(f, mesh=mesh, in_specs=P(), out_specs=P())(torch.ones(2))
    f32[2] f32[2]{V:x}
    """
    operand = operand_of(x, axis_name, "pcast")
    body, axes, leaves, treedef = operand.body, operand.axes, operand.leaves, operand.treedef
    targets = sorted({target for _, target in _PCASTS})
    if to not in targets:
        raise ArgumentError(f"pcast got to={to!r}; expected one of {quoted(targets)}{_NOT_CASTS.get(to, '')}")
    if not axes:
        return x
    if not body.checked:  # there are no types, but each rank needs a copy of its own
        own = call("per_rank", body.mesh, axes)
        return optree.tree_unflatten(treedef, [apply(leaf, own) for leaf in leaves]) if to == "varying" else x
    results: list[Any] = list(leaves)

    def build(i: int, leaf: Tensor) -> None:
        results[i] = _pcast_one(body, leaf, axes, to)

    operand.steps(build)
    cast: T = optree.tree_unflatten(treedef, results)
    return cast


def _pcast_one(body: Body, x: Tensor, axes: tuple[str, ...], to: str) -> Tensor:
    variance = get_variance(x)
    letter = one_state(x, variance, axes, "pcast")
    row = _PCASTS.get((letter, to))
    if row is None:
        axis = as_axis_name(axes)
        if WORDS[letter] == to:
            mend = "the value has that type already; use it as it is"
        elif letter == "U":
            mend = f"the value is a pending sum; settle it: psum(x, {axis}) or psum_scatter(x, {axis}, tiled=True)"
        else:
            mend = f"a {WORDS[letter]} value casts only to {quoted(t for source, t in _PCASTS if source == letter)}"
        raise VarianceError(f"pcast of {show(x)} over {axis} to {to!r}: {mend}")
    with DisableTorchFunction():
        y = applied(x, call(row[0], body.mesh, axes))
    state.tracker.borrow(y, variance)
    return set_variance(y, variance.moved(axes, row[1]))


def axis_index(axis_name: AxisName) -> Tensor:
    """This rank's position along the axis (in a tuple, the first is major): a 0-d int64 tensor that varies over it.

    Raises:
        AxisError: the call is outside a body, or the axis is not bound.

    >>> import torch
    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ("x",))
    >>> f = shard_map(lambda x: x + axis_index("x"), mesh=mesh, in_specs=P(), out_specs=P("x"))
    >>> device_get(f(torch.zeros(1)))
    tensor([0., 1., 2., 3.])
    """
    body = bound_body("axis_index")
    axes = resolve_axes(body, axis_name, "axis_index")
    with DisableTorchFunction():
        index = body.transport.index(body.mesh, axes)
    return set_variance(index, Variance(varying=axes)) if body.checked else index


def axis_size(axis_name: AxisName) -> int:
    """The number of ranks along an axis, or along a tuple of axes, as a Python int. Nothing is sent.

    Raises:
        AxisError: the call is outside a body, or the axis is not bound.

    >>> import torch
    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> mesh = make_mesh((2, 4), ("x", "y"))
    >>> f = shard_map(lambda x: x * axis_size(("x", "y")), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    >>> device_get(f(torch.ones(2)))
    tensor([8., 8.])
    """
    body = bound_body("axis_size")
    return math.prod(body.sizes(resolve_axes(body, axis_name, "axis_size")))
