"""Sharded bodies: what a function does on blocks along dims that must otherwise be whole, in the local view's words.

A body runs as one of `shard_map` does, its types tracked: it is given a `Site`, and the arguments of the call with a
block in place of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fspmd.collectives import axis_index
from fspmd.cost import Topology, price
from fspmd.spec import TensorSpec, blocks

Body = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Site:
    """Where a body runs: the axes of each dim, by its name in the rule or by its number in the first operand."""

    axes: dict[Any, tuple[str, ...]]
    operands: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]

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

    def offset(self, size: int, dim: Any) -> Tensor | int:
        """Where this rank's block of a dim begins: a 0-d tensor that varies over the dim's axes."""
        if not self.axes.get(dim):
            return 0
        found = torch.tensor([start for start, _ in self.blocks(size, dim)], device=self.mesh.device)
        return found[axis_index(self.axes[dim])]


@dataclass(frozen=True, slots=True)
class Bodied:
    """A body, and the µs it takes to communicate."""

    body: Body
    time: Callable[[Sequence[TensorSpec], tuple[str, ...], Topology], float]


def reducing(rounds: int) -> Callable[[Body], Bodied]:
    """A body that all-reduces so many numbers for each row of its first operand's block along the sharded dims."""

    def time(specs: Sequence[TensorSpec], axes: tuple[str, ...], topology: Topology) -> float:
        first = specs[0]
        size = first.dtype.itemsize
        for length, entry in zip(first.block_shape, first.partition, strict=True):
            size *= (
                1
                if entry is not None and set(axes).intersection((entry,) if isinstance(entry, str) else entry)
                else length
            )
        return rounds * price("reduce", first.mesh, axes, size, size, topology).time

    return lambda body: Bodied(body, time)
