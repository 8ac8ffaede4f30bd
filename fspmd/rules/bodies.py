"""Sharded bodies: functions of the local view that run where a dim that must otherwise be whole is sharded.

A body runs as the body of a `shard_map` does, with its types tracked. It gets a `Site`, and the arguments of the call
with a block in place of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspmd.collectives import all_gather, axis_index
from fspmd.entries import blocks
from fspmd.redistribution.cost import Topology, price
from fspmd.spec import TensorSpec
from fspmd.torch_internals import forward_ad, transforms_active
from fspmd.tracing import hidden

Body = Callable[..., Any]
Dim = int | Sequence[int] | None


class BodyLayout(NamedTuple):
    """The layouts of the operands and results of a body. `rule` takes a function of it, ``price=``, to price the body.

    >>> import torch
    >>> from fspmd import P, TensorSpec, make_mesh, topology
    >>> spec = TensorSpec(make_mesh((4,), ("x",)), P(None, "x"), (64, 4096), torch.float32)
    >>> layout = BodyLayout((spec,), (spec,), ("x",), topology(), frozenset({1}))
    >>> layout.row_bytes()  # one number for each of 64 rows
    256
    >>> layout.price("reduce", 256, 256) < layout.price("gather", 2**24, 2**26)
    True
    """

    operands: Sequence[TensorSpec]
    results: Sequence[TensorSpec]
    axes: tuple[str, ...]  # the axes that cut dims which must otherwise be whole
    topology: Topology
    whole: frozenset[int]  # those dims, of the first operand

    def row_bytes(self) -> int:
        """Return the bytes of one number per row of the first block. Rows run along the dims in ``whole``."""
        first = self.operands[0]
        size = first.dtype.itemsize
        for dim, length in enumerate(first.block_shape):
            size *= 1 if dim in self.whole else length
        return size

    def each(self) -> float:
        """Return the number of elements of the first result per row."""
        rows = prod(size for d, size in enumerate(self.operands[0].shape) if d not in self.whole)
        return prod(self.results[0].shape) / max(1, rows)

    def price(self, kernel: str, before: int, after: int) -> float:
        """Return the µs of a collective over ``axes``.

        Args:
            kernel: ``"reduce"`` (an all-reduce), ``"gather"``, ``"reduce_scatter"`` or ``"exchange"`` (an all-to-all).
            before: Bytes of a block before the collective.
            after: Bytes of a block after it.
        """
        return price(kernel, self.operands[0].mesh, self.axes, before, after, self.topology).time


Time = Callable[[BodyLayout], float]  # µs of a body's collectives, forward


@dataclass(frozen=True, slots=True)
class Site:
    """The first argument of a sharded body: the layouts of the call, and the axes that cut each dim.

    >>> import torch
    >>> from fspmd import P, device_get, device_put, make_mesh, pmax, rule
    >>> def unit(x):
    ...     return x / x.abs().amax(-1, keepdim=True)
    >>> def on_blocks(site: Site, x):
    ...     assert site.axes["d"] == ("x",) and site.operands[0].shape == (64, 65536)
    ...     assert site.blocks(65536, "d")[1] == (16384, 16384)  # offset and length of the second rank's block
    ...     return x / pmax(x.abs().amax(-1, keepdim=True), site.axes["d"])
    >>> unit = rule(unit, "... [d] -> ... [d]", body=on_blocks)
    >>> x = device_put(torch.ones(64, 65536), P(None, "x"), mesh=make_mesh((4,), ("x",)))
    >>> unit(x)
    Sharded f32[64, 65536@x] on mesh(x=4)
    """

    axes: dict[Any, tuple[str, ...]]
    """The mesh axes that cut each dim, by the dim's name in the rule; in fspmd's own rules by its number."""
    operands: tuple[TensorSpec, ...]
    """The layouts of the operands."""
    results: tuple[TensorSpec, ...]
    """The layouts that the results must have."""
    memo: dict[Any, Any] = field(default_factory=dict)  # results of `once`

    @property
    def mesh(self) -> Any:
        """The mesh."""
        return self.operands[0].mesh

    def over(self, dims: Sequence[Any]) -> tuple[str, ...]:
        """Return the axes that cut any of these dims."""
        return tuple(axis for dim in dims for axis in self.axes.get(dim, ()))

    def blocks(self, size: int, dim: Any) -> tuple[tuple[int, int], ...]:
        """Return (offset, length) of each block of a dim of a global size, in the order of its axes."""
        return blocks(size, tuple(self.mesh.shape[axis] for axis in self.axes.get(dim, ())))

    def has_empty(self, dim: int) -> bool:
        """Whether some block of a dim of the first operand is empty."""
        return any(length == 0 for _, length in self.blocks(self.operands[0].shape[dim], dim))

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the result of ``make``, which runs in the first call of the body only."""
        if key not in self.memo:
            self.memo[key] = hidden(make)()
        return self.memo[key]

    def offset(self, size: int, dim: Any) -> Tensor | int:
        """Return the offset of this rank's block of a dim: a 0-d tensor that varies over the dim's axes."""
        if not self.axes.get(dim):
            return 0
        starts = torch.tensor([start for start, _ in self.blocks(size, dim)], device=self.mesh.device)
        return starts[axis_index(self.axes[dim])]

    def gathered(self, dims: Sequence[Any], *values: Tensor) -> list[Tensor]:
        """Gather values from the ranks along some dims, in a new first dim; the results are equal on all ranks."""
        axes = self.over(dims)
        if not axes:
            return [value[None] for value in values]
        return list(all_gather(list(values), axes, to="invarying"))


