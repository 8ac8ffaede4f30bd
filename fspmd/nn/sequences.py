"""Layouts of a sequence over ranks: which positions each rank has. Each is a permutation with its inverse.

With a causal mask the last positions see the most keys. A layout that gives each rank a share of early and of late
positions lets all ranks do the same work. Rotary embeddings, masks and losses take their positions from the layout.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Annotated, ParamSpec, TypeVar

import torch
from torch import Tensor

from fspmd.body import bound_body, resolve_axes
from fspmd.cache import cached
from fspmd.collectives import axis_index
from fspmd.entries import blocks
from fspmd.errors import ArgumentError, ShapeError
from fspmd.messages import described
from fspmd.nn.arguments import Count, Fits, Size, check_fields, checked
from fspmd.nn.masks import Mask
from fspmd.spec import P, TensorSpec
from fspmd.tracing import hidden
from fspmd.transport.local_int import block_sizes

_FEW = 1 << 16  # pairs that are looked at one by one
Axes = str | tuple[str, ...]
#: how many ranks there are, or the sizes of the axes
Ranks = Annotated[
    int | tuple[int, ...],
    Fits("the number of ranks, or the sizes of the axes", lambda x: all(type(n) is int and n > 0 for n in _sizes(x))),
]
Q = ParamSpec("Q")
R = TypeVar("R")


def names_of(axis: Axes) -> tuple[str, ...]:
    """The names of an axis or axes, as a tuple."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


def on_host(function: Callable[Q, R]) -> Callable[Q, R]:
    """A `hidden` function that makes its tensors on the CPU, also within ``with torch.device(...)``."""

    @hidden
    @functools.wraps(function)
    def run(*args: Q.args, **kwargs: Q.kwargs) -> R:
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return run


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """An order of the positions of a sequence, whose blocks lie on ``ranks`` ranks.

    Element i of the stored sequence has position ``order[i]``: int64 [S]. ``P("cp")`` cuts the stored sequence. Its
    blocks have the length ceil(S / ranks), and the last ones have the rest. Of several axes, as in ``P(("a", "b"))``,
    each cuts the blocks of the axes before it: ``ranks`` is then the tuple of their sizes. Their product will do, if S
    is a multiple of it.

    >>> layout = zigzag(8, 2)
    >>> layout.order, layout.inverse
    (tensor([0, 1, 6, 7, 2, 3, 4, 5]), tensor([0, 1, 4, 5, 6, 7, 2, 3]))
    """

    order: Tensor
    ranks: Ranks

    @on_host
    def __post_init__(self) -> None:
        order = self.order
        whole = isinstance(order, Tensor) and order.dim() == 1 and order.dtype == torch.int64
        if not whole or not torch.equal(order.sort().values, torch.arange(len(order), device=order.device)):
            raise ArgumentError(
                f"SequenceLayout got {described(order)} for order; give it each position from 0 on, once: int64 [S]"
            )
        check_fields(self)

    @property
    def length(self) -> int:
        """The length of the whole sequence."""
        return len(self.order)

    @functools.cached_property
    @on_host
    def inverse(self) -> Tensor:
        """The place of each position in the stored sequence: int64 [S]."""
        return self.order.argsort()

    @functools.cached_property
    def cuts(self) -> tuple[tuple[int, int], ...]:
        """Where the block of each rank begins in the stored sequence, and its length."""
        return blocks(self.length, _sizes(self.ranks))

    @functools.cached_property
    def block_length(self) -> int:
        """The length of the longest block."""
        return max(n for _, n in self.cuts)

    @checked
    def store(self, x: Tensor, dim: int) -> Tensor:
        """A whole sequence, which is dim ``dim`` of ``x``, in the order of this layout."""
        self._check_length(x, dim, "store")
        return x.index_select(dim, self.order.to(x.device))

    @checked
    def restore(self, x: Tensor, dim: int) -> Tensor:
        """The inverse of `store`: a stored sequence in the order of its positions.

        >>> layout, x = striped(5, 2), torch.arange(5)
        >>> layout.store(x, 0), layout.restore(layout.store(x, 0), 0)
        (tensor([0, 2, 4, 1, 3]), tensor([0, 1, 2, 3, 4]))
        """
        self._check_length(x, dim, "restore")
        return x.index_select(dim, self.inverse.to(x.device))

    def positions(self, axis: Axes) -> Tensor:
        """In a body, the positions of this rank's block: int64 [block]. Nothing moves.

        Args:
            axis: The axis, or axes, that cut the stored sequence.
        """
        sizes, length = _cut(self.length, axis, "positions")
        device = self.order.device
        starts = torch.tensor([start for start, _ in blocks(self.length, sizes)], device=device)
        return self.order[starts[axis_index(axis)] + torch.arange(length, device=device)]

    def _check_length(self, x: Tensor, dim: int, what: str) -> None:
        if not -x.dim() <= dim < x.dim():
            raise ShapeError(
                f"{what} got dim {dim} of a tensor of shape {tuple(x.shape)}; give it the dim of the sequence"
            )
        if x.shape[dim] != self.length:
            raise ShapeError(
                f"{what} got a tensor of shape {tuple(x.shape)}, whose dim {dim} is to be a sequence of the layout's "
                f"length, {self.length}; pass the whole sequence, or make a layout for {x.shape[dim]} positions"
            )

    @functools.cached_property
    @on_host
    def table(self) -> Tensor:
        """The positions by rank: int64 [ranks, block_length], with -1 beyond the end of a shorter block."""
        rows = [self.order[start : start + n] for start, n in self.cuts]
        return torch.stack([torch.nn.functional.pad(row, (0, self.block_length - len(row)), value=-1) for row in rows])

    @checked
    @on_host
    def work(self, mask: Mask) -> list[int]:
        """The number of pairs of a query and a key that each rank computes for a mask."""
        mask.check(self.length)
        return [sum(_pairs(mask, run, range(self.length)) for run in _runs(row[row >= 0])) for row in self.table]


