"""Between a global tensor and its blocks, and from one spec to another, differentiably.

Every move is a row of the pair table, so backward communicates what the table says.
"""

from __future__ import annotations

from torch import Tensor

from fspmd.cost import topology
from fspmd.mesh import Mesh
from fspmd.pairs import Call, apply, call
from fspmd.routes import lengths, route
from fspmd.spec import P, TensorSpec, entry_axes
from fspmd.transport import Options


def _dim_call(name: str, spec: TensorSpec, dim: int, axes: tuple[str, ...]) -> Call:
    return call(name, spec.mesh, axes, Options(dim=dim, sizes=lengths(spec, dim, axes)))


def to_blocks(x: Tensor, spec: TensorSpec) -> Tensor:
    """This rank's block of a global tensor that every rank holds. Nothing moves; backward gathers the gradient."""
    for dim, axes, _ in spec.cuts:
        x = apply(x, _dim_call("slice", spec, dim, axes))
    return _to_pending(x, spec)


def _to_pending(x: Tensor, spec: TensorSpec) -> Tensor:
    if axes := spec.mesh.ordered(spec.partition.reduced):
        x = apply(x, call("invariant_to_reduced", spec.mesh, axes))
    if axes := spec.mesh.ordered(spec.partition.unreduced):
        x = apply(x, call("invariant_to_unreduced", spec.mesh, axes))
    return x


def from_blocks(x: Tensor, spec: TensorSpec) -> Tensor:
    """The global tensor on every rank: an all-gather per sharded dim, a psum where unreduced. Backward slices."""
    x = _settle(x, spec.partition, spec.mesh)
    for dim, axes, _ in reversed(spec.cuts):
        x = apply(x, _dim_call("all_gather_invariant", spec, dim, axes))
    return x


def from_even_blocks(x: Tensor, partition: P, mesh: Mesh) -> Tensor:
    """`from_blocks` where the blocks along each cut have one length, which may differ along axes of no cut."""
    x = _settle(x, partition, mesh)
    for dim, entry in reversed(list(enumerate(partition))):
        if axes := entry_axes(entry):
            x = apply(x, call("all_gather_invariant", mesh, axes, Options(dim=dim)))
    return x


def _settle(x: Tensor, partition: P, mesh: Mesh) -> Tensor:
    """Unreduced and reduced to invariant."""
    if axes := mesh.ordered(partition.unreduced):
        x = apply(x, call("psum_unreduced", mesh, axes))
    if axes := mesh.ordered(partition.reduced):
        x = apply(x, call("reduced_to_invariant", mesh, axes))
    return x


def redistribute(x: Tensor, source: TensorSpec, target: TensorSpec) -> Tensor:
    """The blocks of ``target`` from those of ``source``, by the cheapest route."""
    if source is target:
        return x
    if source.mesh != target.mesh:
        return to_blocks(from_blocks(x, source), target)
    for step in route(source, target, topology()).steps:
        x = apply(x, step.call)
    return x
