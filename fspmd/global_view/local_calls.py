"""Functions that run on blocks in place of a torch function: for views that blocks do not have, and uneven blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fspmd.copies import as_copies, share_memory
from fspmd.global_view.result_types import Kind, Shape
from fspmd.local_view.uneven import call_uneven, numbers_frame
from fspmd.rules.views import of_sizes
from fspmd.spec import TensorSpec
from fspmd.torch_internals import batch_dim_of, is_wrapped, wrapped_by
from fspmd.transport.local_int import block_sizes
from fspmd.transport.local_tensor import blocks_of

Pairs = tuple[tuple[int, int], ...]  # pairs of dims


def set_in(local: Callable[..., Tensor], x: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
    """Write the result into the block."""
    return x.copy_(local(x, *args, **kwargs))


def in_own_memory(local: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return a result that shares no memory with the block, since torch copies the global tensor."""
    out = local(*args, **kwargs)
    return out.clone() if share_memory(out, args[0]) else out


def as_even_block(sizes: Shape, x: Tensor, /, *_: Any, **__: Any) -> Tensor:
    """Reshape a block to the common shape of all blocks of an even layout."""
    return x.reshape(sizes)


def as_block(spec: TensorSpec, pure: bool, x: Tensor, /, *_: Any, **__: Any) -> Any:
    """Reshape a block to a block of a layout, which may be uneven; ``pure``: the result may be a copy."""
    sizes = block_sizes(spec)
    return call_uneven(of_sizes, (x, sizes), {}, numbers_frame(sizes), pure=pure)


def view_or_copy(local: Callable[..., Any], name: str, merged: Pairs, x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    """Return views of a block, or copies, marked as such, where its strides allow no view.

    A block of size 0 or 1 along a dim of ``merged`` always has a view. Whether the ranks copy must not depend on that:
    if thicker blocks with these strides would have no view, all ranks take copies.
    """
    out = local(x, *args, **kwargs)
    first = out if isinstance(out, Tensor) else out[0]
    is_view = share_memory(first, x) and (not merged or are_adjacent(x, merged))
    return out if is_view else as_copies(out, x, name)


def packed_if_need_be(local: Callable[..., Any], x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function that needs the strides of a new tensor, on a packed copy if it fails: ``x.view(torch.int32)``."""
    try:
        return local(x, *args, **kwargs)
    except RuntimeError:
        return local(x.clone(memory_format=torch.contiguous_format), *args, **kwargs)


def are_adjacent(x: Tensor, pairs: Pairs) -> bool:
    """Whether, by the strides of all blocks, the second dim of each pair lies within the first without gaps."""
    while is_wrapped(x):
        dim, x = batch_dim_of(x), wrapped_by(x)
        x = x if dim < 0 else x.select(dim, 0)
    return all(
        block.stride(outer) == block.stride(inner) * max(block.shape[inner], 1)
        for outer, inner in pairs
        for block in blocks_of(x)
    )


def of_first(local: Callable[[Tensor], Any], x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    """Call ``local`` with the first operand alone. It is made for a call with the other arguments."""
    return local(x)


def untouched(kind: Kind | None, count: int, shape: Shape, x: Tensor, /, *_: Any, **__: Any) -> Any:
    """Return a view of the block, or ``count`` of them, for a call that gives the whole operand: ``x[:]``."""
    return x[...] if kind is None else kind([x[...] for _ in range(count)])


def rank_by_rank(func: Any, pure: bool, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function on one simulated rank after another: torch's backward often needs block sizes as plain ints."""
    return call_uneven(func, args, kwargs, None, pure=pure)
