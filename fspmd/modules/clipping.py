"""The norm of all elements of a tree, and clipping by it."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.messages import described
from fspmd.placement.device_put import device_get
from fspmd.placement.reshard import reshard
from fspmd.sharded import Sharded


def global_norm(tree: Any, order: float = 2.0) -> Tensor:
    """The vector norm of all elements of all leaves, a 0-d tensor that is equal on all ranks.

    Leaves may have any layouts, even or uneven, also on different meshes of the same ranks. Communication: for a finite
    order an all-reduce of a few numbers for each layout among the leaves, for an infinite order one for each leaf.

    Raises:
        ArgumentError: a leaf is no tensor, or ``order`` is not positive.

    >>> from fspmd import P, device_put, make_mesh
    >>> mesh = make_mesh((4,), ("x",), transport="simulation")
    >>> tree = {"w": device_put(torch.full((5, 3), 2.0), P("x"), mesh=mesh), "b": torch.full((4,), 1.0)}
    >>> global_norm(tree)
    tensor(8.)
    """
    leaves = optree.tree_leaves(tree)
    for x in leaves:
        if not isinstance(x, Tensor):
            raise ArgumentError(f"global_norm got a leaf that is {described(x)}; expected tensors")
    if not isinstance(order, Real) or not order > 0:
        raise ArgumentError(f"global_norm got order={order!r}; expected a positive number, or math.inf")
    leaves = [x for x in leaves if x.numel()]
    if not leaves:
        return torch.zeros(())
    if math.isinf(order):
        return torch.stack([_gathered(torch.linalg.vector_norm(x, order)) for x in leaves]).amax()
    by_layout: dict[Any, list[Any]] = {}
    for x in leaves:
        wide = x.abs().to(torch.promote_types(x.abs().dtype, torch.float32))
        total = (wide * wide if order == 2 else wide**order).sum()
        by_layout.setdefault(total.spec if isinstance(total, Sharded) else total.dtype, []).append(total)
    sums = [_gathered(torch.stack(totals).sum()) for totals in by_layout.values()]
    norm: Tensor = torch.stack([x.to(torch.float64) for x in sums]).sum() ** (1 / order)
    dtype: torch.dtype = max((x.dtype for x in sums), key=lambda dtype: dtype.itemsize)
    return norm.to(dtype)


def _gathered(x: Any) -> Tensor:
    value: Tensor = device_get(x) if isinstance(x, Sharded) else x
    return value


def clip_by_global_norm(tree: Any, max_norm: float, order: float = 2.0) -> tuple[Any, Tensor]:
    """The tree, scaled down so that its `global_norm` is at most ``max_norm``, and the norm before.

    It computes as ``torch.nn.utils.clip_grad_norm_``, and returns new values. It communicates as `global_norm`.

    Raises:
        ArgumentError: as `global_norm`, or ``max_norm`` is no number.

    >>> from fspmd import P, device_get, device_put, make_mesh
    >>> mesh = make_mesh((4,), ("x",), transport="simulation")
    >>> (clipped,), norm = clip_by_global_norm([device_put(torch.full((4,), 2.0), P("x"), mesh=mesh)], 1.0)
    >>> norm, device_get(clipped)
    (tensor(4.), tensor([0.5000, 0.5000, 0.5000, 0.5000]))
    """
    if not isinstance(max_norm, (Real, Tensor)):
        raise ArgumentError(f"clip_by_global_norm got {described(max_norm)} for max_norm; expected a number")
    norm = global_norm(tree, order)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return optree.tree_map(lambda x: _scaled(x, scale.to(x.dtype)), tree), norm


def _scaled(x: Any, scale: Tensor) -> Any:
    """The scaled value in the layout of ``x``. A pending sum stays pending."""
    out: Any = x * scale
    return reshard(out, x.spec.partition) if isinstance(x, Sharded) and out.spec is not x.spec else out
