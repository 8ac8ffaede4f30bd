"""Plans in the order of their cost, in each of which some argument lies otherwise than in those before.

What is left of a set of plans without its best is parted by the first value that lies otherwise (Lawler, "A Procedure
for Computing the K Best Solutions", 1972); each part waits until what it costs at least is the least. Choices of plans
that cost little more than the best are few, and are all that is looked at, until no more is found among them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from fspmd.auto.axes import alike, renamed
from fspmd.auto.solve import BYTES, Found, Solver
from fspmd.spec import TensorSpec

_LOOKED = 8  # plans, for each runner-up that is wanted: those that do not fit are none
_SLACK = 1e-3  # of the least cost: how much more plans cost that are looked for first
_WIDER = 4.0  # times that, when there are no more
_NEAR = 0.1  # of the least cost: beyond it all choices are looked at

Masks = Mapping[int, Tensor]  # the choices that some variables may have


def runners_up(solver: Solver, best: Found, count: int, limit: float | None) -> list[tuple[Solver, Found]]:
    """The cheapest plans in which some argument lies otherwise than in any before, and the models they are of."""
    looked = itertools.islice(others(solver, best), _LOOKED * count)
    fitting = (one for one in looked if limit is None or one[1].memory <= limit)
    return sorted(itertools.islice(fitting, count), key=lambda one: one[1].time)


def smallest(solver: Solver, count: int) -> list[tuple[Solver, Found]]:
    """The plans of least memory, each with some argument otherwise than in those before."""
    solver = solver if solver.alike is None else solver.alike[0]
    before, solver.price = solver.price, BYTES
    least = solver.smallest()
    found = [(solver, least), *itertools.islice(others(solver, least), count - 1)]
    solver.price = before
    return sorted(found, key=lambda one: one[1].memory)


def others(solver: Solver, best: Found) -> Iterator[tuple[Solver, Found]]:
    """Plans in which some argument lies otherwise than in any before, the cheapest first, whatever axes are called.

    Where layers repeat they lie alike in all of these. A byte has the price that it had last.
    """
    ranked, first = (solver, best) if solver.alike is None else solver.alike
    seen = names(solver, best)
    for plan in itertools.chain((first,), _in_order(ranked, first)):
        if _laid(ranked, plan) not in seen:
            yield ranked, plan
            seen |= names(ranked, plan)


def _laid(solver: Solver, found: Found) -> tuple[TensorSpec, ...]:
    """How the arguments lie."""
    builder = solver.builder
    return tuple([builder.chosen_value(number, found.chosen) for number in builder.program.leaves])


def names(solver: Solver, found: Found) -> set[tuple[TensorSpec, ...]]:
    """How the arguments lie, by all names of axes that are alike."""
    axes, laid = alike(solver.builder.program.mesh, solver.builder.topology), _laid(solver, found)
    return {tuple([renamed(spec, own) for spec in laid]) for own in axes}


def _in_order(solver: Solver, best: Found) -> Iterator[Found]:
    """All of one model."""
    variables = solver.builder.arguments
    near, number = _Near(solver, solver.cost(best)), itertools.count()
    queue: list[tuple[float, int, Masks, Found | _Part]] = [(solver.cost(best), next(number), {}, best)]
    while queue:
        least, _, allowed, plan = heapq.heappop(queue)
        near.reach(least)
        if isinstance(plan, _Part):
            ahead = max(least, plan.bound())
            found = near.best(allowed) if ahead == least else None  # or prices have changed
            if found is not None:
                heapq.heappush(queue, (max(least, solver.cost(found)), next(number), allowed, found))
            elif (ahead := ahead if ahead > least else near.most) < inf:
                heapq.heappush(queue, (ahead, next(number), allowed, plan))
            continue
        if plan is not best:
            yield plan
        bounds, fixed = _Bounds(near, allowed), dict(allowed)
        for v in variables:
            laid = solver.model.choices[v]
            same = torch.tensor([one.spec is laid[plan.chosen[v]].spec for one in laid])
            mine = fixed.get(v, torch.ones(len(laid), dtype=torch.bool))
            if (mine & ~same).any():
                part = _Part(bounds, v, mine & ~same)
                ahead = max(least, part.bound())
                if ahead < inf:
                    heapq.heappush(queue, (ahead, next(number), {**fixed, v: part.choices}, part))
            fixed[v] = mine & same


class _Near:
    """All plans that cost less than ``most``, and the choices that they are made of."""

    def __init__(self, solver: Solver, least: float) -> None:
        self.solver, self.kept = solver, list(solver.every)
        self.most = inf if solver.integer else -inf
        self._least, self._slack = least, _SLACK

    def reach(self, cost: float) -> None:
        """Look at plans that cost more than this."""
        while self.most <= cost:
            if self._slack > _NEAR:
                self.kept, self.most = list(self.solver.every), inf
                return
            self.most = self._least + self._slack * abs(self._least)
            self.kept = self.solver.solved(self.solver.every).within(self.most)
            self._slack *= _WIDER

    def among(self, allowed: Masks) -> list[Tensor] | None:
        """Those of the choices that are allowed; None where some variable has none."""
        kept = [own[allowed[v][own]] if v in allowed else own for v, own in enumerate(self.kept)]
        return kept if all(map(len, kept)) else None

    def best(self, allowed: Masks) -> Found | None:
        """The cheapest plan of less than ``most``."""
        if self.solver.integer:
            return self.solver.by_integers(allowed)
        kept = self.among(allowed)
        return None if kept is None else self.solver.quickest(kept, self.most)


class _Bounds:
    """What each choice costs at least in a set of plans; reckoned anew when prices change, or more is looked at."""

    def __init__(self, near: _Near, allowed: Masks) -> None:
        self.near, self._allowed = near, allowed
        self._known: tuple[int, float] | None = None
        self._kept: list[Tensor] | None = None
        self._found: list[Tensor] = []

    def of(self, variable: int, choices: Tensor) -> float:
        """Of the cheapest of some choices: at least that of what is not looked at."""
        near, known = self.near, (self.near.solver.builder.learned, self.near.most)
        if near.solver.integer:
            return -inf if choices.any() else inf
        if self._known != known:
            self._known, self._kept = known, near.among(self._allowed)
            self._found = [] if self._kept is None else near.solver.solved(self._kept).marginals(near.most)
        if self._kept is None:
            return near.most
        mine = choices[self._kept[variable]]
        least = float(self._found[variable][mine].amin()) if mine.any() else inf
        return min(near.most, least) if choices.any() else inf


@dataclass(frozen=True, slots=True)
class _Part:
    """The plans of a set in which a variable has one of some choices."""

    bounds: _Bounds
    variable: int
    choices: Tensor

    def bound(self) -> float:
        """What they cost at least."""
        return self.bounds.of(self.variable, self.choices)
