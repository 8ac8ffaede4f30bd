"""From a program to its cheapest layouts: solve, price the moves that were chosen, and again until none is new."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fspmd.auto.eliminate import Solved, eliminate, order
from fspmd.auto.model import Builder

_TIE = 1e-12  # µs for each byte: of equally quick plans that which holds less


@dataclass(frozen=True, slots=True)
class Found:
    """One choice for each variable, its µs, and its bytes on each rank."""

    chosen: tuple[int, ...]
    time: float
    memory: float


class Solver:
    """The cheapest choice of a model, under a limit of memory or none."""

    def __init__(self, builder: Builder) -> None:
        self.builder, self.model = builder, builder.model
        self.order = order(builder.model)

    def cheapest(self, price: float = _TIE) -> tuple[Found, Solved]:
        """The least time, with µs for each byte."""
        while True:
            solved = eliminate(self.model, self.order, price)
            chosen = solved.best()
            if not self.builder.price(chosen):
                return self.found(chosen), solved

    def found(self, chosen: Any) -> Found:
        """What a choice takes."""
        return Found(tuple(chosen), *self.model.cost(tuple(chosen)))
