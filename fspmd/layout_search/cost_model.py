"""The cost of layouts as a sum over variables and pairs of variables: time in µs, and bytes on each rank.

A value is a variable whose choices are its layouts. An op is a variable whose choices are its strategies. A value and
an op that reads it share the price of the move between them. A value and the op that makes it share a price of zero or
infinity, which says whether their choices fit together.

Some choices may replace each other: those of layers that repeat, and of mesh axes with equal sizes and links. Layers
repeat where ops are equal, on values with equal relations, period after period.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fspmd.cache import cached
from fspmd.entries import entry_of
from fspmd.layout_search.call_layouts import (
    CallChoice,
    ChoiceCost,
    Prices,
    ValueLayout,
    call_choices,
    layouts,
    least_prices,
    making,
)
from fspmd.layout_search.op_graph import Op, OpGraph
from fspmd.meshes.mesh import Mesh
from fspmd.redistribution.cost import Topology
from fspmd.redistribution.moves import moves
from fspmd.redistribution.routes import route
from fspmd.spec import P, TensorSpec


@cached(maxsize=64)
def alike(mesh: Mesh, topology: Topology) -> tuple[dict[str, str], ...]:
    """The renamings of axes under which all sizes and links stay the same. The first is the identity."""
    axes = mesh.axis_names
    groups = [group for n in range(1, len(axes) + 1) for group in itertools.combinations(axes, n)]

    def links(names: Mapping[str, str]) -> list[Any]:
        named = [mesh.ordered({names[axis] for axis in group}) for group in groups]
        return [(mesh.axis_size(group), topology.link(mesh, group)) for group in named]

    renamings = [dict(zip(axes, names, strict=True)) for names in itertools.permutations(axes)]
    return tuple(names for names in renamings if links(names) == links(renamings[0]))


@cached(maxsize=1 << 14)
def _renaming(spec: TensorSpec, names: tuple[tuple[str, str], ...]) -> TensorSpec:
    named, partition = dict(names), spec.partition
    entries = [entry_of(tuple([named[axis] for axis in axes])) for axes in partition.dim_axes]
    pending, reduced = (frozenset([named[a] for a in axes]) for axes in (partition.unreduced, partition.reduced))
    return spec.with_partition(P(*entries, unreduced=pending, reduced=reduced))


def renamed(spec: TensorSpec, names: Mapping[str, str]) -> TensorSpec:
    """A layout with other names of axes. ``names``: new names by old names."""
    return spec if spec.flat else _renaming(spec, tuple(names.items()))


@dataclass(frozen=True, slots=True)
class Ties:
    """Repeated ops and values, each with the first op or value that it repeats."""

    ops: dict[int, int] = field(default_factory=dict)
    values: dict[int, int] = field(default_factory=dict)


def ties(graph: OpGraph, fixed: Mapping[int, P]) -> Ties:
    """The ties of the longest run of periods; empty if nothing repeats. ``fixed``: given layouts by value."""
    start, period, length = _longest(_signatures(graph, fixed))
    tied = Ties()
    for i in range(start + period, start + length):
        first = start + (i - start) % period
        tied.ops[i] = first
        op, earlier = graph.ops[i], graph.ops[first]
        tied.values.update(zip(op.results, earlier.results, strict=True))
        pairs = zip(op.operands, earlier.operands, strict=True)
        tied.values.update((n, m) for n, m in pairs if n != m and n in graph.leaves and m in graph.leaves)
    return tied


def _signatures(graph: OpGraph, fixed: Mapping[int, P]) -> list[Any]:
    """For each op a signature: its function, and the last uses of its operands, counted back from the op."""
    seen: dict[int, tuple[int, int]] = {}
    leaves = set(graph.leaves)
    signatures = []
    for i, op in enumerate(graph.ops):
        rows: list[Any] = []
        for k, n in enumerate(op.operands):
            if n in seen:
                at, place = seen[n]
                rows.append((i - at, place, fixed.get(n)))
            else:
                rows.append((graph.values[n], n in leaves, n in graph.followed, fixed.get(n)))
            seen[n] = i, k
        seen |= {n: (i, -1 - k) for k, n in enumerate(op.results)}
        signatures.append((op.name, id(op.question), op.followed, op.counts, op.pinned, tuple(rows)))
    return signatures


def _longest(signatures: list[Any]) -> tuple[int, int, int]:
    """The start, the period and the length of the longest run of complete periods.

    Of runs of equal length, the run with the shortest period.
    """
    numbers: dict[Any, int] = {}
    row = [numbers.setdefault(signature, len(numbers)) for signature in signatures]
    best = (0, 1, 1)
    for period in range(1, len(row) // 2 + 1):
        run = 0
        for i in range(len(row) - period + 1):
            if i < len(row) - period and row[i] == row[i + period]:
                run += 1
                continue
            length = (run // period + 1) * period
            if run >= period and length > best[2]:
                best = (i - run, period, length)
            run = 0
    return best


_ROUNDING = 1e-9  # µs


class CostModel:
    """The cost model of an op graph, in which tied ops and tied values share a variable.

    Variables are numbers. ``choices`` has the choices of each variable, and ``own`` their costs. ``pairs`` has the
    costs of pairs of choices, by the numbers of a value and an op. The cost of a move is a lower bound until it is
    priced.
    """

    def __init__(
        self,
        graph: OpGraph,
        topology: Topology,
        fixed: Mapping[int, P],
        tied: Ties = Ties(),
        tables: dict[Any, Any] | None = None,
    ) -> None:
        self.graph, self.topology = graph, topology
        self.choices: list[tuple[Any, ...]] = []
        self.own: list[ChoiceCost] = []
        self.pairs: dict[tuple[int, int], ChoiceCost] = {}
        self._fixed, self._tied = fixed, tied
        self._tables = {} if tables is None else tables  # intermediate results, shared by models of the graph
        self._of_op: dict[int, int] = {}  # variables of ops
        self._of_value: dict[int, int] = {}  # variables of values
        self._homes = dict(graph.gradients) | dict(graph.written)
        self._parts: dict[tuple[int, int], list[Prices]] = {}  # by value and op, prices that add up
        self._priced_from: dict[TensorSpec, list[Prices]] = {}  # prices of moves from a layout
        self._joined: dict[Any, ChoiceCost] = {}  # sums of prices, by the prices
        self._strategies = [self._call_choices(op) for op in graph.ops]
        self._readers: dict[int, list[int]] = {}  # ops that read a value
        for i, op in enumerate(graph.ops):
            for n in op.operands:
                self._readers.setdefault(self._root(n), []).append(i)
        self._summed_once = self._cast_by_several()
        self._cast = set(map(self._root, self._summed_once))
        self._build()

    @property
    def arguments(self) -> list[int]:
        """The variables of the graph's arguments."""
        return list(dict.fromkeys(self._of_value[number] for number in self.graph.leaves))

    def layout(self, number: int, chosen: Sequence[int]) -> TensorSpec:
        """The layout of a value."""
        variable = self._of_value[number]
        choice: ValueLayout = self.choices[variable][chosen[variable]]
        return choice.spec

    def strategy(self, op: int, chosen: Sequence[int]) -> CallChoice:
        """The strategy of an op."""
        variable = self._of_op[op]
        choice: CallChoice = self.choices[variable][chosen[variable]]
        return choice

    def cost(self, chosen: Sequence[int]) -> tuple[float, float]:
        """The time and memory of one choice for each variable."""
        time = sum(float(own.time[i]) for own, i in zip(self.own, chosen, strict=True))
        memory = sum(float(own.memory[i]) for own, i in zip(self.own, chosen, strict=True))
        for (a, b), cost in self.pairs.items():
            time += float(cost.time[chosen[a], chosen[b]])
            memory += float(cost.memory[chosen[a], chosen[b]])
        return time, memory

    # --- prices -------------------------------------------------------------------------------------------------------

    def price(self, chosen: Sequence[int]) -> bool:
        """Price the moves of these choices. Returns whether they cost more than before."""
        before = self.cost(chosen)[0]
        for (value, op), parts in self._parts.items():
            for part in parts:
                i, k = chosen[value], int(part.places[chosen[op]])
                if not part.exact[i, k]:
                    self._price_move(part.layouts[i].spec, part.needs[k].spec)
        self._join()
        return self.cost(chosen)[0] > before + _ROUNDING

    def _price_move(self, source: TensorSpec, target: TensorSpec) -> None:
        """Price a move in all tables, and moves that differ from it by the names of alike axes."""
        for names in alike(source.mesh, self.topology):
            original = {name: axis for axis, name in names.items()}
            before, after = renamed(source, names), renamed(target, names)
            for part in self._priced_from.get(before, ()):
                for k in part.columns.get(after, ()):
                    need = part.needs[k]
                    casts = source.mesh.ordered({original[axis] for axis in need.casts})
                    move = moves(source, target, casts, self.topology, need.followed)
                    time = need.counts.forward * move.forward + need.counts.backward * (move.time - move.forward)
                    part.set_price(before, k, time)

    def _join(self) -> None:
        """Add up the prices that each value and op share."""
        before, self._joined = self._joined, {}
        for pair, parts in self._parts.items():
            key = tuple([(id(part), part.changes) for part in parts])
            if key not in self._joined:
                tables = [part.table() for part in parts] if key not in before else [before[key]]
                self._joined[key] = sum(tables[1:], tables[0])
            self.pairs[pair] = self._joined[key]

    # --- variables ----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        """Make the variables, their costs, and the costs of pairs."""
        graph = self.graph
        makers = {n: i for i, op in enumerate(graph.ops) for n in op.results}
        for number in range(len(graph.values)):
            if (home := self._home(number)) not in self._of_value:
                self._of_value[home] = self._add(self._layouts_of(home, makers.get(home)))
            self._of_value[number] = self._of_value[home]
        self._add_value_costs()
        for i, op in enumerate(graph.ops):
            home = self._tied.ops.get(i, i)
            if home not in self._of_op:
                self._of_op[home] = self._add(self._strategies[i])
            self._of_op[i] = variable = self._of_op[home]
            time = torch.tensor([strategy.time for strategy in self._strategies[i]], dtype=torch.float64)
            self.own[variable] += ChoiceCost(time, torch.zeros_like(time))
            reading = [self._reading(number, i, k) for k, number in enumerate(op.operands)]
            making = [self._making(number, i, k) for k, number in enumerate(op.results)]
            for number, part in zip((*op.operands, *op.results), reading + making, strict=True):
                self._parts.setdefault((self._of_value[number], variable), []).append(part)
        for part in {id(part): part for parts in self._parts.values() for part in parts}.values():
            for spec in part.rows:
                self._priced_from.setdefault(spec, []).append(part)
        self._join()

    def _add(self, choices: tuple[Any, ...]) -> int:
        """A new variable, whose choices cost nothing yet."""
        zeros = torch.zeros(len(choices), dtype=torch.float64)
        self.choices.append(choices)
        self.own.append(ChoiceCost(zeros, zeros))
        return len(self.choices) - 1

    def _root(self, number: int) -> int:
        """The value of which a value is the gradient, or into which it is written; else the value itself."""
        while (source := self._homes.get(number)) is not None:
            number = source
        return number

    def _home(self, number: int) -> int:
        """The value whose variable a value shares."""
        root = self._root(number)
        return self._tied.values.get(root, root)

    def _call_choices(self, op: Op) -> tuple[CallChoice, ...]:
        """The strategies of an op."""
        values = self.graph.values
        given = () if op.question is not None else tuple(values[n] for n in (*op.operands, *op.results))
        key = id(op.question), op.followed, op.counts, op.pinned, op.carried, given
        return self._kept(key, lambda: call_choices(op, values))  # type: ignore[no-any-return]

    def _kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """An intermediate result by its key, which is made once."""
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]

    def _layouts_of(self, home: int, maker: int | None) -> tuple[ValueLayout, ...]:
        """The layouts of a value. ``maker``: the op that makes it."""
        spec, graph = self.graph.values[home], self.graph
        if home in self._fixed:
            specs: tuple[TensorSpec, ...] = (spec.with_partition(self._fixed[home]),)
        elif home in graph.constants:
            specs = (spec,)
        elif maker is not None:
            k = graph.ops[maker].results.index(home)
            specs = tuple(dict.fromkeys(strategy.results[k] for strategy in self._strategies[maker]))
        else:
            specs = layouts(spec)
        return self._summed(specs) if home in self._cast else tuple(map(ValueLayout, specs))

    def _cast_by_several(self) -> dict[int, list[int]]:
        """For each value that several ops cast, the numbers of its copies that they cast (`MoveCounts.copy`).

        Backward sums the gradients of such a copy once for all of these ops.
        """
        counts: dict[tuple[int, int], int] = {}
        for op, strategies in zip(self.graph.ops, self._strategies, strict=True):
            for k, n in enumerate(op.operands):
                key = n, strategies[0].needs[k].counts.copy
                counts[key] = counts.get(key, 0) + any(strategy.needs[k].casts for strategy in strategies)
        several: dict[int, list[int]] = {}
        for (number, start), count in counts.items():
            if count > 1:
                several.setdefault(number, []).append(start)
        return several

    def _summed(self, specs: tuple[TensorSpec, ...]) -> tuple[ValueLayout, ...]:
        """Each layout with each set of axes over which it may be cast."""
        choices: list[ValueLayout] = []
        for spec in specs:
            partition, sizes = spec.partition, spec.mesh.shape
            free = [axis for axis, n in sizes.items() if n > 1 and axis not in partition.mentioned]
            for count in range(len(free) + 1):
                choices += [ValueLayout(spec, frozenset(axes)) for axes in itertools.combinations(free, count)]
        return tuple(choices)

    def _add_value_costs(self) -> None:
        """Add the cost of each value: its bytes, the sums of its gradients, and pending sums that must end."""
        written = {number for number, _ in self.graph.written}
        ending = {*self.graph.outputs} - {n for op in self.graph.ops if op.carried for n in op.operands}
        for number in range(len(self.graph.values)):
            variable = self._of_value[number]
            choices: tuple[ValueLayout, ...] = self.choices[variable]
            copies = 0 if number in written or number in self.graph.constants else self._copies(number)
            memory = [float(copies * choice.spec.block_bytes) for choice in choices]
            time = [self._settling_time(choice.spec) if number in ending else 0.0 for choice in choices]
            for start in self._summed_once.get(number, ()):
                sums = self.graph.sums.get((number, start), 1)
                time = [t + sums * self._summing_time(choice) for t, choice in zip(time, choices, strict=True)]
            self.own[variable] += ChoiceCost(
                torch.tensor(time, dtype=torch.float64), torch.tensor(memory, dtype=torch.float64)
            )

    def _copies(self, number: int) -> int:
        """The number of copies in memory: of an argument and its gradient, a result, a value that backward needs."""
        graph = self.graph
        if number in graph.leaves:
            return 1 + (number in graph.followed)
        return int(number in dict(graph.gradients) or number in graph.outputs or self._is_saved(number))

    def _is_saved(self, number: int) -> bool:
        """Whether backward needs a value."""
        return any(
            strategy.needs[k].saved
            for i in self._readers.get(self._root(number), ())
            for k, n in enumerate(self.graph.ops[i].operands)
            if n == number
            for strategy in self._strategies[i][:1]
        )

    def _summing_time(self, choice: ValueLayout) -> float:
        """µs of the sum of the gradients of a value over the axes ``choice.summed``."""
        if not choice.summed:
            return 0.0
        spec = choice.spec
        return moves(spec, spec, spec.mesh.ordered(choice.summed), self.topology, True).casting

    def _settling_time(self, spec: TensorSpec) -> float:
        """µs to settle the pending sums of a value."""
        if not spec.partition.unreduced:
            return 0.0
        return route(spec, spec.with_partition(P(*spec.partition)), self.topology).price.time

    def _reading(self, number: int, op: int, operand: int) -> Prices:
        """The prices of the moves of an operand."""
        needs = tuple(strategy.needs[operand] for strategy in self._strategies[op])
        alone = needs[0].counts.copy not in self._summed_once.get(number, ())
        key = self.choices[self._of_value[number]], needs, alone
        return self._kept(key, lambda: least_prices(*key, self.topology))  # type: ignore[no-any-return]

    def _making(self, number: int, op: int, result: int) -> Prices:
        """The prices of a result, which allow only the layout that the strategy gives."""
        specs = tuple(strategy.results[result] for strategy in self._strategies[op])
        key = self.choices[self._of_value[number]], specs
        return self._kept(key, lambda: making(*key))  # type: ignore[no-any-return]
