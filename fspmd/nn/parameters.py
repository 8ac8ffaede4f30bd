"""Parameters that are cut over ranks, gathered where they are used (ZeRO, fully sharded data parallelism).

A gathered parameter is *reduced* over the axis: equal on all ranks, with a gradient that is a pending sum. So backward
is a reduce-scatter for a parameter that the axis cuts, and an all-reduce for one that it does not cut. Where the sum
happens follows from the layout alone (Rajbhandari et al., "ZeRO", 2020; Zhao et al., "PyTorch FSDP", 2023).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fspmd.body import Body, bound_body, resolve_axes, state
from fspmd.entries import entry_axes
from fspmd.errors import ArgumentError, AxisError, ShapeError, SpecError, VarianceError
from fspmd.messages import Failure, as_axis_name, quoted, refuse
from fspmd.nn.arguments import FloatDtype, check_fields, checked
from fspmd.nn.sequences import Axes, names_of
from fspmd.placement.reshard import reshard
from fspmd.redistribution.redistribute import begun
from fspmd.sharded import Sharded, is_plain, is_sharded
from fspmd.spec import P, TensorSpec, complain
from fspmd.torch_internals import DisableTorchFunction
from fspmd.transport.local_tensor import is_uneven
from fspmd.trees import Entries, broadcast_prefix, leaf_paths, prefix_over
from fspmd.variance import Variance, get_variance, set_variance, show, variance_of_spec


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes in which parameters are kept and used, and in which gradients are summed.

    Attributes:
        param: of stored parameters, which `accumulate` and `gathered` check. Gradients end in it, so that an optimizer
            updates in it.
        compute: of gathered parameters, and so of the computation. Parameters are cast before they move.
        reduce: in which gradients are summed over ranks. They move in it.
        accumulate: in which gradients are summed over microbatches.

    Raises:
        ArgumentError: one of them is no floating dtype.

    >>> Precision(compute=torch.bfloat16).reduce
    torch.float32
    """

    param: FloatDtype = torch.float32
    compute: FloatDtype = torch.float32
    reduce: FloatDtype = torch.float32
    accumulate: FloatDtype = torch.float32

    def __post_init__(self) -> None:
        check_fields(self)


@checked
def gathered(params: Any, axis: Axes, specs: Any = None, *, dtype: FloatDtype | Precision | None = None) -> Any:
    """Whole parameters, for use: each leaf is no longer cut by ``axis``, and is reduced over it.

    Call it where a parameter is used, inside the function that is differentiated. Within `checkpoint`, backward gathers
    again instead of keeping whole parameters. A leaf that is gathered already stays as it is.

    Args:
        params: A pytree of `Sharded` values; in a body, of this rank's blocks. Outside of bodies a plain tensor stays.
        axis: The mesh axis, or axes, over which parameters are gathered. Other cuts stay.
        specs: In a body, how leaves lie: a prefix of ``params`` of `P`, or of `TensorSpec` where blocks may be uneven.
            The default is ``P(axis)`` for a leaf that varies over the axis: dim 0 is cut, and last by this axis.
        dtype: Floating leaves are cast to this dtype before they move. Gradients move in the parameter's dtype. A
            `Precision` gives both, ``compute`` and ``reduce``.

    Communication: forward, an all-gather of each leaf that ``axis`` cuts, (n - 1) / n of its bytes from each rank.
    Backward, a reduce-scatter of the gradient of such a leaf, and an all-reduce of the gradient of any other leaf.

    Raises:
        AxisError: the axis is unknown.
        VarianceError: a leaf is a pending sum over the axis; or, in a body, its type is not that of its spec.
        ShapeError: blocks may be uneven, and their spec is a `P`, which has no global shape.
        ArgumentError: floating leaves have neither of the dtypes ``param`` and ``compute`` of a `Precision`.
        TreeError, SpecError, ArgumentError: ``specs`` or ``dtype`` do not fit.

    >>> from fspmd import communication_log, device_put, grad, make_mesh
    >>> mesh = make_mesh((4,), ("fsdp",), transport="simulation")
    >>> params = device_put({"w": torch.ones(8, 3), "b": torch.ones(3)}, {"w": P("fsdp"), "b": P()}, mesh=mesh)
    >>> x = device_put(torch.ones(4, 8), P("fsdp"), mesh=mesh)
    >>> def loss(params, x):
    ...     full = gathered(params, "fsdp")
    ...     return (x @ full["w"] + full["b"]).square().sum()
    >>> with communication_log() as log:
    ...     grads = grad(loss)(params, x)
    >>> [call.kind for call in log]
    ['all_gather_reduced', 'psum_scatter_unreduced', 'psum_unreduced']
    >>> grads["w"]
    Sharded f32[8@fsdp, 3] on mesh(fsdp=4)
    """
    forward, backward = _dtypes(dtype)
    if isinstance(dtype, Precision):
        check_dtypes(params, (dtype.param, dtype.compute), "gathered")
    if state.body is None:
        return _outside(params, axis, specs, forward, backward)
    leaves, treedef = optree.tree_flatten(params, none_is_leaf=True)
    gathers = _gathers(params, leaves, axis, specs)
    return treedef.unflatten(
        x if move is None else moved(x, move.cut, move.whole, move.type, forward, backward)
        for x, move in zip(leaves, gathers, strict=True)
    )


