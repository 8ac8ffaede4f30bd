"""Plans under a memory limit. The bytes of a plan are those that its recorded program holds.

The model of the search leaves out values that live only while an op runs, and counts values that `checkpoint` does not
keep. So the limit of the model is lowered or raised until the program fits the memory limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

import optree

from fspmd.errors import FspmdError
from fspmd.layout_search.apply import Layouts, applied
from fspmd.layout_search.op_graph import is_value
from fspmd.layout_search.search import BYTES, DoesNotFit, LayeredSearch, LayoutPlan
from fspmd.meshes.mesh import make_mesh
from fspmd.programs.jit import jit
from fspmd.programs.lower import Lowered
from fspmd.programs.memory import memory_of_program
from fspmd.spec import P, TensorSpec

_ROUNDS = 5  # the number of limits of the model to try
_MORE = 1.2  # times the least bytes by the model: the program with the least bytes often has more by the model
_FEW, _MANY, _OPS = 12, 60, 6000  # the least and most further plans to record, and the ops of all of them
_SHARE = 0.6  # of the bytes by the model: few programs hold less
_ENOUGH = 0.98  # of the limit: a plan that holds so much can hardly be improved
_ROUNDING, _TIE = 1e-6, 1e-12


class _Recorded:
    """The plans that were recorded, each once: the bytes that they hold, and the plans that fit."""

    def __init__(self, limit: float, peak: Callable[[LayoutPlan], int | None]) -> None:
        self._limit, self._peak = limit, peak
        self._known: dict[tuple[int, ...], float] = {}
        self._fit: dict[frozenset[Any], tuple[LayoutPlan, float]] = {}  # by the layouts of arguments
        self.has_peaks = True  # whether programs can be recorded; else the bytes by the model count
        self.over_counts = False  # whether a program held less than by the model
        self.least = inf

    def __contains__(self, plan: LayoutPlan) -> bool:
        return plan.chosen in self._known

    def held(self, plan: LayoutPlan) -> float:
        """The most bytes that a rank holds."""
        if plan not in self:
            self._known[plan.chosen] = held = self._measured(plan)
            self.least = min(self.least, held)
            self.over_counts |= held < plan.memory
            if held <= self._limit:
                known = self._fit.get(plan.names)
                if known is None or plan.time < known[0].time:
                    self._fit[plan.names] = plan, held
        return self._known[plan.chosen]

    def _measured(self, plan: LayoutPlan) -> float:
        """The peak of a plan. Without a record it is the bytes by the model; infinity if only other plans have one."""
        peak = self._peak(plan) if self.has_peaks else None
        self.has_peaks &= bool(self._known) or peak is not None
        if not self.has_peaks:
            return plan.memory
        return inf if peak is None else peak

    @property
    def fit(self) -> list[tuple[LayoutPlan, float]]:
        """The plans that fit and their bytes, the quickest first."""
        return sorted(self._fit.values(), key=lambda entry: entry[0].time)

    def quicker(self, time: float) -> int:
        """The number of plans that fit and take at most this time."""
        return sum(plan.time <= time * (1 + _ROUNDING) for plan, _ in self._fit.values())


def peak_of(f: Callable[..., Any], args: tuple[Any, ...], layouts: Layouts) -> int | None:
    """The most bytes that a rank holds while the program runs; None if ``f`` cannot be recorded.

    They are those of the first rank, whose blocks are the largest, so all processes have the same number. Memory within
    kernels depends on the machine, and does not count.
    """
    mesh = layouts.mesh
    ranks = make_mesh(tuple(mesh.shape.values()), mesh.axis_names, transport="abstract")

    def given(x: Any, partition: P | None) -> Any:
        return x if partition is None else TensorSpec(ranks, partition, tuple(x.shape), x.dtype)

    with suppress(FspmdError):
        specs = optree.tree_map(given, args, layouts.specs, is_leaf=is_value, none_is_leaf=True)
        jitted: Any = jit(applied(f, ranks, layouts.steps, layouts.results))
        program: Lowered = jitted.lower(*specs)
        return memory_of_program(program.program, scratch=False).peak
    return None


def fitting(
    limit: float, search: LayeredSearch, peak: Callable[[LayoutPlan], int | None], count: int
) -> list[tuple[LayoutPlan, int | None]]:
    """The quickest plan that holds at most ``limit`` bytes, and up to ``count`` runners-up that do, with their peaks.

    First, the best plans by the model are recorded, under limits of the model that are set anew a few times. Second,
    the runners-up without a limit are recorded in order, until enough plans fit that are as quick: values that live
    only while an op runs may take far less memory in them. Third, the runners-up at the last price of a byte are
    recorded; if no plan has fitted, those with the least bytes. A peak is None if the function cannot be recorded; then
    the bytes by the model count.

    If the model counts more bytes for some plan than its program holds, a plan may fit that the model excludes. Then
    the only known bound of the time is the best plan without a limit.

    Raises:
        DoesNotFit: no recorded plan fits.
    """
    quickest = search.best()
    recorded = _Recorded(limit, peak)
    held = recorded.held(quickest)
    best, bound = quickest, inf
    if held > limit:
        best, bound = _limited(limit, search, quickest, held, recorded)
    more = min(max(_OPS // max(len(quickest.model.graph.ops), 1), _FEW), _MANY)
    for plan in itertools.islice(search.runners_up(quickest), more):
        if recorded.quicker(plan.time) > count:
            break
        if _SHARE * plan.memory <= limit:
            recorded.held(plan)
    priced = best if recorded.fit else replace(best, price=BYTES)
    for plan in itertools.islice(search.runners_up(priced), more) if priced is not quickest else ():
        if len(recorded.fit) > count:
            break
        recorded.held(plan)
    if not recorded.fit:
        raise DoesNotFit(recorded.least)
    bound = quickest.bound if recorded.over_counts or bound == inf else bound
    fit = [(plan, round(held) if recorded.has_peaks else None) for plan, held in recorded.fit[: count + 1]]
    best = fit[0][0]
    return [(replace(best, bound=min(bound, best.time)), fit[0][1]), *fit[1:]]


def _limited(
    limit: float, search: LayeredSearch, quickest: LayoutPlan, held: float, recorded: _Recorded
) -> tuple[LayoutPlan, float]:
    """The last plan of those under limits of the model that are set anew, and a bound of the time by the model.

    ``held``: the bytes that the quickest plan holds, which are too many.
    """
    over, bound = quickest.memory, inf  # bytes by the model that are too many
    allowed = over * limit / held * (1 + _TIE)
    for _ in range(_ROUNDS):
        smallest = False
        try:
            plan = search.best(allowed)
        except DoesNotFit as error:
            smallest = True
            plan = search.best(allowed := error.least * _MORE)
        if plan in recorded:
            break
        held, fit = recorded.held(plan), recorded.fit
        bound = min(bound, plan.bound)
        guess = plan.memory * limit / max(held, 1) * (1 + _TIE)
        if held <= limit:
            if held > _ENOUGH * limit:
                break
            allowed = guess if guess < over else (plan.memory + over) / 2
        elif smallest:  # the smallest plan by the model; another plan may hold less
            allowed = plan.memory * _MORE
        else:
            over = min(over, plan.memory)
            allowed = max(guess, (plan.memory + fit[0][0].memory) / 2) if fit else guess
    return plan, bound
