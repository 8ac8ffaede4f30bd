"""The process and its world: its rank, and its devices. `process_groups` sets up torch.distributed.

No other file knows about the launcher and the set-up of torch.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from fspmd.errors import MeshError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


#: the rank that code on a simulated mesh runs as, set by `simulated_rank` and `rank_map`
SIMULATED: ContextVar[int | None] = ContextVar("fspmd_simulated_rank", default=None)
#: returns this rank, or None where none is set
simulated = SIMULATED.get


# ----------------------------------------------------------------------------------------------- which rank of how many


def initialised() -> bool:
    """Return whether torch.distributed has a default process group."""
    return dist.is_available() and dist.is_initialized()


def launched() -> bool:
    """Return whether a launcher such as torchrun has set RANK and WORLD_SIZE, or torch.distributed is initialised."""
    return initialised() or ("RANK" in os.environ and "WORLD_SIZE" in os.environ)


def process_rank() -> int:
    """Return this process's rank in the world, or 0 without a launcher."""
    group = dist.group.WORLD if dist.is_available() else None
    if group is not None:
        return group.rank()  # every call on a mesh asks, and dist.get_rank() takes several times as long
    return from_environment("RANK") if launched() else 0


def world_size() -> int:
    """Return the number of processes, or 1 without a launcher."""
    if initialised():
        return dist.get_world_size()
    return from_environment("WORLD_SIZE") if launched() else 1


def rank() -> int:
    """The rank that code runs as: the simulated one where :func:`simulated_rank` has set it, else this process's.

    >>> rank()
    0
    """
    known = simulated()
    return process_rank() if known is None else known


@contextmanager
def simulated_rank(rank: int) -> Iterator[None]:
    """Within the block, code on a simulated mesh runs as this rank.

    >>> with simulated_rank(3):
    ...     rank()
    3
    """
    token = SIMULATED.set(rank)
    try:
        yield
    finally:
        SIMULATED.reset(token)


def from_environment(name: str) -> int:
    value = os.environ[name]
    if not value.isdecimal():
        raise MeshError(f"the environment variable {name} must be an integer >= 0, but it is {value!r}")
    return int(value)


# ----------------------------------------------------------------------------------------------------------- devices


def default_device_type() -> str:
    """The device type of a mesh when none is given.

    In simulation torch's default device; under a launcher a GPU if this process sees one, else the CPU; when
    torch.distributed is initialised, what its backend is for.
    """
    if not launched():
        return torch.get_default_device().type
    if not initialised():
        return "cuda" if torch.cuda.is_available() else "cpu"
    backend_of = backends()
    if backend_of.get("cuda") == "nccl" and torch.cuda.is_available():
        return "cuda"
    return "cpu" if "cpu" in backend_of else next(iter(backend_of))


#: devices of which a process has one; made once, since each new value asks for its device
_ALONE: Final = {name: torch.device(name) for name in ("cpu", "meta")}


def local_device(device_type: str) -> torch.device:
    """This process's device of a type: the one that LOCAL_RANK names under a launcher, else the current one.

    Where there is none, abstract meshes plan on the CPU: torch ends the process when it follows gradients of fake
    tensors on a device that it was not built for.
    """
    if device_type in _ALONE:
        return _ALONE[device_type]
    module = torch.get_device_module(device_type)
    if not module.is_available():
        return _ALONE["cpu"]
    if launched():
        bound = dist.group.WORLD.bound_device_id if initialised() and dist.group.WORLD is not None else None
        if bound is not None and bound.type == device_type:
            return bound
        if "LOCAL_RANK" in os.environ and (local := from_environment("LOCAL_RANK")) < module.device_count():
            return torch.device(device_type, local)
    return torch.device(device_type, module.current_device())


def available(device_type: str) -> bool:
    """Return whether torch finds a device of this type."""
    try:
        return bool(torch.get_device_module(device_type).is_available())
    except RuntimeError:
        return False


def has_peers() -> bool:
    """Return whether there is a world whose backends move something, so that its ranks can compare."""
    return initialised() and "fake" not in backends().values()


def backends(group: ProcessGroup | None = None) -> dict[str, str]:
    """Return a group's backend for each device type, such as ``{"cpu": "gloo", "cuda": "nccl"}``."""
    config = dist.distributed_c10d.get_backend_config(group)
    return dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
