"""Which results of a call have a gradient, where the calls it is made of would tell otherwise.

``torch.fill(x, 1.0)`` is made of new ones alone, but torch says that it depends on x, with a gradient of zeros.
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
from fspmd.torch_internals import DisableTorchFunction, transforms_active
from fspmd.tracing import hidden, outside_transforms


class Followed:
    """Has the results of a function say of ``requires_grad`` what torch says of the global tensors."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        self._known: dict[tuple[bool, ...], list[bool] | None] = {}

    def results(self, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``out``, what the parts of a call give; nothing is communicated."""
        if not torch.is_grad_enabled() or transforms_active():
            return out
        leaves, treedef = optree.tree_flatten((args, kwargs), none_is_leaf=True)
        flags = tuple([isinstance(x, Tensor) and x.requires_grad for x in leaves])
        if True not in flags:
            return out
        if flags not in self._known:
            self._known[flags] = _told(self.func, leaves, treedef, flags)
        wanted = self._known[flags]
        found, structure = optree.tree_flatten(out, none_is_leaf=True)
        if wanted is None or len(wanted) != len(found):
            return out
        operands = [x for x, flag in zip(leaves, flags, strict=True) if flag]
        return structure.unflatten([_as_told(*row, operands) for row in zip(found, wanted, strict=True)])


@hidden
def _told(func: Any, leaves: list[Any], treedef: Any, flags: tuple[bool, ...]) -> list[bool] | None:
    """Of each result whether it has a gradient; None where the meta device cannot tell."""
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


def _as_told(x: Any, wanted: bool, operands: list[Any]) -> Any:
    if not isinstance(x, Sharded) or x.requires_grad == wanted:
        return x
    if not wanted:
        return alike(x.local.detach(), x)
    nothings = [_zero_depending_on(one.local if isinstance(one, Sharded) else one) for one in operands]
    return alike(_tied(x.local, *nothings), x)


def _zero_depending_on(x: Tensor) -> Tensor:
    """Depends on ``x``, with a gradient of zeros; nothing is kept for it."""
    return x.flatten()[:0].sum()


class _Tied(torch.autograd.Function):
    """The first operand, which depends on the others, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *nothings: Tensor) -> Tensor:
        ctx.nothings = [one.detach() for one in nothings]
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        return g, *map(torch.zeros_like, ctx.nothings)


_tied = super(torch.autograd.Function, _Tied).apply  # what Function.apply calls when no transform is active
