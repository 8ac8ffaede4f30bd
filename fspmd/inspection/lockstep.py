"""`lockstep`: before each collective its ranks compare their positions. A rank that comes alone, or to another
collective, is an error."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, Final

from fspmd.errors import LockstepError
from fspmd.inspection.causes import trace
from fspmd.inspection.histories import facts_of_call, options_text
from fspmd.inspection.watch import Communication, Watcher, add, check_seconds, remove
from fspmd.meshes import world
from fspmd.meshes.mesh import Mesh
from fspmd.messages import counted
from fspmd.pairs import PAIRS
from fspmd.remembered import hear_writes
from fspmd.spec import describe, short_dtype
from fspmd.torch_internals import store_of_ranks
from fspmd.transport.reports import store_needed

_SHOWN: Final = 5  # writes of each rank
_POLL: Final = 0.05  # the longest pause in seconds between two looks for late ranks
_numbers: Final = itertools.count()


class _Lockstep(Watcher):
    """The position of this rank: its collectives in each group, and its writes."""

    of_records = True

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.number = next(_numbers)
        self.met: dict[tuple[int, ...], int] = {}
        self.writes = 0
        self.calls: Counter[Mesh] = Counter()
        self.last: deque[str] = deque(maxlen=_SHOWN)

    @cached_property
    def store(self) -> Any:
        """The store through which the ranks compare. No collective that they compare holds it up."""
        return store_of_ranks(f"fspmd.lockstep/{self.number}")

    def wrote(self) -> None:
        self.writes += 1
        cause = trace().cause
        self.last.append(_position(cause.by, cause.where))

    def on_communication(self, communication: Communication) -> None:
        mesh, cause = communication.mesh, communication.cause
        if mesh.transport != "process_group" or communication.kind not in PAIRS or mesh.coordinate() is None:
            return
        axes = communication.axes or mesh.axis_names
        call, dtype = communication.call, communication.dtype
        options, is_even = ("", False) if call is None else (options_text(call), facts_of_call(call)[2])
        what = f"{communication.kind}{options} over {', '.join(map(repr, axes))} of {mesh!r}"
        what += f", {describe(dtype, communication.shape) if is_even else short_dtype(dtype)}"
        what += f", {'backward, ' * communication.backward}for {cause.by}"
        self.calls[mesh] += 1
        ranks = tuple(sorted(mesh.group_ranks(axes)))
        self.meet(ranks, what, cause.where, not cause.written, self.calls[mesh] if len(ranks) > 1 else 0)

    @store_needed()
    def meet(
        self, ranks: tuple[int, ...], what: str, where: str = "", compares_lines: bool = False, place: int = 0
    ) -> None:
        """Wait for all ranks of a group, and compare the collective that each is about to begin.

        Raises:
            LockstepError: their positions differ; it is raised on all ranks. Or a rank does not come; it is raised on
                the ranks that came.
            PeerError: the process that holds the store has ended.
        """
        if len(ranks) == 1:
            return
        count = self.met[ranks] = self.met.get(ranks, 0) + 1
        me, name, here = world.process_rank(), "-".join(map(str, ranks)), _position(what, where)
        keys = {rank: f"{name}/{count}/{rank}" for rank in ranks}
        self.store.set(f"at/{me}", f"was last at {here}")
        self.store.set(keys[me], json.dumps([what, where, compares_lines, self.writes, list(self.last), place]))
        if failure := self._wait(keys, here):
            self.store.delete_key(keys[me])  # a rank that comes later must not meet this one
            raise LockstepError(failure)
        positions = {rank: json.loads(self.store.get(key)) for rank, key in keys.items()}
        if count > 1:  # all ranks are here, so they have read the last position
            self.store.delete_key(f"{name}/{count - 1}/{me}")
        compared = {
            (what, where if compares_lines else "", writes, place)
            for what, where, compares_lines, writes, _, place in positions.values()
        }
        if len(compared) > 1:
            raise LockstepError(_rank_by_rank_text(positions))

    def __enter__(self) -> None:
        """Begin with nothing."""

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """All groups meet once more, unless there is an error. Ranks that still wait for this one read that it left."""
        try:
            for ranks in () if error else sorted(self.met):
                self.meet(ranks, "the end of lockstep()")
        except LockstepError as late:
            error = late
            raise
        finally:
            if world.initialised():
                after = f" with {type(error).__name__}: {error}" if error else ""
                with suppress(RuntimeError):  # the store has ended
                    self.store.set(f"left/{world.process_rank()}", f"has left lockstep(){after}")

    def _wait(self, keys: dict[int, str], here: str) -> str:
        """Wait until all ranks have come. Return the error if a rank has left, or does not come; else ""."""
        end, pause = time.monotonic() + self.seconds, 0.0005
        while not self.store.check(list(keys.values())):
            left = [text for rank in keys if (text := self._report("left", rank))]
            if left and not self.store.check(list(keys.values())):  # they may have met, and then left
                return f"{left[0]}\n  * others are at {here}"
            if time.monotonic() > end:
                late = [rank for rank, key in keys.items() if not self.store.check([key])]
                reports = [self._report("at", rank) or f"rank {rank} has come to no collective" for rank in late]
                head = f"{counted(len(late), 'rank')} did not come to {here} within {self.seconds} s:"
                return "\n".join([head, *(f"  * {report}" for report in reports), _ADVICE])
            time.sleep(pause := min(2 * pause, _POLL))
        return ""

    def _report(self, topic: str, rank: int) -> str:
        """The last words of a rank on a topic, "at" or "left"; "" if there are none."""
        key = f"{topic}/{rank}"
        return f"rank {rank} {self.store.get(key).decode()}" if self.store.check([key]) else ""


_ADVICE: Final = (
    "all ranks must make the same calls and the same writes into Sharded values: take the calls of one rank alone out "
    "of their `if`, or make them on all ranks; if a rank only takes longer, write lockstep(seconds=...)"
)


def _rank_by_rank_text(positions: dict[int, Any]) -> str:
    lines = ["ranks came to different collectives, or after different writes:"]
    shows_writes = any(writes for _, _, _, writes, _, _ in positions.values())
    shows_places = len({(what, where, writes) for what, where, _, writes, *_ in positions.values()}) == 1
    for rank, (what, where, _, writes, last, place) in positions.items():
        facts = [counted(writes, "write")] * shows_writes + [counted(place - 1, "other collective")] * shows_places
        after = f", after {' and '.join(facts)}" if facts else ""
        lines.append(f"  * rank {rank}: {_position(what, where)}{after}{', the last: ' * bool(last)}{'; '.join(last)}")
    return "\n".join([*lines, _ADVICE])


def _position(what: str, where: str) -> str:
    return f"{what} ({where})" if where else what


@contextmanager
def lockstep(seconds: float = 60) -> Iterator[None]:
    """Within the context the ranks of each collective compare their positions before they begin it.

    Use it for debugging, to find the line where ranks diverge. A rank that makes a call alone,
    ``if rank == 0: x.mul_(2)``, gets no error from that call. Later it communicates where the others do not. It then
    waits for them, or its data is taken for that of their next collective. Within `lockstep` both are an error on all
    ranks of the collective, before it sends anything. The message has the collective of each rank, its line and its
    last writes. A rank that does not come within ``seconds``, or has left with an error, is an error, too. The message
    then has its last position, or its error.

    The ranks compare the row of the pair table, its options, the axes, the mesh, the dtype, and the shape of even
    blocks; the direction (forward or backward); the torch function or function of fspmd that communicates; and the
    numbers of writes into Sharded values and of collectives on the mesh so far. For communication that is not written,
    they also compare the user's line. At the end of the context all ranks of a group meet once more.

    Outside the context a rank that waits alone gets an error after the timeout of the process group, which is 30
    minutes with Gloo. ``torch.distributed.init_process_group("gloo", timeout=...)`` before `make_mesh` sets another.

    Args:
        seconds: The time that ranks wait for each other.

    Communication: a few messages per collective, by the store of torch.distributed.

    Raises:
        LockstepError: ranks diverge within the context, or at its end.
        ArgumentError: ``seconds`` is no number above 0.

    >>> import torch
    >>> from fspmd import P, device_put, make_mesh
    >>> x = device_put(torch.ones(8, 4), P("x"), mesh=make_mesh((4,), ("x",), transport="simulation"))
    >>> with lockstep():
    ...     total = float(x.sum())
    """
    check_seconds("lockstep", seconds)
    watcher = _Lockstep(seconds)
    add(watcher)
    before = hear_writes(watcher.wrote)
    try:
        with watcher:
            yield
    finally:
        hear_writes(before)
        remove(watcher)
