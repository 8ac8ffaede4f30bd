"""The passes by name, and how they run one after another."""

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
#: passes that always gain, and change no numbers but by the order of sums
DEFAULT: Final = ("equal_steps", "rewrites", "dead_code")


def passes_of(given: Passes) -> tuple[Pass, ...]:
    """Passes as functions, given by name or as they are; None means the `DEFAULT` passes."""
    given = DEFAULT if given is None else given
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ArgumentError(f'jit got passes={described(given)}; expected a tuple such as passes=("dead_code",)')
    found = []
    for one in given:
        known = PASSES.get(one) if isinstance(one, str) else one
        if isinstance(known, type):
            raise ArgumentError(f"jit got the class {known.__name__} for a pass; write {known.__name__}()")
        if not callable(known):
            raise ArgumentError(
                f"jit got {described(one)} for a pass; expected one of {', '.join(PASSES)}, or a function"
            )
        found.append(known)
    return tuple(found)


def transform(program: Program, passes: Iterable[Pass], tries: bool = True) -> None:
    """Run passes in order.

    ``tries``: `Chunked`, and `Coalesce` before an `Overlap`, try their choices together with the passes that follow.
    """
    passes = tuple(passes)
    for i, one in enumerate(passes):
        run, others = one, passes[i + 1 :]
        hides = any(isinstance(after, Overlap) for after in others)
        if tries and (isinstance(one, Chunked) or (isinstance(one, Coalesce) and hides)):
            run = one.before(program, partial(transform, passes=others, tries=False))
        run(program)
