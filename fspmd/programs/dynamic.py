"""Functions of torch that read values of tensors where others need none: a record has those others.

``x[i]`` with a tensor ``i`` of one number is a view in torch; here it is a copy, so what either's memory is written
into while both are there is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from fspmd.errors import RecordError
from fspmd.programs.escapes import line

_INTEGERS: Final = (torch.int8, torch.int16, torch.int32, torch.int64)
_WHOLE: Final = slice(None)


def _one_hot(records: Any, tensor: Any, num_classes: int = -1) -> Any:
    if type(num_classes) is not int or num_classes <= 0 or not _is_value(records, tensor):
        return NotImplemented
    classes = tensor.unsqueeze(-1)
    zeros = torch.zeros_like(classes.expand(*[-1] * tensor.dim(), num_classes), memory_format=torch.contiguous_format)
    return zeros.scatter(-1, classes, 1)


def _getitem(records: Any, x: Tensor, index: Any) -> Any:
    found = _taken(records, x, index)
    if found is None:
        return NotImplemented
    view, at, dim, _ = found
    out = view[at].squeeze(dim)
    records.copied(out, x)
    return out


def _select(records: Any, input: Any, dim: int, index: Any) -> Any:
    if not isinstance(input, Tensor) or type(dim) is not int or not -input.dim() <= dim < input.dim():
        return NotImplemented
    return _getitem(records, input, (*[_WHOLE] * (dim % input.dim()), index))


def _setitem(records: Any, x: Tensor, index: Any, value: Any) -> Any:
    found = _taken(records, x, index)
    if found is None:
        return NotImplemented
    view, at, _, after = found
    if isinstance(value, Tensor) and value.dim() > after:
        value = value.unsqueeze(value.dim() - after)
    view[at] = value
    return None


def _taken(records: Any, x: Any, index: Any) -> tuple[Tensor, tuple[Any, ...], int, int] | None:
    """``x[index]`` as a view, an index of it by tensors of one dim, that dim in the result, and how many follow it.

    None where nothing in the index has a value that a record cannot know, or where other things are in it than
    numbers, slices and None.
    """
    entries = index if isinstance(index, tuple) else (index,)
    if not isinstance(x, Tensor) or not any(_is_number(records, one) for one in entries):
        return None
    used = sum(one is not None and one is not Ellipsis for one in entries)
    basic: list[Any] = []
    at: list[Any] = []
    for one in entries:
        if _is_number(records, one):
            basic.append(_WHOLE)
            at.append(one.long().unsqueeze(0))
        elif one is Ellipsis:
            basic.append(one)
            at += [_WHOLE] * (x.dim() - used)
        elif one is None or type(one) is slice:
            basic.append(one)
            at.append(_WHOLE)
        elif type(one) is int:
            basic.append(one)
        else:
            return None
    places = [i for i, one in enumerate(at) if one is not _WHOLE]
    together = places[-1] - places[0] < len(places)
    view = x[tuple(basic)]
    dim = places[0] if together else 0
    return view, tuple(at), dim, view.dim() - len(places) - dim


def _is_number(records: Any, x: Any) -> bool:
    return isinstance(x, Tensor) and not x.dim() and x.dtype in _INTEGERS and _is_value(records, x)


def _is_value(records: Any, x: Any) -> bool:
    return isinstance(x, Tensor) and not records.is_constant(x)


#: by torch function what is recorded in its place, of the recorder and its arguments
INSTEAD: Final[dict[Any, Callable[..., Any]]] = {
    F.one_hot: _one_hot,
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
    Tensor.select: _select,
    torch.select: _select,
}


def written_while_copied(name: str) -> RecordError:
    """The refusal of a write that a view in torch would see, and a copy does not."""
    return RecordError(
        f"jit cannot record {name}(), which writes into x or x[i], where the tensor i has one number: while "
        f"y = x[i] is there it is a view in torch, and a copy in a record; write x[i] = x[i] + 1 for x[i] += 1, and "
        f"y = x[i].clone() to keep what was there{line()}"
    )
