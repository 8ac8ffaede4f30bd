"""Differentiable moves between a global tensor and its blocks, and from one layout to another.

Every move is a row of the pair table, which also gives the communication of backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.entries import entry_axes
from fspmd.flights import depart, land
from fspmd.foreign import refuse_misfit
from fspmd.meshes.mesh import Mesh
from fspmd.pairs import Call, apply, call
from fspmd.redistribution.cost import VIEWS, Topology, topology
from fspmd.redistribution.edges import lengths
from fspmd.redistribution.moves import moves
from fspmd.redistribution.routes import route
from fspmd.spec import P, TensorSpec
from fspmd.torch_internals import transforms_active
from fspmd.transport import Options
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
    flight = depart(_led((x if one_dtype else x.detach()).to(forward), calls[:-1]), calls[-1])
    if one_dtype:
        return lambda: _owned(land(flight), calls)
    return lambda: _Moved.apply(x, lambda *_: land(flight), calls, forward, backward)


def _led(x: Tensor, calls: Sequence[Call]) -> Tensor:
    for step in calls:
        x = apply(x, step)
    return x


def moved(x: Tensor, calls: tuple[Call, ...]) -> Tensor:
    """Apply calls to ``x``. The result has its own memory, or that of ``x`` as it is."""
    return _owned(_led(x, calls), calls)


def _owned(y: Tensor, calls: tuple[Call, ...]) -> Tensor:
    """Return the result of calls. A slice at their end is copied, since it may be written into.

    A write into a slice of an operand would change the operand, elsewhere on each rank. Of another slice torch refuses
    writes under autograd, and it would keep the memory of the whole.
    """
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
        g = _led(g.to(ctx.backward_dtype), [step.transposed for step in reversed(ctx.calls)])
        return g.to(ctx.dtype), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        y = _led(tangent.to(ctx.forward_dtype), ctx.calls)
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
    return _led(x, cuts(spec, topology()))


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
    speeds = [topology.link(mesh, axes).bandwidth for _, axes, _ in spec.cuts]
    dims = sorted(zip(speeds, spec.cuts, strict=True), key=itemgetter(0), reverse=True)
    calls = [call("slice", mesh, axes, Options(dim=d, sizes=lengths(spec, d, axes))) for _, (d, axes, _) in dims]
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
