"""The cheapest plans of a function: the best plan, its runners-up, and the best plan under a memory limit.

Elimination solves a model without a limit exactly. A move is priced when a solution first uses it, and the model is
solved again until no move is new. An integer program solves a model with a memory limit, and a graph whose tables are
too wide for elimination.
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

from fspmd.layout_search.call_layouts import CallChoice
from fspmd.layout_search.cost_model import CostModel, Ties, alike, renamed
from fspmd.layout_search.solvers import Solved, TooWide, eliminate, order, solve_integer_program
from fspmd.spec import TensorSpec

TIE = 1e-12  # µs for each byte: chooses the plan with the fewest bytes among equally quick plans
BYTES = 1e6  # µs for each byte: chooses the plan with the fewest bytes
_ROUNDING = 1e-9
_SLACK = 1e-5  # relative to the least cost: plans that cost at most this much more are searched first
_WIDER = 4.0  # the factor by which the slack then grows
_CLOSE = 0.01  # relative to the least cost: a known plan that costs at most this much more excludes most choices
_NEAR = 0.1  # relative to the least cost: with more slack all choices are searched
_CELLS = 1 << 14  # the most cells of tables for an integer program that is solved in seconds
_WORK = 1 << 13  # the most nodes of its search, times cells


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """A choice for each variable of a model.

    Attributes:
        model: the model.
        chosen: the choice of each variable.
        time: µs of one call.
        memory: bytes on each rank.
        bound: µs that no plan can beat.
        price: µs for each byte, at which the plan was found.
    """

    model: CostModel
    chosen: tuple[int, ...]
    time: float
    memory: float
    bound: float
    price: float = TIE

    @property
    def cost(self) -> float:
        """The time, plus the bytes at their price."""
        return self.time + self.price * self.memory

    def layout(self, number: int) -> TensorSpec:
        """The layout of a value."""
        return self.model.layout(number, self.chosen)

    def strategy(self, op: int) -> CallChoice:
        """The strategy of an op."""
        return self.model.strategy(op, self.chosen)

    @property
    def arguments(self) -> tuple[TensorSpec, ...]:
        """The layouts of the arguments."""
        return tuple(map(self.layout, self.model.graph.leaves))

    @property
    def names(self) -> frozenset[tuple[TensorSpec, ...]]:
        """The layouts of the arguments, under all names of axes that are alike."""
        renamings, layouts = alike(self.model.graph.mesh, self.model.topology), self.arguments
        return frozenset(tuple([renamed(spec, axes) for spec in layouts]) for axes in renamings)


class DoesNotFit(Exception):
    """No plan fits in memory. ``least``: the bytes of the smallest plan that was found."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least


