"""The cheapest choice of all variables, exactly: one variable after another leaves, its best choice kept.

What is left of a variable is a table over those it was joined with (Bertelè and Brioschi, "Nonserial Dynamic
Programming", 1972). On a chain or a tree these are tables of one variable; the time is linear in what is widest.
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from fspmd.auto.model import Model

WIDEST = 1 << 25  # elements of a table


class TooWide(Exception):
    """The tables would not fit in memory."""


@dataclass(slots=True)
class Bucket:
    """A variable that left: those whose choices it depends on, and what each of its own choices then costs."""

    variable: int
    others: tuple[int, ...]
    costs: Tensor  # [one dim for each of the others, its own choices]

    def regrets(self, chosen: list[int]) -> Tensor:
        """What each choice costs more than the best."""
        costs = self.costs[tuple(chosen[other] for other in self.others)]
        return costs - costs.amin()


@dataclass(slots=True)
class Solved:
    """The least cost, and the buckets from which choices are read off, the last one first."""

    cost: float
    buckets: list[Bucket]

    def best(self) -> list[int]:
        """The choices that cost the least; of equal ones the first."""
        chosen = [0] * len(self.buckets)
        for bucket in reversed(self.buckets):
            chosen[bucket.variable] = int(bucket.regrets(chosen).argmin())
        return chosen


def order(model: Model) -> list[int]:
    """In which variables leave: that whose table is smallest, each time.

    Raises:
        TooWide: some table is too large all the same.
    """
    joined: list[set[int]] = [set() for _ in model.choices]
    for a, b in model.pairs:
        joined[a].add(b)
        joined[b].add(a)
    sizes = [len(own) for own in model.choices]

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


def eliminate(model: Model, sequence: list[int], price: float | None) -> Solved:
    """Solve; ``price``: µs for each byte, or None: bytes alone."""
    tables: dict[int, dict[tuple[int, ...], Tensor]] = {v: {} for v in sequence}
    place = {v: i for i, v in enumerate(sequence)}

    def put(scope: tuple[int, ...], table: Tensor) -> None:
        """At the variable of the scope that leaves first."""
        at = tables[min(scope, key=place.__getitem__)]
        at[scope] = at[scope] + table if scope in at else table

    for v, cost in enumerate(model.own):
        put((v,), cost.weighed(price))
    for pair, cost in model.pairs.items():
        put(pair, cost.weighed(price))
    total, buckets = 0.0, []
    for v in sequence:
        found = tables.pop(v)
        others = tuple(sorted({other for scope in found for other in scope} - {v}))
        scope = (*others, v)
        rows = [_aligned(table, own_scope, scope) for own_scope, table in found.items()]
        costs = functools.reduce(torch.add, sorted(rows, key=Tensor.numel))
        buckets.append(Bucket(v, others, costs))
        least = costs.amin(-1)
        if others:
            put(others, least)
        else:
            total += float(least)
    return Solved(total, buckets)


def _aligned(table: Tensor, own: tuple[int, ...], scope: tuple[int, ...]) -> Tensor:
    """A table over some of a scope's variables, to be added to one over all."""
    order_of = sorted(range(len(own)), key=lambda i: scope.index(own[i]))
    ordered = table.permute(order_of)
    shape = [table.shape[own.index(v)] if v in own else 1 for v in scope]
    return ordered.reshape(shape)
