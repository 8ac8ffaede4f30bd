"""The passes by name, and a function that runs passes one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from fspmd.errors import ArgumentError
from fspmd.messages import described
from fspmd.programs.passes.chunked import Chunked
from fspmd.programs.passes.coalesce import Coalesce
from fspmd.programs.passes.overlap import Overlap
from fspmd.programs.passes.recompute import Recompute
from fspmd.programs.passes.rewrites import rewrites
from fspmd.programs.passes.simplify import dead_code, equal_steps
from fspmd.programs.program import Program

Pass = Callable[[Program], Any]
Passes = Iterable[str | Pass] | None

#: the passes by name, with default options
PASSES: Final[dict[str, Pass]] = {
    "equal_steps": equal_steps,
    "rewrites": rewrites,
    "dead_code": dead_code,
    "chunked": Chunked(),
    "coalesce": Coalesce(),
    "overlap": Overlap(),
    "recompute": Recompute(),
}
#: passes that never make a program slower, and change numbers only by the order of sums
DEFAULT: Final = ("equal_steps", "rewrites", "dead_code")


def passes_of(given: Passes) -> tuple[Pass, ...]:
    """Passes as functions. ``given``: names, passes or both; None for the `DEFAULT` passes."""
    given = DEFAULT if given is None else given
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ArgumentError(f'jit got passes={described(given)}; expected a tuple such as passes=("dead_code",)')
    passes = []
    for entry in given:
        function = PASSES.get(entry) if isinstance(entry, str) else entry
        if isinstance(function, type):
            raise ArgumentError(f"jit got the class {function.__name__} for a pass; write {function.__name__}()")
        if not callable(function):
            raise ArgumentError(
                f"jit got {described(entry)} for a pass; expected one of {', '.join(PASSES)}, or a function"
            )
        passes.append(function)
    return tuple(passes)


def transform(program: Program, passes: Iterable[Pass], tries: bool = True) -> None:
    """Run passes in order.

    ``tries``: whether `Chunked`, and `Coalesce` before an `Overlap`, try their choices together with later passes.
    """
    passes = tuple(passes)
    for i, change in enumerate(passes):
        run, later = change, passes[i + 1 :]
        hides = any(isinstance(after, Overlap) for after in later)
        if tries and (isinstance(change, Chunked) or (isinstance(change, Coalesce) and hides)):
            run = change.before(program, partial(transform, passes=later, tries=False))
        run(program)
