"""Carriers: dtypes that travel in place of dtypes that torch or a backend cannot add, compare or move.

Sums wrap around like integers of the dtype. Maxima and minima of floats propagate nan on every backend. Those of Gloo
and NCCL may drop it, depending on the order of the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.spec import short_dtype
from fspmd.transport.pending import Pending, arrived

Reshape = Callable[[Tensor], Tensor]
R = TypeVar("R")

#: dtypes that torch only copies -> the dtype of their width as which their bits move
BITS: Final = {
    getattr(torch, name): as_dtype
    for name, as_dtype in (
        ("float4_e2m1fn_x2", torch.uint8),
        ("bits1x8", torch.uint8),
        ("bits2x4", torch.uint8),
        ("bits4x2", torch.uint8),
        ("bits8", torch.uint8),
        ("bits16", torch.int16),
    )
    if hasattr(torch, name)
}
#: BITS, and dtypes that torch does not index
_WORDS: Final = {**BITS, torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_FLOAT8: Final = frozenset(d for d in vars(torch).values() if isinstance(d, torch.dtype) and "float8" in str(d))
_WIDER: Final = {
    torch.bool: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
#: dtypes that every backend adds and compares
_PLAIN: Final = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})
#: floats that every backend adds
FLOATS: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_SIGN: Final = -(1 << 63)


def check_adds(dtype: torch.dtype, what: str, op: str = "sum") -> None:
    """Raise `ArgumentError` for a dtype without this operation, on all ranks alike."""
    if dtype in _FLOAT8 or dtype in BITS:
        raise ArgumentError(
            f"{what} of {short_dtype(dtype)}: torch does not {'add' if op == 'sum' else 'compare'} values of this "
            f"dtype; convert them and the result: {what}(x.to(torch.float32), ...).to({dtype})"
        )
    if op != "sum" and dtype.is_complex:
        raise ArgumentError(
            f"{what} of {short_dtype(dtype)}: complex numbers have no order; take the real part or abs first"
        )


def where(mask: Tensor, x: Tensor, other: Tensor) -> Tensor:
    """Return ``torch.where`` for every dtype."""
    words = _WORDS.get(x.dtype)
    if words is None:
        return torch.where(mask, x, other)
    return torch.where(mask, x.view(words), other.view(words)).view(x.dtype)


def carried(x: Tensor, op: str) -> tuple[Tensor, Reshape | None]:
    """Return ``x`` and None if every backend can reduce it, else a new contiguous carrier and the function back."""
    dtype = x.dtype
    if dtype in _PLAIN or (op in ("sum", "product") and dtype in FLOATS):
        return x, None
    check_adds(dtype, "psum" if op == "sum" else f"p{op}", op)
    if dtype in FLOATS:
        return _sortable(x, op)
    if dtype.is_complex:
        return torch.view_as_real(x.clone(memory_format=torch.contiguous_format)), torch.view_as_complex
    if dtype is torch.uint64:
        bits = x.clone(memory_format=torch.contiguous_format).view(torch.int64)
        if op == "sum":
            return bits, lambda y: y.view(torch.uint64)
        return bits ^ _SIGN, lambda y: (y ^ _SIGN).view(torch.uint64)
    wide = x.to(_WIDER[dtype], memory_format=torch.contiguous_format)
    return wide, lambda y: y.to(dtype)


def _sortable(x: Tensor, op: str) -> tuple[Tensor, Reshape]:
    """Return floats as integers of the same order, with nan as the largest (or the least), and the function back."""
    dtype = x.dtype
    wide = x.to(torch.float64 if dtype is torch.float64 else torch.float32).resolve_neg().contiguous()
    kind = torch.int64 if dtype is torch.float64 else torch.int32
    limits = torch.iinfo(kind)

    def flip(bits: Tensor) -> Tensor:  # its own inverse: negative floats descend as their bits ascend
        return bits ^ ((bits >> (limits.bits - 1)) & limits.max)

    keys = flip(wide.view(kind)).masked_fill_(wide.isnan(), limits.max if op == "max" else limits.min)
    return keys, lambda best: flip(best).view(wide.dtype).to(dtype)


def as_words(x: Tensor) -> Tensor:
    """Return ``x``, or its bits as a dtype of the same width whose rows torch can index."""
    words = torch.uint8 if x.dtype in _FLOAT8 else _WORDS.get(x.dtype)
    return x if words is None else x.view(words)


def moves_bits(kernel: Callable[..., R]) -> Callable[..., R]:
    """Make a kernel that only moves data accept the dtypes of `BITS`."""

    @functools.wraps(kernel)
    def wrapped(self: Any, x: Tensor, mesh: Any, axes: Any, o: Any) -> Any:
        bits = BITS.get(x.dtype)
        if bits is None:
            return kernel(self, x, mesh, axes, o)
        dtype = x.dtype
        moved = kernel(self, x.view(bits), mesh, axes, o)
        return moved.view(dtype) if isinstance(moved, Tensor) else Pending(moved, (), lambda y: arrived(y).view(dtype))

    return wrapped


def neutral_number(x: Tensor) -> complex:
    """Return the negative zero of the dtype of ``x``."""
    return complex(-0.0, -0.0) if x.is_complex() else -0.0


def neutral_like(x: Tensor) -> Tensor:
    """Return a tensor of negative zeros like ``x``."""
    return torch.full_like(x, neutral_number(x))
