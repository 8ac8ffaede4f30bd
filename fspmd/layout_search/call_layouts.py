"""The strategies of one call: the layouts that its operands need, the layouts of its results, and its cost.

No operand has a layout yet, so each mesh axis may shard any dim of the computation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from fspmd.cache import cached
from fspmd.entries import entry_of
from fspmd.global_view.axis_choices import passed_on
from fspmd.global_view.flat_dims import viewed_call
from fspmd.global_view.layouts import Choice, layouts_of, working
from fspmd.global_view.question import Question
from fspmd.layout_search.move_counts import ONCE, Trips
from fspmd.layout_search.op_graph import Op
from fspmd.redistribution.cost import Topology
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
        trips: how often it is moved, and its gradient back.
    """

    spec: TensorSpec
    casts: tuple[str, ...] = ()
    followed: bool = False
    saved: bool = False
    stays: bool = False
    trips: Trips = ONCE


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


def call_choices(op: Op, values: Sequence[TensorSpec], topology: Topology) -> tuple[CallChoice, ...]:
    """The strategies of one op of a graph. ``values``: the values of the graph."""
    if op.question is not None:
        return _quickest_choices(op.question, op.followed, op.trips, topology)
    if op.carried and op.pinned is None:
        return tuple(CallChoice((Need(spec),), (spec,), 0.0, 0.0) for spec in layouts(values[op.results[0]]))
    specs, results = [values[n] for n in op.operands], tuple(values[n] for n in op.results)
    if op.pinned is not None:
        specs = [spec.with_partition(op.pinned) for spec in specs]
        results = tuple(spec.with_partition(op.pinned) for spec in results)
    trips = _trips(op.trips, len(specs))
    rows = enumerate(zip(specs, trips, strict=True))
    needs = tuple(Need(spec, (), i in op.followed, trips=t) for i, (spec, t) in rows)
    return (CallChoice(needs, results, 0.0, 0.0),)


def _trips(given: tuple[Trips, ...], count: int) -> tuple[Trips, ...]:
    return given or (ONCE,) * count


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
    question: Question, followed: frozenset[int], given: tuple[Trips, ...], topology: Topology
) -> tuple[CallChoice, ...]:
    """The strategies of a question. Of several with equal needs and results, the quickest."""
    quickest: dict[tuple[tuple[Need, ...], tuple[TensorSpec, ...]], CallChoice] = {}
    trips = _trips(given, len(question.operands))
    for choice in itertools.chain(_regrouped(question, followed, trips), _by_axes(question, followed, trips, topology)):
        needs, results = choice.needs, choice.results
        if question.fixed and (needs[0].casts or needs[0].spec.partition is not results[0].partition):
            continue
        if (needs, results) not in quickest or choice.time < quickest[needs, results].time:
            quickest[needs, results] = choice
    return tuple(quickest.values())


def _regrouped(question: Question, followed: frozenset[int], trips: tuple[Trips, ...]) -> Iterator[CallChoice]:
    """The strategies of a reshape in which the blocks of the result are those of the operand."""
    if question.row.rule is not reshaped:
        return
    for spec in layouts(question.operands[0][1], True):
        products = viewed_call(question.row, question.factors, [spec], question.results)
        if products is not None and products.regrouped is not None and not products.regrouped.flat:
            result = question.results[0].with_partition(products.regrouped)
            yield CallChoice((Need(spec, (), 0 in followed, trips=trips[0]),), (result,), 0.0, 0.0)


def _by_axes(
    question: Question, followed: frozenset[int], trips: tuple[Trips, ...], topology: Topology
) -> Iterator[CallChoice]:
    """The strategies for each combination of choices of the axes."""
    operands, results, row = [spec for _, spec in question.operands], question.results, question.row
    saves = question.linear in ("", "product") and question.viewed is None
    linear = question._replace(gradients=followed).passes_on
    body, most_trips = row.body, max([trips[i] for i in followed], default=Trips(1, 0))
    for factors in (question.factors, *question.factors.others):
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
            specs = layouts_of(factors, choices, operands, results, topology, row.empty, body)
            if specs is None:
                continue
            time = 0.0 if question.viewed is not None else working(factors, specs.operands, specs.results, topology)
            within = specs.body * most_trips.there + specs.back * most_trips.back
            rows = enumerate(zip(specs.operands, specs.casts, strict=True))
            needs = tuple(
                Need(
                    spec,
                    cast if i in followed else (),
                    i in followed,
                    bool(followed) and saves,
                    question.fixed and not i,
                    trips[i],
                )
                for i, (spec, cast) in rows
            )
            yield CallChoice(needs, specs.results, time * most_trips.passes, within)


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
