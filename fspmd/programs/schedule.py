"""The schedule: the time of each step by the cost model, as a trace and a picture; and a program as text."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, repeat
from typing import Any, Final

import torch
from torch import fx

from fspmd.inspection.causes import Cause
from fspmd.meshes.mesh import Mesh
from fspmd.messages import counted, micros
from fspmd.programs.communication import price_of_step
from fspmd.programs.flops import flops_of
from fspmd.programs.program import Left, Program, copied, nbytes_of, owner
from fspmd.programs.steps import is_wait, moved_by
from fspmd.redistribution.cost import Price, Topology, topology, work
from fspmd.spec import TensorSpec
from fspmd.torch_internals import OpOverload, schema_of

_WIDEST = (44, 44, 56, 28)  # the most characters of each column
Row = tuple[str, ...]


def program_text(name: str, program: Program, arguments: list[str], mesh: Mesh | None) -> str:
    """The text of a program: its inputs, its steps and its results."""
    names = {node: f"%{i}" for i, node in enumerate(_in_order(program))}
    text = _Text(names)
    takes = [text.given(node, path) for node, path in given_as(program, arguments).items() if node in names]
    runs = list(map(text.step, program.steps))
    later = [text.given(node, "a cotangent") for node in program.cotangents]
    later += map(text.step, program.deferred)
    widths = [
        min(most, max((len(row[i]) for row in (*takes, *runs, *later) if i < len(row) - 1), default=0))
        for i, most in enumerate(_WIDEST)
    ]
    where = f" on {mesh!r}, each of {counted(mesh.size, 'rank')}" if mesh is not None else ""
    lines = [f"{name}{where}", *(f"{change} leaves alone {what}" for change, what in program.left.items())]
    lines += ["takes", *_table(takes, widths), "runs", *_table(runs, widths, map(text.left, program.steps))]
    lines.append(f"gives {text.values(program.results)}")
    if program.gradients:
        notes = [*([()] * len(program.cotangents)), *map(text.left, program.deferred)]
        lines += ["in backward", *_table(later, widths, notes), f"gives {text.values(program.gradients)}"]
    return "\n".join(lines)


def given_as(program: Program, arguments: Sequence[str]) -> dict[fx.Node, str]:
    """The names of inputs and constants: the names of arguments, and "closed over"."""
    captured = (*program.inputs[len(arguments) :], *program.constants)
    return dict(zip(program.inputs, arguments, strict=False)) | dict.fromkeys(captured, "closed over")


def _in_order(program: Program) -> list[fx.Node]:
    used = [node for node in program.constants if node.users]
    return [*program.inputs, *used, *program.steps, *program.cotangents, *program.deferred]


def line_of(node: fx.Node) -> str:
    """The user's line that caused a step."""
    cause: Cause | None = node.meta.get("cause")
    if cause is None:
        return "a cotangent"
    return f"{cause.text}  ({cause.where})" if cause.file else cause.what


def caused_by(node: fx.Node) -> str:
    """The user's line that caused a step, marked where the step is of backward."""
    return f"{'<- ' if node.meta['backward'] else ''}{line_of(node)}"


def _table(rows: Iterable[Row], widths: list[int], notes: Iterable[Sequence[str]] = ()) -> list[str]:
    """Rows in columns. The notes of a row stand below it."""
    lines = []
    for row, below in zip(rows, chain(notes, repeat(())), strict=False):
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        lines.append(("  " + "  ".join([*cells, row[-1]])).rstrip())
        lines += [f"      {note}" for note in below]
    return lines


