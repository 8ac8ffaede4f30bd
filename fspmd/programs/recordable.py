"""A function with the options of `jit`, and how a record or a lowered program is made of it.

Processes do not wait for each other to record: a process may have a record that another process lacks. So a function
is recorded on fake tensors, without communication, and all processes run the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from traceback import clear_frames
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
from fspmd.programs.records import Record, record_of, stale, with_reuse
from fspmd.programs.replay import Maker
from fspmd.torch_internals import FakeTensorMode, fake_tensor

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

#: errors of functions that need values. The last occurs because torch gives some fake tangents a wrong device
_NEEDS_VALUES: Final[tuple[type[Exception], ...]] = (
    ValuesNeededError,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
    getattr(fake_tensor, "FakeTensorDeviceMismatchError", ValuesNeededError),
)


@dataclass(frozen=True, slots=True)
class Recordable:
    """The function, its static and donated arguments, the passes over its records, and the maker of their replays."""

    function: Callable[..., Any]
    static: Chosen
    donate: Chosen
    passes: tuple[Pass, ...]
    make: Maker

    @property
    def plain(self) -> Callable[..., Any]:
        """The function, which takes `marked` arguments."""
        return with_static(self.function) if self.static else self.function

    def marked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments, with each static argument as a leaf."""
        return mark_static(self.function, self.static, args, kwargs) if self.static else (args, kwargs)

    def donated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Donation:
        """The donation of a call."""
        return donation(self.function, self.donate, args, kwargs) if self.donate else NOTHING

    def record(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], others: Iterable[Record], last: Record | None
    ) -> Record:
        """A new record.

        If shapes depend on values, such as the numbers of rows that ranks send each other, the function is recorded
        while it runs on copies of its arguments. All processes then record at once.

        Args:
            args: the positional arguments.
            kwargs: the keyword arguments.
            others: the other records of the function, for `explain_cache_misses`.
            last: the record with the same key, which is out of date.
        """
        facts = call_facts(self.function, args, kwargs)
        report(self.function, facts, (record.facts for record in others), stale(last) if last is not None else ())
        given = self.donated(args, kwargs)
        try:
            captured = capture_fake(self.plain, *without_values(args, kwargs))
        except _NEEDS_VALUES as error:
            clear_frames(error.__traceback__)  # torch before 2.13 leaves the hooks of a checkpoint there
            captured = capture(self.plain, args, kwargs)
        transform(captured.program, self.passes)
        return record_of(captured, facts, given, self.make)

    def lowered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered:
        """The program of a call, which is recorded and not run."""
        given, named, mode = without_values(*self.marked(args, kwargs))
        donated = self.donated(given, named)
        try:
            captured = capture_fake(self.plain, given, named, mode)
        except _NEEDS_VALUES as error:
            if isinstance(error, ValuesNeededError):
                raise
            reason = str(error).partition("\n")[0]
            raise ValuesNeededError(
                f"jit(f).lower(...) got {described(self.function)}, which calls a function of torch that needs values "
                f"({type(error).__name__}: {reason}); a lowered program has shapes alone: call jit(f), or lower the "
                "parts before and after it"
            ) from error
        program = of_first_rank(captured.program)
        shown = captured if program is captured.program else replace(captured, program=program)
        for recorded in (captured,) if shown is captured else (shown, captured):
            transform(recorded.program, self.passes)
            written = with_reuse(recorded, donated, self.make)

        def compiled() -> Compiled:
            record = record_of(captured, call_facts(self.function, given, named), written, self.make)
            return Compiled(self.function, record, self.marked)

        return Lowered(self.function, shown, (given, named), donated.places, compiled)


def without_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, FakeTensorMode]:
    """The arguments with fake tensors, and the fake mode."""
    mode = fake_mode()
    with torch.inference_mode(False):
        return *stand_ins((args, kwargs), mode), mode


def capture_fake(function: Callable[..., Any], args: Any, kwargs: Any, mode: FakeTensorMode) -> Capture:
    """Record a function on fake tensors."""
    with recording, mode:
        return capture(function, args, kwargs, is_fake=True)
