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
from fspmd.auto.record import is_value
from fspmd.auto.solve import DoesNotFit, Found, Solver
from fspmd.errors import FspmdError
from fspmd.meshes.mesh import Mesh, make_mesh
from fspmd.programs.jit import jit
from fspmd.programs.lower import Lowered
from fspmd.spec import P, TensorSpec

_ROUNDS = 5  # plans that are recorded
_MORE = (1.02, 1.05, 1.1, 1.4, 1.8, 2.0)  # of the least by the model, which often is not the least when it runs
_QUICK, _MOST = 12, 24  # that are recorded where quicker ones may fit, or none has been found that does
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
    """What fits."""

    solver: Solver
    found: Found
    peak: int | None  # bytes that a rank holds at most
    allowed: float | None  # those that the plan may have by the model


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
) -> Fitting:
    """The quickest of a few plans that hold at most so many bytes; where none does, one of those ``holding_least``.

    A few are the best by the model under limits that are set anew, and, where these are quicker, the ``others``, the
    runners-up without a limit in their order: what lives only while an op runs may be far less of them.

    Where the model has counted too much of one, others may fit though they hold too much by it; then no plan beats the
    best one without a limit, and that is all that is known.

    Raises:
        DoesNotFit: there is none among them.
    """
    solver, found = free_solver, quickest = solve(None)
    held = peak(solver, found)
    if held is None:
        return Fitting(*solve(limit), None, limit)
    if held <= limit:
        return Fitting(solver, found, held, None)
    best: Fitting | None = None
    allowed, over = found.memory * limit / held * (1 + _TIE), found.memory  # too many bytes by the model
    free, bound, least = found.bound, inf, held
    over_counts = held < found.memory
    tried, more = {found.chosen}, itertools.chain(_MORE, itertools.repeat(_MORE[-1]))
    for _ in range(_ROUNDS):
        smallest = False
        try:
            solver, found = solve(allowed)
        except DoesNotFit as error:
            smallest = True
            solver, found = solve(allowed := error.least * next(more))
        if found.chosen in tried:
            break
        tried.add(found.chosen)
        held = peak(solver, found) or 0
        bound, least = min(bound, found.bound), min(least, held)
        over_counts |= held < found.memory
        guess = found.memory * limit / held * (1 + _TIE) if held else inf
        if held <= limit:
            if best is None or found.time < best.found.time:
                best = Fitting(solver, found, held, allowed)
            if held > _ENOUGH * limit:
                break
            allowed = guess if guess < over else (found.memory + over) / 2
        elif smallest:  # by the model; another may hold less
            allowed = found.memory * next(more)
        else:
            over = min(over, found.memory)
            allowed = guess if best is None else max(guess, (found.memory + best.found.memory) / 2)
    recorded = 0
    for model, found in others(free_solver, quickest):
        if recorded == (_MOST if best is None else _QUICK):
            break
        if best is not None and found.time > best.found.time * (1 - _ROUNDING):
            break
        if found.chosen in tried or _SHARE * found.memory > limit:
            continue
        held, recorded = peak(model, found) or 0, recorded + 1
        least = min(least, held)
        if held <= limit:
            best = Fitting(model, found, held, found.memory * (1 + _TIE))
    for model, found in holding_least(solver) if best is None else ():
        held = peak(model, found) or 0
        least = min(least, held)
        if held <= limit and (best is None or found.time < best.found.time):
            best = Fitting(model, found, held, found.memory * (1 + _TIE))
    if best is None:
        raise DoesNotFit(least)
    bound = free if over_counts or bound == inf else bound
    return best._replace(found=replace(best.found, bound=min(bound, best.found.time)))
