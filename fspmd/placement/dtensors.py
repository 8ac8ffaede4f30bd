"""torch's DTensor to `Sharded` and back: the same block, another name for its layout.

A DTensor says for each mesh axis what it does to the tensor; a spec says for each dim which axes cut it. Both are
compared by the indices that each rank holds of a dim, so a layout without an exact equal is refused.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import optree

from fspmd.entries import Entry, Factors, Flat, axes_within, blocks, entry_of, factors_of, joined
from fspmd.errors import ArgumentError, MeshError, SpecError
from fspmd.foreign import foreign_name
from fspmd.meshes.mesh import Mesh, mesh_advice
from fspmd.messages import described
from fspmd.outside import check_outside
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec
from fspmd.torch_internals import DisableTorchFunction, strided_shard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

Cut = tuple[str, int]  # an axis, and into how many pieces the dim is cut first, each of which the axis cuts
Runs = tuple[tuple[int, int], ...]  # indices of a dim: start and length of each run


def from_dtensor(tree: Any, *, mesh: Mesh | None = None) -> Any:
    """A pytree of ``DTensor`` as `Sharded` values of the same blocks; nothing is copied, nothing moves.

    ``Shard``, ``Replicate``, ``Partial("sum")`` and strided shards have an equal, several on one dim and uneven ones
    too. Leaves that are no DTensor stay as they are.

    Args:
        tree: A DTensor, or for example a ``state_dict()``.
        mesh: For a DeviceMesh whose dims have no names: a mesh of the same shape and ranks that has.

    Differentiable as ``to_local`` is: the gradient is a DTensor with the same placements, ``Replicate`` for
    ``Partial``. ``x.detach()`` first makes a leaf. Backward moves nothing.

    Raises:
        SpecError: a layout without an equal, such as ``Partial("max")``.
        MeshError: no names, or another ``mesh``; this process is no member.

    >>> from_dtensor({"scale": 2.0})
    {'scale': 2.0}
    """
    check_outside("from_dtensor")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ArgumentError(f"from_dtensor got {described(mesh)} for mesh; make one: {mesh_advice(mesh)}")
    return optree.tree_map(lambda x: _taken(x, mesh), tree, none_is_leaf=True)


def to_dtensor(tree: Any) -> Any:
    """A pytree of `Sharded` values as ``DTensor`` of the same blocks; nothing is copied, nothing moves.

    An axis that is unreduced becomes ``Partial()``; a dim that is cut otherwise than in the order of the mesh, or is
    `Flat`, strided shards. Leaves that are no Sharded stay as they are.

    Differentiable as ``DTensor.from_local`` is: what reaches the Sharded lies as it does; where it does not DTensor
    moves it.

    Raises:
        MeshError: a simulated or abstract mesh, which has no process per block.
        SpecError: a layout that no DTensor has, such as an axis that is reduced.

    >>> import torch
    >>> from fspmd import device_put, make_mesh
    >>> to_dtensor(device_put(torch.zeros(4), P("x"), mesh=make_mesh((2,), ("x",), transport="simulation")))
    Traceback (most recent call last):
    fspmd.errors.MeshError: to_dtensor got Sharded f32[4@x] on mesh(x=2), whose ranks are simulated in this process; ...
    """
    check_outside("to_dtensor")
    return optree.tree_map(lambda x: _given(x) if isinstance(x, Sharded) else x, tree, none_is_leaf=True)


def _taken(x: Any, mesh: Mesh | None) -> Any:
    name = foreign_name(x)
    if name == "ShardedTensor":
        raise SpecError("from_dtensor got a ShardedTensor, whose blocks lie anywhere; take its local_tensor()")
    if not name:
        return x
    from torch.distributed.tensor import Replicate

    on = _mesh_of(x, mesh)
    spec = TensorSpec(on, _partition(x, on), tuple(x.shape), x.dtype)
    placements = [Replicate() if p.is_partial() else p for p in x.placements]
    local = x.to_local(grad_placements=placements)
    if hasattr(local, "trigger_wait"):  # a collective of DTensor's is under way, for which a copy waits
        local = local.clone()
    if tuple(local.shape) != (expected := spec.local_shape(on.coordinate() or ())):
        raise SpecError(
            f"from_dtensor got {_shown(x)}, whose block here has shape {tuple(local.shape)}; of that layout it would "
            f"have {expected}"
        )
    return Sharded(local, spec)


def _mesh_of(x: DTensor, mesh: Mesh | None) -> Mesh:
    theirs = x.device_mesh
    if mesh is None:
        mesh = Mesh.from_device_mesh(theirs)
    elif tuple(mesh.shape.values()) != tuple(theirs.shape) or list(mesh.ranks) != theirs.mesh.flatten().tolist():
        raise MeshError(f"from_dtensor got {mesh!r} of the ranks {list(mesh.ranks)} for {theirs}; they must agree")
    if mesh.coordinate() is None:
        raise MeshError(
            f"from_dtensor: this process is not a member of {mesh!r}; call it on members only: "
            "if device_mesh.get_coordinate() is not None: ..."
        )
    return mesh


def _shown(x: DTensor) -> str:
    return f"a DTensor of shape {tuple(x.shape)} with placements ({', '.join(map(str, x.placements))})"


def _partition(x: DTensor, mesh: Mesh) -> P:
    """The spec of a DTensor's placements; raises `SpecError` where there is none."""
    cuts: dict[int, list[Cut]] = {}
    pending = set()
    placement: Any
    for axis, placement in zip(mesh.axis_names, x.placements, strict=True):
        kind = type(placement).__name__
        if kind in ("Shard", "_StridedShard"):
            cuts.setdefault(placement.dim, []).append((axis, getattr(placement, "split_factor", 1)))
        elif kind == "Partial" and placement.reduce_op == "sum":
            pending.add(axis)
        elif kind != "Replicate":
            raise SpecError(
                f"from_dtensor got {_shown(x)}: {placement!r} has no equal, for a spec knows Shard, Replicate and "
                'Partial("sum"); move it first: x.redistribute(placements=[...])'
            )
    for dim, axes in _orders(x, mesh):
        cuts[dim] = [(axis, 1) for axis in axes]
    entries: list[Entry] = [None] * x.ndim
    for dim, found in cuts.items():
        entry = _entry_of_cuts(x.shape[dim], tuple(found), tuple((axis, mesh.shape[axis]) for axis, _ in found))
        if entry is None:
            raise SpecError(
                f"from_dtensor got {_shown(x)}: no spec gives each rank the same indices of dim {dim}, of size "
                f"{x.shape[dim]}; move it first: x.redistribute(placements=[...]), or make the size divisible"
            )
        entries[dim] = entry[0]
    return P(*entries, unreduced=pending)


