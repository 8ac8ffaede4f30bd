"""Torch's own transforms on `Sharded` values: what they do to a tensor, they do to its block.

``torch.func`` and ``torch.vmap`` hand each tensor to a few functions, where it enters a transform and where it leaves.
In between torch functions of a `Sharded` run on its block, as in the transforms of this package. So one that a function
is given and one that it closes over are alike, and so are results, which keep their layouts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fspmd.autodiff.batching import extended, placed, without_dim
from fspmd.autodiff.cotangents import tangents_of
from fspmd.copies import as_copies
from fspmd.errors import RecordError
from fspmd.redistribution.redistribute import redistribute
from fspmd.sharded import Sharded, alike, pair
from fspmd.spec import P
from fspmd.torch_internals import VariableFunctions, is_batched, transforms_module, vmap_module
from fspmd.tracing import is_traced


def install() -> None:
    """Wrap these functions."""
    for name in ("_wrap_tensor_for_grad", "_unwrap_for_grad"):
        _replace(transforms_module, name, _on_block)
    _replace(vmap_module, "_add_batch_dim", _mapped)
    _replace(vmap_module, "_remove_batch_dim", _joined)
    _replace(vmap_module, "is_batchedtensor", _is_mapped)


def _replace(module: Any, name: str, instead: Any) -> None:
    original = getattr(module, name)

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        return instead(original, x, *args, **kwargs) if type(x) is Sharded else original(x, *args, **kwargs)

    setattr(module, name, run)


def _on_block(original: Any, x: Sharded, *args: Any, **kwargs: Any) -> Sharded:
    return alike(original(x.local, *args, **kwargs), x)


def _mapped(original: Any, x: Sharded, dim: int, level: int) -> Sharded:
    """One element of a dim, which all ranks have whole."""
    p = x.spec.partition
    entries = (*p.entries[:dim], None, *p.entries[dim + 1 :])
    whole = x.spec.with_partition(P(*entries, unreduced=p.unreduced, reduced=p.reduced))
    block = x.local
    if whole is not x.spec:  # a write into it would not be seen
        block = as_copies(redistribute(block, x.spec, whole), block, "torch.vmap over a dim that is cut")
    return pair(original(block, dim, level), without_dim(whole, dim))


def _joined(original: Any, x: Sharded, level: int, size: int, dim: int) -> Sharded:
    """All elements, along a dim of their own."""
    joined = pair(original(x.local, level, size, 0), extended(x.spec, 0, size))
    found: Sharded = placed(joined, dim % joined.ndim)
    return found


def _is_mapped(_: Any, x: Sharded) -> bool:
    return bool(is_batched(x.local))


def dual(x: Any, tangent: Any, *, level: int) -> Any:
    """``make_dual``: the tangent is moved to where its primal lies."""
    _refuse_graph(x, tangent)
    (along,) = tangents_of((tangent,), (x,), ("primals",), "jvp")
    make = VariableFunctions._make_dual
    return alike(make(x.local, along, level=level), x) if type(x) is Sharded else make(x, along, level=level)


def parts(x: Sharded, *, level: int) -> tuple[Sharded, Sharded | None]:
    """``unpack_dual``: the primal, and the tangent if there is one."""
    _refuse_graph(x)
    primal, tangent = VariableFunctions._unpack_dual(x.local, level=level)
    return alike(primal, x), alike(tangent, x) if isinstance(tangent, Tensor) else None


def _refuse_graph(*values: Any) -> None:
    if is_traced():
        x = next(x for x in values if type(x) is Sharded)
        raise RecordError(
            f"torch.func.linearize, or a jvp that make_fx writes down, got {x!r}, whose collectives no graph of torch "
            "has; write fspmd.jvp(f, (x,), (tangent,)) for each tangent"
        )
