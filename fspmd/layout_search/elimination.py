"""The cheapest choice of all variables, exactly: one variable after another leaves, its best choice kept.

What is left of a variable is a table over those it was joined with (Bertelè and Brioschi, "Nonserial Dynamic
Programming", 1972). On a chain or a tree these are tables of one variable; the time is linear in what is widest.
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

WIDEST = 1 << 25  # elements of a table
_ROUNDING = 1e-11  # of the cost


Table = tuple[tuple[int, ...], Tensor]  # the variables of its dims, and what their choices cost


class TooWide(Exception):
    """The tables would not fit in memory."""


@dataclass(slots=True)
class Bucket:
    """A variable that left: those whose choices it depends on, and what each of its own choices then costs.

    That is the sum of tables, which is made where it is needed: all of them together would take gigabytes.
    """

    variable: int
    others: tuple[int, ...]
    tables: Sequence[Table]
    least: Tensor  # of its own choices: one dim for each of the others

    @property
    def scope(self) -> tuple[int, ...]:
        """The dims of its costs."""
        return (*self.others, self.variable)

    def costs(self, part: Mapping[int, Tensor]) -> Tensor:
        """What its choices cost, at some places of the others."""
        at = {v: i for i, v in enumerate(self.scope)}
        return _sum([(own, _part(table, own, part)) for own, table in self.tables], at)

    def best(self, places: Sequence[int]) -> int:
        """Its first choice that costs the least, at some places of the others."""
        mine = self.variable
        rows = [table[tuple([slice(None) if v == mine else places[v] for v in own])] for own, table in self.tables]
        return int(functools.reduce(torch.add, rows).argmin())


@dataclass(slots=True)
class Solved:
    """The least cost, and the buckets from which choices are read off, the last one first.

    Choices are places among those that were ``kept``, of each variable.
    """

    cost: float
    buckets: list[Bucket]
    kept: Sequence[Tensor]

    def best(self) -> list[int]:
        """The choices that cost the least; of equal ones the first."""
        places = [0] * len(self.buckets)
        for bucket in reversed(self.buckets):
            places[bucket.variable] = bucket.best(places)
        return [int(own[i]) for own, i in zip(self.kept, places, strict=True)]

    def marginals(self, most: float = inf) -> list[Tensor]:
        """For each choice of a variable the least cost of all in which it is taken: `least` goes back down.

        What is more than ``most`` may be told to be infinite: the parts of tables where all is are not gone through. On
        many layers and three axes that takes a third of the time, and 2 GB less.
        """
        place = {bucket.variable: i for i, bucket in enumerate(self.buckets)}
        below: list[list[Bucket]] = [[] for _ in self.buckets]
        for bucket in self.buckets:
            if bucket.others:
                below[min(map(place.__getitem__, bucket.others))].append(bucket)
        above: dict[int, Tensor] = {}
        found: list[Tensor] = [Tensor()] * len(self.buckets)
        for i, bucket in reversed(list(enumerate(self.buckets))):
            rest = above.pop(bucket.variable) if bucket.others else self.cost - bucket.least
            scope, part = bucket.scope, dict[int, Tensor]()
            if most < inf:
                part = dict(zip(bucket.others, _possible(bucket.least + rest <= most), strict=True))
            whole = bucket.costs(part) + _part(rest, bucket.others, part).unsqueeze(-1)
            found[bucket.variable] = _least_over(whole, scope, (bucket.variable,))
            for child in below[i]:
                least = _part(child.least, child.others, part)
                without = _least_over(whole, scope, child.others) - least
                above[child.variable] = _widened(
                    torch.where(least == inf, inf, without), child.others, part, child.least
                )
        return found

    def within(self, cost: float) -> list[Tensor]:
        """The choices that are taken by anything of at most this cost."""
        most = cost + _ROUNDING * max(1.0, abs(cost))
        return [own[least <= most] for own, least in zip(self.kept, self.marginals(most), strict=True)]


def _least_over(table: Tensor, scope: tuple[int, ...], kept: tuple[int, ...]) -> Tensor:
    """Of a table over a scope the least over all but some variables, which are in the order of the scope."""
    gone = [i for i, v in enumerate(scope) if v not in kept]
    table = table.amin(gone) if gone else table
    left = [v for v in scope if v in kept]
    return table.permute([left.index(v) for v in kept])


def _possible(places: Tensor) -> list[Tensor]:
    """The places along each dim at which anything is possible."""
    dims = range(places.dim())
    rows = [places.any([d for d in dims if d != dim]) if len(dims) > 1 else places for dim in dims]
    return [row.nonzero().flatten() for row in rows]


def _part(table: Tensor, scope: tuple[int, ...], part: Mapping[int, Tensor]) -> Tensor:
    """Of a table over a scope the places of some variables."""
    return part_of(table, [part.get(v) for v in scope])


def _widened(table: Tensor, scope: tuple[int, ...], part: Mapping[int, Tensor], like: Tensor) -> Tensor:
    """The table that a part was taken of, infinite elsewhere."""
    if table.shape == like.shape:
        return table
    own = [part.get(v, torch.arange(n)) for v, n in zip(scope, like.shape, strict=True)]
    found = torch.full_like(like, inf)
    found[torch.meshgrid(own, indexing="ij")] = table
    return found


def order(model: CostModel) -> list[int]:
    """In which variables leave: that whose table is smallest, each time.

    Raises:
        TooWide: some table is too large all the same.
    """
    sizes = [len(own) for own in model.choices]
    joined: list[set[int]] = [set() for _ in sizes]
    for a, b in model.pairs:
        joined[a].add(b)
        joined[b].add(a)

    def table(v: int) -> int:
        return sizes[v] * prod(sizes[other] for other in joined[v])

    queue = [(table(v), v) for v in range(len(sizes))]
    heapq.heapify(queue)
    found: list[int] = []
    gone = [False] * len(sizes)
    while queue:
        cost, v = heapq.heappop(queue)
        if gone[v] or cost != table(v):
            continue
        if cost > WIDEST:
            raise TooWide
        gone[v] = True
        found.append(v)
        around = joined[v]
        for other in around:
            joined[other] |= around
            joined[other] -= {v, other}
        for other in around:
            heapq.heappush(queue, (table(other), other))
    return found


def eliminate(model: CostModel, sequence: list[int], price: float, kept: Sequence[Tensor]) -> Solved:
    """Solve, by some choices of each variable; ``price``: µs for each byte."""
    place = {v: i for i, v in enumerate(sequence)}
    tables: list[list[Table]] = [[] for _ in sequence]
    made: dict[Any, Tensor] = {}  # tables by what they are made of: where layers repeat they are the same

    def put(scope: tuple[int, ...], table: Tensor) -> None:
        """At the variable of the scope that leaves first."""
        tables[min(scope, key=place.__getitem__)].append((scope, table))

    for v, cost in enumerate(model.own):
        table = cost.of(kept[v]).weighed(price)
        put((v,), made.setdefault(tuple(table.tolist()), table))
    names = [tuple(own.tolist()) for own in kept]
    for (a, b), cost in model.pairs.items():
        key = id(cost), names[a], names[b]
        if key not in made:
            made[key] = cost.of(kept[a], kept[b]).weighed(price)
        put((a, b), made[key])
    total, buckets = 0.0, []
    for v in sequence:
        rows, tables[v] = tables[v], []
        others = tuple(sorted({other for scope, _ in rows for other in scope} - {v}))
        at = {u: i for i, u in enumerate((*others, v))}
        rows.sort(key=lambda row: (row[1].numel(), [at[u] for u in row[0]]))
        parts = tuple([(tuple([at[u] for u in scope]), id(table)) for scope, table in rows])
        if parts not in made:
            made[parts] = _sum(rows, at).amin(-1)
        buckets.append(Bucket(v, others, rows, made[parts]))
        if others:
            put(others, made[parts])
        else:
            total += float(made[parts])
    return Solved(total, buckets, kept)


def _sum(rows: Sequence[Table], at: Mapping[int, int]) -> Tensor:
    """Of tables over some variables, of which each has its dim."""
    return functools.reduce(torch.add, [_aligned(table, [at[v] for v in own], len(at)) for own, table in rows])


def _aligned(table: Tensor, own: Sequence[int], dims: int) -> Tensor:
    """A table over some dims, to be added to one over all."""
    order_of = sorted(range(len(own)), key=own.__getitem__)
    shape = [1] * dims
    for dim, n in zip(own, table.shape, strict=True):
        shape[dim] = n
    return table.permute(order_of).reshape(shape)
