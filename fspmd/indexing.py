"""Indexing by a 0-d integer tensor that differs from rank to rank, such as ``x[axis_index("x")]``.

Torch would ask such an index for a Python int. Here the plain parts of the index are applied first, then the tensors
through ``aten.index``, which takes 0-d tensors as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fspmd.transport.local_tensor import LocalTensor
from fspmd.variance import get_variance

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def _differs(entry: Any) -> bool:
    return (
        isinstance(entry, Tensor)
        and entry.ndim == 0
        and entry.dtype in _INTEGERS
        and (isinstance(entry, LocalTensor) or bool(get_variance(entry).varying))
    )


def index_by_tensor(func: Any, args: tuple[Any, ...]) -> Any:
    """``x[...]`` or ``x[...] = value``."""
    x, index, *value = args
    entries = index if isinstance(index, tuple) else (index,)
    if not any(_differs(entry) for entry in entries):
        return func(*args)
    plain = tuple(slice(None) if isinstance(entry, Tensor) else entry for entry in entries)
    view = x[plain]
    tensors: list[Tensor | None] = []
    dim = 0
    for place, entry in enumerate(entries):
        if entry is Ellipsis:
            dim = view.ndim - sum(e is None or isinstance(e, (slice, Tensor)) for e in entries[place + 1 :])
        elif isinstance(entry, Tensor):
            tensors += [None] * (dim - len(tensors))
            tensors.append(entry.long() if entry.dtype in _INTEGERS else entry)
            dim += 1
        elif not isinstance(entry, int):
            dim += 1
    if value:
        source = value[0] if isinstance(value[0], Tensor) else torch.tensor(value[0], dtype=x.dtype, device=x.device)
        torch.ops.aten.index_put_(view, tensors, source)
        return None
    return torch.ops.aten.index.Tensor(view, tensors)


class IndexMode(TorchFunctionMode):
    """In an unchecked simulated body, where no tracker sees the torch calls."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ or func is Tensor.__setitem__:
            return index_by_tensor(func, args)
        return func(*args, **(kwargs or {}))
