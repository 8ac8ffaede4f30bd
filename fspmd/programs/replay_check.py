"""`replay_check`: a step runs twice from one state, and its results are compared to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from fspmd.digests import difference
from fspmd.errors import ArgumentError, ReplicaError, join_failures
from fspmd.meshes import world
from fspmd.messages import counted, described
from fspmd.outside import check_outside, refuse_recorded
from fspmd.placement.replicas import mesh_of
from fspmd.programs.checked import copied
from fspmd.programs.donation import Donated
from fspmd.transport import transport_named
from fspmd.transport.local_tensor import blocks_of
from fspmd.transport.randomness import go_on, kept_states
from fspmd.trees import flatten, flatten_values, leaf_paths

_ADVICE: Final = (
    "either the device or its memory has failed, or the step depends on more than its arguments and the generators of "
    "torch: kernels that add in any order (see torch.use_deterministic_algorithms), other random numbers, or Python "
    "state, which jit(step, check=True) finds"
)


def replay_check(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a step twice from the same state, compare to the bit, and return the result of the first run.

    Use it to tell a broken device from a broken program: a jitted step is pure, so two runs must agree. Each run gets
    copies of the tensors among the arguments, so donated arguments and arguments that are written into stay as they
    are. The default generators of torch begin both runs in the same state. Arguments are compared after the runs as
    well. Gradients of the results do not reach the arguments.

    All ranks of a mesh make the call. A step that communicates communicates in both runs.

    Args:
        step: The function, usually one under `jit`. It must not write into tensors that it closes over.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Communication: that of two runs, and one integer per rank.

    Raises:
        ReplicaError: on all ranks alike, a rank has other bits in the second run. The error names the leaves of the
            first rank that does, the number of elements that differ, and the largest difference.
        ArgumentError, RecordError: it is called in a body, or within jit; or ``step`` is not callable.

    >>> import torch
    >>> from fspmd import jit
    >>> replay_check(jit(lambda x: x + torch.rand(2)), torch.ones(2)).shape
    torch.Size([2])
    """
    what = "replay_check"
    refuse_recorded(what)
    check_outside(what)
    if not callable(step):
        raise ArgumentError(f"replay_check got {described(step)}; write replay_check(step, *args), not step(*args)")
    mesh = mesh_of(flatten_values((args, kwargs))[0], None, what)
    begin = kept_states()
    runs = []
    for _ in range(2):
        go_on(begin)
        given, named = copied((args, kwargs))
        runs.append((step(*given, **named), given, named))
    failures = [
        *_differences("result", runs[0][0], runs[1][0]),
        *_differences("args", runs[0][1], runs[1][1]),
        *_differences("kwargs", runs[0][2], runs[1][2]),
    ]
    text = f"rank {world.process_rank()}\n" + "\n".join(failures) if failures else ""
    if complaint := transport_named(mesh.transport).agree(text, mesh):
        rank, *failures = complaint.splitlines()
        head = f"replay_check: two runs of {_name(step)} from the same state differ on {rank}:"
        raise ReplicaError(join_failures(head, failures, _ADVICE))
    return runs[0][0]


def _name(step: Callable[..., Any]) -> str:
    return getattr(step, "__qualname__", None) or type(step).__name__


def _differences(root: str, first: Any, second: Any) -> list[str]:
    """The leaves of two trees that differ."""
    (leaves, tree), (others, other_tree) = flatten(first), flatten(second)
    if tree != other_tree:
        return [f"{root} has another structure"]
    found = []
    for label, x, y in zip(leaf_paths(first, root), leaves, others, strict=True):
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            if x is not y and repr(x) != repr(y):
                found.append(f"{label}: {described(x)}, then {described(y)}")
            continue
        for a, b in zip(blocks_of(x), blocks_of(y), strict=True):
            if isinstance(a, Donated) and isinstance(b, Donated):
                continue
            if a.shape != b.shape or a.dtype != b.dtype:
                found.append(f"{label}: {a.dtype} {tuple(a.shape)}, then {b.dtype} {tuple(b.shape)}")
            elif not a.is_meta and (apart := difference(a, b)) is not None:
                count, largest, place = apart
                found.append(
                    f"{label}: {count} of {counted(a.numel(), 'element')} of the block differ, by at most "
                    f"{largest:.6g}, first at element {place}"
                )
    return found
