"""Calls of aten functions in the words of torch's public methods, which torch takes faster, by some 1 to 2 µs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import fx

aten: Final = torch.ops.aten


class Spelling(NamedTuple):
    """A call of a method of ``x``. ``text`` follows the operand, and has {} for each of ``args``."""

    x: Any
    text: str
    args: tuple[Any, ...] = ()


def spelling(node: fx.Node) -> Spelling | None:
    """Another spelling of a step that does the same, if there is one."""
    find = _FOUND.get(node.target)
    return None if find is None else find(node)


def _cast(node: fx.Node) -> Spelling | None:
    """``x.double()`` for a copy in another dtype."""
    x, *rest = node.args
    method = _CASTS.get(node.kwargs.get("dtype"))
    if method is None or rest or len(node.kwargs) > 1 or _dtype(x) in (None, _dtype(node)):
        return None
    return Spelling(x, f".{method}()")


def _indexed(node: fx.Node) -> Spelling | None:
    """``x[:, i]``. torch would read the values of an index without dims."""
    x, indices = node.args
    given: Any = indices
    if node.meta.get("frame", False) is not None or not all(i is None or _shape(i) for i in given):
        return None
    return Spelling(
        x, f"[{', '.join(':' if i is None else '{}' for i in given)}]", tuple(i for i in given if i is not None)
    )


def _pieces(node: fx.Node) -> Spelling | None:
    """``x.split_with_sizes((3, 3, 1), dim)``"""
    given: Any = *node.args, 0
    x, size, dim, *_ = given
    shape = _shape(x)
    if node.kwargs or not shape or not size or not shape[dim]:
        return None
    sizes = tuple(min(size, shape[dim] - at) for at in range(0, shape[dim], size))
    return Spelling(x, ".split_with_sizes({}, {})", (sizes, dim))


def _shape(x: Any) -> tuple[int, ...]:
    return x.meta["value"].shape if "value" in x.meta else ()


def _dtype(x: Any) -> torch.dtype | None:
    return x.meta["value"].dtype if "value" in x.meta else None


_CASTS: Final[dict[Any, str]] = {
    getattr(torch, name): name for name in ("double", "float", "half", "bfloat16", "long", "int", "bool")
}
_FOUND: Final[dict[Any, Callable[[fx.Node], Spelling | None]]] = {
    aten._to_copy.default: _cast,
    aten.index.Tensor: _indexed,
    aten.split.Tensor: _pieces,
}
