"""Hooks of modules on gradients, such as ``register_full_backward_hook``, where the module takes `Sharded` values.

Torch sends the arguments of a module, and its results, through a custom Function that changes nothing, and puts the
hooks on the node of this Function in the graph. Here blocks go through the Function. A hook sees the gradient that a
hook of ``x.register_hook`` would see.

Where a hook returns None, a leaf gets no gradient, as in torch. Any other value gets zeros. Torch would skip the nodes
after it in backward, or make zeros, whose shape torch does not know for uneven blocks. Collectives in these nodes must
run, and give their operands gradients, alike in every layout.
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
    """Wrap torch's function that sends tensors through the custom Function."""
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
        values = [alike(new, x) if type(x) is Sharded else new for new, x in zip(out, args, strict=True)]
        return tuple(values) if type(args) is tuple else type(args)(*values), places

    setattr(BackwardHook, _METHOD, on_tensors)


class _LaidOutNode:
    """A node of the graph that shows hooks its gradients as gradients of the values ``likes``."""

    def __init__(self, node: Any, likes: list[Any], leaves: list[bool]) -> None:
        self._node, self._likes, self._leaves = node, likes, leaves
        node.materialize_grads = False  # torch does not know the shapes of uneven blocks; `completing` does

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """Register a hook of the user. It sees zeros in place of gradients that do not exist."""
        likes, leaves = self._likes, self._leaves

        def local_hook(after: tuple[Tensor | None, ...], before: tuple[Tensor | None, ...]) -> Any:
            filled = [torch.zeros_like(local_of(x)) if g is None else g for g, x in zip(after, likes, strict=True)]
            new = hook(tuple(map(laid_out, filled, likes)), tuple(map(laid_out, before, likes)))
            return None if new is None else tuple(map(_block, new, likes, after, leaves))

        return self._node.register_hook(local_hook)


def _block(gradient: Any, like: Any, before: Tensor | None, leaf: bool) -> Any:
    """The block of the gradient that a hook returned. Torch takes none where there was no gradient before."""
    if before is None or (gradient is None and leaf):
        return None
    if gradient is None:
        return torch.zeros_like(before)
    return cotangent_of(gradient, like, _WHAT) if type(like) is Sharded else gradient
