"""The cheapest choice of a model, and the cheapest that fits in memory.

Moves are priced when a solution first has them, and it is solved again until none is new. Under a limit of memory bytes
get a price, at which the quickest plan that fits and what no plan can beat come close; what is between is searched.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from fspmd.auto import integer
from fspmd.auto.eliminate import Solved, TooWide, eliminate, order
from fspmd.auto.model import Builder
from fspmd.auto.prices import Cost

_TIE = 1e-12  # µs for each byte: of equally quick plans that which holds less
BYTES = 1e3  # µs for each byte: of all plans that which holds least
_ROUNDING = 1e-9
_SEARCHED = 5_000  # choices that are looked at, before what is known is good enough


@dataclass(frozen=True, slots=True)
class Found:
    """One choice for each variable, its µs, its bytes on each rank, and the µs that no choice can beat."""

    chosen: tuple[int, ...]
    time: float
    memory: float
    bound: float


class DoesNotFit(Exception):
    """No choice fits in memory; ``least``: bytes that some choice needs."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least


class Solver:
    """Of one model; ``price`` is that of a byte, in µs, at which the last plan was found."""

    def __init__(self, builder: Builder, solver: str | None = None) -> None:
        self.builder, self.model = builder, builder.model
        self.price = _TIE
        self.alike: tuple[Solver, Found] | None = None  # the model in which layers that repeat lie alike, and its best
        self.every = [torch.arange(len(own)) for own in builder.model.choices]
        self.order: list[int] = []
        self._axes = [axis for axis, n in builder.program.mesh.shape.items() if n > 1]
        self.integer = solver == "milp"
        if not self.integer:
            try:
                self.order = order(builder.model, [len(own) for own in builder.model.choices])
            except TooWide:
                if solver == "elimination":
                    raise
                self.integer = True
        if self.integer:
            builder.price_all()

    def best(self, limit: float | None, most: float = inf) -> Found:
        """The quickest choice of at most so many bytes.

        Raises:
            DoesNotFit: there is none.
        """
        if self.integer:
            return self._by_integers(limit)
        if limit is None:
            return self._cheapest(_TIE, most)[0]
        smallest = self._smallest()
        if smallest.memory > limit:
            raise DoesNotFit(smallest.memory)
        quickest, _ = self._cheapest(_TIE, most)
        return quickest if quickest.memory <= limit else self._within(limit, quickest, smallest)

    def smallest(self) -> Found:
        """The choice of the fewest bytes; of equals not the quickest."""
        if self.integer:
            return self._by_integers(None, BYTES)
        return self._smallest()

    def cost(self, found: Found) -> float:
        """Its time, and its bytes by their price."""
        return found.time + self.price * found.memory

    def solved(self, kept: Sequence[Tensor]) -> Solved:
        """What some choices of each variable cost at least, by the prices that are known."""
        return eliminate(self.model, self.order, self.price, kept)

    def quickest(self, kept: Sequence[Tensor], most: float) -> Found | None:
        """The least cost of some choices; None where it is more than ``most``."""
        found, _ = self._least(self.price, kept, most)
        return found if self.cost(found) <= most + _ROUNDING * abs(most) and found.time < inf else None

    def by_integers(self, allowed: Mapping[int, Tensor]) -> Found | None:
        """The least cost where variables have only some choices (masks), by an integer program; None: there is none."""
        before = {v: self.model.own[v] for v in allowed}
        for v, mine in allowed.items():
            self.model.own[v] = Cost(torch.where(mine, before[v].time, inf), before[v].memory)
        try:
            return self._by_integers(None, self.price)
        except integer.Infeasible:
            return None
        finally:
            for v, own in before.items():
                self.model.own[v] = own

    def _by_integers(self, limit: float | None, price: float = _TIE) -> Found:
        """The same by an integer program."""
        try:
            chosen = integer.solve(self.model, limit, price)
        except integer.Infeasible:
            smallest = integer.solve(self.model, None, BYTES)
            raise DoesNotFit(self.model.cost(smallest)[1]) from None
        time, memory = self.model.cost(chosen)
        return Found(tuple(chosen), time, memory, time)

    def _cheapest(self, price: float, most: float = inf) -> tuple[Found, Solved]:
        """The least time, with µs for each byte; ``most``: what is known to be possible.

        To know something a plan is found by direct routes first.
        """
        if most == inf and len(self._axes) > 1:
            rough = Solver(self.builder.rough())
            chosen = rough._by_axes(price).chosen
            self.builder.price(chosen)
            time, memory = self.model.cost(chosen)
            most = time + price * memory
        return self._least(price, self.every, most)

    def _by_axes(self, price: float) -> Found:
        """The same; a plan is made better over one mesh axis at a time, then over two, which is quickly done."""
        found = self._least(price, self.every, rounds=1)[0]
        for count in range(1, min(len(self._axes), 3)):
            for group in 2 * list(itertools.combinations(self._axes, count)):
                known = found.time + price * found.memory
                better, _ = self._least(price, self._over(group, found.chosen), known)
                found = better if better.time + price * better.memory < known else found
        return self._least(price, self.every, found.time + price * found.memory)[0]

    def _least(
        self, price: float, kept: Sequence[Tensor], most: float = inf, rounds: int | None = None
    ) -> tuple[Found, Solved]:
        """The least of some choices; those that no plan as cheap as a known one has are left out on the way."""
        for done in itertools.count(1):
            solved = eliminate(self.model, self.order, price, kept)
            if solved.cost == inf or solved.cost > most + _ROUNDING * abs(most):
                break
            chosen = solved.best()
            if not self.builder.price(chosen) or done == rounds:
                break
            time, memory = self.model.cost(chosen)
            most = min(most, time + price * memory)
            kept = solved.within(most)
        chosen = solved.best()
        time, memory = self.model.cost(chosen)
        return Found(tuple(chosen), time, memory, time), solved

    def _over(self, axes: Sequence[str], chosen: Sequence[int]) -> list[Tensor]:
        """The choices that do over all other axes what those of a plan do."""
        others = [i for i, axis in enumerate(self.builder.program.mesh.axis_names) if axis not in axes]
        rows = zip(self._doing, chosen, strict=True)
        return [(own[:, others] == own[i, others]).all(1).nonzero().flatten() for own, i in rows]

    @functools.cached_property
    def _doing(self) -> list[Tensor]:
        """What each choice of a variable does over each axis, as numbers."""
        known: dict[tuple[Any, ...], Tensor] = {}
        for own in self.model.choices:
            if own not in known:
                numbers: dict[Any, int] = {}
                rows = [one.over_axes for one in own]
                known[own] = torch.tensor([[numbers.setdefault(x, len(numbers)) for x in row] for row in rows])
        return [known[own] for own in self.model.choices]

    def _smallest(self) -> Found:
        """The least memory; of equals not the quickest."""
        chosen = eliminate(self.model, self.order, None, self.every).best()
        self.builder.price(chosen)
        time, memory = self.model.cost(chosen)
        return Found(tuple(chosen), time, memory, 0.0)

    def _within(self, limit: float, over: Found, fits: Found) -> Found:
        """Between a quicker plan that does not fit, and one that does: the price of a byte at which both cost alike.

        Whatever costs less there replaces one of them, until nothing does: no plan that fits is quicker than what the
        price makes of the limit.
        """
        while True:
            price = max((fits.time - over.time) / (over.memory - fits.memory), 0.0)
            known = min(one.time + price * one.memory for one in (over, fits))
            found, _ = self._cheapest(price, known)
            cost = found.time + price * found.memory
            bound = cost - price * limit
            if cost > over.time + price * over.memory - _ROUNDING * max(1.0, abs(cost)):
                break
            if found.memory > limit:
                over = found
            else:
                fits = found
        self.price = price
        if found.memory <= limit and found.time < fits.time:
            fits = found
        fits = self._between(limit, over, fits)
        return self._search(limit, bound, fits)

    def _between(self, limit: float, over: Found, fits: Found) -> Found:
        """The best that was found of plans in which some arguments lie as in one that is quicker but does not fit.

        Both cost alike, with a price for bytes, and so does what some layers have of one and the others of the other.
        """
        differ = [v for v in self.builder.arguments if over.chosen[v] != fits.chosen[v]]
        kept = [torch.tensor(sorted(pair)) for pair in map(set, zip(over.chosen, fits.chosen, strict=True))]
        best = fits
        for first, rest in ((over, fits), (fits, over)):
            few, many = 0, len(differ)
            while many - few > 1:
                middle = (few + many) // 2
                own = list(kept)
                for i, v in enumerate(differ):
                    own[v] = torch.tensor([(first if i < middle else rest).chosen[v]])
                found, _ = self._least(self.price, own)
                if found.memory <= limit and found.time < best.time:
                    best = found
                if (found.memory <= limit) is (first is over):
                    few = middle
                else:
                    many = middle
        return best

    def _search(self, limit: float, bound: float, fits: Found) -> Found:
        """All choices that may be quicker than what is known to fit, by what they cost more than the bound."""
        solved = eliminate(self.model, self.order, self.price, self.every)
        kept = solved.within(fits.time + self.price * limit)
        solved = eliminate(self.model, self.order, self.price, kept)
        buckets = solved.buckets
        sizes = eliminate(self.model, self.order, None, kept)
        times = eliminate(self.model, self.order, 0.0, kept)
        best, looked = fits, 0
        places = [0] * len(buckets)
        stack = [(len(buckets), 0, bound, sizes.cost, times.cost)]
        done = True
        while stack:
            at, choice, cost, size, time = stack.pop()
            if at < len(buckets):
                places[buckets[at].variable] = choice
            looked += 1
            if looked > _SEARCHED:
                done = False
                break
            if max(cost, time) >= best.time - _ROUNDING * best.time or size > limit:
                continue
            if at == 0:
                chosen = solved.choices(places)
                self.builder.price(chosen)
                exact, memory = self.model.cost(chosen)
                if memory <= limit and exact < best.time:
                    best = Found(tuple(chosen), exact, memory, bound)
                continue
            rows = [one[at - 1].regrets(places) for one in (buckets, sizes.buckets, times.buckets)]
            stack += [(at - 1, i, cost + a, size + b, time + c) for i, (a, b, c) in _ordered(rows)]
        return Found(best.chosen, best.time, best.memory, best.time if done else min(bound, best.time))


def _ordered(rows: Sequence[Tensor]) -> list[tuple[int, tuple[float, float, float]]]:
    """The choices with what they cost more, the best last."""
    found = [(i, (a, b, c)) for i, (a, b, c) in enumerate(zip(*(row.tolist() for row in rows), strict=True)) if a < inf]
    return sorted(found, key=lambda one: one[1], reverse=True)
