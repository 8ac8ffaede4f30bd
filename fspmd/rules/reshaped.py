"""Writes that change the shape of their operand, as ``x.t_()``, and such as name a place in the global tensor."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.errors import ArgumentError, ShapeError
from fspmd.random.blocks import fill
from fspmd.random.counter import Block
from fspmd.rules.likes import Handler, settled
from fspmd.sharded import Sharded

_VIEWS: Final = ("t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze")


def _in_place(name: str, x: Any, *args: Any, **kwargs: Any) -> Any:
    """The pair becomes that of the view, which nothing moves to make; other views of it stay what they are."""
    if not isinstance(x, Sharded):
        raise ArgumentError(f"{name}_() of a plain tensor got a Sharded; write x = x.{name}(...)")
    if x.requires_grad and x.local.is_leaf and torch.is_grad_enabled():
        raise ArgumentError(
            f"{name}_() of {x!r}, a leaf that requires grad; write y = x.{name}(...), or do it under torch.no_grad()"
        )
    y = getattr(x, name)(*args, **kwargs)
    x.local, x.spec = y.local, y.spec
    return x


def _fill_diagonal(x: Any, fill_value: float, wrap: bool = False) -> Any:
    """``x.fill_diagonal_(value)``: each rank finds the diagonal in its block, and nothing moves."""
    if x.dim() < 2 or (x.dim() > 2 and len(set(x.shape)) > 1):
        raise ShapeError(f"fill_diagonal_() of {x!r}; it takes a matrix, or a tensor of more dims that are of one size")
    spec = settled(x.spec, torch.bool)
    return x.masked_fill_(fill(spec, functools.partial(_on_diagonal, wrap, x.device), x.device), fill_value)


def _on_diagonal(wrap: bool, device: torch.device, block: Block) -> Tensor:
    """Elements whose places in all dims are equal; with ``wrap`` again from each row below a square and one more."""
    places = [
        torch.arange(start, start + n, device=device).view(-1, *(1,) * (len(block.shape) - 1 - dim))
        for dim, (start, n) in enumerate(zip(block.offset, block.shape, strict=True))
    ]
    if wrap and len(places) == 2:
        places[0] = places[0] % (block.whole[1] + 1)
    found = torch.ones(block.shape, dtype=torch.bool, device=device)
    for place in places[1:]:
        found &= places[0] == place
    return found


RESHAPED: Final[dict[str, Handler]] = {
    **{f"{name}_": functools.partial(_in_place, name) for name in _VIEWS},
    "fill_diagonal_": _fill_diagonal,
}