def settled(grads: Any, params: Any, axis: Axes, specs: Any, lie: Any, dtype: torch.dtype | None) -> Any:
    """Gradients of `gathered` parameters in the layouts ``lie``, or those of the parameters, and in their dtypes.

    They move in ``dtype``, or in their own. Communication: that of backward of `gathered`.
    """
    leaves, treedef = optree.tree_flatten(params, is_leaf=is_sharded, none_is_leaf=True)
    given, done = treedef.flatten_up_to(grads), []
    wanted = broadcast_prefix(lie, params, "grads", "params", "accumulate: grads does not match the parameters")
    if state.body is None:
        pairs = zip(leaves, wanted, strict=True)
        ends = [(p or x.spec.dual.partition) if is_sharded(x) else None for x, p in pairs]
        done = _resharded(given, ends, dtype, None)
    else:
        for g, x, partition, move in zip(given, leaves, wanted, _gathers(params, leaves, axis, specs), strict=True):
            if move is None or partition is None:
                after = get_variance(x).dual
                done.append(g if move is None else moved(g, move.whole.dual, move.cut.dual, after, dtype, dtype))
            else:
                target, after = move.whole.with_partition(partition), variance_of_spec(partition)
                done.append(moved(g, move.whole.dual, target, after, dtype, dtype))
    return treedef.unflatten(cast_terms(g, x.dtype) for g, x in zip(done, leaves, strict=True))


def cast_terms(x: Any, dtype: torch.dtype) -> Any:
    """A value in another dtype. A pending sum stays pending, as a sum of terms that are cast.

    ``x.to(dtype)`` of a pending `Sharded` settles the sum first, in the dtype of ``x``.
    """
    if not is_sharded(x):
        return x.to(dtype)
    spec = x.spec
    return (
        x
        if spec.dtype is dtype
        else Sharded(x.local.to(dtype), TensorSpec(spec.mesh, spec.partition, spec.shape, dtype))
    )


def dtype_of_sum(dtype: torch.dtype) -> torch.dtype:
    """In which values are added up, as `torch.sum` does: in bfloat16 256 and 1 is 256, and True and True is True."""
    is_number = dtype.is_floating_point or dtype.is_complex
    return torch.promote_types(dtype, torch.float32) if is_number else torch.int64


