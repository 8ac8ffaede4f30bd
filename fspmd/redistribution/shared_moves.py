"""Moves and casts that all uses of a value share, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.errors import ArgumentError
from fspmd.pairs import Call, apply, call, given, is_transformed, lend
from fspmd.redistribution.cost import topology
from fspmd.redistribution.moves import Leg, moves
from fspmd.redistribution.redistribute import redistribute
from fspmd.remembered import (
    bypass,
    has_moves,
    is_hooked,
    moves_of,
    needs_gradient,
    origin_of,
    recall,
    recall_cast,
    remember,
    remember_cast,
)
from fspmd.spec import P, TensorSpec, describe
from fspmd.torch_internals import transforms_active
from fspmd.transport.local_tensor import blocks_of

_ARRANGED: Final = "arranged"  # part of the key of values that users see; moves of operands do not share them
KEPT: Final = "_fspmd_casts"  # the metadata of an autograd node that holds casts


def redistribute_once(x: Tensor, source: TensorSpec, target: TensorSpec) -> Tensor:
    """Return `redistribute` of a value that several functions take, as one tensor for all of them."""
    move = _ARRANGED, source, target
    shares = not (source is target or is_transformed() or (x.requires_grad and needs_gradient(x)))
    if shares and (known := recall(x, move)) is not None:
        return known
    y = redistribute(x, source, target)
    if shares and y is not x and y._base is not x:
        remember(x, move, y)
    return y


def along(x: Tensor, leg: Leg, kept: list[Tensor], shared: bool = True) -> Tensor:
    """Lead a block along a leg. If the block was led there before, return the remembered result.

    A result that took communication is remembered as long as the block lives, if that is not longer than a step: for
    blocks with a gradient, and for pending sums. A parameter is moved at each use. Slices communicate in backward only;
    they are remembered as long as their graph lives, and appended to ``kept``, which the caller ties to the graph.
    Without ``shared`` the result has memory of its own, because the call hands out parts of it.
    """
    shares = leg.communicates and not (is_transformed() or (x.requires_grad and needs_gradient(x)))
    if shares and has_moves(x) and (known := _known(x, leg)) is not None:
        return known if shared else known.clone()
    if (made := _made_again(x, leg, kept)) is not None:
        return made
    y = x
    for step in leg.calls:
        if step.pair.name == "slice" and _is_followed(y):
            y = cast_once(y, step)
            kept.append(y)
        else:
            y = apply(y, step)
    if shares and shared and y is not x and y._base is not x and _passes(x, leg.source):
        remember(x, (leg.source, leg.reached), y)
    return y


def _made_again(x: Tensor, leg: Leg, kept: list[Tensor]) -> Tensor | None:
    """Make the blocks of a target anew from the operands that a value was made of, or return None.

    This serves values that are larger than their operands. The gradient of a slice would be gathered.
    """
    if not (leg.own and _is_followed(x)) or is_transformed():
        return None
    origin, expanded = origin_of(x), _is_expanded(x)
    if not (origin or expanded):
        return None
    if not _only_slices(leg) or needs_gradient(x):
        return None
    y = recall_cast(x, leg.reached)
    if y is None:
        y = origin(x, leg) if origin else None
        if y is None and expanded and not any(x.stride(dim) for dim in cut_dims(leg)):
            y = part_of_equal(x, leg)
        if y is None:
            return None
        remember_cast(x, leg.reached, y)
        bypass(x)
    if is_hooked(x):  # perhaps on this rank alone: it raises after it has taken part in all collectives
        raise ArgumentError(_HOOKED.format(describe(leg.source.dtype, leg.source.shape)))
    kept.append(y)
    return y


_HOOKED: Final = (
    "register_hook or retain_grad got a value {} whose gradient is incomplete: the value is used in another layout, "
    "where each rank makes its part anew from the operands; write x = x.clone() on all ranks before, and use the copy, "
    "whose gradient is gathered"
)


def _only_slices(leg: Leg) -> bool:
    return all(step.pair.name == "slice" for step in leg.calls)


def _is_expanded(x: Tensor) -> bool:
    """Return whether ``x`` is the result of `expand` itself. Of views of such a result fspmd does not know all uses."""
    return 0 in blocks_of(x)[0].stride() and x.grad_fn is not None and x.grad_fn.name() == "ExpandBackward0"


def cut_dims(leg: Leg) -> frozenset[int]:
    """Return the dims that the slices of a leg cut."""
    return frozenset([step.options.dim for step in leg.calls])


def part_of_equal(x: Tensor, leg: Leg) -> Tensor | None:
    """Expand one element along the dims that are cut, so that its gradient is summed and not gathered.

    The elements of ``x`` are equal along these dims. Returns None if the sum costs more than the gather.
    """
    dims = cut_dims(leg)
    axes = tuple([axis for step in leg.calls for axis in step.axes])
    shape = tuple([1 if dim in dims else size for dim, size in enumerate(leg.source.shape)])
    element = TensorSpec(leg.source.mesh, leg.source.partition, shape, leg.source.dtype)
    summed = moves(element, element, axes, topology(), True).casting
    if summed >= moves(leg.source, leg.reached, (), topology(), True).time:
        return None
    part, y = x.detach(), x
    for step in leg.calls:
        part = apply(part, step)
    for dim in dims:
        y = y.narrow(dim, 0, 1)
    return apply(y, call("invariant_to_varying", leg.source.mesh, axes)).expand(part.shape)


def cast_once(x: Tensor, cast: Call) -> Tensor:
    """Return a cast or a slice of ``x``. It is free forward, and one result serves all uses whose graph is alive."""
    if (known := recall_cast(x, cast)) is not None:
        return known
    y = lend(x, cast)
    if not transforms_active():
        remember_cast(x, cast, y)
    return y


def keep(casts: Iterable[Tensor], out: Any, name: str = KEPT) -> None:
    """Keep casts alive exactly as long as the graph of ``out``. Other things kept on a graph have other names."""
    for y in (out,) if isinstance(out, Tensor) else out:
        node: Any = y.grad_fn
        if node is not None:
            node.metadata[name] = casts


def ended(x: Tensor, source: TensorSpec) -> TensorSpec | None:
    """Return the layout in which a pending sum was settled, or None. Of several layouts it is that of larger blocks."""
    pending = source.partition.unreduced
    reached = [move[1] for move in moves_of(x) if move[0] is source]
    settled = [spec for spec in reached if spec.partition.unreduced < pending and recall(x, (source, spec)) is not None]
    return max(settled, key=lambda spec: prod(spec.block_shape), default=None)


def _known(x: Tensor, leg: Leg) -> Tensor | None:
    """Return the remembered result of a leg, or of its twin, or None."""
    if (known := recall(x, (leg.source, leg.reached))) is not None:
        return known
    twin = _twin(leg)
    if twin is None or (known := recall(x, (leg.source, twin.reached))) is None:
        return None
    (gather,) = leg.calls
    if gather.pair.name == "all_gather_invariant":
        known = apply(known, call("reduced_to_invariant", gather.mesh, gather.axes))
    elif _is_followed(x):
        known = given(x, gather, known)
    remember(x, (leg.source, leg.reached), known)
    return known


@cached
def _twin(leg: Leg) -> Leg | None:
    """Return the gather to reduced for a gather to invariant, and the other way round. Forward both do the same."""
    if len(leg.calls) != 1 or leg.calls[0].pair.name not in _TWINS:
        return None
    (gather,), partition = leg.calls, leg.reached.partition
    reduced = partition.reduced ^ set(gather.axes)
    reached = leg.reached.with_partition(P(*partition, unreduced=partition.unreduced, reduced=reduced))
    twin = call(_TWINS[gather.pair.name], gather.mesh, gather.axes, gather.options)
    return leg._replace(reached=reached, calls=(twin,))


_TWINS: Final = {"all_gather_invariant": "all_gather_reduced", "all_gather_reduced": "all_gather_invariant"}


def _is_followed(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _passes(x: Tensor, spec: TensorSpec) -> bool:
    """Return whether a block lives no longer than a step, or its remembered results are no larger than it."""
    return x.requires_grad or bool(spec.partition.unreduced)
