"""Which layouts a call can run on: for each mesh axis one choice, and the cheapest of all their combinations.

An axis shards one factor, or none; or its operands are pending sums that the call, being linear, may pass on; or they
are reduced and the result is. No rule spells a case of several axes: choices are made axis by axis and then priced
together.

Operands that lie right stay. Else the price is that of the moves, of their transposes for operands that will have a
gradient, and of the computation. The sums of gradients of whole operands only tell between equals, so a sharded batch
goes through whole weights as it is. So does the largest operand of a function of elements, through those that would
have to be cut and their gradients gathered.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

from fspmd.entries import Entry, axes_within, entry_axes
from fspmd.global_view.axis_choices import Combination, combinations
from fspmd.global_view.layouts import CallLayouts, aligned, layouts_of, working
from fspmd.redistribution.bounds import closely
from fspmd.redistribution.cost import Topology
from fspmd.redistribution.moves import moves
from fspmd.redistribution.routes import route
from fspmd.redistribution.straight import are_many
from fspmd.rules.bodies import Bodied
from fspmd.rules.factors import Factors
from fspmd.spec import P, TensorSpec

_ROUNDING = 1e-6  # µs
_EFFORT, _OF_MANY = 2000, 120  # edges and bounds that are looked at on three axes, and on more
PASSES = 3  # of a computation whose operands have gradients: forward, and one for each of two
_NONE: Final = frozenset[int]()
_Move = tuple[int, TensorSpec, tuple[str, ...]]  # an operand, how it must lie, the axes over which it is cast


class Strategy(NamedTuple):
    """Layouts of the operands and results of one call; ``casts``: axes over which an operand is cast to varying."""

    operands: tuple[TensorSpec, ...]
    casts: tuple[tuple[str, ...], ...]
    results: tuple[P, ...]
    #: µs of its price, at most where that is plain; of equals µs of casts in backward, and to settle pending sums
    time: tuple[float, float]
    by_body: bool  # a factor that must be whole is sharded
    axes: dict[int, tuple[str, ...]]  # of each sharded factor
    body: float  # µs of the body's collectives
    back: float = 0.0  # of their gradients


def best_strategy(
    factors: Factors,
    linear: str,
    operands: Sequence[TensorSpec],
    results: Sequence[TensorSpec],
    topology: Topology,
    *,
    fixed: bool = False,
    empty: bool = True,
    body: Bodied | None = None,
    gradients: frozenset[int] = _NONE,
    weighs: bool = False,
    known: list[Combination] | None = None,
) -> Strategy | None:
    """The cheapest combination; of equal ones that whose pending sums are, then the preferred one.

    That which takes the least at best is priced further first, route by route, until none can take less than the best,
    or enough is looked at; where that is plain to see, no route is asked for. ``known``: those of the same call, made
    before for other ``gradients``; if it is empty it is filled.
    """
    known = [] if known is None else known
    if not known:
        known += combinations(factors, linear, operands, body is not None, topology, () if fixed else results)
    prices = _MovePrices(operands, topology, gradients, weighs)
    queue: list[tuple[float, int, Combination, _Pricing | None]] = [(way.least, way.place, way, None) for way in known]
    heapq.heapify(queue)
    best: tuple[tuple[float, float], int, Strategy] | None = None
    while queue and (best is None or (queue[0][0] <= best[0][0] + _ROUNDING and not prices.are_enough)):
        least, place, way, pricing = heapq.heappop(queue)
        if pricing is None:
            if not (way.computed or gradients or way.most == inf):
                way.compute(operands, results, topology)
                least = way.least
                if queue and queue[0][0] < least:
                    heapq.heappush(queue, (least, place, way, None))
                    continue
            if not way.made:
                way.layouts = layouts_of(way.factors, way.choices, operands, results, topology, empty, body)
                way.made = True
            if way.layouts is None or (fixed and not _stays(way.layouts, operands[0])):
                continue
            if best is None and not gradients and (not queue or way.most < queue[0][0] - _ROUNDING):
                return _strategy(way.layouts, way.most)
            pricing = _Pricing(way.factors, way.layouts, prices)
        elif pricing.least <= least:  # what others asked for has not made it more
            pricing.refine()
        if (pricing.is_open or pricing.least > least) and not prices.are_enough:
            heapq.heappush(queue, (max(least, pricing.least), place, way, pricing))
            continue
        one = pricing.strategy()
        if best is None or (one.time, place) < best[:2]:
            best = one.time, place, one
    return None if best is None else best[2]


def _strategy(laid: CallLayouts, time: float) -> Strategy:
    outs = tuple([spec.partition for spec in laid.results])
    return Strategy(laid.operands, laid.casts, outs, (time, 0.0), laid.by_body, laid.axes, laid.body)


def as_they_lie(
    factors: Factors, operands: Sequence[TensorSpec], results: Sequence[TensorSpec], *, fixed: bool, empty: bool
) -> Strategy | None:
    """The strategy that is plain to see where all operands lie alike: nothing moves, and nothing is pending.

    It is the cheapest where no operand has a gradient. Arguments are those of `strategies`.
    """
    lies: dict[int | None, Entry] = {}
    for dims, spec in zip(factors.operands, operands, strict=True):
        lie = spec.partition
        if lie.unreduced or lie.reduced or 0 in spec.shape or tuple(map(lies.setdefault, dims, lie)) != lie.entries:
            return None
    if lies.get(None) is not None:
        return None
    axes_of = {f: entry_axes(entry) for f, entry in lies.items() if f is not None and entry is not None}
    if not (factors.whole.isdisjoint(axes_of) and factors.summed.isdisjoint(axes_of)):
        return None
    used = [axis for axes in axes_of.values() for axis in axes]
    if len(set(used)) < len(used) or not aligned(factors, axes_of, [*operands, *results], empty, _NONE):
        return None
    casts: list[tuple[str, ...]] = []
    for dims in factors.operands:
        over = [axis for factor, axes in axes_of.items() if factor not in dims for axis in axes]
        casts.append(operands[0].mesh.ordered(over) if over else ())
    first, lead = factors.operands[0], operands[0].partition
    outs = tuple([lead if dims == first else P(*map(lies.get, dims)) for dims in factors.results])
    if fixed and (casts[0] or outs[0] is not lead):
        return None
    return Strategy(tuple(operands), tuple(casts), outs, (0.0, 0.0), False, axes_of, 0.0)


def strategies(
    factors: Factors,
    linear: str,
    operands: Sequence[TensorSpec],
    results: Sequence[TensorSpec],
    topology: Topology,
    *,
    fixed: bool = False,
    empty: bool = True,
    body: Bodied | None = None,
    gradients: frozenset[int] = _NONE,
    weighs: bool = False,
) -> list[Strategy]:
    """All combinations that a call can run on.

    ``fixed``: the first operand and the result must lie as the first operand does; None where they cannot. ``empty``:
    the function takes empty blocks. ``body``: whole factors may be sharded too, and what that costs. ``gradients``: the
    operands that will have one. ``weighs``: the sums of gradients of whole operands count.
    """
    every = (
        (way.factors, layouts_of(way.factors, way.choices, operands, results, topology, empty, body))
        for way in combinations(factors, linear, operands, body is not None, topology, () if fixed else results)
    )
    return [
        _Pricing(reading, laid, _MovePrices(operands, topology, gradients, weighs)).strategy()
        for reading, laid in every
        if laid is not None and not (fixed and not _stays(laid, operands[0]))
    ]


def _stays(laid: CallLayouts, first: TensorSpec) -> bool:
    """Whether the first operand, and the result, lie as it did."""
    cast = laid.casts[0] and not laid.by_body  # which casts what it must
    return laid.operands[0] is first and not cast and laid.results[0].partition is first.partition


class _MovePrices:
    """µs to move operands, each move bounded once and priced once for all combinations of a call.

    By the quickest routes; on more than two axes, once half of the effort is spent, by those of `straight`.
    """

    __slots__ = ("bounds", "found", "gradients", "most", "operands", "spent", "topology", "weighs")

    def __init__(
        self, operands: Sequence[TensorSpec], topology: Topology, gradients: frozenset[int], weighs: bool
    ) -> None:
        self.operands, self.topology, self.gradients, self.weighs = operands, topology, gradients, weighs
        self.bounds: dict[_Move, float] = {}
        self.found: dict[_Move, tuple[float, float]] = {}
        mesh, self.spent = operands[0].mesh, 0
        few = sum(n > 1 for n in mesh.shape.values()) < 3
        self.most = inf if few else _OF_MANY if are_many(mesh) else _EFFORT

    @property
    def are_enough(self) -> bool:
        """Whether enough was looked at."""
        return self.spent >= self.most

    def least(self, move: _Move) -> float:
        """There, and back where a gradient goes: unless a cast is what brings it."""
        if move in self.found:
            return self.found[move][0]
        if move not in self.bounds:
            i, need, casts = move
            spec, self.spent = self.operands[i], self.spent + 1
            back = closely(need.dual, spec.dual, self.topology) if i in self.gradients and not casts else 0.0
            self.bounds[move] = closely(spec, need, self.topology) + back
        return self.bounds[move]

    def exactly(self, move: _Move) -> tuple[float, float]:
        """And what a cast brings."""
        if move not in self.found:
            i, need, casts = move
            directly = self.spent >= self.most / 2
            way = moves(self.operands[i], need, casts, self.topology, i in self.gradients, directly)
            self.found[move] = way.forward + way.backward + self.weighs * way.casting, way.casting
            self.spent += way.route.looked
        return self.found[move]

    def settling(self, results: Sequence[TensorSpec]) -> float:
        """To end the pending sums of results."""
        found = 0.0
        for spec in results:
            if spec.partition.unreduced:
                directly = self.spent >= self.most / 2
                way = route(spec, spec.with_partition(P(*spec.partition)), self.topology, directly)
                found, self.spent = found + way.price.time, self.spent + way.looked
        return found

    def communicates(self, move: _Move) -> bool:
        """Whether a move is more than slices."""
        return closely(self.operands[move[0]], move[1], self.topology) > 0


class _Pricing:
    """The price of one combination, which is made exact move by move: so far it is at least ``least``."""

    __slots__ = ("base", "casts", "laid", "moved", "needs", "prices")

    def __init__(self, factors: Factors, laid: CallLayouts, prices: _MovePrices) -> None:
        self.laid, self.prices = laid, prices
        self.needs, self.casts = laid.operands, laid.casts
        operands, topology, gradients = prices.operands, prices.topology, prices.gradients
        if laid.by_body:  # it casts what it must
            rows = enumerate(zip(operands, self.needs, self.casts, strict=True))
            self.needs = tuple([cast_where_gathered(*row) if i in gradients else row[1] for i, row in rows])
            self.casts = ((),) * len(self.casts)
        self.base = laid.body + (laid.back if gradients else 0.0)
        if laid.by_body and prices.weighs:
            asked = [(self.needs[i], self.needs[i], laid.casts[i], topology, True) for i in gradients]
            self.base += sum(moves(*one).casting for one in asked)
        if True in [spec is not need for spec, need in zip(operands, laid.operands, strict=True)]:
            self.base += working(factors, laid.operands, laid.results, topology) * (PASSES if gradients else 1)
        self.moved = [self._move(i) for i, spec in enumerate(operands) if spec is not self.needs[i]]

    @property
    def least(self) -> float:
        """µs, of which no more are known yet."""
        return round(self.base + sum(map(self.prices.least, self.moved)), 6)

    @property
    def is_open(self) -> bool:
        """Whether some move is not exact yet."""
        return not all(move in self.prices.found for move in self.moved)

    def refine(self) -> None:
        """Route the move that takes the longest of those that are not exact."""
        still = [move for move in self.moved if move not in self.prices.found]
        if still:
            self.prices.exactly(max(still, key=self.prices.least))

    def strategy(self) -> Strategy:
        """With the exact price."""
        laid, prices = self.laid, self.prices
        also = [self._move(i) for i, cast in enumerate(self.casts) if cast and i in prices.gradients]
        time, later = self.base, 0.0
        for move in sorted({*self.moved, *also}, key=lambda one: one[0]):
            exact = prices.exactly(move)
            time, later = time + exact[0], later + exact[1]
        settling = prices.settling(laid.results)
        if self.moved:  # at least they are scattered; and gradients gathered, of sums that others were moved for
            time += settling / (1 if prices.gradients and any(map(prices.communicates, self.moved)) else 2)
        outs, times = tuple([spec.partition for spec in laid.results]), (round(time, 6), round(later + settling, 6))
        return Strategy(self.needs, self.casts, outs, times, laid.by_body, laid.axes, laid.body, laid.back)

    def _move(self, i: int) -> _Move:
        return i, self.needs[i], self.casts[i]


def cast_where_gathered(spec: TensorSpec, need: TensorSpec, casts: tuple[str, ...]) -> TensorSpec:
    """Reduced where it is gathered, so that backward is a reduce-scatter."""
    gone = frozenset(casts) & {axis for entry in spec.partition for axis in axes_within(entry)}
    lies = need.partition
    return need.with_partition(P(*lies, unreduced=lies.unreduced, reduced=lies.reduced | gone)) if gone else need