def check_dtypes(params: Any, dtypes: tuple[torch.dtype, ...], what: str) -> None:
    """Raise `ArgumentError` for floating parameters of other dtypes than the first, which a `Precision` names.

    A loss may get parameters that were cast to the second before.
    """
    leaves = optree.tree_leaves(params, is_leaf=is_sharded, none_is_leaf=True)
    if wrong := [i for i, x in enumerate(leaves) if _is_floating(x) and x.dtype not in dtypes]:
        names = leaf_paths(params, "params")
        given = ", ".join(f"{names[i]} of {leaves[i].dtype}" for i in wrong)
        raise ArgumentError(
            f"{what} got {given}, where Precision(param={dtypes[0]}) says in which dtype parameters are stored; cast "
            "them once before training, or give their dtype as param"
        )


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _dtypes(dtype: Any) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The dtypes of values and of gradients while they move; None for that of each leaf."""
    if isinstance(dtype, Precision):
        return dtype.compute, dtype.reduce
    return dtype, None


def _outside(params: Any, axis: Axes, specs: Any, forward: torch.dtype | None, backward: torch.dtype | None) -> Any:
    """`gathered` of global values, by `reshard`."""
    if specs is not None:
        raise ArgumentError("gathered got specs outside of a body; a Sharded has its spec, so leave them out")
    names, axes = leaf_paths(params, "params"), names_of(axis)
    leaves, treedef = optree.tree_flatten(params, is_leaf=is_sharded, none_is_leaf=True)
    partitions = [
        _whole(x.spec, axes, name).partition if is_sharded(x) else None for x, name in zip(leaves, names, strict=True)
    ]
    if forward is not None:
        leaves = [x.to(forward) if is_plain(x) and x.is_floating_point() else x for x in leaves]
    return treedef.unflatten(_resharded(leaves, partitions, forward, backward))


def _resharded(
    leaves: list[Any], partitions: list[P | None], forward: torch.dtype | None, backward: torch.dtype | None
) -> list[Any]:
    """`reshard`, in these dtypes. Of a leaf that lies on other processes alone, only the layout changes here."""
    away = [is_sharded(x) and x.spec.mesh.coordinate() is None for x in leaves]
    here = [None if far else partition for partition, far in zip(partitions, away, strict=True)]
    done: list[Any] = reshard(leaves, here, forward_dtype=forward, backward_dtype=backward)
    for i, (x, partition, far) in enumerate(zip(leaves, partitions, away, strict=True)):
        if far and partition is not None:
            dtype = forward if forward is not None and x.is_floating_point() else x.dtype
            done[i] = Sharded(x.local.to(dtype), TensorSpec(x.spec.mesh, partition, x.spec.shape, dtype))
    return done


def _whole(spec: TensorSpec, axes: tuple[str, ...], name: object) -> TensorSpec:
    """The layout of a value gathered over ``axes``: reduced over them, and cut by the others."""
    partition = spec.partition
    if unknown := sorted(set(axes).difference(spec.mesh.axis_names)):
        raise AxisError(f"gathered got the axis {quoted(unknown)}, but {name} lies on {spec.mesh!r}")
    if pending := sorted(partition.unreduced.intersection(axes)):
        raise VarianceError(
            f"gathered: {name} is {spec!r}, a pending sum over {as_axis_name(pending)}; settle it first: reshard(x, "
            "P(...))"
        )
    entries = [tuple(a for a in entry_axes(entry) if a not in axes) or None for entry in partition]
    return spec.with_partition(P(*entries, unreduced=partition.unreduced, reduced=partition.reduced.union(axes)))


class _Gather(NamedTuple):
    """The layouts of a block, cut and gathered, and its type when it is gathered."""

    cut: TensorSpec
    whole: TensorSpec
    type: Variance


_SPECS = Entries(
    lambda x: x is None or isinstance(x, (P, TensorSpec)),
    lambda _: "expected a P such as P('fsdp'), a TensorSpec, or None for the default",
    "P",
)


def _gathers(params: Any, leaves: list[Any], axis: Axes, specs: Any) -> list[_Gather | None]:
    """The move of each leaf in a body; None for a leaf that stays. All failing leaves are told at once."""
    body = bound_body("gathered")
    axes = resolve_axes(body, axis, "gathered")

    def gather(x: Tensor, spec: P | TensorSpec | None) -> _Gather | Failure | None:
        return _gather(body, x, spec, axes) if isinstance(x, Tensor) and axes else None

    return _of_each(params, leaves, specs, gather, f"gathered over {as_axis_name(axes)}: parameters that do not fit")


def layouts(params: Any, leaves: list[Any], specs: Any, what: str) -> list[TensorSpec]:
    """In a body, the layouts of blocks by a prefix of `P` or `TensorSpec`. All leaves that fail are told at once."""
    body = bound_body(what)

    def layout(x: Tensor, spec: P | TensorSpec | None) -> TensorSpec | Failure:
        return _layout(body, x, P() if spec is None else spec, body.mesh.axis_names)

    return _of_each(params, leaves, specs, layout, f"{what}: parameters that do not fit its specs")


def _of_each(params: Any, leaves: list[Any], specs: Any, of: Callable[[Any, Any], Any], title: str) -> list[Any]:
    """What ``of`` says of each leaf and its spec. Raises an error of all failures."""
    failures: list[Failure] = []
    given = prefix_over(specs, params, "specs", "params", failures, _SPECS)
    results: list[Any] = []
    for i, (x, spec) in enumerate(zip(leaves, given, strict=False)):
        result = of(x, spec)
        if isinstance(result, Failure):
            failures.append(replace(result, text=f"{leaf_paths(params, 'params')[i]} is {show(x)}{result.text}"))
        results.append(result)
    if failures:
        refuse(title, failures)
    return results


def _gather(body: Body, x: Tensor, spec: P | TensorSpec | None, axes: tuple[str, ...]) -> _Gather | Failure:
    """The move of a block. The text of a failure goes on after the block's name and type."""
    variance = get_variance(x)
    if pending := variance.unreduced.intersection(axes):
        axis = as_axis_name(sorted(pending))
        return Failure(
            f", a pending sum over {axis}; settle it: psum(x, {axis}) or psum_scatter(x, {axis})", VarianceError
        )
    if spec is None:
        spec = P(tuple(axis for axis in axes if axis in variance.varying) or None) if x.ndim else P()
    layout = _layout(body, x, spec, axes)
    if isinstance(layout, Failure):
        return layout
    partition = layout.partition
    cut = layout.with_partition(P(*partition, unreduced=variance.unreduced, reduced=variance.reduced))
    if not body.checked:  # nothing has a type, and the boundary sums the gradients of what no axis cuts
        return _Gather(cut, _whole(cut, tuple(a for a in axes if a in partition.axes), ""), variance)
    return _Gather(cut, _whole(cut, axes, ""), variance.moved(axes, "R"))


