"""A program over time: a trace that browsers show, and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Final

from torch import fx

from fspmd.programs.schedule import Event
from fspmd.programs.text import does, line_of

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
    """SVG: what both streams do, and the bytes that a rank holds, over time."""
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
    """Events of one stream and direction as one, where they follow each other and are too short to be seen."""
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
