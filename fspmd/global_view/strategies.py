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
from collections.abc import Sequence, Set
from math import inf, lcm, prod
from typing import Final, NamedTuple

from fspmd.entries import Entry, axes_within, blocks, entry_of
from fspmd.global_view.axis_choices import Choice, Combination, combinations, state_of
from fspmd.global_view.flat_dims import ViewedCall
from fspmd.global_view.question import Question
from fspmd.redistribution.bounds import closely
from fspmd.redistribution.cost import topology, work
from fspmd.redistribution.moves import moves
from fspmd.redistribution.routes import route
from fspmd.redistribution.straight import are_many
from fspmd.rules.bodies import BodyLayout
from fspmd.rules.factors import Dims, Factors
from fspmd.spec import P, TensorSpec

_NONE: Final = frozenset[int]()
_ROUNDING = 1e-6  # µs
_EFFORT, _OF_MANY = 2000, 120  # edges and bounds that a search visits on three axes, and on more
PASSES = 3  # times that a computation with gradients runs: forward, and backward for each of two operands
_Move = tuple[int, TensorSpec, tuple[str, ...]]  # an operand, how it must lie, the axes over which it is cast


class Strategy(NamedTuple):
    """The layouts of the operands and results of one call, with their price."""

    operands: tuple[TensorSpec, ...]
    casts: tuple[tuple[str, ...], ...]  # per operand the axes over which it is cast to varying
    results: tuple[TensorSpec, ...]
    by_body: bool  # a factor that must be whole is sharded
    axes: dict[int, tuple[str, ...]]  # of each sharded factor
    body: float = 0.0  # µs of the body's collectives, forward
    back: float = 0.0  # and backward
    #: the price in µs (an upper bound if a formula gives it); then, to decide between equal prices, the µs that casts
    #: take in backward and that settling pending sums takes
    time: tuple[float, float] = (0.0, 0.0)


def best_strategy(question: Question, known: list[Combination] | None = None) -> Strategy | None:
    """Return the cheapest strategy of a call, or None if there is none.

    ``known`` has the combinations of the same call for other ``gradients``. An empty list is filled.
    """
    views = question.viewed_call
    if views is not None and views.regrouped is not None:
        stays = tuple(question.operands)
        return Strategy(stays, ((),), (question.results[0].with_partition(views.regrouped),), False, {})
    call = question if views is None else question.on_views
    best = None if question.gradients else as_they_lie(call)
    if best is None:
        best = _searched(call, [] if known is None else known)
    if best is not None and views is not None:
        best = _together(best, views)
    moved = best is not None and question.fixed and best.operands[0] is not question.operands[0]
    return None if moved else best  # a write into a moved operand would be lost


def strategies(question: Question) -> list[Strategy]:
    """Return all strategies of a call."""
    views = question.viewed_call
    call = question if views is None else question.on_views
    every = ((each.factors, layouts_of(call, each.factors, each.choices)) for each in combinations(call))
    priced = [
        _Pricing(reading, laid, _MovePrices(call)).strategy()
        for reading, laid in every
        if laid is not None and _stays(laid, call)
    ]
    return priced if views is None else [_together(strategy, views) for strategy in priced]


def as_they_lie(question: Question) -> Strategy | None:
    """Return the strategy that moves nothing, or None if operands do not lie alike or sums are pending.

    It is the cheapest if no operand has a gradient.
    """
    factors, operands, results = question.factors, question.operands, question.results
    entries: dict[int | None, Entry] = {}
    for dims, spec in zip(factors.operands, operands, strict=True):
        lies = spec.partition
        if lies.unreduced or lies.reduced or 0 in spec.shape:
            return None
        if tuple(map(entries.setdefault, dims, lies.entries)) != lies.entries:
            return None
    if entries.get(None) is not None:
        return None
    axes_of = {
        f: axes
        for dims, spec in zip(factors.operands, operands, strict=True)
        for f, axes in zip(dims, spec.partition.dim_axes, strict=True)
        if f is not None and axes
    }
    if not (factors.whole.isdisjoint(axes_of) and factors.summed.isdisjoint(axes_of)):
        return None
    used = {axis: factor for factor, axes in axes_of.items() for axis in axes}
    if len(used) < sum(map(len, axes_of.values())):  # an axis cuts two factors
        return None
    if not aligned(factors, axes_of, [*operands, *results], question.row.empty, _NONE):
        return None
    order = [axis for axis in operands[0].mesh.axis_names if axis in used]
    casts = [tuple([axis for axis in order if used[axis] not in dims]) for dims in factors.operands]
    first, lead = factors.operands[0], operands[0].partition
    laid = [
        spec.with_partition(lead if dims == first else lead.with_entries(map(entries.get, dims)))
        for spec, dims in zip(results, factors.results, strict=True)
    ]
    if question.fixed and (casts[0] or laid[0].partition is not lead):
        return None
    return Strategy(tuple(operands), tuple(casts), tuple(laid), False, axes_of)


