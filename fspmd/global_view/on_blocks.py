"""What runs on blocks in place of a function: where the blocks of a view are none, or differ from rank to rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fspmd.copies import as_copies, handed_on, is_packed
from fspmd.global_view.outcomes import Kind, Shape
from fspmd.local_view.type_rules import tensors_of
from fspmd.local_view.uneven import call_uneven, numbers_frame
from fspmd.spec import TensorSpec
from fspmd.transport.local_int import block_sizes


def copying(local: Callable[..., Any], name: str, own: bool, *args: Any, **kwargs: Any) -> Any:
    """The results, as copies where torch gives views."""
    return as_copies(local(*args, **kwargs), tensors_of((*args, *kwargs.values())), name, own)


def set_in(local: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A block, with the result in place of what was there."""
    return x.copy_(local(x, *args, **kwargs))


def in_own_memory(local: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result, as a copy where it views a block: torch copies the global tensor, which lies otherwise."""
    out = local(*args, **kwargs)
    return out if out is not args[0] and out._base is None else out.clone()


def as_even_block(sizes: Shape, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """The same elements as a block of a layout whose blocks are all of one shape."""
    return x.reshape(sizes)


def as_block(spec: TensorSpec, views: bool, x: Tensor, *_: Any, **__: Any) -> Any:
    """The same elements as a block of a layout."""
    sizes = block_sizes(spec)
    held = numbers_frame(sizes)
    out = call_uneven(torch.reshape, (x, sizes), {}, held, pure=not views)
    return handed_on(out, x) if views else out


def view_or_copy(local: Callable[..., Tensor], name: str, thin: bool, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """A block that is part of each row may not be one that can be viewed, where the whole tensor could be.

    Nor may the whole tensor, where its ``thin`` blocks can, and those of some ranks may be thinner: such are copies on
    all ranks, unless they lie in memory as new ones do.
    """
    out = local(x)
    if out is x or (is_packed(x) if thin else out._is_view()):
        return out
    copy: Tensor = as_copies(out, (x,), name, False)
    return copy


def of_first(local: Callable[[Tensor], Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A function of the first operand alone; the other arguments said what the call is."""
    return local(x)


def untouched(kind: Kind | None, shape: Shape, x: Tensor, *_: Any, **__: Any) -> Any:
    """A view of a block, for a function that takes all of the global tensor; in a tuple where it gives such."""
    return x[...] if kind is None else kind([x[...]])


def rank_by_rank(func: Any, pure: bool, views: bool, *args: Any, **kwargs: Any) -> Any:
    """What torch does in backward often needs the sizes of an uneven block as plain numbers."""
    out = call_uneven(func, args, kwargs, None, pure=pure)
    return handed_on(out, args[0]) if views else out
