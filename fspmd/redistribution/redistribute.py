"""Between a global tensor and its blocks, and from one spec to another, differentiably.

Every move is a row of the pair table, so backward communicates what the table says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fspmd.entries import entry_axes
from fspmd.foreign import refuse_misfit
from fspmd.meshes.mesh import Mesh
from fspmd.pairs import Call, apply, call, depart, land
from fspmd.redistribution.cost import VIEWS, Topology, topology
from fspmd.redistribution.edges import lengths
from fspmd.redistribution.moves import moves
from fspmd.redistribution.routes import route
from fspmd.spec import P, TensorSpec
from fspmd.torch_internals import transforms_active
from fspmd.transport import Options
from fspmd.transport.windows import Regroup


def redistribute(x: Tensor, source: TensorSpec, target: TensorSpec) -> Tensor:
    """The blocks of ``target`` from those of ``source``, by the cheapest route; on one mesh or from one to another.

    Where gradients follow, that is the one that is cheaper there and back. What was moved or cut may be written into.
    """
    if source is target:
        return x
    if source.mesh != target.mesh:
        return _to_mesh(x, source, target)
    return moved(x, moves(source, target, (), topology(), x.requires_grad and torch.is_grad_enabled()).calls)


def begun(
    x: Tensor, source: TensorSpec, target: TensorSpec, forward: torch.dtype, backward: torch.dtype, wait: bool
) -> Callable[[], Tensor]:
    """`redistribute` in one dtype, and its gradient in another; what waits for it. Not ``wait``: the last collective is
    under way meanwhile.

    The gradient has the dtype of ``x`` in the end.
    """
    before, after = (TensorSpec(spec.mesh, spec.partition, spec.shape, forward) for spec in (source, target))
    if source.mesh != target.mesh:
        elsewhere = redistribute(x.to(forward), before, after)
        return lambda: elsewhere
    calls = moves(before, after, (), topology(), x.requires_grad and torch.is_grad_enabled()).calls
    same = forward == backward
    if wait or _kernels(calls) <= VIEWS or transforms_active():  # under which nothing is split
        there = moved(x.to(forward), calls) if same else _Moved.apply(x, moved, calls, forward, backward)
        return lambda: there
    flight = depart(_led((x if same else x.detach()).to(forward), calls[:-1]), calls[-1])
    if same:
        return lambda: land(flight)
    return lambda: _Moved.apply(x, lambda *_: land(flight), calls, forward, backward)


def _led(x: Tensor, calls: Sequence[Call]) -> Tensor:
    for one in calls:
        x = apply(x, one)
    return x


def moved(x: Tensor, calls: Sequence[Call]) -> Tensor:
    """``x`` led along calls. A part that was cut off has memory of its own: a write into it must not change ``x``, on
    each rank elsewhere.
    """
    y, kernels = _led(x, calls), _kernels(calls)
    return y.clone() if "slice" in kernels and kernels <= VIEWS else y


def _kernels(calls: Sequence[Call]) -> set[str]:
    return {one.pair.kernel for one in calls}


class _Moved(torch.autograd.Function):
    """``x`` led along calls in one dtype, by ``there``; its gradient goes back along them in another."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, there: Any, calls: tuple[Call, ...], forward: torch.dtype, backward: torch.dtype) -> Tensor:
        y: Tensor = there(x.to(forward), calls)
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, ctx.calls, ctx.forward_dtype, ctx.backward_dtype = inputs
        ctx.given = x.dtype

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        g = _led(g.to(ctx.backward_dtype), [one.transposed for one in reversed(ctx.calls)])
        return g.to(ctx.given), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        y = _led(tangent.to(ctx.forward_dtype), ctx.calls)
        return y.view_as(y)


def _to_mesh(x: Tensor, source: TensorSpec, target: TensorSpec) -> Tensor:
    """A process has its part in what happens on a mesh of which it is a member."""
    here, there = source.mesh, target.mesh
    if (here.transport, here.device_type) != (there.transport, there.device_type):  # no collective spans both
        return to_blocks(from_blocks(x, source).to(there.device), target)
    for step in route(source, target, topology()).steps:
        if step.call.options.move is not None or step.call.mesh.coordinate() is not None:
            x = apply(x, step.call)
    return x


def viewed(x: Tensor, source: TensorSpec, target: TensorSpec) -> Tensor:
    """Blocks as those of a layout of which dims are products of theirs, or factors. Nothing moves, backward either."""
    return apply(x, call("view", source.mesh, (), Options(dims=Regroup(source, target))))


def to_blocks(x: Tensor, spec: TensorSpec) -> Tensor:
    """This rank's block of a global tensor that every rank holds. Nothing moves; backward gathers the gradient."""
    refuse_misfit(x, "a global tensor was expected, but got")
    return moved(x, cuts(spec, topology()))


def borrowed_blocks(x: Tensor, spec: TensorSpec) -> Tensor:
    """The same, as a view that is not to be written into."""
    refuse_misfit(x, "a global tensor was expected, but got")
    return _led(x, cuts(spec, topology()))


@functools.lru_cache(maxsize=8192)
def cuts(spec: TensorSpec, topology: Topology) -> tuple[Call, ...]:
    """From a global tensor that every rank holds to its blocks: a slice per dim, then casts.

    The slowest links come last: in backward they carry the gradient before other gathers make it larger.
    """
    mesh, lies = spec.mesh, spec.partition
    if spec.flat:
        apart = spec.unflattened
        views = Regroup(spec.with_partition(P()), apart.with_partition(P())), Regroup(apart, spec)
        first, last = (call("view", mesh, (), Options(dims=view)) for view in views)
        return (first, *cuts(apart, topology), last)
    dims = sorted(spec.cuts, key=lambda cut: -topology.link(mesh, cut[1]).bandwidth)
    found = [call("slice", mesh, axes, Options(dim=d, sizes=lengths(spec, d, axes))) for d, axes, _ in dims]
    for name, pending in (("invariant_to_reduced", lies.reduced), ("invariant_to_unreduced", lies.unreduced)):
        if pending:
            found.append(call(name, mesh, mesh.ordered(pending)))
    return tuple(found)


def from_blocks(x: Tensor, spec: TensorSpec) -> Tensor:
    """The global tensor on every rank: gathered where sharded, summed where unreduced. Backward slices."""
    return redistribute(x, spec, spec.with_partition(P()))


def from_even_blocks(x: Tensor, partition: P, mesh: Mesh) -> Tensor:
    """`from_blocks` where the blocks along each cut have one length, which may differ along axes of no cut."""
    for name, pending in (("psum_unreduced", partition.unreduced), ("reduced_to_invariant", partition.reduced)):
        if axes := mesh.ordered(pending):
            x = apply(x, call(name, mesh, axes))
    for dim, entry in reversed(list(enumerate(partition))):
        if axes := entry_axes(entry):
            x = apply(x, call("all_gather_invariant", mesh, axes, Options(dim=dim)))
    return x
