"""The key of a call: the parts of its arguments that decide its plan."""

from __future__ import annotations

from math import isnan
from numbers import Integral, Number, Real
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.foreign import refuse_misfit
from fspmd.forms import lies_as_new
from fspmd.rules import Free, free_numbers, row_of
from fspmd.sharded import Sharded, is_plain
from fspmd.transport.local_tensor import BLOCKS, is_simulated

#: types whose values stand for themselves in a key; bool and float do not, since True == 1 == 1.0
CONSTANT: Final = frozenset((str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format))
_PLAIN: Final = CONSTANT | {int}
_NO_NUMBERS: Final = BLOCKS | {slice, bool, tuple, list, dict, torch.Size}
#: functions for which ints may bear on layouts
COUNTING: Final[set[Any]] = set()
#: functions for which no float bears on layouts
FLOATING: Final[set[Any]] = set()
_kinds: dict[Any, frozenset[type]] = {}  # function -> types of Python numbers that never bear on layouts
_free: dict[Any, Free] = {}  # function -> the same, by place and value too


def forget_functions() -> None:
    """Forget the rows of functions, and which numbers bear on layouts: a rule has changed."""
    row_of.cache_clear()
    _kinds.clear()
    _free.clear()
    COUNTING.clear()
    FLOATING.clear()


def hashable(arg: Any) -> Any:
    """Return the part of a key that stands for an argument."""
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
        return float, str(arg)  # 0.0 == -0.0, and nan != nan
    if isinstance(arg, dict):
        return dict, *((name, hashable(value)) for name, value in arg.items())
    if is_plain(arg):
        return kind if is_simulated(arg) else (kind, arg.dtype, *_strides_of(arg), arg.shape)
    if isinstance(arg, (tuple, list)):
        return kind, *map(hashable, arg)
    return kind, arg


def _strides_of(x: Tensor) -> tuple[Any, ...]:
    """Return strides, and whether there is an offset, of a tensor that lies otherwise in memory than a new one."""
    if x.layout is not torch.strided or x.is_nested or type(x) is not Tensor:
        refuse_misfit(x, "a function of Sharded values got")
    if lies_as_new(x):
        return ()
    return x.stride(), bool(x.storage_offset())


def keyed(func: Any, arg: Any, at: int | str | None = None) -> Any:
    """Return the part of a key for the argument at a place, or of a name: its type, if its value bears on no layout."""
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
    if isinstance(arg, Real):  # numbers of NumPy have other types than float
        distinct = not free.distinct or arg in free.distinct or isnan(arg)
        return kind if float in kinds or not distinct else hashable(arg)
    return kind if complex in kinds else hashable(arg)


def _kinds_of(func: Any) -> frozenset[type]:
    kinds = _kinds.get(func)
    if kinds is None:
        free = _free[func] = free_numbers(func)
        kinds = _kinds[func] = free.kinds
        if int not in kinds and not free.places:
            COUNTING.add(func)
        if float in kinds:
            FLOATING.add(func)
    return kinds


def add_argument(func: Any, arg: Any, kind: Any, key: list[Any], blocks: list[Any], name: str | None = None) -> None:
    """Append an argument to the key of a call, and its block, or list of blocks, to ``blocks``."""
    if kind is list or kind is tuple:
        key += kind, len(arg)
        values: list[Any] | None = None
        for place, item in enumerate(arg):
            item_kind = type(item)
            if item_kind is slice:
                start, stop, step = item.start, item.stop, item.step
                if type(start) in _PLAIN and type(stop) in _PLAIN and type(step) in _PLAIN:
                    key += slice, start, stop, step
                else:
                    key.append(hashable(item))
            elif item_kind is Sharded:
                key.append(item.form)
                values = values or [*arg]
                values[place] = item.block
            else:
                key.append(item if item_kind in _PLAIN else keyed(func, item))
        blocks.append(values or arg)
    else:
        key.append(float if kind is float and func in FLOATING else keyed(func, arg, name or len(blocks)))
        blocks.append(arg)
