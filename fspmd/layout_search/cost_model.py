"""What a choice of layouts takes, as sums over variables and pairs of them: time in µs, and bytes on each rank.

A value is a variable whose choices are its layouts; an op is one whose choices are its ways. A value and an op that
reads it share the price of the move between them; with one that makes it, which choices go together.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fspmd.layout_search.alike_axes import alike, renamed
from fspmd.layout_search.call_layouts import CallChoice, call_choices, layouts
from fspmd.layout_search.move_prices import ChoiceCost, Prices, ValueLayout, least_prices, making, size
from fspmd.layout_search.op_graph import Op, OpGraph
from fspmd.layout_search.repeated_layers import Ties
from fspmd.redistribution.cost import Topology
from fspmd.redistribution.moves import moves
from fspmd.redistribution.routes import route
from fspmd.spec import P, TensorSpec

_ROUNDING = 1e-9  # µs


class CostModel:
    """Of an op graph, where ops and values that are tied are one variable.

    Variables have numbers: their ``choices``, what these cost by themselves (``own``), and in ``pairs``, by the numbers
    of a value and an op. Moves cost what they take at least, until they are priced.
    """

    def __init__(
        self,
        graph: OpGraph,
        topology: Topology,
        fixed: Mapping[int, P],
        tied: Ties = Ties(),  # noqa: B008 (it is immutable)
        tables: dict[Any, Any] | None = None,
    ) -> None:
        self.graph, self.topology = graph, topology
        self.choices: list[tuple[Any, ...]] = []
        self.own: list[ChoiceCost] = []
        self.pairs: dict[tuple[int, int], ChoiceCost] = {}
        self._fixed, self._tied = fixed, tied
        self._tables = {} if tables is None else tables  # what was reckoned, for another model of the graph
        self._of_op: dict[int, int] = {}
        self._of_value: dict[int, int] = {}
        self._homes = dict(graph.gradients) | dict(graph.written)
        self._parts: dict[tuple[int, int], list[Prices]] = {}  # of a value and an op, whose prices add up
        self._priced_from: dict[TensorSpec, list[Prices]] = {}
        self._joined: dict[Any, ChoiceCost] = {}  # what a value and an op share, by what it is the sum of
        self._ways = [self._call_choices(op) for op in graph.ops]
        self._read: dict[int, list[int]] = {}
        for i, op in enumerate(graph.ops):
            for n in op.operands:
                self._read.setdefault(self._root(n), []).append(i)
        self._summed_once = self._cast_by_several()
        self._cast = set(map(self._root, self._summed_once))
        self._build()

    @property
    def arguments(self) -> list[int]:
        """The variables of the graph's arguments."""
        return list(dict.fromkeys(self._of_value[number] for number in self.graph.leaves))

    def layout(self, number: int, chosen: Sequence[int]) -> TensorSpec:
        """How a value lies."""
        variable = self._of_value[number]
        laid: ValueLayout = self.choices[variable][chosen[variable]]
        return laid.spec

    def way(self, op: int, chosen: Sequence[int]) -> CallChoice:
        """How an op is done."""
        variable = self._of_op[op]
        way: CallChoice = self.choices[variable][chosen[variable]]
        return way

    def cost(self, chosen: Sequence[int]) -> tuple[float, float]:
        """Time and memory of one choice for each variable."""
        time = sum(float(own.time[i]) for own, i in zip(self.own, chosen, strict=True))
        memory = sum(float(own.memory[i]) for own, i in zip(self.own, chosen, strict=True))
        for (a, b), cost in self.pairs.items():
            time += float(cost.time[chosen[a], chosen[b]])
            memory += float(cost.memory[chosen[a], chosen[b]])
        return time, memory

    # --- prices -------------------------------------------------------------------------------------------------------

    def price(self, chosen: Sequence[int]) -> bool:
        """Price the moves of these choices; whether some cost more than they took at least."""
        least = self.cost(chosen)[0]
        for (value, op), parts in self._parts.items():
            for part in parts:
                i, k = chosen[value], int(part.places[chosen[op]])
                if not part.exact[i, k]:
                    self._learn(part.laid[i].spec, part.needs[k].spec)
        self._join()
        return self.cost(chosen)[0] > least + _ROUNDING

    def _learn(self, source: TensorSpec, target: TensorSpec) -> None:
        """Price a move wherever it is found, and those that differ by the names of alike axes."""
        for names in alike(source.mesh, self.topology):
            own = {name: axis for axis, name in names.items()}
            before, after = renamed(source, names), renamed(target, names)
            for part in self._priced_from.get(before, ()):
                for k in part.columns.get(after, ()):
                    need = part.needs[k]
                    casts = source.mesh.ordered({own[axis] for axis in need.casts})
                    way = moves(source, target, casts, self.topology, need.followed)
                    time = need.trips.there * way.forward + need.trips.back * (way.time - way.forward)
                    part.learn(before, k, time)

    def _join(self) -> None:
        """Add up what each value and op share, by the prices that are known."""
        before, self._joined = self._joined, {}
        for pair, parts in self._parts.items():
            key = tuple([(id(part), part.learned) for part in parts])
            if key not in self._joined:
                tables = [part.table() for part in parts] if key not in before else [before[key]]
                self._joined[key] = sum(tables[1:], tables[0])
            self.pairs[pair] = self._joined[key]

    # --- variables ----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        graph = self.graph
        made = {n: i for i, op in enumerate(graph.ops) for n in op.results}
        for number in range(len(graph.values)):
            if (home := self._home(number)) not in self._of_value:
                self._of_value[home] = self._add(self._layouts_of(home, made.get(home)))
            self._of_value[number] = self._of_value[home]
        self._remember()
        for i, op in enumerate(graph.ops):
            home = self._tied.ops.get(i, i)
            if home not in self._of_op:
                self._of_op[home] = self._add(self._ways[i])
            self._of_op[i] = variable = self._of_op[home]
            time = torch.tensor([way.time for way in self._ways[i]], dtype=torch.float64)
            self.own[variable] += ChoiceCost(time, torch.zeros_like(time))
            read = [self._reading(number, i, k) for k, number in enumerate(op.operands)]
            make = [self._making(number, i, k) for k, number in enumerate(op.results)]
            for number, part in zip((*op.operands, *op.results), read + make, strict=True):
                self._parts.setdefault((self._of_value[number], variable), []).append(part)
        for part in {id(part): part for parts in self._parts.values() for part in parts}.values():
            for spec in part.rows:
                self._priced_from.setdefault(spec, []).append(part)
        self._join()

    def _add(self, choices: tuple[Any, ...]) -> int:
        """A new variable, whose choices cost nothing yet."""
        nothing = torch.zeros(len(choices), dtype=torch.float64)
        self.choices.append(choices)
        self.own.append(ChoiceCost(nothing, nothing))
        return len(self.choices) - 1

    def _root(self, number: int) -> int:
        """The value that a gradient is of, or that was written into."""
        while (of := self._homes.get(number)) is not None:
            number = of
        return number

    def _home(self, number: int) -> int:
        """The value whose variable a value shares."""
        root = self._root(number)
        return self._tied.values.get(root, root)

    def _call_choices(self, op: Op) -> tuple[CallChoice, ...]:
        values = self.graph.values
        given = () if op.question is not None else tuple(values[n] for n in (*op.operands, *op.results))
        key = id(op.question), op.followed, op.trips, op.pinned, op.carried, given
        if key not in self._tables:
            self._tables[key] = call_choices(op, values, self.topology)
        found: tuple[CallChoice, ...] = self._tables[key]
        return found

    def _layouts_of(self, home: int, maker: int | None) -> tuple[ValueLayout, ...]:
        spec, graph = self.graph.values[home], self.graph
        if home in self._fixed:
            specs: tuple[TensorSpec, ...] = (spec.with_partition(self._fixed[home]),)
        elif home in graph.constants:
            specs = (spec,)
        elif maker is not None:
            k = graph.ops[maker].results.index(home)
            specs = tuple(dict.fromkeys(way.results[k] for way in self._ways[maker]))
        else:
            specs = layouts(spec)
        return self._summed(specs) if home in self._cast else tuple(map(ValueLayout, specs))

    def _cast_by_several(self) -> dict[int, list[int]]:
        """Values of which several ops cast a copy, and which one; its gradients are summed once for all of them."""
        found: dict[tuple[int, int], int] = {}
        for op, own in zip(self.graph.ops, self._ways, strict=True):
            for k, n in enumerate(op.operands):
                key = n, own[0].needs[k].trips.start
                found[key] = found.get(key, 0) + any(way.needs[k].casts for way in own)
        several: dict[int, list[int]] = {}
        for (number, start), count in found.items():
            if count > 1:
                several.setdefault(number, []).append(start)
        return several

    def _summed(self, specs: tuple[TensorSpec, ...]) -> tuple[ValueLayout, ...]:
        """Each layout with each set of axes over which it may be cast."""
        found: list[ValueLayout] = []
        for spec in specs:
            partition, sizes = spec.partition, spec.mesh.shape
            free = [axis for axis, n in sizes.items() if n > 1 and axis not in partition.mentioned]
            for count in range(len(free) + 1):
                found += [ValueLayout(spec, frozenset(axes)) for axes in itertools.combinations(free, count)]
        return tuple(found)

    def _remember(self) -> None:
        """What each value takes: its place in memory, the sums of its gradients, and pending sums that must end."""
        written = {number for number, _ in self.graph.written}
        ending = {*self.graph.outputs} - {n for op in self.graph.ops if op.carried for n in op.operands}
        for number in range(len(self.graph.values)):
            variable = self._of_value[number]
            laid: tuple[ValueLayout, ...] = self.choices[variable]
            times = 0 if number in written or number in self.graph.constants else self._held(number)
            memory = [float(times * size(one.spec)) for one in laid]
            time = [self._settled(one.spec) if number in ending else 0.0 for one in laid]
            for start in self._summed_once.get(number, ()):
                sums = self.graph.sums.get((number, start), 1)
                time = [t + sums * self._sum(one) for t, one in zip(time, laid, strict=True)]
            self.own[variable] += ChoiceCost(
                torch.tensor(time, dtype=torch.float64), torch.tensor(memory, dtype=torch.float64)
            )

    def _held(self, number: int) -> int:
        """How often memory holds it: an argument, its gradient, a result, what backward needs."""
        graph = self.graph
        if number in graph.leaves:
            return 1 + (number in graph.followed)
        return int(number in dict(graph.gradients) or number in graph.outputs or self._is_saved(number))

    def _is_saved(self, number: int) -> bool:
        return any(
            way.needs[k].saved
            for i in self._read.get(self._root(number), ())
            for k, n in enumerate(self.graph.ops[i].operands)
            if n == number
            for way in self._ways[i][:1]
        )

    def _sum(self, laid: ValueLayout) -> float:
        if not laid.summed:
            return 0.0
        return moves(laid.spec, laid.spec, laid.spec.mesh.ordered(laid.summed), self.topology, True).casting

    def _settled(self, spec: TensorSpec) -> float:
        """What ends its pending sums."""
        if not spec.partition.unreduced:
            return 0.0
        return route(spec, spec.with_partition(P(*spec.partition)), self.topology).price.time

    def _reading(self, number: int, op: int, operand: int) -> Prices:
        """The moves of an operand."""
        needs = tuple(way.needs[operand] for way in self._ways[op])
        alone = needs[0].trips.start not in self._summed_once.get(number, ())
        key = self.choices[self._of_value[number]], needs, alone
        if key not in self._tables:
            self._tables[key] = least_prices(*key, self.topology)
        found: Prices = self._tables[key]
        return found

    def _making(self, number: int, op: int, result: int) -> Prices:
        """A result lies as the way leaves it."""
        key = self.choices[self._of_value[number]], tuple(way.results[result] for way in self._ways[op])
        if key not in self._tables:
            self._tables[key] = making(*key)
        found: Prices = self._tables[key]
        return found
