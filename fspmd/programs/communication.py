"""Collectives of a program: their prices, and their entries in a `communication_log`.

If the bytes of a collective depend on values, the collectives of a program report themselves when they run.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, fx

from fspmd.inspection.causes import Cause
from fspmd.inspection.histories import History, facts_of_call
from fspmd.inspection.replays import Replayed
from fspmd.inspection.watch import Communication, communicates, hears_of_records, price_of, tell
from fspmd.meshes.mesh import Mesh
from fspmd.pairs import Call, is_watched
from fspmd.programs.program import Program, Value
from fspmd.programs.steps import Routed, moved_by
from fspmd.redistribution.cost import Price, Topology
from fspmd.transport.call import DTYPES
from fspmd.transport.local_tensor import blocks_of
from fspmd.transport.rows import Routes
from fspmd.user_code import line_of


class Reports(NamedTuple):
    """The communication of a program, for those who watch, log or compare it."""

    forward: tuple[Communication, ...] = ()  # of a run
    backward: tuple[Communication, ...] = ()  # of its gradients
    histories: Sequence[History] = ()  # the collectives of each group of processes
    replayed: Replayed | None = None  # what a run notes; None if it does not communicate
    replayed_backward: Replayed | None = None


def reports_of(function: Callable[..., Any], program: Program) -> Reports:
    """The communication of the program of a function.

    If the bytes of a collective depend on values, the collectives report themselves when they run, in their order.
    """
    steps, deferred = (
        [node for node in part if moved_by(node) is not None] for part in (program.steps, program.deferred)
    )
    if not steps and not deferred:
        return Reports()
    _report_when_run([*steps, *deferred])
    forward, back, name = (steps, False), (deferred, True), name_of(function)
    replayed = [
        _replayed(name if part is forward else f"the backward of {name}", _histories(part)) for part in (forward, back)
    ]
    return Reports(_known(steps), _known(deferred), _histories(forward, back), *replayed)


def _replayed(name: str, expected: list[History]) -> Replayed | None:
    return Replayed(name, expected) if expected else None


def _report_when_run(steps: Sequence[fx.Node]) -> None:
    if not any(isinstance(node.target, Routed) for node in steps):
        return
    for node in steps:
        target: Any = node.target
        if isinstance(target, Routed):
            node.target = _Reporting(
                target, partial(_of_routes, target.call, node.meta["backward"], node.meta["cause"])
            )
        elif entries := communications([node]):
            node.target = _Reporting(target, lambda *_, entry=entries[0]: entry)


def _known(nodes: Iterable[fx.Node]) -> tuple[Communication, ...]:
    """The communication of steps that do not report themselves."""
    return communications([node for node in nodes if not isinstance(node.target, _Reporting)])


class _Reporting:
    """A step that reports its communication to watchers of records."""

    def __init__(self, function: Callable[..., Any], communication: Callable[..., Communication]) -> None:
        self.__name__ = self.__qualname__ = getattr(function, "__name__", "collective")
        self.function, self.communication = function, communication

    def __call__(self, *operands: Any) -> Any:
        if is_watched() and hears_of_records():
            tell([self.communication(*operands)])
        return self.function(*operands)


def _of_routes(call: Call, backward: bool, cause: Cause, x: Tensor, routes: Routes) -> Communication:
    """The communication of a ragged call with these routes."""
    return _entry(Routed(call, True).along(routes), Value(tuple(blocks_of(x)[0].shape), x.dtype), backward, cause)


def _entry(call: Call, x: Value, backward: bool, cause: Cause) -> Communication:
    """The entry of a call on ``x`` in a `communication_log`."""
    of = (call.pair.name, call.mesh, call.axes, x.shape, x.dtype)
    return Communication(*of, price_of(call, x.shape, x.dtype), backward, cause, call)


def price_of_step(node: fx.Node, links: Topology | None = None) -> Price | None:
    """The price of a collective that moves bytes between ranks; None for other steps."""
    call = moved_by(node)
    if call is None or not communicates(call):
        return None
    operand: Value = node.args[0].meta["value"]  # type: ignore[union-attr]
    return price_of(call, operand.shape, operand.dtype, links)


def communications(nodes: Iterable[fx.Node]) -> tuple[Communication, ...]:
    """The communication of steps, as entries of a `communication_log`."""
    moving = [(call, node) for node in nodes if (call := moved_by(node)) is not None and communicates(call)]
    return tuple(
        _entry(call, node.args[0].meta["value"], node.meta["backward"], node.meta["cause"])  # type: ignore[union-attr]
        for call, node in moving
    )


def _histories(*parts: tuple[Iterable[fx.Node], bool]) -> list[History]:
    """For each group of processes the collectives of parts of a program: steps, and whether they are of backward."""
    by_key: dict[str, History] = {}
    places: Counter[Mesh] = Counter()
    for nodes, is_backward in parts:
        for node in nodes:
            call = node.meta.get("call")
            if call is None:
                continue
            number, key, is_even = facts_of_call(call)
            if not number:
                continue
            history = by_key.get(key)
            if history is None:
                ranks = tuple(sorted(call.mesh.group_ranks(call.axes or call.mesh.axis_names)))
                history = by_key[key] = History(key, ranks)
            operand: Value = node.args[0].meta["value"]  # type: ignore[union-attr]
            line, dtype, shape = line_of(node.meta["cause"].where), operand.dtype, tuple(operand.shape)
            places[call.mesh] += 1
            place = places[call.mesh]
            step = hash((number, line.number, shape if is_even else 0, DTYPES[dtype], is_backward, place))
            history.advance(step, call, line, dtype, shape, place)
    return list(by_key.values())


def name_of(function: Callable[..., Any]) -> str:
    """``jit(f) of train.py:12``: a recorded function and its line, as errors show them."""
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None)
    where = f" of {Path(code.co_filename).name}:{code.co_firstlineno}" if code else ""
    return f"jit({getattr(inner, '__name__', type(inner).__name__)}){where}"
