"""Adafactor: an optimizer that keeps the mean square of each row and column (Shazeer and Stern, 2018)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fspmd.collectives import psum
from fspmd.entries import entry_axes
from fspmd.nn.optimizers import Leaves, Lies, Optimizer, Rate, Slots, check_known, leafwise
from fspmd.placement.creation import zeros
from fspmd.sharded import is_sharded
from fspmd.spec import P


def adafactor(
    rate: Rate = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    clip: float = 1.0,
    decay: Any = 0.0,
    *,
    specs: Any = None,
) -> Optimizer:
    """Adafactor, as ``torch.optim.Adafactor``, on global values of any layout, and on blocks in a body.

    The state of a matrix [..., m, n] is a mean square for each row, [..., m, 1], and column, [..., 1, n].

    Args:
        rate: As for `adamw`. A step is at most ``1 / sqrt(step)``, relative to the size of the parameter.
        beta2_decay: The weight of a new mean square is ``step ** beta2_decay``.
        eps: The least mean square, by default that of the dtype, and the least size of a parameter.
        clip: The largest size of an update before it is scaled.
        decay, specs: As for `adamw`.

    Communication: means over a dim that is cut are all-reduces, [..., m, 1] or [..., 1, n]; three numbers of each leaf,
    the sizes of the parameter and the update and the mean of rows, are all-reduces where the leaf is cut.

    Raises:
        VarianceError: it is called in a body on blocks that vary, without ``specs``; and as `adamw`.
        ArgumentError, ShapeError, SpecError: As `adamw`.

    >>> from fspmd import device_get, device_put, make_mesh
    >>> mesh = make_mesh((4,), ("dp",), transport="simulation")
    >>> params = device_put({"w": torch.ones(6, 3)}, P("dp"), mesh=mesh)
    >>> init, update = adafactor(0.1)
    >>> params, state = update(params, init(params), params)
    >>> state["row"]["w"], state["column"]["w"]
    (Sharded f32[6@dp, 1] on mesh(dp=4), Sharded f32[1, 3] on mesh(dp=4))
    """

    def slots_of(p: Any, lie: Lies) -> dict[str, Any]:
        check_known(p, lie, "adafactor")
        if p.ndim < 2:
            return {"row": torch.zeros_like(p), "column": _zeros(p, (0,) * p.ndim, range(p.ndim))}
        if lie is not None:
            return {name: _mean(torch.zeros_like(p), d, lie) for name, d in (("row", -1), ("column", -2))}
        shapes = (*p.shape[:-1], 1), (*p.shape[:-2], 1, p.shape[-1])
        return {"row": _zeros(p, shapes[0], [p.ndim - 1]), "column": _zeros(p, shapes[1], [p.ndim - 2])}

    def rule(
        grads: Leaves, slots: Slots, params: Leaves, rate: Any, step: Tensor, decays: list[float], lies: list[Lies]
    ) -> tuple[Leaves, Slots]:
        new = step**beta2_decay
        relative = torch.minimum(torch.as_tensor(rate, dtype=step.dtype, device=step.device), step**-0.5)
        news, rows, columns = [], [], []
        leaves = zip(grads, params, decays, slots["row"], slots["column"], lies, strict=True)
        for g, p, w, old_row, old_column, lie in leaves:
            least = torch.finfo(p.dtype).eps if eps[0] is None else eps[0]
            square = g * g
            if p.ndim < 2:
                estimate = row = old_row + (square - old_row) * new
                column = old_column
            else:
                row = old_row + (_mean(square, -1, lie) - old_row) * new
                column = old_column + (_mean(square, -2, lie) - old_column) * new
                estimate = row * column / _mean(row, -2, lie).clamp(min=least)
            change = g * estimate.clamp(min=least * least).rsqrt()
            size = math.sqrt(math.prod(p.shape if lie is None else lie.shape)) or 1.0
            length = relative * (_norm(p, lie) / size).clamp(min=eps[1])
            news.append(p * (1 - rate * w) - change * (length / (_norm(change, lie) / (size * clip)).clamp(min=1.0)))
            rows.append(row)
            columns.append(column)
        return news, {"row": rows, "column": columns}

    return leafwise(slots_of, rule, rate, decay, specs)


def _mean(x: Any, dim: int, lie: Lies) -> Any:
    """The mean over a dim of a value, or of a block that ``lie`` says the layout of."""
    if lie is None:
        return x.mean(dim, keepdim=True)
    total, axes = x.sum(dim, keepdim=True), entry_axes((*lie.partition, *[None] * len(lie.shape))[len(lie.shape) + dim])
    return (psum(total, axes) if axes else total) / lie.shape[dim]


def _norm(x: Any, lie: Lies) -> Any:
    if lie is None or not (axes := tuple(sorted(lie.partition.axes))):
        return x.norm()
    return psum(x.square().sum(), axes).sqrt()


def _zeros(p: Any, shape: tuple[int, ...], dims: Any) -> Any:
    """Zeros that lie as a parameter, but for the dims of another size, which are not cut."""
    if not is_sharded(p):
        return torch.zeros(shape, dtype=p.dtype, device=p.device)
    entries = [None if d in dims else entry for d, entry in enumerate(p.spec.partition)]
    return zeros(shape, spec=P(*entries), mesh=p.spec.mesh, dtype=p.dtype)
