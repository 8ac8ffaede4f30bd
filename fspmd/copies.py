"""Copies where torch gives views: the operand was moved, or its blocks have no such view in memory.

A write into a copy is refused, and so is a write into its operand while the copy is alive: the other of the two would
not see the write. Both are noted on the storage, so that views, detached tensors and other dtypes of it are covered.
One write is right as it is: that of ``x[i] += y``, since Python stores the result into ``x[i]``.
"""

from __future__ import annotations

import gc
import weakref
from types import CodeType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fspmd.errors import VarianceError
from fspmd.remembered import memory_of
from fspmd.user_code import augmented_items, place_of_call

_COPY: Final = "_fspmd_copy"  # on the storage of a copy: its `_Copy`
_COPIES: Final = "_fspmd_copies"  # on a storage: weak references to the storages of its copies


class _Copy(NamedTuple):
    name: str  # the function that made it
    root: weakref.ref[torch.UntypedStorage]  # what it, or the copy that it is a copy of, should view
    read: tuple[CodeType | None, int]  # where it was made


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Return whether two blocks lie in the same memory, as views of one tensor or otherwise."""
    if not (x.layout is y.layout is torch.strided):
        return False
    base = x._base
    return (base is not None and (base is y or base is y._base)) or memory_of(x) is memory_of(y)


def as_copies(out: Any, x: Tensor, name: str) -> Any:
    """Return the results of the function ``name``, which should be views of ``x``, as copies with own memory."""
    memory = memory_of(x)
    parent: _Copy | None = getattr(memory, _COPY, None)
    above = None if parent is None else parent.root()
    root = memory if above is None else above  # not `or`: an empty storage is False
    results = [out] if isinstance(out, Tensor) else out
    copies = [y.clone() if memory_of(y) is memory else y for y in results]
    alive = [ref for ref in getattr(root, _COPIES, ()) if ref() is not None]
    made = _Copy(name, weakref.ref(root), place_of_call())
    for copy in copies:
        storage = memory_of(copy)
        setattr(storage, _COPY, made)
        alive.append(weakref.ref(storage))
    setattr(root, _COPIES, alive)
    return copies[0] if isinstance(out, Tensor) else type(out)(copies)


def _alive_copy(memory: torch.UntypedStorage) -> str | None:
    """Return the name of the function that made the latest copy of a storage that is still in use.

    An earlier copy may be in use on some ranks alone, where a block without elements keeps nothing.
    """
    copies = (ref() for ref in reversed(getattr(memory, _COPIES, ())))
    return next((getattr(copy, _COPY).name for copy in copies if copy is not None), None)


def _is_stored_back(code: CodeType | None, place: int) -> bool:
    """Return whether the caller runs the ``+=`` of an ``x[i] += y``, and has read ``x[i]`` at this place.

    A container of another type, which reads a Sharded by C code alone, cannot be told from the Sharded:
    ``defaultdict(partial(operator.getitem, x, i))[0] += y`` writes into the container.
    """
    now, there = place_of_call()
    return now is code is not None and any(place in read and there in add for read, add in augmented_items(code))


def refuse_copy(block: Tensor, name: str) -> torch.UntypedStorage:
    """Return the storage of a block that ``name`` writes into.

    Raises:
        VarianceError: The block is a copy that should be a view, or such a copy of it is in use.
    """
    memory = memory_of(block)
    marked = memory.__dict__
    if _COPY not in marked and _COPIES not in marked:
        return memory
    if _alive_copy(memory) is not None:
        gc.collect()  # a copy that only garbage refers to is not in use, on any rank
    if (function := _alive_copy(memory)) is not None:
        raise VarianceError(
            f"{name} writes into a value while the result of {function} is in use, which should be a view of it but is "
            "a copy, since its operand was moved, or its blocks have no such view; the copy would not see the write: "
            f"call {function} again after the write, keep a clone() of its result, or write into a new value instead, "
            "x = x + ..."
        )
    made: _Copy | None = marked.get(_COPY)
    if made is not None and _is_stored_back(*made.read):
        if (root := made.root()) is not None:
            setattr(root, _COPIES, [ref for ref in getattr(root, _COPIES) if ref() is not memory])
        delattr(memory, _COPY)
    elif made is not None:
        raise VarianceError(
            f"{name} writes into a copy: {made.name} gave no view, since its operand was moved, or its blocks have no "
            "such view; write into the operand itself, x[...] = value or x[...] += value, or reshard it first"
        )
    return memory
