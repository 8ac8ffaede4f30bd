"""`lockstep`: before each collective its ranks compare where they are; to come alone, or to another, is an error."""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from fspmd.errors import ArgumentError, LockstepError
from fspmd.inspection.causes import Cause, trace
from fspmd.inspection.watch import Communication, Watcher, add, remove
from fspmd.meshes import world
from fspmd.messages import counted, described
from fspmd.pairs import PAIRS
from fspmd.remembered import hear_writes
from fspmd.spec import short_dtype
from fspmd.torch_internals import store_of_ranks

_SHOWN: Final = 5  # writes of each rank
_POLL: Final = 0.05  # seconds between looks for who is late, at most
_numbers: Final = itertools.count()


class _Lockstep(Watcher):
    """Where this rank is: its collectives in each group, and its writes."""

    of_records = True

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.number = next(_numbers)
        self.met: dict[tuple[int, ...], int] = {}
        self.writes = 0
        self.last: deque[str] = deque(maxlen=_SHOWN)
        self.shared: Any = None

    @property
    def store(self) -> Any:
        """What ranks tell each other by, apart from the collectives that they compare."""
        if self.shared is None:
            self.shared = store_of_ranks(f"fspmd.lockstep/{self.number}")
        return self.shared

    def wrote(self) -> None:
        self.writes += 1
        self.last.append(_shown(trace().cause))

    def told(self, moved: Communication) -> None:
        mesh, cause = moved.mesh, moved.cause
        if mesh.transport != "process_group" or moved.kind not in PAIRS or mesh.coordinate() is None:
            return
        axes = moved.axes or mesh.axis_names
        what = f"{moved.kind} over {', '.join(map(repr, axes))} of {mesh!r}, {short_dtype(moved.dtype)}"
        what += f", {'backward, ' * moved.backward}for {cause.by}"
        self.meet(tuple(sorted(mesh.group_ranks(axes))), what, cause.where, not cause.written)

    def meet(self, ranks: tuple[int, ...], what: str, where: str = "", compares_lines: bool = False) -> None:
        """Wait for all ranks of a group, and compare what each is about to do.

        Raises:
            LockstepError: on all of them, or, where some do not come, on those that do.
        """
        if len(ranks) == 1:
            return
        count = self.met[ranks] = self.met.get(ranks, 0) + 1
        me, name, here = world.process_rank(), "-".join(map(str, ranks)), _place(what, where)
        keys = {rank: f"{name}/{count}/{rank}" for rank in ranks}
        self.store.set(f"at/{me}", f"was last at {here}")
        self.store.set(keys[me], json.dumps([what, where, compares_lines, self.writes, list(self.last)]))
        if failure := self._wait(keys, here):
            self.store.delete_key(keys[me])  # who comes yet is alone
            raise LockstepError(failure)
        found = {rank: json.loads(self.store.get(key)) for rank, key in keys.items()}
        if count > 1:  # which all have read that are here
            self.store.delete_key(f"{name}/{count - 1}/{me}")
        if len({(one[0], one[1] if one[2] else "", one[3]) for one in found.values()}) > 1:
            raise LockstepError(_rank_by_rank_text(found))

    def leave(self, error: BaseException | None = None) -> None:
        """All groups meet once more, unless there is an error; who waits for this rank yet is told that it left."""
        try:
            for ranks in () if error else sorted(self.met):
                self.meet(ranks, "the end of lockstep()")
        except LockstepError as late:
            error = late
            raise
        finally:
            if world.initialised():
                after = f" with {type(error).__name__}: {error}" if error else ""
                self.store.set(f"left/{world.process_rank()}", f"has left lockstep(){after}")

    def _wait(self, keys: dict[int, str], here: str) -> str:
        """Until all are there; what is wrong if one has left, or does not come."""
        end, pause = time.monotonic() + self.seconds, 0.0005
        while not self.store.check(list(keys.values())):
            left = [said for rank in keys if (said := self._said("left", rank))]
            if left and not self.store.check(list(keys.values())):  # they may have met, and then left
                return f"{left[0]}\n  * others are at {here}"
            if time.monotonic() > end:
                late = [rank for rank, key in keys.items() if not self.store.check([key])]
                found = [self._said("at", rank) or f"rank {rank} has come to no collective" for rank in late]
                head = f"{counted(len(late), 'rank')} did not come to {here} within {self.seconds} s:"
                return "\n".join([head, *(f"  * {one}" for one in found), _ADVICE])
            time.sleep(pause := min(2 * pause, _POLL))
        return ""

    def _said(self, what: str, rank: int) -> str:
        key = f"{what}/{rank}"
        return f"rank {rank} {self.store.get(key).decode()}" if self.store.check([key]) else ""


