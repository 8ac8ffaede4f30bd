"""The strategies of a call, and the cheapest of them.

A strategy makes one choice for each mesh axis. The axis shards one factor, or none. Or it passes pending sums on, if
the call is linear. Or operands and result are reduced over it. A rule never describes several axes together: choices
are made axis by axis, and a combination of choices is priced as a whole.

Operands that lie right stay. Otherwise the price has three parts: the moves, their transposes for operands that will
have a gradient, and the computation. The sums of gradients of whole operands only decide between equal prices, so a
sharded batch meets whole weights without a move. The largest operand of an elementwise function stays too: the smaller
ones are cut, although their gradients must then be gathered.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import inf

from fspmd.entries import axes_within
from fspmd.global_view.axis_choices import Combination, combinations
from fspmd.global_view.layouts import LayoutProblem, Strategy, layouts_of, working
from fspmd.redistribution.bounds import closely
from fspmd.redistribution.cost import topology
from fspmd.redistribution.moves import moves
from fspmd.redistribution.routes import route
from fspmd.redistribution.straight import are_many
from fspmd.rules.factors import Factors
from fspmd.spec import P, TensorSpec

_ROUNDING = 1e-6  # µs
_EFFORT, _OF_MANY = 2000, 120  # edges and bounds that a search visits on three axes, and on more
PASSES = 3  # times that a computation with gradients runs: forward, and backward for each of two operands
_Move = tuple[int, TensorSpec, tuple[str, ...]]  # an operand, how it must lie, the axes over which it is cast


def best_strategy(problem: LayoutProblem, known: list[Combination] | None = None) -> Strategy | None:
    """Return the cheapest strategy; of equal ones the one with the cheapest pending sums, then the preferred one.

    The search is best-first: the combination with the least lower bound is priced further, route by route. It ends when
    no bound is below the best price, or when the effort is spent. If formulas already decide, nothing is routed.

    ``known`` has the combinations of the same call for other ``gradients``. An empty list is filled.
    """
    known = [] if known is None else known
    if not known:
        known += combinations(problem)
    prices, gradients = _MovePrices(problem), problem.gradients
    queue: list[tuple[float, int, Combination, _Pricing | None]] = [
        (each.least, each.place, each, None) for each in known
    ]
    heapq.heapify(queue)
    best: tuple[tuple[float, float], int, Strategy] | None = None
    while queue and (best is None or (queue[0][0] <= best[0][0] + _ROUNDING and not prices.are_enough)):
        least, place, combination, pricing = heapq.heappop(queue)
        if pricing is None:
            if not (combination.computed or gradients or combination.most == inf):
                combination.compute(problem)
                least = combination.least
                if queue and queue[0][0] < least:
                    heapq.heappush(queue, (least, place, combination, None))
                    continue
            if not combination.made:
                combination.layouts = layouts_of(problem, combination.factors, combination.choices)
                combination.made = True
            if combination.layouts is None or not _stays(combination.layouts, problem):
                continue
            if best is None and not gradients and (not queue or combination.most < queue[0][0] - _ROUNDING):
                return combination.layouts._replace(time=(combination.most, 0.0))
            pricing = _Pricing(combination.factors, combination.layouts, prices)
        elif pricing.least <= least:  # routes found for other combinations have not raised it
            pricing.refine()
        if (pricing.is_open or pricing.least > least) and not prices.are_enough:
            heapq.heappush(queue, (max(least, pricing.least), place, combination, pricing))
            continue
        strategy = pricing.strategy()
        if best is None or (strategy.time, place) < best[:2]:
            best = strategy.time, place, strategy
    return None if best is None else best[2]


def strategies(problem: LayoutProblem) -> list[Strategy]:
    """Return all strategies of a call."""
    every = ((each.factors, layouts_of(problem, each.factors, each.choices)) for each in combinations(problem))
    return [
        _Pricing(reading, laid, _MovePrices(problem)).strategy()
        for reading, laid in every
        if laid is not None and _stays(laid, problem)
    ]


def _stays(laid: Strategy, problem: LayoutProblem) -> bool:
    """Whether the first operand stays, and the result lies as it does, if that must be so."""
    if not problem.fixed:
        return True
    first, cast = problem.operands[0], laid.casts[0] and not laid.by_body  # a body casts by itself
    return laid.operands[0] is first and not cast and laid.results[0].partition is first.partition


class _MovePrices:
    """The prices (µs) of the moves of operands. Each is bounded once and computed once for all combinations.

    A move takes the quickest route. On more than two axes, after half of the effort, it takes the route of `straight`.
    """

    __slots__ = ("bounds", "gradients", "most", "operands", "prices", "spent", "topology", "weighs")

    def __init__(self, problem: LayoutProblem) -> None:
        self.operands, self.topology = problem.operands, topology()
        self.gradients, self.weighs = problem.gradients, problem.weighs
        self.bounds: dict[_Move, float] = {}
        self.prices: dict[_Move, tuple[float, float]] = {}
        mesh, self.spent = problem.operands[0].mesh, 0
        few = sum(n > 1 for n in mesh.shape.values()) < 3
        self.most = inf if few else _OF_MANY if are_many(mesh) else _EFFORT

    @property
    def are_enough(self) -> bool:
        """Whether the effort is spent."""
        return self.spent >= self.most

    def least(self, move: _Move) -> float:
        """Return a lower bound of a move, forward and backward; the gradient of a cast operand needs no move."""
        if move in self.prices:
            return self.prices[move][0]
        if move not in self.bounds:
            i, need, casts = move
            spec, self.spent = self.operands[i], self.spent + 1
            back = closely(need.dual, spec.dual, self.topology) if i in self.gradients and not casts else 0.0
            self.bounds[move] = closely(spec, need, self.topology) + back
        return self.bounds[move]

    def exactly(self, move: _Move) -> tuple[float, float]:
        """Return the price of a move, and that of its cast in backward."""
        if move not in self.prices:
            i, need, casts = move
            directly = self.spent >= self.most / 2
            cost = moves(self.operands[i], need, casts, self.topology, i in self.gradients, directly)
            self.prices[move] = cost.forward + cost.backward + self.weighs * cost.casting, cost.casting
            self.spent += cost.route.looked
        return self.prices[move]

    def settling(self, results: Sequence[TensorSpec]) -> float:
        """Return the price of settling the pending sums of results."""
        time = 0.0
        for spec in results:
            if spec.partition.unreduced:
                directly = self.spent >= self.most / 2
                path = route(spec, spec.with_partition(P(*spec.partition)), self.topology, directly)
                time, self.spent = time + path.price.time, self.spent + path.looked
        return time

    def communicates(self, move: _Move) -> bool:
        """Whether a move is more than slices."""
        return closely(self.operands[move[0]], move[1], self.topology) > 0


class _Pricing:
    """The price of one combination, made exact move by move."""

    __slots__ = ("base", "casts", "laid", "moved", "needs", "prices")

    def __init__(self, factors: Factors, laid: Strategy, prices: _MovePrices) -> None:
        self.laid, self.prices = laid, prices
        self.needs, self.casts = laid.operands, laid.casts
        operands, gradients = prices.operands, prices.gradients
        if laid.by_body:  # the body casts by itself
            rows = enumerate(zip(operands, self.needs, self.casts, strict=True))
            self.needs = tuple([cast_where_gathered(*row) if i in gradients else row[1] for i, row in rows])
            self.casts = ((),) * len(self.casts)
        self.base = laid.body + (laid.back if gradients else 0.0)
        if laid.by_body and prices.weighs:
            stays = [(self.needs[i], self.needs[i], laid.casts[i], prices.topology, True) for i in gradients]
            self.base += sum(moves(*each).casting for each in stays)
        if True in [spec is not need for spec, need in zip(operands, laid.operands, strict=True)]:
            self.base += working(factors, laid.operands, laid.results) * (PASSES if gradients else 1)
        self.moved = [self._move(i) for i, spec in enumerate(operands) if spec is not self.needs[i]]

    @property
    def least(self) -> float:
        """The best lower bound so far, µs."""
        return round(self.base + sum(map(self.prices.least, self.moved)), 6)

    @property
    def is_open(self) -> bool:
        """Whether some move has only a bound."""
        return not all(move in self.prices.prices for move in self.moved)

    def refine(self) -> None:
        """Route the move with the largest bound."""
        bounded = [move for move in self.moved if move not in self.prices.prices]
        if bounded:
            self.prices.exactly(max(bounded, key=self.prices.least))

    def strategy(self) -> Strategy:
        """Return the strategy with its exact price."""
        laid, prices = self.laid, self.prices
        also = [self._move(i) for i, cast in enumerate(self.casts) if cast and i in prices.gradients]
        time, later = self.base, 0.0
        for move in sorted({*self.moved, *also}, key=lambda move: move[0]):
            price, casting = prices.exactly(move)
            time, later = time + price, later + casting
        settling = prices.settling(laid.results)
        if self.moved:  # the result is scattered at least; if operands moved for it, its gradient is gathered too
            time += settling / (1 if prices.gradients and any(map(prices.communicates, self.moved)) else 2)
        times = round(time, 6), round(later + settling, 6)
        return laid._replace(operands=self.needs, casts=self.casts, time=times)

    def _move(self, i: int) -> _Move:
        return i, self.needs[i], self.casts[i]


def cast_where_gathered(spec: TensorSpec, need: TensorSpec, casts: tuple[str, ...]) -> TensorSpec:
    """Return the layout of an operand of a body: reduced over gathered axes, so that backward is a reduce-scatter."""
    gone = frozenset(casts) & {axis for entry in spec.partition for axis in axes_within(entry)}
    lies = need.partition
    return need.with_partition(P(*lies, unreduced=lies.unreduced, reduced=lies.reduced | gone)) if gone else need