def _orders(x: DTensor, mesh: Mesh) -> Iterator[tuple[int, list[str]]]:
    """Dims that plain shards cut in another order than that of the mesh; some versions of torch have these."""
    for one in getattr(x._spec, "shard_order", None) or ():
        if list(one.mesh_dims) != sorted(one.mesh_dims):
            yield one.tensor_dim, [mesh.axis_names[i] for i in one.mesh_dims]


def _given(x: Sharded) -> Any:
    from torch.distributed.tensor import DTensor

    spec, mesh = x.spec, x.spec.mesh
    if mesh.transport != "process_group":
        what = "whose ranks are simulated in this process" if mesh.transport == "simulation" else "which has no ranks"
        raise MeshError(
            f"to_dtensor got {x!r}, {what}; a DTensor has a process for each block: start them with torchrun"
        )
    if spec.partition.reduced:
        raise SpecError(
            f"to_dtensor got {x!r}: no DTensor says that a gradient is a pending sum where its value is not; cast it "
            f"first: reshard(x, {P(*spec.partition, unreduced=spec.partition.unreduced)!r})"
        )
    device_mesh = mesh.to_device_mesh()
    return DTensor.from_local(
        x.local, device_mesh, _placements(x), run_check=False, shape=x.shape, stride=_global_stride(x)
    )


def _placements(x: Sharded) -> list[Placement]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    spec, mesh = x.spec, x.spec.mesh
    found: dict[str, Placement] = {axis: Partial() for axis in spec.partition.unreduced}
    for dim, entry in enumerate(spec.partition):
        axes = mesh.ordered(axes_within(entry))
        cuts = _cuts_of_entry(spec.shape[dim], entry, tuple((axis, mesh.shape[axis]) for axis in axes))
        if cuts is None:
            raise SpecError(
                f"to_dtensor got {x!r}: no placements give each rank the same indices of dim {dim}; move it first: "
                f"reshard(x, P(...)), with {entry_of(axes)!r} for that dim"
            )
        for axis, pieces in cuts:
            found[axis] = Shard(dim) if pieces == 1 else strided_shard(dim, pieces)
    return [found.get(axis) or Replicate() for axis in mesh.axis_names]


def _global_stride(x: Sharded) -> tuple[int, ...]:
    """Of the global tensor whose dims lie in memory in the order of the block's."""
    with DisableTorchFunction():
        own = x.local.stride()
    stride, step = [1] * x.ndim, 1
    for dim in sorted(range(x.ndim), key=lambda d: (own[d], -d)):
        stride[dim], step = step, step * max(x.shape[dim], 1)
    return tuple(stride)


# --- one dim: axes in the order of the mesh and how each cuts it, or an entry -----------------------------------------

Sizes = tuple[tuple[str, int], ...]  # of the axes, in the order in which they cut


