"""The prices of the moves of one operand, from each layout of a value to each need of an op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor

from fspmd.layout_search.call_layouts import Need
from fspmd.redistribution.bounds import least_times
from fspmd.redistribution.cost import Topology
from fspmd.redistribution.moves import moves
from fspmd.spec import P, TensorSpec


@dataclass(frozen=True, slots=True)
class ValueLayout:
    """A choice for a value.

    Attributes:
        spec: the layout.
        summed: the axes over which backward sums the gradients of the value once, for all ops that read it as it lies.
    """

    spec: TensorSpec
    summed: frozenset[str] = frozenset()


def part_of(table: Tensor, kept: Sequence[Tensor | None]) -> Tensor:
    """The part of a table at the places ``kept`` along each dim. None keeps all places."""
    for dim, places in enumerate(kept):
        if places is not None and len(places) < table.shape[dim]:
            table = table.index_select(dim, places)
    return table


@dataclass(slots=True)
class ChoiceCost:
    """The time and memory of each choice, or of each pair of choices."""

    time: Tensor
    memory: Tensor

    def __add__(self, other: ChoiceCost) -> ChoiceCost:
        return ChoiceCost(self.time + other.time, self.memory + other.memory)

    def of(self, *kept: Tensor) -> ChoiceCost:
        """The costs of the choices ``kept`` of each variable."""
        return ChoiceCost(part_of(self.time, kept), part_of(self.memory, kept))

    def weighed(self, price: float) -> Tensor:
        """The time, plus the memory at a price in µs for each byte."""
        return self.time + price * self.memory


@dataclass(slots=True, eq=False)
class Prices:
    """The prices of the moves from each layout of a value to each need of an op. At first they are lower bounds."""

    layouts: tuple[ValueLayout, ...]
    needs: tuple[Need, ...]
    places: Tensor  # for each strategy, the place of its need
    cost: ChoiceCost  # [layouts, needs]
    exact: Tensor  # [layouts, needs]: whether the price is exact
    rows: dict[TensorSpec, list[int]] = field(default_factory=dict)  # places of layouts
    columns: dict[TensorSpec, list[int]] = field(default_factory=dict)  # places of needs, by their specs
    changes: int = 0  # the number of prices that have become exact

    def table(self) -> ChoiceCost:
        """The prices for each layout and strategy."""
        return ChoiceCost(self.cost.time[:, self.places], self.cost.memory[:, self.places])

    def set_price(self, spec: TensorSpec, need: int, time: float) -> None:
        """Set the exact price of the move from a layout to a need."""
        for i in self.rows[spec]:
            if not self.exact[i, need]:
                self.cost.time[i, need], self.exact[i, need] = time, True
                self.changes += 1


def least_prices(
    layouts: tuple[ValueLayout, ...], needs_of_strategies: tuple[Need, ...], alone: bool, topology: Topology
) -> Prices:
    """Lower bounds of the prices of moves, and the bytes of moved operands that backward keeps.

    Where nothing moves the price is exact. ``alone``: whether the op sums the gradients of its operand separately from
    other ops.
    """
    needs = tuple(dict.fromkeys(needs_of_strategies))
    places = torch.tensor([needs.index(need) for need in needs_of_strategies])
    specs = [layout.spec for layout in layouts]
    trips = needs[0].trips
    time = trips.there * least_times(specs, [need.spec for need in needs], topology)
    if needs[0].followed:
        gradients = [_gradient(need) for need in needs]
        time += trips.back * least_times(gradients, [spec.dual for spec in specs], topology).mT
    sizes = torch.tensor([float(need.spec.block_bytes) if need.saved else 0.0 for need in needs], dtype=torch.float64)
    memory = sizes.expand_as(time).clone()
    exact = torch.zeros(time.shape, dtype=torch.bool)
    if needs[0].stays:
        time[:], exact[:] = inf, True
    rows, columns = _places(specs), _places([need.spec for need in needs])
    for i, layout in enumerate(layouts):
        for k in columns.get(layout.spec, ()):
            time[i, k], memory[i, k], exact[i, k] = _casting_time(layout, needs[k], alone, topology), 0.0, True
    return Prices(layouts, needs, places, ChoiceCost(time, memory), exact, rows, columns)


def making(layouts: tuple[ValueLayout, ...], specs_of_strategies: tuple[TensorSpec, ...]) -> Prices:
    """The prices of a result: nothing for the layout that the strategy gives, infinity for all others."""
    rows = [[0.0 if layout.spec is spec else inf for spec in specs_of_strategies] for layout in layouts]
    time = torch.tensor(rows, dtype=torch.float64)
    places = torch.arange(len(specs_of_strategies))
    exact = torch.ones_like(time, dtype=torch.bool)
    return Prices(layouts, (), places, ChoiceCost(time, torch.zeros_like(time)), exact)


def _places(specs: Sequence[TensorSpec]) -> dict[TensorSpec, list[int]]:
    """The places of each spec."""
    places: dict[TensorSpec, list[int]] = {}
    for i, spec in enumerate(specs):
        places.setdefault(spec, []).append(i)
    return places


def _casting_time(layout: ValueLayout, need: Need, alone: bool, topology: Topology) -> float:
    """µs of the sum of the gradients where an operand is cast without a move."""
    if layout.summed and not alone:  # summed once for all ops that read the value
        return 0.0 if layout.summed.issuperset(need.casts) else inf
    return need.trips.back * moves(layout.spec, need.spec, need.casts, topology, True).casting


def _gradient(need: Need) -> TensorSpec:
    """The layout of the gradient of an operand, before its sums over ranks end."""
    partition = need.spec.dual.partition
    pending = partition.unreduced.union(need.casts) - partition.reduced
    return need.spec.with_partition(P(*partition, unreduced=pending, reduced=partition.reduced))