def _together(strategy: Strategy, views: ViewedCall) -> Strategy:
    """Turn a strategy for views into one for the operands and results themselves."""
    operands, results = views.together(strategy.operands, strategy.results)
    return strategy._replace(operands=operands, results=results)


# --- candidates: one choice for each axis ----------------------------------------------------------------------------


def layouts_of(question: Question, factors: Factors, choices: dict[str, Choice]) -> Strategy | None:
    """Return the strategy of a combination, or None if blocks of operands and results do not fit together.

    It has no price yet, except that of its body. ``factors`` is the reading of the call to which the choices belong.
    """
    operands, results, body = question.operands, question.results, question.row.body
    axes_of, unreduced, reduced = _used(choices, factors, operands)
    entries = {factor: entry_of(axes) for factor, axes in axes_of.items()}
    needs: list[TensorSpec] = []
    casts: list[tuple[str, ...]] = []
    for i, (dims, spec) in enumerate(zip(factors.operands, operands, strict=True)):
        cast, pending, gradients = _states(i, dims, choices, factors)
        if spec.partition.reduced:
            gradients |= spec.partition.reduced.intersection(cast)
        needs.append(spec.with_partition(spec.partition.with_entries(_entries(dims, entries), pending, gradients)))
        casts.append(cast)
    by_body = factors.whole.intersection(axes_of) if body is not None else _NONE
    if by_body and any(isinstance(choice, str) and {"U", "R"} <= set(choice) for choice in choices.values()):
        return None  # a body takes pending sums in all its operands, not in one operand of a product
    if not aligned(factors, axes_of, [*operands, *results], question.row.empty, by_body):
        return None
    laid = [
        spec.with_partition(spec.partition.with_entries(_entries(dims, entries), unreduced, reduced))
        for spec, dims in zip(results, factors.results, strict=True)
    ]
    within = back = 0.0
    if by_body and body is not None:
        specs, needed = [*needs, *results], dict.fromkeys(factors.whole)
        for factor in factors.near.intersection(by_body):
            if aligned(factors, {factor: axes_of[factor]}, specs, True, _NONE):
                del needed[factor]
        whole = frozenset(d for d, factor in enumerate(factors.operands[0]) if factor in needed)
        over = tuple(axis for factor in by_body if factor in needed for axis in axes_of[factor])
        layout = BodyLayout(needs, results, over, topology(), whole)
        within = body.time(layout)
        if within == inf:
            return None
        back = body.back(layout) if callable(body.back) else within * body.back
    return Strategy(tuple(needs), tuple(casts), tuple(laid), bool(by_body), axes_of, within, back)


