"""The cheapest plans of a function: the best one, those after it, and the best of so many bytes.

Elimination solves exactly what has no limit. Moves are priced when a solution first has them, and it is solved again
until none is new. A limit of memory, and a graph that is too wide, are left to an integer program.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from fspmd.layout_search import integer_program
from fspmd.layout_search.alike_axes import alike, renamed
from fspmd.layout_search.call_layouts import CallChoice
from fspmd.layout_search.cost_model import CostModel
from fspmd.layout_search.elimination import Solved, TooWide, eliminate, order
from fspmd.layout_search.repeated_layers import Ties
from fspmd.spec import TensorSpec

TIE = 1e-12  # µs for each byte: of equally quick plans that which holds less
BYTES = 1e6  # µs for each byte: of all plans that which holds least
_ROUNDING = 1e-9
_SLACK = 1e-5  # of the least cost: how much more plans cost that are looked for first
_WIDER = 4.0  # times that, when these are not enough
_CLOSE = 0.01  # of the least cost: a known plan that costs no more rules out most choices
_NEAR = 0.1  # of the least cost: beyond it all choices are looked at
_CELLS = 1 << 14  # of the tables of an integer program that is solved in seconds
_WORK = 1 << 13  # nodes of its search times cells


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """One choice for each variable of a model, its µs, its bytes on each rank, and the µs that no choice can beat."""

    model: CostModel
    chosen: tuple[int, ...]
    time: float
    memory: float
    bound: float
    price: float = TIE  # µs for each byte, at which it was found

    @property
    def cost(self) -> float:
        """Its time, and its bytes by their price."""
        return self.time + self.price * self.memory

    def layout(self, number: int) -> TensorSpec:
        """How a value lies."""
        return self.model.layout(number, self.chosen)

    def way(self, op: int) -> CallChoice:
        """How an op is done."""
        return self.model.way(op, self.chosen)

    @property
    def arguments(self) -> tuple[TensorSpec, ...]:
        """How they lie."""
        return tuple(map(self.layout, self.model.graph.leaves))

    @property
    def names(self) -> frozenset[tuple[TensorSpec, ...]]:
        """How the arguments lie, by all names of axes that are alike."""
        axes, laid = alike(self.model.graph.mesh, self.model.topology), self.arguments
        return frozenset(tuple([renamed(spec, own) for spec in laid]) for own in axes)


class DoesNotFit(Exception):
    """No choice fits in memory; ``least``: bytes that some choice needs."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least


