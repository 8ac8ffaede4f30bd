"""Collectives that tell of themselves as they run, in programs where what is sent depends on values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, fx

from fspmd.pairs import Call, is_watched
from fspmd.programs.calls import Routed
from fspmd.programs.program import Program
from fspmd.programs.schedule import communications
from fspmd.transport.local_tensor import blocks_of
from fspmd.transport.rows import Routes
from fspmd.watching.causes import Cause
from fspmd.watching.watch import Communication, hears_of_records, price_of, tell


def tell_when_they_run(program: Program) -> None:
    """Have all collectives do so, in order, if there are some of which nothing is known before."""
    steps = [*program.steps, *program.deferred]
    if not any(isinstance(node.target, Routed) for node in steps):
        return
    for node in steps:
        target: Any = node.target
        if isinstance(target, Routed):
            node.target = _Told(target, _Ragged(target.call, node.meta["backward"], node.meta["cause"]))
        elif found := communications([node]):
            node.target = _Told(target, partial(_known, found[0]))


def told_before(nodes: Iterable[fx.Node]) -> tuple[Communication, ...]:
    """What steps communicate that do not tell of themselves."""
    return communications(node for node in nodes if not isinstance(node.target, _Told))


class _Told:
    """A step that tells of what it communicates if somebody watches records."""

    def __init__(self, function: Callable[..., Any], communication: Callable[..., Communication]) -> None:
        self.__name__ = self.__qualname__ = getattr(function, "__name__", "collective")
        self.function, self.communication = function, communication

    def __call__(self, *operands: Any) -> Any:
        if is_watched() and hears_of_records():
            tell([self.communication(*operands)])
        return self.function(*operands)


def _known(communication: Communication, *_: Any) -> Communication:
    return communication


class _Ragged:
    """What a ragged call communicates, of its operand and its routes."""

    def __init__(self, call: Call, backward: bool, cause: Cause) -> None:
        self.call, self.backward, self.cause = call, backward, cause

    def __call__(self, x: Tensor, routes: Routes) -> Communication:
        shape = tuple(blocks_of(x)[0].shape)
        call = Routed(self.call, True).along(routes)
        of = (call.pair.name, call.mesh, call.axes, shape, x.dtype)
        return Communication(*of, price_of(call, shape, x.dtype), self.backward, self.cause)
