"""`communication_log`: every collective that runs, with its cause."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fspmd.inspection.watch import Communication, Watcher, add, remove
from fspmd.messages import counted, micros, style_by_rows
from fspmd.spec import short_dtype


class CommunicationLog(list[Communication], Watcher):
    """The collectives in the order in which they began. Printed, a log is a table."""

    of_records = True

    def on_communication(self, communication: Communication) -> None:
        self.append(communication)

    @property
    def forward(self) -> list[Communication]:
        """The collectives of forward passes."""
        return [entry for entry in self if not entry.backward]

    @property
    def backward(self) -> list[Communication]:
        """The collectives of backward passes."""
        return [entry for entry in self if entry.backward]

    @property
    def implicit(self) -> list[Communication]:
        """The collectives that the user did not write."""
        return [entry for entry in self if not entry.cause.written]

    @property
    def moved(self) -> float:
        """The number of bytes that a rank sends in all."""
        return sum(entry.price.moved for entry in self)

    def __str__(self) -> str:
        if not self:
            return "nothing is communicated"
        rows = [_cells(entry) for entry in self]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        total = f"{counted(len(self), 'collective')}, {len(self.backward)} of them backward"
        notes = dict.fromkeys(note for entry in self if (note := _note(entry)))
        return "\n".join([*lines, f"{total}: each rank sends {self.moved:,.0f} B", *notes])

    __repr__ = __str__


def _cells(entry: Communication) -> tuple[str, ...]:
    """The row of a collective in the table."""
    axes = ", ".join(map(repr, entry.axes or entry.mesh.axis_names))
    block = f"{short_dtype(entry.dtype)}[{', '.join(map(str, entry.shape))}]"
    cost = (f"{entry.price.moved:,.0f} B", micros(entry.price.time))
    cause = entry.cause
    why = f": {cause.why}" if cause.why else ""
    by = cause.by if cause.written else f"{cause.by} (implicit{why})"
    direction = "backward" if entry.backward else "forward"
    return (direction, f"{entry.kind} over {axes}", block, *cost, by, cause.where, cause.text)


def _note(entry: Communication) -> str:
    """Advice for a gather that serves a function whose result depends on values."""
    cause = entry.cause
    if not cause.why or not entry.kind.startswith("all_gather"):
        return ""
    head = f"{cause.what} gathers ({cause.where}): "
    if not cause.module:
        return f"{head}write masks in place of selections, or run it in a body, in rank_map"
    style = style_by_rows(cause.module, (*entry.axes, "")[0])
    return f"{head}if no row needs others, run the module on the rows of each rank with {style}"


@contextmanager
def communication_log() -> Iterator[CommunicationLog]:
    """Record every collective of this process, forward and backward, in the global view and in bodies.

    An entry is a `Communication`. It has the row of the pair table, the mesh axes, the block that the collective takes,
    the bytes that a rank sends, the time in µs by the cost model, the direction (forward or backward), and the cause.
    The cause is the torch function or the function of fspmd that the user called, the module that ran, and the user's
    file and line. A collective of backward has the cause of its forward call, if that ran within a log, too.

    A pcast, a slice and a group of one rank move nothing and are not recorded. Neither are the shapes and errors that
    ranks exchange. In a simulation a collective of all ranks counts once. A process group may pack leaves of a tree
    into one collective, which counts once; in a simulation each leaf counts.

    A replay of a recorded program (`jit`) adds the collectives of the record, in its order. They are added when the
    forward or the backward of the record begins. Where values decide what is sent, each is added when it begins.

    The log itself communicates nothing, and costs nothing outside the context.

    >>> import torch
    >>> from fspmd import P, device_put, make_mesh
    >>> mesh = make_mesh((4,), ("x",), transport="simulation")
    >>> x = device_put(torch.ones(8, 4), P(None, "x"), mesh=mesh)
    >>> w = device_put(torch.ones(4, 2), P("x"), mesh=mesh)
    >>> with communication_log() as log:
    ...     y = torch.relu(x @ w)  # a pending sum, which relu needs settled
    >>> [(entry.kind, entry.axes, entry.shape, entry.cause.what, entry.backward) for entry in log]
    [('psum_unreduced', ('x',), (8, 2), 'relu()', False)]
    """
    log = CommunicationLog()
    add(log)
    try:
        yield log
    finally:
        remove(log)
