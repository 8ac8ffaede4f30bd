"""The cheapest choice of a model as an integer program, solved by HiGHS through SciPy.

A binary for each choice of a variable, one of which is taken; for each pair of choices of two variables that share a
price a number between 0 and 1, of which those of a choice add up to its binary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.layout_search.cost_model import CostModel
from fspmd.layout_search.move_prices import ChoiceCost


class _SparseRows:
    """Of a sparse matrix, with the bounds of each."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.bounds: list[tuple[float, float]] = []

    def add(self, parts: list[tuple[list[int], float]], low: float, high: float) -> None:
        """A sum of columns, each list with its factor."""
        row = len(self.bounds)
        self.bounds.append((low, high))
        self.entries += [(row, column, factor) for columns, factor in parts for column in columns]


class _Columns:
    """What each costs, in µs and bytes, and its upper bound."""

    def __init__(self) -> None:
        self.time: list[float] = []
        self.memory: list[float] = []
        self.most: list[float] = []

    def add(self, time: Any, memory: Any) -> list[int]:
        """One for each; what costs infinitely much is never taken."""
        start = len(self.time)
        self.most += [0.0 if t == inf else 1.0 for t in time]
        self.time += [0.0 if t == inf else t for t in time]
        self.memory += memory
        return list(range(start, len(self.time)))


def solve(
    model: CostModel,
    price: float,
    kept: Sequence[Tensor],
    limit: float | None = None,
    told: Collection[Sequence[int]] = (),
    nodes: int | None = None,
) -> tuple[list[int], float] | None:
    """The cheapest choice among those that are kept, at a ``price`` in µs for each byte, and what none costs less than.

    It takes at most so many bytes, and in it some argument lies otherwise than in each choice that was ``told``. After
    so many ``nodes`` of the search it is the cheapest that was found. None: there is none.

    Raises:
        ArgumentError: SciPy is not there.
    """
    try:
        from scipy import optimize, sparse
    except ImportError:
        raise ArgumentError(
            "auto_spec needs SciPy here, for a memory_limit or a graph that is too wide for the built-in solver; pip "
            "install fspmd[auto]"
        ) from None
    if not model.choices:
        return None if told else ([], 0.0)
    columns, rows = _Columns(), _SparseRows()
    costs = [cost.of(own) for cost, own in zip(model.own, kept, strict=True)]
    own = [columns.add(cost.time.tolist(), cost.memory.tolist()) for cost in costs]
    for taken in own:
        rows.add([(taken, 1.0)], 1, 1)
    binaries = len(columns.time)
    for (a, b), cost in model.pairs.items():
        _pair(columns, rows, own[a], own[b], cost.of(kept[a], kept[b]))
    if limit is not None:
        rows.add([([i], m) for i, m in enumerate(columns.memory) if m], -inf, limit)
    for chosen in told:
        same = [
            column
            for v in model.arguments
            for column, i in zip(own[v], kept[v].tolist(), strict=True)
            if model.choices[v][i].spec is model.choices[v][chosen[v]].spec
        ]
        rows.add([(same, 1.0)], -inf, len(model.arguments) - 1)
    at, of, factors = zip(*rows.entries, strict=True)
    matrix = sparse.csr_array((factors, (at, of)), shape=(len(rows.bounds), len(columns.time)))
    low, high = zip(*rows.bounds, strict=True)
    found = optimize.milp(
        [t + price * m for t, m in zip(columns.time, columns.memory, strict=True)],
        integrality=[1] * binaries + [0] * (len(columns.time) - binaries),
        bounds=optimize.Bounds(0, columns.most),
        constraints=optimize.LinearConstraint(matrix, low, high),
        options={"mip_rel_gap": 0.0, **({} if nodes is None else {"node_limit": nodes})},
    )
    if found.x is None:
        return None
    taken_of = [int(torch.tensor(found.x[taken]).argmax()) for taken in own]
    return [int(some[i]) for some, i in zip(kept, taken_of, strict=True)], float(found.mip_dual_bound)


def _pair(columns: _Columns, rows: _SparseRows, one: list[int], other: list[int], cost: ChoiceCost) -> None:
    """What two variables share: which choices go together, or also what they then cost."""
    possible = cost.time < inf
    if not cost.memory.any() and not cost.time[possible].any():
        for mine, theirs, fits in ((one, other, possible), (other, one, possible.mT)):
            for i, row in zip(mine, fits.tolist(), strict=True):
                rows.add([([j for j, fit in zip(theirs, row, strict=True) if fit], 1.0), ([i], -1.0)], 0, inf)
        return
    kinds, of = torch.unique(torch.cat([cost.time, cost.memory]), dim=1, return_inverse=True)
    height = len(one)
    cells = [columns.add(kinds[:height, k].tolist(), kinds[height:, k].tolist()) for k in range(kinds.shape[1])]
    for i, column in enumerate(one):
        rows.add([([cell[i] for cell in cells], 1.0), ([column], -1.0)], 0, 0)
    for k, cell in enumerate(cells):
        rows.add([(cell, 1.0), ([other[j] for j in (of == k).nonzero().flatten().tolist()], -1.0)], 0, 0)
