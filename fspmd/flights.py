"""Collectives under way: computation goes on between their start and their wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fspmd.pairs import Call, alive, apply, is_transformed, watched
from fspmd.torch_internals import DisableTorchFunction
from fspmd.transport import Pending
from fspmd.transport.pending import begin


class Flight:
    """A collective between its start and its wait. The graph keeps only its round trip, which avoids a cycle."""

    __slots__ = ("pending", "token", "trip")

    def __init__(self, call: Call) -> None:
        self.trip = _RoundTrip(call)
        self.pending: Pending | None = None
        self.token: Tensor | None = None


class _RoundTrip:
    """A call, and the flight of its transpose once backward has started it."""

    __slots__ = ("back", "call")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.back: Flight | None = None


def depart(x: Tensor, call: Call) -> Flight:
    """Start a call without waiting. In backward `land` starts the transpose, and `depart` waits for it."""
    if is_transformed():
        flight = Flight(call)
        flight.pending = Pending(apply(x, call))
        return flight
    x = alive(x)
    flight = Flight(watched(x, call))
    with DisableTorchFunction():
        if x.requires_grad and torch.is_grad_enabled():
            flight.token = _Depart.apply(x, flight)
        else:
            flight.pending = begin(flight.trip.call.start(x))
    return flight


def land(flight: Flight) -> Tensor:
    """Wait for the result of a flight."""
    with DisableTorchFunction():
        if flight.token is not None:
            return _Land.apply(flight.token, flight)  # type: ignore[no-any-return]
        assert flight.pending is not None
        return flight.pending.wait()


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.trip = flight.trip
        flight.pending = begin(flight.trip.call.start(x))
        return x.new_empty(0)  # carries the graph; the data travels in the flight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        trip: _RoundTrip = ctx.trip
        back, trip.back = trip.back, None
        assert back is not None
        if back.token is not None:
            back.token = g
        return land(back), None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, flight: Flight) -> Tensor:
        ctx.trip = flight.trip
        assert flight.pending is not None
        return flight.pending.wait()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        trip: _RoundTrip = ctx.trip
        with DisableTorchFunction():
            trip.back = depart(g, trip.call.transposed)
            token = trip.back.token
            return (g.new_empty(0) if token is None else token), None
