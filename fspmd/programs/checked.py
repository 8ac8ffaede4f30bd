"""``jit(f, check=True)``: each call runs the function beside its record and compares the two."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspmd.errors import RecordError
from fspmd.inspection.communication_log import CommunicationLog, communication_log
from fspmd.programs.capture import copies_of
from fspmd.transport.local_tensor import blocks_of, is_simulated
from fspmd.transport.randomness import go_on, kept_states
from fspmd.trees import flatten, flatten_in_order, leaf_paths

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
