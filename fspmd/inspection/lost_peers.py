"""The error of a collective whose backend has failed: it names the collective, and what other ranks have told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from fspmd.errors import FspmdError, LockstepError, PeerError, join_failures
from fspmd.inspection.causes import position
from fspmd.inspection.long_waits import ADVICE, STORE_ENDED, ended, wait_long, wait_whole, waits, waits_told_by
from fspmd.inspection.replays import compare_long, has_replays
from fspmd.meshes import world
from fspmd.transport.pending import explain_with, go_on_with
from fspmd.transport.reports import PATIENCE, failures, own_store, tell_failure, within

_GRACE: Final = 2.0  # seconds in which other ranks may tell why they have ended
_SHOWN: Final = 8  # ranks
#: parts of the texts of Gloo and NCCL for a lost connection
_LOST: Final = ("onnection closed", "onnection reset", "roken pipe", "ead error", "rite error", "ocket", "onnect")


def told_by(ranks: Sequence[int], since: float = 600.0) -> list[str]:
    """What other ranks have told of their failures in the last seconds: a line for each."""
    told = within(PATIENCE, lambda: failures(_others(ranks)), {})
    return [f"rank {rank} {text}, {age:.1f} s ago" for rank, (age, text) in sorted(told.items()) if age < since]


def _others(ranks: Sequence[int]) -> list[int]:
    me = world.process_rank()
    return [rank for rank in ranks or range(world.world_size()) if rank != me]


def what_failed(error: RuntimeError) -> str:
    """What has failed, in our words, if a connection is lost or time is over; else the text of the backend."""
    text = str(error).splitlines()[0]
    if any(part in text for part in _LOST):
        return "the connection to another rank is lost"
    return "the time limit of the process group is over" if "imed out" in text else text


def gone(ranks: Sequence[int]) -> list[str]:
    """A line for each other rank that is known to have ended, or to be stopped."""
    found = within(PATIENCE, lambda: ended(_others(ranks), or_stopped=True))
    return [STORE_ENDED] if found is None else [f"rank {rank} {text}" for rank, text in sorted(found.items())]


def _causes(ranks: Sequence[int]) -> list[str]:
    """A line for each other rank that has ended, or has told of an error that is not the loss of another rank."""
    told = told_by(ranks)
    return [*gone(ranks), *(line for line in told if f" {PeerError.__name__}: " not in line)] or told


def _silent(ranks: Sequence[int]) -> list[str]:
    """The other ranks that have told neither of a lost connection, nor of a long wait, nor of an error."""
    store = own_store("fspmd.lost")
    told = {*waits(ranks or range(world.world_size())), *failures(_others(ranks))}
    silent = [rank for rank in _others(ranks) if rank not in told and not store.check([str(rank)])]
    return [f"rank {rank} has told nothing: it has ended, is stopped, or computes" for rank in silent]


def _explained(error: RuntimeError) -> FspmdError | None:
    """The error in the place of torch's."""
    if isinstance(error, FspmdError):
        return None
    where, ranks = position()
    end, me = time.monotonic() + _GRACE, world.process_rank()
    lines = gone(ranks)
    if lines != [STORE_ENDED]:
        within(PATIENCE, lambda: own_store("fspmd.lost").set(str(me), where))
        while not (causes := _causes(ranks)) or has_replays():
            if parted := within(PATIENCE, lambda: compare_long(with_all=True), ""):
                return LockstepError(parted)
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        lines = [*(causes or within(PATIENCE, lambda: _silent(ranks), [])), *waits_told_by(ranks)][:_SHOWN]
    head = f"rank {me} failed at {where}: {what_failed(error)}{':' * bool(lines)}"
    found = PeerError(join_failures(head, lines, ADVICE))
    tell_failure(found)
    return found


def install() -> None:
    """Let errors of c10d become `PeerError`s, and long waits hear of other ranks."""
    explain_with(_explained)
    go_on_with(wait_long, wait_whole)
