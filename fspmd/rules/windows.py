"""Moves of the rows of a sharded dim, for slices, shifts, borders and windows.

Each rank names the global rows of its new block, in their order; -1 is a row of zeros. One all-to-all of unequal
lengths brings the rows that it lacks. All ranks know these beforehand, so they exchange no indices.
"""

from __future__ import annotations

import functools
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
from fspmd.transport.frame import frame_over
from fspmd.transport.local_tensor import local_tensor
from fspmd.transport.rows import RankRoute, Routes, RowMap
from fspmd.variance import Variance, get_variance, join, set_variance

#: places in a result (1-d) -> global rows of the operand
Places = Callable[[Tensor], Tensor]


def positions(mesh: Mesh, axes: tuple[str, ...]) -> list[int]:
    """Return this process's place along axes (the first is major), or that of each simulated rank of their frame."""
    if mesh.transport != "simulation":
        at = mesh.coordinate()
        assert at is not None
        places = [dict(zip(mesh.axis_names, at, strict=True))]
    else:
        ranks = frame_over(mesh, axes)
        places = [dict(zip(ranks.axes, at, strict=True)) for at in ranks.coordinates()]
    return [row_major([at[axis] for axis in axes], [mesh.shape[axis] for axis in axes]) for at in places]


def per_rank(site: Site, key: Any, axes: tuple[str, ...], make: Callable[[int], Tensor]) -> Tensor:
    """Return the tensor that each rank makes of its place along axes, once per site; it varies over the axes."""

    def made() -> Tensor:
        with DisableTorchFunction(), torch.no_grad():
            shards = [make(at).to(site.mesh.device) for at in positions(site.mesh, axes)]
            if site.mesh.transport == "simulation":
                return local_tensor(shards, frame_over(site.mesh, axes))
            if shards[0].dim() == 1:  # an index of rows
                _note_lengths([len(make(at)) for at in range(site.mesh.axis_size(axes))])
            return shards[0]

    return set_variance(site.once(key, made), Variance(varying=axes))


def _note_lengths(lengths: Sequence[int]) -> None:
    """Note in the body that blocks are uneven from here on if the ranks' numbers of rows differ."""
    if len(set(lengths)) > 1 and state.body is not None:
        state.body.mark_uneven(0 in lengths)


def size_of(site: Site, d: int) -> int:
    """Return the global size of a dim of the first operand."""
    return site.operands[0].shape[d]


def block_places(cut: Sequence[tuple[int, int]], at: int) -> Tensor:
    """Return the global places of a block, given (offset, length) of all blocks."""
    start, length = cut[at]
    return torch.arange(start, start + length)


def fetched(
    site: Site,
    key: Any,
    x: Tensor,
    d: int,
    axes: tuple[str, ...],
    cut: Sequence[tuple[int, int]],
    new_rows: Callable[[int], Tensor],
) -> Tensor:
    """Move the rows of a dim of x: the rank at place ``at`` gets the global rows ``new_rows(at)``.

    ``cut`` has (offset, length) of the blocks over ``axes``. Backward sends the cotangents back, and adds up those of
    a row that was sent more than once.
    """
    return exchanged(site, key, x, d, axes, lambda at: block_places(cut, at), new_rows)


def exchanged(
    site: Site,
    key: Any,
    x: Tensor,
    d: int,
    axes: tuple[str, ...],
    old_rows: Callable[[int], Tensor],
    new_rows: Callable[[int], Tensor],
) -> Tensor:
    """Move the rows of a dim: the rank at place ``at`` has the rows ``old_rows(at)``, and gets ``new_rows(at)``.

    ``old_rows`` are in ascending order. If each rank has its new rows already, nothing moves; the result is a view of x
    if their order does not change.
    """

    def made() -> Call | None:
        with DisableTorchFunction(), torch.no_grad():
            places = range(site.mesh.axis_size(axes))
            before, after = [old_rows(at) for at in places], [new_rows(at) for at in places]
            _note_lengths(list(map(len, after)))
            if not any(len(_lacked(old, new)) for old, new in zip(before, after, strict=True)):
                return None
            routes = tuple(_route(site, before, after, at) for at in positions(site.mesh, axes))
            busiest = _most(before, after)
        ranks = frame_over(site.mesh, axes) if site.mesh.transport == "simulation" else None
        return Call("ragged_all_to_all", site.mesh, axes, Options(dim=d, routes=Routes(routes, ranks, busiest)))

    if (call := site.once(key, made)) is not None:
        with DisableTorchFunction():
            return set_variance(apply(x, call), join(get_variance(x), Variance(varying=axes)))
    places = range(site.mesh.axis_size(axes))
    if site.once((key, "same"), lambda: all(torch.equal(old_rows(at), new_rows(at)) for at in places)):
        return x[...]

    def index(at: int) -> Tensor:
        new, old = new_rows(at), old_rows(at)
        return _search(new, old)[0].where(new >= 0, len(old))

    has_zeros = site.once((key, "zeros"), lambda: any(bool((new_rows(at) < 0).any()) for at in places))
    bits = as_words(x)  # torch indexes words of all dtypes
    out = (longer(bits, d) if has_zeros else bits).index_select(d, per_rank(site, (key, "rows"), axes, index))
    return out if bits is x else out.view(x.dtype)


