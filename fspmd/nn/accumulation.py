"""Loss and gradients over microbatches, with one reduction of the gradients; and a scale of the loss.

The scale is a value, for gradients in float16 (Micikevicius et al., "Mixed Precision Training", 2018).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Number, Real
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fspmd.autodiff import value_and_grad
from fspmd.body import state
from fspmd.collectives import psum
from fspmd.errors import ArgumentError, ShapeError, TreeError, VarianceError
from fspmd.foreign import loose_kind
from fspmd.messages import as_axis_name, described
from fspmd.nn.arguments import Positive, checked
from fspmd.nn.parameters import Precision, cast_terms, check_dtypes, dtype_of_sum, gathered, settled
from fspmd.nn.sequences import Axes
from fspmd.placement.device_put import device_get
from fspmd.sharded import is_sharded
from fspmd.transport.local_tensor import is_uneven
from fspmd.trees import leaf_paths
from fspmd.variance import get_variance, show


class LossScale(NamedTuple):
    """A power of two by which a loss is multiplied, so that its small gradients do not underflow. It is a pytree.

    Attributes:
        scale: The factor, a 0-d tensor.
        steps: The number of steps without overflow since it last changed, a 0-d tensor.

    >>> scale = LossScale.of(1024.0)
    >>> grads, finite = scale.unscaled({"w": torch.tensor([512.0, float("inf")])})
    >>> finite, scale.after(finite).scale
    (tensor(False), tensor(512.))
    """

    scale: Tensor
    steps: Tensor

    @classmethod
    @checked
    def of(cls, scale: Positive = 65536.0, device: torch.device | str | int | None = None) -> LossScale:
        """A scale to begin with, above 0.

        Raises:
            ArgumentError: The scale is no number above 0, or this process has no such device.
        """
        try:
            return cls(torch.tensor(scale, device=device), torch.zeros((), dtype=torch.int64, device=device))
        except (RuntimeError, AssertionError, TypeError) as error:
            raise ArgumentError(
                f"LossScale.of got {described(device)} for device; give it a device that this process has, such as "
                "mesh.device or 'cpu'"
            ) from error

    @checked
    def scaled(self, loss: Tensor) -> Any:
        """The loss, times the scale, in float32 or wider: 65,536 is no float16. A pending sum stays pending."""
        dtype = torch.promote_types(loss.dtype, torch.float32)
        return cast_terms(loss, dtype) * self.scale.to(dtype)

    def unscaled(self, grads: Any) -> tuple[Any, Tensor]:
        """The gradients of the loss itself, and whether all of them are finite, as `all_finite` says."""
        finite = all_finite(grads)
        return optree.tree_map(lambda g: _divided(g, self.scale), grads, is_leaf=is_sharded), finite

    @checked
    def after(self, finite: Tensor, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000) -> LossScale:
        """The scale of the next step: larger after ``interval`` finite steps, smaller after one that is not finite.

        It stays a number above 0. From an infinity or 0 no later step would bring it back.
        """
        _check_condition("LossScale.after", "finite", finite)
        if not (1 <= growth < math.inf and 0 < backoff <= 1 and interval >= 1):
            raise ArgumentError(
                f"LossScale.after got growth={growth!r}, backoff={backoff!r} and interval={interval!r}; give it a "
                "factor from 1 on, one above 0 and up to 1, and a number of steps from 1 on"
            )
        grows = finite & (self.steps + 1 >= interval)
        grown, cut = self.scale * growth, (self.scale * backoff).clamp(min=torch.finfo(self.scale.dtype).tiny)
        scale = torch.where(finite, torch.where(grows & grown.isfinite(), grown, self.scale), cut)
        return LossScale(scale, torch.where(finite & ~grows, self.steps + 1, 0))


def all_finite(tree: Any) -> Tensor:
    """Whether all elements of all leaves are finite: a 0-d bool tensor, equal on all ranks.

    Communication: an all-reduce of a number for each layout (in a body, for each type) among the leaves.

    >>> from fspmd import P, device_put, make_mesh
    >>> mesh = make_mesh((4,), ("x",), transport="simulation")
    >>> all_finite(device_put({"w": torch.tensor([1.0, 2.0, 3.0, float("nan")])}, P("x"), mesh=mesh))
    tensor(False)
    """
    counts: dict[Any, list[Any]] = {}
    leaves: list[Any] = optree.tree_leaves(tree, is_leaf=is_sharded)
    for x in leaves:
        if not isinstance(x, Tensor) or (type(x) is Tensor and loose_kind(x)):
            raise ArgumentError(f"all_finite got {described(x)} as a leaf; give it a tree of tensors, which are dense")
        count: Any = (~x.isfinite()).sum()
        counts.setdefault(count.spec if is_sharded(count) else get_variance(count), []).append(count)
    totals = list(map(_total, counts.values())) or [torch.zeros((), dtype=torch.int64)]
    return torch.stack(totals).sum() == 0


@checked
def selected(condition: Tensor, new: Any, old: Any) -> Any:
    """The leaves of one tree or of another, without asking on the host: ``new`` where the condition holds.

    Raises:
        TreeError, ShapeError: the trees, or the shapes of their leaves, differ.

    >>> selected(torch.tensor(False), {"w": torch.ones(2)}, {"w": torch.zeros(2)})
    {'w': tensor([0., 0.])}
    """
    _check_condition("selected", "condition", condition)
    leaves, treedef = optree.tree_flatten(new, is_leaf=is_sharded)
    try:
        others = treedef.flatten_up_to(old)
    except ValueError as error:
        raise TreeError(f"selected got two trees that differ: {error}") from None
    for i, (x, y) in enumerate(zip(leaves, others, strict=True)):
        shapes = [x.shape if isinstance(x, Tensor) else None for x in (x, y)]
        if shapes[0] is None or shapes[0] != shapes[1]:
            name = leaf_paths(new, "new")[i]
            raise ShapeError(
                f"selected got {described(x)} for {name} and {described(y)} in its place in old; give it two trees of "
                "tensors of the same shapes"
            )
    return treedef.unflatten(torch.where(condition, x, y) for x, y in zip(leaves, others, strict=True))


def _check_condition(what: str, name: str, x: Tensor) -> None:
    if x.dtype is not torch.bool or x.dim():
        raise ArgumentError(f"{what} got {described(x)} for {name}; give it a 0-d bool, such as that of all_finite")


def _total(counts: Iterable[Any]) -> Tensor:
    """The sum of counts that lie alike, on all ranks."""
    total: Any = torch.stack(list(counts)).sum()
    if state.body is None:
        total = device_get(total) if is_sharded(total) else total
    elif varying := get_variance(total).varying:
        total = psum(total, tuple(sorted(varying)))
    return total  # type: ignore[no-any-return]


@checked
def accumulate(
    loss: Callable[..., tuple[Any, Any]],
    axis: Axes = (),
    specs: Any = None,
    *,
    grads: Any = None,
    precision: Precision | None = None,
    has_aux: bool = False,
) -> Callable[[Any, Sequence[Any]], tuple[Any, Any]]:
    """A function of parameters and microbatches that returns the mean loss and its gradient.

    ``loss(params, microbatch)`` returns ``(total, count)``: the sum of the losses of all items of the microbatch (of
    tokens, say), and their number. The mean divides by the number of items of all microbatches and ranks, once. So
    microbatches may be of any size, and the result is that of one batch.

    Parameters are `gathered` over ``axis`` before the first microbatch. Their gradients stay pending sums until the
    last one, and are then summed over ranks once, into the layouts of the parameters. Over other axes the loss gathers
    what it uses, and gradients are summed in each microbatch.

    Args:
        loss: Both results are equal on all ranks, or pending sums. In a body: pcast(x.sum(), axis, to="unreduced").
            There ``len(x)`` is the length of a block, and no type says so: psum(torch.tensor(len(x)), axis).
        axis: The mesh axes over which gradients stay pending. More memory is needed: whole parameters and gradients.
        specs: In a body, the layouts of parameters, as for `gathered`.
        grads: How the gradients lie: a prefix of the parameters of `P`. The default is the layout of the parameters.
            With ``P("dp")`` for parameters of ``P()`` they are scattered instead of summed on all ranks (ZeRO 2).
        precision: The dtypes of the computation and of sums. The default is that of each parameter.
        has_aux: ``loss`` returns ``((total, count), aux)``. Leaves of ``aux``, such as `Routing.counts`, are added up
            over microbatches, as `torch.sum` does: bools and ints give int64, and 16-bit floats are added in float32.
            The result is ``((mean, aux), gradient)``.

    Communication: that of `gathered`, forward and backward, whatever the number of microbatches; that of ``loss``; and
    an all-reduce of two numbers.

    Raises:
        VarianceError: in a body, total or count varies over an axis.
        TreeError, ArgumentError: ``loss`` does not return such pairs, there is no microbatch, or parameters have
            another dtype than ``precision.param``.

    >>> from fspmd import P, communication_log, device_put, make_mesh
    >>> mesh = make_mesh((4,), ("dp",), transport="simulation")
    >>> w = device_put(torch.ones(8), P("dp"), mesh=mesh)
    >>> batches = [device_put(torch.full((n, 8), 2.0), P("dp"), mesh=mesh) for n in (4, 8, 8)]
    >>> step = accumulate(lambda w, x: ((x @ w).sum(), len(x)), "dp")
    >>> with communication_log() as log:
    ...     mean, grad = step(w, batches)
    >>> [call.kind for call in log]
    ['all_gather_reduced', 'psum_unreduced', 'psum_scatter_unreduced']
    >>> mean, grad
    (tensor(16.), Sharded f32[8@dp] on mesh(dp=4))
    """

    wide, reduce = (None, None) if precision is None else (precision.accumulate, precision.reduce)
    one_step = value_and_grad(functools.partial(_pair, loss, has_aux), has_aux=True)

    def accumulated(params: Any, microbatches: Sequence[Any]) -> tuple[Any, Any]:
        if not isinstance(microbatches, Iterable) or (isinstance(microbatches, Tensor) and not microbatches.dim()):
            raise ArgumentError(f"accumulate got {described(microbatches)} for microbatches; give it a list of them")
        if precision is not None:
            check_dtypes(params, (precision.param,), "accumulate")
        whole = gathered(params, axis, specs, dtype=precision)
        total, count, sums, treedef, dtype = None, None, [], optree.tree_structure(whole, is_leaf=is_sharded), None
        beside: Any = None
        for microbatch in microbatches:
            (share, (items, narrow, aux)), parts = one_step(whole, microbatch)
            if total is None:
                total, count, dtype, beside = share, items, narrow.dtype, _summands(aux)
                sums = [cast_terms(part, wide or part.dtype) for part in treedef.flatten_up_to(parts)]
            else:
                total, count = total + share, count + items
                beside = _added(beside, aux)
                parts = treedef.flatten_up_to(parts)
                sums = [s + cast_terms(g, s.dtype) for s, g in zip(sums, parts, strict=True)]
        if total is None:
            raise ArgumentError("accumulate got no microbatch; give it a list of at least one")
        total, count = _settled_sums(total, count)
        summed = settled(treedef.unflatten(sums), params, axis, specs, grads, reduce)
        mean_grads = optree.tree_map(lambda g: _divided(g, count), summed, is_leaf=is_sharded)
        mean = (total / count).to(dtype)
        return (mean, _narrowed(beside, aux)) if has_aux else mean, mean_grads

    return accumulated


def _pair(loss: Callable[..., Any], has_aux: bool, params: Any, microbatch: Any) -> tuple[Any, tuple[Any, Any, Any]]:
    """The total and the count of a microbatch, checked, and wide: 256 in bfloat16, plus 1, is 256.

    Then the total as it was, and what the loss returns beside.
    """
    out, aux = loss(params, microbatch), None
    if has_aux:
        if not isinstance(out, tuple) or len(out) != 2 or not isinstance(out[0], tuple):
            raise TreeError(
                "accumulate: with has_aux=True the loss returns ((total, count), aux), but it returned "
                f"{described(out)}"
            )
        out, aux = out
    if not isinstance(out, tuple) or len(out) != 2:
        given = f"a tuple of {len(out)}" if isinstance(out, tuple) else described(out)
        raise TreeError(f"accumulate: the loss returns a pair, (total, count), but it returned {given}")
    for name, x in zip(("total", "count"), out, strict=True):
        if not isinstance(x, (Tensor, Real)) or (isinstance(x, Tensor) and x.dim()):
            raise ArgumentError(f"accumulate: the {name} is {described(x)}; expected a scalar tensor or a number")
        if state.body is not None and isinstance(x, Tensor) and (varying := get_variance(x).varying):
            axes = as_axis_name(sorted(varying))
            raise VarianceError(
                f"accumulate: the {name} is {show(x)}, a number of each rank; add the numbers up, at once by psum(x, "
                f"{axes}), or after all microbatches by pcast(x, {axes}, to='unreduced')"
            )
    total, count = out
    return _wide(total), (_wide(count), total.detach() if isinstance(total, Tensor) else total, aux)


def _divided(g: Any, number: Tensor) -> Any:
    """A gradient by a number, which may be too large for float16. A pending sum stays pending."""
    dtype = torch.float32 if g.dtype is torch.float16 else g.dtype
    return cast_terms(cast_terms(g, dtype) / number.to(dtype), g.dtype)


def _summands(aux: Any) -> Any:
    """The leaves of a tree in dtypes in which they are added up."""

    def wide(x: Any) -> Any:
        if not isinstance(x, (Tensor, Number)):
            raise ArgumentError(f"accumulate: the loss returned {described(x)} in aux; expected tensors and numbers")
        return cast_terms(x, dtype_of_sum(x.dtype)) if isinstance(x, Tensor) else x

    return optree.tree_map(wide, aux, is_leaf=is_sharded)


def _narrowed(sums: Any, like: Any) -> Any:
    """Sums of floats in the dtypes of the leaves of a tree. Those of bools and ints are int64."""

    def narrow(x: Any, y: Any) -> Any:
        both = isinstance(x, Tensor) and isinstance(y, Tensor)
        return cast_terms(x, y.dtype) if both and x.dtype is not torch.int64 else x

    return optree.tree_map(narrow, sums, like, is_leaf=is_sharded)


def _added(before: Any, after: Any) -> Any:
    """The sums of the leaves of two trees. A sum of two shapes would be that of no microbatch."""

    def added(x: Any, y: Any) -> Any:
        both = isinstance(x, Tensor) and isinstance(y, Tensor) and not (is_uneven(x) or is_uneven(y))
        if both and x.shape != y.shape:
            raise ValueError(f"one of shape {tuple(x.shape)} and one of {tuple(y.shape)}")
        return x + y

    try:
        return optree.tree_map(added, before, _summands(after), is_leaf=is_sharded)
    except ValueError as error:
        raise TreeError(
            f"accumulate: the loss returns one structure of aux for all microbatches, of the same shapes: {error}"
        ) from None


def _wide(x: Any) -> Any:
    """A scalar in float64. A pending sum stays pending."""
    return cast_terms(x, torch.float64) if isinstance(x, Tensor) else x


def _settled_sums(total: Any, count: Any) -> tuple[Tensor, Tensor]:
    """Total and count, equal on all ranks, in float64. Sums that are pending over the same axes are settled at once."""
    device = next((x.device for x in (total, count) if isinstance(x, Tensor)), None)
    both: list[Any] = [
        x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64, device=device) for x in (total, count)
    ]
    places = [x.spec.partition if is_sharded(x) else get_variance(x) for x in both]
    if places[0] is not places[1]:
        return tuple(map(_settled, both))
    total, count = _settled(torch.stack(both)).unbind()
    return total, count


def _settled(x: Any) -> Any:
    if is_sharded(x):
        return device_get(x)
    unreduced = get_variance(x).unreduced
    return psum(x, tuple(sorted(unreduced))) if unreduced else x
