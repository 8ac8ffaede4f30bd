"""Views of moved values: where torch gives a view, moving an operand makes a copy of it.

A copy must not be written into, and its operand not while the copy is alive, since neither would be seen by the other.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final

from torch import Tensor

from fspmd.errors import VarianceError
from fspmd.torch_internals import batch_dim_of, is_wrapped, wrapped_by
from fspmd.transport.local_tensor import blocks_of

_COPY: Final = "_fspmd_copy"
_COPIES: Final = "_fspmd_copies"  # on a block: what is a copy where a view of it should be
_MOVED_FROM: Final = "_fspmd_moved_from"
_ROOT: Final = "_fspmd_root"  # on such a copy: the block that it and the copies it is made of come from


def is_packed(x: Tensor, whole: Sequence[int] | None = None) -> bool:
    """Whether a block, or each simulated one, has the strides of a new tensor.

    Those that do not matter to the block, too; ``whole``: not those of dims of which the whole tensor has one element.
    """
    while is_wrapped(x):
        dim, x = batch_dim_of(x), wrapped_by(x)
        x = x if dim < 0 else x.select(dim, 0)
    for block in blocks_of(x):
        step = 1
        sizes = block.shape if whole is None else whole
        for length, stride, size in zip(reversed(block.shape), reversed(block.stride()), reversed(sizes), strict=True):
            if stride != step and (whole is None or size > 1):
                return False
            step *= max(length, 1)
    return True


def moved_from(x: Tensor, moved: Tensor) -> None:
    """Note what a block was before it was moved, so that views of it can be told from it."""
    if moved is not x:
        setattr(moved, _MOVED_FROM, weakref.ref(x))


def as_copies(out: Any, operands: Iterable[Tensor], name: str, own: bool) -> Any:
    """The results of a function that gives views, of operands that had to be moved.

    Views of them are copies too, and known by what they are views of: the moved operand where that is their own, what
    the function itself has made, or else a copy made here.
    """
    operands = list(operands)
    given = {id(one if one._base is None else one._base) for one in operands}
    every = (out,) if isinstance(out, Tensor) else out
    found = [_as_copy(one, name, own or id(one._base) not in given) for one in every]
    apart = [one if one._base is None else one._base for one in found]
    for operand in operands:
        before = getattr(operand, _MOVED_FROM, None)
        origin = operand if before is None else before()
        if origin is None:
            continue
        base = origin if origin._base is None else origin._base
        root = (getattr(origin, _ROOT, None) or getattr(base, _ROOT, None) or weakref.ref(base))()
        if root is not None:
            alive = [one for one in getattr(root, _COPIES, ()) if one() is not None]
            setattr(root, _COPIES, [*alive, *map(weakref.ref, apart)])
            for one in (*found, *apart):
                setattr(one, _ROOT, weakref.ref(root))
    return found[0] if isinstance(out, Tensor) else type(out)(found)


def _as_copy(x: Tensor, name: str, own: bool) -> Tensor:
    if x._base is not None:
        if own:
            setattr(x._base, _COPY, name)
        else:
            x = x.clone()
    setattr(x, _COPY, name)
    return x


def handed_on(out: Any, x: Any) -> Any:
    """What a function gives of a simulated block, rank by rank: copies where the block is one."""
    made_by = getattr(x, _COPY, None)
    if made_by is not None:
        for one in (out,) if isinstance(out, Tensor) else out:
            setattr(one, _COPY, made_by)
    return out


def forget_marks(x: Tensor) -> Tensor:
    """The same block, which is in memory of its own now, without what was noted of the memory it had."""
    for name in (_COPY, _COPIES, _MOVED_FROM, _ROOT):
        x.__dict__.pop(name, None)
    return x


def _alive_copy(base: Tensor) -> str | None:
    """What made a copy, still in use, that should be a view of a block."""
    return next((getattr(one, _COPY) for ref in getattr(base, _COPIES, ()) if (one := ref()) is not None), None)


def refuse_copy(block: Tensor, name: str) -> None:
    """Raise `VarianceError` for a write into a block that is such a copy, or a view of one, or has one."""
    base = block._base
    marked = block.__dict__ if base is None else {**base.__dict__, **block.__dict__}
    if _COPY not in marked and _COPIES not in marked:
        return
    base = block if base is None else base
    if _alive_copy(base) is not None:
        gc.collect()  # what nothing but garbage holds is not in use, on whatever rank
    if (taken := _alive_copy(base)) is not None:
        raise VarianceError(
            f"{name} writes into a value of which {taken}, taken before and still in use, should be a "
            "view but is a copy, since its operand had to be moved to another layout; it would not see the write: take "
            "it again after the write, keep a clone() of it, or write into a new value instead, x = x + ..."
        )
    made_by = getattr(block, _COPY, None) or getattr(block._base, _COPY, None)
    if made_by is not None:
        raise VarianceError(
            f"{name} writes into a copy: {made_by} gave no view, since its operand had to be moved to "
            "another layout; write into the operand itself, x[...] = value, or reshard it before the view is taken"
        )
