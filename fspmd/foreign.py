"""Tensors that cannot be blocks: global tensors of other libraries, and tensors that are not dense."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.errors import ArgumentError

IS: Final = "torch keeps in blocks of its own"
ADVICE: Final = "write x = fspmd.from_dtensor(x) first, a Sharded of the same blocks, for which nothing moves"
DENSE: Final = "make it dense: x.to_dense(), x.dequantize(), x.to_tensor(0.0) or torch.nested.to_padded_tensor(x, 0.0)"
NARROW: Final = "pack its elements into bytes: a torch.uint8 tensor"
_NARROW: Final = frozenset(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8))
_NAMES: Final = frozenset(("DTensor", "ShardedTensor"))  # names, so that their modules need not be imported


@cached(maxsize=1024)
def _foreign_name(kind: type) -> str:
    bases = (base for base in kind.__mro__ if base.__module__.startswith("torch.distributed."))
    return next((base.__name__ for base in bases if base.__name__ in _NAMES), "")


def foreign_name(x: Any) -> str:
    """Return ``"DTensor"`` or ``"ShardedTensor"`` for a tensor of this class, and "" for other values.

    >>> import torch
    >>> foreign_name(torch.zeros(2))
    ''
    """
    kind: Any = type(x)
    return "" if kind is Tensor else _foreign_name(kind)


def loose_kind(x: Tensor) -> str:
    """Return the kind of a tensor that is not dense, such as "sparse_coo tensor"; "" for a dense one.

    >>> import torch
    >>> loose_kind(torch.eye(2).to_sparse()), loose_kind(torch.eye(2))
    ('sparse_coo tensor', '')
    """
    if x.is_nested:
        return "nested tensor"
    if isinstance(x, torch.masked.MaskedTensor):
        return "masked tensor"
    if x.layout is not torch.strided:
        return f"{str(x.layout).removeprefix('torch.').strip('_')} tensor"
    return "quantized tensor" if x.is_quantized else ""


def misfit(x: Any) -> tuple[str, str] | None:
    """Return what is wrong with a tensor that cannot be a block, and what to write; None for any other value.

    >>> import torch
    >>> misfit(torch.eye(2))
    """
    if foreign := foreign_misfit(x):
        return foreign
    if not isinstance(x, Tensor):
        return None
    if kind := loose_kind(x):
        return f"a {kind}, which has no dense blocks", DENSE
    return (f"a {x.dtype} tensor, which torch can neither copy nor add", NARROW) if x.dtype in _NARROW else None


def refuse_misfit(x: Any, what: str) -> None:
    """Raise `ArgumentError` for a tensor that cannot be a block. ``what`` begins the message: "device_put got"."""
    _refuse(misfit(x), what)


def refuse_foreign(x: Any, what: str) -> None:
    """Raise `ArgumentError` for a DTensor or ShardedTensor. ``what`` begins the message: "device_put got"."""
    _refuse(foreign_misfit(x), what)


def foreign_misfit(x: Any) -> tuple[str, str] | None:
    """Return what a DTensor or ShardedTensor is, and what to write; None for any other value."""
    name = foreign_name(x)
    return (f"a {name} of shape {tuple(x.shape)}, which {IS}", ADVICE) if name else None


def _refuse(wrong: tuple[str, str] | None, what: str) -> None:
    if wrong is not None:
        raise ArgumentError(f"{what} {wrong[0]}; {wrong[1]}")
