"""`communication_log`: every collective that runs, with what caused it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fspmd.inspection.watch import Communication, Watcher, add, remove
from fspmd.messages import counted, micros, style_by_rows
from fspmd.spec import short_dtype


class CommunicationLog(list[Communication], Watcher):
    """The collectives in the order in which they began; printing it shows them as a table."""

    of_records = True

    def told(self, moved: Communication) -> None:
        self.append(moved)

    @property
    def forward(self) -> list[Communication]:
        """Those of forward passes."""
        return [one for one in self if not one.backward]

    @property
    def backward(self) -> list[Communication]:
        """Those of backward passes."""
        return [one for one in self if one.backward]

    @property
    def implicit(self) -> list[Communication]:
        """Those that the user did not write."""
        return [one for one in self if not one.cause.written]

    @property
    def moved(self) -> float:
        """Bytes that a rank sends in all."""
        return sum(one.price.moved for one in self)

    def __str__(self) -> str:
        if not self:
            return "nothing is communicated"
        rows = [_cells(one) for one in self]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        total = f"{counted(len(self), 'collective')}, {len(self.backward)} of them backward"
        notes = dict.fromkeys(note for one in self if (note := _note(one)))
        return "\n".join([*lines, f"{total}: each rank sends {self.moved:,.0f} B", *notes])

    __repr__ = __str__


def _cells(one: Communication) -> tuple[str, ...]:
    axes = ", ".join(map(repr, one.axes or one.mesh.axis_names))
    block = f"{short_dtype(one.dtype)}[{', '.join(map(str, one.shape))}]"
    cost = (f"{one.price.moved:,.0f} B", micros(one.price.time))
    why = f": {one.cause.why}" if one.cause.why else ""
    by = one.cause.by if one.cause.written else f"{one.cause.by} (implicit{why})"
    way = "backward" if one.backward else "forward"
    return (way, f"{one.kind} over {axes}", block, *cost, by, one.cause.where, one.cause.text)


def _note(one: Communication) -> str:
    """What to write where a gather is for values that Python asks for."""
    by = one.cause
    if not by.why or not one.kind.startswith("all_gather"):
        return ""
    if not by.module:
        return f"{by.what} gathers ({by.where}): write masks in place of selections, or run it in a body, in rank_map"
    instead = style_by_rows(by.module, (*one.axes, "")[0])
    return f"{by.what} gathers ({by.where}): rows that need no others stay where they are with {instead}"


@contextmanager
def communication_log() -> Iterator[CommunicationLog]:
    """Record every collective of this process, forward and backward, in the global view and in bodies.

    Each is a `Communication`: the row of the pair table, mesh axes, the block it takes, bytes that a rank sends and µs
    by the cost model, whether it ran in backward, and its cause: the torch function or the function of fspmd that the
    user called, the module that ran, the user's file and line. A collective of backward has the cause of what it is the
    gradient of, if that ran within a log, too. A pcast, a slice or a group of one rank moves nothing and is not
    recorded; nor are shapes and complaints that ranks tell each other. In a simulation a collective of all ranks counts
    once. Leaves of a tree that a process group packs into one collective are one; in a simulation each is its own.

    Of a recorded program that is replayed (`jit`) it is what the record communicates, in the record's order: told
    when its forward or its backward begins, or as each begins where values decide what is sent.

    Nothing is communicated, and nothing costs anything outside the context.

    >>> import torch
    >>> from fspmd import P, device_put, make_mesh
    >>> mesh = make_mesh((4,), ("x",), transport="simulation")
    >>> x = device_put(torch.ones(8, 4), P(None, "x"), mesh=mesh)
    >>> w = device_put(torch.ones(4, 2), P("x"), mesh=mesh)
    >>> with communication_log() as log:
    ...     y = torch.relu(x @ w)  # a pending sum, which relu needs settled
    >>> [(one.kind, one.axes, one.shape, one.cause.what, one.backward) for one in log]
    [('psum_unreduced', ('x',), (8, 2), 'relu()', False)]
    """
    log = CommunicationLog()
    add(log)
    try:
        yield log
    finally:
        remove(log)
