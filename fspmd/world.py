"""The process and its world: the only place that knows about the launcher and the set-up of torch.distributed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

from fspmd.errors import MeshError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "adopt_group",
    "ensure_initialised",
    "initialised",
    "launched",
    "local_device",
    "process_group",
    "process_rank",
    "rank",
    "simulated",
    "simulated_rank",
    "world_size",
]

_simulated: ContextVar[int | None] = ContextVar("fspmd_simulated_rank", default=None)
_groups: dict[tuple[int, ...], ProcessGroup] = {}
_groups_of: weakref.ref[ProcessGroup] | None = None


def initialised() -> bool:
    """True when torch.distributed has a default process group."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def launched() -> bool:
    """True under a launcher such as torchrun (RANK and WORLD_SIZE are set) or when torch.distributed is initialised."""
    return ("RANK" in os.environ and "WORLD_SIZE" in os.environ) or initialised()


def process_rank() -> int:
    """This process's rank in the world, 0 without a launcher."""
    if initialised():
        import torch.distributed as dist

        return dist.get_rank()
    return int(os.environ["RANK"]) if launched() else 0


def simulated() -> int | None:
    """The rank that :func:`simulated_rank` has set, None outside it."""
    return _simulated.get()


def rank() -> int:
    """The rank that code runs as: the simulated one where :func:`simulated_rank` has set it, else this process's."""
    simulated = _simulated.get()
    return process_rank() if simulated is None else simulated


@contextmanager
def simulated_rank(rank: int) -> Iterator[None]:
    """Within the block, code on a simulated mesh runs as this rank.

    >>> with simulated_rank(3):
    ...     rank()
    3
    """
    token = _simulated.set(rank)
    try:
        yield
    finally:
        _simulated.reset(token)


def world_size() -> int:
    """How many processes there are, 1 without a launcher."""
    if initialised():
        import torch.distributed as dist

        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def default_device_type() -> str:
    """The device type of a process-group mesh when none is given: that of the default group's backend, else a GPU if any."""
    if initialised():
        import torch.distributed as dist

        backend = str(dist.get_backend())
        return "cuda" if "nccl" in backend else "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def local_device(device_type: str) -> torch.device:
    """This process's device of a type: the one LOCAL_RANK names under a launcher, else the current one."""
    if device_type != "cuda" or not torch.cuda.is_available():
        return torch.device(device_type)
    local, count = int(os.environ.get("LOCAL_RANK", -1)), torch.cuda.device_count()
    return torch.device("cuda", local if 0 <= local < count else torch.cuda.current_device())


def ensure_initialised(device: str | None = None) -> None:
    """Initialise torch.distributed as the launcher says, or take it as found.

    On GPUs the backend is NCCL and this process's device the LOCAL_RANK one; on the CPU the backend is Gloo.

    Raises:
        MeshError: no launcher, or no such device.
    """
    if initialised():
        return
    import torch.distributed as dist

    if not launched():
        raise MeshError(
            "a mesh over process groups needs a launcher, but RANK and WORLD_SIZE are not set and torch.distributed is "
            'not initialised: start the program with torchrun, or pass transport="simulation"'
        )
    device_type = device or default_device_type()
    if device_type == "cuda":
        if not torch.cuda.is_available():
            raise MeshError('device="cuda" was given, but this process sees no GPU: pass device="cpu"')
        torch.cuda.set_device(local_device("cuda"))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")


def _current_groups() -> dict[tuple[int, ...], ProcessGroup]:
    """The groups made under the present default group; a new default group starts a new set."""
    global _groups, _groups_of
    import torch.distributed as dist

    default = dist.group.WORLD
    if default is None:
        _groups, _groups_of = {}, None
        raise MeshError(
            "torch.distributed is not initialised (or was destroyed): make the mesh with make_mesh under torchrun, "
            "or call torch.distributed.init_process_group first"
        )
    if _groups_of is None or _groups_of() is not default:
        _groups, _groups_of = {}, weakref.ref(default)
    return _groups


def process_group(ranks: Sequence[int]) -> ProcessGroup:
    """The process group of these ranks: made when first asked for, by its members only, one per set of ranks.

    Ranks within the group are in ascending order. All members must ask for their groups in the same order.

    Raises:
        MeshError: torch.distributed is not initialised, or this process is no member.
    """
    groups = _current_groups()
    key = tuple(sorted(ranks))
    group = groups.get(key)
    if group is None:
        import torch.distributed as dist

        if dist.get_rank() not in key:
            raise MeshError(f"rank {dist.get_rank()} asked for the process group of ranks {key}, of which it is no member")
        if len(key) == dist.get_world_size():
            made = dist.group.WORLD
        else:
            made = dist.new_group(list(key), use_local_synchronization=True)
        group = groups[key] = made
    return group


def adopt_group(group: ProcessGroup) -> None:
    """Use a group that exists already for its set of ranks, instead of making another."""
    import torch.distributed as dist

    _current_groups().setdefault(tuple(sorted(dist.get_process_group_ranks(group))), group)
