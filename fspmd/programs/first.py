"""The first call of a kind: how it is recorded.

Processes do not wait for each other to record: one may have a record that another has lost, or not made yet. So the
function is recorded on arguments without values, and what all of them run is the record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch._subclasses import fake_tensor

from fspmd.errors import ValuesNeededError
from fspmd.meshes.world import world_size
from fspmd.programs.backends import Maker
from fspmd.programs.donation import Donation
from fspmd.programs.lower import imagined, without_values
from fspmd.programs.misses import Facts
from fspmd.programs.passes.table import Pass, transform
from fspmd.programs.records import Record, record_of, recorded

#: what torch, or we, cannot work out without values
_NEEDS_VALUES: Final = (
    ValuesNeededError,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
)


def record_of_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    passes: Sequence[Pass],
    facts: Facts,
    donation: Donation,
    make: Maker,
) -> tuple[Record, tuple[Any] | None]:
    """The record of a function, changed by ``passes``, and the result; None where the record is still to be run.

    What only values tell, such as the rows that ranks send each other, processes record while they run it.
    """
    if world_size() > 1:
        try:
            found = imagined(function, *without_values(args, kwargs))
        except _NEEDS_VALUES:
            pass
        else:
            transform(found.program, passes)
            return record_of(found, facts, donation, make), None
    record, out = recorded(function, args, kwargs, passes, facts, donation, make)
    return record, (out,)
