"""What runs on blocks in place of a function: where the blocks of a view are none, or differ from rank to rank."""

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

Pairs = tuple[tuple[int, int], ...]  # of dims


def set_in(local: Callable[..., Tensor], x: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
    """A block, with the result in place of what was there."""
    return x.copy_(local(x, *args, **kwargs))


def in_own_memory(local: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The result, as a copy where it views a block: torch copies the global tensor, which lies otherwise."""
    out = local(*args, **kwargs)
    return out.clone() if share_memory(out, args[0]) else out


def as_even_block(sizes: Shape, x: Tensor, /, *_: Any, **__: Any) -> Tensor:
    """The same elements as a block of a layout whose blocks are all of one shape."""
    return x.reshape(sizes)


def as_block(spec: TensorSpec, pure: bool, x: Tensor, /, *_: Any, **__: Any) -> Any:
    """The same elements as a block of a layout; ``pure``: they may be copied."""
    sizes = block_sizes(spec)
    return call_uneven(of_sizes, (x, sizes), {}, numbers_frame(sizes), pure=pure)


def view_or_copy(local: Callable[..., Any], name: str, merged: Pairs, x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    """A view, or a copy where blocks have none, though the whole tensor has: they may lie otherwise in memory.

    ``merged`` are pairs of dims of which that cannot be told by each block: where some block could not have a view,
    were it thicker, all ranks have copies.
    """
    out = local(x, *args, **kwargs)
    first = out if isinstance(out, Tensor) else out[0]
    seen = share_memory(first, x) and (not merged or are_adjacent(x, merged))
    return out if seen else as_copies(out, x, name)


def packed_if_need_be(local: Callable[..., Any], x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    """What gives views of blocks that lie as the global tensor does, of others too: ``x.view(torch.int32)``."""
    try:
        return local(x, *args, **kwargs)
    except RuntimeError:
        return local(x.clone(memory_format=torch.contiguous_format), *args, **kwargs)


def are_adjacent(x: Tensor, pairs: Pairs) -> bool:
    """Whether the second dim of each pair lies within the first without gaps, were they thicker, in all blocks."""
    while is_wrapped(x):
        dim, x = batch_dim_of(x), wrapped_by(x)
        x = x if dim < 0 else x.select(dim, 0)
    return all(
        block.stride(outer) == block.stride(inner) * max(block.shape[inner], 1)
        for outer, inner in pairs
        for block in blocks_of(x)
    )


def of_first(local: Callable[[Tensor], Any], x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    """A function of the first operand alone; the other arguments said what the call is."""
    return local(x)


def untouched(kind: Kind | None, count: int, shape: Shape, x: Tensor, /, *_: Any, **__: Any) -> Any:
    """A view of a block, for a function that takes all of the global tensor; where it gives a tuple so many there."""
    return x[...] if kind is None else kind([x[...] for _ in range(count)])


def rank_by_rank(func: Any, pure: bool, /, *args: Any, **kwargs: Any) -> Any:
    """What torch does in backward often needs the sizes of an uneven block as plain numbers."""
    return call_uneven(func, args, kwargs, None, pure=pure)