class _Text:
    """Makes the rows of a table: name and local type, global type, function, bytes and µs, the user's line."""

    def __init__(self, names: dict[fx.Node, str]) -> None:
        self.names = names

    def given(self, node: fx.Node, path: str) -> Row:
        """The row of an input."""
        return (*self.typed(node), path)

    def step(self, node: fx.Node) -> Row:
        """The row of a step."""
        price = price_of_step(node)
        arguments = [self.value(arg) for arg in node.args]
        arguments += [f"{name}={self.value(arg)}" for name, arg in node.kwargs.items()]
        moves = "" if price is None else f"{price.moved:,.0f} B, {micros(price.time)}"
        return (*self.typed(node), f"{does(node)}({', '.join(arguments)})", moves, caused_by(node))

    def left(self, node: fx.Node) -> list[str]:
        """The notes of passes that have not changed a step."""
        notes: dict[str, Left] = node.meta.get("left", {})
        return [f"{name} leaves this alone: {left.why}{self._other(left.other)}" for name, left in notes.items()]

    def _other(self, node: fx.Node | None) -> str:
        """The name of the step that a note mentions, or of the step that has replaced it."""
        return "" if node is None else f" {self.value(node if node in self.names else owner(node))}"

    def typed(self, node: fx.Node) -> tuple[str, str]:
        """Name and local type, and the global type of a value in the global view."""
        if "value" not in node.meta:
            return self.names[node], ""
        spec: TensorSpec | None = node.meta.get("spec")
        global_type = "" if spec is None else spec.text
        return f"{self.names[node]}: {node.meta['value']}", global_type

    def values(self, nodes: Iterable[fx.Node | None]) -> str:
        """The text of several values."""
        return ", ".join(map(self.value, nodes)) or "nothing"

    def value(self, arg: Any) -> str:
        """The text of an argument of a step."""
        if isinstance(arg, fx.Node):
            return self.names.get(arg, arg.name)
        if isinstance(arg, (list, tuple)) and not isinstance(arg, torch.Size):
            return f"[{', '.join(map(self.value, arg))}]"
        if isinstance(arg, float):
            return f"{arg:.6g}"
        return shown if len(shown := repr(arg)) < 40 else f"<{type(arg).__name__}>"


def does(node: fx.Node) -> str:
    """The name of the function of a step; a collective has its axes, too."""
    call, target = moved_by(node), node.target
    if call is not None:
        return f"{call.pair.name}[{', '.join(call.axes or call.mesh.axis_names)}]"
    if target is operator.getitem:
        return "part"
    if isinstance(target, OpOverload):
        return str(target.name()).partition(".")[0].removeprefix("aten::")
    return str(getattr(target, "__name__", target)).strip("_")


@dataclass(frozen=True, slots=True)
class Event:
    """A step in a schedule.

    Attributes:
        node: the step; of a collective, the step that begins it.
        start: the start in µs.
        duration: the duration in µs.
        flops: the FLOPs of the step.
        nbytes: the bytes that it reads and writes.
        price: the price of a collective; None for other steps.
    """

    node: fx.Node
    start: float
    duration: float
    flops: int = 0
    nbytes: int = 0
    price: Price | None = None


def schedule(program: Program, links: Topology | None = None) -> list[Event]:
    """The events of all steps. Deferred steps come last.

    Steps that compute run one after another. Each takes the time of its arithmetic or of its memory, whichever is
    longer. Collectives run one after another beside them. A step that waits for a collective ends when the collective
    has ended.
    """
    links = links or topology()
    computes_until = communicates_until = 0.0
    ends: dict[fx.Node, float] = {}
    events = []
    for node in (*program.steps, *program.deferred):
        if is_wait(node):
            computes_until = max(computes_until, ends.get(node.args[0], 0.0))  # type: ignore[arg-type]
        elif (price := price_of_step(node, links)) is not None:
            start = max(computes_until, communicates_until)
            communicates_until = ends[node] = start + price.time
            events.append(Event(node, start, price.time, price=price))
            if node.meta["waits"]:
                computes_until = communicates_until
        else:
            flops, nbytes = flops_of(node), bytes_of(node)
            duration = work(flops / 2, nbytes, links)
            events.append(Event(node, computes_until, duration, flops, nbytes))
            computes_until += duration
    return events


def end_of(events: Iterable[Event]) -> float:
    """The end of the last step in µs."""
    return max((event.start + event.duration for event in events), default=0.0)


def time_after(program: Program, *passes: Callable[[Program], Any]) -> float:
    """The time of a program in µs after some passes, which run on a copy."""
    copy = copied(program)
    for change in passes:
        change(copy)
    return end_of(schedule(copy))


def bytes_of(node: fx.Node) -> int:
    """The bytes that a step reads and writes; 0 for a view, or a part of a result."""
    if node.target is operator.getitem:
        return 0
    written = sum(map(nbytes_of, made_by(node))) or _written(node)
    if getattr(node.target, "reads_result_alone", False):
        return 2 * written
    return written and written + sum(map(nbytes_of, node.all_input_nodes))


def made_by(node: fx.Node) -> Iterator[fx.Node]:
    """The results of a step that lie in new memory."""
    results = (node,) if "value" in node.meta else (user for user in node.users if user.target is operator.getitem)
    return (result for result in results if "value" in result.meta and owner(result) is result)


