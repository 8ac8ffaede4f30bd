"""A function, and what `jit` was told of how to record it.

Processes do not wait for each other to record: one may have a record that another has lost, or not made yet. So the
function is recorded on arguments without values, and what all of them run is the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from fspmd.errors import ValuesNeededError
from fspmd.messages import described
from fspmd.programs.ahead_of_time import Compiled
from fspmd.programs.arguments import Chosen, mark_static, with_static
from fspmd.programs.donation import NOTHING, Donation, donation
from fspmd.programs.first_rank import of_first_rank
from fspmd.programs.lower import Lowered, imagined, without_values
from fspmd.programs.misses import facts_of, report
from fspmd.programs.passes.table import Pass, transform
from fspmd.programs.records import Record, record_of, recorded, settled, stale
from fspmd.programs.replay import Maker
from fspmd.torch_internals import fake_tensor

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

#: what torch, or we, cannot work out without values; of some tangents it takes the device of fakes for that of values
_NEEDS_VALUES: Final[tuple[type[Exception], ...]] = (
    ValuesNeededError,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
    getattr(fake_tensor, "FakeTensorDeviceMismatchError", ValuesNeededError),
)


@dataclass(frozen=True, slots=True)
class Recordable:
    """The function, which of its arguments are static or donated, what changes its records and what runs them."""

    function: Callable[..., Any]
    static: Chosen
    donate: Chosen
    passes: tuple[Pass, ...]
    make: Maker

    @property
    def plain(self) -> Callable[..., Any]:
        """The function, of arguments that are `marked`."""
        return with_static(self.function) if self.static else self.function

    def marked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Arguments of which static ones are leaves."""
        return mark_static(self.function, self.static, args, kwargs) if self.static else (args, kwargs)

    def donated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Donation:
        """What a call gives away."""
        return donation(self.function, self.donate, args, kwargs) if self.donate else NOTHING

    def record(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], others: Iterable[Record], last: Record | None
    ) -> tuple[Record, tuple[Any] | None]:
        """A record beside ``others``, in place of the ``last``; and the result, or None where it is still to be run.

        What only values tell, such as the rows that ranks send each other, is recorded while it runs.
        """
        facts = facts_of(self.function, args, kwargs)
        report(self.function, facts, (one.facts for one in others), stale(last) if last is not None else ())
        given = self.donated(args, kwargs)
        try:
            found = imagined(self.plain, *without_values(args, kwargs))
        except _NEEDS_VALUES:
            record, out = recorded(self.plain, args, kwargs, self.passes, facts, given, self.make)
            return record, (out,)
        transform(found.program, self.passes)
        return record_of(found, facts, given, self.make), None

    def lowered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered:
        """The program, which is not run."""
        given, named, mode = without_values(*self.marked(args, kwargs))
        donated = self.donated(given, named)
        try:
            captured = imagined(self.plain, given, named, mode)
        except _NEEDS_VALUES as error:
            if isinstance(error, ValuesNeededError):
                raise
            told = str(error).partition("\n")[0]
            raise ValuesNeededError(
                "jit(f).lower(...) knows shapes alone, from which torch cannot tell what a function in "
                f"{described(self.function)} gives ({type(error).__name__}: {told}); call jit(f), or lower what stands "
                "before and after it"
            ) from error
        program = of_first_rank(captured.program)
        shown = captured if program is captured.program else replace(captured, program=program)
        for one in (captured,) if shown is captured else (shown, captured):
            transform(one.program, self.passes)
            written = settled(one, donated, self.make)

        def compiled() -> Compiled:
            record = record_of(captured, facts_of(self.function, given, named), written, self.make)
            return Compiled(self.function, record, self.marked)

        return Lowered(self.function, shown, (given, named), donated.places, compiled)
