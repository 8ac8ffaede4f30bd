"""Pending sums that were made of another one, their base, by a view or by a function of each element.

The ended value is then the same function of the ended base. So a base is ended once for all that was made of it:
slices, other views, casts to another dtype. To end a base takes longer than to end its slice, and nobody knows which
other slices will follow. The base is ended where that takes at most `PATIENCE` times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fspmd.copies import is_copy
from fspmd.pairs import Call, apply, given, is_transformed
from fspmd.redistribution.cost import price, topology
from fspmd.redistribution.moves import Leg
from fspmd.remembered import MADE, Stamp, is_shared_unseen, is_unwritten, moves_of, recall, remember, stamp
from fspmd.spec import P, TensorSpec

#: t = 1 + 1 / t: a base in vain takes t times what its slice takes, a slice in vain makes the base take 1 + 1 / t times
PATIENCE: Final = (1 + 5**0.5) / 2


class _Made:
    """How a pending sum was made; a copy of it does not know."""

    __slots__ = ("again", "base", "spec", "stamps")

    def __init__(
        self,
        x: Tensor | None = None,
        base: Tensor | None = None,
        spec: TensorSpec | None = None,
        again: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.base, self.spec, self.again = base, spec, again
        self.stamps: list[Stamp] = [stamp(one) for one in (x, base) if one is not None]

    def __reduce__(self) -> Any:
        return _Made, ()

    def __deepcopy__(self, memo: Any) -> _Made:
        return _Made()


def remember_base(x: Tensor, base: Tensor, spec: TensorSpec, again: Callable[[Tensor], Tensor]) -> None:
    """``x`` is a pending sum that was made ``again`` of another, which lies so, and which it keeps alive."""
    is_unknown = is_transformed() or x.is_inference() or base.is_inference()  # when it is written into
    if x is not base and not (is_unknown or is_shared_unseen(base) or is_copy(base)):
        setattr(x, MADE, _Made(x, base, spec, again))


class _Base(NamedTuple):
    """A value on the way back to what a pending sum was made of, and what makes the one before it of it."""

    x: Tensor
    spec: TensorSpec
    again: Callable[[Tensor], Tensor]


def _bases(x: Tensor) -> Iterator[_Base]:
    """What a pending sum was made of, what that was made of, and so on, as long as none is written into."""
    while (made := x.__dict__.get(MADE)) is not None and made.base is not None:
        if not all(map(is_unwritten, (x, made.base), made.stamps)) or (made.base.is_leaf and made.base.requires_grad):
            return
        yield _Base(made.base, made.spec, made.again)
        x = made.base


def by_base(x: Tensor, leg: Leg) -> Tensor | None:
    """The end of a pending sum by that of a base, which is remembered; None: none is ended, and none is worth it.

    The gradient takes the way of the pending sum, and moves nothing.
    """
    if MADE not in x.__dict__ or len(leg.calls) != 1 or leg.calls[0].pair.name != "psum_unreduced":
        return None
    (end,), most = leg.calls, PATIENCE * _time(leg.source, leg.calls[0])
    chain: list[_Base] = []
    value, length = None, 0
    for base in _bases(x):
        chain.append(base)
        if (value := recall(base.x, (base.spec, _ended(base.spec, end)))) is not None:
            length = len(chain)
            break
        if _time(base.spec, end) <= most:
            length = len(chain)
    if not length:
        return None
    if value is None:
        base = chain[length - 1]
        value = apply(base.x, end)
        remember(base.x, (base.spec, _ended(base.spec, end)), value)
    with torch.no_grad():
        for base in reversed(chain[:length]):
            value = base.again(value)
    return given(x, end, value) if x.requires_grad and torch.is_grad_enabled() else value.detach()


def ended_bases(x: Tensor, source: TensorSpec) -> Iterator[TensorSpec]:
    """The layouts of a pending sum of which `by_base` needs no collective, as a base was ended."""
    lies = source.partition
    for base in _bases(x):
        for before, after in moves_of(base.x):
            if before is base.spec and after.partition.entries == base.spec.partition.entries:
                pending = after.partition.unreduced
                if pending < lies.unreduced and after.partition.reduced == base.spec.partition.reduced:
                    yield source.with_partition(P(*lies, unreduced=pending, reduced=lies.reduced))


def _time(spec: TensorSpec, end: Call) -> float:
    size = prod(spec.block_shape) * spec.dtype.itemsize
    return price(end.pair.kernel, end.mesh, end.axes, size, size, topology()).time


def _ended(spec: TensorSpec, end: Call) -> TensorSpec:
    lies = spec.partition
    return spec.with_partition(P(*lies, unreduced=lies.unreduced - {*end.axes}, reduced=lies.reduced))