class Search:
    """The search for plans of one model. ``by_integers``: whether to use the integer program alone."""

    def __init__(self, model: CostModel, by_integers: bool = False) -> None:
        self.model = model
        self.all_choices = [torch.arange(len(choices)) for choices in model.choices]
        self._integers = by_integers
        self._order = [] if by_integers else order(model)

    def best(self, limit: float | None = None, most: float = inf) -> LayoutPlan:
        """The quickest plan of at most ``limit`` bytes. ``most``: the cost of a known plan.

        Raises:
            DoesNotFit: no plan has so few bytes.
        """
        if limit is None:
            return self.cheapest(TIE, most)
        smallest = self.cheapest(BYTES)
        if smallest.memory > limit:
            raise DoesNotFit(smallest.memory)
        if self._integers:
            return self._by_integers(TIE, self.all_choices, limit) or smallest
        quickest = self.cheapest(TIE, most)
        return quickest if quickest.memory <= limit else self._within(limit, quickest, smallest)

    def cheapest(self, price: float, most: float = inf) -> LayoutPlan:
        """The cheapest plan, at a price in µs for each byte.

        Once a known plan is close to the least cost, choices that no plan as cheap has are excluded.

        Args:
            price: µs for each byte.
            most: the cost of a known plan. A result of higher cost need not be the cheapest.
        """
        if self._integers:
            return self._by_integers(price, self.all_choices) or self._plan([0] * len(self.all_choices), price)
        kept = self.all_choices
        while True:
            solved = eliminate(self.model, self._order, price, kept)
            plan = self._plan(solved.best(), price)
            if plan.cost > most + _ROUNDING * abs(most) or not self.model.price(plan.chosen):
                return plan
            most = min(most, self._plan(plan.chosen, price).cost)
            if most <= solved.cost + _CLOSE * abs(solved.cost):  # else few choices are excluded
                kept = solved.within(most)

    def in_order(self, price: float) -> Iterator[LayoutPlan]:
        """Plans in the order of cost. Each has another layout of some argument than every plan before it.

        Each set of plans has a best plan. The rest of the set is split in two by one layout of one argument, that of
        the next best plan (Yanover and Weiss, "Finding the M Most Probable Configurations", 2003).
        """
        if self._integers:
            known: list[LayoutPlan] = []
            while (plan := self._by_integers(price, self.all_choices, known=known)) is not None:
                yield plan
                known.append(plan)
            return
        best, number = self.cheapest(price), itertools.count()
        # sets of plans: a lower bound of the cost, a number, allowed choices, and the best plan if it was yielded
        queue: list[tuple[float, int, Mapping[int, Tensor], LayoutPlan | None]] = [(best.cost, next(number), {}, None)]
        nearby, most, kept = self._nearby(best), -inf, self.all_choices
        while queue:
            least, _, allowed, yielded = heapq.heappop(queue)
            while least >= most:
                most, kept = next(nearby)
            candidates = [choices[allowed[v][choices]] if v in allowed else choices for v, choices in enumerate(kept)]
            solved = eliminate(self.model, self._order, price, candidates) if all(map(len, candidates)) else None
            if yielded is None and solved is not None and solved.cost < inf:
                plan = self._plan(solved.best(), price)
                is_later = solved.cost > min(most, queue[0][0] if queue else inf) + _ROUNDING
                if is_later or self.model.price(plan.chosen):
                    heapq.heappush(queue, (solved.cost, next(number), allowed, None))
                    continue
                yield plan
                yielded = plan
            second = None if yielded is None or solved is None else self._second(solved, yielded)
            if second is None:  # no second plan among the kept choices
                if most < inf:
                    heapq.heappush(queue, (most, next(number), allowed, yielded))
                continue
            least, v, same = second
            before = allowed.get(v, torch.ones(len(same), dtype=torch.bool))
            heapq.heappush(queue, (min(least, most), next(number), {**allowed, v: before & same}, None))
            heapq.heappush(queue, (min(least, most), next(number), {**allowed, v: before & ~same}, yielded))

    def _second(self, solved: Solved, best: LayoutPlan) -> tuple[float, int, Tensor] | None:
        """The next best plan of a solved model: a lower bound of its cost, and an argument with another layout.

        The third entry is a mask of the choices of this argument that have its layout in the next best plan.
        """
        rows, marginals = [], solved.marginals()
        for v in self.model.arguments:
            choices, kept = self.model.choices[v], solved.kept[v].tolist()
            costs = zip(marginals[v].tolist(), kept, strict=True)
            rows += [(cost, v, i) for cost, i in costs if choices[i].spec is not choices[best.chosen[v]].spec]
        least, v, i = min(rows, default=(inf, 0, 0))
        if least == inf:
            return None
        choices = self.model.choices[v]
        return least, v, torch.tensor([choice.spec is choices[i].spec for choice in choices])

    def _nearby(self, best: LayoutPlan, most: float = inf) -> Iterator[tuple[float, list[Tensor]]]:
        """The choices of plans that cost little more than the best plan, with the most that they cost.

        Each time it is more, up to ``most``.
        """
        solved, slack = eliminate(self.model, self._order, best.price, self.all_choices), _SLACK
        while slack < _NEAR and (cost := best.cost + slack * abs(best.cost)) < most:
            yield cost, solved.within(cost)
            slack *= _WIDER
        yield most, self.all_choices if most == inf else solved.within(most)

    def _within(self, limit: float, over: LayoutPlan, fits: LayoutPlan) -> LayoutPlan:
        """The quickest plan of at most ``limit`` bytes.

        A byte gets the price at which a quicker plan that does not fit (``over``) and a plan that does (``fits``) have
        equal costs. A cheaper plan replaces one of them, until no plan is cheaper. Then an integer program searches the
        choices of plans that cost little more. Any other plan that fits takes at least the cost up to which it
        searched, less ``price * limit``.
        """
        while True:
            price = max((fits.time - over.time) / (over.memory - fits.memory), 0.0)
            fits = replace(fits, price=price)
            plan = self.cheapest(price, fits.cost)
            if plan.cost >= fits.cost - _ROUNDING * max(1.0, abs(fits.cost)):
                break
            over, fits = (plan, fits) if plan.memory > limit else (over, plan)
        bound = fits.cost - price * limit
        for most, kept in self._nearby(fits, fits.time + price * limit):
            cells = sum(len(kept[a]) * len(kept[b]) for a, b in self.model.pairs)
            nodes = max(_WORK // max(cells, 1), 1)
            near = self._by_integers(TIE, kept, limit, nodes=nodes) if cells <= _CELLS else None
            if near is None or near.memory > limit:
                break
            fits = min(fits, near, key=lambda plan: plan.time)
            bound = max(bound, min(near.bound, most - price * limit))
            if near.bound < near.time or bound >= fits.time:
                break
        return replace(fits, bound=bound if bound < fits.time * (1 - _ROUNDING) else fits.time, price=price)

    def _by_integers(
        self,
        price: float,
        kept: Sequence[Tensor],
        limit: float | None = None,
        known: Sequence[LayoutPlan] = (),
        nodes: int | None = None,
    ) -> LayoutPlan | None:
        """The cheapest plan by the integer program (`solve_integer_program`), with all its moves priced."""
        while True:
            solution = solve_integer_program(self.model, price, kept, limit, [plan.chosen for plan in known], nodes)
            if solution is None:
                return None
            chosen, bound = solution
            if not self.model.price(chosen):
                break
        plan = self._plan(chosen, price)
        is_optimal = bound >= plan.cost - _ROUNDING * abs(plan.cost)
        return plan if is_optimal else replace(plan, bound=bound - price * plan.memory)

    def _plan(self, chosen: Sequence[int], price: float) -> LayoutPlan:
        time, memory = self.model.cost(chosen)
        return LayoutPlan(self.model, tuple(int(i) for i in chosen), time, memory, time, price)


class LayeredSearch:
    """The search for plans of a function whose layers may repeat.

    Plans in which repeated layers lie alike are found quickly, and leave few moves to price. Such a plan is the best
    one if no other plan is quicker, and the runners-up are such plans.
    """

    def __init__(self, model: Callable[[Ties], CostModel], tied: Ties, solver: str | None) -> None:
        self._tied = None
        if tied.ops and solver != "milp":
            with suppress(TooWide):
                self._tied = Search(model(tied))
        self._untied = _search(model(Ties()), solver)

    def best(self, limit: float | None = None) -> LayoutPlan:
        """The quickest plan of at most ``limit`` bytes.

        Raises:
            DoesNotFit: no plan has so few bytes.
        """
        tied = None
        if self._tied is not None:
            with suppress(DoesNotFit):
                tied = self._tied.best(limit)
        if tied is None:
            return self._untied.best(limit)
        untied = self._untied.best(limit, tied.time + TIE * tied.memory)
        if untied.time < tied.time * (1 - _ROUNDING):
            return untied
        return replace(tied, bound=min(untied.bound, tied.time))

    def runners_up(self, plan: LayoutPlan) -> Iterator[LayoutPlan]:
        """Plans in the order of cost. Each has another layout of some argument than ``plan`` and every plan before it.

        Layouts that differ by the names of alike axes count as equal.
        """
        seen = set(plan.names)
        for other in (self._tied or self._untied).in_order(plan.price):
            if other.arguments not in seen:
                yield other
                seen |= other.names


def _search(model: CostModel, solver: str | None) -> Search:
    """The search with a solver; by default elimination, and the integer program if tables are too wide."""
    if solver == "milp":
        return Search(model, True)
    try:
        return Search(model)
    except TooWide:
        if solver == "elimination":
            raise
        return Search(model, True)
