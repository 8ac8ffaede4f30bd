"""Sharded bodies: what a function does on blocks along dims that must otherwise be whole, in the local view's words.

A body runs as one of `shard_map` does, its types tracked: it is given a `Site`, and the arguments of the call with a
block in place of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from fspmd.collectives import all_gather, axis_index
from fspmd.entries import blocks
from fspmd.redistribution.cost import Topology, price
from fspmd.spec import TensorSpec
from fspmd.tracing import hidden

Body = Callable[..., Any]
#: µs of a body's collectives, forward: of the operands as they lie, the results' global shapes, the axes over which it
#: communicates, and the dims of the first operand that must otherwise be whole
Time = Callable[[Sequence[TensorSpec], Sequence[TensorSpec], tuple[str, ...], Topology, frozenset[int]], float]
Dim = int | Sequence[int] | None


@dataclass(frozen=True, slots=True)
class Site:
    """Where a body runs: the axes of each dim, by its name in the rule or by its number in the first operand."""

    axes: dict[Any, tuple[str, ...]]
    operands: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
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
    transformed = torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    return transformed or (x.requires_grad and torch.is_grad_enabled())


def _row_bytes(first: TensorSpec, whole: frozenset[int]) -> int:
    """The bytes of one number for each row of a block along the dims that must otherwise be whole."""
    size = first.dtype.itemsize
    for dim, length in enumerate(first.block_shape):
        size *= 1 if dim in whole else length
    return size


def _each(first: TensorSpec, result: TensorSpec, whole: frozenset[int]) -> float:
    """The elements of a result for each such row."""
    return prod(result.shape) / max(1, prod(size for d, size in enumerate(first.shape) if d not in whole))


def reducing(rounds: float, back: float | None = None, *, each: bool = False) -> Callable[[Body], Bodied]:
    """A body that all-reduces so many numbers for each row of its first operand's block along the sharded dims.

    ``back``: so many in backward, by default the same. ``each``: so many for each element of the result.
    """

    def time(
        specs: Sequence[TensorSpec],
        results: Sequence[TensorSpec],
        axes: tuple[str, ...],
        topology: Topology,
        whole: frozenset[int],
    ) -> float:
        size = int(_row_bytes(specs[0], whole) * (_each(specs[0], results[0], whole) if each else 1))
        return rounds * price("reduce", specs[0].mesh, axes, size, size, topology).time

    return lambda body: Bodied(body, time, 1.0 if back is None else back / rounds)


def gathering(numbers: float, back: float = 0.0, *, each: bool = False) -> Callable[[Body], Bodied]:
    """A body that gathers so many numbers for each such row from each rank, in one round.

    ``back``: what backward takes, in times of that. ``each``: so many for each element of the result.
    """

    def time(
        specs: Sequence[TensorSpec],
        results: Sequence[TensorSpec],
        axes: tuple[str, ...],
        topology: Topology,
        whole: frozenset[int],
    ) -> float:
        size = int(numbers * _row_bytes(specs[0], whole) * (_each(specs[0], results[0], whole) if each else 1))
        mesh = specs[0].mesh
        return price("gather", mesh, axes, size, size * mesh.axis_size(axes), topology).time

    return lambda body: Bodied(body, time, back)
