"""Uneven blocks as padded rows of equal length, so that many leaves share one call."""

from __future__ import annotations

import torch
from torch import Tensor

from fspmd.body import Body
from fspmd.collectives.steps import Rows
from fspmd.pairs import call

Sizes = tuple[int, ...]


def gather_rows(body: Body, x: Tensor, axes: tuple[str, ...], name: str, dim: int, lengths: Sizes) -> Rows:
    """Into rows: one row for this rank's block. Back: the blocks of ``n`` rows, joined along ``dim``."""
    longest, rest = max(lengths), _without(x, dim)

    def back(rows: Tensor) -> Tensor:
        blocks = rows.reshape(len(lengths), longest, *rest).unbind()
        return torch.cat([_cut(b, 0, n) for b, n in zip(blocks, lengths, strict=True)]).movedim(0, dim)

    return Rows(call(name, body.mesh, axes), lambda leaf: _pad(leaf.movedim(dim, 0), 0, longest).reshape(1, -1), back)


def scatter_rows(body: Body, x: Tensor, axes: tuple[str, ...], name: str, dim: int, lengths: Sizes) -> Rows:
    """Into rows: one row for each block of ``dim``. Back: this rank's block, from one row."""
    longest, rest, mine = max(lengths), _without(x, dim), _position(body, axes)

    def into(leaf: Tensor) -> Tensor:
        pieces = leaf.movedim(dim, 0).split(lengths)
        return torch.stack([_pad(piece, 0, longest) for piece in pieces]).reshape(len(lengths), -1)

    def back(row: Tensor) -> Tensor:
        return _cut(row.reshape(longest, *rest), 0, lengths[mine]).movedim(0, dim)

    return Rows(call(name, body.mesh, axes), into, back)


def exchange_rows(
    body: Body, x: Tensor, axes: tuple[str, ...], dims: tuple[int, int], split: Sizes, joined: Sizes
) -> Rows:
    """Into rows: one row for each piece of the first dim. Back: the pieces of ``n`` rows, joined along the second."""
    n, mine = len(split), _position(body, axes)
    piece = max(split), max(joined)
    rest = [length for i, length in enumerate(x.shape) if i not in dims]

    def into(leaf: Tensor) -> Tensor:
        pieces = leaf.movedim(dims, (0, 1)).split(split)
        return torch.stack([_pad(_pad(p, 0, piece[0]), 1, piece[1]) for p in pieces]).reshape(n, -1)

    def back(rows: Tensor) -> Tensor:
        blocks = _cut(rows.reshape(n, *piece, *rest), 1, split[mine]).unbind()
        return torch.cat([_cut(b, 1, length) for b, length in zip(blocks, joined, strict=True)], 1).movedim(
            (0, 1), dims
        )

    return Rows(call("all_to_all", body.mesh, axes), into, back)


def _position(body: Body, axes: tuple[str, ...]) -> int:
    return int(body.transport.index(body.mesh, axes))


def _without(x: Tensor, dim: int) -> list[int]:
    return [length for i, length in enumerate(x.shape) if i != dim]


def _pad(x: Tensor, dim: int, length: int) -> Tensor:
    missing = list(x.shape)
    missing[dim] = length - x.shape[dim]
    return torch.cat([x, x.new_zeros(missing)], dim) if missing[dim] else x


def _cut(x: Tensor, dim: int, length: int) -> Tensor:
    return x.narrow(dim, 0, length)
