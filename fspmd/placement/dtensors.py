"""torch's DTensor to `Sharded` and back: the same block with another description of its layout.

The placements of a DTensor have an entry for each mesh axis, a spec has an entry for each dim. Both are compared by the
indices of a dim that each rank has. A layout without an exact equal is therefore an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import optree

from fspmd.body import check_outside
from fspmd.cache import cached
from fspmd.entries import Entry, Factors, Flat, axes_within, blocks, entry_of, factors_of, joined
from fspmd.errors import ArgumentError, MeshError, SpecError
from fspmd.foreign import foreign_name
from fspmd.meshes.mesh import Mesh, mesh_advice
from fspmd.messages import described
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec
from fspmd.torch_internals import DisableTorchFunction, is_cut, spec_of_dtensor, strided_shard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

Cut = tuple[str, int]  # an axis, and the number of pieces of the dim that it cuts, each by itself
Runs = tuple[tuple[int, int], ...]  # indices of a dim: start and length of each run


def from_dtensor(tree: Any, *, mesh: Mesh | None = None) -> Any:
    """A pytree of ``DTensor`` as `Sharded` values with the same blocks. Nothing is copied, and nothing moves.

    ``Shard``, ``Replicate``, ``Partial("sum")`` and strided shards are converted, also uneven ones, and several on one
    dim. Leaves that are no DTensor stay as they are.

    It is differentiable, as ``to_local`` is: the gradient is a DTensor with the same placements, with ``Replicate`` in
    place of ``Partial``. To get a leaf, call ``x.detach()`` first. Backward moves nothing.

    Args:
        tree: A DTensor, or a tree of them such as a ``state_dict()``.
        mesh: A mesh of the same shape and ranks, for a DeviceMesh whose dims have no names.

    Raises:
        SpecError: a layout has no equal, such as ``Partial("max")``.
        MeshError: the DeviceMesh has no names, ``mesh`` does not agree with it, or this process is no member.

    >>> from_dtensor({"scale": 2.0})
    {'scale': 2.0}
    """
    check_outside("from_dtensor")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ArgumentError(f"from_dtensor got {described(mesh)} for mesh; make one: {mesh_advice(mesh)}")
    return optree.tree_map(lambda x: _from_dtensor(x, mesh), tree, none_is_leaf=True)


def to_dtensor(tree: Any) -> Any:
    """A pytree of `Sharded` values as ``DTensor`` with the same blocks. Nothing is copied, and nothing moves.

    An unreduced axis becomes ``Partial()``. A dim that is `Flat`, or that axes cut in another order than that of the
    mesh, becomes strided shards. Leaves that are no `Sharded` stay as they are.

    It is differentiable, as ``DTensor.from_local`` is. The gradient of the `Sharded` has its layout; DTensor moves a
    gradient with another layout.

    Raises:
        MeshError: the mesh is simulated or abstract, so that it has no process per block.
        SpecError: no DTensor has the layout, such as that of a reduced value.

    >>> import torch
    >>> from fspmd import device_put, make_mesh
    >>> to_dtensor(device_put(torch.zeros(4), P("x"), mesh=make_mesh((2,), ("x",), transport="simulation")))
    Traceback (most recent call last):
    fspmd.errors.MeshError: to_dtensor got Sharded f32[4@x] on mesh(x=2), whose ranks are simulated in this process; ...
    """
    check_outside("to_dtensor")
    return optree.tree_map(lambda x: _to_dtensor(x) if isinstance(x, Sharded) else x, tree, none_is_leaf=True)


def _from_dtensor(x: Any, mesh: Mesh | None) -> Any:
    """One leaf of `from_dtensor`."""
    name = foreign_name(x)
    if name == "ShardedTensor":
        raise SpecError("from_dtensor got a ShardedTensor, whose blocks have no layout; pass its local_tensor()")
    if not name:
        return x
    from torch.distributed.tensor import Replicate

    mesh = _mesh_of(x, mesh)
    spec = TensorSpec(mesh, _partition(x, mesh), tuple(x.shape), x.dtype)
    placements = [Replicate() if p.is_partial() else p for p in x.placements]
    local = x.to_local(grad_placements=placements)
    if hasattr(local, "trigger_wait"):  # a collective of DTensor is under way; a copy waits for it
        local = local.clone()
    if tuple(local.shape) != (expected := spec.local_shape(mesh.coordinate() or ())):
        raise SpecError(
            f"from_dtensor got {_shown(x)}, whose block has shape {tuple(local.shape)} on this rank; with that layout "
            f"it must have {expected}"
        )
    return Sharded(local, spec)


def _mesh_of(x: DTensor, mesh: Mesh | None) -> Mesh:
    """The mesh of a DTensor; ``mesh`` if it is given, which must agree."""
    device_mesh = x.device_mesh
    if mesh is None:
        mesh = Mesh.from_device_mesh(device_mesh)
    elif (
        tuple(mesh.shape.values()) != tuple(device_mesh.shape)
        or list(mesh.ranks) != device_mesh.mesh.flatten().tolist()
    ):
        raise MeshError(
            f"from_dtensor got {mesh!r} with the ranks {list(mesh.ranks)} for {device_mesh}; they must agree"
        )
    if mesh.coordinate() is None:
        raise MeshError(
            f"from_dtensor: this process is not a member of {mesh!r}; call it on members only: "
            "if device_mesh.get_coordinate() is not None: ..."
        )
    return mesh


def _shown(x: DTensor) -> str:
    return f"a DTensor of shape {tuple(x.shape)} with placements ({', '.join(map(str, x.placements))})"


def _partition(x: DTensor, mesh: Mesh) -> P:
    """The spec of a DTensor's placements.

    Raises:
        SpecError: no spec is equal.
    """
    cuts: dict[int, list[Cut]] = {}
    pending = set()
    placement: Any
    for axis, placement in zip(mesh.axis_names, x.placements, strict=True):
        kind = type(placement).__name__
        if is_cut(placement):
            cuts.setdefault(placement.dim, []).append((axis, getattr(placement, "split_factor", 1)))
        elif kind == "Partial" and placement.reduce_op == "sum":
            pending.add(axis)
        elif kind != "Replicate":
            raise SpecError(
                f"from_dtensor got {_shown(x)}: {placement!r} has no equal, since a spec knows Shard, Replicate and "
                'Partial("sum"); move it first: x.redistribute(placements=[...])'
            )
    for dim, axes in _orders(x, mesh):
        cuts[dim] = [(axis, 1) for axis in axes]
    entries: list[Entry] = [None] * x.ndim
    for dim, dim_cuts in cuts.items():
        sizes = tuple((axis, mesh.shape[axis]) for axis, _ in dim_cuts)
        entry = _entry_of_cuts(x.shape[dim], tuple(dim_cuts), sizes, _are_pieces(x))
        if entry is None:
            raise SpecError(
                f"from_dtensor got {_shown(x)}: no spec gives each rank the same indices of dim {dim}, of size "
                f"{x.shape[dim]}, or {_AMBIGUOUS}; move it first: x.redistribute(placements=[...]), or make the size "
                "divisible"
            )
        entries[dim] = entry[0]
    return P(*entries, unreduced=pending)


def _are_pieces(x: DTensor) -> bool:
    """Whether strided shards say into how many pieces they cut. In other DTensors of torch 2.13 they say in which order
    axes cut. Torch's own ``flatten`` makes the first kind, and placements that are given by hand the second."""
    return getattr(spec_of_dtensor(x), "use_strided_shard_as_shard_order", None) is False


