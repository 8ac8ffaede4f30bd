"""The choices of one call, and the prices of the moves of its operands.

A choice has the layouts that the operands need, the layouts of the results, and its cost. No operand has a layout yet,
so each mesh axis may shard any dim of the computation. A move leads from a layout of a value to a need of an op.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, prod

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.entries import entry_of
from fspmd.global_view.axis_choices import Choice, passed_on
from fspmd.global_view.question import Question, viewed_call
from fspmd.global_view.strategies import layouts_of, working
from fspmd.layout_search.move_counts import ONCE, MoveCounts
from fspmd.layout_search.op_graph import Op
from fspmd.redistribution.bounds import least_times
from fspmd.redistribution.cost import Topology
from fspmd.redistribution.moves import moves
from fspmd.rules.factors import Factors
from fspmd.rules.views import reshaped
from fspmd.spec import P, TensorSpec


@dataclass(frozen=True, slots=True)
class Need:
    """The layout that a strategy needs for an operand.

    Attributes:
        spec: the layout.
        casts: the axes over which the operand is then cast to varying.
        followed: whether it will have a gradient.
        saved: whether backward needs it.
        stays: whether it must not be moved, since the call writes into it.
        counts: how often it is moved, and its gradient back.
    """

    spec: TensorSpec
    casts: tuple[str, ...] = ()
    followed: bool = False
    saved: bool = False
    stays: bool = False
    counts: MoveCounts = ONCE


@dataclass(frozen=True, slots=True)
class CallChoice:
    """A strategy of a call.

    Attributes:
        needs: the needs of the operands.
        results: the layouts of the results.
        computing: µs of its computation, forward and backward.
        within: µs of the collectives within the call, forward and backward.
    """

    needs: tuple[Need, ...]
    results: tuple[TensorSpec, ...]
    computing: float
    within: float

    @property
    def time(self) -> float:
        """µs of computation and collectives."""
        return self.computing + self.within


def call_choices(op: Op, values: Sequence[TensorSpec]) -> tuple[CallChoice, ...]:
    """The strategies of one op of a graph. ``values``: the values of the graph."""
    if op.question is not None:
        return _quickest_choices(op.question, op.followed, op.counts)
    if op.carried and op.pinned is None:
        return tuple(CallChoice((Need(spec),), (spec,), 0.0, 0.0) for spec in layouts(values[op.results[0]]))
    specs, results = [values[n] for n in op.operands], tuple(values[n] for n in op.results)
    if op.pinned is not None:
        specs = [spec.with_partition(op.pinned) for spec in specs]
        results = tuple(spec.with_partition(op.pinned) for spec in results)
    counts = op.counts or (ONCE,) * len(specs)
    rows = enumerate(zip(specs, counts, strict=True))
    needs = tuple(Need(spec, (), i in op.followed, counts=t) for i, (spec, t) in rows)
    return (CallChoice(needs, results, 0.0, 0.0),)


@cached(maxsize=1024)
def layouts(spec: TensorSpec, pending: bool = False) -> tuple[TensorSpec, ...]:
    """The layouts in which no rank need be without elements: each axis shards a dim, or none.

    ``pending``: whether a value may also have a pending sum over an axis.
    """
    mesh, specs = spec.mesh, []
    options = [None, *range(spec.ndim), *(["U"] if pending else [])]
    for choice in itertools.product(options, repeat=len(mesh.axis_names)):
        named = list(zip(mesh.axis_names, choice, strict=True))
        if any(mesh.shape[axis] == 1 and to is not None for axis, to in named):
            continue
        entries = [tuple(axis for axis, to in named if to == d and to is not None) for d in range(spec.ndim)]
        if all(prod(mesh.shape[a] for a in axes) <= max(n, 1) for axes, n in zip(entries, spec.shape, strict=True)):
            unreduced = frozenset(axis for axis, to in named if to == "U")
            specs.append(spec.with_partition(P(*map(entry_of, entries), unreduced=unreduced)))
    return tuple(specs)


def _quickest_choices(
    question: Question, followed: frozenset[int], given: tuple[MoveCounts, ...]
) -> tuple[CallChoice, ...]:
    """The strategies of a question. Of several with equal needs and results, the quickest."""
    quickest: dict[tuple[tuple[Need, ...], tuple[TensorSpec, ...]], CallChoice] = {}
    counts = given or (ONCE,) * len(question.operands)
    for choice in itertools.chain(_regrouped(question, followed, counts), _by_axes(question, followed, counts)):
        needs, results = choice.needs, choice.results
        if question.fixed and (needs[0].casts or needs[0].spec.partition is not results[0].partition):
            continue
        if (needs, results) not in quickest or choice.time < quickest[needs, results].time:
            quickest[needs, results] = choice
    return tuple(quickest.values())


def _regrouped(question: Question, followed: frozenset[int], counts: tuple[MoveCounts, ...]) -> Iterator[CallChoice]:
    """The strategies of a reshape in which the blocks of the result are those of the operand."""
    if question.row.rule is not reshaped:
        return
    for spec in layouts(question.operands[0], True):
        views = viewed_call(question.row, question.factors, [spec], question.results)
        if views is not None and views.regrouped is not None and not views.regrouped.flat:
            result = question.results[0].with_partition(views.regrouped)
            yield CallChoice((Need(spec, (), 0 in followed, counts=counts[0]),), (result,), 0.0, 0.0)


def _by_axes(question: Question, followed: frozenset[int], counts: tuple[MoveCounts, ...]) -> Iterator[CallChoice]:
    """The strategies for each combination of choices of the axes."""
    operands, results, row = question.operands, question.results, question.row
    saves = question.linear in ("", "product") and question.viewed is None
    question = question._replace(gradients=followed)
    linear = question.passes_on
    body, most_counts = row.body, max([counts[i] for i in followed], default=MoveCounts(1, 0))
    for factors in (question.factors, *question.factors.alternatives):
        sizes = _sizes(factors, operands, results)
        mesh = operands[0].mesh
        options = [
            [*_choices(factors, linear, len(operands), body is not None)] if n > 1 else ["I" * len(operands)]
            for n in mesh.shape.values()
        ]
        for combination in itertools.product(*options):
            choices: dict[str, Choice] = dict(zip(mesh.axis_names, combination, strict=True))
            if any(prod(mesh.shape[a] for a, c in choices.items() if c == f) > max(n, 1) for f, n in sizes.items()):
                continue
            specs = layouts_of(question, factors, choices)
            if specs is None:
                continue
            time = 0.0 if question.viewed is not None else working(factors, specs.operands, specs.results)
            within = specs.body * most_counts.forward + specs.back * most_counts.backward
            rows = enumerate(zip(specs.operands, specs.casts, strict=True))
            needs = tuple(
                Need(
                    spec,
                    cast if i in followed else (),
                    i in followed,
                    bool(followed) and saves,
                    question.fixed and not i,
                    counts[i],
                )
                for i, (spec, cast) in rows
            )
            yield CallChoice(needs, specs.results, time * most_counts.passes, within)


def _sizes(factors: Factors, operands: Sequence[TensorSpec], results: Sequence[TensorSpec]) -> dict[int, int]:
    """The smallest size of each factor."""
    smallest: dict[int, int] = {}
    for dims, spec in zip((*factors.operands, *factors.results), (*operands, *results), strict=True):
        for factor, size in zip(dims, spec.shape, strict=True):
            if factor is not None:
                smallest[factor] = min(size, smallest.get(factor, size))
    return smallest


def _choices(factors: Factors, linear: str, operands: int, has_body: bool) -> Iterator[Choice]:
    """The choices of one axis: do nothing, shard a factor, or leave sums pending that the function passes on."""
    yield "I" * operands
    sharded = {factor: None for dims in factors.operands for factor in dims if factor is not None}
    for factor in sharded:
        if factor not in factors.whole or has_body:
            yield factor
    for _, choice in passed_on(factors, linear, operands):
        yield choice


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
    counts = needs[0].counts
    time = counts.forward * least_times(specs, [need.spec for need in needs], topology)
    if needs[0].followed:
        gradients = [_gradient(need) for need in needs]
        time += counts.backward * least_times(gradients, [spec.dual for spec in specs], topology).mT
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
    return need.counts.backward * moves(layout.spec, need.spec, need.casts, topology, True).casting


def _gradient(need: Need) -> TensorSpec:
    """The layout of the gradient of an operand, before its sums over ranks end."""
    partition = need.spec.dual.partition
    pending = partition.unreduced.union(need.casts) - partition.reduced
    return need.spec.with_partition(P(*partition, unreduced=pending, reduced=partition.reduced))
