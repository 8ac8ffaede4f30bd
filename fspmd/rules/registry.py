"""Rules that users write, by function: they go before those of the table."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from fspmd.rules.composites import COMPOSITES
from fspmd.rules.elementwise import elementwise
from fspmd.rules.handlers import handler_of
from fspmd.rules.losses import alike, gaussian, of_rows
from fspmd.rules.reductions import over
from fspmd.rules.spectra import whole_along
from fspmd.rules.table import FLOATS, NUMBERS, Row
from fspmd.rules.table import row_of as row_of_torch

#: functions in Python that hand their operand, ``dim`` and ``dtype`` on to one in C, unless ``dim`` is None; torch
#: dispatches them with both by name
IN_C: Final[dict[Any, Any]] = {F.softmax: torch.softmax, F.log_softmax: torch.log_softmax}
_ROWS: Final[dict[Any, Row]] = {
    alike: Row(of_rows),
    gaussian: Row(elementwise),
    whole_along: Row(over(1, "dims", kept=True), "first"),
}


def register(func: Any, row: Row) -> None:
    """Make a row the rule of a function, and of what calls of it are dispatched as."""
    for one in (func, *_overloads(func)):
        _ROWS[one] = row
        IN_C.pop(one, None)


def _overloads(func: Any) -> list[Any]:
    """The ops behind what ``torch.library.custom_op`` or ``torch.ops`` gives."""
    op = getattr(func, "_opoverload", func)
    packet = getattr(op, "overloadpacket", op)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return []
    return [packet, *(getattr(packet, name) for name in packet.overloads())]


def is_registered(func: Any) -> bool:
    """Whether a function has a row here, which goes before whatever else is known of it."""
    return func in _ROWS


def row_of(func: Any) -> Row | None:
    """The row of a function; None where there is none."""
    return _ROWS.get(func) or row_of_torch(func)


def free_numbers(func: Any) -> frozenset[type]:
    """The kinds of Python numbers among the arguments of a function that bear on no layout."""
    if func not in _ROWS:
        if handler_of(func) is not None:
            return NUMBERS
        if func in _OF_FLOATS:
            return FLOATS
    row = row_of(func)
    return row.free if row is not None else frozenset()


#: which hand numbers on to other functions
_OF_FLOATS: Final = {*(func for func in COMPOSITES if callable(func)), Tensor.__setitem__}
