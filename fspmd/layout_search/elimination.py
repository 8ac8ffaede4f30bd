"""Variable elimination: finds the cheapest choice of all variables exactly, by removing one variable after another.

A removed variable leaves a table of its least cost over the variables that shared a price with it (Bertelè and
Brioschi, "Nonserial Dynamic Programming", 1972). On a chain or a tree these are tables of one variable. The time is
linear in the size of the largest table.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from fspmd.layout_search.cost_model import CostModel
from fspmd.layout_search.move_prices import part_of

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
