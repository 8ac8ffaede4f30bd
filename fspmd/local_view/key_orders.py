"""Orders of keys: code that iterates over a dict takes its keys in the order in which this rank has put them in.

The first rank that makes a plan or a record of a call writes its order into the store of the ranks. The others compare
theirs with it. Nobody waits, and a later call of the same kind asks nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from fspmd.errors import LockstepError
from fspmd.meshes import process_groups, world
from fspmd.meshes.mesh import Mesh
from fspmd.transport import known_values
from fspmd.transport.reports import store_here, tell_failure
from fspmd.trees import Label
from fspmd.user_code import code_of

_SHOWN: Final = 64  # leaves of an order in the store
_comparing: Final = threading.Lock()  # threads of a rank may come to one call
_seen: Final[dict[str, list[str]]] = {}  # the orders of this process, by mesh, call and leaves
process_groups.at_new_world(_seen.clear)


def check_order(
    meshes: Iterable[Mesh], name: str, function: Any, order: list[int] | None, labels: Sequence[Label]
) -> None:
    """Compare the order of the keys in a call's arguments with that of the first rank of each mesh that has come to it.

    Only trees with dicts have such an order (`trees.has_dicts`).

    Args:
        name: The name of the call in messages.
        function: The function that it runs.
        order: As of `trees.order_of`.
        labels: The names of the leaves.

    Raises:
        LockstepError: The orders differ.
    """
    if known_values.hear is not None:  # under `debug` all ranks compare, at once
        return
    for mesh in meshes:
        if mesh.transport == "process_group" and mesh.coordinate() is not None and world.has_peers():
            with _comparing:
                _compare(mesh, f"{name}{_line_of(function)}", order, list(map(str, labels)))


def _line_of(function: Any) -> str:
    code = code_of(function)
    return "" if code is None else f" ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _compare(mesh: Mesh, call: str, order: list[int] | None, leaves: list[str]) -> None:
    # not by the structure, which has the order of some keys, and of a defaultdict the address of its function
    key = _digest(mesh.ranks, mesh.axis_names, call, sorted(leaves))
    if order is not None:
        leaves = [leaf for _, leaf in sorted(zip(order, leaves, strict=True))]
    digest, mine = _digest(leaves), leaves[:_SHOWN]
    known = _seen.setdefault(key, [])
    if digest in known:
        return
    me, told = world.process_rank(), ""
    with contextlib.suppress(RuntimeError):  # the store has ended
        store = store_here("fspmd.key_orders")
        told = store.compare_set(f"{key}/{len(known)}", "", json.dumps([me, digest, mine])).decode()
    rank, theirs, first = json.loads(told) if told else (me, digest, mine)
    if theirs == digest:
        known.append(digest)
        return
    differ = ((a, b) for a, b in zip(first, mine, strict=True) if a != b)
    at, ours = next(differ, ("another leaf", "one leaf"))
    error = LockstepError(
        f"{call}: the keys of a dict in its arguments have another order on rank {me} than on rank {rank}, so code "
        f"that iterates over it takes other leaves: rank {rank} comes to {at} where rank {me} comes to {ours}; make "
        "the dict in one order on all ranks, for example as dict(sorted(d.items()))"
    )
    tell_failure(error)
    raise error


def _digest(*facts: object) -> str:
    return hashlib.sha1(repr(facts).encode(), usedforsecurity=False).hexdigest()[:16]
