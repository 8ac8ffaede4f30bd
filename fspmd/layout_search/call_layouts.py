"""All ways to lay out one call: how its operands must lie, how its results then do, and what it takes.

Here no operand lies anywhere yet, so each mesh axis may shard any dim of the computation.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from fspmd.entries import entry_of
from fspmd.global_view.axis_choices import passed_on
from fspmd.global_view.flat_dims import viewed_call
from fspmd.global_view.layouts import Choice, layouts_of, working
from fspmd.global_view.propagate import Question
from fspmd.layout_search.move_counts import ONCE, Trips
from fspmd.layout_search.op_graph import Op
from fspmd.redistribution.cost import Topology
from fspmd.rules.factors import Factors
from fspmd.rules.views import reshaped
from fspmd.spec import P, TensorSpec


@dataclass(frozen=True, slots=True)
class Need:
    """How an operand must lie, over which axes it is then cast to varying, and whether it will have a gradient."""

    spec: TensorSpec
    casts: tuple[str, ...] = ()
    followed: bool = False
    saved: bool = False  # backward needs it
    stays: bool = False  # it may not be moved: it is written into
    trips: Trips = ONCE


@dataclass(frozen=True, slots=True)
class CallChoice:
    """One of them; µs of its computation, and of the collectives within, of backward as well."""

    needs: tuple[Need, ...]
    results: tuple[TensorSpec, ...]
    computing: float
    within: float

    @property
    def time(self) -> float:
        """µs of both."""
        return self.computing + self.within


def call_choices(op: Op, values: Sequence[TensorSpec], topology: Topology) -> tuple[CallChoice, ...]:
    """Of one op of a program."""
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
    needs = tuple(Need(spec, (), i in op.followed, trips=own) for i, (spec, own) in rows)
    return (CallChoice(needs, results, 0.0, 0.0),)


def _trips(given: tuple[Trips, ...], count: int) -> tuple[Trips, ...]:
    return given or (ONCE,) * count


@functools.lru_cache(maxsize=1024)
def layouts(spec: TensorSpec, pending: bool = False) -> tuple[TensorSpec, ...]:
    """Every layout in which no rank need have nothing: each axis shards a dim, or none; ``pending``: or has a sum."""
    mesh, found = spec.mesh, []
    options = [None, *range(spec.ndim), *(["U"] if pending else [])]
    for choice in itertools.product(options, repeat=len(mesh.axis_names)):
        named = list(zip(mesh.axis_names, choice, strict=True))
        if any(mesh.shape[axis] == 1 and to is not None for axis, to in named):
            continue
        axes = [tuple(axis for axis, to in named if to == d and to is not None) for d in range(spec.ndim)]
        if all(prod(mesh.shape[a] for a in own) <= max(n, 1) for own, n in zip(axes, spec.shape, strict=True)):
            unreduced = frozenset(axis for axis, to in named if to == "U")
            found.append(spec.with_partition(P(*map(entry_of, axes), unreduced=unreduced)))
    return tuple(found)


def _quickest_choices(
    question: Question, followed: frozenset[int], given: tuple[Trips, ...], topology: Topology
) -> tuple[CallChoice, ...]:
    """Of each choice of what every axis does the quickest."""
    found: dict[tuple[tuple[Need, ...], tuple[TensorSpec, ...]], CallChoice] = {}
    trips = _trips(given, len(question.operands))
    for way in itertools.chain(_regrouped(question, followed, trips), _chosen(question, followed, trips, topology)):
        if question.fixed and (way.needs[0].casts or way.needs[0].spec.partition is not way.results[0].partition):
            continue
        key = way.needs, way.results
        if key not in found or way.time < found[key].time:
            found[key] = way
    return tuple(found.values())


def _regrouped(question: Question, followed: frozenset[int], trips: tuple[Trips, ...]) -> Iterator[CallChoice]:
    """Of reshapes: where the blocks of the result are those of the operand."""
    if question.row.rule is not reshaped:
        return
    for spec in layouts(question.operands[0][1], True):
        products = viewed_call(question.row, question.factors, [spec], question.results)
        if products is not None and products.regrouped is not None and not products.regrouped.flat:
            result = question.results[0].with_partition(products.regrouped)
            yield CallChoice((Need(spec, (), 0 in followed, trips=trips[0]),), (result,), 0.0, 0.0)


def _chosen(
    question: Question, followed: frozenset[int], trips: tuple[Trips, ...], topology: Topology
) -> Iterator[CallChoice]:
    operands, results, row = [spec for _, spec in question.operands], question.results, question.row
    saves = question.linear in ("", "product") and question.viewed is None
    linear = question._replace(gradients=followed).passes_on
    body, most = row.body, max([trips[i] for i in followed], default=Trips(1, 0))
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
            laid = layouts_of(factors, choices, operands, results, topology, row.empty, body)
            if laid is None:
                continue
            time = 0.0 if question.viewed is not None else working(factors, laid.operands, laid.results, topology)
            within = laid.body * most.there + laid.back * most.back
            rows = enumerate(zip(laid.operands, laid.casts, strict=True))
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
            yield CallChoice(needs, laid.results, time * most.passes, within)


def _sizes(factors: Factors, operands: Sequence[TensorSpec], results: Sequence[TensorSpec]) -> dict[int, int]:
    """The least size of each factor."""
    found: dict[int, int] = {}
    for dims, spec in zip((*factors.operands, *factors.results), (*operands, *results), strict=True):
        for factor, size in zip(dims, spec.shape, strict=True):
            if factor is not None:
                found[factor] = min(size, found.get(factor, size))
    return found


def _choices(factors: Factors, linear: str, operands: int, bodied: bool) -> Iterator[Choice]:
    """What one axis can do: nothing, shard a factor, or leave sums pending that the function passes on."""
    yield "I" * operands
    known = {factor: None for dims in factors.operands for factor in dims if factor is not None}
    for factor in known:
        if factor not in factors.whole or bodied:
            yield factor
    for _, way in passed_on(factors, linear, operands):
        yield way