def _orders(x: DTensor, mesh: Mesh) -> Iterator[tuple[int, list[str]]]:
    """The dims that plain shards cut in another order than that of the mesh, and the order. Some versions of torch
    have these."""
    for order in getattr(spec_of_dtensor(x), "shard_order", None) or ():
        if list(order.mesh_dims) != sorted(order.mesh_dims):
            yield order.tensor_dim, [mesh.axis_names[i] for i in order.mesh_dims]


def _to_dtensor(x: Sharded) -> Any:
    """One leaf of `to_dtensor`."""
    from torch.distributed.tensor import DTensor

    spec, mesh = x.spec, x.spec.mesh
    if mesh.transport != "process_group":
        ranks = "whose ranks are simulated in this process" if mesh.transport == "simulation" else "which has no ranks"
        raise MeshError(
            f"to_dtensor got {x!r}, {ranks}; a DTensor has a process for each block: start them with torchrun"
        )
    if spec.partition.reduced:
        raise SpecError(
            f"to_dtensor got {x!r}, which is reduced: no DTensor has a gradient that is a pending sum beside a value "
            f"that is none; cast it first: reshard(x, {P(*spec.partition, unreduced=spec.partition.unreduced)!r})"
        )
    device_mesh = mesh.to_device_mesh()
    return DTensor.from_local(
        x.local, device_mesh, _placements(x), run_check=False, shape=x.shape, stride=_global_stride(x)
    )


