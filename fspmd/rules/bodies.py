"""Sharded bodies: what a function does on blocks along dims that must otherwise be whole, in the local view's words.

A body runs as one of `shard_map` does, its types tracked: it is given a `Site`, and the arguments of the call with a
block in place of each tensor.
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
    """How the operands and results of a body lie. A function of it prices the body: `rule` with ``price=``.

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
    axes: tuple[str, ...]  # that cut dims which must otherwise be whole
    topology: Topology
    whole: frozenset[int]  # those dims, of the first operand

    def row_bytes(self) -> int:
        """Bytes of one number for each row of the first block along the dims that must otherwise be whole."""
        first = self.operands[0]
        size = first.dtype.itemsize
        for dim, length in enumerate(first.block_shape):
            size *= 1 if dim in self.whole else length
        return size

    def each(self) -> float:
        """The elements of the first result for each such row."""
        rows = prod(size for d, size in enumerate(self.operands[0].shape) if d not in self.whole)
        return prod(self.results[0].shape) / max(1, rows)

    def price(self, kernel: str, before: int, after: int) -> float:
        """µs of a collective over the axes, on blocks of so many bytes that become blocks of so many.

        ``kernel``: ``"reduce"`` (an all-reduce), ``"gather"``, ``"reduce_scatter"`` or ``"exchange"`` (an all-to-all).
        """
        return price(kernel, self.operands[0].mesh, self.axes, before, after, self.topology).time


Time = Callable[[BodyLayout], float]  # µs of a body's collectives, forward


@dataclass(frozen=True, slots=True)
class Site:
    """Where a sharded body runs: its first argument.

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
    """The mesh axes that cut each dim: by its name in the rule, in fspmd's own rules by its number."""
    operands: tuple[TensorSpec, ...]
    """The layouts of the operands."""
    results: tuple[TensorSpec, ...]
    """The layouts that the results must have."""
    memo: dict[Any, Any] = field(default_factory=dict)  # what a body worked out of its arguments, the same in each call

    @property
    def mesh(self) -> Any:
        """The mesh."""
        return self.operands[0].mesh

    def over(self, dims: Sequence[Any]) -> tuple[str, ...]:
        """The axes that shard some of these dims."""
        return tuple(axis for dim in dims for axis in self.axes.get(dim, ()))

    def blocks(self, size: int, dim: Any) -> tuple[tuple[int, int], ...]:
        """(offset, length) of each block of a dim of a global size, in the order of its axes."""
        return blocks(size, tuple(self.mesh.shape[axis] for axis in self.axes.get(dim, ())))

    def has_empty(self, dim: int) -> bool:
        """Whether some block of a dim of the first operand is empty."""
        return any(length == 0 for _, length in self.blocks(self.operands[0].shape[dim], dim))

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, made in the first call."""
        if key not in self.memo:
            self.memo[key] = hidden(make)()
        return self.memo[key]

    def offset(self, size: int, dim: Any) -> Tensor | int:
        """Where this rank's block of a dim begins: a 0-d tensor that varies over the dim's axes."""
        if not self.axes.get(dim):
            return 0
        found = torch.tensor([start for start, _ in self.blocks(size, dim)], device=self.mesh.device)
        return found[axis_index(self.axes[dim])]

    def gathered(self, dims: Sequence[Any], *found: Tensor) -> list[Tensor]:
        """What each rank along some dims found, along a new first dim; equal on all ranks."""
        axes = self.over(dims)
        if not axes:
            return [one[None] for one in found]
        return list(all_gather(list(found), axes, to="invarying"))


@dataclass(frozen=True, slots=True)
class Bodied:
    """A body, and the time it takes to communicate."""

    body: Body
    time: Time  # infinite for operands that it does not take
    back: float | Time = 1.0  # of its gradients, in times of that
    asks: bool = False  # ranks compare the shapes of what they give to collectives: not known to be right


def dims_of(x: Tensor, dim: Dim) -> tuple[int, ...]:
    """The dims that a reduction is told to take, as torch counts them: all for None or an empty list."""
    given = (dim,) if isinstance(dim, int) else tuple(dim or range(x.dim()))
    return tuple(d % x.dim() for d in given)


def padded(site: Site, x: Tensor, dim: int, value: float) -> Tensor:
    """With one more element at the end of a dim, where some block of it may be empty."""
    if not site.has_empty(dim):
        return x
    return torch.cat([x, torch.full_like(x.narrow(dim, 0, 0).sum(dim, keepdim=True, dtype=x.dtype), value)], dim)


def widened(x: Tensor) -> Tensor:
    """Sums of many halves are floats."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def is_followed(x: Tensor) -> bool:
    """Whether a gradient goes through a value, or a transform."""
    transformed = transforms_active() or forward_ad._current_level >= 0
    return transformed or (x.requires_grad and torch.is_grad_enabled())


def reducing(rounds: float, back: float | None = None, *, each: bool = False) -> Callable[[Body], Bodied]:
    """A body that all-reduces so many numbers for each row of its first operand's block along the sharded dims.

    ``back``: so many in backward, by default the same. ``each``: so many for each element of the result.
    """

    def time(layout: BodyLayout) -> float:
        size = int(layout.row_bytes() * (layout.each() if each else 1))
        return rounds * layout.price("reduce", size, size)

    return lambda body: Bodied(body, time, 1.0 if back is None else back / rounds)


def gathering(numbers: float, back: float = 0.0, *, each: bool = False) -> Callable[[Body], Bodied]:
    """A body that gathers so many numbers for each such row from each rank, in one round.

    ``back``: what backward takes, in times of that. ``each``: so many for each element of the result.
    """

    def time(layout: BodyLayout) -> float:
        size = int(numbers * layout.row_bytes() * (layout.each() if each else 1))
        return layout.price("gather", size, size * layout.operands[0].mesh.axis_size(layout.axes))

    return lambda body: Bodied(body, time, back)


def finding(rounds: int, back: float | None = None) -> Callable[[Body], Bodied]:
    """A body of all-reduces: few numbers take no longer than their gather, which has half the messages."""
    ways = (reducing(rounds, back), gathering(rounds))
    share = 1.0 if back is None else back / rounds
    return lambda body: Bodied(body, lambda lying: min(way(body).time(lying) for way in ways), share)
