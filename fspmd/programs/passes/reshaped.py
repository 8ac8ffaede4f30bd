"""Reshaped values: views and casts of a value that keep the order of its elements."""

from __future__ import annotations

from math import prod
from typing import Final

import torch
from torch import fx

from fspmd.pairs import Call
from fspmd.programs.passes.aliases import is_view, written
from fspmd.programs.steps import CASTS, is_aten, is_collective

aten: Final = torch.ops.aten

Shape = tuple[int, ...]
#: views that keep the order of elements
_RESHAPES: Final = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)


def collective_before(node: fx.Node) -> tuple[fx.Node | None, list[Call]]:
    """The collective whose result is reshaped to a matrix, and the casts after it; None and [] if there is none."""
    casts, end, may_reorder = [], node, False
    while is_reshaped(node) and _size(node) == _size(node.all_input_nodes[0]):
        if is_collective(node):
            casts.append(node.meta["call"])
        may_reorder |= node.target not in _RESHAPES and not is_collective(node)
        node = node.all_input_nodes[0]
    if not is_collective(node) or (may_reorder and not _in_order(node, end)):
        return None, []
    return node, casts[::-1]


def last_of(product: fx.Node) -> tuple[fx.Node, list[Call], fx.Node | None, list[Call]]:
    """The last view in the chain of single uses of a product, or of its sum with another value.

    Returns this view, the casts of the product, the other summand (or None), and the casts of the sum.
    """
    view, casts = _last_view(product)
    total = next(iter(view.users)) if len(view.users) == 1 else product
    if total.target is not aten.add.Tensor or total.kwargs:
        return view, casts, None, []
    other = total.args[total.args[0] is view]
    if not isinstance(other, fx.Node) or other is view or not _like(other, view) or not _like(total, view):
        return view, casts, None, []
    last, after = _last_view(total)
    return (last, casts, other, after) if _like(last, total) else (view, casts, None, [])


def _last_view(node: fx.Node) -> tuple[fx.Node, list[Call]]:
    """The last view in the chain of single uses of a value, with its elements in the same order; and the casts."""
    casts: list[Call] = []
    last, may_reorder = node, False
    while len(last.users) == 1:
        user = next(iter(last.users))
        if not is_reshaped(user) or _size(user) != _size(last):
            break
        if is_collective(user):
            casts.append(user.meta["call"])
        may_reorder |= user.target not in _RESHAPES and not is_collective(user)
        last = user
    return (node, []) if may_reorder and not _in_order(node, last) else (last, casts)


def _like(node: fx.Node, other: fx.Node) -> bool:
    """Whether two values have one shape and dtype."""
    return bool(node.meta["value"] == other.meta["value"])


def is_reshaped(node: fx.Node) -> bool:
    """Whether a step is a view or a cast of its only operand."""
    return is_collective(node, *CASTS) or (
        is_aten(node)
        and is_view(node)
        and "value" in node.meta
        and len(node.all_input_nodes) == 1
        and not written(node)
    )


def _size(node: fx.Node) -> int:
    return prod(node.meta["value"].shape) if "value" in node.meta else 0


def _in_order(*nodes: fx.Node) -> bool:
    """Whether values are contiguous. Such values have their elements in one order if they lie in one memory."""
    return all(node.meta.get("strides") is None for node in nodes)


def matrix_of(node: fx.Node) -> Shape:
    """The shape of a matrix, or of the matrix in a batch of one."""
    shape: Shape = node.meta["value"].shape
    return shape[1:] if len(shape) == 3 and shape[0] == 1 else shape


def reshaped(node: fx.Node) -> list[fx.Node]:
    """The reshaped values of a value. Each follows its operand."""
    views = [user for user in node.users if is_reshaped(user)]
    return views + [inner for view in views for inner in reshaped(view)]


def users_of(node: fx.Node) -> list[fx.Node]:
    """The steps that use a result, or reshaped values of it."""
    views = reshaped(node)
    return [user for value in (node, *views) for user in value.users if user not in views]
