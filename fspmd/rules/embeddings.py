"""Embeddings as calls of other functions, where torch's own cannot run on blocks, or an option is about gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn import functional as F

from fspmd.errors import ArgumentError
from fspmd.ops.linearity import argument
from fspmd.sharded import Sharded


def _renormed(
    places: Any,
    table: Any,
    padding_idx: Any = None,
    max_norm: float = 1.0,
    norm_type: float = 2.0,
    *args: Any,
    **kw: Any,
) -> Any:
    """``F.embedding`` with ``max_norm``: first scales down the rows that are looked up, in place."""
    with torch.no_grad():
        norms = torch.linalg.vector_norm(table, norm_type, dim=1)
        used = torch.zeros_like(norms, dtype=torch.bool).index_fill(0, places.flatten(), True)
        table.mul_(torch.where(used & (norms > max_norm), max_norm / (norms + 1e-7), 1.0)[:, None])
    return F.embedding(places, table, padding_idx, None, norm_type, *args, **kw)


def _indexed(places: Any, table: Any, padding_idx: Any = None, *_: Any, **__: Any) -> Any:
    """``F.embedding`` as an index of the table, where some block is empty.

    torch's own has no second derivatives without indices, and on a GPU its gradient writes past a table of no columns.
    """
    ints, rows = (torch.empty(x.shape, dtype=x.dtype, device="meta") for x in (places, table))
    F.embedding(ints, rows, padding_idx)  # raises what torch does
    size = table.shape[0]
    padding = None if padding_idx is None else places == padding_idx % size
    out = table[(torch.where(places < 0, size, places),)]  # a negative index is out of range
    return out if padding is None else torch.where(padding[..., None], out.detach(), out)


def _torch_indexed(weight: Any, indices: Any, padding_idx: int = -1, *_: Any, **__: Any) -> Any:
    """``torch.embedding`` for `_indexed`."""
    return _indexed(indices, weight, padding_idx if padding_idx >= 0 else None)


def _scaled(
    places: Any,
    table: Any,
    padding_idx: int | None = None,
    max_norm: None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """``F.embedding`` with options of the gradient.

    With ``scale_grad_by_freq`` the gradient of a row is divided by the number of its look-ups on all ranks.
    """
    followed = torch.is_grad_enabled() and table.requires_grad
    if sparse:
        _refuse_sparse_gradient("embedding", table)
    out = F.embedding(places, table, padding_idx)
    if not scale_grad_by_freq or not followed:
        return out
    with torch.no_grad():
        counts = torch.zeros_like(table[:, 0], dtype=torch.int64)
        counts = counts.index_put((places,), torch.ones_like(counts[0]), accumulate=True)[(places,)]
    out = out.clone()
    out.register_hook(lambda gradient: gradient / counts[..., None])
    return out


def _refuse_sparse_gradient(name: str, table: Any) -> None:
    if torch.is_grad_enabled() and table.requires_grad:
        raise ArgumentError(
            f"{name}() got sparse=True for {table!r}, but gradients of Sharded values are dense; leave sparse=True "
            "out, or give it a weight that requires no gradient"
        )


def _sparse_bag(places: Any, table: Any, *args: Any, sparse: bool = True, **kwargs: Any) -> Any:
    """``F.embedding_bag`` with ``sparse=True``, which is about gradients and is refused if there are any."""
    _refuse_sparse_gradient("embedding_bag", table)
    return F.embedding_bag(places, table, *args[:5], *(False for _ in args[5:6]), *args[6:], **kwargs)


def _torch_sparse_bag(table: Any, places: Any, *args: Any, sparse: bool = True, **kwargs: Any) -> Any:
    """``torch.embedding_bag`` for `_sparse_bag`."""
    _refuse_sparse_gradient("embedding_bag", table)
    return torch.embedding_bag(table, places, *args[:3], *(False for _ in args[3:4]), *args[4:], **kwargs)


def _torch_scaled(weight: Any, indices: Any, padding_idx: int = -1, *options: Any, **named: Any) -> Any:
    """``torch.embedding`` for `_scaled`."""
    return _scaled(indices, weight, padding_idx if padding_idx >= 0 else None, None, 2.0, *options, **named)


def _embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    if func is F.embedding and argument(args, kwargs, 3, "max_norm", None) is not None:
        return _renormed
    indexed, scaled, options = (_indexed, _scaled, 5) if func is F.embedding else (_torch_indexed, _torch_scaled, 3)
    if any(args[options:]) or kwargs.get("scale_grad_by_freq") or kwargs.get("sparse"):
        return scaled
    operands = (*args[:2], *kwargs.values())
    # if some rank has no indices, or nothing of the table
    return indexed if any(isinstance(x, Sharded) and x.spec.thinnest == 0 for x in operands) else None


def _bag(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    place, sparse = (7, _sparse_bag) if func is F.embedding_bag else (5, _torch_sparse_bag)
    return sparse if argument(args, kwargs, place, "sparse", False) else None


#: torch function -> its composite for the arguments of a call, or None
EMBEDDINGS: Final[dict[Any, Callable[..., Callable[..., Any] | None]]] = {
    **dict.fromkeys((F.embedding, torch.embedding), _embedding),
    **dict.fromkeys((F.embedding_bag, torch.embedding_bag), _bag),
}
