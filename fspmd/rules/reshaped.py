"""Handlers of functions about shapes and places: ``x.t_()``, ``x.fill_diagonal_(value)``, ``x.as_strided(...)``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.errors import ArgumentError, ShapeError
from fspmd.forms import is_dense, order_in_memory
from fspmd.random.blocks import fill
from fspmd.random.counter import Block
from fspmd.rules.like_functions import Handler, settled
from fspmd.sharded import Sharded, lies, relay

_VIEWS: Final = ("t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze")


def _in_place(name: str, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Turn x into a view of itself. Nothing moves, and other views of x stay as they are."""
    if not isinstance(x, Sharded):
        raise ArgumentError(f"{name}_() of a plain tensor got a Sharded; write x = x.{name}(...)")
    if x.requires_grad and x.local.is_leaf and torch.is_grad_enabled():
        raise ArgumentError(
            f"{name}_() got {x!r}, a leaf that requires grad; write y = x.{name}(...), or call it under torch.no_grad()"
        )
    y = getattr(x, name)(*args, **kwargs)
    x.block = y.local
    relay(x, y)
    return x


def _fill_diagonal(x: Any, fill_value: float, wrap: bool = False) -> Any:
    """``x.fill_diagonal_(value)``: each rank fills the diagonal in its block, and nothing moves."""
    if x.dim() < 2 or (x.dim() > 2 and len(set(x.shape)) > 1):
        raise ShapeError(f"fill_diagonal_() got {x!r}; give it a matrix, or a tensor whose dims all have one size")
    spec = settled(x.spec, torch.bool)
    return x.masked_fill_(fill(spec, functools.partial(_on_diagonal, wrap, x.device), x.device), fill_value)


def _on_diagonal(wrap: bool, device: torch.device, block: Block) -> Tensor:
    """Return a mask of the diagonal in a block; with ``wrap`` it starts again after each square and one more row."""
    places = [
        torch.arange(start, start + n, device=device).view(-1, *(1,) * (len(block.shape) - 1 - dim))
        for dim, (start, n) in enumerate(zip(block.offset, block.shape, strict=True))
    ]
    if wrap and len(places) == 2:
        places[0] = places[0] % (block.whole[1] + 1)
    mask = torch.ones(block.shape, dtype=torch.bool, device=device)
    for place in places[1:]:
        mask &= places[0] == place
    return mask


def _as_strided(x: Any, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    """``x.as_strided(...)``: a copy of elements of x, by their places in the memory that x has in torch."""
    strides = lies(x).strides
    start = 0 if storage_offset is None else storage_offset - x.storage_offset()
    places = torch.tensor([start], device=x.device)
    for n, step in zip(size, stride, strict=True):
        places = (places[:, None] + torch.arange(n, device=x.device) * step).flatten()
    if strides is None or not is_dense(tuple(x.shape), strides):
        raise ArgumentError(
            f"as_strided() got {x!r}, which is a part of a larger memory; call it on the tensor that has all of it"
        )
    reach = [(n - 1) * step for n, step in zip(size, stride, strict=True)]
    if 0 not in size and not 0 <= start + sum(min(r, 0) for r in reach) <= start + sum(reach) < x.numel():
        raise ShapeError(
            f"as_strided({size}, {stride}, {storage_offset}) of {x!r} reaches beyond its {x.numel()} elements; call it "
            "on the tensor that has all of these elements"
        )
    return x.permute(order_in_memory(strides)).reshape(-1).index_select(0, places).reshape(size)


RESHAPED: Final[dict[str, Handler]] = {
    "as_strided": _as_strided,
    **{f"{name}_": functools.partial(_in_place, name) for name in _VIEWS},
    "fill_diagonal_": _fill_diagonal,
}