@functools.lru_cache(maxsize=4096)
def _entry_of_cuts(size: int, cuts: tuple[Cut, ...], sizes: Sizes) -> tuple[Entry] | None:
    """The entry under which each rank holds what it holds after these cuts, in a tuple; None: there is none."""
    axes, of_mesh = tuple(axis for axis, _ in cuts), dict(sizes)
    if all(pieces == 1 for _, pieces in cuts):
        return (entry_of(axes),)
    candidates: list[Entry] = [entry_of(order) for order in itertools.permutations(axes)]
    if size and (factors := _factors(size, cuts, of_mesh)) is not None:
        candidates.insert(0, joined(factors, of_mesh))
    return next(((entry,) for entry in candidates if _alike(size, cuts, entry, sizes)), None)


@functools.lru_cache(maxsize=4096)
def _cuts_of_entry(size: int, entry: Entry, sizes: Sizes) -> tuple[Cut, ...] | None:
    """How axes cut a dim one after another, for the blocks of an entry."""
    of_mesh, order = dict(sizes), [axis for axis, _ in sizes]
    digits = [
        digit
        for n, axes in factors_of(entry, size)
        for digit in (*((of_mesh[a], a) for a in axes), (max(1, -(-n // prod(of_mesh[a] for a in axes))), ""))
    ]
    cuts = []
    for axis in order:
        at = next(i for i, (_, name) in enumerate(digits) if name == axis)
        cuts.append((axis, prod(n for n, _ in digits[:at])))
        del digits[at]
    return tuple(cuts) if _alike(size, cuts, entry, sizes) else None


def _alike(size: int, cuts: Sequence[Cut], entry: Entry, sizes: Sizes) -> bool:
    """Whether each rank holds the same, and torch itself has but one reading of the cuts.

    Of a dim that several axes leave in pieces, uneven or by two strided shards, ``full_tensor`` puts together another
    tensor than was taken apart (seen in torch 2.13).
    """
    uneven = size % prod(n for _, n in sizes)
    if isinstance(entry, Flat) and len(cuts) > 1 and (uneven or sum(pieces > 1 for _, pieces in cuts) > 1):
        return False
    return list(_held_after(size, cuts, dict(sizes))) == list(_held_under(size, entry, sizes))


def _factors(size: int, cuts: Iterable[Cut], of_mesh: Mapping[str, int]) -> Factors | None:
    """What the dim is made of, so that each cut is one of a whole factor; None where sizes do not divide so."""
    digits: list[tuple[int, tuple[str, ...]]] = [(size, ())]
    for axis, pieces in cuts:
        at, left = 0, pieces
        while left > 1 and at < len(digits):
            n, axes = digits[at]
            each = prod(of_mesh[a] for a in axes)
            here = n // each
            if n % each:
                return None
            if left % here:  # the pieces end within this factor
                if here % left:
                    return None
                digits[at : at + 1] = [(left * each, axes), (here // left, ())]
                here = left
            left //= here
            at += 1
        if at == len(digits):
            return None
        digits[at] = (digits[at][0], (*digits[at][1], axis))
    return tuple(digits)


def _held_after(size: int, cuts: Sequence[Cut], of_mesh: Mapping[str, int]) -> Iterator[Runs]:
    """The indices that each coordinate of the axes holds: cut into pieces, and each of these by the axis."""
    for at in itertools.product(*(range(of_mesh[axis]) for axis, _ in cuts)):
        held: Runs = ((0, size),) if size else ()
        for index, (axis, pieces) in zip(at, cuts, strict=True):
            held = _merged(run for i in range(pieces) for run in _part(_part(held, pieces, i), of_mesh[axis], index))
        yield held


def _held_under(size: int, entry: Entry, sizes: Sizes) -> Iterator[Runs]:
    """The indices that each coordinate holds of a dim with that entry."""
    of_mesh = dict(sizes)
    for at in itertools.product(*(range(n) for _, n in sizes)):
        index = dict(zip(of_mesh, at, strict=True))
        held: list[tuple[int, int]] = [(0, 1)]
        for n, axes in factors_of(entry, size):
            place = 0
            for axis in axes:
                place = place * of_mesh[axis] + index[axis]
            start, length = blocks(n, tuple(of_mesh[axis] for axis in axes))[place]
            held = [(i * n + start, length) for first, count in held for i in range(first, first + count)]
        yield _merged(held)


def _part(runs: Iterable[tuple[int, int]], parts: int, index: int) -> Runs:
    """The same of a list of indices that ``torch.chunk`` gives of a tensor."""
    runs = tuple(runs)
    total = sum(length for _, length in runs)
    step = -(-total // parts)
    low, high = index * step, (index + 1) * step
    found, before = [], 0
    for start, length in runs:
        first, last = max(low - before, 0), min(high - before, length)
        if first < last:
            found.append((start + first, last - first))
        before += length
    return tuple(found)


def _merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """The same indices in the same order, in as few runs as can be."""
    found: list[tuple[int, int]] = []
    for start, length in runs:
        if found and length and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        elif length:
            found.append((start, length))
    return tuple(found)
