"""`deadline` bounds the waits of a block, and `debug` compares the collectives of all ranks as they go."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fspmd.errors import ArgumentError
from fspmd.inspection.monitor import Monitor
from fspmd.messages import described
from fspmd.user_code import user_line


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Within the block a collective that waits for more than ``seconds`` raises an error on each rank that waits.

    The error says at which collective the rank stood: its kind, axes, mesh, dtype and shape, and the user's line; in
    backward also the line of its forward call. For each other rank of the group it says where that rank stood when it
    last told: at another collective, outside of collectives, in a block that an error has ended, or nowhere, since it
    has ended or is stopped. A rank that waits for one whose block was ended by an error raises `PeerError` at once.

    The collective cannot be taken back: after the error, end the process, or destroy the process group. Blocks may be
    nested; each wait ends with the shortest time. Ranks hear of each other in blocks that they enter at the same line.
    A rank may have blocks at lines of its own. In a simulation, where nobody waits, the block does nothing.

    A call of a collective costs some 4 µs more within the block. A thread tells the others twice a second that this
    rank lives. With NCCL, the host waits for each collective within the block.

    Args:
        seconds: The time that a wait may take.

    Communication: none but messages through the store of torch.distributed.

    Raises:
        DeadlineError: within the block, a wait took longer.
        LockstepError: within the block, ranks wait for each other in a circle, over different axes.
        PeerError: within the block, another rank has left its block by an error.
        ArgumentError: ``seconds`` is no number above 0.

    >>> with deadline(30):
    ...     pass
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ArgumentError(f"deadline got seconds={described(seconds)}; give it a number above 0")
    yield from _monitored(Monitor(seconds, 0, user_line(sys._getframe(1)).where))


@contextmanager
def debug(every: int = 100, *, seconds: float | None = None) -> Iterator[None]:
    """Within the block the ranks of each group compare their collectives as they go, and raise an error if they differ.

    Each rank keeps a running hash of the collectives of each group: the row of the pair table, the axes, the mesh, the
    options, the shape, the dtype, the user's line, and in a body how many collectives came before it, over any axes.
    Shapes that may be uneven do not count. Ranks that run the same collective at different lines count as different, so
    write it once, after the `if`. Ranks compare after every ``every`` collectives of a group, at the end of the block,
    and when a rank waits for long. Within about two seconds of a difference all ranks of the group raise an error at
    their next collective, or in the one that they wait for. It has the first collective that differs, with its line, on
    each rank. Ranks that wait for each other in a circle, over different axes, are named in the same time.

    A collective that is new after the seven before it in its group waits until all ranks of the group have come to it.
    So a rank that takes another branch sends nothing that others do not expect. Steps of training repeat, so later ones
    wait for nobody. Shapes that change in each step make each step new: a call then costs a message to the store and
    back, a fraction of a millisecond.

    `lockstep` compares before each collective, which is slow, but no wrong number is computed. Here a call costs some
    4 µs more; what was computed since ranks parted may be wrong. A recorded program (`jit`) counts as its collectives.
    The environment variable ``FSPMD_DEBUG=N`` does the same for the whole process, as ``debug(every=N)``.

    Values that all processes must have alike are compared in the same way, by digests, in each call: arguments of
    `shard_map` and `jit` that are no `Sharded`, static ones too; values that `device_put` lays out; seeds of random
    functions, and what a body draws that is equal on all ranks; the plain tensors that a body or a jitted function
    closes over, parameters and buffers of its modules among them, and attributes that it names of the user's objects;
    and the numbers that it closes over or names itself; and after an unchecked body the replicas that it has written
    into. A body that closes over its rank is therefore told of: write ``axis_index``, or call ``dist.get_rank()`` in
    it. A bool alone does not count, since one rank may be told to print. Each tensor is read once. A jitted function is
    compared over the meshes of its record and its arguments. Containers and objects count by their parts, but an object
    that is equal to itself alone, or that cannot be pickled, by its type. The order of keys in arguments is compared,
    too, since a body iterates over dicts in the order of its rank.

    Three things more are compared: the global shapes, dtypes and specs of the arguments of `shard_map` and `jit`, the
    ``in_specs``, and all that a torch function on `Sharded` values gets, namely layouts, plain tensors, numbers and
    options. A call of one Sharded alone passes nothing else, so it is not heard. These are no collectives, so they wait
    for the next comparison of a group. Ranks compare them line by line, where they have come to a line equally often.
    So one rank may call a function that does not communicate. A torch function then costs some 10 µs more, and 5 to
    50 µs for each plain tensor of up to 64 KiB. Only the thread that has entered the block is heard.

    Specs that `device_put` gives are compared as these are. So a difference of values or layouts is told after up to
    ``every`` collectives, or at the end of the block.

    A rank that the backend fails says which ranks of the group have given no sign of life.

    All ranks enter the block at the same line, around the same calls. In a simulation it does nothing. Collectives
    of parts of an axis (``axis_index_groups``) and moves between meshes are not compared.

    Args:
        every: After how many collectives of a group its ranks compare. The error shows where they parted if that is
            among the last 4,096.
        seconds: The time that a wait may take, as with `deadline`. By default there is no bound; ranks meet at the end
            of the block within 60 seconds.

    Communication: a few messages through the store of torch.distributed, by a thread.

    Raises:
        LockstepError: within the block or at its end, ranks have run different collectives.
        DeadlineError, PeerError: as with `deadline`.
        ArgumentError: ``every`` is no integer above 0, or ``seconds`` no number above 0.

    >>> with debug(every=10):
    ...     pass
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ArgumentError(f"debug got every={described(every)}; give it an integer above 0")
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0):
        raise ArgumentError(f"debug got seconds={described(seconds)}; give it a number above 0, or None")
    yield from _monitored(Monitor(seconds, every, user_line(sys._getframe(1)).where))


def _monitored(monitor: Monitor) -> Iterator[None]:
    monitor.enter()
    try:
        yield
    except BaseException as error:
        monitor.leave(error)
        raise
    else:
        monitor.leave()


def install() -> None:
    """Begin `debug` for the whole process, if the environment says so."""
    given = os.environ.get("FSPMD_DEBUG", "")
    if given in ("", "0"):
        return
    if not given.isdecimal():
        raise ArgumentError(f"the environment variable FSPMD_DEBUG is {given!r}; set it to an integer, such as 100")
    monitor = Monitor(None, int(given) if int(given) > 1 else 100, "FSPMD_DEBUG")
    monitor.enter()
    atexit.register(lambda: monitor.leave(getattr(sys, "last_value", None)))
