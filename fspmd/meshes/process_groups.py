"""The process groups of torch.distributed: set up by the first mesh, made by their members, let go at the end.

Only this file and `world` know about the launcher and the set-up of torch.distributed.
"""

from __future__ import annotations

import atexit
import datetime
import hashlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from fspmd.errors import MeshError
from fspmd.meshes.world import (
    available,
    backends,
    default_device_type,
    from_environment,
    initialised,
    launched,
    process_rank,
)
from fspmd.torch_internals import make_group, time_limit

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: torch holds a group until it is destroyed. Nothing here outlives it, and neither does the store of the ranks.
_groups: Final[weakref.WeakValueDictionary[tuple[int, ...], ProcessGroup]] = weakref.WeakValueDictionary()
_groups_of: weakref.ref[ProcessGroup] | None = None  # the default group under which they were made
_locks: Final[dict[tuple[int, ...], threading.Lock]] = {}  # for each set of ranks: who makes its group
_binding = threading.Lock()
_unbound: Final[list[torch.device | None]] = []  # for each group that is being made: the device of the default group
_rest: Callable[[float], list[Any]] = lambda seconds: []  # noqa: E731
_meet: Callable[[Callable[[], Any]], Any] = lambda make: make()  # noqa: E731
_PATIENCE = 10.0  # how many seconds the end of the process waits for them
_TRIES: Final = 5  # how often a process looks for the store of its next world
_initialised = 0  # how often make_mesh has initialised torch.distributed
_holders: list[Callable[[], object]] = []  # each makes a cache elsewhere let go of the groups
_beginners: Final[list[Callable[[], object]]] = []  # called in a new world
_began = False  # whether make_mesh initialised torch.distributed


def ensure_initialised(device: str | None = None, timeout: datetime.timedelta | None = None) -> None:
    """Initialise torch.distributed as the launcher says, or take it as found.

    On GPUs the backend is NCCL and this process's device the LOCAL_RANK one; on the CPU the backend is Gloo.
    ``timeout`` is the time limit of collectives, by default torch's.

    Raises:
        MeshError: no launcher, half of its environment, no such device, no backend for it, or torch.distributed is
            initialised with another time limit.
    """
    device_type = device or default_device_type()
    if not launched():
        raise MeshError(
            "a mesh over process groups needs a launcher, but RANK and WORLD_SIZE are not set and torch.distributed is "
            'not initialised: start the program with torchrun, or pass transport="simulation"'
        )
    if device_type != "cpu" and not available(device_type):
        raise MeshError(f'this process sees no device of type {device_type!r}: pass device="cpu"')
    if initialised():
        if device_type not in backends():
            raise MeshError(
                f"torch.distributed is initialised with backends for {sorted(backends())}, none of them for a mesh on "
                f"{device_type!r}: pass device={min(backends())!r}, or initialise with a backend for both, such as "
                'init_process_group("cpu:gloo,cuda:nccl")'
            )
        limit = time_limit(dist.group.WORLD)
        if timeout is not None and limit is not None and limit != timeout:
            raise MeshError(
                f"make_mesh got timeout={timeout.total_seconds():g} s, but torch.distributed is initialised with a "
                f"time limit of {limit.total_seconds():g} s: give it to the first make_mesh, or to "
                "torch.distributed.init_process_group"
            )
        _notice_world()
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise MeshError(
            f"RANK and WORLD_SIZE are set, but {' and '.join(missing)} not: start the program with torchrun, call "
            'torch.distributed.init_process_group first, or pass transport="simulation"'
        )
    backend = "gloo"
    if device_type != "cpu":
        torch.get_device_module(device_type).set_device(_own_index(device_type))
        backend = dist.get_default_backend_for_device(device_type)
    _initialise(backend, {} if timeout is None else {"timeout": timeout})
    _notice_world()


