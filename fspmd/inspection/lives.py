"""Lives: each process tells once where it runs, so others on its machine can see whether it has ended."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from fspmd.cache import cached
from fspmd.meshes import process_groups, world
from fspmd.transport.reports import own_store, store_here

_PROCESSES: Final = Path("/proc")
_STORE: Final = "fspmd.lives"


@cached
def _machine() -> str:
    """A name of this machine, and of the numbers that processes have on it: a container has its own."""
    try:
        boot = (_PROCESSES / "sys/kernel/random/boot_id").read_text().strip()
        return f"{platform.node()} {boot} {os.readlink(_PROCESSES / 'self/ns/pid')}"
    except OSError:
        return platform.node()


def _facts(process: int) -> tuple[str, str]:
    """The state of a process of this machine, and when it began; "X" for one that has ended, "?" if it is not known."""
    with contextlib.suppress(PermissionError):
        try:
            os.kill(process, 0)  # which sends nothing
        except ProcessLookupError:
            return "X", ""
    try:
        fields = (_PROCESSES / str(process) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "?", ""
    return fields[0], fields[19]


def _tell() -> None:
    """Tell the other processes of a new world where this one runs."""
    if world.has_peers():
        told = _machine(), os.getpid(), _facts(os.getpid())[1]
        with contextlib.suppress(RuntimeError):
            store_here(_STORE).set(str(world.process_rank()), json.dumps(told))


def ended(ranks: Iterable[int], or_stopped: bool = False) -> dict[int, str]:
    """Those of some ranks on this machine whose process has ended, ``or_stopped``: a text by rank."""
    found, store = {}, own_store(_STORE)
    for rank in ranks:
        if store.check([str(rank)]):
            machine, process, began = json.loads(store.get(str(rank)))
            if machine != _machine():
                continue
            state, since = _facts(process)
            if state in "XZ" or (state != "?" and since != began):
                found[rank] = f"has ended: its process {process} is gone"
            elif state in "Tt" and or_stopped:
                found[rank] = f"is stopped: its process {process}"
    return found


def install() -> None:
    """Tell in each world."""
    process_groups.at_new_world(_tell)
