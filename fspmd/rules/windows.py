"""Rows of a sharded dim for the ranks that want them: what moves in slices, shifts, borders and windows.

Each rank names the rows of the global dim that its new block is made of, in their order; -1 is a row of zeros. One
all-to-all of unequal lengths brings what it lacks. Which rows those are is known beforehand, so nothing is asked.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.body import state
from fspmd.entries import blocks, entry_axes
from fspmd.meshes.axes import row_major
from fspmd.meshes.mesh import Mesh
from fspmd.pairs import Call, apply
from fspmd.redistribution.cost import Topology, price
from fspmd.rules.bodies import Bodied, Body, BodyLayout, Site
from fspmd.spec import TensorSpec
from fspmd.torch_internals import DisableTorchFunction
from fspmd.transport import Options
from fspmd.transport.carriers import as_words
from fspmd.transport.frame import frame
from fspmd.transport.local_tensor import local_tensor
from fspmd.transport.rows import RankRoute, Routes, RowMap
from fspmd.variance import Variance, get_variance, join, set_variance

#: the global rows, of a 1-d tensor of places in a result
Places = Callable[[Tensor], Tensor]


def positions(mesh: Mesh, axes: tuple[str, ...]) -> list[int]:
    """The place along axes, the first of them major, of this process, or of each simulated rank of their frame."""
    if mesh.transport != "simulation":
        at = mesh.coordinate()
        assert at is not None
        places = [dict(zip(mesh.axis_names, at, strict=True))]
    else:
        held = frame(mesh, axes)
        places = [dict(zip(held.axes, at, strict=True)) for at in held.coordinates()]
    return [row_major([at[axis] for axis in axes], [mesh.shape[axis] for axis in axes]) for at in places]


def per_rank(site: Site, key: Any, axes: tuple[str, ...], make: Callable[[int], Tensor]) -> Tensor:
    """The tensor that each rank makes of its place along axes, in the first call; it varies over them."""

    def made() -> Tensor:
        with DisableTorchFunction(), torch.no_grad():
            shards = [make(at).to(site.mesh.device) for at in positions(site.mesh, axes)]
            if site.mesh.transport == "simulation":
                return local_tensor(shards, frame(site.mesh, axes))
            if shards[0].dim() == 1:  # rows to take
                _note_lengths([len(make(at)) for at in range(site.mesh.axis_size(axes))])
            return shards[0]

    return set_variance(site.once(key, made), Variance(varying=axes))


def _note_lengths(lengths: Sequence[int]) -> None:
    """Ranks that take more or fewer rows than others have other blocks from here on, of which some may be empty."""
    if len(set(lengths)) > 1 and state.body is not None:
        state.body.mark_uneven(0 in lengths)


def block_places(cut: Sequence[tuple[int, int]], at: int) -> Tensor:
    """The global places of a block, of (offset, length) of all."""
    start, length = cut[at]
    return torch.arange(start, start + length)


def fetched(
    site: Site,
    key: Any,
    x: Tensor,
    d: int,
    axes: tuple[str, ...],
    cut: Sequence[tuple[int, int]],
    wanted: Callable[[int], Tensor],
) -> Tensor:
    """A dim of x, ``cut`` over axes, made anew: ``wanted(at)`` are the global rows of the rank at that place.

    Backward sends each row's cotangent back, where those of rows sent more than once are added.
    """
    return exchanged(site, key, x, d, axes, lambda at: block_places(cut, at), wanted)


def exchanged(
    site: Site,
    key: Any,
    x: Tensor,
    d: int,
    axes: tuple[str, ...],
    held: Callable[[int], Tensor],
    wanted: Callable[[int], Tensor],
) -> Tensor:
    """The same of rows of which ``held(at)``, in ascending order, are those of a rank's block.

    Nothing moves where each rank has its rows already.
    """

    def made() -> Call | None:
        with DisableTorchFunction(), torch.no_grad():
            places = range(site.mesh.axis_size(axes))
            before, after = [held(at) for at in places], [wanted(at) for at in places]
            _note_lengths(list(map(len, after)))
            if not any(len(_lacked(had, rows)) for had, rows in zip(before, after, strict=True)):
                return None
            routes = tuple(_route(site, before, after, at) for at in positions(site.mesh, axes))
            busiest = _most(before, after)
        ranks = frame(site.mesh, axes) if site.mesh.transport == "simulation" else None
        return Call("ragged_all_to_all", site.mesh, axes, Options(dim=d, routes=Routes(routes, ranks, busiest)))

    call = site.once(key, made)
    if call is None:
        return _rearranged(site, key, x, d, axes, held, wanted)
    with DisableTorchFunction():
        return set_variance(apply(x, call), join(get_variance(x), Variance(varying=axes)))


def _lacked(held: Tensor, wanted: Tensor) -> Tensor:
    """The rows that a rank wants and has not."""
    return wanted[(wanted >= 0) & ~torch.isin(wanted, held)]


def _rearranged(
    site: Site,
    key: Any,
    x: Tensor,
    d: int,
    axes: tuple[str, ...],
    held: Callable[[int], Tensor],
    wanted: Callable[[int], Tensor],
) -> Tensor:
    """A dim made anew of rows that each rank has; as it is where these are its own in their order."""
    places = range(site.mesh.axis_size(axes))

    def is_same() -> bool:
        return all(torch.equal(held(at), wanted(at)) for at in places)

    if site.once((key, "same"), is_same):
        return x[...]

    def rows(at: int) -> Tensor:
        own, found = wanted(at), _found(wanted(at), held(at))[0]
        return found.where(own >= 0, len(held(at)))

    has_zeros = site.once((key, "zeros"), lambda: any(bool((wanted(at) < 0).any()) for at in places))
    bits = as_words(x)  # which torch takes by places
    out = (longer(bits, d) if has_zeros else bits).index_select(d, per_rank(site, (key, "rows"), axes, rows))
    return out if bits is x else out.view(x.dtype)


def _route(site: Site, held: Sequence[Tensor], wanted: Sequence[Tensor], at: int) -> RankRoute:
    """What the rank at a place sends and receives."""
    sent = [found[hit] for found, hit in (_found(rows, held[at]) for rows in wanted)]
    landed = [_found(wanted[at], rows)[1].nonzero().squeeze(1) for rows in held]
    packs, lands, device = torch.cat(sent), torch.cat(landed), site.mesh.device
    return RankRoute(
        RowMap(packs.to(device), len(held[at]), True, len(packs.unique()) == len(packs)),
        tuple(map(len, sent)),
        tuple(map(len, landed)),
        RowMap(lands.to(device), len(wanted[at]), True, True),
    )


def _most(held: Sequence[Tensor], wanted: Sequence[Tensor]) -> int:
    """The rows that the busiest rank receives, or sends."""
    ranks = len(held)
    holders = torch.full((max(map(_end, (*held, *wanted))) + 1,), ranks)  # behind all rows stands what is no row
    for at, rows in enumerate(held):
        holders[rows] = at
    moved = torch.stack([torch.bincount(holders[rows], minlength=ranks + 1)[:ranks] for rows in wanted])
    moved.fill_diagonal_(0)
    return int(max(moved.sum(0).max(), moved.sum(1).max()))


def _end(rows: Tensor) -> int:
    return int(rows.max()) + 1 if len(rows) else 0


def _found(rows: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """The places of rows among others, in ascending order, and which of them are there."""
    if not len(among):
        return rows, torch.zeros(len(rows), dtype=torch.bool)
    places = torch.searchsorted(among, rows).clamp(max=len(among) - 1)
    return places, among[places] == rows


def taken(site: Site, key: Any, x: Tensor, d: int, size: int, length: int, rows: Places) -> Tensor:
    """A dim of ``size`` made one of ``length`` by the rows of each place of it; sharded or whole alike."""
    axes = site.axes.get(d, ())
    if axes:
        after = site.blocks(length, d)
        return fetched(site, (key, d), x, d, axes, site.blocks(size, d), lambda at: rows(block_places(after, at)))
    index = site.once((key, d), lambda: rows(torch.arange(length)).to(site.mesh.device))
    if not site.once((key, d, "zeros"), lambda: bool((index < 0).any())):
        return x.index_select(d, index)
    return longer(x, d).index_select(d, index.where(index >= 0, size))


def moved_in_turn(site: Site, keys: Mapping[int, Any]) -> list[int]:
    """Dims that change one after another, by their names in the rule: sharded ones move while the others are short."""

    def turn(d: int) -> int:
        if site.axes.get(keys[d]):
            return 1
        return 0 if site.results[0].shape[d] < site.operands[0].shape[d] else 2

    return sorted(keys, key=turn)


def longer(x: Tensor, d: int, *, negative: bool = False) -> Tensor:
    """With one row of zeros at the end, or of `nothing`."""
    zeros = torch.zeros_like(x.narrow(d, 0, 0).sum(d, keepdim=True, dtype=x.dtype))
    signed = x.dtype.is_complex or (x.dtype.is_floating_point and x.dtype.itemsize > 1)  # torch negates no float8
    return torch.cat([x, -zeros if negative and signed else zeros], d)


def picked(site: Site, key: Any, x: Tensor, d: int, size: int, place: int) -> Tensor:
    """One row of a dim on the rank whose block it falls into, and `nothing` on the others: a pending sum."""
    axes, cut = site.axes[d], site.blocks(size, d)

    def chosen(at: int) -> Tensor:
        start, length = cut[at]
        return torch.tensor([place - start if start <= place < start + length else length])

    if any(n == 0 for _, n in cut):
        return longer(x, d, negative=True).index_select(d, per_rank(site, (key, d), axes, chosen))
    row = x.index_select(d, per_rank(site, (key, d), axes, lambda at: chosen(at).clamp(max=cut[at][1] - 1)))
    own = per_rank(site, (key, d, "own"), axes, lambda at: (chosen(at) == cut[at][1]).long())
    return longer(row, d, negative=True).index_select(d, own)


def still(body: Body) -> Bodied:
    """A body that moves nothing."""
    return _receiving(())(body)


def passing(body: Body) -> Bodied:
    """A body that receives at most a block of each operand that is sharded along the dims in question."""
    return _receiving(None)(body)


def lacking(rows: Callable[[int, int, int, int], tuple[int, int]]) -> Callable[[Body], Bodied]:
    """A body that fetches the rows that a block of places lacks: from the first up to the last, by ``rows``.

    ``rows`` is given the first and the last place, and the global sizes of the dim before and after.
    """

    def lacked(size: int, places: Sequence[int], parts: Sequence[int]) -> int | None:
        after = places[0]
        if not (size and after):
            return None
        wanted = [rows(a, a + n, size, after) if n else (0, 0) for a, n in blocks(after, parts)]
        return _busiest(blocks(size, parts), [(max(a, 0), min(b, size)) for a, b in wanted])

    return _fetching_rows(lacked)


def _longest(_: int, after: Sequence[int], parts: Sequence[int]) -> int:
    return max(length for _, length in blocks(after[0], parts))


def _of_pieces(size: int, pieces: Sequence[int], parts: Sequence[int]) -> int:
    starts = itertools.accumulate(pieces, initial=0)
    wanted = [
        [(start + a, start + a + n) for a, n in blocks(piece, parts)]
        for start, piece in zip(starts, pieces, strict=False)
    ]
    return _busiest(blocks(size, parts), *wanted)


def _fetching_rows(rows: Callable[[int, Sequence[int], Sequence[int]], int | None]) -> Callable[[Body], Bodied]:
    """A body that fetches so many rows of each dim that is cut, None where it fetches nothing.

    ``rows`` is given the size of the dim, that in each result, and into how many parts the axes cut it.
    """

    def time(layout: BodyLayout) -> float:
        x, found = layout.operands[0], 0.0
        for d in layout.whole:
            over = entry_axes(x.partition[d])
            parts = tuple(x.mesh.shape[axis] for axis in over)
            count = rows(x.shape[d], [one.shape[d] for one in layout.results], parts) if over else None
            if count:
                row = x.dtype.itemsize * prod(x.block_shape) // max(1, x.block_shape[d])
                found += _fetching(x, over, count * row, layout.topology)
        return found

    return lambda body: Bodied(body, time)


#: a body that receives at most a block of its result, which may be longer than the operand's
refilling: Final = _fetching_rows(_longest)
#: a body that gives a dim in pieces, one after another: the rows that all their blocks lack, as one exchange
in_pieces: Final = _fetching_rows(_of_pieces)


def _fetching(spec: TensorSpec, axes: tuple[str, ...], size: int, topology: Topology) -> float:
    """µs of an all-to-all in which a rank receives so many bytes; as with any of unequal lengths all send to all."""
    received = (spec.mesh.axis_size(axes) - 1, size)
    return price("ragged", spec.mesh, axes, size, size, topology, received).time


def _busiest(held: Sequence[tuple[int, int]], *wanted: Sequence[tuple[int, int]]) -> int:
    """The most rows that a rank receives, or sends: of (offset, length) of each block, and the ranges each wants."""
    received, sent = [0] * len(held), [0] * len(held)
    starts = [start for start, _ in held]
    for i, (first, last) in itertools.chain(*map(enumerate, wanted)):
        for j in range(max(0, bisect_right(starts, first) - 1), len(held)):
            if starts[j] >= last:
                break
            common = min(last, sum(held[j])) - max(first, starts[j])
            if i != j and common > 0:
                received[i] += common
                sent[j] += common
    return max(*received, *sent)


def moving(*operands: int) -> Callable[[Body], Bodied]:
    """The same, of some of its operands, by number; the others stay where they are."""
    return _receiving(operands)


def _receiving(operands: tuple[int, ...] | None) -> Callable[[Body], Bodied]:
    def time(layout: BodyLayout) -> float:
        found = 0.0
        for spec in layout.operands if operands is None else (layout.operands[i] for i in operands):
            own = tuple(a for a in layout.axes if a in spec.partition.axes)
            if own:
                size = spec.dtype.itemsize
                for length in spec.block_shape:
                    size *= length
                found += _fetching(spec, own, size, layout.topology)
        return found

    return lambda body: Bodied(body, time)