def _initialise(backend: str, limit: dict[str, Any]) -> None:
    """Initialise torch.distributed with keys of this attempt alone.

    The store of a launcher outlives an attempt and a world, and its keys hold addresses of ranks that have ended.
    """
    global _began, _initialised
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"fspmd/{attempt}/{_initialised}"
    store, rank, size = _store_with_rank_0(prefix, limit)
    dist.init_process_group(backend, store=PrefixStore(prefix, store), rank=rank, world_size=size, **limit)
    _began = True
    _initialised += 1


def _store_with_rank_0(prefix: str, limit: dict[str, Any]) -> tuple[Store, int, int]:
    """The store to which rank 0 has come for a new world, this process's rank, and the number of ranks.

    Without a launcher's store it is rank 0 that keeps one, until its world ends. Who leaves that world earlier finds
    the store once more at the same port, and loses it there, so it looks again.
    """
    again = _TRIES if _began else 0
    while True:
        try:
            store, rank, size = next(rendezvous("env://", **limit))
            if rank == 0:
                store.set(f"{prefix}/begun", "")
            else:
                store.wait([f"{prefix}/begun"], limit.get("timeout", default_pg_timeout))
        except dist.DistNetworkError:
            if not again:
                raise
            again -= 1
            time.sleep(0.1)
        else:
            return store, rank, size


# ------------------------------------------------------------------------------------------------------------ groups


def _own_index(device_type: str) -> int:
    """Return the index of this process's device among the devices that it sees."""
    count: int = torch.get_device_module(device_type).device_count()
    if "LOCAL_RANK" not in os.environ:  # a launcher that tells no place on the host: hosts are taken to be alike
        return from_environment("RANK") % count
    local = from_environment("LOCAL_RANK")
    if local < count:
        return local
    if count == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:  # a launcher that shows each process its own device alone
        return 0
    raise MeshError(
        f"this process has LOCAL_RANK={local}, but sees {count} device(s) of type {device_type!r}: start at most "
        f'{count} processes on this host, or pass device="cpu"'
    )


def process_group(ranks: Sequence[int]) -> ProcessGroup:
    """The process group of these ranks: made when first asked for, by its members only, one per set of ranks.

    Ranks within the group are in ascending order. The group of all ranks is the default group. The time limit is that
    of the default group. As with every collective, a thread must ask for groups in one order on all their members;
    other threads may ask for other groups meanwhile.

    Raises:
        MeshError: torch.distributed is not initialised, this process is no member, or a rank is outside the world.
    """
    groups = _current_groups()
    key = tuple(sorted(ranks))
    group = groups.get(key)
    if group is None:
        with _locks.setdefault(key, threading.Lock()):
            group = groups.get(key)
            if group is None:
                group = groups[key] = _meet(lambda: _make_group(key))
    return group


def adopt_group(group: ProcessGroup) -> None:
    """Use an existing group for its set of ranks, instead of making another."""
    _current_groups().setdefault(tuple(sorted(dist.get_process_group_ranks(group))), group)


def at_new_world(begin: Callable[[], object]) -> None:
    """Call ``begin`` when a new default group is first used."""
    _beginners.append(begin)


def let_go_with_groups(clear: Callable[[], object]) -> None:
    """Call ``clear`` when the groups end, with the default group or with the process.

    A group lives while anything holds it, and its threads with it. A thread that drops its last tensor while the
    interpreter shuts down takes the process with it.
    """
    _holders.append(clear)


def meet_with(meet: Callable[[Callable[[], ProcessGroup]], ProcessGroup]) -> None:
    """Let ``meet`` call the function that makes a group, which waits for its members."""
    global _meet
    _meet = meet


def end_after(rest: Callable[[float], list[Any]]) -> None:
    """At the end of the process let ``rest`` wait for some seconds, and return the collectives that are not over."""
    global _rest
    _rest = rest


def abandon_groups(*others: object) -> None:
    """Keep all groups until the process ends, since one has a collective that will not end.

    Gloo's destructor of a group waits for its collectives, so that the process could not end. Python never frees what
    the frame of a daemon thread holds.
    """
    start_keeper()
    _kept.extend([*_groups.values(), dist.group.WORLD, *others])