def _written(node: fx.Node) -> int:
    """The bytes that a function of torch writes into its operands."""
    schema = schema_of(node.target)
    return 0 if schema is None or not schema.is_mutable else nbytes_of(node)


_STREAMS: Final = ("computes", "communicates")
_COLOURS: Final = {(0, False): "#4c78a8", (0, True): "#9ecae9", (1, False): "#e45756", (1, True): "#ff9d98"}
_WIDTH, _LANE, _LEFT = 1200, 36, 110


def chrome_trace(name: str, events: Iterable[Event]) -> str:
    """JSON in the Trace Event Format, for chrome://tracing and Perfetto. Times are in µs."""
    rows: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": stream}}
        for i, stream in enumerate(_STREAMS)
    ]
    rows.append({"ph": "M", "name": "process_name", "pid": 0, "args": {"name": name}})
    for event in events:
        if event.duration:
            facts: dict[str, object] = {"line": line_of(event.node), "value": str(event.node.meta.get("value", ""))}
            if event.price is None:
                facts |= {"FLOPs": event.flops, "bytes": event.nbytes}
            else:
                facts |= {"bytes sent": event.price.moved}
            rows.append(
                {
                    "ph": "X",
                    "name": does(event.node),
                    "cat": "backward" if event.node.meta["backward"] else "forward",
                    "pid": 0,
                    "tid": _stream(event),
                    "ts": event.start,
                    "dur": event.duration,
                    "args": facts,
                }
            )
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"})


def picture(name: str, events: Sequence[Event], memory: Sequence[int], steps: Sequence[fx.Node]) -> str:
    """An SVG of the work of both streams, and of the bytes that a rank holds, over time."""
    until = end_of(events)
    scale = _WIDTH / until if until else 0.0
    most = max(memory, default=0)
    parts = [_text(_LEFT, 18, f"{name}: {until:,.1f} µs, at most {most:,} B")]
    for lane, stream in enumerate((*_STREAMS, "holds")):
        parts.append(_text(4, 30 + lane * (_LANE + 8) + 22, stream))
    for lane, backward, start, length, caption in _runs(events, until):
        parts.append(_bar(lane, backward, start * scale, length * scale, caption))
    starts = {event.node: event.start for event in events}
    base, time, points = 30 + 2 * (_LANE + 8) + _LANE, 0.0, []
    for node, nbytes in zip(steps, memory, strict=True):
        time = max(time, starts.get(node, time))
        points.append(f"{_LEFT + time * scale:.1f},{base - (nbytes / most if most else 0) * _LANE:.1f}")
    parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="#54a24b"/>')
    height = base + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 10}" height="{height}" '
        f'font-family="sans-serif" font-size="13">{"".join(parts)}</svg>'
    )


def _runs(events: Sequence[Event], until: float) -> Iterator[tuple[int, bool, float, float, str]]:
    """The bars of the picture: lane, whether backward, start, length and caption.

    Events that are too short to be seen are joined with the next event of their lane and direction.
    """
    shortest = until / _WIDTH
    for lane in range(len(_STREAMS)):
        bars: list[tuple[bool, float, float, int, str]] = []
        for event in (event for event in events if event.duration and _stream(event) == lane):
            node, backward, end = event.node, bool(event.node.meta["backward"]), event.start + event.duration
            direction, start, last, count, _ = bars[-1] if bars else (None, 0.0, 0.0, 0, "")
            if direction is backward and event.start - last < shortest and end - start < 2 * shortest:
                bars[-1] = backward, start, end, count + 1, f"{count + 1} steps"
            else:
                caption = f"{does(node)}, {event.duration:,.1f} µs: {line_of(node)}"
                bars.append((backward, event.start, end, 1, caption))
        for backward, start, end, _, caption in bars:
            yield lane, backward, start, end - start, caption


def _stream(event: Event) -> int:
    return 0 if event.price is None else 1


def _bar(lane: int, backward: bool, start: float, length: float, caption: str) -> str:
    place = f'x="{_LEFT + start:.2f}" y="{30 + lane * (_LANE + 8)}" width="{max(length, 0.2):.2f}" height="{_LANE}"'
    return f'<rect {place} fill="{_COLOURS[lane, backward]}"><title>{escape(caption)}</title></rect>'


def _text(x: float, y: float, content: str) -> str:
    return f'<text x="{x}" y="{y}">{escape(content)}</text>'
