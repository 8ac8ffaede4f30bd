"""Sums, means and extrema over mesh axes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from optree import tree_leaves
from torch import Tensor

from fspmd.body import Body
from fspmd.collectives.checks import check_alike, check_index_groups
from fspmd.collectives.collective import (
    AxisName,
    Build,
    Groups,
    as_varying,
    collective,
    one_state,
    operand_of,
    varying_operand,
)
from fspmd.collectives.steps import Handle, LeafCollective, Operand, T, elementwise_step, then
from fspmd.errors import VarianceError
from fspmd.messages import as_axis_name
from fspmd.pairs import Call, apply, call, watched
from fspmd.sharded import is_plain
from fspmd.torch_internals import DisableTorchFunction, forward_ad, transforms_active
from fspmd.transport import Options
from fspmd.transport.carriers import check_adds
from fspmd.variance import INVARIANT, Variance, get_variance, set_variance, show


@overload
def psum(x: T, axis_name: AxisName, *, axis_index_groups: Groups = None, wait: Literal[True] = True) -> T: ...
@overload
def psum(x: T, axis_name: AxisName, *, axis_index_groups: Groups = None, wait: Literal[False]) -> Handle[T]: ...
def psum(x: Any, axis_name: AxisName, *, axis_index_groups: Groups = None, wait: bool = True) -> Any:
    """Sum over mesh axes: ``[A] [B] => A+B``, invariant over them.

    Forward is an all-reduce; backward sends nothing. For an unreduced value the result is its pending sum. An invariant
    value or a Python number is multiplied by the number of ranks; a number is not sent. Booleans are counted.

    Raises:
        AxisError: the call is outside a body, or the axis is not bound.
        VarianceError: the value is reduced, or has different types over the axes.

    >>> from fspmd import P, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ("x",))
    >>> shard_map(lambda x: psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(torch.arange(4.0))
    Sharded f32[1] on mesh(x=4)
    """
    options = () if axis_index_groups is None else (axis_index_groups,)
    return collective("psum", _reduction, x, axis_name, options, wait, takes_numbers=True)


@overload
def pmean(x: T, axis_name: AxisName, *, axis_index_groups: Groups = None, wait: Literal[True] = True) -> T: ...
@overload
def pmean(x: T, axis_name: AxisName, *, axis_index_groups: Groups = None, wait: Literal[False]) -> Handle[T]: ...
def pmean(x: Any, axis_name: AxisName, *, axis_index_groups: Groups = None, wait: bool = True) -> Any:
    """Mean over mesh axes: `psum` divided by the number of ranks. The mean of integers is a float.

    Forward is an all-reduce; backward sends nothing. Errors are those of `psum`.

    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ("x",))
    >>> device_get(shard_map(lambda x: pmean(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(torch.arange(4.0)))
    tensor([1.5000])
    """
    options = () if axis_index_groups is None else (axis_index_groups,)
    return collective("pmean", _reduction, x, axis_name, options, wait, takes_numbers=True)


def _reduction(operand: Operand, groups: Groups = None) -> Build | None:
    what, body, axes, leaves, n = operand.what, operand.body, operand.axes, operand.leaves, operand.ranks
    index_groups = check_index_groups(groups, n, what, equal=False)
    if not axes:
        return None
    check_alike(body, leaves, axes, what)
    mean = what == "pmean"

    def build(i: int, leaf: Any) -> LeafCollective | None:
        if not is_plain(leaf):  # a Python number: no communication
            count = _count(body, axes, n, index_groups)
            leaves[i] = (float(leaf) if isinstance(leaf, bool) else leaf) if mean else leaf * count
            if isinstance(leaves[i], Tensor):
                set_variance(leaves[i], get_variance(count))
            return None
        check_adds(leaf.dtype, what)
        if leaf.dtype is torch.bool:
            leaves[i] = set_variance(leaf.to(torch.int64), get_variance(leaf))
        step = _psum_step(body, leaves[i], axes, index_groups, what)
        if mean:
            step = then(step, _mean_of(body, axes, n, index_groups))
        leaves[i] = _operand(body, leaves[i], axes, step)
        return step

    return build


def _count(body: Body, axes: tuple[str, ...], n: int, index_groups: Any) -> Any:
    """The number of ranks that are added. Where groups differ in size, it is a varying tensor."""
    if index_groups is None or len({len(group) for group in index_groups}) == 1:
        return n if index_groups is None else len(index_groups[0])
    size_at = {i: len(group) for group in index_groups for i in group}
    with DisableTorchFunction():
        sizes = torch.tensor([size_at[i] for i in range(n)], device=body.mesh.device)
        count = torch.ops.aten.index.Tensor(sizes, [body.transport.index(body.mesh, axes)])
    return set_variance(count, Variance(varying=axes)) if body.checked else count


def _mean_of(body: Body, axes: tuple[str, ...], n: int, index_groups: Any) -> Callable[[Tensor], Tensor]:
    """A function that divides a sum by the number of its terms.

    It holds no tensor, since a body keeps it: a tensor may be one of inference mode, or of another recording.
    """
    count = _count(body, axes, n, index_groups)
    if type(count) is int:
        return lambda total: total / count
    return lambda total: total / _count(body, axes, n, index_groups)


def _psum_step(body: Body, x: Tensor, axes: tuple[str, ...], index_groups: Any, what: str) -> LeafCollective:
    variance = get_variance(x)
    letter = one_state(x, variance, axes, what) if body.checked else "V"
    if letter == "R":
        raise VarianceError(
            f"{what} of {show(x)} over {as_axis_name(axes)}: it is reduced, equal on all ranks; use it as it is, or to "
            f"add up equal copies {what}(pcast(x, {as_axis_name(axes)}, to='varying'), ...)"
        )
    if index_groups is not None:
        name, after = "psum_varying", variance.moved(axes, "V") if body.checked else INVARIANT
    elif not body.checked:
        name, after = "psum_varying", INVARIANT
    else:
        name, after = ("psum_unreduced" if letter == "U" else "psum"), variance.moved(axes, "I")
    return elementwise_step(call(name, body.mesh, axes, Options(index_groups=index_groups)), after, x)


@overload
def pmax(x: T, axis_name: AxisName, *, axis_index_groups: Groups = None, wait: Literal[True] = True) -> T: ...
@overload
def pmax(x: T, axis_name: AxisName, *, axis_index_groups: Groups = None, wait: Literal[False]) -> Handle[T]: ...
def pmax(x: Any, axis_name: AxisName, *, axis_index_groups: Groups = None, wait: bool = True) -> Any:
    """Maximum over mesh axes, element by element. The result is invariant over them.

    Forward is an all-reduce. The elements that attain the maximum share the gradient equally, as for torch.amax.
    Counting them costs an all-reduce in backward.

    Raises:
        ArgumentError: the value is complex.
        AxisError, VarianceError: as for `psum`, and for an unreduced value.

    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ("x",))
    >>> device_get(shard_map(lambda x: pmax(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(torch.arange(4.0)))
    tensor([3.])
    """
    return _extremum("max", x, axis_name, axis_index_groups, wait)


@overload
def pmin(x: T, axis_name: AxisName, *, axis_index_groups: Groups = None, wait: Literal[True] = True) -> T: ...
@overload
def pmin(x: T, axis_name: AxisName, *, axis_index_groups: Groups = None, wait: Literal[False]) -> Handle[T]: ...
def pmin(x: Any, axis_name: AxisName, *, axis_index_groups: Groups = None, wait: bool = True) -> Any:
    """Minimum over mesh axes, element by element. Communication, gradients and errors are those of `pmax`.

    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ("x",))
    >>> device_get(shard_map(lambda x: pmin(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(torch.arange(4.0)))
    tensor([0.])
    """
    return _extremum("min", x, axis_name, axis_index_groups, wait)


@dataclass(frozen=True, slots=True)
class Within:
    """The extremum along ``dims`` of a block, which are kept. ``fill`` is added first at the end of ``ends``."""

    op: str
    dims: tuple[int, ...]
    ends: tuple[int, ...]
    fill: float

    def __call__(self, x: Tensor) -> Tensor:
        for d in self.ends:
            x = torch.cat([x, x.new_full((*x.shape[:d], 1, *x.shape[d + 1 :]), self.fill)], d)
        return (torch.amax if self.op == "max" else torch.amin)(x, self.dims, keepdim=True)

    def count(self, hit: Tensor) -> Tensor:
        """The number of hits, in float32 at least: float16 cannot count far."""
        return hit.sum(self.dims, keepdim=True, dtype=torch.promote_types(hit.dtype, torch.float32))

    def batched(self) -> Within:
        """This extremum for blocks with one more leading dim."""
        return Within(self.op, tuple(d + 1 for d in self.dims), tuple(d + 1 for d in self.ends), self.fill)


def extremum(x: Tensor, axes: tuple[str, ...], within: Within) -> Tensor:
    """The extremum along dims of the block and along mesh axes. The elements that attain it share the gradient equally.

    Forward and backward are an all-reduce each.
    """
    return _extremum(within.op, x, axes, None, True, within)  # type: ignore[no-any-return]


def product(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    """Multiply the blocks over mesh axes by an all-reduce. Operands are real numbers, and have no gradient."""
    operand = operand_of(x, axes, "product")
    body = operand.body
    step = elementwise_step(
        call("psum", body.mesh, axes, Options(op="product")),
        varying_operand(body, x, axes, "product").moved(axes, "I"),
        x,
    )
    operand.leaves = [_operand(body, x, axes, step)]
    result: Tensor = operand.run([step], True)
    return result


def _extremum(op: str, x: Any, axis_name: AxisName, groups: Groups, wait: bool, within: Within | None = None) -> Any:
    with DisableTorchFunction():  # steps are not the same where a gradient is wanted
        followed = torch.is_grad_enabled() and any(getattr(leaf, "requires_grad", False) for leaf in tree_leaves(x))
    return collective(f"p{op}", _extremes, x, axis_name, (op, groups, within, followed), wait, takes_numbers=True)


def _extremes(operand: Operand, op: str, groups: Groups, within: Within | None, _: bool) -> Build | None:
    what, body, axes, leaves, n = operand.what, operand.body, operand.axes, operand.leaves, operand.ranks
    index_groups = check_index_groups(groups, n, what, equal=False)
    if not axes:
        return None
    if within is None:
        check_alike(body, leaves, axes, what)

    def build(i: int, leaf: Any) -> LeafCollective | None:
        if not is_plain(leaf):
            return None
        check_adds(leaf.dtype, what, op)
        variance = varying_operand(body, leaf, axes, what)
        after = variance.moved(axes, "V" if index_groups else "I") if body.checked else INVARIANT
        o = Options(op=op, index_groups=index_groups)
        sums = "psum_varying" if index_groups is not None or not body.checked else "psum"
        find = call(sums, body.mesh, axes, o)
        leaves[i] = as_varying(body, leaf, variance.moved(axes, "V"))
        count = call(sums, body.mesh, axes, Options(index_groups=index_groups))
        if transforms_active() or forward_ad._current_level >= 0:
            return LeafCollective(
                None, after, after=lambda x: _Extremum.apply(x, watched(x, find), watched(x, count), within)
            )
        x = leaves[i]
        followed = x.requires_grad and torch.is_grad_enabled()
        if followed or within is not None:
            leaves[i] = x.detach() if within is None else within(x.detach())
        step = elementwise_step(find, after, leaves[i])
        if not followed:
            return step
        counted = watched(x, count)
        return then(step, lambda extreme: _Extremum.apply(x, [extreme], counted, within))

    return build


class _Extremum(torch.autograd.Function):
    """The extremum that ``find`` computes or holds. Elements that attain it share the gradient equally."""

    @staticmethod
    def forward(x: Tensor, find: Call | list[Tensor], count: Call, within: Within | None) -> Tensor:
        if isinstance(find, Call):
            return find.run(x if within is None else within(x))
        (result,) = find
        return result.clone() if result._is_view() else result  # torch forbids writes into a view that is returned

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Any, Call, Within | None], output: Tensor) -> None:
        x, _, ctx.count, ctx.within = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        with DisableTorchFunction():
            g = apply(g, ctx.count.transposed)
            return _shared(g, ctx.saved_tensors, ctx.count, ctx.within), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        with DisableTorchFunction():
            parts = _shared(tangent, ctx.saved_tensors, ctx.count, ctx.within)
            return apply(parts if ctx.within is None else parts.sum(ctx.within.dims, keepdim=True), ctx.count)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, find: Call, count: Call, within: Within | None) -> tuple[Tensor, int]:
        if within is None:
            return _Extremum.apply(x, find, count, None), in_dims[0]
        return _Extremum.apply(x.movedim(in_dims[0], 0), find, count, within.batched()), 0


def _shared(g: Tensor, saved: tuple[Tensor, Tensor], count: Call, within: Within | None) -> Tensor:
    """``g`` in equal parts for the elements that attain the extremum. Every nan attains nan."""
    x, best = saved
    hit = ((x == best) | (x.isnan() & best.isnan())).to(x.dtype)
    return (g * hit / apply(hit if within is None else within.count(hit), count)).to(x.dtype)


def _operand(body: Body, x: Tensor, axes: tuple[str, ...], step: LeafCollective) -> Tensor:
    variance = get_variance(x)
    if step.call is None or step.call.pair.source != "V" or variance.varying.issuperset(axes):
        return x
    return as_varying(body, x, variance.moved(axes, "V"))