def _lacked(old: Tensor, new: Tensor) -> Tensor:
    """Return the new rows that a rank does not have."""
    return new[(new >= 0) & ~torch.isin(new, old)]


def _route(site: Site, old: Sequence[Tensor], new: Sequence[Tensor], at: int) -> RankRoute:
    """Return the rows that the rank at a place sends and receives, given the old and new rows of all ranks."""
    sent = [places[hit] for places, hit in (_search(rows, old[at]) for rows in new)]
    landed = [_search(new[at], rows)[1].nonzero().squeeze(1) for rows in old]
    packs, lands, device = torch.cat(sent), torch.cat(landed), site.mesh.device
    return RankRoute(
        RowMap(packs.to(device), len(old[at]), True, len(packs.unique()) == len(packs)),
        tuple(map(len, sent)),
        tuple(map(len, landed)),
        RowMap(lands.to(device), len(new[at]), True, True),
    )


def _most(old: Sequence[Tensor], new: Sequence[Tensor]) -> int:
    """Return the number of rows that the busiest rank sends or receives."""
    ranks = len(old)
    holders = torch.full((max(map(_end, (*old, *new))) + 1,), ranks)  # the last entry stands for row -1
    for at, rows in enumerate(old):
        holders[rows] = at
    moved = torch.stack([torch.bincount(holders[rows], minlength=ranks + 1)[:ranks] for rows in new])
    moved.fill_diagonal_(0)
    return int(max(moved.sum(0).max(), moved.sum(1).max()))


def _end(rows: Tensor) -> int:
    return int(rows.max()) + 1 if len(rows) else 0


