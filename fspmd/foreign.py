"""Global tensors of other libraries. They look like a tensor of this process, but hold only a block of it."""

from __future__ import annotations

import functools
from typing import Any, Final

from torch import Tensor

from fspmd.errors import ArgumentError

IS: Final = "torch keeps in blocks of its own"
ADVICE: Final = "write x = fspmd.from_dtensor(x) first, a Sharded of the same blocks, for which nothing moves"
_NAMES: Final = frozenset(("DTensor", "ShardedTensor"))  # names, so that their modules need not be imported


@functools.lru_cache(maxsize=1024)
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


def refuse_foreign(x: Any, what: str) -> None:
    """Raise `ArgumentError` for a DTensor or ShardedTensor. ``what`` begins the message: "device_put got"."""
    if name := foreign_name(x):
        raise ArgumentError(f"{what} a {name} of shape {tuple(x.shape)}, which {IS}; {ADVICE}")
