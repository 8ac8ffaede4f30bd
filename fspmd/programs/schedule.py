"""When the steps of a program run: one stream that computes, one that communicates, and what each step costs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from fspmd.programs.calls import is_wait
from fspmd.programs.copied import copied
from fspmd.programs.flops import flops_of
from fspmd.programs.program import Program, Value, owner
from fspmd.redistribution.cost import Price, Topology, topology, work
from fspmd.watching.watch import Communication, communicates, price_of


@dataclass(frozen=True, slots=True)
class Event:
    """One step: µs when it begins and for how long it keeps its stream busy, its FLOPs, and bytes read and written.

    ``price`` is that of a collective, whose event stands where the step that begins it does.
    """

    node: fx.Node
    start: float
    duration: float
    flops: int = 0
    nbytes: int = 0
    price: Price | None = None


def schedule(program: Program, links: Topology | None = None) -> list[Event]:
    """The events of all steps, those that compute gradients of results after the others.

    Steps that compute run one after another, each for as long as its arithmetic or its memory takes, whichever is
    longer. Collectives run one after another beside them; who waits for one goes on when it has ended.
    """
    links = links or topology()
    computes = communicates_until = 0.0
    ends: dict[fx.Node, float] = {}
    events = []
    for node in (*program.steps, *program.deferred):
        if is_wait(node):
            computes = max(computes, ends.get(node.args[0], 0.0))  # type: ignore[arg-type]
        elif (price := price_of_step(node, links)) is not None:
            start = max(computes, communicates_until)
            communicates_until = ends[node] = start + price.time
            events.append(Event(node, start, price.time, price=price))
            if node.meta["waits"]:
                computes = communicates_until
        else:
            flops, nbytes = flops_of(node), bytes_of(node)
            duration = work(flops / 2, nbytes, links)
            events.append(Event(node, computes, duration, flops, nbytes))
            computes += duration
    return events


def end_of(events: Iterable[Event]) -> float:
    """µs from the first step to the end of the last."""
    return max((one.start + one.duration for one in events), default=0.0)


def time_after(program: Program, *passes: Callable[[Program], Any]) -> float:
    """µs that a program takes after some passes, which change a copy of it."""
    tried = copied(program)
    for one in passes:
        one(tried)
    return end_of(schedule(tried))


def price_of_step(node: fx.Node, links: Topology | None = None) -> Price | None:
    """Of a collective that moves something between ranks."""
    call = node.meta.get("call")
    if call is None or not communicates(call):
        return None
    operand: Value = node.args[0].meta["value"]  # type: ignore[union-attr]
    return price_of(call, operand.shape, operand.dtype, links)


def communications(nodes: Iterable[fx.Node]) -> tuple[Communication, ...]:
    """What `communication_log` is told of steps."""
    found = []
    for node in nodes:
        price = price_of_step(node)
        if price is not None:
            call, operand = node.meta["call"], node.args[0].meta["value"]  # type: ignore[union-attr]
            of = (call.pair.name, call.mesh, call.axes, operand.shape, operand.dtype)
            found.append(Communication(*of, price, node.meta["backward"], node.meta["cause"]))
    return tuple(found)


def bytes_of(node: fx.Node) -> int:
    """Bytes that a step reads and writes; none of one that gives a view, or a part of a result."""
    if node.target is operator.getitem:
        return 0
    made = sum(one.meta["value"].nbytes for one in made_by(node)) or _written(node)
    if getattr(node.target, "reads_what_it_gives", False):
        return 2 * made
    return made and made + sum(_read(one) for one in node.all_input_nodes)


def made_by(node: fx.Node) -> Iterator[fx.Node]:
    """The results of a step that lie in memory of their own."""
    results = (node,) if "value" in node.meta else (user for user in node.users if user.target is operator.getitem)
    return (one for one in results if "value" in one.meta and owner(one) is one)


def _read(node: fx.Node) -> int:
    return node.meta["value"].nbytes if "value" in node.meta else 0


def _written(node: fx.Node) -> int:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return 0
    return _read(node)