_ADVICE: Final = (
    "all ranks make the same calls, writes into Sharded values included: take what one rank does alone out of its "
    "`if`, or let the others do it, too; where a rank only takes longer, write lockstep(seconds=...)"
)


def _rank_by_rank_text(found: dict[int, Any]) -> str:
    lines = ["ranks came to different collectives, or after different writes:"]
    for rank, (what, where, _, writes, last) in found.items():
        after = f", after {counted(writes, 'write')}" if any(one[3] for one in found.values()) else ""
        lines.append(f"  * rank {rank}: {_place(what, where)}{after}{', the last: ' * bool(last)}{'; '.join(last)}")
    return "\n".join([*lines, _ADVICE])


def _place(what: str, where: str) -> str:
    return f"{what} ({where})" if where else what


def _shown(cause: Cause) -> str:
    return f"{cause.by} ({cause.where})"


@contextmanager
def lockstep(seconds: float = 60) -> Iterator[None]:
    """Within it the ranks of each collective compare where they are, before they begin it.

    It is for finding the place where ranks part. A rank that makes a call alone, ``if rank == 0: x.mul_(2)``, has no
    way to know of it: later it communicates where the others do not. It then waits for them, or what it sends is taken
    for the next collective of theirs. Within `lockstep` either is an error on all ranks of the collective, before
    anything of it is sent. The message has what each rank came to, its line and its last writes. A rank that does not
    come within ``seconds`` is an error, too, with where it is, as is one that has left with an error of its own.

    Compared are: the row of the pair table, axes, mesh and dtype; whether it runs in backward, and for which torch
    function or function of fspmd; how many writes into Sharded values came before; of communication that is not
    written, the user's line. At the end of the context all ranks of a group meet once more.

    All ranks enter it alike, around the same calls. In a simulation it does nothing. Of a recorded program (`jit`) the
    collectives are compared when its forward, or its backward, begins. What ranks tell each other beside collectives
    of values (`barrier`, `process_allgather`, shapes) is not compared.

    Outside it a rank that waits alone gets an error when the time of the process group is over, 30 minutes with Gloo;
    ``torch.distributed.init_process_group("gloo", timeout=...)`` before `make_mesh` sets another.

    Communication: by the store of torch.distributed, a few messages per collective; it is for debugging.

    Raises:
        LockstepError: within it, or at its end.
        ArgumentError: ``seconds`` is no number above 0.

    >>> import torch
    >>> from fspmd import P, device_put, make_mesh
    >>> x = device_put(torch.ones(8, 4), P("x"), mesh=make_mesh((4,), ("x",), transport="simulation"))
    >>> with lockstep():
    ...     total = float(x.sum())
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ArgumentError(f"lockstep got seconds={described(seconds)}; give it a number above 0")
    watcher = _Lockstep(seconds)
    add(watcher)
    before = hear_writes(watcher.wrote)
    try:
        yield
    except BaseException as error:
        watcher.leave(error)
        raise
    else:
        watcher.leave()
    finally:
        hear_writes(before)
        remove(watcher)
