"""What the moves of one operand take: from each layout of a value to each need of an op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, prod

import torch
from torch import Tensor

from fspmd.layout_search.call_layouts import Need
from fspmd.redistribution.bounds import least_times
from fspmd.redistribution.cost import Topology
from fspmd.redistribution.moves import moves
from fspmd.spec import P, TensorSpec


@dataclass(frozen=True, slots=True)
class ValueLayout:
    """A layout of a value, and the axes over which backward sums its gradients once for all that read it as it is."""

    spec: TensorSpec
    summed: frozenset[str] = frozenset()


def part_of(table: Tensor, kept: Sequence[Tensor | None]) -> Tensor:
    """The places of a table that are kept along each dim; None keeps all."""
    for dim, own in enumerate(kept):
        if own is not None and len(own) < table.shape[dim]:
            table = table.index_select(dim, own)
    return table


@dataclass(slots=True)
class ChoiceCost:
    """Time and memory of each choice, or pair of choices."""

    time: Tensor
    memory: Tensor

    def __add__(self, other: ChoiceCost) -> ChoiceCost:
        return ChoiceCost(self.time + other.time, self.memory + other.memory)

    def of(self, *kept: Tensor) -> ChoiceCost:
        """Of some choices of each variable."""
        return ChoiceCost(part_of(self.time, kept), part_of(self.memory, kept))

    def weighed(self, price: float) -> Tensor:
        """Time, with µs for each byte."""
        return self.time + price * self.memory


@dataclass(slots=True, eq=False)
class Prices:
    """Of the moves from each layout of a value to each need of an op: at first what they take at least."""

    laid: tuple[ValueLayout, ...]
    needs: tuple[Need, ...]
    places: Tensor  # of the need of each way
    cost: ChoiceCost  # [layouts, needs]
    exact: Tensor
    rows: dict[TensorSpec, list[int]] = field(default_factory=dict)
    columns: dict[TensorSpec, list[int]] = field(default_factory=dict)
    learned: int = 0  # times that some have become exact

    def table(self) -> ChoiceCost:
        """For each layout and way."""
        return ChoiceCost(self.cost.time[:, self.places], self.cost.memory[:, self.places])

    def learn(self, spec: TensorSpec, need: int, time: float) -> None:
        """What the move of a layout takes."""
        for i in self.rows[spec]:
            if not self.exact[i, need]:
                self.cost.time[i, need], self.exact[i, need] = time, True
                self.learned += 1


def size(spec: TensorSpec) -> int:
    """Bytes of a block."""
    return prod(spec.block_shape) * spec.dtype.itemsize


def least_prices(
    laid: tuple[ValueLayout, ...], needs_of_ways: tuple[Need, ...], alone: bool, topology: Topology
) -> Prices:
    """What moves take at least, the bytes of what backward keeps of them; exactly, where nothing moves.

    ``alone``: an op sums the gradients of what it reads by itself.
    """
    needs = tuple(dict.fromkeys(needs_of_ways))
    places = torch.tensor([needs.index(need) for need in needs_of_ways])
    specs = [one.spec for one in laid]
    trips = needs[0].trips
    time = trips.there * least_times(specs, [need.spec for need in needs], topology)
    if needs[0].followed:
        gradients = [_gradient(need) for need in needs]
        time += trips.back * least_times(gradients, [spec.dual for spec in specs], topology).mT
    sizes = torch.tensor([float(size(need.spec)) if need.saved else 0.0 for need in needs], dtype=torch.float64)
    memory = sizes.expand_as(time).clone()
    exact = torch.zeros(time.shape, dtype=torch.bool)
    if needs[0].stays:
        time[:], exact[:] = inf, True
    rows, columns = _places(specs), _places([need.spec for need in needs])
    for i, one in enumerate(laid):
        for k in columns.get(one.spec, ()):
            time[i, k], memory[i, k], exact[i, k] = _as_it_lies(one, needs[k], alone, topology), 0.0, True
    return Prices(laid, needs, places, ChoiceCost(time, memory), exact, rows, columns)


def making(laid: tuple[ValueLayout, ...], specs_of_ways: tuple[TensorSpec, ...]) -> Prices:
    """A result may only lie as the way leaves it."""
    rows = [[0.0 if one.spec is spec else inf for spec in specs_of_ways] for one in laid]
    time = torch.tensor(rows, dtype=torch.float64)
    every = torch.arange(len(specs_of_ways))
    return Prices(laid, (), every, ChoiceCost(time, torch.zeros_like(time)), torch.ones_like(time, dtype=torch.bool))


def _places(specs: Sequence[TensorSpec]) -> dict[TensorSpec, list[int]]:
    """Where each stands."""
    found: dict[TensorSpec, list[int]] = {}
    for i, spec in enumerate(specs):
        found.setdefault(spec, []).append(i)
    return found


def _as_it_lies(laid: ValueLayout, need: Need, alone: bool, topology: Topology) -> float:
    if laid.summed and not alone:  # once for all that read it
        return 0.0 if laid.summed.issuperset(need.casts) else inf
    return need.trips.back * moves(laid.spec, need.spec, need.casts, topology, True).casting


def _gradient(need: Need) -> TensorSpec:
    """How the gradient of what an op reads lies, before its sums over ranks end."""
    partition = need.spec.dual.partition
    pending = partition.unreduced.union(need.casts) - partition.reduced
    return need.spec.with_partition(P(*partition, unreduced=pending, reduced=partition.reduced))
