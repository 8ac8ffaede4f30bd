"""Differentiable moves between a global tensor and its blocks, and from one layout to another.

Every move is a row of the pair table, which also gives the communication of backward. All uses of a value share its
moves and casts, forward and backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.entries import entry_axes, uneven_lengths
from fspmd.errors import ArgumentError
from fspmd.flights import depart, land
from fspmd.foreign import refuse_misfit
from fspmd.meshes.mesh import Mesh
from fspmd.pairs import Call, apply, call, given, is_transformed, lend
from fspmd.redistribution.cost import VIEWS, Topology, topology
from fspmd.redistribution.moves import Leg, moves
from fspmd.redistribution.routes import route
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
from fspmd.transport import Options
from fspmd.transport.local_tensor import blocks_of
from fspmd.transport.windows import Regroup


def redistribute(x: Tensor, source: TensorSpec, target: TensorSpec) -> Tensor:
    """Move a block from ``source`` to ``target`` by the cheapest route, on one mesh or from one to another.

    If a gradient follows, the price counts backward too. A block that was moved or cut has its own memory.
    """
    if source is target:
        return x
    if source.mesh != target.mesh:
        return _to_mesh(x, source, target)
    return moved(x, moves(source, target, (), topology(), x.requires_grad and torch.is_grad_enabled()).calls)


def begun(
    x: Tensor, source: TensorSpec, target: TensorSpec, forward: torch.dtype, backward: torch.dtype, wait: bool
) -> Callable[[], Tensor]:
    """Start `redistribute`, and return a function that waits for its result.

    The block moves in the dtype ``forward``, and its gradient in the dtype ``backward``. The gradient ends in the dtype
    of ``x``. Without ``wait`` the last collective is under way until the function is called.
    """
    before, after = (TensorSpec(spec.mesh, spec.partition, spec.shape, forward) for spec in (source, target))
    if source.mesh != target.mesh:
        elsewhere = redistribute(x.to(forward), before, after)
        return lambda: elsewhere
    calls = moves(before, after, (), topology(), x.requires_grad and torch.is_grad_enabled()).calls
    one_dtype = forward == backward
    if wait or _kernels(calls) <= VIEWS or transforms_active():  # torch.func sees whole collectives only
        y = moved(x.to(forward), calls) if one_dtype else _Moved.apply(x, moved, calls, forward, backward)
        return lambda: y
    flight = depart(apply((x if one_dtype else x.detach()).to(forward), *calls[:-1]), calls[-1])
    if one_dtype:
        return lambda: land(flight).clone() if _ends_in_slice(calls) else land(flight)
    return lambda: _Moved.apply(x, lambda *_: land(flight), calls, forward, backward)


def moved(x: Tensor, calls: tuple[Call, ...]) -> Tensor:
    """Apply calls to ``x``. The result has its own memory, or that of ``x`` as it is.

    A slice at their end is copied, since it may be written into. A write into a slice of an operand would change the
    operand, elsewhere on each rank. Of another slice torch refuses writes under autograd, and it would keep the memory
    of the whole.
    """
    y = apply(x, *calls)
    return y.clone() if _ends_in_slice(calls) else y


@cached(maxsize=8192)
def _kernels(calls: tuple[Call, ...]) -> frozenset[str]:
    return frozenset(step.pair.kernel for step in calls)


@cached(maxsize=8192)
def _ends_in_slice(calls: tuple[Call, ...]) -> bool:
    """Return whether a slice is among the calls that follow the last one that is no view."""
    last = itertools.takewhile(lambda step: step.pair.kernel in VIEWS, reversed(calls))
    return any(step.pair.kernel == "slice" for step in last)


class _Moved(torch.autograd.Function):
    """Moves ``x`` along calls in one dtype, by the function ``move``, and its gradient back along them in another."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, move: Any, calls: tuple[Call, ...], forward: torch.dtype, backward: torch.dtype) -> Tensor:
        y: Tensor = move(x.to(forward), calls)
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, ctx.calls, ctx.forward_dtype, ctx.backward_dtype = inputs
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        g = apply(g.to(ctx.backward_dtype), *[step.transposed for step in reversed(ctx.calls)])
        return g.to(ctx.dtype), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        y = apply(tangent.to(ctx.forward_dtype), *ctx.calls)
        return y.view_as(y)


def _to_mesh(x: Tensor, source: TensorSpec, target: TensorSpec) -> Tensor:
    """Move a block to another mesh. A process takes part in the steps on the meshes of which it is a member."""
    before, after = source.mesh, target.mesh
    if (before.transport, before.device_type) != (after.transport, after.device_type):  # no collective spans both
        return to_blocks(from_blocks(x, source).to(after.device), target)
    for step in route(source, target, topology()).steps:
        if step.call.options.move is not None or step.call.mesh.coordinate() is not None:
            x = apply(x, step.call)
    return x


def viewed(x: Tensor, source: TensorSpec, target: TensorSpec) -> Tensor:
    """View blocks of one layout as blocks of another, whose dims are products of its dims, or factors.

    Nothing moves, forward or backward.
    """
    return apply(x, call("view", source.mesh, (), Options(dims=Regroup(source, target))))


