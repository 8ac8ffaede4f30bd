"""What a choice of layouts takes, as sums over variables and pairs of them: time in µs, and bytes on each rank.

A value is a variable whose choices are its layouts; an op is one whose choices are its ways. A value and an op that
reads it share the price of the move between them; with one that makes it, which choices go together.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch

from fspmd.auto.axes import alike, renamed
from fspmd.auto.call_layouts import Need, Way, layouts, ways
from fspmd.auto.prices import Cost, Laid, Prices, least_prices, size
from fspmd.auto.record import Op, Program
from fspmd.auto.repeats import Ties
from fspmd.redistribution.cost import Topology
from fspmd.redistribution.moves import moves
from fspmd.redistribution.routes import route
from fspmd.spec import P, TensorSpec

_ROUNDING = 1e-9  # µs


@dataclass(slots=True)
class Model:
    """Variables by number: their choices, and what these cost; pairs of variables, the smaller number first."""

    choices: list[tuple[Any, ...]] = field(default_factory=list)
    own: list[Cost] = field(default_factory=list)
    pairs: dict[tuple[int, int], Cost] = field(default_factory=dict)

    def add(self, choices: tuple[Any, ...], cost: Cost) -> int:
        """A new variable."""
        self.choices.append(choices)
        self.own.append(cost)
        return len(self.choices) - 1

    def cost(self, chosen: Sequence[int]) -> tuple[float, float]:
        """Time and memory of one choice for each variable."""
        time = sum(float(own.time[i]) for own, i in zip(self.own, chosen, strict=True))
        memory = sum(float(own.memory[i]) for own, i in zip(self.own, chosen, strict=True))
        for (a, b), cost in self.pairs.items():
            time += float(cost.time[chosen[a], chosen[b]])
            memory += float(cost.memory[chosen[a], chosen[b]])
        return time, memory


class Builder:
    """The model of a program, where ops and values that are tied are one variable."""

    def __init__(
        self,
        program: Program,
        topology: Topology,
        fixed: Mapping[int, P],
        tied: Ties = Ties(),  # noqa: B008 (it is immutable)
        tables: dict[Any, Any] | None = None,
        directly: bool = False,
    ) -> None:
        self.program, self.topology, self.fixed, self.directly = program, topology, fixed, directly
        self.tables = {} if tables is None else tables  # what was reckoned, for other models of the program
        self.learned = 0  # times that prices have changed
        self.model = Model()
        self.of_op: dict[int, int] = {}
        self.of_value: dict[int, int] = {}
        self._tied = tied
        self._homes = dict(program.gradients) | dict(program.written)
        self._parts: dict[tuple[int, int], dict[int, tuple[Prices | Cost, int]]] = {}  # of a value and an op: how often
        self._priced_from: dict[TensorSpec, list[Prices]] = {}
        self._joined_at: dict[Prices, int] = {}  # what had been learned of parts, which other models may share
        self._joined: dict[Any, Cost] = {}  # what a value and an op share, by what it is the sum of
        self._ways = [self._ways_of(op) for op in program.ops]
        self._read: dict[int, list[int]] = {}
        for i, op in enumerate(program.ops):
            for n in op.operands:
                self._read.setdefault(self._root(n), []).append(i)
        self._summed_once = self._cast_by_several()
        self._cast = set(map(self._root, self._summed_once))
        self._build()

    def rough(self) -> Builder:
        """The same model with moves by direct routes, which are quickly found and no quicker."""
        tables = {key: one.copied() if isinstance(one, Prices) else one for key, one in self.tables.items()}
        return Builder(self.program, self.topology, self.fixed, self._tied, tables, True)

    def _root(self, number: int) -> int:
        """The value that a gradient is of, or that was written into."""
        while (of := self._homes.get(number)) is not None:
            number = of
        return number

    @property
    def arguments(self) -> list[int]:
        """The variables of the program's arguments."""
        return list(dict.fromkeys(self.of_value[number] for number in self.program.leaves))

    def home(self, number: int) -> int:
        """The value whose variable a value shares."""
        root = self._root(number)
        return self._tied.values.get(root, root)

    def chosen_value(self, number: int, chosen: Sequence[int]) -> TensorSpec:
        """How a value lies."""
        variable = self.of_value[number]
        laid: Laid = self.model.choices[variable][chosen[variable]]
        return laid.spec

    def chosen_way(self, op: int, chosen: Sequence[int]) -> Way:
        """How an op is done."""
        variable = self.of_op[op]
        way: Way = self.model.choices[variable][chosen[variable]]
        return way

    def _ways_of(self, op: Op) -> tuple[Way, ...]:
        values = self.program.values
        given = () if op.question is not None else tuple(values[n] for n in (*op.operands, *op.results))
        key = id(op.question), op.followed, op.trips, op.pinned, op.carried, given
        if key not in self.tables:
            self.tables[key] = ways(op, values, self.topology)
        found: tuple[Way, ...] = self.tables[key]
        return found

    def _build(self) -> None:
        program = self.program
        made = {n: i for i, op in enumerate(program.ops) for n in op.results}
        for number in range(len(program.values)):
            if (home := self.home(number)) not in self.of_value:
                self.of_value[home] = self._value(home, made.get(home))
            self.of_value[number] = self.of_value[home]
        self._remember()
        for i, op in enumerate(program.ops):
            home = self._tied.ops.get(i, i)
            if home not in self.of_op:
                times = torch.tensor([way.time for way in self._ways[i]], dtype=torch.float64)
                self.of_op[home] = self.model.add(self._ways[i], Cost(torch.zeros_like(times), torch.zeros_like(times)))
            self.of_op[i] = variable = self.of_op[home]
            own = torch.tensor([way.time for way in self._ways[i]], dtype=torch.float64)
            self.model.own[variable] += Cost(own, torch.zeros_like(own))
            for k, number in enumerate(op.operands):
                self._add(number, variable, self._reading(number, i, k))
            for k, number in enumerate(op.results):
                self._add(number, variable, self._making(self.of_value[number], i, k))
        for pair in self._parts:
            self._join(pair)
        parts = {id(part): part for own in self._parts.values() for part, _ in own.values()}
        for part in parts.values():
            if isinstance(part, Prices):
                self._joined_at[part] = part.learned
                for spec in part.rows:
                    self._priced_from.setdefault(spec, []).append(part)

    # --- values -------------------------------------------------------------------------------------------------------

    def _value(self, home: int, maker: int | None) -> int:
        spec, program = self.program.values[home], self.program
        if home in self.fixed:
            specs: tuple[TensorSpec, ...] = (spec.with_partition(self.fixed[home]),)
        elif home in program.constants:
            specs = (spec,)
        elif maker is not None:
            k = program.ops[maker].results.index(home)
            specs = tuple(dict.fromkeys(way.results[k] for way in self._ways[maker]))
        else:
            specs = layouts(spec)
        found = tuple(self._summed(specs)) if home in self._cast else tuple(Laid(one) for one in specs)
        nothing = torch.zeros(len(found), dtype=torch.float64)
        return self.model.add(found, Cost(nothing, nothing))

    def _cast_by_several(self) -> dict[int, list[int]]:
        """Values of which several ops cast a copy, and which one; its gradients are summed once for all of them."""
        found: dict[tuple[int, int], int] = {}
        for op, own in zip(self.program.ops, self._ways, strict=True):
            for k, n in enumerate(op.operands):
                key = n, own[0].needs[k].trips.start
                found[key] = found.get(key, 0) + any(way.needs[k].casts for way in own)
        several: dict[int, list[int]] = {}
        for (number, start), count in found.items():
            if count > 1:
                several.setdefault(number, []).append(start)
        return several

    def _summed(self, specs: tuple[TensorSpec, ...]) -> list[Laid]:
        """Each layout with each set of axes over which it may be cast."""
        found = []
        for spec in specs:
            partition, sizes = spec.partition, spec.mesh.shape
            free = [axis for axis, n in sizes.items() if n > 1 and axis not in partition.mentioned]
            for count in range(len(free) + 1):
                found += [Laid(spec, frozenset(axes)) for axes in itertools.combinations(free, count)]
        return found

    def _remember(self) -> None:
        """What each value takes: its place in memory, the sums of its gradients, and pending sums that must end."""
        written = {number for number, _ in self.program.written}
        ending = {*self.program.outputs} - {n for op in self.program.ops if op.carried for n in op.operands}
        for number in range(len(self.program.values)):
            variable = self.of_value[number]
            laid: tuple[Laid, ...] = self.model.choices[variable]
            times = 0 if number in written or number in self.program.constants else self._held(number)
            memory = [float(times * size(one.spec)) for one in laid]
            time = [self._settled(one.spec) if number in ending else 0.0 for one in laid]
            for start in self._summed_once.get(number, ()):
                sums = self.program.sums.get((number, start), 1)
                time = [t + sums * self._sum(one) for t, one in zip(time, laid, strict=True)]
            self.model.own[variable] += Cost(
                torch.tensor(time, dtype=torch.float64), torch.tensor(memory, dtype=torch.float64)
            )

    def _held(self, number: int) -> int:
        """How often memory holds it: an argument, its gradient, a result, what backward needs."""
        program = self.program
        if number in program.leaves:
            return 1 + (number in program.followed)
        return int(number in dict(program.gradients) or number in program.outputs or self._is_saved(number))

    def _is_saved(self, number: int) -> bool:
        return any(
            way.needs[k].saved
            for i in self._read.get(self._root(number), ())
            for k, n in enumerate(self.program.ops[i].operands)
            if n == number
            for way in self._ways[i][:1]
        )

    def _sum(self, laid: Laid) -> float:
        if not laid.summed:
            return 0.0
        return moves(laid.spec, laid.spec, laid.spec.mesh.ordered(laid.summed), self.topology, True).casting

    def _settled(self, spec: TensorSpec) -> float:
        """What ends its pending sums."""
        if not spec.partition.unreduced:
            return 0.0
        return route(spec, spec.with_partition(P(*spec.partition)), self.topology).price.time

    # --- pairs --------------------------------------------------------------------------------------------------------

    def _add(self, number: int, op: int, part: Prices | Cost) -> None:
        parts = self._parts.setdefault((self.of_value[number], op), {})
        _, times = parts.get(id(part), (part, 0))
        parts[id(part)] = part, times + 1

    def _join(self, pair: tuple[int, int]) -> None:
        """Add up what a value and an op share."""
        value, op = pair
        key = tuple([(id(part), times) for part, times in self._parts[pair].values()]), value < op
        if key not in self._joined:
            rows = self._parts[pair].values()
            costs = [(part.table() if isinstance(part, Prices) else part) * times for part, times in rows]
            whole = sum(costs[1:], costs[0])
            self._joined[key] = whole if value < op else whole.mT
        self.model.pairs[(value, op) if value < op else (op, value)] = self._joined[key]

    def _joined_anew(self) -> None:
        """Where parts have changed."""
        changed = {id(part) for part in self._changed()}
        self.learned += 1
        self._joined.clear()
        self._joined_at = {part: part.learned for part in self._joined_at}
        for pair, parts in self._parts.items():
            if not changed.isdisjoint(parts):
                self._join(pair)

    def _changed(self) -> list[Prices]:
        """Parts of which more has been learned, for this model or another of the program."""
        return [part for part, learned in self._joined_at.items() if part.learned != learned]

    def price(self, chosen: Sequence[int]) -> bool:
        """Price the moves of these choices; whether some cost more than they take at least."""
        for (value, op), parts in self._parts.items():
            for part, _ in parts.values():
                if isinstance(part, Prices):
                    i, k = chosen[value], int(part.places[chosen[op]])
                    if not part.exact[i, k]:
                        self._learn(part.laid[i].spec, part.needs[k].spec)
        if not self._changed():
            return False
        least = self.model.cost(chosen)[0]
        self._joined_anew()
        return self.model.cost(chosen)[0] > least + _ROUNDING

    def _learn(self, source: TensorSpec, target: TensorSpec) -> None:
        """Price a move wherever it is found, and those that differ by the names of alike axes."""
        for names in alike(source.mesh, self.topology):
            own = {name: axis for axis, name in names.items()}
            before, after = renamed(source, names), renamed(target, names)
            for part in self._priced_from.get(before, ()):
                for k in part.columns.get(after, ()):
                    need = part.needs[k]
                    casts = source.mesh.ordered({own[axis] for axis in need.casts})
                    time = self._time(source, target, casts, need)
                    for i in part.rows[before]:
                        if not part.exact[i, k]:
                            part.cost.time[i, k], part.exact[i, k] = time, True
                            part.learned += 1

    def price_all(self) -> None:
        """Price every move."""
        for part in {id(part): part for parts in self._priced_from.values() for part in parts}.values():
            for i, k in (~part.exact).nonzero().tolist():
                if not part.exact[i, k]:
                    self._learn(part.laid[i].spec, part.needs[k].spec)
        self._joined_anew()

    def _reading(self, number: int, op: int, operand: int) -> Prices:
        """The moves of an operand."""
        laid, own = self.model.choices[self.of_value[number]], self._ways[op]
        needs = tuple(way.needs[operand] for way in own)
        key = laid, needs, needs[0].trips.start not in self._summed_once.get(number, ())
        if key not in self.tables:
            self.tables[key] = least_prices(*key, self.topology)
        found: Prices = self.tables[key]
        return found

    def _time(self, source: TensorSpec, target: TensorSpec, casts: tuple[str, ...], need: Need) -> float:
        key = source, target, casts, need.followed, need.trips.there, need.trips.back
        if key not in self.tables:
            way = moves(source, target, casts, self.topology, need.followed, self.directly)
            self.tables[key] = need.trips.there * way.forward + need.trips.back * (way.time - way.forward)
        found: float = self.tables[key]
        return found

    def _making(self, variable: int, op: int, result: int) -> Cost:
        """A result lies as the way leaves it."""
        laid, own = self.model.choices[variable], self._ways[op]
        key = laid, tuple(way.results[result] for way in own)
        if key not in self.tables:
            table = torch.tensor(
                [[0.0 if one.spec is spec else inf for spec in key[1]] for one in laid], dtype=torch.float64
            )
            self.tables[key] = Cost(table, torch.zeros_like(table))
        found: Cost = self.tables[key]
        return found
