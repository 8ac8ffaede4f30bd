"""Rules by function: those of users, and those of functions of fspmd. They precede the rows of the table."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn import functional as F

from fspmd.ops.traits import name_of
from fspmd.rules.composites import has_composite
from fspmd.rules.factors import elementwise, notation
from fspmd.rules.grouped import groups_of_columns, own_columns, own_groups, pointing, rows_by_groups
from fspmd.rules.handlers import handler_of
from fspmd.rules.losses import alike, ctc, gaussian, of_rows, of_samples
from fspmd.rules.normalizations import sums_of_groups
from fspmd.rules.numbers import FLOATS, NONE, NUMBERS, Free, free
from fspmd.rules.reductions import over
from fspmd.rules.softmaxes import labelled, labelled_on_blocks, of_labels, ratio
from fspmd.rules.spectra import gathered_along
from fspmd.rules.table import Row
from fspmd.rules.table import row_of as row_of_torch
from fspmd.torch_internals import OpOverloadPacket

#: Python functions that pass their operand, ``dim`` and ``dtype`` on to a function in C, unless ``dim`` is None; torch
#: dispatches them with both as keyword arguments
IN_C: Final[dict[Any, Any]] = {F.softmax: torch.softmax, F.log_softmax: torch.log_softmax}
_ROWS: Final[dict[Any, Row]] = {
    alike: Row(of_rows),
    gaussian: Row(elementwise),
    ctc: Row(of_samples, empty=False),
    rows_by_groups: Row(pointing("[s] k, [g] k n, 1 -> [s] n", "g"), "product", body=own_groups),
    groups_of_columns: Row(pointing("m [s], [s] n, 1 -> 1 m n", "s"), "product", body=own_columns),
    of_labels: Row(labelled, body=labelled_on_blocks),
    ratio: Row(notation("[a] -> ")),
    sums_of_groups: Row(notation("n c, c -> n 1"), "first", free=NONE),
    gathered_along: Row(over(1, "dims", kept=True), "first"),
}


def register(func: Any, row: Row) -> None:
    """Make a row the rule of a function, and of the ops that its calls are dispatched as."""
    for key in (func, *_overloads(func)):
        _ROWS[key] = row
        IN_C.pop(key, None)


def _overloads(func: Any) -> list[Any]:
    """Return the ops behind an object of ``torch.library.custom_op`` or ``torch.ops``."""
    op = getattr(func, "_opoverload", func)
    packet = getattr(op, "overloadpacket", op)
    if not isinstance(packet, OpOverloadPacket):
        return []
    return [packet, *(getattr(packet, name) for name in packet.overloads())]


def is_registered(func: Any) -> bool:
    """Whether a function has a row here, which precedes everything else that is known of it."""
    return func in _ROWS


def row_of(func: Any) -> Row | None:
    """Return the row of a function, or None."""
    return _ROWS.get(func) or row_of_torch(func)


def free_numbers(func: Any) -> Free:
    """Return the Python numbers among the arguments of a function that bear on no layout."""
    if func in _ROWS:
        return Free(_ROWS[func].free)
    row = row_of_torch(func)
    kinds = FLOATS if row is None else row.free
    return free(name_of(func), NUMBERS if handler_of(func) is not None or has_composite(func) else kinds)
