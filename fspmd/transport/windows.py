"""The plan of a reblock: the parts of a tensor that each rank lacks, and their holders, on one mesh or two.

A *window* is the part of the global tensor that a rank holds: ``(start, length)`` per dim.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.entries import block_at, blocks
from fspmd.meshes.axes import row_major
from fspmd.meshes.mesh import Mesh
from fspmd.spec import TensorSpec
from fspmd.tracing import unseen

Coordinate = tuple[int, ...]
Window = tuple[tuple[int, int], ...]
Index = tuple[Any, ...]  # an Ellipsis for the dims of a batch in front, and a slice per dim


class Part(NamedTuple):
    """A part that a rank takes from a holder: its place in the holder's block, and in the new block."""

    holder: int  # global rank
    here: Index
    there: Index


class Traffic(NamedTuple):
    """The most that any rank receives: messages, and elements."""

    messages: int
    elements: int


@dataclass(frozen=True, slots=True)
class Regroup:
    """A view of the blocks of one layout as those of another, whose dims are products of its dims, or factors."""

    source: TensorSpec
    target: TensorSpec

    @property
    def transposed(self) -> Regroup:
        """The view of gradients."""
        return Regroup(self.target, self.source)

    def view(self, x: Tensor, at: Coordinate) -> Tensor:
        """View the block at a coordinate. It may have the dims of a batch in front."""
        return x.reshape((*x.shape[: x.ndim - self.source.ndim], *self.target.local_shape(at)))


@dataclass(frozen=True, slots=True)
class Reblock:
    """A move from the blocks of one layout to those of another layout of the same tensor.

    Pending sums stay pending: each rank takes the parts that it lacks from ranks that hold the same term.
    """

    source: TensorSpec
    target: TensorSpec

    @property
    def transposed(self) -> Reblock:
        """The move of gradients."""
        return Reblock(self.target.dual, self.source.dual)

    @property
    def across(self) -> bool:
        """Whether the move leads to another mesh."""
        return self.source.mesh != self.target.mesh

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which data may move: those of each dim from the first that differs on. () across meshes."""
        return () if self.across else _moving(self.source, self.target)

    @property
    def carries(self) -> bool:
        """Whether the pending sums of both layouts lie on the same ranks."""
        source, target = self.source, self.target
        if not self.across:
            return (source.partition.unreduced, source.partition.reduced) == (
                target.partition.unreduced,
                target.partition.reduced,
            )
        bare = not any(p.unreduced or p.reduced for p in (source.partition, target.partition))
        if bare:
            return True
        if set(source.mesh.ranks) != set(target.mesh.ranks):
            return False
        pairs = ((source.mesh.coordinate(rank), target.mesh.coordinate(rank)) for rank in source.mesh.ranks)
        return all(_terms(source, a) == _terms(target, b) for a, b in pairs if a is not None and b is not None)


@cached(maxsize=8192)
def _moving(source: TensorSpec, target: TensorSpec) -> tuple[str, ...]:
    moving = set[str]()
    for now, then in zip(source.partition.dim_axes, target.partition.dim_axes, strict=True):
        if now != then:
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(now, then, strict=False)))
            moving.update(now[same:], then[same:])
    return source.mesh.ordered(moving)


def coordinates(mesh: Mesh, axes: frozenset[str] | None = None) -> Iterator[Coordinate]:
    """Return every coordinate of a mesh, row-major, or with ``axes`` those that are zero along all other axes."""
    spans = (range(n) if axes is None or axis in axes else range(1) for axis, n in mesh.shape.items())
    return itertools.product(*spans)


def window(spec: TensorSpec, at: Coordinate) -> Window:
    """Return the window of the rank at a coordinate."""
    return tuple([block_at(size, parts, [at[i] for i in places]) for size, parts, places in _cuts(spec)])


@cached
def _cuts(spec: TensorSpec) -> tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]:
    """Return for each dim its size, and the sizes and the places in the mesh of the axes that cut it."""
    names, sizes = spec.mesh.axis_names, spec.mesh.shape
    return tuple(
        [
            (size, tuple([sizes[axis] for axis in axes]), tuple([names.index(axis) for axis in axes]))
            for size, axes in zip(spec.shape, spec.partition.dim_axes, strict=True)
        ]
    )


def lacking(source: TensorSpec, target: TensorSpec) -> int:
    """Return the elements that the last rank of a mesh lacks of its new block. The busiest rank lacks no fewer."""
    needed = _last_window(target)
    common = _meet(_last_window(source), needed)
    return prod([length for _, length in needed]) - (prod([n for _, n in common]) if common is not None else 0)


@cached(maxsize=8192)
def _last_window(spec: TensorSpec) -> Window:
    return window(spec, tuple([n - 1 for n in spec.mesh.shape.values()]))


def _meet(a: Window, b: Window) -> Window | None:
    """Return the intersection of two windows, or None if it is empty."""
    common = []
    for (start, length), (other, extent) in zip(a, b, strict=True):
        begin, end = max(start, other), min(start + length, other + extent)
        if begin >= end:
            return None
        common.append((begin, end - begin))
    return tuple(common)


def _within(part: Window, whole: Window) -> Index:
    """Return the index of a window within a block."""
    starts = [start - origin for (start, _), (origin, _) in zip(part, whole, strict=True)]
    return ..., *(slice(start, start + length) for start, (_, length) in zip(starts, part, strict=True))


def _terms(spec: TensorSpec, at: Coordinate) -> tuple[int, ...]:
    """Return the number of the term that a rank holds of a pending sum, and of the term of its gradient."""
    index, sizes = dict(zip(spec.mesh.axis_names, at, strict=True)), spec.mesh.shape
    both = map(spec.mesh.ordered, (spec.partition.unreduced, spec.partition.reduced))
    return tuple(row_major([index[axis] for axis in axes], [sizes[axis] for axis in axes]) for axes in both)


def _group(move: Reblock, spec: TensorSpec, at: Coordinate) -> tuple[int, ...]:
    """Return the key of a rank's group. Only ranks of one group send parts to each other."""
    if move.across:
        return _terms(spec, at)
    moving = move.axes
    return tuple(i for axis, i in zip(spec.mesh.axis_names, at, strict=True) if axis not in moving)


