"""Copies that stand where torch gives views: an operand was moved, or its blocks lie in memory so that they have none.

A copy must not be written into, and its operand not while the copy is alive, since neither would be seen by the other.
That is noted on the memory of both, so all that lies there tells it: views, detached tensors, other dtypes.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.errors import VarianceError
from fspmd.remembered import memory_of

_COPY: Final = "_fspmd_copy"  # on memory: what made a copy where a view should be
_COPIES: Final = "_fspmd_copies"  # on memory: the living memories of copies of it
_ROOT: Final = "_fspmd_root"  # on memory of a copy: that of which it, and the copies it is made of, should be views


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether a block is another, or a view of it or of what that views, or lies in the same memory otherwise."""
    base = x._base
    return (base is not None and (base is y or base is y._base)) or memory_of(x) is memory_of(y)


def as_copies(out: Any, x: Tensor, name: str) -> Any:
    """The results of a function, which should be views of a block, as copies of it; each in memory that is not its."""
    memory = memory_of(x)
    above: torch.UntypedStorage | None = getattr(memory, _ROOT, _no_storage)()
    root = memory if above is None else above  # an empty storage is False
    every = [out] if isinstance(out, Tensor) else out
    found = [one.clone() if memory_of(one) is memory else one for one in every]
    alive = [one for one in getattr(root, _COPIES, ()) if one() is not None]
    for one in found:
        copy = memory_of(one)
        setattr(copy, _COPY, name)
        setattr(copy, _ROOT, weakref.ref(root))
        alive.append(weakref.ref(copy))
    setattr(root, _COPIES, alive)
    return found[0] if isinstance(out, Tensor) else type(out)(found)


def _no_storage() -> None:
    return None


def _alive_copy(memory: torch.UntypedStorage) -> str | None:
    """What made a copy, still in use, that should be a view of some memory."""
    return next((getattr(one, _COPY) for ref in getattr(memory, _COPIES, ()) if (one := ref()) is not None), None)


def refuse_copy(block: Tensor, name: str) -> torch.UntypedStorage:
    """Raise `VarianceError` for a write into the memory of such a copy, or of which there is one; else give that."""
    memory = memory_of(block)
    marked = memory.__dict__
    if _COPY not in marked and _COPIES not in marked:
        return memory
    if _alive_copy(memory) is not None:
        gc.collect()  # what nothing but garbage holds is not in use, on whatever rank
    if (taken := _alive_copy(memory)) is not None:
        raise VarianceError(
            f"{name} writes into a value of which {taken}, taken before and still in use, should be a "
            "view but is a copy, since its operand was moved, or its blocks have no such view; it would not see the "
            "write: take it again after the write, keep a clone() of it, or write into a new value instead, x = x + ..."
        )
    if (made_by := marked.get(_COPY)) is not None:
        raise VarianceError(
            f"{name} writes into a copy: {made_by} gave no view, since its operand was moved, or its blocks have no "
            "such view; write into the operand itself, x[...] = value, or reshard it before the view is taken"
        )
    return memory