def _placements(x: Sharded) -> list[Placement]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    spec, mesh = x.spec, x.spec.mesh
    by_axis: dict[str, Placement] = {axis: Partial() for axis in spec.partition.unreduced}
    for dim, entry in enumerate(spec.partition):
        axes = mesh.ordered(axes_within(entry))
        cuts = _cuts_of_entry(spec.shape[dim], entry, tuple((axis, mesh.shape[axis]) for axis in axes))
        if cuts is None:
            raise SpecError(
                f"to_dtensor got {x!r}: no placements give each rank the same indices of dim {dim}, or {_AMBIGUOUS}; "
                f"move it first: reshard(x, P(...)), with {entry_of(axes)!r} for that dim"
            )
        for axis, pieces in cuts:
            by_axis[axis] = Shard(dim) if pieces == 1 else strided_shard(dim, pieces)
    return [by_axis.get(axis) or Replicate() for axis in mesh.axis_names]


def _global_stride(x: Sharded) -> tuple[int, ...]:
    """The strides of the global tensor, whose dims have the order in memory of the block's dims."""
    with DisableTorchFunction():
        block_stride = x.local.stride()
    stride, step = [1] * x.ndim, 1
    for dim in sorted(range(x.ndim), key=lambda d: (block_stride[d], -d)):
        stride[dim], step = step, step * max(x.shape[dim], 1)
    return tuple(stride)


# --- one dim: the cuts of placements, or the entry of a spec ----------------------------------------------------------

Sizes = tuple[tuple[str, int], ...]  # the axes in the order in which they cut, and their sizes


@cached
def _entry_of_cuts(size: int, cuts: tuple[Cut, ...], sizes: Sizes, are_pieces: bool) -> tuple[Entry] | None:
    """The entry, in a tuple, that gives each rank the same indices as these cuts; None if there is none."""
    axes, axis_sizes = tuple(axis for axis, _ in cuts), dict(sizes)
    if all(pieces == 1 for _, pieces in cuts):
        return (entry_of(axes),)
    candidates: list[Entry] = [entry_of(order) for order in itertools.permutations(axes)]
    if size and (factors := _factors(size, cuts, axis_sizes)) is not None:
        candidates.insert(0, joined(factors, axis_sizes))
    same = (
        e for e in candidates if _alike(size, cuts, e, sizes) and (are_pieces or not _ambiguous(size, cuts, e, sizes))
    )
    return next(((entry,) for entry in same), None)


