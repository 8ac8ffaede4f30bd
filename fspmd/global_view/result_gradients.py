"""``requires_grad`` of the results of a call that runs as several calls: it is as torch says of the function.

``torch.fill(x, 1.0)`` runs as a call that makes new ones. For torch its result depends on x, with a gradient of zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.rules import writes
from fspmd.saved_tensor_hooks import without_saved_tensor_hooks
from fspmd.sharded import Sharded, alike
from fspmd.torch_internals import DisableTorchFunction, plain_apply, transforms_active
from fspmd.tracing import hidden, outside_transforms


class Followed:
    """Gives the results of a function the ``requires_grad`` that torch gives the global tensors."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        self._known: dict[tuple[bool, ...], list[bool] | None] = {}

    def results(self, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return ``out``, the results of a call, with the right ``requires_grad``. Nothing is communicated."""
        if not torch.is_grad_enabled() or transforms_active():
            return out
        leaves, treedef = optree.tree_flatten((args, kwargs), none_is_leaf=True)
        flags = tuple([isinstance(x, Tensor) and x.requires_grad for x in leaves])
        if True not in flags:
            return out
        if flags not in self._known:
            self._known[flags] = _requires_grad(self.func, leaves, treedef, flags)
        required = self._known[flags]
        results, structure = optree.tree_flatten(out, none_is_leaf=True)
        if required is None or len(required) != len(results):
            return out
        operands = [x for x, flag in zip(leaves, flags, strict=True) if flag]
        return structure.unflatten([_with_gradient(*row, operands) for row in zip(results, required, strict=True)])


@hidden
def _requires_grad(func: Any, leaves: list[Any], treedef: Any, flags: tuple[bool, ...]) -> list[bool] | None:
    """Return ``requires_grad`` of each result, or None if the function fails on the meta device."""
    try:
        with outside_transforms(), DisableTorchFunction(), without_saved_tensor_hooks():
            made = [
                torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=flag) if isinstance(x, Tensor) else x
                for x, flag in zip(leaves, flags, strict=True)
            ]
            args, kwargs = treedef.unflatten(made)
            if writes(func):
                args = (args[0].clone(), *args[1:])
            out = func(*args, **kwargs)
            out = [args[0]] if writes(func) else optree.tree_leaves(out, none_is_leaf=True)
    except Exception:
        return None
    return [isinstance(x, Tensor) and x.requires_grad for x in out]


def _with_gradient(x: Any, required: bool, operands: list[Any]) -> Any:
    if not isinstance(x, Sharded) or x.requires_grad == required:
        return x
    if not required:
        return alike(x.local.detach(), x)
    zeros = [_zero_depending_on(operand.local if isinstance(operand, Sharded) else operand) for operand in operands]
    return alike(_tied(x.local, *zeros), x)


def _zero_depending_on(x: Tensor) -> Tensor:
    """Return a zero that depends on ``x``, with a gradient of zeros. Autograd saves no tensor for it."""
    return x.flatten()[:0].sum()


class _Tied(torch.autograd.Function):
    """The first operand, made to depend on the others too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *zeros: Tensor) -> Tensor:
        ctx.zeros = [zero.detach() for zero in zeros]
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        return g, *map(torch.zeros_like, ctx.zeros)


_tied = plain_apply(_Tied)