_kept: Final[list[object]] = []


def start_keeper() -> None:
    """Start the thread that keeps what is abandoned: Python starts no threads while it ends."""
    global _keeper
    if _keeper is None:
        never = threading.Event()
        _keeper = threading.Thread(target=lambda _: never.wait(), args=(_kept,), name="fspmd groups", daemon=True)
        _keeper.start()


_keeper: threading.Thread | None = None


def _let_go() -> None:
    _groups.clear()
    for clear in _holders:
        clear()


@atexit.register
def _leave_world() -> None:
    """Release all groups, and destroy the default group if fspmd made it. Threads in use get time to come to rest.

    The end of a group waits for the collectives that have begun, and a rank that does not join them would hold up the
    end of this process. Then the groups, and the tensors that their threads use, stay until the process is gone.
    """
    if _began and initialised() and (under_way := _rest(_PATIENCE)):
        abandon_groups(under_way)
        print(
            f"fspmd: rank {process_rank()} ends with {len(under_way)} collective(s) under way that other ranks have "
            "not joined; call wait() on each handle of a collective with wait=False",
            file=sys.stderr,
        )
        return
    _let_go()
    if _began and initialised():
        _clear_defaults()
        dist.destroy_process_group()
        time.sleep(0.02)  # a thread needs the interpreter to drop its last tensor


def _clear_defaults() -> None:
    """Remove the default group from default arguments, which would keep it alive: ``group=group.WORLD``.

    ``torch.distributed.nn.functional`` has such defaults, and the first call of ``torch.func.grad`` imports it.
    """
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("torch.distributed.")]
    for function in (value for module in modules for value in vars(module).values() if type(value) is FunctionType):
        defaults = function.__defaults__ or ()
        if any(isinstance(value, dist.ProcessGroup) for value in defaults):
            function.__defaults__ = tuple(None if isinstance(value, dist.ProcessGroup) else value for value in defaults)


def _notice_world() -> bool:
    """Return whether there is a default group. A new one starts a new set of groups."""
    global _groups_of
    default = dist.group.WORLD if dist.is_available() else None
    if default is None or _groups_of is None or _groups_of() is not default:
        _let_go()
        _groups_of = None if default is None else weakref.ref(default)
        if default is not None:
            for begin in _beginners:
                begin()
    return default is not None


def _current_groups() -> weakref.WeakValueDictionary[tuple[int, ...], ProcessGroup]:
    """Return the groups made under the present default group."""
    if not _notice_world():
        raise MeshError(
            "torch.distributed is not initialised, or was destroyed: make the mesh with make_mesh under torchrun, "
            "or call torch.distributed.init_process_group first"
        )
    return _groups


def _make_group(ranks: tuple[int, ...]) -> ProcessGroup:
    own, size = dist.get_rank(), dist.get_world_size()
    if own not in ranks:
        raise MeshError(f"rank {own} asked for the process group of ranks {ranks}, of which it is no member")
    if len(set(ranks)) != len(ranks) or not (ranks[0] >= 0 and ranks[-1] < size):
        raise MeshError(f"a process group of ranks {ranks} needs different ranks, all in range({size}), the world")
    default = dist.group.WORLD
    assert default is not None  # _current_groups has seen it
    if len(ranks) == size:
        return default
    name = "fspmd_" + hashlib.sha1("_".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()
    with _without_device(default):
        made: ProcessGroup = make_group(default, ranks, name)
    return made


@contextmanager
def _without_device(default: ProcessGroup) -> Iterator[None]:
    """Let only the members make a group: torch splits it from a default group that is bound to a device, by all ranks.

    The default group is unbound while any thread makes a group.
    """
    with _binding:
        _unbound.append(_unbound[0] if _unbound else default.bound_device_id)
        if _unbound[0] is not None:
            default.bound_device_id = None
    try:
        yield
    finally:
        with _binding:
            bound = _unbound.pop()
            if bound is not None and not _unbound:
                default.bound_device_id = bound