@cached(maxsize=256)
def joined(layout: SequenceLayout, ranks: Ranks) -> SequenceLayout:
    """The same order of positions in the larger blocks of fewer ranks."""
    return SequenceLayout(layout.order, ranks)


def _cut(length: int, axis: Axes, what: str) -> tuple[tuple[int, ...], int]:
    """The sizes of the axes, and the length of this rank's block of a sequence that they cut."""
    body = bound_body(what)
    axes = resolve_axes(body, axis, what)
    block: int = block_sizes(TensorSpec(body.mesh, P(axes), (length,), torch.int64))[0]
    return body.sizes(axes), block


@checked
@cached(maxsize=256)
@on_host
def contiguous(length: Count, ranks: Ranks) -> SequenceLayout:
    """Each rank has consecutive positions.

    >>> contiguous(6, 2).table
    tensor([[0, 1, 2],
            [3, 4, 5]])
    """
    return SequenceLayout(torch.arange(length), ranks)


@checked
@cached(maxsize=256)
@on_host
def striped(length: Count, ranks: Ranks) -> SequenceLayout:
    """Neighbouring positions are on neighbouring ranks (Brandon et al., "Striped Attention", 2023).

    Where the length is no multiple of the ranks, a rank whose block is full is passed over.

    >>> striped(6, 2).table
    tensor([[0, 2, 4],
            [1, 3, 5]])
    """
    room = [n for _, n in blocks(length, _sizes(ranks))]
    rows: list[list[int]] = [[] for _ in room]
    position = 0
    while position < length:
        for row, n in zip(rows, room, strict=True):
            if len(row) < n and position < length:
                row.append(position)
                position += 1
    return _of_rows(rows, ranks)


@checked
@cached(maxsize=256)
@on_host
def zigzag(length: Count, ranks: Ranks) -> SequenceLayout:
    """Rank r has part r and part 2 * ranks - 1 - r of the sequence, so that all ranks have the same causal work.

    >>> zigzag(8, 2).table
    tensor([[0, 1, 6, 7],
            [2, 3, 4, 5]])
    """
    room = [n for _, n in blocks(length, _sizes(ranks))]
    rows: list[list[int]] = [[] for _ in room]
    position = 0
    parts = [(r, -(-n // 2)) for r, n in enumerate(room)] + [(r, n // 2) for r, n in reversed([*enumerate(room)])]
    for r, n in parts:
        rows[r] += range(position, position + n)
        position += n
    return _of_rows(rows, ranks)


@checked
@on_host
def balanced(length: Count, ranks: Ranks, mask: Mask, parts: Size = 16) -> SequenceLayout:
    """A layout whose ranks compute about as many pairs of a mask each.

    The sequence is cut into ``parts`` parts per rank. The part with the most pairs goes to the rank that has the
    fewest.

    Raises:
        ShapeError: The length is no multiple of ``ranks * parts``.

    >>> from fspmd.nn import Causal, Documents
    >>> causal_in_documents = Causal() & Documents(torch.tensor([0] * 6 + [1] * 10))
    >>> balanced(16, 2, causal_in_documents, 4).work(causal_in_documents)
    [40, 36]
    """
    ranks = prod(_sizes(ranks))
    mask.check(length)
    if length % (ranks * parts):
        raise ShapeError(
            f"balanced got a sequence of {length} for {ranks} ranks with {parts} parts each; the length must be a "
            f"multiple of {ranks * parts}: pad the sequence, or pass fewer parts"
        )
    n = length // (ranks * parts)
    work = [_pairs(mask, range(p * n, p * n + n), range(length)) for p in range(ranks * parts)]
    queue, rows = [(0, r) for r in range(ranks)], [list[int]() for _ in range(ranks)]
    for part in sorted(range(len(work)), key=lambda part: -work[part]):
        done, r = heapq.heappop(queue)
        rows[r].append(part)
        if len(rows[r]) < parts:
            heapq.heappush(queue, (done + work[part], r))
    return _of_rows([[p * n + i for p in sorted(row) for i in range(n)] for row in rows], ranks)


def _pairs(mask: Mask, queries: range, keys: range) -> int:
    """The number of pairs that a mask allows. Ranges are halved as long as the mask says nothing of all their pairs."""
    if not (queries and keys):
        return 0
    seen = mask.over(queries, keys)
    if seen is not None:
        return len(queries) * len(keys) * seen
    if len(queries) * len(keys) <= _FEW:
        return int(
            mask.allows(torch.arange(len(queries))[:, None] + queries[0], torch.arange(len(keys)) + keys[0]).sum()
        )
    longer = max(queries, keys, key=len)
    halves = longer[: len(longer) // 2], longer[len(longer) // 2 :]
    return sum(_pairs(mask, queries, half) if longer is keys else _pairs(mask, half, keys) for half in halves)


def _runs(positions: Tensor) -> list[range]:
    """The runs of consecutive positions."""
    ordered = positions.sort().values
    runs = ordered.tensor_split((ordered.diff() != 1).nonzero().flatten() + 1)
    return [range(int(run[0]), int(run[-1]) + 1) for run in runs if len(run)]


def _of_rows(rows: list[list[int]], ranks: Ranks) -> SequenceLayout:
    return SequenceLayout(torch.tensor([p for row in rows for p in row], dtype=torch.int64), ranks)


def _sizes(ranks: Ranks) -> tuple[int, ...]:
    return ranks if isinstance(ranks, tuple) else (ranks,)
