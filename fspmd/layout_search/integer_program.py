"""The cheapest choice of a model as an integer program, which HiGHS solves through SciPy.

Each choice of a variable has a binary, and one binary of each variable is 1. For two variables that share a price, each
pair of their choices has a number between 0 and 1. The numbers of the pairs with one choice add up to its binary.
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
    """The rows of a sparse matrix, with lower and upper bounds."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.bounds: list[tuple[float, float]] = []

    def add(self, parts: list[tuple[list[int], float]], low: float, high: float) -> None:
        """Add a row: a sum of lists of columns, each list with its factor."""
        row = len(self.bounds)
        self.bounds.append((low, high))
        self.entries += [(row, column, factor) for columns, factor in parts for column in columns]


class _Columns:
    """The columns of the matrix, with their costs in µs and bytes and their upper bounds."""

    def __init__(self) -> None:
        self.time: list[float] = []
        self.memory: list[float] = []
        self.most: list[float] = []

    def add(self, time: Any, memory: Any) -> list[int]:
        """Add columns, and return their numbers. A column of infinite cost has the upper bound 0."""
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
    known: Collection[Sequence[int]] = (),
    nodes: int | None = None,
) -> tuple[list[int], float] | None:
    """The cheapest choice of each variable, and a lower bound of its cost; None if there is none.

    Args:
        model: the model.
        price: µs for each byte.
        kept: for each variable the choices to consider.
        limit: the most bytes.
        known: solutions. The result has another layout of some argument than each of them.
        nodes: the most nodes of the search. If they do not suffice, the choice is the cheapest that was found.

    Raises:
        ArgumentError: SciPy is missing.
    """
    try:
        from scipy import optimize, sparse
    except ImportError:
        raise ArgumentError(
            "auto_spec needs SciPy for a memory_limit, or for a graph that is too wide for the built-in solver, but "
            "found none; write pip install fspmd[auto]"
        ) from None
    if not model.choices:
        return None if known else ([], 0.0)
    columns, rows = _Columns(), _SparseRows()
    costs = [cost.of(choices) for cost, choices in zip(model.own, kept, strict=True)]
    binaries = [columns.add(cost.time.tolist(), cost.memory.tolist()) for cost in costs]
    for numbers in binaries:
        rows.add([(numbers, 1.0)], 1, 1)
    count = len(columns.time)
    for (a, b), cost in model.pairs.items():
        _add_pair(columns, rows, binaries[a], binaries[b], cost.of(kept[a], kept[b]))
    if limit is not None:
        rows.add([([i], m) for i, m in enumerate(columns.memory) if m], -inf, limit)
    for chosen in known:
        same = [
            column
            for v in model.arguments
            for column, i in zip(binaries[v], kept[v].tolist(), strict=True)
            if model.choices[v][i].spec is model.choices[v][chosen[v]].spec
        ]
        rows.add([(same, 1.0)], -inf, len(model.arguments) - 1)
    row_of, column_of, factors = zip(*rows.entries, strict=True)
    matrix = sparse.csr_array((factors, (row_of, column_of)), shape=(len(rows.bounds), len(columns.time)))
    low, high = zip(*rows.bounds, strict=True)
    solution = optimize.milp(
        [t + price * m for t, m in zip(columns.time, columns.memory, strict=True)],
        integrality=[1] * count + [0] * (len(columns.time) - count),
        bounds=optimize.Bounds(0, columns.most),
        constraints=optimize.LinearConstraint(matrix, low, high),
        options={"mip_rel_gap": 0.0, **({} if nodes is None else {"node_limit": nodes})},
    )
    if solution.x is None:
        return None
    places = [int(torch.tensor(solution.x[numbers]).argmax()) for numbers in binaries]
    return [int(choices[i]) for choices, i in zip(kept, places, strict=True)], float(solution.mip_dual_bound)


def _add_pair(columns: _Columns, rows: _SparseRows, first: list[int], second: list[int], cost: ChoiceCost) -> None:
    """Add the price that two variables share. ``first``, ``second``: their binaries.

    If pairs of choices cost nothing or infinitely much, rows alone say which choices fit together. Choices of
    ``second`` with equal costs share the numbers of their pairs.
    """
    possible = cost.time < inf
    if not cost.memory.any() and not cost.time[possible].any():
        for from_, to, fits in ((first, second, possible), (second, first, possible.mT)):
            for i, row in zip(from_, fits.tolist(), strict=True):
                rows.add([([j for j, fit in zip(to, row, strict=True) if fit], 1.0), ([i], -1.0)], 0, inf)
        return
    kinds, kind_of = torch.unique(torch.cat([cost.time, cost.memory]), dim=1, return_inverse=True)
    height = len(first)
    cells = [columns.add(kinds[:height, k].tolist(), kinds[height:, k].tolist()) for k in range(kinds.shape[1])]
    for i, column in enumerate(first):
        rows.add([([cell[i] for cell in cells], 1.0), ([column], -1.0)], 0, 0)
    for k, cell in enumerate(cells):
        rows.add([(cell, 1.0), ([second[j] for j in (kind_of == k).nonzero().flatten().tolist()], -1.0)], 0, 0)