class Search:
    """Of one model; ``by_integers``: without elimination."""

    def __init__(self, model: CostModel, by_integers: bool = False) -> None:
        self.model = model
        self.every = [torch.arange(len(own)) for own in model.choices]
        self._integers = by_integers
        self._order = [] if by_integers else order(model)

    def best(self, limit: float | None = None, most: float = inf) -> LayoutPlan:
        """The quickest plan of at most so many bytes; ``most``: what one is known to cost.

        Raises:
            DoesNotFit: there is none.
        """
        if limit is None:
            return self.cheapest(TIE, most)
        smallest = self.cheapest(BYTES)
        if smallest.memory > limit:
            raise DoesNotFit(smallest.memory)
        if self._integers:
            return self._by_integers(TIE, self.every, limit) or smallest
        quickest = self.cheapest(TIE, most)
        return quickest if quickest.memory <= limit else self._within(limit, quickest, smallest)

    def cheapest(self, price: float, most: float = inf) -> LayoutPlan:
        """The least time, and bytes by a price; of nothing is told that costs more than ``most``.

        Choices that no plan as cheap as a known one has are left out on the way, once that is near the least.
        """
        if self._integers:
            return self._by_integers(price, self.every) or self._plan([0] * len(self.every), price)
        kept = self.every
        while True:
            solved = eliminate(self.model, self._order, price, kept)
            plan = self._plan(solved.best(), price)
            if plan.cost > most + _ROUNDING * abs(most) or not self.model.price(plan.chosen):
                return plan
            most = min(most, self._plan(plan.chosen, price).cost)
            if most <= solved.cost + _CLOSE * abs(solved.cost):  # else few are left out
                kept = solved.within(most)

    def in_order(self, price: float) -> Iterator[LayoutPlan]:
        """Plans, the cheapest first, in each of which some argument lies otherwise than in those before.

        What is left of a set of plans without its best is parted in two by one layout of an argument, that of the next
        best (Yanover and Weiss, "Finding the M Most Probable Configurations", 2003).
        """
        if self._integers:
            told: list[LayoutPlan] = []
            while (plan := self._by_integers(price, self.every, told=told)) is not None:
                yield plan
                told.append(plan)
            return
        best, number = self.cheapest(price), itertools.count()
        queue: list[tuple[float, int, Mapping[int, Tensor], LayoutPlan | None]] = [(best.cost, next(number), {}, None)]
        nearby, most, kept = self._nearby(best), -inf, self.every
        while queue:
            least, _, allowed, told_best = heapq.heappop(queue)
            while least >= most:
                most, kept = next(nearby)
            own = [mine[allowed[v][mine]] if v in allowed else mine for v, mine in enumerate(kept)]
            solved = eliminate(self.model, self._order, price, own) if all(map(len, own)) else None
            if told_best is None and solved is not None and solved.cost < inf:
                found = self._plan(solved.best(), price)
                later = solved.cost > min(most, queue[0][0] if queue else inf) + _ROUNDING
                if later or self.model.price(found.chosen):
                    heapq.heappush(queue, (solved.cost, next(number), allowed, None))
                    continue
                yield found
                told_best = found
            second = None if told_best is None or solved is None else self._second(solved, told_best)
            if second is None:  # none among the choices that are kept
                if most < inf:
                    heapq.heappush(queue, (most, next(number), allowed, told_best))
                continue
            least, v, same = second
            mine = allowed.get(v, torch.ones(len(same), dtype=torch.bool))
            heapq.heappush(queue, (min(least, most), next(number), {**allowed, v: mine & same}, None))
            heapq.heappush(queue, (min(least, most), next(number), {**allowed, v: mine & ~same}, told_best))

    def _second(self, solved: Solved, best: LayoutPlan) -> tuple[float, int, Tensor] | None:
        """What the next best costs at least, an argument that lies otherwise in it, and which choices lie as there."""
        rows, marginals = [], solved.marginals()
        for v in self.model.arguments:
            laid, own = self.model.choices[v], solved.kept[v].tolist()
            costs = zip(marginals[v].tolist(), own, strict=True)
            rows += [(cost, v, i) for cost, i in costs if laid[i].spec is not laid[best.chosen[v]].spec]
        least, v, i = min(rows, default=(inf, 0, 0))
        if least == inf:
            return None
        laid = self.model.choices[v]
        return least, v, torch.tensor([one.spec is laid[i].spec for one in laid])

    def _nearby(self, best: LayoutPlan, most: float = inf) -> Iterator[tuple[float, list[Tensor]]]:
        """The choices of plans that cost little more than the best, and how much: wider each time, up to ``most``."""
        solved, slack = eliminate(self.model, self._order, best.price, self.every), _SLACK
        while slack < _NEAR and (cost := best.cost + slack * abs(best.cost)) < most:
            yield cost, solved.within(cost)
            slack *= _WIDER
        yield most, self.every if most == inf else solved.within(most)

    def _within(self, limit: float, over: LayoutPlan, fits: LayoutPlan) -> LayoutPlan:
        """Between a quicker plan that does not fit, and one that does: the price of a byte at which both cost alike.

        Whatever costs less there replaces one of them, until nothing does. What costs little more is then looked
        through by an integer program: a plan that costs more is no quicker than the price makes of the limit.
        """
        while True:
            price = max((fits.time - over.time) / (over.memory - fits.memory), 0.0)
            fits = replace(fits, price=price)
            found = self.cheapest(price, fits.cost)
            if found.cost >= fits.cost - _ROUNDING * max(1.0, abs(fits.cost)):
                break
            over, fits = (found, fits) if found.memory > limit else (over, found)
        bound = fits.cost - price * limit
        for most, kept in self._nearby(fits, fits.time + price * limit):
            cells = sum(len(kept[a]) * len(kept[b]) for a, b in self.model.pairs)
            nodes = max(_WORK // max(cells, 1), 1)
            mixed = self._by_integers(TIE, kept, limit, nodes=nodes) if cells <= _CELLS else None
            if mixed is None or mixed.memory > limit:
                break
            fits = min(fits, mixed, key=lambda one: one.time)
            bound = max(bound, min(mixed.bound, most - price * limit))
            if mixed.bound < mixed.time or bound >= fits.time:
                break
        return replace(fits, bound=bound if bound < fits.time * (1 - _ROUNDING) else fits.time, price=price)

    def _by_integers(
        self,
        price: float,
        kept: Sequence[Tensor],
        limit: float | None = None,
        told: Sequence[LayoutPlan] = (),
        nodes: int | None = None,
    ) -> LayoutPlan | None:
        """The cheapest plan of some choices that fits, in which some argument lies otherwise than in those told."""
        while True:
            found = integer_program.solve(self.model, price, kept, limit, [plan.chosen for plan in told], nodes)
            if found is None or not self.model.price(found[0]):
                break
        if found is None:
            return None
        plan, bound = self._plan(found[0], price), found[1]
        known = bound >= plan.cost - _ROUNDING * abs(plan.cost)
        return plan if known else replace(plan, bound=bound - price * plan.memory)

    def _plan(self, chosen: Sequence[int], price: float) -> LayoutPlan:
        time, memory = self.model.cost(chosen)
        return LayoutPlan(self.model, tuple(int(i) for i in chosen), time, memory, time, price)


class LayeredSearch:
    """Of a function whose layers may repeat: plans in which these lie alike, and of all.

    Those in which they lie alike are quickly found, and leave few moves to be priced for the rest; so they are the best
    where that loses nothing, and the runners-up.
    """

    def __init__(self, model: Callable[[Ties], CostModel], tied: Ties, solver: str | None) -> None:
        self._alike = None
        if tied.ops and solver != "milp":
            with suppress(TooWide):
                self._alike = Search(model(tied))
        self._every = _search(model(Ties()), solver)

    def best(self, limit: float | None = None) -> LayoutPlan:
        """The quickest of at most so many bytes.

        Raises:
            DoesNotFit: there is none.
        """
        alike = None
        if self._alike is not None:
            with suppress(DoesNotFit):
                alike = self._alike.best(limit)
        if alike is None:
            return self._every.best(limit)
        other = self._every.best(limit, alike.time + TIE * alike.memory)
        return (
            other if other.time < alike.time * (1 - _ROUNDING) else replace(alike, bound=min(other.bound, alike.time))
        )

    def runners_up(self, plan: LayoutPlan) -> Iterator[LayoutPlan]:
        """Plans in which some argument lies otherwise than in those before, whatever axes are called, by their cost."""
        seen = set(plan.names)
        for other in (self._alike or self._every).in_order(plan.price):
            if other.arguments not in seen:
                yield other
                seen |= other.names


def _search(model: CostModel, solver: str | None) -> Search:
    if solver == "milp":
        return Search(model, True)
    try:
        return Search(model)
    except TooWide:
        if solver == "elimination":
            raise
        return Search(model, True)