def aligned(
    factors: Factors,
    axes_of: dict[int, tuple[str, ...]],
    specs: Sequence[TensorSpec],
    empty: bool,
    by_body: Set[int],
) -> bool:
    """Whether the blocks of each factor are the same shares of all its dims, which may differ in size.

    If not ``empty``, no block may be empty. A body takes care of both, so factors in ``by_body`` are not checked.
    """
    rows = (*factors.operands, *factors.results)
    for factor, axes in axes_of.items():
        sizes = {spec.shape[d] for i, spec in enumerate(specs) for d, f in enumerate(rows[i]) if f == factor}
        if factor in factors.pieces:
            sizes.add(factors.pieces[factor])
        if factor in by_body or (empty and len(sizes) == 1):
            continue
        parts = tuple([specs[0].mesh.shape[axis] for axis in axes])
        if not empty and any(length == 0 for size in sizes if size for _, length in blocks(size, parts)):
            return False
        unit = lcm(*(size or 1 for size in sizes))  # blocks as shares of the dim, in this unit
        if len({tuple(length * unit // (size or 1) for _, length in blocks(size, parts)) for size in sizes}) > 1:
            return False
    return True


def _entries(dims: Dims, entries: dict[int, Entry]) -> list[Entry]:
    """Return the entry of each dim, given the entries of the factors."""
    return [None if factor is None else entries.get(factor) for factor in dims]


def _states(
    operand: int, dims: Dims, choices: dict[str, Choice], factors: Factors
) -> tuple[tuple[str, ...], frozenset[str], frozenset[str]]:
    """Return the axes over which an operand is cast, is unreduced, and is reduced."""
    axes: dict[str, list[str]] = {"cast": [], "U": [], "R": []}
    for axis, choice in choices.items():
        axes.setdefault(state_of(choice, operand, dims, factors), []).append(axis)
    return tuple(axes["cast"]), frozenset(axes["U"]), frozenset(axes["R"])


def _used(
    choices: dict[str, Choice], factors: Factors, operands: Sequence[TensorSpec]
) -> tuple[dict[int, tuple[str, ...]], frozenset[str], frozenset[str]]:
    """Return the axes of each sharded factor, and those over which the results are unreduced and reduced."""
    axes_of: dict[int, tuple[str, ...]] = {}
    unreduced: list[str] = []
    reduced: list[str] = []
    for axis, choice in choices.items():
        if isinstance(choice, int):
            axes_of[choice] = (*axes_of.get(choice, ()), axis)
        if choice in factors.summed if isinstance(choice, int) else "U" in choice:
            unreduced.append(axis)
        elif isinstance(choice, str) and "R" in choice:
            reduced.append(axis)
    for factor, axes in axes_of.items():
        if len(axes) > 1:
            axes_of[factor] = _ordered(factor, axes, factors, operands)
    return axes_of, frozenset(unreduced), frozenset(reduced)


def _ordered(factor: int, axes: tuple[str, ...], factors: Factors, operands: Sequence[TensorSpec]) -> tuple[str, ...]:
    """Return the axes of a factor, in the order of the operand that is cut by most of them."""
    best: tuple[str, ...] = ()
    for dims, spec in zip(factors.operands, operands, strict=True):
        for dim_factor, cut in zip(dims, spec.partition.dim_axes, strict=True):
            kept = tuple([axis for axis in cut if axis in axes])
            if dim_factor == factor and len(kept) > len(best):
                best = kept
    return (*best, *(axis for axis in axes if axis not in best))


# --- prices -----------------------------------------------------------------------------------------------------------


def working(factors: Factors, needs: Sequence[TensorSpec], results: Sequence[TensorSpec]) -> float:
    """Return the µs of the computation: of its products, or of reading and writing the blocks."""
    lengths: dict[int | None, int] = {}
    size = 0
    for dims, spec in zip((*factors.operands, *factors.results), (*needs, *results), strict=True):
        lengths.update(zip(dims, spec.block_shape, strict=True))
        size += spec.block_bytes
    lengths[None] = factors.multiplications
    return work(prod(lengths.values()), size, topology())


def _searched(question: Question, known: list[Combination]) -> Strategy | None:
    """Return the cheapest strategy; of equal ones the one with the cheapest pending sums, then the preferred one.

    The search is best-first: the combination with the least lower bound is priced further, route by route. It ends when
    no bound is below the best price, or when the effort is spent. If formulas already decide, nothing is routed.
    """
    if not known:
        known += combinations(question)
    prices, gradients = _MovePrices(question), question.gradients
    queue: list[tuple[float, int, Combination, _Pricing | None]] = [
        (each.least, each.place, each, None) for each in known
    ]
    heapq.heapify(queue)
    best: tuple[tuple[float, float], int, Strategy] | None = None
    while queue and (best is None or (queue[0][0] <= best[0][0] + _ROUNDING and not prices.are_enough)):
        least, place, combination, pricing = heapq.heappop(queue)
        if pricing is None:
            if not (combination.computed or gradients or combination.most == inf):
                combination.compute(question)
                least = combination.least
                if queue and queue[0][0] < least:
                    heapq.heappush(queue, (least, place, combination, None))
                    continue
            if not combination.made:
                combination.layouts = layouts_of(question, combination.factors, combination.choices)
                combination.made = True
            laid: Strategy | None = combination.layouts
            if laid is None or not _stays(laid, question):
                continue
            if best is None and not gradients and (not queue or combination.most < queue[0][0] - _ROUNDING):
                return laid._replace(time=(combination.most, 0.0))
            pricing = _Pricing(combination.factors, laid, prices)
        elif pricing.least <= least:  # routes found for other combinations have not raised it
            pricing.refine()
        if (pricing.is_open or pricing.least > least) and not prices.are_enough:
            heapq.heappush(queue, (max(least, pricing.least), place, combination, pricing))
            continue
        strategy = pricing.strategy()
        if best is None or (strategy.time, place) < best[:2]:
            best = strategy.time, place, strategy
    return None if best is None else best[2]


def _stays(laid: Strategy, question: Question) -> bool:
    """Whether the first operand stays, and the result lies as it does, if that must be so."""
    if not question.fixed:
        return True
    first, cast = question.operands[0], laid.casts[0] and not laid.by_body  # a body casts by itself
    return laid.operands[0] is first and not cast and laid.results[0].partition is first.partition


class _MovePrices:
    """The prices (µs) of the moves of operands. Each is bounded once and computed once for all combinations.

    A move takes the quickest route. On more than two axes, after half of the effort, it takes the route of `straight`.
    """

    __slots__ = ("bounds", "gradients", "most", "operands", "prices", "spent", "topology", "weighs")

    def __init__(self, question: Question) -> None:
        self.operands, self.topology = question.operands, topology()
        self.gradients, self.weighs = question.gradients, question.weighs
        self.bounds: dict[_Move, float] = {}
        self.prices: dict[_Move, tuple[float, float]] = {}
        mesh, self.spent = question.operands[0].mesh, 0
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
    return need.with_partition(lies.with_entries(lies, reduced=lies.reduced | gone)) if gone else need
