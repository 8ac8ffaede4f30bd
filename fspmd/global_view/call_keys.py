"""How a call becomes a key: what of its arguments decides its plan."""

from __future__ import annotations

from math import isnan
from numbers import Integral, Number, Real
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.foreign import refuse_misfit
from fspmd.rules import Free, free_numbers
from fspmd.sharded import Sharded, is_plain
from fspmd.transport.local_tensor import BLOCKS, is_simulated

#: of types whose values stand for themselves in a key; True and 1.0 are equal to 1, so bool and float are none
CONSTANT: Final = frozenset((str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format))
_PLAIN: Final = CONSTANT | {int}
_NO_NUMBERS: Final = BLOCKS | {slice, bool, tuple, list, dict, torch.Size}
#: functions for which ints may bear on layouts
COUNTING: Final[set[Any]] = set()
_kinds: dict[Any, frozenset[type]] = {}  # of functions, kinds of Python numbers that do not
_free: dict[Any, Free] = {}  # the same, and what else is known of them


def forget_functions() -> None:
    """What numbers mean to each: a rule has changed."""
    _kinds.clear()
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
        return arg.form
    if kind is float and (arg == 0 or isnan(arg)):
        return float, str(arg)  # two zeros, and nan, which equals nothing
    if isinstance(arg, dict):
        return dict, *((name, hashable(value)) for name, value in arg.items())
    if is_plain(arg):
        return kind if is_simulated(arg) else (kind, arg.dtype, *_strides_of(arg), arg.shape)
    if isinstance(arg, (tuple, list)):
        return kind, *map(hashable, arg)
    return kind, arg


def _strides_of(x: Tensor) -> tuple[Any, ...]:
    """Of a tensor that lies otherwise than a new one, as results may."""
    if x.layout is not torch.strided or x.is_nested:
        refuse_misfit(x, "a function of Sharded values got")
    if x.is_contiguous() and not x.storage_offset():
        return ()
    return x.stride(), bool(x.storage_offset())


def keyed(func: Any, arg: Any, at: int | str | None = None) -> Any:
    """What an argument of a function, at a place or of a name, is in a key: its type, if its value does not count."""
    kind = type(arg)
    if kind in _NO_NUMBERS:
        return hashable(arg)
    kinds = _kinds.get(func) or _kinds_of(func)
    if kind in kinds:
        return kind
    if not isinstance(arg, Number):
        return hashable(arg)
    free = _free.get(func) or free_numbers(func)
    if isinstance(arg, Integral):
        return kind if int in kinds or (at in free.places and arg not in free.distinct) else hashable(arg)
    if isinstance(arg, Real):  # NumPy's have types of their own
        distinct = not free.distinct or arg in free.distinct or isnan(arg)
        return kind if float in kinds or not distinct else hashable(arg)
    return kind if complex in kinds else hashable(arg)


def _kinds_of(func: Any) -> frozenset[type]:
    found = _kinds.get(func)
    if found is None:
        free = _free[func] = free_numbers(func)
        found = _kinds[func] = free.kinds
        if int not in found and not free.places:
            COUNTING.add(func)
    return found


def add_argument(func: Any, arg: Any, kind: Any, key: list[Any], blocks: list[Any], name: str | None = None) -> None:
    """Append what an argument is in the key of a call, and its block or blocks."""
    if kind is list or kind is tuple:
        key += kind, len(arg)
        held: list[Any] | None = None
        for place, one in enumerate(arg):
            what = type(one)
            if what is slice:
                start, stop, step = one.start, one.stop, one.step
                if type(start) in _PLAIN and type(stop) in _PLAIN and type(step) in _PLAIN:
                    key += slice, start, stop, step
                else:
                    key.append(hashable(one))
            elif what is Sharded:
                key.append(one.form)
                held = held or [*arg]
                held[place] = one.block
            else:
                key.append(one if what in _PLAIN else keyed(func, one))
        blocks.append(held or arg)
    else:
        free = kind is float and float in (_kinds.get(func) or _kinds_of(func))
        key.append(float if free else keyed(func, arg, name or len(blocks)))
        blocks.append(arg)
