"""Plans under a limit of memory, of which the recorded program tells what it holds.

The model that is solved leaves out what lives only while an op runs, and counts what `checkpoint` does not keep. So the
bytes that a plan may have by the model are made fewer, or more, until the program holds what it may.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple, Protocol

import optree

from fspmd.auto.apply import Step, applied
from fspmd.auto.next_best import names
from fspmd.auto.record import is_value
from fspmd.auto.solve import DoesNotFit, Found, Solver
from fspmd.errors import FspmdError
from fspmd.meshes.mesh import Mesh, make_mesh
from fspmd.programs.jit import jit
from fspmd.programs.lower import Lowered
from fspmd.spec import P, TensorSpec

_ROUNDS = 5  # limits of the model that are tried
_MORE = (1.02, 1.05, 1.1, 1.4, 1.8, 2.0)  # of the least by the model, which often is not the least when it runs
_FEW, _MANY, _OPS = 12, 60, 6000  # plans that are recorded besides, and ops of them all
_SHARE = 0.6  # of what the model counts: a program that held less would be rare
_ENOUGH = 0.98  # of the limit: a plan that holds so much could hardly hold more
_ROUNDING, _TIE = 1e-6, 1e-12


class Plan(Protocol):
    """How arguments lie, the steps of a function, and how its results must lie."""

    @property
    def specs(self) -> Any: ...
    @property
    def steps(self) -> Sequence[Step]: ...
    @property
    def results(self) -> Sequence[P | None]: ...


class Fitting(NamedTuple):
    """A plan that fits."""

    solver: Solver
    found: Found
    peak: int  # bytes that a rank holds at most


class _Recorded:
    """Plans that were recorded, each once: what they hold, and which of them fit."""

    def __init__(self, limit: float, peak: Callable[[Solver, Found], int | None]) -> None:
        self._limit, self._peak = limit, peak
        self._known: dict[tuple[int, ...], float] = {}
        self._fit: dict[Any, Fitting] = {}  # by how arguments lie
        self.over_counts = False  # the model has counted more than a program held
        self.least = inf

    def __contains__(self, found: Found) -> bool:
        return found.chosen in self._known

    def __len__(self) -> int:
        return len(self._known)

    def held(self, solver: Solver, found: Found) -> float:
        """Bytes that a rank holds at most; infinitely many where that cannot be told."""
        if found not in self:
            peak = self._peak(solver, found)
            self._known[found.chosen] = held = inf if peak is None else peak
            self.least = min(self.least, held)
            self.over_counts |= held < found.memory
            if peak is not None and held <= self._limit:
                name = frozenset(names(solver, found))
                if name not in self._fit or found.time < self._fit[name].found.time:
                    self._fit[name] = Fitting(solver, found, peak)
        return self._known[found.chosen]

    @property
    def fit(self) -> list[Fitting]:
        """Those that fit, the quickest first."""
        return sorted(self._fit.values(), key=lambda one: one.found.time)

    def quicker(self, time: float) -> int:
        """How many fit that are as quick."""
        return sum(one.found.time <= time * (1 + _ROUNDING) for one in self._fit.values())


def peak_of(f: Callable[..., Any], args: tuple[Any, ...], mesh: Mesh, plan: Plan) -> int | None:
    """Bytes that a rank holds at most while the program runs; None where ``f`` cannot be recorded.

    It is that of the first rank, whose blocks are the largest, so all processes find the same.
    """
    ranks = make_mesh(tuple(mesh.shape.values()), mesh.axis_names, transport="abstract")

    def given(x: Any, partition: P | None) -> Any:
        return x if partition is None else TensorSpec(ranks, partition, tuple(x.shape), x.dtype)

    with suppress(FspmdError):
        laid = optree.tree_map(given, args, plan.specs, is_leaf=is_value, none_is_leaf=True)
        jitted: Any = jit(applied(f, ranks, plan.steps, plan.results))
        program: Lowered = jitted.lower(*laid)
        return program.memory().peak
    return None


def fitting(
    limit: float,
    solve: Callable[[float | None], tuple[Solver, Found]],
    peak: Callable[[Solver, Found], int | None],
    others: Callable[[Solver, Found], Iterator[tuple[Solver, Found]]],
    holding_least: Callable[[Solver], Sequence[tuple[Solver, Found]]],
    count: int,
    ops: int,
) -> list[Fitting] | None:
    """The quickest plan that holds at most so many bytes, and after it up to ``count`` runners-up that do.

    A few are the best by the model under limits that are set anew. What lives only while an op runs may be far less of
    others, so the ``others``, the runners-up without a limit, are recorded in their order, until enough fit that are as
    quick; then those of the last price of a byte; where none has fitted, those ``holding_least``. ``ops``: how many one
    has. None where the function cannot be recorded.

    Where the model has counted too much of one, others may fit though they hold too much by it; then no plan beats the
    best one without a limit, and that is all that is known.

    Raises:
        DoesNotFit: there is none among them.
    """
    free, quickest = solve(None)
    recorded = _Recorded(limit, peak)
    held = recorded.held(free, quickest)
    if held == inf:
        return None
    priced, best, bound = free, quickest, inf
    if held > limit:
        priced, best, bound = _limited(limit, solve, quickest, held, recorded)
    besides = min(max(_OPS // max(ops, 1), _FEW), _MANY)
    most = len(recorded) + besides
    for model, found in others(free, quickest):
        if recorded.quicker(found.time) > count or len(recorded) >= most:
            break
        if _SHARE * found.memory <= limit:
            recorded.held(model, found)
    most = len(recorded) + besides
    for model, found in others(priced, best) if priced is not free else ():
        if len(recorded.fit) > count or len(recorded) >= most:
            break
        recorded.held(model, found)
    for model, found in holding_least(priced) if not recorded.fit else ():
        recorded.held(model, found)
    if not recorded.fit:
        raise DoesNotFit(recorded.least)
    first, *rest = recorded.fit[: count + 1]
    bound = quickest.bound if recorded.over_counts or bound == inf else bound
    return [first._replace(found=replace(first.found, bound=min(bound, first.found.time))), *rest]


def _limited(
    limit: float,
    solve: Callable[[float | None], tuple[Solver, Found]],
    quickest: Found,
    held: float,
    recorded: _Recorded,
) -> tuple[Solver, Found, float]:
    """Plans under limits of the model that are set anew: the last one, and the time that none beats by it.

    ``held``: what the quickest holds, which is too much.
    """
    over, bound = quickest.memory, inf  # too many bytes by the model
    allowed = over * limit / held * (1 + _TIE)
    more = itertools.chain(_MORE, itertools.repeat(_MORE[-1]))
    for _ in range(_ROUNDS):
        smallest = False
        try:
            solver, found = solve(allowed)
        except DoesNotFit as error:
            smallest = True
            solver, found = solve(allowed := error.least * next(more))
        if found in recorded:
            break
        held, fit = recorded.held(solver, found), recorded.fit
        bound = min(bound, found.bound)
        guess = found.memory * limit / max(held, 1) * (1 + _TIE)
        if held <= limit:
            if held > _ENOUGH * limit:
                break
            allowed = guess if guess < over else (found.memory + over) / 2
        elif smallest:  # by the model; another may hold less
            allowed = found.memory * next(more)
        else:
            over = min(over, found.memory)
            allowed = max(guess, (found.memory + fit[0].found.memory) / 2) if fit else guess
    return solver, found, bound
