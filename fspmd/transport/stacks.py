"""Blocks of one dim stacked along a new leading dim, one per rank. Uneven blocks are padded to the longest."""

from __future__ import annotations

import torch
from torch import Tensor

from fspmd.transport.rows import Sizes


def stack(x: Tensor, dim: int, sizes: Sizes | None, n: int) -> Tensor:
    """``[..., n * b, ...] -> [n, ..., b, ...]``, where ``sizes`` has the lengths of uneven blocks.

    >>> stack(torch.arange(5), 0, (3, 2), 2)
    tensor([[0, 1, 2],
            [3, 4, 0]])
    """
    if sizes is not None:
        longest = max(sizes)
        return torch.stack([padded(block, dim, longest) for block in x.split(sizes, dim)])
    blocks: Tensor = x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0)
    return blocks


def unstack(blocks: Tensor, dim: int, sizes: Sizes | None) -> Tensor:
    """``[n, ..., b, ...] -> [..., n * b, ...]``, without the padding of uneven blocks.

    >>> unstack(torch.tensor([[0, 1, 2], [3, 4, 0]]), 0, (3, 2))
    tensor([0, 1, 2, 3, 4])
    """
    if sizes is not None:
        return torch.cat([block.narrow(dim, 0, length) for block, length in zip(blocks, sizes, strict=True)], dim)
    joined: Tensor = blocks.movedim(0, dim).flatten(dim, dim + 1)
    return joined


def padded(x: Tensor, dim: int, length: int) -> Tensor:
    """Return ``x`` with zeros at the end of a dim, which then has this length."""
    if x.shape[dim] == length:
        return x
    missing = list(x.shape)
    missing[dim] = length - x.shape[dim]
    zeros = x.new_zeros(missing)
    if x.ndim > 1:
        return torch.cat([x, zeros], dim)
    # of 1-d tensors torch.cat leaves out those that are empty, so a gradient of theirs would have no graph
    return torch.cat([x[:, None], zeros[:, None]]).squeeze(1)
