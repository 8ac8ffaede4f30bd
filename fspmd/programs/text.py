"""The text of a program: a table of its steps."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import fx

from fspmd.inspection.causes import Cause
from fspmd.meshes.mesh import Mesh
from fspmd.messages import counted, micros
from fspmd.programs.communication import price_of_step
from fspmd.programs.program import Left, Program, owner
from fspmd.programs.steps import moved_by
from fspmd.spec import TensorSpec
from fspmd.torch_internals import OpOverload

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
    closed = (*program.inputs[len(arguments) :], *program.constants)
    return dict(zip(program.inputs, arguments, strict=False)) | dict.fromkeys(closed, "closed over")


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
        return str(target._schema.name).removeprefix("aten::")
    return str(getattr(target, "__name__", target)).strip("_")