@cached(maxsize=1024)
def _holders(move: Reblock) -> dict[tuple[int, ...], dict[Window, list[int]]]:
    """Return for each group the ranks that hold each window of the source."""
    source = move.source
    holders: dict[tuple[int, ...], dict[Window, list[int]]] = {}
    for at in coordinates(source.mesh):
        windows = holders.setdefault(_group(move, source, at), {})
        windows.setdefault(window(source, at), []).append(source.mesh.rank_at(at))
    return holders


@cached(maxsize=8192)
def parts(move: Reblock, at: Coordinate) -> tuple[Part, ...]:
    """Return the parts of the new block of the rank at a coordinate of the target's mesh.

    The rank takes a part from itself if it can. Of several ranks that hold a part, neighbours take different holders.
    """
    target = move.target
    rank, needed = target.mesh.rank_at(at), window(target, at)
    result = []
    for box, ranks in _holders(move)[_group(move, target, at)].items():
        if (common := _meet(box, needed)) is not None:
            holder = rank if rank in ranks else ranks[rank % len(ranks)]
            result.append(Part(holder, _within(common, box), _within(common, needed)))
    return tuple(result)


@cached(maxsize=8192)
def traffic(move: Reblock) -> Traffic:
    """Return the traffic of the busiest rank, without a list of all parts."""
    if move.across:
        return _traffic_across(move)
    source, target = move.source, move.target
    # where blocks are even, ranks that differ only along other axes receive equally much
    even = source.even and target.even
    axes = frozenset(move.axes) if even else source.partition.axes | target.partition.axes
    dims = zip(target.shape, source.partition.dim_axes, target.partition.dim_axes, strict=True)
    with unseen():
        size = own = count = torch.ones((), dtype=torch.int64, device="cpu")
        for whole, kept, pieces in (_rows(target.mesh, axes, *dim) for dim in dims):
            size, own, count = size * whole, own * kept, count * pieces
        received = torch.where(size > own, count - (own > 0).long(), 0)
        return Traffic(int(received.max()), int((size - own).max()))