def _search(rows: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place of each row in ``among``, which is in ascending order, and a mask of the rows that it has."""
    if not len(among):
        return rows, torch.zeros(len(rows), dtype=torch.bool)
    places = torch.searchsorted(among, rows).clamp(max=len(among) - 1)
    return places, among[places] == rows


def taken(site: Site, key: Any, x: Tensor, d: int, size: int, length: int, rows: Places) -> Tensor:
    """Make a dim of ``size`` one of ``length``, sharded or not: ``rows`` gives the row at each place of the result."""
    axes = site.axes.get(d, ())
    if axes:
        after = site.blocks(length, d)
        return fetched(site, (key, d), x, d, axes, site.blocks(size, d), lambda at: rows(block_places(after, at)))
    index = site.once((key, d), lambda: rows(torch.arange(length)).to(site.mesh.device))
    if not site.once((key, d, "zeros"), lambda: bool((index < 0).any())):
        return x.index_select(d, index)
    return longer(x, d).index_select(d, index.where(index >= 0, size))


def windowed(site: Site, key: str, x: Tensor, d: int, tables: Callable[[int, int], Sequence[Tensor]]) -> list[Tensor]:
    """Return the rows of the windows of a dim, in a new dim after it, and this rank's parts of further tables.

    ``tables`` takes the sizes of the dim before and after. It gives for each place of the result the rows of its
    window, and further tables.
    """
    axes, after = site.axes.get(key, ()), site.blocks(site.results[0].shape[d], key)
    size = site.operands[0].shape[d]

    def made() -> Sequence[Tensor]:
        with DisableTorchFunction():
            return tables(size, site.results[0].shape[d])

    rows, *others = site.once(("tables", d), made)

    def own(table: Tensor, at: int) -> Tensor:
        return table[block_places(after, at)]

    def first(at: int) -> int:
        return int(own(rows, at).min()) if axes and after[at][1] else 0

    def wanted(at: int) -> Tensor:
        return torch.arange(first(at), int(own(rows, at).max()) + 1) if after[at][1] else torch.arange(0)

    if axes:
        x = fetched(site, ("rows", d), x, d, axes, site.blocks(size, key), wanted)
    places = per_rank(site, ("places", d), axes, lambda at: (own(rows, at) - first(at)).flatten())
    split: Tensor = x.index_select(d, places).unflatten(d, (-1, rows.shape[1]))
    known = (per_rank(site, ("known", d, i), axes, functools.partial(own, x)) for i, x in enumerate(others))
    return [split, *known]


def moved_in_turn(site: Site, keys: Mapping[int, Any]) -> list[int]:
    """Return dims in the order in which they change, so that sharded dims move while the others are short.

    ``keys`` has the names of the dims in the rule.
    """

    def turn(d: int) -> int:
        if site.axes.get(keys[d]):
            return 1
        return 0 if site.results[0].shape[d] < site.operands[0].shape[d] else 2

    return sorted(keys, key=turn)


def longer(x: Tensor, d: int, *, negative: bool = False) -> Tensor:
    """Append a row of zeros to a dim; ``negative``: of `neutral_number`, which is -0.0 for floats."""
    zeros = torch.zeros_like(x.narrow(d, 0, 0).sum(d, keepdim=True, dtype=x.dtype))
    signed = x.dtype.is_complex or (x.dtype.is_floating_point and x.dtype.itemsize > 1)  # torch cannot negate float8
    return torch.cat([x, -zeros if negative and signed else zeros], d)


def picked(site: Site, key: Any, x: Tensor, d: int, size: int, place: int) -> Tensor:
    """Return one row of a dim on the rank whose block has it, and `neutral_number` on the others: a pending sum."""
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
    """Mark a body that moves nothing."""
    return _receiving(())(body)


def passing(body: Body) -> Bodied:
    """Price a body that receives at most a block of each operand that is cut by the axes of the whole dims."""
    return _receiving(None)(body)


def lacking(rows: Callable[[int, int, int, int], tuple[int, int]]) -> Callable[[Body], Bodied]:
    """Return a decorator for a body that fetches the rows that its block lacks.

    ``rows`` takes the first place of a block and the place after its last, and the global sizes of the dim before and
    after. It returns the range of rows that the block needs.
    """

    def lacked(size: int, places: Sequence[int], parts: Sequence[int]) -> int | None:
        after = places[0]
        if not (size and after):
            return None
        ranges = [rows(a, a + n, size, after) if n else (0, 0) for a, n in blocks(after, parts)]
        return _busiest(blocks(size, parts), [(max(a, 0), min(b, size)) for a, b in ranges])

    return _fetching_rows(lacked)


def _longest(_: int, after: Sequence[int], parts: Sequence[int]) -> int:
    return max(length for _, length in blocks(after[0], parts))


def _of_pieces(size: int, pieces: Sequence[int], parts: Sequence[int]) -> int:
    starts = itertools.accumulate(pieces, initial=0)
    ranges = [
        [(start + a, start + a + n) for a, n in blocks(piece, parts)]
        for start, piece in zip(starts, pieces, strict=False)
    ]
    return _busiest(blocks(size, parts), *ranges)


def _fetching_rows(rows: Callable[[int, Sequence[int], Sequence[int]], int | None]) -> Callable[[Body], Bodied]:
    """Return a decorator for a body that fetches a number of rows of each cut dim.

    ``rows`` takes the size of the dim, its size in each result, and the sizes of the axes that cut it. It returns the
    number of rows, or None if nothing moves.
    """

    def time(layout: BodyLayout) -> float:
        x, total = layout.operands[0], 0.0
        for d in layout.whole:
            over = entry_axes(x.partition[d])
            parts = tuple(x.mesh.shape[axis] for axis in over)
            count = rows(x.shape[d], [result.shape[d] for result in layout.results], parts) if over else None
            if count:
                row = x.dtype.itemsize * prod(x.block_shape) // max(1, x.block_shape[d])
                total += _fetching(x, over, count * row, layout.topology)
        return total

    return lambda body: Bodied(body, time)


#: prices a body that receives at most a block of its result, which may be longer than a block of the operand
refilling: Final = _fetching_rows(_longest)
#: prices a body that splits a dim into pieces: it fetches the rows that the blocks of all pieces lack in one exchange
in_pieces: Final = _fetching_rows(_of_pieces)


def _fetching(spec: TensorSpec, axes: tuple[str, ...], size: int, topology: Topology) -> float:
    """Return the µs of an all-to-all in which a rank receives ``size`` bytes; all ranks send to all."""
    received = (spec.mesh.axis_size(axes) - 1, size)
    return price("ragged", spec.mesh, axes, size, size, topology, received).time


def _busiest(cut: Sequence[tuple[int, int]], *ranges: Sequence[tuple[int, int]]) -> int:
    """Return the number of rows that the busiest rank sends or receives.

    ``cut`` has (offset, length) of each block, ``ranges`` the (first, end) of the rows that each rank needs.
    """
    received, sent = [0] * len(cut), [0] * len(cut)
    starts = [start for start, _ in cut]
    for i, (first, last) in itertools.chain(*map(enumerate, ranges)):
        for j in range(max(0, bisect_right(starts, first) - 1), len(cut)):
            if starts[j] >= last:
                break
            common = min(last, sum(cut[j])) - max(first, starts[j])
            if i != j and common > 0:
                received[i] += common
                sent[j] += common
    return max(*received, *sent)


def moving(*operands: int) -> Callable[[Body], Bodied]:
    """Return a decorator for a body that receives at most a block of each of these operands."""
    return _receiving(operands)


def _receiving(operands: tuple[int, ...] | None) -> Callable[[Body], Bodied]:
    def time(layout: BodyLayout) -> float:
        total = 0.0
        for spec in layout.operands if operands is None else (layout.operands[i] for i in operands):
            axes = tuple(axis for axis in layout.axes if axis in spec.partition.axes)
            if axes:
                size = spec.dtype.itemsize * prod(spec.block_shape)
                total += _fetching(spec, axes, size, layout.topology)
        return total

    return lambda body: Bodied(body, time)