@cached
def _cuts_of_entry(size: int, entry: Entry, sizes: Sizes) -> tuple[Cut, ...] | None:
    """The cuts by axes, one after another, that give each rank the same indices as an entry; None if there are none."""
    axis_sizes = dict(sizes)
    digits = [
        digit
        for n, axes in factors_of(entry, size)
        for digit in (*((axis_sizes[a], a) for a in axes), (max(1, -(-n // prod(axis_sizes[a] for a in axes))), ""))
    ]
    cuts = []
    for axis in axis_sizes:
        at = next(i for i, (_, name) in enumerate(digits) if name == axis)
        cuts.append((axis, prod(n for n, _ in digits[:at])))
        del digits[at]
    same = _alike(size, cuts, entry, sizes) and not _ambiguous(size, cuts, entry, sizes)
    return tuple(cuts) if same else None


_AMBIGUOUS = (
    "torch itself reads its blocks wrongly: several axes cut the dim into pieces, and full_tensor mixes them up"
)


def _ambiguous(size: int, cuts: Sequence[Cut], entry: Entry, sizes: Sizes) -> bool:
    """Whether torch 2.13 reads placements otherwise than it splits by them.

    ``full_tensor`` returns a wrong tensor for a dim whose blocks are in pieces, if several axes cut it and the blocks
    are uneven or two shards are strided.
    """
    uneven = size % prod(n for _, n in sizes)
    return isinstance(entry, Flat) and len(cuts) > 1 and bool(uneven or sum(pieces > 1 for _, pieces in cuts) > 1)


def _alike(size: int, cuts: Sequence[Cut], entry: Entry, sizes: Sizes) -> bool:
    """Whether cuts and an entry give each rank the same indices."""
    return list(_indices_of_cuts(size, cuts, dict(sizes))) == list(_indices_of_entry(size, entry, sizes))


def _factors(size: int, cuts: Iterable[Cut], axis_sizes: Mapping[str, int]) -> Factors | None:
    """The factors of the dim for which each cut is a cut of one factor; None where the sizes do not divide."""
    digits: list[tuple[int, tuple[str, ...]]] = [(size, ())]
    total = size
    for axis, pieces in cuts:
        step = -(-total // pieces)  # torch.chunk makes fewer pieces of such a length where they do not divide the dim
        at, left = 0, -(-total // step)
        total = max(1, total // axis_sizes[axis])
        while left > 1 and at < len(digits):
            n, axes = digits[at]
            ranks = prod(axis_sizes[a] for a in axes)
            length = n // ranks
            if n % ranks:
                return None
            if left % length:  # the pieces end within this factor
                if length % left:
                    return None
                digits[at : at + 1] = [(left * ranks, axes), (length // left, ())]
                length = left
            left //= length
            at += 1
        if at == len(digits):
            return None
        digits[at] = (digits[at][0], (*digits[at][1], axis))
    return tuple(digits)


def _indices_of_cuts(size: int, cuts: Sequence[Cut], axis_sizes: Mapping[str, int]) -> Iterator[Runs]:
    """The indices of each coordinate of the axes after cuts: each cuts all pieces of the indices left before it."""
    for coordinate in itertools.product(*(range(axis_sizes[axis]) for axis, _ in cuts)):
        runs: Runs = ((0, size),) if size else ()
        for index, (axis, pieces) in zip(coordinate, cuts, strict=True):
            runs = _merged(
                run for i in range(pieces) for run in _chunk(_chunk(runs, pieces, i), axis_sizes[axis], index)
            )
        yield runs


def _indices_of_entry(size: int, entry: Entry, sizes: Sizes) -> Iterator[Runs]:
    """The indices of each coordinate of the axes for a dim with an entry."""
    axis_sizes = dict(sizes)
    for coordinate in itertools.product(*(range(n) for _, n in sizes)):
        index = dict(zip(axis_sizes, coordinate, strict=True))
        runs: list[tuple[int, int]] = [(0, 1)]
        for n, axes in factors_of(entry, size):
            place = 0
            for axis in axes:
                place = place * axis_sizes[axis] + index[axis]
            start, length = blocks(n, tuple(axis_sizes[axis] for axis in axes))[place]
            runs = [(i * n + start, length) for first, count in runs for i in range(first, first + count)]
        yield _merged(runs)


def _chunk(runs: Iterable[tuple[int, int]], chunks: int, index: int) -> Runs:
    """One chunk of a list of indices, cut as ``torch.chunk`` cuts a tensor."""
    runs = tuple(runs)
    total = sum(length for _, length in runs)
    step = -(-total // chunks)
    low, high = index * step, (index + 1) * step
    chunk, before = [], 0
    for start, length in runs:
        first, last = max(low - before, 0), min(high - before, length)
        if first < last:
            chunk.append((start + first, last - first))
        before += length
    return tuple(chunk)


def _merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """The same indices in the same order, in as few runs as possible."""
    merged: list[tuple[int, int]] = []
    for start, length in runs:
        if merged and length and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        elif length:
            merged.append((start, length))
    return tuple(merged)
