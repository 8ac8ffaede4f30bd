"""The exceptions of fspmd: one family, so that ``except FspmdError`` catches every mistake of a user.

A message says what went wrong, what was given, and what to write instead.
"""

from __future__ import annotations

from collections.abc import Iterable


class FspmdError(ValueError):
    """The base of every error that fspmd raises on wrong input. It is raised before communication, on all ranks alike.

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
    """A value whose type over a mesh axis (invariant, varying, unreduced, reduced) does not allow the operation."""


class CommunicationError(FspmdError):
    """Communication that the user did not write, within ``explicit``."""


class LockstepError(FspmdError):
    """Ranks that reached, recorded or replayed different collectives, or a rank that reached none."""


class PeerError(FspmdError, RuntimeError):
    """A collective that failed because another process has ended or failed. It is also torch's RuntimeError."""


class DeadlineError(FspmdError):
    """A collective for which ranks did not come within the time of ``deadline``, or of the process group."""


class ReplicaError(FspmdError):
    """Copies of a value that differ between ranks (`check_replicas`), or between two runs (`replay_check`)."""


class RecordError(FspmdError):
    """An action that ``jit`` cannot record: it would become a constant of the record, or be missing from it."""


class ValuesNeededError(RecordError):
    """An action that cannot be recorded from shapes alone, because it needs values."""


class DonationError(FspmdError):
    """A tensor that is used after it was donated to ``jit``."""


class CheckpointError(FspmdError):
    """A checkpoint that cannot be written, found or read, or that does not fit the tree to be loaded."""


class ArgumentError(FspmdError):
    """Any other argument of a wrong type or value."""


def join_failures(header: str, failures: Iterable[str], advice: str = "") -> str:
    """Return one message for all failing leaves: a header, an indented line for each, and the advice."""
    lines = [header, *(f"  * {failure}" for failure in failures)]
    if advice:
        lines.append(advice)
    return "\n".join(lines)
