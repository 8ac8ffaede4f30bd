"""The exceptions of fspmd: one small family, so that ``except FspmdError`` catches every mistake of a user.

A message says what was given, what was expected, and what to write instead.
"""

from __future__ import annotations

from collections.abc import Iterable


class FspmdError(ValueError):
    """Base of every error that fspmd raises on wrong input: before any communication, on all ranks alike.

    >>> from fspmd import psum
    >>> try:
    ...     psum(1, "x")
    ... except FspmdError as error:
    ...     print(type(error).__name__, isinstance(error, ValueError))
    AxisError True
    """


class MeshError(FspmdError):
    """A mesh that cannot be built, sliced or used: bad shapes, names, ranks, or two meshes where one is needed."""


class SpecError(FspmdError):
    """A partition spec that does not fit its mesh or its tensor."""


class TreeError(FspmdError):
    """A pytree whose structure is not the expected one."""


class AxisError(FspmdError):
    """A mesh axis that is unknown, not bound here, or used outside a ``shard_map`` body."""


class ShapeError(FspmdError):
    """A size, dim, permutation or group that does not fit."""


class VarianceError(FspmdError):
    """A value whose type over a mesh axis (invariant, varying, unreduced, reduced) does not allow what was asked."""


class CommunicationError(FspmdError):
    """Communication that the user did not write, within ``explicit``."""


class LockstepError(FspmdError):
    """Ranks that came to different collectives, or some that did not come, within ``lockstep``."""


class RecordError(FspmdError):
    """What ``jit`` cannot record: it would be a constant of the record, or be left out of it."""


class ValuesNeededError(RecordError):
    """What cannot be recorded of shapes alone."""


class DonationError(FspmdError):
    """A tensor used after ``jit`` was given its memory."""


class ArgumentError(FspmdError):
    """Any other argument of a wrong type or value."""


def join_failures(header: str, failures: Iterable[str], advice: str = "") -> str:
    """One message for all failing leaves: a header, one indented line each, and what to write instead."""
    lines = [header, *(f"  * {failure}" for failure in failures)]
    if advice:
        lines.append(advice)
    return "\n".join(lines)
