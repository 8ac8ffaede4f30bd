"""Pictures of a `Sharded`: its values as text, and the ranks that have each part, as text and as HTML."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

import torch
from torch import Tensor

from fspmd.body import state
from fspmd.errors import ArgumentError
from fspmd.messages import described, quoted
from fspmd.sharded import Sharded
from fspmd.spec import TensorSpec
from fspmd.torch_internals import DisableTorchFunction, transforms_active
from fspmd.tracing import is_recording
from fspmd.transport.frame import frame_over
from fspmd.transport.local_tensor import BLOCKS, expand, placed_blocks

_MOST: Final = 16  # rows, and columns, of a picture; if there are more, the first and the last are shown
_COLOURS: Final = ("#cfe2f3", "#d9ead3", "#fff2cc", "#f4cccc", "#d9d2e9", "#fce5cd", "#d0e0e3", "#ead1dc")
_CELL: Final = "border:1px solid #888;padding:6px 12px;text-align:center;color:#000;background:"


def visualize_sharding(x: Sharded | TensorSpec) -> Picture:
    """A picture of the ranks that have each part of a tensor: text where printed, HTML in a notebook. Nothing moves.

    It is JAX's ``visualize_array_sharding`` for any number of dims. The columns are the parts of the last cut dim, the
    rows those of the other cut dims. ``+`` stands between ranks that have different terms of a pending sum. The mesh
    may be one without ranks (``transport="abstract"``).

    Raises:
        ArgumentError: ``x`` is neither a `Sharded` nor a `TensorSpec`.

    >>> from fspmd import P, make_mesh, zeros
    >>> mesh = make_mesh((2, 2, 2), ("dp", "tp", "pp"))
    >>> visualize_sharding(zeros(8, 6, 4, spec=P("dp", None, "tp"), mesh=mesh))
    f32[8@dp, 6, 4@tp] on mesh(dp=2, tp=2, pp=2)
                  [:, :, 0:2]   [:, :, 2:4]
                ┌─────────────┬─────────────┐
    [0:4, :, :] │    0, 1     │    2, 3     │
                ├─────────────┼─────────────┤
    [4:8, :, :] │    4, 5     │    6, 7     │
                └─────────────┴─────────────┘
    """
    if not isinstance(x, (Sharded, TensorSpec)):
        raise ArgumentError(
            f"visualize_sharding got {described(x)}; it takes a Sharded or a TensorSpec: visualize_sharding(device_put("
            "x, P('x'), mesh=mesh))"
        )
    return Picture(x.spec if isinstance(x, Sharded) else x)


class Picture:
    """The result of `visualize_sharding`. Printed, it is text; ``html`` is a table, which notebooks show."""

    __slots__ = ("spec",)

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec

    def __repr__(self) -> str:
        sides, tops, cells, notes = _table(self.spec)
        inside = max(map(len, (*tops, *itertools.chain(*cells)))) + 2
        margin = max(map(len, sides)) + 1

        def rule(left: str, middle: str, right: str) -> str:
            return " " * margin + left + middle.join(["─" * inside] * len(tops)) + right

        lines = [repr(self.spec)]
        if any(tops):
            lines.append(" " * margin + " " + " ".join(f"{top:^{inside}}" for top in tops))
        lines.append(rule("┌", "┬", "┐"))
        for i, (side, row) in enumerate(zip(sides, cells, strict=True)):
            lines += [rule("├", "┼", "┤")] if i else []
            lines.append(f"{side:<{margin}}│{'│'.join(f'{cell:^{inside}}' for cell in row)}│")
        lines.append(rule("└", "┴", "┘"))
        return "\n".join(line.rstrip() for line in (*lines, *notes))

    @property
    def html(self) -> str:
        """A table, in which neighbouring parts have different colours."""
        sides, tops, cells, notes = _table(self.spec)
        colours = itertools.cycle(_COLOURS)
        rows = [f"<tr><th></th>{''.join(f'<th>{top}</th>' for top in tops)}</tr>"] if any(tops) else []
        for side, row in zip(sides, cells, strict=True):
            parts = "".join(f'<td style="{_CELL}{next(colours)}">{escape(cell)}</td>' for cell in row)
            rows.append(f"<tr><th>{side}</th>{parts}</tr>")
        text = "".join(f"<div>{escape(line)}</div>" for line in notes)
        table = f'<table style="border-collapse:collapse">{"".join(rows)}</table>'
        return f"<div><code>{escape(repr(self.spec))}</code>{table}{text}</div>"

    def _repr_html_(self) -> str:
        return self.html


Part = tuple[tuple[int, int], ...]  # for each dim, where the part begins and ends


def _table(spec: TensorSpec) -> tuple[list[str], list[str], list[list[str]], list[str]]:
    """The labels of the rows, the labels of the columns, the ranks in each cell, and a note on ranks without a part."""
    spec = spec.unflattened
    holders: dict[Part, list[tuple[int, tuple[int, ...]]]] = {}
    empty: list[int] = []
    for coordinate, rank in zip(
        frame_over(spec.mesh, spec.mesh.axis_names).coordinates(), spec.mesh.ranks, strict=True
    ):
        spans = zip(spec.offset(coordinate), spec.local_shape(coordinate), strict=True)
        part = tuple((start, start + length) for start, length in spans)
        if 0 in spec.local_shape(coordinate) and 0 not in spec.shape:
            empty.append(rank)
        else:
            holders.setdefault(part, []).append((rank, coordinate))
    across = max((dim for dim, _, _ in spec.cuts), default=spec.ndim)
    if not across and spec.ndim > 1:  # the rows of a matrix stand one below the other
        across = spec.ndim
    rows = _few(sorted({part[:across] for part in holders}))
    columns = _few(sorted({part[across:] for part in holders}))

    def cell(row: Part | None, column: Part | None) -> str:
        return "…" if row is None or column is None else _ranks(holders.get((*row, *column), []), spec)

    down = {dim for dim, _, _ in spec.cuts if dim != across}
    sides = [_label(row, down, 0, spec) for row in rows]
    tops = [_label(column, {across} & {*range(spec.ndim)}, across, spec) for column in columns]
    notes = [f"no part of it: {_listed(empty)}"] if empty else []
    return sides, tops, [[cell(row, column) for column in columns] for row in rows], notes


def _few(parts: Sequence[Part]) -> list[Part | None]:
    """The parts that are shown, with None in place of parts that are left out."""
    return list(parts) if len(parts) <= _MOST else [*parts[: _MOST // 2], None, *parts[-_MOST // 2 :]]


def _label(part: Part | None, dims: set[int], first: int, spec: TensorSpec) -> str:
    """The label of a part, ``[0:4, :, :]``; "" where no dim is cut."""
    if not dims or part is None:
        return "…" if part is None else ""
    spans = {dim: f"{start}:{end}" for dim, (start, end) in enumerate(part, first) if dim in dims}
    return f"[{', '.join(spans.get(dim, ':') for dim in range(spec.ndim))}]"


def _ranks(holders: Iterable[tuple[int, tuple[int, ...]]], spec: TensorSpec) -> str:
    """The ranks that have a part. In ``0, 1 + 2, 3`` ranks 0 and 1 have one term of a pending sum, 2 and 3 another."""
    terms: dict[tuple[int, ...], list[int]] = {}
    pending = [i for i, axis in enumerate(spec.mesh.axis_names) if axis in spec.partition.unreduced]
    for rank, coordinate in holders:
        terms.setdefault(tuple(coordinate[i] for i in pending), []).append(rank)
    return " + ".join(map(_listed, terms.values()))


def _listed(ranks: Sequence[int]) -> str:
    """``0, 4`` for a few ranks, ``0-7`` for consecutive ones, ``0, 2 … 14`` for many."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]}, {ranks[1]} … {ranks[-1]}"


