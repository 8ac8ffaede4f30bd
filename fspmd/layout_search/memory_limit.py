"""Plans under a limit of memory, of which the recorded program tells what it holds.

The model that is solved leaves out what lives only while an op runs, and counts what `checkpoint` does not keep. So the
bytes that a plan may have by the model are made fewer, or more, until the program holds what it may.
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
from fspmd.layout_search.apply import applied
from fspmd.layout_search.found_layouts import Layouts
from fspmd.layout_search.op_graph import is_value
from fspmd.layout_search.search import BYTES, DoesNotFit, LayeredSearch, LayoutPlan
from fspmd.meshes.mesh import make_mesh
from fspmd.programs.jit import jit
from fspmd.programs.lower import Lowered
from fspmd.spec import P, TensorSpec

_ROUNDS = 5  # limits of the model that are tried
_MORE = 1.2  # of the least by the model, which often is not the least when it runs
_FEW, _MANY, _OPS = 12, 60, 6000  # plans that are recorded besides, and ops of them all
_SHARE = 0.6  # of what the model counts: a program that held less would be rare
_ENOUGH = 0.98  # of the limit: a plan that holds so much could hardly hold more
_ROUNDING, _TIE = 1e-6, 1e-12


class _Recorded:
    """Plans that were recorded, each once: what they hold, and which of them fit."""

    def __init__(self, limit: float, peak: Callable[[LayoutPlan], int | None]) -> None:
        self._limit, self._peak = limit, peak
        self._known: dict[tuple[int, ...], float] = {}
        self._fit: dict[frozenset[Any], tuple[LayoutPlan, float]] = {}  # by how arguments lie
        self.can_tell = True  # else what the model counts is what they hold
        self.over_counts = False  # the model has counted more than a program held
        self.least = inf

    def __contains__(self, plan: LayoutPlan) -> bool:
        return plan.chosen in self._known

    def held(self, plan: LayoutPlan) -> float:
        """Bytes that a rank holds at most."""
        if plan not in self:
            self._known[plan.chosen] = held = self._told(plan)
            self.least = min(self.least, held)
            self.over_counts |= held < plan.memory
            if held <= self._limit:
                known = self._fit.get(plan.names)
                if known is None or plan.time < known[0].time:
                    self._fit[plan.names] = plan, held
        return self._known[plan.chosen]

    def _told(self, plan: LayoutPlan) -> float:
        peak = self._peak(plan) if self.can_tell else None
        self.can_tell &= bool(self._known) or peak is not None
        return plan.memory if not self.can_tell else inf if peak is None else peak

    @property
    def fit(self) -> list[tuple[LayoutPlan, float]]:
        """Those that fit, the quickest first."""
        return sorted(self._fit.values(), key=lambda one: one[0].time)

    def quicker(self, time: float) -> int:
        """How many fit that are as quick."""
        return sum(plan.time <= time * (1 + _ROUNDING) for plan, _ in self._fit.values())


def peak_of(f: Callable[..., Any], args: tuple[Any, ...], layouts: Layouts) -> int | None:
    """Bytes that a rank holds at most while the program runs; None where ``f`` cannot be recorded.

    It is that of the first rank, whose blocks are the largest, so all processes find the same.
    """
    mesh = layouts.mesh
    ranks = make_mesh(tuple(mesh.shape.values()), mesh.axis_names, transport="abstract")

    def given(x: Any, partition: P | None) -> Any:
        return x if partition is None else TensorSpec(ranks, partition, tuple(x.shape), x.dtype)

    with suppress(FspmdError):
        laid = optree.tree_map(given, args, layouts.specs, is_leaf=is_value, none_is_leaf=True)
        jitted: Any = jit(applied(f, ranks, layouts.steps, layouts.results))
        program: Lowered = jitted.lower(*laid)
        return program.memory().peak
    return None


def fitting(
    limit: float, search: LayeredSearch, peak: Callable[[LayoutPlan], int | None], count: int
) -> list[tuple[LayoutPlan, int | None]]:
    """The quickest plan that holds at most so many bytes, and after it up to ``count`` runners-up that do.

    A few are the best by the model under limits that are set anew. What lives only while an op runs may be far less of
    others, so the runners-up without a limit are recorded in their order, until enough fit that are as quick; then
    those of the last price of a byte or, where none has fitted, those that hold least. With each its peak; None, and
    the bytes of the model are what counts, where the function cannot be recorded.

    Where the model has counted too much of one, others may fit though they hold too much by it; then no plan beats the
    best one without a limit, and that is all that is known.

    Raises:
        DoesNotFit: there is none among them.
    """
    quickest = search.best()
    recorded = _Recorded(limit, peak)
    held = recorded.held(quickest)
    best, bound = quickest, inf
    if held > limit:
        best, bound = _limited(limit, search, quickest, held, recorded)
    besides = min(max(_OPS // max(len(quickest.model.graph.ops), 1), _FEW), _MANY)
    for plan in itertools.islice(search.runners_up(quickest), besides):
        if recorded.quicker(plan.time) > count:
            break
        if _SHARE * plan.memory <= limit:
            recorded.held(plan)
    priced = best if recorded.fit else replace(best, price=BYTES)
    for plan in itertools.islice(search.runners_up(priced), besides) if priced is not quickest else ():
        if len(recorded.fit) > count:
            break
        recorded.held(plan)
    if not recorded.fit:
        raise DoesNotFit(recorded.least)
    bound = quickest.bound if recorded.over_counts or bound == inf else bound
    fit = [(plan, round(held) if recorded.can_tell else None) for plan, held in recorded.fit[: count + 1]]
    best = fit[0][0]
    return [(replace(best, bound=min(bound, best.time)), fit[0][1]), *fit[1:]]


def _limited(
    limit: float, search: LayeredSearch, quickest: LayoutPlan, held: float, recorded: _Recorded
) -> tuple[LayoutPlan, float]:
    """Plans under limits of the model that are set anew: the last one, and the time that none beats by it.

    ``held``: what the quickest holds, which is too much.
    """
    over, bound = quickest.memory, inf  # too many bytes by the model
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
        elif smallest:  # by the model; another may hold less
            allowed = plan.memory * _MORE
        else:
            over = min(over, plan.memory)
            allowed = max(guess, (plan.memory + fit[0][0].memory) / 2) if fit else guess
    return plan, bound
