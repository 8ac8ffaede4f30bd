"""The routes of a ragged all-to-all: the rows for each rank, and the places of received rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fspmd.transport.carriers import as_words
from fspmd.transport.frame import Frame

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RowMap:
    """A map from packed rows to rows of a tensor: ``index`` has the row of each packed row, or -1 for none."""

    index: Tensor
    length: int  # the number of rows of the tensor
    whole: bool  # whether there is no -1
    unique: bool  # whether no row occurs twice
    same: bool = False  # whether the packed rows are the rows of the tensor, in their order

    def take(self, x: Tensor) -> Tensor:
        """Return the packed rows of ``x``, and zeros for -1."""
        if self.same:
            return x
        rows = x.index_select(0, self.index if self.whole else self.index.clamp(min=0)) if self.length else None
        if rows is None:
            return x.new_zeros((len(self.index), *x.shape[1:]))
        if self.whole:
            return rows
        return torch.where((self.index >= 0).view(-1, *(1,) * (x.ndim - 1)), rows, rows.new_zeros(()))

    def put(self, rows: Tensor) -> Tensor:
        """Return a tensor with the packed rows in their places, and zeros elsewhere. Rows for one place are added."""
        if self.same:
            return rows
        out = rows.new_zeros((self.length, *rows.shape[1:]))
        index = self.index
        if not self.whole:
            live = (index >= 0).nonzero().squeeze(1)
            index, rows = index[live], rows.index_select(0, live)
        return out.index_copy_(0, index, rows) if self.unique else out.index_add_(0, index, rows)


@dataclass(frozen=True, slots=True, eq=False)
class RankRoute:
    """The route of a rank: the rows that it packs, the counts for and from each rank of its group, and their places."""

    packs: RowMap
    sends: Sizes
    receives: Sizes
    lands: RowMap

    def pack(self, x: Tensor) -> Tensor:
        """Return the rows for all ranks of the group, ``sends`` for each. They may be the memory of ``x``."""
        return self.packs.take(as_words(x))

    def land(self, received: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the result, from the rows of all ranks of the group. It may be their memory."""
        result = self.lands.put(received)
        return result if result.dtype is dtype else result.view(dtype)


@dataclass(slots=True, eq=False)
class Routes:
    """The routes of all simulated ranks of ``frame``, or of this process.

    ``busiest`` is the most rows that a rank receives from other ranks, or sends to them. None means that the number
    depends on values.
    """

    routes: tuple[RankRoute, ...]
    frame: Frame | None = None
    busiest: int | None = None
    _transposed: Routes | None = field(default=None, repr=False)

    @property
    def transposed(self) -> Routes:
        """The routes of gradients."""
        if self._transposed is None:
            back = tuple(RankRoute(r.lands, r.receives, r.sends, r.packs) for r in self.routes)
            self._transposed = Routes(back, self.frame, self.busiest, self)
        return self._transposed


def plan_route(
    input_offsets: Sequence[int],
    send_sizes: Sequence[int],
    incoming_offsets: Sequence[int],
    recv_sizes: Sequence[int],
    rows: tuple[int, int],
    n: int,
    device: torch.device,
) -> RankRoute:
    """Return the route of a rank whose operand and result have ``rows``. Of slices that overlap the last wins."""
    each = len(send_sizes) // n
    sends, receives = (tuple(sum(s[i : i + each]) for i in range(0, len(s), each)) for s in (send_sizes, recv_sizes))
    lands = _of_slices(incoming_offsets, recv_sizes, rows[1], device)
    if not lands.unique:
        lands = _last_wins(lands)
    return RankRoute(_of_slices(input_offsets, send_sizes, rows[0], device), sends, receives, lands)


def _of_slices(starts: Sequence[int], sizes: Sequence[int], length: int, device: torch.device) -> RowMap:
    """Return the map of slices that are packed one after another, of a tensor of so many rows."""
    total, ends = 0, 0
    shifts, same, unique = [], True, True
    for start, size in zip(starts, sizes, strict=True):
        shifts.append(start - total)
        same &= not size or start == total
        total += size
    for start, size in sorted(pair for pair in zip(starts, sizes, strict=True) if pair[1]):
        unique &= start >= ends
        ends = start + size
    index = torch.arange(total)
    if not same:
        index += torch.tensor(shifts).repeat_interleave(torch.tensor(sizes))
    return RowMap(index.to(device), length, True, unique, same and total == length)


def _last_wins(lands: RowMap) -> RowMap:
    """Return the map of slices that overlap. Rows that another covers go nowhere."""
    places = lands.index.tolist()
    last = {place: i for i, place in enumerate(places)}
    kept = [place if last[place] == i else -1 for i, place in enumerate(places)]
    return RowMap(torch.tensor(kept, device=lands.index.device), lands.length, False, True)


def even_routes(lengths: Sequence[tuple[int, int]], frame: Frame | None, n: int, device: torch.device) -> Routes:
    """Return routes that send as many rows to each rank, for where nothing has values: shapes alone are right.

    ``lengths`` are the rows of operand and result of each rank. A rank sends all of its rows, of which one in n stays.
    """
    each = min(map(min, lengths)) // n
    index = torch.zeros(each * n, dtype=torch.int64, device=device)
    routes = (
        RankRoute(RowMap(index, sent, True, True), (each,) * n, (each,) * n, RowMap(index, received, True, True))
        for sent, received in lengths
    )
    return Routes(tuple(routes), frame, -(-lengths[0][0] * (n - 1) // n))


def landing_mask(route: RankRoute) -> Tensor:
    """Return the mask of the rows of the result that are received."""
    mask = torch.zeros(route.lands.length, dtype=torch.bool, device=route.lands.index.device)
    mask[route.lands.index[route.lands.index >= 0]] = True
    return mask
