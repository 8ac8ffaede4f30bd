"""One step of a route: a collective, the layout it leads to, and its price."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from fspmd.messages import micros
from fspmd.pairs import Call
from fspmd.redistribution.cost import Price, Topology, price
from fspmd.spec import TensorSpec
from fspmd.transport.windows import traffic


class Step(NamedTuple):
    """One collective, the layout it leads to, and what it costs each rank."""

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
    """What a collective from one layout to another is."""
    blocks = move.options.move
    moved = None if blocks is None else traffic(blocks)
    received = None if moved is None else (moved.messages, moved.elements * before.dtype.itemsize)
    size, message = 0 if move.options.dims is not None else held(before), None
    if not (before.even and after.even) and moved is None:
        message = prod(map(min, before.block_shape, after.block_shape)) * before.dtype.itemsize
    cost = price(move.pair.kernel, before.mesh, move.axes, size, held(after), topology, received, message=message)
    return Step(move, after, cost)


def back(step: Step, before: TensorSpec, topology: Topology) -> Price:
    """What the transpose of a step costs, which leads back to ``before``."""
    return priced(step.call.transposed, step.spec, before, topology).price


def short(spec: TensorSpec) -> str:
    """A layout without its mesh."""
    return repr(spec).partition(" on ")[0]


def held(spec: TensorSpec) -> int:
    """The bytes of a block."""
    return prod(spec.block_shape) * spec.dtype.itemsize
