"""The error of a collective whose backend has failed: it names the collective, and what other ranks have told."""

from __future__ import annotations

import time
from typing import Final

from fspmd.errors import PeerError
from fspmd.inspection.long_waits import ADVICE, wait_long, wait_whole, waits_told_by
from fspmd.inspection.positions import position
from fspmd.meshes import world
from fspmd.transport.pending import explain_with, go_on_with
from fspmd.transport.reports import PATIENCE, failures, within

_GRACE: Final = 1.0  # seconds in which other ranks may tell why they have ended
_SHOWN: Final = 8  # ranks


def told_by(ranks: tuple[int, ...], since: float = 600.0) -> list[str]:
    """What other ranks have told of their failures in the last seconds: a line for each."""
    me = world.process_rank()
    others = [rank for rank in ranks or range(world.world_size()) if rank != me]
    told = within(PATIENCE, lambda: failures(others), {})
    return [f"rank {rank} {text}, {age:.1f} s ago" for rank, (age, text) in sorted(told.items()) if age < since]


def _explained(error: RuntimeError) -> PeerError | None:
    """The error in the place of torch's."""
    if isinstance(error, PeerError):
        return None
    where, ranks = position()
    end = time.monotonic() + _GRACE
    while not (told := told_by(ranks)) and time.monotonic() < end:
        time.sleep(0.1)
    lines = [f"rank {world.process_rank()} failed at {where}: {str(error).splitlines()[0]}"]
    lines += [f"  * {line}" for line in [*told, *waits_told_by(ranks)][:_SHOWN]]
    if not told:
        others = ", ".join(str(rank) for rank in ranks[:_SHOWN] if rank != world.process_rank())
        lines.append(f"  * no other rank has told of an error; one of {others or 'them'} has ended, or was stopped")
    return PeerError("\n".join([*lines, ADVICE]))


def install() -> None:
    """Let errors of c10d become `PeerError`s, and long waits hear of other ranks."""
    explain_with(_explained)
    go_on_with(wait_long, wait_whole)
