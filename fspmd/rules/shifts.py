"""Flips, rolls, shuffles, repeats and pads: each row of a result is a row of the operand at another place.

In a body each rank fetches the rows of its new block that it lacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fspmd.rules.bodies import Bodied, Site
from fspmd.rules.factors import NO_RULE, Dims, Factors, Shape, ShapedCall, keeping
from fspmd.rules.views import regrouped
from fspmd.rules.windows import (
    Places,
    block_places,
    fetched,
    moved_in_turn,
    passing,
    per_rank,
    refilling,
    size_of,
    taken,
)
from fspmd.transport.carriers import where


def _flipped_dims(call: ShapedCall) -> list[int]:
    dims = call.argument(1, "dims")
    touched = call.dims(1, "dims") if isinstance(dims, int) or dims else ()
    return [d for d in touched if call.ndim and call.shapes[0][d] > 1]


flipped = keeping(_flipped_dims)


@passing
def flip(site: Site, x: Tensor, dims: int | Sequence[int], *more: int) -> Tensor:
    """The body of ``flip``."""
    over = [d % x.dim() for d in ((dims, *more) if isinstance(dims, int) else dims)]
    for d in over:
        if site.axes.get(d):
            last = size_of(site, d) - 1
            x = taken(site, "flip", x, d, last + 1, last + 1, functools.partial(_flipped, last))
    return x.flip([d for d in over if not site.axes.get(d)])


def _flipped(last: int, i: Tensor) -> Tensor:
    return last - i


def rolled(call: ShapedCall) -> Factors:
    """The rule of ``roll``: dims that roll must be whole.

    Without ``dims`` the flattened tensor rolls. Then no dim is sharded, except one at a time by a body.
    """
    dims = call.argument(2, "dims")
    every: Dims = tuple(range(call.ndim))
    if isinstance(dims, int) or dims:
        moved = _shifts(call.shapes[0], call.argument(1, "shifts"), dims)
        return Factors((every,), (every,), whole=frozenset(d for d, shift in moved.items() if shift))
    if not any(_shifts((prod(call.shapes[0]),), call.argument(1, "shifts"), 0).values()):
        return Factors((every,), (every,))
    no_dim: Dims = (None,) * call.ndim
    alternatives = []
    for d in range(call.ndim):
        one_dim: Dims = (*no_dim[:d], d, *no_dim[d + 1 :])
        alternatives.append(Factors((one_dim,), (one_dim,), whole=frozenset({d})))
    return Factors((no_dim,), (no_dim,), alternatives=tuple(alternatives))


def _shifts(shape: Shape, shifts: int | Sequence[int], dims: int | Sequence[int]) -> dict[int, int]:
    """Return the shift of each dim of a roll, reduced modulo its size."""
    by_dim: dict[int, int] = {}
    pairs = zip(*([given] if isinstance(given, int) else given for given in (shifts, dims)), strict=True)
    for shift, dim in pairs:
        d = dim % len(shape)
        by_dim[d] = (by_dim.get(d, 0) + shift) % max(1, shape[d])
    return by_dim


def roll_blocks(shape: Shape, x: Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Tensor:
    """Roll blocks that are whole along all dims that roll; ``shape`` is the global shape."""
    if not isinstance(dims, int) and not dims:
        return x.roll(*_shifts((prod(shape),), shifts, 0).values())
    moved = {d: shift for d, shift in _shifts(shape, shifts, dims).items() if shift}
    return x.roll([*moved.values()], [*moved]) if moved else x.clone()


@passing
def roll(site: Site, x: Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Tensor:
    """The body of ``roll``."""
    if not isinstance(dims, int) and not dims:
        (shift,) = [shifts] if isinstance(shifts, int) else shifts
        return (
            regrouped(site, x, range(x.dim()), range(x.dim()), shift) if 0 not in site.operands[0].shape else x.clone()
        )
    pairs = zip(*(([v] if isinstance(v, int) else v) for v in (shifts, dims)), strict=True)
    for k, (shift, dim) in enumerate(pairs):
        d = dim % x.dim()
        size = size_of(site, d)
        if site.axes.get(d) and size:
            x = taken(site, k, x, d, size, size, functools.partial(_rolled, shift, size))
        else:
            x = x.roll(shift, d)
    return x


def _rolled(shift: int, size: int, i: Tensor) -> Tensor:
    return (i - shift) % size


@passing
def shuffle(site: Site, x: Tensor, groups: int) -> Tensor:
    """The body of ``channel_shuffle``: the first channel of each group, then the second of each, and so on."""
    channels = size_of(site, 1)
    cut = site.blocks(channels, "c")

    def rows(at: int) -> Tensor:
        i = block_places(cut, at)
        return i % groups * (channels // groups) + i // groups

    return fetched(site, "shuffle", x, 1, site.axes["c"], cut, rows)


def repeated(call: ShapedCall) -> Factors:
    """The rule of ``repeat``: dims that are repeated must be whole."""
    before, after = call.shapes[0], call.results[0]
    new, every = len(after) - len(before), tuple(range(len(before)))
    grown = frozenset(d for d in every if before[d] != after[d + new])
    return Factors((every,), ((*(None,) * new, *every),), whole=grown)


@passing
def repeat(site: Site, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """The body of ``repeat`` and ``tile``."""
    after = site.results[0].shape
    new = len(after) - x.dim()
    for d in range(x.dim()):
        size = size_of(site, d)
        if site.axes.get(d) and after[new + d] != size:
            x = taken(site, "repeat", x, d, size, after[new + d], functools.partial(_rolled, 0, size))
    times = [n // size if size and not site.axes.get(d) else 1 for d, (n, size) in _sizes(site, after[new:])]
    return x.repeat(*after[:new], *times)


def _sizes(site: Site, after: Sequence[int]) -> Any:
    return enumerate(zip(after, site.operands[0].shape, strict=True))


# --- pads -------------------------------------------------------------------------------------------------------------


def _padded_dims(call: ShapedCall) -> list[int]:
    return [call.ndim - 1 - i // 2 for i, size in enumerate(call.argument(1, "pad")) if size]


padded = keeping(_padded_dims)


def wrapped(call: ShapedCall) -> Factors:
    """The rule of aten's ``pad`` in mode ``"circular"``; other modes have none."""
    return padded(call) if call.argument(2, "mode") == "circular" else NO_RULE