def to_blocks(x: Tensor, spec: TensorSpec) -> Tensor:
    """Return this rank's block of a global tensor that every rank holds. Nothing moves. Backward gathers."""
    refuse_misfit(x, "a global tensor was expected, but got")
    return moved(x, cuts(spec, topology()))


def borrowed_blocks(x: Tensor, spec: TensorSpec) -> Tensor:
    """Return the block as a view of the global tensor, for readers only."""
    refuse_misfit(x, "a global tensor was expected, but got")
    return apply(x, *cuts(spec, topology()))


@cached(maxsize=8192)
def cuts(spec: TensorSpec, topology: Topology) -> tuple[Call, ...]:
    """Return the calls from a global tensor that every rank holds to its blocks: a slice per dim, then casts.

    The slowest links come last. In backward they are then the first, and carry the gradient while it is smallest.
    """
    mesh, partition = spec.mesh, spec.partition
    if spec.flat:
        unflattened = spec.unflattened
        views = Regroup(spec.with_partition(P()), unflattened.with_partition(P())), Regroup(unflattened, spec)
        first, last = (call("view", mesh, (), Options(dims=view)) for view in views)
        return (first, *cuts(unflattened, topology), last)
    quickest_first = sorted(spec.cuts, key=lambda cut: topology.link(mesh, cut[1]).bandwidth, reverse=True)
    calls = [
        call("slice", mesh, axes, Options(dim=d, sizes=uneven_lengths(spec.shape[d], parts)))
        for d, axes, parts in quickest_first
    ]
    for name, axes in (("invariant_to_reduced", partition.reduced), ("invariant_to_unreduced", partition.unreduced)):
        if axes:
            calls.append(call(name, mesh, mesh.ordered(axes)))
    return tuple(calls)


def from_blocks(x: Tensor, spec: TensorSpec) -> Tensor:
    """Return the global tensor on every rank: gathered where sharded, summed where unreduced. Backward slices."""
    return redistribute(x, spec, spec.with_partition(P()))


def from_even_blocks(x: Tensor, partition: P, mesh: Mesh) -> Tensor:
    """Return `from_blocks` where the blocks along each cut have one length, which may vary over the other axes."""
    for name, pending in (("psum_unreduced", partition.unreduced), ("reduced_to_invariant", partition.reduced)):
        if axes := mesh.ordered(pending):
            x = apply(x, call(name, mesh, axes))
    for dim, entry in reversed(list(enumerate(partition))):
        if axes := entry_axes(entry):
            x = apply(x, call("all_gather_invariant", mesh, axes, Options(dim=dim)))
    return x


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
        if y is None and repeats_along(x, leg):
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
    return all(step.pair.kernel in ("slice", "view") for step in leg.calls)


def _is_expanded(x: Tensor) -> bool:
    """Return whether ``x`` is the result of `expand` itself. Of views of such a result fspmd does not know all uses."""
    return 0 in blocks_of(x)[0].stride() and x.grad_fn is not None and x.grad_fn.name() == "ExpandBackward0"


def repeats_along(x: Tensor, leg: Leg) -> bool:
    """Return whether ``x`` is the result of `expand`, and repeats one element along the dims that a leg cuts."""
    return _is_expanded(x) and not any(x.stride(dim) for dim in cut_dims(leg))


def cut_dims(leg: Leg) -> frozenset[int]:
    """Return the dims that a leg cuts."""
    before, after = leg.source.partition, leg.reached.partition
    return frozenset([d for d, (was, now) in enumerate(zip(before, after, strict=True)) if was != now])


def part_of_equal(x: Tensor, leg: Leg) -> Tensor | None:
    """Expand one element along the dims that are cut, so that its gradient is summed and not gathered.

    The elements of ``x`` are equal along these dims. Returns None if the sum costs more than the gather.
    """
    if time_of_equal(leg) >= moves(leg.source, leg.reached, (), topology(), True).time:
        return None
    dims, axes = cut_dims(leg), tuple([axis for step in leg.calls for axis in step.axes])
    part, y = apply(x.detach(), *leg.calls), x
    for dim in dims:
        y = y.narrow(dim, 0, 1)
    return apply(y, call("invariant_to_varying", leg.source.mesh, axes)).expand(part.shape)


def time_of_equal(leg: Leg) -> float:
    """Return the µs of the sum of `part_of_equal`."""
    dims, axes = cut_dims(leg), tuple([axis for step in leg.calls for axis in step.axes])
    shape = tuple([1 if dim in dims else size for dim, size in enumerate(leg.source.shape)])
    element = TensorSpec(leg.source.mesh, leg.source.partition, shape, leg.source.dtype)
    return moves(element, element, axes, topology(), True).casting


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
    reached = leg.reached.with_partition(partition.with_entries(partition, reduced=reduced))
    twin = call(_TWINS[gather.pair.name], gather.mesh, gather.axes, gather.options)
    return leg._replace(reached=reached, calls=(twin,))


_TWINS: Final = {"all_gather_invariant": "all_gather_reduced", "all_gather_reduced": "all_gather_invariant"}


def _is_followed(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _passes(x: Tensor, spec: TensorSpec) -> bool:
    """Return whether a block lives no longer than a step, or its remembered results are no larger than it."""
    return x.requires_grad or bool(spec.partition.unreduced)
