"""Moves and casts that several uses of a value share: what was done for one serves the others, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.pairs import Call, apply, call, given, is_transformed, lend
from fspmd.redistribution.cost import topology
from fspmd.redistribution.moves import Leg, moves
from fspmd.redistribution.redistribute import redistribute
from fspmd.remembered import (
    bypass,
    has_moves,
    is_asked,
    is_hooked,
    moves_of,
    origin_of,
    recall,
    recall_cast,
    remember,
    remember_cast,
)
from fspmd.spec import P, TensorSpec, describe
from fspmd.torch_internals import transforms_active
from fspmd.transport.local_tensor import blocks_of

_ARRANGED: Final = "arranged"  # a value that users see, which no move of an operand hands on
KEPT: Final = "_fspmd_casts"


def redistribute_once(x: Tensor, source: TensorSpec, target: TensorSpec) -> Tensor:
    """`redistribute`, of a value that several functions take so: they are given one and the same tensor."""
    what = _ARRANGED, source, target
    lasting = not (source is target or is_transformed() or (x.requires_grad and is_asked(x)))
    if lasting and (known := recall(x, what)) is not None:
        return known
    y = redistribute(x, source, target)
    if lasting and y is not x and y._base is not x:
        remember(x, what, y)
    return y


def along(x: Tensor, leg: Leg, kept: list[Tensor], shared: bool = True) -> Tensor:
    """A block in the layout that a leg leads to, which is found again where it was led there before.

    What communicates is remembered as long as the block lives, where that is not long: of results that are followed by
    autograd, and of pending sums, whose ends are as large as they. A parameter is moved at each use. Slices, which move
    something in backward alone, are remembered as long as their graph lives, of which ``kept`` is to be a part. Not
    ``shared``: this use hands out parts of what it is given, which is memory of its own.
    """
    shares = leg.communicates and not (is_transformed() or (x.requires_grad and is_asked(x)))
    if shares and has_moves(x) and (known := _known(x, leg)) is not None:
        return known if shared else known.clone()
    y = x
    if (made := _made_again(x, leg, kept)) is not None:
        return made
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
    """A part of a value that is larger than what it was made of; the gradient of a slice would be gathered."""
    if not (leg.own and _is_followed(x)) or is_transformed():
        return None
    origin, grown = origin_of(x), _is_expanded(x)
    if not (origin or grown):
        return None
    if not _only_slices(leg) or is_asked(x):
        return None
    y = recall_cast(x, leg.reached)
    if y is None:
        y = origin(x, leg.reached) if origin else None
        y = _part_of_expanded(x, leg) if y is None and grown else y
        if y is None:
            return None
        remember_cast(x, leg.reached, y)
        bypass(x)
    if is_hooked(x):  # perhaps on this rank alone, which has sent what the others send
        raise ArgumentError(_HOOKED.format(describe(leg.source.dtype, leg.source.shape)))
    kept.append(y)
    return y


_HOOKED: Final = (
    "the gradient of a value {} is asked for, by register_hook or retain_grad, but it is used in another layout, for "
    "which it is made anew, of what it was made of, and its gradient does not come by it; write x = x.clone() on all "
    "ranks, before that, and use the copy, whose gradient is gathered"
)


def _only_slices(leg: Leg) -> bool:
    return all(one.pair.name == "slice" for one in leg.calls)


def _is_expanded(x: Tensor) -> bool:
    """And no view of that, of which fspmd does not know: its gradient would be seen, and is all in one place."""
    return 0 in blocks_of(x)[0].stride() and x.grad_fn is not None and x.grad_fn.name() == "ExpandBackward0"


def _part_of_expanded(x: Tensor, leg: Leg) -> Tensor | None:
    """Of what was expanded along all dims that are cut: expanded from one element there, whose gradient is summed."""
    dims = {one.options.dim for one in leg.calls}
    if any(x.stride(dim) for dim in dims):
        return None
    axes = tuple([axis for one in leg.calls for axis in one.axes])
    shape = tuple([1 if dim in dims else size for dim, size in enumerate(leg.source.shape)])
    one = TensorSpec(leg.source.mesh, leg.source.partition, shape, leg.source.dtype)
    summed = moves(one, one, axes, topology(), True).casting
    if summed >= moves(leg.source, leg.reached, (), topology(), True).time:
        return None
    part, y = x.detach(), x
    for step in leg.calls:
        part = apply(part, step)
    for dim in dims:
        y = y.narrow(dim, 0, 1)
    return apply(y, call("invariant_to_varying", leg.source.mesh, axes)).expand(part.shape)


def cast_once(x: Tensor, cast: Call) -> Tensor:
    """A cast, or a slice: forward it is free, and one serves all uses whose graph is alive."""
    if (known := recall_cast(x, cast)) is not None:
        return known
    y = lend(x, cast)
    if not transforms_active():
        remember_cast(x, cast, y)
    return y


def keep(casts: Iterable[Tensor], out: Any, name: str = KEPT) -> None:
    """Alive as long as the graph is, and no longer; what else is kept there has other names."""
    for one in (out,) if isinstance(out, Tensor) else out:
        node: Any = one.grad_fn
        if node is not None:
            node.metadata[name] = casts


def ended(x: Tensor, source: TensorSpec) -> TensorSpec | None:
    """In which layout the pending sum that a block is a part of was ended, if it was; of several the most whole one."""
    pending = source.partition.unreduced
    found = [what[1] for what in moves_of(x) if what[0] is source]
    found = [one for one in found if one.partition.unreduced < pending and recall(x, (source, one)) is not None]
    return max(found, key=lambda one: prod(one.block_shape), default=None)


def _known(x: Tensor, leg: Leg) -> Tensor | None:
    """What was remembered of a leg, or of its twin."""
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


@functools.lru_cache(maxsize=4096)
def _twin(leg: Leg) -> Leg | None:
    """Of a gather to invariant that to reduced, and of that the other: forward they do the same."""
    if len(leg.calls) != 1 or leg.calls[0].pair.name not in _TWINS:
        return None
    (gather,), lies = leg.calls, leg.reached.partition
    reached = leg.reached.with_partition(P(*lies, unreduced=lies.unreduced, reduced=lies.reduced ^ set(gather.axes)))
    twin = call(_TWINS[gather.pair.name], gather.mesh, gather.axes, gather.options)
    return leg._replace(reached=reached, calls=(twin,))


_TWINS: Final = {"all_gather_invariant": "all_gather_reduced", "all_gather_reduced": "all_gather_invariant"}


def _is_followed(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _passes(x: Tensor, spec: TensorSpec) -> bool:
    """Whether a block, or what is remembered of it, is not held for longer than a step, or is of no account."""
    return x.requires_grad or bool(spec.partition.unreduced)
