"""Functions that run on blocks in place of a torch function: for views that blocks do not have, for uneven blocks, and
sharded bodies. A sharded body takes and returns blocks, and communicates and casts by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.body import Body
from fspmd.copies import as_copies, share_memory
from fspmd.global_view.result_types import Kind, Shape
from fspmd.local_view.entry import typed_entry
from fspmd.local_view.exit import leave_as
from fspmd.local_view.modes import run_in
from fspmd.local_view.tracking import Tracker, convert
from fspmd.local_view.uneven import call_uneven
from fspmd.ops.traits import tensors_in
from fspmd.redistribution.redistribute import cast_once, keep
from fspmd.rules import Bodied, Site
from fspmd.rules.views import of_sizes
from fspmd.spec import TensorSpec
from fspmd.torch_internals import NO_LEVEL, batch_dim_of, level_of, wrapped_by
from fspmd.transport.local_int import block_sizes
from fspmd.transport.local_tensor import blocks_of
from fspmd.variance import Variance

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
    return call_uneven(of_sizes, (x, block_sizes(spec)), {}, pure)


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
    while level_of(x) != NO_LEVEL:
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
    return call_uneven(func, args, kwargs, pure)


def as_local_call(
    row_body: Bodied,
    name: str,
    site: Site,
    operands: Sequence[tuple[int | tuple[int, int], TensorSpec]],
    results: Sequence[TensorSpec],
    *,
    linear: bool,
) -> Callable[..., Any]:
    """Return a local call that runs ``bodied.body(site, *args)`` with types tracked.

    Args:
        operands: The places of the blocks among the arguments, with their layouts.
        linear: The function is linear in its pending sums, and so is each step of its body.
    """
    mesh = site.mesh
    body = Body(mesh, frozenset(mesh.axis_names), True, name)
    body.asks, body.linear = row_body.asks, linear
    if not all(spec.even for spec in (*(spec for _, spec in operands), *results)):
        body.mark_uneven()
    entries = [(place, typed_entry(spec)) for place, spec in operands]

    def local(*args: Any, **kwargs: Any) -> Any:
        values = [list(x) if isinstance(x, (list, tuple)) else x for x in (*args, *kwargs.values())]
        for place, enter in entries:
            if isinstance(place, tuple):
                values[place[0]][place[1]] = enter(values[place[0]][place[1]])
            else:
                values[place] = enter(values[place])
        given = dict(zip(kwargs, values[len(args) :], strict=True))
        tracker = _Sharing(body, values)
        out = run_in(body, tracker, lambda: row_body.body(site, *values[: len(args)], **given))
        if tracker.kept:
            results_ids = {id(x) for x in tensors_in((out,))}  # a graph that keeps its own result is never freed
            keep([cast for cast in tracker.kept if id(cast) not in results_ids], out, _KEPT)
        if isinstance(out, Tensor):
            return leave_as(out, results[0], body, "result")
        left = [leave_as(x, spec, body, f"result[{i}]") for i, (x, spec) in enumerate(zip(out, results, strict=True))]
        return type(out)(left)

    return local


_KEPT: Final = "_fspmd_body_casts"


class _Sharing(Tracker):
    """A tracker that shares the casts of operands with other calls on the same operands."""

    def __init__(self, body: Body, operands: Sequence[Any]) -> None:
        super().__init__(body)
        self.operands = {id(x) for x in tensors_in(operands)}
        self.kept: list[Tensor] = []

    def convert(self, x: Tensor, variance: Variance, to: Variance) -> Tensor:
        """Cast a value. A cast of an operand is made once; it is a view that nothing writes into."""
        if id(x) not in self.operands:
            return super().convert(x, variance, to)
        y = convert(x, variance, to, self.body, cast_once)
        self.kept.append(y)
        return y
