"""Runs that are compared: a function beside its record (``jit(f, check=True)``), and a step twice (`replay_check`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fspmd.body import check_outside, refuse_recorded
from fspmd.digests import difference
from fspmd.errors import ArgumentError, RecordError, ReplicaError, join_failures
from fspmd.inspection.communication_log import CommunicationLog, communication_log
from fspmd.meshes import world
from fspmd.messages import counted, described
from fspmd.placement.replicas import mesh_of
from fspmd.programs.capture import copies_of
from fspmd.programs.donation import Donated
from fspmd.transport import transport_named
from fspmd.transport.local_tensor import blocks_of, is_simulated
from fspmd.transport.randomness import go_on, kept_states
from fspmd.trees import flatten, flatten_in_order, flatten_values, leaf_paths

Call = Callable[..., Any]


class _Observed(NamedTuple):
    """A call: its result, the arguments and the states of generators after it, and its communication."""

    out: Any
    arguments: Any
    states: list[Tensor]
    log: CommunicationLog


def side_by_side(name: str, function: Call, plain: Call, passed: Call, args: tuple[Any, ...], named: Any) -> Any:
    """The result of a call, which runs the function and its record and compares them.

    Args:
        name: the name of the function.
        function: the function.
        plain: its record before passes.
        passed: its record after passes.
        args: the positional arguments.
        named: the keyword arguments.

    Raises:
        RecordError: a record differs from the function in results, in arguments that are written into, in random draws,
            or, before passes, in collectives.
    """
    begin = kept_states()
    expected = _run(function, *copied((args, named)))
    go_on(begin)
    before = _run(plain, *copied((args, named)))
    _compare_collectives(name, before.log, expected.log)  # passes may change collectives
    _compare(name, "result", before.out, expected.out)
    _compare(name, "arguments", before.arguments, expected.arguments)
    _compare_draws(name, before, expected)
    go_on(begin)
    after = _run(passed, args, named)
    _compare(name, "result", after.out, expected.out)
    _compare_draws(name, after, expected)
    return after.out


def _run(function: Call, args: tuple[Any, ...], named: dict[str, Any]) -> _Observed:
    with communication_log() as log:
        out = function(*args, **named)
    return _Observed(out, (args, named), kept_states().states, log)


def copied(tree: Any) -> Any:
    """A tree with copies of its tensors."""
    leaves, treedef = flatten_in_order(tree)
    copies = iter(copies_of(x for x in leaves if isinstance(x, Tensor)))
    return treedef.unflatten([next(copies) if isinstance(x, Tensor) else x for x in leaves])


def _compare(name: str, what: str, actual: Any, expected: Any) -> None:
    """Raise `RecordError` where two trees differ. ``what``: their name in the error."""
    (leaves, tree), (others, other_tree) = flatten(actual), flatten(expected)
    if tree != other_tree:
        raise _differs(name, f"its {what} is {tree}, but the function gives {other_tree}", _OUTSIDE)
    for path, x, y in zip(leaf_paths(actual, what), leaves, others, strict=True):
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            if type(x) is not type(y) or not (x is y or x == y):
                raise _differs(name, f"{path} is {x!r}, but the function gives {y!r}", _OUTSIDE)
        elif difference := next(filter(None, itertools.starmap(_difference, _pairs(x, y))), ""):
            raise _differs(name, f"{path} differs from the function's: {difference}", _OUTSIDE)


def _pairs(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The pairs of blocks to compare. Only one of two values may have a block for each rank."""
    if is_simulated(x) and is_simulated(y):
        return list(zip(blocks_of(x), blocks_of(y), strict=True))
    return [(block, other) for block in blocks_of(x) for other in blocks_of(y)]


def _difference(x: Tensor, y: Tensor) -> str:
    """The difference of two tensors in words; empty if they are close."""
    try:
        torch.testing.assert_close(x.detach(), y.detach(), equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def _compare_draws(name: str, actual: _Observed, expected: _Observed) -> None:
    if any(not torch.equal(x, y) for x, y in zip(actual.states, expected.states, strict=True)):
        raise _differs(name, "it draws other random numbers", "sets the state of a generator, or restores it")


def _compare_collectives(name: str, actual: CommunicationLog, expected: CommunicationLog) -> None:
    def described(log: CommunicationLog) -> list[str]:
        return [f"{entry.kind} over {entry.axes} of {tuple(entry.shape)}" for entry in log]

    for i, (x, y) in enumerate(itertools.zip_longest(described(actual), described(expected))):
        if x != y:
            how = f"its collective {i} is {x or 'missing'}, but the function's is {y or 'missing'}"
            raise _differs(name, how, _OUTSIDE)


_OUTSIDE = "reads a value from outside that changes, such as a Python number or a seed: pass it as an argument"


def _differs(name: str, how: str, why: str) -> RecordError:
    return RecordError(
        f"jit({name}, check=True) found a difference between the record and the function: {how}. Perhaps {name} {why}"
    )


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
    lines = []
    for label, x, y in zip(leaf_paths(first, root), leaves, others, strict=True):
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            if x is not y and repr(x) != repr(y):
                lines.append(f"{label}: {described(x)}, then {described(y)}")
            continue
        for a, b in zip(blocks_of(x), blocks_of(y), strict=True):
            if isinstance(a, Donated) and isinstance(b, Donated):
                continue
            if a.shape != b.shape or a.dtype != b.dtype:
                lines.append(f"{label}: {a.dtype} {tuple(a.shape)}, then {b.dtype} {tuple(b.shape)}")
            elif not a.is_meta and (differing := difference(a, b)) is not None:
                count, largest, place = differing
                lines.append(
                    f"{label}: {count} of {counted(a.numel(), 'element')} of the block differ, by at most "
                    f"{largest:.6g}, first at element {place}"
                )
    return lines
