"""When the steps of a program run, by the cost model, and that as a trace and a picture."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from torch import fx

from fspmd.programs.communication import price_of_step
from fspmd.programs.flops import flops_of
from fspmd.programs.program import Program, copied, owner
from fspmd.programs.steps import is_wait
from fspmd.programs.text import does, line_of
from fspmd.redistribution.cost import Price, Topology, topology, work


@dataclass(frozen=True, slots=True)
class Event:
    """One step: its start and duration in µs, its FLOPs, and the bytes that it reads and writes.

    ``price``: the price of a collective, whose event begins with the step that begins it.
    """

    node: fx.Node
    start: float
    duration: float
    flops: int = 0
    nbytes: int = 0
    price: Price | None = None


def schedule(program: Program, links: Topology | None = None) -> list[Event]:
    """The events of all steps, deferred ones last.

    Steps that compute run one after another. Each takes the time of its arithmetic or of its memory, whichever is
    longer. Collectives run one after another beside them. A step that waits for one goes on when it has ended.
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
    """The end of the last step in µs."""
    return max((one.start + one.duration for one in events), default=0.0)


def time_after(program: Program, *passes: Callable[[Program], Any]) -> float:
    """The time of a program in µs after some passes, which run on a copy."""
    tried = copied(program)
    for one in passes:
        one(tried)
    return end_of(schedule(tried))


def bytes_of(node: fx.Node) -> int:
    """Bytes that a step reads and writes; 0 for a view, or a part of a result."""
    if node.target is operator.getitem:
        return 0
    made = sum(one.meta["value"].nbytes for one in made_by(node)) or _written(node)
    if getattr(node.target, "reads_what_it_gives", False):
        return 2 * made
    return made and made + sum(_read(one) for one in node.all_input_nodes)


def made_by(node: fx.Node) -> Iterator[fx.Node]:
    """The results of a step with memory of their own."""
    results = (node,) if "value" in node.meta else (user for user in node.users if user.target is operator.getitem)
    return (one for one in results if "value" in one.meta and owner(one) is one)


def _read(node: fx.Node) -> int:
    return node.meta["value"].nbytes if "value" in node.meta else 0


def _written(node: fx.Node) -> int:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return 0
    return _read(node)


_STREAMS: Final = ("computes", "communicates")
_COLOURS: Final = {(0, False): "#4c78a8", (0, True): "#9ecae9", (1, False): "#e45756", (1, True): "#ff9d98"}
_WIDTH, _LANE, _LEFT = 1200, 36, 110


def chrome_trace(name: str, events: Iterable[Event]) -> str:
    """JSON in the Trace Event Format, which chrome://tracing and Perfetto open; times are µs."""
    rows: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": stream}}
        for i, stream in enumerate(_STREAMS)
    ]
    rows.append({"ph": "M", "name": "process_name", "pid": 0, "args": {"name": name}})
    for one in events:
        if one.duration:
            facts: dict[str, object] = {"line": line_of(one.node), "value": str(one.node.meta.get("value", ""))}
            if one.price is None:
                facts |= {"FLOPs": one.flops, "bytes": one.nbytes}
            else:
                facts |= {"bytes sent": one.price.moved}
            rows.append(
                {
                    "ph": "X",
                    "name": does(one.node),
                    "cat": "backward" if one.node.meta["backward"] else "forward",
                    "pid": 0,
                    "tid": _stream(one),
                    "ts": one.start,
                    "dur": one.duration,
                    "args": facts,
                }
            )
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"})


def picture(name: str, events: Sequence[Event], held: Sequence[int], steps: Sequence[fx.Node]) -> str:
    """SVG: the work of both streams, and the bytes that a rank holds, over time."""
    until = max((one.start + one.duration for one in events), default=0.0)
    scale = _WIDTH / until if until else 0.0
    most = max(held, default=0)
    parts = [_text(_LEFT, 18, f"{name}: {until:,.1f} µs, at most {most:,} B")]
    for lane, stream in enumerate((*_STREAMS, "holds")):
        parts.append(_text(4, 30 + lane * (_LANE + 8) + 22, stream))
    for lane, backward, start, length, says in _runs(events, until):
        parts.append(_bar(lane, backward, start * scale, length * scale, says))
    starts = {one.node: one.start for one in events}
    base, now, points = 30 + 2 * (_LANE + 8) + _LANE, 0.0, []
    for node, nbytes in zip(steps, held, strict=True):
        now = max(now, starts.get(node, now))
        points.append(f"{_LEFT + now * scale:.1f},{base - (nbytes / most if most else 0) * _LANE:.1f}")
    parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="#54a24b"/>')
    height = base + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 10}" height="{height}" '
        f'font-family="sans-serif" font-size="13">{"".join(parts)}</svg>'
    )


def _runs(events: Sequence[Event], until: float) -> Iterator[tuple[int, bool, float, float, str]]:
    """Bars of the picture: events too short to be seen are joined with the next of their stream and direction."""
    shortest = until / _WIDTH
    for lane in range(len(_STREAMS)):
        pending: tuple[bool, float, float, int, str] | None = None
        for one in (one for one in events if one.duration and _stream(one) == lane):
            backward, end = bool(one.node.meta["backward"]), one.start + one.duration
            if pending is not None:
                way, start, last, count, says = pending
                if way is backward and one.start - last < shortest and end - start < 2 * shortest:
                    pending = way, start, end, count + 1, f"{count + 1} steps"
                    continue
                yield lane, way, start, last - start, says
            pending = backward, one.start, end, 1, f"{does(one.node)}, {one.duration:,.1f} µs: {line_of(one.node)}"
        if pending is not None:
            way, start, last, _, says = pending
            yield lane, way, start, last - start, says


def _stream(event: Event) -> int:
    return 0 if event.price is None else 1


def _bar(lane: int, backward: bool, start: float, length: float, says: str) -> str:
    place = f'x="{_LEFT + start:.2f}" y="{30 + lane * (_LANE + 8)}" width="{max(length, 0.2):.2f}" height="{_LANE}"'
    return f'<rect {place} fill="{_COLOURS[lane, backward]}"><title>{escape(says)}</title></rect>'


def _text(x: float, y: float, says: str) -> str:
    return f'<text x="{x}" y="{y}">{escape(says)}</text>'