def _layout(body: Body, x: Tensor, spec: P | TensorSpec, axes: tuple[str, ...]) -> TensorSpec | Failure:
    """The layout of a block. Its type must be that of its spec over some axes."""
    variance = get_variance(x)
    partition = spec if isinstance(spec, P) else spec.partition
    if words := complain(partition, body.mesh, x.ndim):
        return Failure(f"; {words}", SpecError)
    if body.checked and (unlike := variance.varying.symmetric_difference(partition.axes).intersection(axes)):
        axis = as_axis_name(sorted(unlike))
        return Failure(
            f", but {partition!r} says otherwise over {axis}; give the spec with which it enters", VarianceError
        )
    if isinstance(spec, P):
        if body.uneven or is_uneven(x):
            return Failure(
                f"; blocks may be uneven, so give the layout, TensorSpec(mesh, {spec!r}, shape, dtype)", ShapeError
            )
        counts = [math.prod(body.sizes(entry_axes(entry))) for entry in partition]
        spec = TensorSpec(body.mesh, partition, map(operator.mul, x.shape, (*counts, *[1] * x.ndim)), x.dtype)
    elif not is_uneven(x) and tuple(x.shape) not in (shapes := _block_shapes(spec)):
        return Failure(f"; {spec!r} has blocks of {' or '.join(map(str, shapes))}", ShapeError)
    return spec


def _block_shapes(spec: TensorSpec) -> list[tuple[int, ...]]:
    """The shapes that blocks of a layout have."""
    coordinates = itertools.product(*map(range, spec.mesh.shape.values()))
    return sorted({spec.local_shape(at) for at in coordinates}, reverse=True)


def moved(
    x: Tensor,
    source: TensorSpec,
    target: TensorSpec,
    after: Variance,
    forward: torch.dtype | None = None,
    backward: torch.dtype | None = None,
) -> Tensor:
    """A block in another layout of a body, moved in the dtypes of values and of gradients. ``after``: its type then."""
    if not x.is_floating_point():
        forward = backward = None
    if state.body is not None and not state.body.checked:
        after = get_variance(x)
    with DisableTorchFunction():
        return set_variance(begun(x, source, target, forward or x.dtype, backward or x.dtype, True)(), after)
