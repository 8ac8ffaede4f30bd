"""The memory that a call takes, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.sharded import is_sharded


def bytes_of(tree: Any) -> int:
    """The bytes of the storages of a tree, each once; of a `Sharded` those of its block."""
    leaves = [x.local if is_sharded(x) else x for x in optree.tree_leaves(tree, is_leaf=is_sharded)]
    storages = [x.untyped_storage() for x in leaves if isinstance(x, Tensor)]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


def changes(f: Callable[..., Any], *args: Any) -> tuple[list[int], Any]:
    """What a call allocates and, as negative numbers, frees, in order; and its result."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out = f(*args)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return [event.nbytes() for event in events], out


def peak_and_result(f: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    """The most bytes at once above those of the arguments, and the result."""
    found, out = changes(f, *args)
    return max(accumulate(found, initial=0)), out


def peak(f: Callable[..., Any], *args: Any) -> int:
    """The least peak of some calls. The first of them allocates what libraries keep."""
    return min(peak_and_result(f, *args)[0] for _ in range(3))


def beside_results(f: Callable[..., Any], *args: Any) -> int:
    """The most bytes at once above the arguments and the results."""
    held = [list(accumulate(changes(f, *args)[0], initial=0)) for _ in range(3)]
    return min(max(one) - one[-1] for one in held)
