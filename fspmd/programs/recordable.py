"""A function with the options of `jit`, and how a record or a lowered program is made of it.

Processes do not wait for each other to record: one may have a record that another has lost, or not made yet. So a
function is recorded on fake tensors, without communication, and all processes run the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from fspmd.errors import ValuesNeededError
from fspmd.messages import described
from fspmd.programs.cache_misses import call_facts, report
from fspmd.programs.capture import Capture, capture, recording
from fspmd.programs.donation import NOTHING, Donation, donation
from fspmd.programs.fake_tensors import fake_mode, stand_ins
from fspmd.programs.first_rank import of_first_rank
from fspmd.programs.lower import Compiled, Lowered
from fspmd.programs.options import Chosen, mark_static, with_static
from fspmd.programs.passes.table import Pass, transform
from fspmd.programs.records import Record, record_of, settled, stale
from fspmd.programs.replay import Maker
from fspmd.torch_internals import FakeTensorMode, fake_tensor

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

#: errors of functions that need values. The last: torch mistakes the device of some fake tangents
_NEEDS_VALUES: Final[tuple[type[Exception], ...]] = (
    ValuesNeededError,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
    getattr(fake_tensor, "FakeTensorDeviceMismatchError", ValuesNeededError),
)


@dataclass(frozen=True, slots=True)
class Recordable:
    """The function, its static and donated arguments, the passes over its records, and the maker that runs them."""

    function: Callable[..., Any]
    static: Chosen
    donate: Chosen
    passes: tuple[Pass, ...]
    make: Maker

    @property
    def plain(self) -> Callable[..., Any]:
        """The function of `marked` arguments."""
        return with_static(self.function) if self.static else self.function

    def marked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Arguments in which static ones are leaves."""
        return mark_static(self.function, self.static, args, kwargs) if self.static else (args, kwargs)

    def donated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Donation:
        """The donation of a call."""
        return donation(self.function, self.donate, args, kwargs) if self.donate else NOTHING

    def record(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], others: Iterable[Record], last: Record | None
    ) -> Record:
        """A record beside ``others``, in place of the ``last``.

        Where shapes depend on values, as the rows that ranks send each other do, the function runs on copies of its
        arguments and is recorded meanwhile. In that case all processes record at once.
        """
        facts = call_facts(self.function, args, kwargs)
        report(self.function, facts, (one.facts for one in others), stale(last) if last is not None else ())
        given = self.donated(args, kwargs)
        try:
            found = capture_fake(self.plain, *without_values(args, kwargs))
        except _NEEDS_VALUES:
            found = capture(self.plain, args, kwargs)
        transform(found.program, self.passes)
        return record_of(found, facts, given, self.make)

    def lowered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered:
        """The program of a call that is not run."""
        given, named, mode = without_values(*self.marked(args, kwargs))
        donated = self.donated(given, named)
        try:
            captured = capture_fake(self.plain, given, named, mode)
        except _NEEDS_VALUES as error:
            if isinstance(error, ValuesNeededError):
                raise
            told = str(error).partition("\n")[0]
            raise ValuesNeededError(
                "jit(f).lower(...) knows shapes alone, and a function of torch in "
                f"{described(self.function)} needs values ({type(error).__name__}: {told}); call jit(f), or lower the "
                "parts before and after it"
            ) from error
        program = of_first_rank(captured.program)
        shown = captured if program is captured.program else replace(captured, program=program)
        for one in (captured,) if shown is captured else (shown, captured):
            transform(one.program, self.passes)
            written = settled(one, donated, self.make)

        def compiled() -> Compiled:
            record = record_of(captured, call_facts(self.function, given, named), written, self.make)
            return Compiled(self.function, record, self.marked)

        return Lowered(self.function, shown, (given, named), donated.places, compiled)


def without_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, FakeTensorMode]:
    """Arguments by place and by name as fake tensors, and their mode."""
    mode = fake_mode()
    with torch.inference_mode(False):
        return *stand_ins((args, kwargs), mode), mode


def capture_fake(function: Callable[..., Any], args: Any, kwargs: Any, mode: FakeTensorMode) -> Capture:
    """Record a function of fake tensors."""
    with recording, mode:
        return capture(function, args, kwargs, is_fake=True)
