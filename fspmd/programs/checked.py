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
    """The result of a call, its arguments and the generators afterwards, and its communication."""

    out: Any
    arguments: Any
    states: list[Tensor]
    log: CommunicationLog


def side_by_side(name: str, function: Call, plain: Call, passed: Call, args: tuple[Any, ...], named: Any) -> Any:
    """The result of ``passed``, a record after its passes; ``plain`` is the record before them.

    Raises:
        RecordError: results, arguments that are written into or random draws differ from the function's; or the
            collectives of the record before its passes do.
    """
    begin = kept_states()
    expected = _run(function, *_copied((args, named)))
    go_on(begin)
    before = _run(plain, *_copied((args, named)))
    _compare_collectives(name, before.log, expected.log)  # passes change them
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


def _copied(tree: Any) -> Any:
    """A tree with copies of its tensors."""
    leaves, treedef = flatten_in_order(tree)
    copies = iter(copies_of(x for x in leaves if isinstance(x, Tensor)))
    return treedef.unflatten([next(copies) if isinstance(x, Tensor) else x for x in leaves])


def _compare(name: str, what: str, found: Any, expected: Any) -> None:
    (leaves, tree), (others, other_tree) = flatten(found), flatten(expected)
    if tree != other_tree:
        raise _differs(name, f"its {what} is {tree}, but the function gives {other_tree}", _OUTSIDE)
    for path, x, y in zip(leaf_paths(found, what), leaves, others, strict=True):
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            if type(x) is not type(y) or not (x is y or x == y):
                raise _differs(name, f"{path} is {x!r}, but the function gives {y!r}", _OUTSIDE)
        elif complaint := next(filter(None, itertools.starmap(_complaint, _pairs(x, y))), ""):
            raise _differs(name, f"{path} is not what the function gives: {complaint}", _OUTSIDE)


def _pairs(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The blocks of two values, which may be held apart over more axes in one than in the other."""
    if is_simulated(x) and is_simulated(y):
        return list(zip(blocks_of(x), blocks_of(y), strict=True))
    return [(one, other) for one in blocks_of(x) for other in blocks_of(y)]


def _complaint(x: Tensor, y: Tensor) -> str:
    try:
        torch.testing.assert_close(x.detach(), y.detach(), equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def _compare_draws(name: str, found: _Observed, expected: _Observed) -> None:
    if any(not torch.equal(x, y) for x, y in zip(found.states, expected.states, strict=True)):
        raise _differs(name, "it draws other random numbers", "it sets the state of a generator, or restores it")


def _compare_collectives(name: str, found: CommunicationLog, expected: CommunicationLog) -> None:
    def told(log: CommunicationLog) -> list[str]:
        return [f"{one.kind} over {one.axes} of {tuple(one.shape)}" for one in log]

    for i, (one, other) in enumerate(itertools.zip_longest(told(found), told(expected))):
        if one != other:
            raise _differs(
                name, f"its collective {i} is {one or 'missing'}, but the function's is {other or 'missing'}", _OUTSIDE
            )


_OUTSIDE = "it reads something from outside that changes, such as a number of Python or a seed: pass it as an argument"


def _differs(name: str, how: str, why: str) -> RecordError:
    return RecordError(f"jit({name}, check=True) found that the record is not the function: {how}. Perhaps {why}")