# --- values ---------------------------------------------------------------------------------------------------------


def text(x: Sharded) -> str:
    """The text of ``print(x)``: the number for a scalar that all ranks have, else the layout and below it the values.

    A process shows its own block, a simulation the global tensor. Nothing moves. Where there are no values (in a
    record, a transform or a body, or on a mesh without ranks) the text is the layout alone.
    """
    return "\n".join(filter(None, (_caption(x), _values(x))))


def _caption(x: Sharded) -> str:
    """The line above the values."""
    if not _has_values(x):
        return repr(x)
    if is_number(x):
        return ""
    mesh, here = x.spec.mesh, x.spec.mesh.coordinate()
    if mesh.transport != "process_group" or here is None:
        return repr(x)
    if not x.spec.partition.mentioned:
        return repr(x)
    pending = quoted(axis for axis in mesh.axis_names if axis in x.spec.partition.unreduced)
    part = f"its term of the sum over {pending}" if pending else f"rank {mesh.rank_at(here)}'s block"
    return f"{x!r}, {part}:"


def _values(x: Sharded) -> str:
    if not _has_values(x):
        return ""
    with torch.no_grad(), DisableTorchFunction():
        text = repr(_global_tensor(x.local.detach(), x.spec))
    if not is_number(x):
        return text
    number = text.removeprefix("tensor(").split(",")[0].rstrip(")")
    return f"{number}0" if number.endswith(".") else number


def _has_values(x: Sharded) -> bool:
    if is_recording() or transforms_active() or state.body is not None:
        return False
    return type(x.local) in BLOCKS and not x.local.is_meta


def is_number(x: Sharded) -> bool:
    """Whether ``x`` is a scalar whose value this process has."""
    return not x.spec.shape and not x.spec.partition.unreduced and _has_values(x)


def _global_tensor(x: Tensor, spec: TensorSpec) -> Tensor:
    """The global tensor of a simulation, from its blocks; the block of a process."""
    if spec.mesh.transport != "simulation":
        return x
    view, mesh = spec.unflattened, spec.mesh
    value_frame = frame_over(mesh, view.partition.axes | view.partition.unreduced)
    x_full = torch.zeros(view.shape, dtype=spec.dtype, device=x.device)
    for index, block in placed_blocks(expand(x, value_frame), mesh):
        if any(i for axis, i in index.items() if axis not in value_frame.axes):
            continue  # the first rank along this axis has the same block
        sizes = view.local_shape(tuple(index.values()))
        spans = zip(view.offset(tuple(index.values())), sizes, strict=True)
        part = x_full[tuple(slice(start, start + length) for start, length in spans)]
        if view.partition.unreduced and part.dtype is not torch.bool:
            part.add_(block.reshape(sizes))
        else:
            part.copy_(block.reshape(sizes))
    return x_full.view(spec.shape)


def html(x: Sharded) -> str:
    """The HTML of a `Sharded` in a notebook: the picture of its layout, and its values."""
    caption = f"<pre>{escape(_values(x))}</pre>"
    return f"<div>{Picture(x.spec).html}{caption}</div>"
