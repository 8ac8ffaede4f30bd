"""Solvers: the cheapest choice of all variables of a model, by variable elimination or as an integer program.

Elimination removes one variable after another. A removed variable leaves a table of its least cost over the variables
that shared a price with it (Bertelè and Brioschi, "Nonserial Dynamic Programming", 1972). On a chain or a tree these
are tables of one variable. The time is linear in the size of the largest table.

HiGHS solves the integer program through SciPy. Each choice of a variable has a binary, and one binary of each variable
is 1. For two variables that share a price, each pair of their choices has a number between 0 and 1. The numbers of the
pairs with one choice add up to its binary.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.layout_search.call_layouts import ChoiceCost, part_of
from fspmd.layout_search.cost_model import CostModel

WIDEST = 1 << 25  # the most elements of a table
_ROUNDING = 1e-11  # relative to the cost


Table = tuple[tuple[int, ...], Tensor]  # the variables of the dims, and the costs of their choices


class TooWide(Exception):
    """A table would not fit in memory."""


@dataclass(slots=True)
class Bucket:
    """A removed variable.

    The costs of its choices are the sum of ``tables``. The sum is computed when it is needed, since the sums of all
    buckets would take gigabytes.

    Attributes:
        variable: the variable.
        others: the variables that share a table with it.
        tables: the tables of the variable.
        least: the least cost of its choices, with a dim for each of ``others``.
    """

    variable: int
    others: tuple[int, ...]
    tables: Sequence[Table]
    least: Tensor

    @property
    def scope(self) -> tuple[int, ...]:
        """The variables of the dims of its costs."""
        return (*self.others, self.variable)

    def costs(self, part: Mapping[int, Tensor]) -> Tensor:
        """The costs of its choices. ``part``: for some of the other variables, the places to keep."""
        dims = {v: i for i, v in enumerate(self.scope)}
        return _sum([(scope, _part(table, scope, part)) for scope, table in self.tables], dims)

    def best(self, places: Sequence[int]) -> int:
        """Its first choice of least cost. ``places``: of the choices of all other variables."""
        variable = self.variable
        rows = [
            table[tuple([slice(None) if v == variable else places[v] for v in scope])] for scope, table in self.tables
        ]
        return int(functools.reduce(torch.add, rows).argmin())


@dataclass(slots=True)
class Solved:
    """A solved model.

    Attributes:
        cost: the least cost.
        buckets: the removed variables, in order. Choices are read off in reverse order.
        kept: for each variable the choices that were considered. Tables have places among these.
    """

    cost: float
    buckets: list[Bucket]
    kept: Sequence[Tensor]

    def best(self) -> list[int]:
        """The choices of least cost; of equal choices the first."""
        places = [0] * len(self.buckets)
        for bucket in reversed(self.buckets):
            places[bucket.variable] = bucket.best(places)
        return [int(choices[i]) for choices, i in zip(self.kept, places, strict=True)]

    def marginals(self, most: float = inf) -> list[Tensor]:
        """For each choice of each variable, the least cost of all solutions with this choice.

        A second pass goes through the buckets in reverse order. A cost above ``most`` may be returned as infinity:
        parts of tables with such costs alone are skipped. On many layers and three axes this takes a third of the time,
        and 2 GB less.
        """
        place = {bucket.variable: i for i, bucket in enumerate(self.buckets)}
        children: list[list[Bucket]] = [[] for _ in self.buckets]
        for bucket in self.buckets:
            if bucket.others:
                children[min(map(place.__getitem__, bucket.others))].append(bucket)
        rest_of: dict[int, Tensor] = {}  # for each variable, the least cost of everything outside its bucket
        marginals: list[Tensor] = [Tensor()] * len(self.buckets)
        for i, bucket in reversed(list(enumerate(self.buckets))):
            rest = rest_of.pop(bucket.variable) if bucket.others else self.cost - bucket.least
            scope, part = bucket.scope, dict[int, Tensor]()
            if most < inf:
                part = dict(zip(bucket.others, _places_of_any(bucket.least + rest <= most), strict=True))
            total = bucket.costs(part) + _part(rest, bucket.others, part).unsqueeze(-1)
            marginals[bucket.variable] = _least_over(total, scope, (bucket.variable,))
            for child in children[i]:
                least = _part(child.least, child.others, part)
                without_child = _least_over(total, scope, child.others) - least
                rest_of[child.variable] = _widened(
                    torch.where(least == inf, inf, without_child), child.others, part, child.least
                )
        return marginals

    def within(self, cost: float) -> list[Tensor]:
        """The choices of each variable that occur in a solution of at most this cost."""
        most = cost + _ROUNDING * max(1.0, abs(cost))
        return [choices[least <= most] for choices, least in zip(self.kept, self.marginals(most), strict=True)]


def _least_over(table: Tensor, scope: tuple[int, ...], kept: tuple[int, ...]) -> Tensor:
    """The least of a table over all variables of its scope, except those ``kept``, which become its dims."""
    dropped = [i for i, v in enumerate(scope) if v not in kept]
    table = table.amin(dropped) if dropped else table
    remaining = [v for v in scope if v in kept]
    return table.permute([remaining.index(v) for v in kept])


def _places_of_any(mask: Tensor) -> list[Tensor]:
    """The places along each dim at which a mask is true anywhere."""
    dims = range(mask.dim())
    rows = [mask.any([d for d in dims if d != dim]) if len(dims) > 1 else mask for dim in dims]
    return [row.nonzero().flatten() for row in rows]


def _part(table: Tensor, scope: tuple[int, ...], part: Mapping[int, Tensor]) -> Tensor:
    """The part of a table at the places of some variables of its scope."""
    return part_of(table, [part.get(v) for v in scope])


def _widened(table: Tensor, scope: tuple[int, ...], part: Mapping[int, Tensor], like: Tensor) -> Tensor:
    """A table of the shape of ``like``, with ``table`` at the places ``part``, and infinity at all others."""
    if table.shape == like.shape:
        return table
    places = [part.get(v, torch.arange(n)) for v, n in zip(scope, like.shape, strict=True)]
    wide = torch.full_like(like, inf)
    wide[torch.meshgrid(places, indexing="ij")] = table
    return wide


def order(model: CostModel) -> list[int]:
    """The order in which variables are removed: each time the variable with the smallest table.

    Raises:
        TooWide: a table is too large.
    """
    sizes = [len(choices) for choices in model.choices]
    neighbours: list[set[int]] = [set() for _ in sizes]
    for a, b in model.pairs:
        neighbours[a].add(b)
        neighbours[b].add(a)

    def table_size(v: int) -> int:
        return sizes[v] * prod(sizes[other] for other in neighbours[v])

    queue = [(table_size(v), v) for v in range(len(sizes))]
    heapq.heapify(queue)
    sequence: list[int] = []
    removed = [False] * len(sizes)
    while queue:
        size, v = heapq.heappop(queue)
        if removed[v] or size != table_size(v):
            continue
        if size > WIDEST:
            raise TooWide
        removed[v] = True
        sequence.append(v)
        around = neighbours[v]
        for other in around:
            neighbours[other] |= around
            neighbours[other] -= {v, other}
        for other in around:
            heapq.heappush(queue, (table_size(other), other))
    return sequence


def eliminate(model: CostModel, sequence: list[int], price: float, kept: Sequence[Tensor]) -> Solved:
    """Solve a model.

    Args:
        model: the model.
        sequence: its variables in the order of removal (`order`).
        price: µs for each byte.
        kept: for each variable the choices to consider.
    """
    place = {v: i for i, v in enumerate(sequence)}
    tables: list[list[Table]] = [[] for _ in sequence]
    made: dict[Any, Tensor] = {}  # tables by their parts: repeated layers share tables

    def put(scope: tuple[int, ...], table: Tensor) -> None:
        """Add a table to the variable of its scope that is removed first."""
        tables[min(scope, key=place.__getitem__)].append((scope, table))

    for v, cost in enumerate(model.own):
        table = cost.of(kept[v]).weighed(price)
        put((v,), made.setdefault(tuple(table.tolist()), table))
    names = [tuple(choices.tolist()) for choices in kept]
    for (a, b), cost in model.pairs.items():
        key = id(cost), names[a], names[b]
        if key not in made:
            made[key] = cost.of(kept[a], kept[b]).weighed(price)
        put((a, b), made[key])
    total, buckets = 0.0, []
    for v in sequence:
        rows, tables[v] = tables[v], []
        others = tuple(sorted({other for scope, _ in rows for other in scope} - {v}))
        dims = {u: i for i, u in enumerate((*others, v))}
        rows.sort(key=lambda row: (row[1].numel(), [dims[u] for u in row[0]]))
        parts = tuple([(tuple([dims[u] for u in scope]), id(table)) for scope, table in rows])
        if parts not in made:
            made[parts] = _sum(rows, dims).amin(-1)
        buckets.append(Bucket(v, others, rows, made[parts]))
        if others:
            put(others, made[parts])
        else:
            total += float(made[parts])
    return Solved(total, buckets, kept)


def _sum(rows: Sequence[Table], dims: Mapping[int, int]) -> Tensor:
    """The sum of tables. ``dims``: the dim of the sum for each variable."""
    return functools.reduce(torch.add, [_aligned(table, [dims[v] for v in scope], len(dims)) for scope, table in rows])


def _aligned(table: Tensor, dims: Sequence[int], count: int) -> Tensor:
    """A view of a table with ``count`` dims, in which its dims are ``dims`` and all others have size 1."""
    order_of_dims = sorted(range(len(dims)), key=dims.__getitem__)
    shape = [1] * count
    for dim, n in zip(dims, table.shape, strict=True):
        shape[dim] = n
    return table.permute(order_of_dims).reshape(shape)


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


def solve_integer_program(
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
