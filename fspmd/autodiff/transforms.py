"""Torch's own transforms on `Sharded` values: a transform of a `Sharded` is a transform of its block.

``torch.func`` and ``torch.vmap`` hand each tensor to a few functions where it enters a transform and where it leaves.
In between, torch functions of a `Sharded` run on its block, as in the transforms of this package. Arguments,
closed-over values and results are therefore treated alike, and keep their layouts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fspmd.autodiff.batching import extended, placed, without_dim
from fspmd.autodiff.leaves import tangents_of
from fspmd.copies import as_copies
from fspmd.errors import RecordError
from fspmd.redistribution.redistribute import redistribute
from fspmd.sharded import Sharded, alike, pair
from fspmd.torch_internals import (
    ASKS_IF_MAPPED,
    ENTERS_DERIVATIVE,
    ENTERS_VMAP,
    LEAVES_DERIVATIVE,
    LEAVES_VMAP,
    NOT_MAPPED,
    batch_dim_of,
    make_dual,
    unpack_dual,
)
from fspmd.tracing import is_traced
from fspmd.wrappers import replace_everywhere


def install() -> None:
    """Wrap the functions of torch through which values enter and leave a transform."""
    _replace(*ENTERS_DERIVATIVE, _on_block)
    _replace(*LEAVES_DERIVATIVE, _on_block)
    _replace(*ENTERS_VMAP, _mapped)
    _replace(*LEAVES_VMAP, _joined)
    _replace(*ASKS_IF_MAPPED, _is_mapped)


def _replace(module: Any, name: str, on_sharded: Any) -> None:
    """Call ``on_sharded``, with the original function first, where the first argument is a `Sharded`."""
    original = getattr(module, name)

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        return on_sharded(original, x, *args, **kwargs) if type(x) is Sharded else original(x, *args, **kwargs)

    replace_everywhere(module, name, run)


def _on_block(original: Any, x: Sharded, *args: Any, **kwargs: Any) -> Sharded:
    return alike(original(x.local, *args, **kwargs), x)


def _mapped(original: Any, x: Sharded, dim: int, level: int) -> Sharded:
    """One element of a dim. The dim is gathered first if it is cut."""
    p = x.spec.partition
    entries = (*p.entries[:dim], None, *p.entries[dim + 1 :])
    uncut = x.spec.with_partition(p.with_entries(entries))
    block = x.local
    if uncut is not x.spec:  # a write into the copy would not reach `x`
        block = as_copies(redistribute(block, x.spec, uncut), block, "torch.vmap over a dim that is cut")
    return pair(original(block, dim, level), without_dim(uncut, dim))


def _joined(original: Any, x: Sharded, level: int, size: int, dim: int) -> Sharded:
    """All elements, along the mapped dim."""
    joined = pair(original(x.local, level, size, 0), extended(x.spec, 0, size))
    result: Sharded = placed(joined, dim % joined.ndim)
    return result


def _is_mapped(_: Any, x: Sharded) -> bool:
    return bool(batch_dim_of(x.local) != NOT_MAPPED)


def dual(x: Any, tangent: Any, *, level: int) -> Any:
    """``torch.autograd.forward_ad.make_dual``. The tangent is moved to the layout of its primal."""
    _refuse_graph(x, tangent)
    (block,) = tangents_of((tangent,), (x,), ("primals",))
    if type(x) is not Sharded:
        return make_dual(x, block, level=level)
    return alike(make_dual(x.local, block, level=level), x)


def parts(x: Sharded, *, level: int) -> tuple[Sharded, Sharded | None]:
    """``torch.autograd.forward_ad.unpack_dual``: the primal, and the tangent if there is one."""
    _refuse_graph(x)
    primal, tangent = unpack_dual(x.local, level=level)
    return alike(primal, x), alike(tangent, x) if isinstance(tangent, Tensor) else None


def _refuse_graph(*values: Any) -> None:
    """Raise an error while torch records a graph, which cannot have collectives."""
    if is_traced():
        x = next(x for x in values if type(x) is Sharded)
        raise RecordError(
            f"torch.func.linearize, or a jvp that make_fx records, got {x!r}, whose collectives no graph of torch has; "
            "write fspmd.jvp(f, (x,), (tangent,)) for each tangent"
        )
