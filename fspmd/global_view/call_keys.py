"""How a call becomes a key: what of its arguments decides its plan."""

from __future__ import annotations

from math import isnan
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.rules import free_numbers
from fspmd.sharded import Sharded
from fspmd.transport.local_tensor import LocalTensor

#: of types whose values stand for themselves in a key; True and 1.0 are equal to 1, so bool and float are none
CONSTANT: Final = frozenset((str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format))
_PLAIN: Final = CONSTANT | {int}
#: functions for which ints may bear on layouts
COUNTING: Final[set[Any]] = set()
_free: dict[Any, frozenset[type]] = {}  # of functions, kinds of Python numbers that do not


def forget_functions() -> None:
    """What numbers mean to each: a rule has changed."""
    _free.clear()
    COUNTING.clear()


def hashable(arg: Any) -> Any:
    """What an argument is in a key."""
    kind = type(arg)
    if kind in _PLAIN:
        return arg
    if kind is slice:
        start, stop, step = arg.start, arg.stop, arg.step
        if type(start) in _PLAIN and type(stop) in _PLAIN and type(step) in _PLAIN:
            return slice, start, stop, step
        return slice, hashable(start), hashable(stop), hashable(step)
    if kind is Sharded:
        return arg.spec
    if kind is float and (arg == 0 or isnan(arg)):
        return float, str(arg)  # two zeros, and nan, which equals nothing
    if isinstance(arg, dict):
        return dict, *((name, hashable(value)) for name, value in arg.items())
    if isinstance(arg, Tensor):
        return (kind, arg.dtype, arg.shape) if kind is not LocalTensor else LocalTensor
    if isinstance(arg, (tuple, list)):
        return kind, *map(hashable, arg)
    return kind, arg


def keyed(func: Any, arg: Any) -> Any:
    """What an argument of a function is in a key: of a number that bears on no layout its type."""
    kind = type(arg)
    return kind if (kind is float or kind is int) and kind in (_free.get(func) or _free_of(func)) else hashable(arg)


def _free_of(func: Any) -> frozenset[type]:
    found = _free.get(func)
    if found is None:
        found = _free[func] = free_numbers(func)
        if int not in found:
            COUNTING.add(func)
    return found


def add_argument(func: Any, arg: Any, kind: Any, key: list[Any], blocks: list[Any]) -> None:
    """Append what an argument is in the key of a call, and its block or blocks."""
    if kind is list or kind is tuple:
        key.append(kind)
        key.append(len(arg))
        held, sharded = [], False
        for one in arg:
            if type(one) in _PLAIN:
                key.append(one)
                held.append(one)
            elif type(one) is Sharded:
                key.append(one.spec)
                held.append(one.local)
                sharded = True
            else:
                key.append(keyed(func, one))
                held.append(one)
        blocks.append(held if sharded else arg)
    else:
        blocks.append(arg)
        key.append(keyed(func, arg))
