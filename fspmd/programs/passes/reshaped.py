"""Reshaped values: views and casts whose elements have the order of another value."""

from __future__ import annotations

from math import prod
from typing import Final

import torch
from torch import fx

from fspmd.pairs import Call
from fspmd.programs.passes.aliases import is_view, written
from fspmd.programs.passes.rewrites import NAMES
from fspmd.programs.steps import is_aten, is_collective

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


def made_by(node: fx.Node) -> tuple[fx.Node | None, list[Call]]:
    """The collective whose rows a matrix has, and the casts since."""
    names, end, turned = [], node, False
    while is_reshaped(node) and _size(node) == _size(node.all_input_nodes[0]):
        if is_collective(node):
            names.append(node.meta["call"])
        turned |= node.target not in _RESHAPES and not is_collective(node)
        node = node.all_input_nodes[0]
    if not is_collective(node) or (turned and not _in_order(node, end)):
        return None, []
    return node, names[::-1]


def last_of(product: fx.Node) -> tuple[fx.Node, list[Call], fx.Node | None, list[Call]]:
    """The last view of a product, or of its sum with another value, that no other step uses.

    Also the other summand, the casts of the product before the sum, and the casts of the sum.
    """
    made, names = _alone(product)
    added = next(iter(made.users)) if len(made.users) == 1 else product
    if added.target is not aten.add.Tensor or added.kwargs:
        return made, names, None, []
    other = added.args[added.args[0] is made]
    if not isinstance(other, fx.Node) or other is made or not _like(other, made) or not _like(added, made):
        return made, names, None, []
    last, after = _alone(added)
    return (last, names, other, after) if _like(last, added) else (made, names, None, [])


def _alone(node: fx.Node) -> tuple[fx.Node, list[Call]]:
    """The last view of a value that no other step uses, in the same order; the casts on the way."""
    names: list[Call] = []
    last, turned = node, False
    while len(last.users) == 1:
        user = next(iter(last.users))
        if not is_reshaped(user) or _size(user) != _size(last):
            break
        if is_collective(user):
            names.append(user.meta["call"])
        turned |= user.target not in _RESHAPES and not is_collective(user)
        last = user
    return (node, []) if turned and not _in_order(node, last) else (last, names)


def _like(node: fx.Node, other: fx.Node) -> bool:
    found: bool = node.meta["value"] == other.meta["value"]
    return found


def is_reshaped(node: fx.Node) -> bool:
    """Whether a step gives the elements of its operand with another shape or type."""
    return is_collective(node, *NAMES) or (
        is_aten(node)
        and is_view(node)
        and "value" in node.meta
        and len(node.all_input_nodes) == 1
        and not written(node)
    )


def _size(node: fx.Node) -> int:
    return prod(node.meta["value"].shape) if "value" in node.meta else 0


def _in_order(*nodes: fx.Node) -> bool:
    """Whether values are contiguous, so that values in one memory have their elements in one order."""
    return all(node.meta.get("strides") is None for node in nodes)


def matrix_of(node: fx.Node) -> Shape:
    """The shape of a matrix, which may be a batch of one."""
    shape: Shape = node.meta["value"].shape
    return shape[1:] if len(shape) == 3 and shape[0] == 1 else shape


def reshaped(node: fx.Node) -> list[fx.Node]:
    """The reshaped values of a value, each after its operand."""
    found = [user for user in node.users if is_reshaped(user)]
    return found + [one for view in found for one in reshaped(view)]


def users_of(node: fx.Node) -> list[fx.Node]:
    """The steps that use a result, or reshaped values of it."""
    views = reshaped(node)
    return [user for one in (node, *views) for user in one.users if user not in views]
