"""Hooks of modules on gradients, ``register_full_backward_hook`` and its kin, where the module takes `Sharded` values.

Torch sends the arguments of a module, and its results, through a custom Function that changes nothing, and puts the
hooks on its node in the graph. Here blocks go through it, and hooks see what ``x.register_hook`` would show.

Where a hook gives None, a leaf gets no gradient, as torch has it, and any other value gets zeros. Torch would leave out
what comes before it in backward, or make zeros whose shape it does not know of uneven blocks. Collectives there must
run, and give their operands gradients, in every layout alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.autodiff.cotangents import cotangent_of
from fspmd.autodiff.engine import laid_out
from fspmd.autodiff.leaves import local_of
from fspmd.local_view.hooks import completing
from fspmd.sharded import Sharded, alike
from fspmd.torch_internals import BackwardHook

_METHOD: Final = "_apply_on_tensors"
_WHAT: Final = "a hook on the gradients of a module"


def install() -> None:
    """Wrap it."""
    original = getattr(BackwardHook, _METHOD)

    def on_tensors(self: Any, put_hook: Callable[[Any], None], args: tuple[Any, ...]) -> Any:
        if Sharded not in map(type, args):
            return original(self, put_hook, args)
        tensors = [x for x in args if isinstance(x, Tensor)]
        likes, leaves = [x.detach() for x in tensors], [x.is_leaf for x in tensors]
        blocks = tuple(x.local if type(x) is Sharded else x for x in args)
        out, places = completing(original, self, lambda node: put_hook(_LaidOutNode(node, likes, leaves)), blocks)
        if places is None:
            return args, None
        found = [alike(new, x) if type(x) is Sharded else new for new, x in zip(out, args, strict=True)]
        return tuple(found) if type(args) is tuple else type(args)(*found), places

    setattr(BackwardHook, _METHOD, on_tensors)


class _LaidOutNode:
    """A node of the graph, whose gradients belong to values of these layouts."""

    def __init__(self, node: Any, likes: list[Any], leaves: list[bool]) -> None:
        self._node, self._likes, self._leaves = node, likes, leaves
        node.materialize_grads = False  # torch knows no shape of uneven blocks; `completing` does

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """As that of the node, for a hook on gradients laid out; zeros stand where nothing has a gradient."""
        likes, leaves = self._likes, self._leaves

        def local_hook(after: tuple[Tensor | None, ...], before: tuple[Tensor | None, ...]) -> Any:
            filled = [torch.zeros_like(local_of(x)) if g is None else g for g, x in zip(after, likes, strict=True)]
            found = hook(tuple(map(laid_out, filled, likes)), tuple(map(laid_out, before, likes)))
            return None if found is None else tuple(map(_block, found, likes, after, leaves))

        return self._node.register_hook(local_hook)


def _block(gradient: Any, like: Any, before: Tensor | None, leaf: bool) -> Any:
    """What a hook gives for a gradient; torch takes nothing where there was none."""
    if before is None or (gradient is None and leaf):
        return None
    if gradient is None:
        return torch.zeros_like(before)
    return cotangent_of(gradient, like, _WHAT) if type(like) is Sharded else gradient