@cached
def _rows(
    mesh: Mesh, axes: frozenset[str], size: int, before: tuple[str, ...], after: tuple[str, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Count for ranks along ``axes`` the rows of a dim that each needs, those that it has, and their pieces."""
    sizes, names = mesh.shape, mesh.axis_names
    some = tuple([slice(None if axis in axes else 1) for axis in names])
    (have, origins, ends), (need, starts, stops) = (
        (
            _places(tuple(sizes.values()), tuple([names.index(axis) for axis in cut]))[some],
            *_pieces(size, tuple([sizes[axis] for axis in cut])),
        )
        for cut in (before, after)
    )
    begins = origins[origins < ends].unique()
    touched = torch.searchsorted(begins, stops) - torch.searchsorted(begins, starts, right=True) + 1
    common = torch.minimum(ends[have], stops[need]) - torch.maximum(origins[have], starts[need])
    return (stops - starts)[need], common.clamp(min=0), touched[need]


def _traffic_across(move: Reblock) -> Traffic:
    """Return `traffic` from one mesh to another, rank by rank."""
    starts = _starts(move.source)
    messages = elements = 0
    for at in coordinates(move.target.mesh):
        mine, own, lacks = _received(move, at)
        if lacks:
            pieces = prod([_touched(begins, *span) for begins, span in zip(starts, mine, strict=True)])
            messages, elements = max(messages, pieces - (own is not None)), max(elements, lacks)
    return Traffic(messages, elements)


@cached(maxsize=256)
def _places(sizes: tuple[int, ...], cut: tuple[int, ...]) -> Tensor:
    """Return the index of each rank along some axes, major first. It has a dim per mesh axis, of size 1 for others."""
    place = torch.zeros((1,) * len(sizes), dtype=torch.int64, device="cpu")
    for i in cut:
        along = [-1 if k == i else 1 for k in range(len(sizes))]
        place = place * sizes[i] + torch.arange(sizes[i], device="cpu").view(along)
    return place


@cached(maxsize=256)
def _pieces(size: int, cuts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the starts and the ends of the pieces of a dim."""
    starts, lengths = torch.tensor([[0], [size]], device="cpu")
    for n in cuts:  # as `blocks` does
        steps = -(-lengths // n)
        begins = torch.minimum(steps[:, None] * torch.arange(n, device="cpu"), lengths[:, None])
        starts, lengths = starts[:, None] + begins, torch.minimum(steps[:, None], lengths[:, None] - begins)
        starts, lengths = starts.flatten(), lengths.flatten()
    return starts, starts + lengths


@cached(maxsize=8192)
def is_idle(move: Reblock) -> bool:
    """Return whether no rank lacks elements."""
    return not traffic(move).elements


def _received(move: Reblock, at: Coordinate) -> tuple[Window, Window | None, int]:
    """Return the new window of a rank, the part of it that the rank holds, and the number of elements that it lacks."""
    source, target = move.source, move.target
    mine = window(target, at)
    size = prod([length for _, length in mine])
    if not size:
        return mine, None, 0
    before = source.mesh.coordinate(target.mesh.rank_at(at))
    own = None
    if before is not None and _group(move, source, before) == _group(move, target, at):
        own = _meet(window(source, before), mine)
    return mine, own, size - (prod([length for _, length in own]) if own is not None else 0)


@cached(maxsize=1024)
def _starts(spec: TensorSpec) -> tuple[tuple[int, ...], ...]:
    """Return for each dim the starts of its pieces that are not empty."""
    return tuple(tuple(sorted({start for start, n in blocks(size, parts) if n})) for size, parts, _ in _cuts(spec))


def _touched(starts: tuple[int, ...], start: int, length: int) -> int:
    """Return how many pieces of a dim a span meets."""
    return bisect_left(starts, start + length) - bisect_right(starts, start) + 1


class Flow(NamedTuple):
    """The part of a process in a reblock: its peers, and the parts that it sends, keeps and receives."""

    peers: tuple[int, ...]  # global ranks, ascending, including this process
    sends: tuple[tuple[Index, ...], ...]  # for each peer, places in the present block
    receives: tuple[tuple[Part, ...], ...]  # from each peer
    shape: tuple[int, ...] | None  # of the new block; None if the process is not a member of the target's mesh


@cached(maxsize=2048)
def flow(move: Reblock, rank: int) -> Flow:
    """Return the flow of a global rank."""
    source, target = move.source, move.target
    at = target.mesh.coordinate(rank)
    if move.across:
        peers = tuple(sorted({*source.mesh.ranks, *target.mesh.ranks}))
    else:
        peers = tuple(sorted(target.mesh.group_ranks(move.axes)))
    wanted = {}
    for peer in peers:
        there = target.mesh.coordinate(peer)
        wanted[peer] = () if there is None else parts(move, there)
    sends = tuple(tuple(p.here for p in wanted[peer] if p.holder == rank) for peer in peers)
    receives = tuple(tuple(p for p in wanted[rank] if p.holder == peer) for peer in peers)
    return Flow(peers, sends, receives, None if at is None else target.local_shape(at))
