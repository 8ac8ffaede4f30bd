"""Views of views as one call: `as_strided` on the value that they are views of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fspmd.cache import cached
from fspmd.forms import packed
from fspmd.ops.schemas import facts_of
from fspmd.ops.traits import without_autocast
from fspmd.programs.passes.aliases import is_of_one_rank
from fspmd.programs.spellings import callable_of
from fspmd.programs.steps import is_aten
from fspmd.torch_internals import DisableTorchFunction, disable_dispatch_modes

_Link = tuple[Any, tuple[Any, ...]]  # a function of aten that gives a view, and its arguments after the tensor


def is_link(node: Any) -> bool:
    """Whether a value is a step that gives a view of one tensor, with its elements in the same dtype."""
    if not isinstance(node, fx.Node) or not is_aten(node) or node.kwargs or not is_of_one_rank(node):
        return False
    facts, operands = facts_of(node.target), node.all_input_nodes
    if not (facts.view and facts.pure) or facts.strided or len(operands) != 1 or node.args[0] is not operands[0]:
        return False
    dtype, before = node.meta["value"].dtype, operands[0].meta.get("value")
    return before is not None and before.dtype is dtype and not dtype.is_complex


class OneView:
    """A view of views of a tensor with these strides as one call. Other tensors are viewed step by step.

    A record may be wrong about the strides of a kernel's result. A replay compares them in its own lines, and calls
    `as_strided` with ``after``, which takes 0.3 µs less than to call this.
    """

    def __init__(self, before: tuple[int, ...], after: tuple[Any, ...], links: tuple[_Link, ...]) -> None:
        self.__name__ = self.__qualname__ = "one_view"
        self.before, self.after = before, after
        self.calls = [(callable_of(target), args) for target, args in links]

    def __call__(self, x: Tensor) -> Tensor:
        for call, args in self.calls:
            x = call(x, *args)
        return x


def one_view(views: list[fx.Node]) -> OneView | None:
    """The view of the operand of the first of some steps, each a view of the one before, that gives the last.

    None if the last does not begin where the operand does, since the operand may itself begin anywhere in its memory,
    or if its elements are negated.
    """
    x = views[0].all_input_nodes[0]
    shape, strides = x.meta["value"].shape, x.meta.get("strides")
    links = tuple((view.target, _hashable(view.args[1:])) for view in views)
    return _made(links, shape, packed(shape) if strides is None else strides)


@cached
def _made(links: tuple[_Link, ...], shape: tuple[int, ...], strides: tuple[int, ...]) -> OneView | None:
    with disable_dispatch_modes(), DisableTorchFunction(), torch.no_grad(), without_autocast():
        last = torch.empty_strided(shape, strides, device="meta")
        for target, args in links:
            last = target(last, *args)
    if last.storage_offset() or last.is_neg():
        return None
    return OneView(tuple(strides), (tuple(last.shape), last.stride()), links)


def _hashable(arg: Any) -> Any:
    return tuple(map(_hashable, arg)) if isinstance(arg, (list, tuple)) else arg
