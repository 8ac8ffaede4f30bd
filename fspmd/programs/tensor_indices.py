"""``x[i]`` with a tensor ``i``, and ``one_hot``: torch reads values for them, and a record uses functions that do not.

If ``i`` is a tensor of one number, ``x[i]`` is a view in torch and a copy in a record. A write into either raises
`RecordError` while both are in use.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from fspmd.local_view.indexing import INTEGERS, as_index
from fspmd.sharded import Sharded, is_plain

_VALUES: Final[Any] = (Tensor, Sharded)


def _one_hot(records: Any, tensor: Any, num_classes: int = -1) -> Any:
    if not is_plain(tensor) or tensor.dtype is not torch.int64 or not _is_value(records, tensor):
        return NotImplemented
    if type(num_classes) is not int or num_classes <= 0:
        return NotImplemented
    classes = tensor.unsqueeze(-1)
    zeros = torch.zeros_like(classes.expand(*[-1] * tensor.dim(), num_classes), memory_format=torch.contiguous_format)
    return zeros.scatter(-1, classes, 1)


def _getitem(records: Any, x: Any, index: Any) -> Any:
    if (parts := _with_dims(records, x, index)) is None:
        return NotImplemented
    entries, dim, _ = parts
    if dim is None:
        return x[entries]
    out = x[entries].squeeze(dim)
    records.copied(_local(out), _local(x))
    return out


def _select(records: Any, input: Any, dim: int, index: Any) -> Any:
    if not isinstance(input, _VALUES) or type(dim) is not int or not -input.dim() <= dim < input.dim():
        return NotImplemented
    return _getitem(records, *as_index(input, dim, index))


def _narrow(records: Any, input: Any, dim: Any, start: Any, length: Any) -> Any:
    if type(length) is not int or not (is_plain(input) and is_plain(start) and records.is_constant(start)):
        return NotImplemented
    with records.placing():
        return torch.narrow(input, dim, start, length)


def _setitem(records: Any, x: Any, index: Any, value: Any) -> Any:
    if (parts := _with_dims(records, x, index)) is None:
        return NotImplemented
    entries, dim, after = parts
    if isinstance(value, _VALUES) and dim is not None:
        value = value.to(x.dtype)
        value = value.unsqueeze(value.dim() - after) if value.dim() >= after else value
    x[entries] = value
    return None


def _with_dims(records: Any, x: Any, index: Any) -> tuple[tuple[Any, ...], int | None, int] | None:
    """The index with its numbers as tensors of one dim, the place of that dim in the result, and the dims after it.

    Beside lists and tensors of integers the new dims broadcast with theirs, and the place is None. Torch takes numbers
    first: ``x[:, k][i]``. Without other entries between them ``x[i, k[None]]`` is the same.

    Returns None if no number in the index is a value of the record, or if the index has entries of other kinds, or
    lists or tensors that do not stand together with the numbers.
    """
    entries = index if isinstance(index, tuple) else (index,)
    if not isinstance(x, _VALUES) or not any(_is_number(records, entry) for entry in entries):
        return None
    rest = x.dim() - sum(entry is not None and entry is not Ellipsis for entry in entries)  # dims without an entry
    extended: list[Any] = []
    places: list[int] = []
    dims = 0  # dims of the result, plus one for each of the tensors
    for entry in entries:
        if _is_number(records, entry):
            places.append(dims)
        elif not (entry is None or entry is Ellipsis or type(entry) is slice or _is_int(entry) or _is_array(entry)):
            return None
        extended.append(entry.long().unsqueeze(0) if _is_number(records, entry) else entry)
        dims += rest if entry is Ellipsis else not _is_int(entry)
    arrays = [i for i, entry in enumerate(extended) if _is_array(entry)]  # lists and tensors, and the numbers
    if len(arrays) > len(places):
        between = extended[arrays[0] : arrays[-1]]
        return (
            None
            if any(not _is_array(entry) and not _is_int(entry) for entry in between)
            else (tuple(extended), None, 0)
        )
    together = places[-1] - places[0] < len(places)
    dim = places[0] if together else 0
    after = dims + (0 if any(entry is Ellipsis for entry in entries) else rest) - len(places) - dim
    return tuple(extended), dim, after


def _is_number(records: Any, x: Any) -> bool:
    return isinstance(x, _VALUES) and not x.dim() and x.dtype in INTEGERS and _is_value(records, x)


def _is_array(x: Any) -> bool:
    """Whether an entry of an index is a list or a tensor of integers that has dims."""
    if isinstance(x, _VALUES):
        return x.dim() > 0 and x.dtype in INTEGERS
    return type(x) is list and bool(x) and all(map(_is_int, x))


def _is_int(x: Any) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool)


def _is_value(records: Any, x: Any) -> bool:
    return isinstance(x, _VALUES) and not records.is_constant(_local(x))


def _local(x: Any) -> Tensor:
    return x.local if type(x) is Sharded else x


#: replacements by torch function: functions of the recorder and the arguments
REPLACEMENTS: Final[dict[Any, Callable[..., Any]]] = {
    F.one_hot: _one_hot,
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
    Tensor.select: _select,
    torch.select: _select,
    Tensor.narrow: _narrow,
    torch.narrow: _narrow,
}
