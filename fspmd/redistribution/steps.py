"""A step of a route: a collective, the layout it leads to, and its price."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from fspmd.messages import micros
from fspmd.pairs import Call
from fspmd.redistribution.cost import Price, Topology, price
from fspmd.spec import TensorSpec
from fspmd.transport.windows import traffic


class Step(NamedTuple):
    """A collective, the layout it leads to, and its price for each rank."""

    call: Call
    spec: TensorSpec
    price: Price

    def __str__(self) -> str:
        if self.call.options.dims is not None:
            return f"view -> {short(self.spec)}: nothing moves"
        over = ", ".join(map(repr, self.call.axes or self.call.mesh.axis_names))
        cost = f"{self.price.moved:,.0f} B, {micros(self.price.time)}, holds {self.price.peak:,} B"
        return f"{self.call.pair.name} over {over} -> {short(self.spec)}: {cost}"


def priced(move: Call, before: TensorSpec, after: TensorSpec, topology: Topology) -> Step:
    """Return the step of a collective from ``before`` to ``after``, with its price."""
    reblock = move.options.move
    busiest = None if reblock is None else traffic(reblock)
    received = None if busiest is None else (busiest.messages, busiest.elements * before.dtype.itemsize)
    size, message = 0 if move.options.dims is not None else held(before), None
    if not (before.even and after.even) and busiest is None:
        message = prod(map(min, before.block_shape, after.block_shape)) * before.dtype.itemsize
    cost = price(move.pair.kernel, before.mesh, move.axes, size, held(after), topology, received, message=message)
    return Step(move, after, cost)


def back(step: Step, before: TensorSpec, topology: Topology) -> Price:
    """Return the price of the transpose of a step, which leads back to ``before``."""
    return priced(step.call.transposed, step.spec, before, topology).price


def short(spec: TensorSpec) -> str:
    """Return the text of a layout without its mesh."""
    return repr(spec).partition(" on ")[0]


def held(spec: TensorSpec) -> int:
    """Return the bytes of a block."""
    return prod(spec.block_shape) * spec.dtype.itemsize