@dataclass(frozen=True, slots=True)
class Bodied:
    """A body, and the price of its communication."""

    body: Body
    time: Time  # inf for operands that the body does not take
    back: float | Time = 1.0  # backward: a multiple of ``time``, or µs
    asks: bool = False  # ranks compare the shapes of operands of collectives, since the body is the user's


def dims_of(x: Tensor, dim: Dim) -> tuple[int, ...]:
    """Return the dims of a reduction, counted from 0: all of them for None or an empty list."""
    given = (dim,) if isinstance(dim, int) else tuple(dim or range(x.dim()))
    return tuple(d % x.dim() for d in given)


def padded(site: Site, x: Tensor, dim: int, value: float) -> Tensor:
    """Append one element with a value to a dim if some block of it is empty."""
    if not site.has_empty(dim):
        return x
    return torch.cat([x, torch.full_like(x.narrow(dim, 0, 0).sum(dim, keepdim=True, dtype=x.dtype), value)], dim)


def widened(x: Tensor) -> Tensor:
    """Promote a value to float32 at least, since a sum of many halves loses precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def is_followed(x: Tensor) -> bool:
    """Whether autograd or a transform follows a value."""
    transformed = transforms_active() or forward_ad._current_level >= 0
    return transformed or (x.requires_grad and torch.is_grad_enabled())


def reducing(rounds: float, back: float | None = None, *, each: bool = False) -> Callable[[Body], Bodied]:
    """Return a decorator for a body that all-reduces ``rounds`` times one number per row of its first operand.

    Args:
        back: The all-reduces in backward. Default: ``rounds``.
        each: The numbers are counted per element of the result, not per row.
    """

    def time(layout: BodyLayout) -> float:
        size = int(layout.row_bytes() * (layout.each() if each else 1))
        return rounds * layout.price("reduce", size, size)

    return lambda body: Bodied(body, time, 1.0 if back is None else back / rounds)


def gathering(numbers: float, back: float = 0.0, *, each: bool = False) -> Callable[[Body], Bodied]:
    """Return a decorator for a body that gathers ``numbers`` numbers per row of its first operand, in one all-gather.

    Args:
        back: The time of backward, as a multiple of the time of forward.
        each: The numbers are counted per element of the result, not per row.
    """

    def time(layout: BodyLayout) -> float:
        size = int(numbers * layout.row_bytes() * (layout.each() if each else 1))
        return layout.price("gather", size, size * layout.operands[0].mesh.axis_size(layout.axes))

    return lambda body: Bodied(body, time, back)


def finding(rounds: int, back: float | None = None) -> Callable[[Body], Bodied]:
    """Return a decorator for a body of ``rounds`` all-reduces of one number per row of its first operand.

    The price is that of an all-gather of these numbers if it is lower: all-reduces of few numbers take no longer.
    """
    prices = (reducing(rounds, back), gathering(rounds))
    share = 1.0 if back is None else back / rounds
    return lambda body: Bodied(body, lambda layout: min(price(body).time(layout) for price in prices), share)