@passing
def pad(site: Site, x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    """The body of ``constant_pad_nd``. Negative sizes drop rows."""
    local = list(pad)
    for k in range(len(pad) // 2):
        d = x.dim() - 1 - k
        size, before, after = size_of(site, d), pad[2 * k], site.results[0].shape[d]
        if not site.axes.get(d) or not (before or pad[2 * k + 1]):
            continue
        local[2 * k] = local[2 * k + 1] = 0
        rows = functools.partial(_within, before, size)
        x = taken(site, "pad", x, d, size, after, rows)
        if str(value) not in ("0", "0.0"):  # -0.0 must be filled in too
            outside = functools.partial(_outside, rows, site.blocks(after, d))
            empty = per_rank(site, ("empty", d), site.axes[d], outside)
            filling = torch.full((), value, dtype=x.dtype, device=x.device)
            x = where(empty.view(-1, *(1,) * (x.dim() - 1 - d)), filling, x)
    return torch.constant_pad_nd(x, local, value)


def _within(before: int, size: int, i: Tensor) -> Tensor:
    return (i - before).where((i >= before) & (i < before + size), -1)


def _outside(rows: Places, blocks: Sequence[tuple[int, int]], at: int) -> Tensor:
    return rows(block_places(blocks, at)) < 0


def pad_with(rows: Callable[[int, int, int, Tensor], Tensor]) -> Bodied:
    """Return the body of a pad with rows of the operand: ``rows(before, behind, size, places)`` gives their places."""

    def body(site: Site, x: Tensor, pad: Sequence[int], *_: Any, **__: Any) -> Tensor:
        sides = {x.dim() - 1 - k: side for k, side in enumerate(zip(pad[::2], pad[1::2], strict=True))}
        for d in moved_in_turn(site, {d: d for d in sides}):
            before, behind = sides[d]
            size, after = size_of(site, d), site.results[0].shape[d]
            if before or behind:
                x = taken(site, "pad", x, d, size, after, functools.partial(rows, before, behind, size))
        return x

    return refilling(body)


def _mirrored(before: int, behind: int, size: int, i: Tensor) -> Tensor:
    return size - 1 - ((i - before).abs() - size + 1).abs()


def _nearest(before: int, behind: int, size: int, i: Tensor) -> Tensor:
    return (i - before).clamp(0, size - 1)


def _wrapped(before: int, behind: int, size: int, i: Tensor) -> Tensor:
    left = max(-before, 0)  # rows are dropped before the others wrap around
    return left + (i - max(before, 0)) % (size - left - max(-behind, 0))


reflect, replicate, wrap = pad_with(_mirrored), pad_with(_nearest), pad_with(_wrapped)
