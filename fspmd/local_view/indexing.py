"""Indexing by integers that differ from rank to rank: ``x[axis_index("x")]``, ``x[i : i + 2]``, ``x.narrow(0, i, 2)``.

Torch would ask such a 0-d tensor for one Python int. An index without other index tensors goes through ``aten.index``,
which takes 0-d tensors as they are. The bound of a slice, and an index beside other index tensors, becomes a number per
rank.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fspmd.errors import VarianceError
from fspmd.local_view.modes import BodyMode
from fspmd.local_view.uneven import (
    call_uneven,
    call_with_numbers,
    hold_alike,
    numbers_frame,
    numbers_to_tensors,
    rank_number,
)
from fspmd.messages import written_in_place
from fspmd.ops.traits import OPS, learn
from fspmd.saved_tensor_hooks import without_saved_tensor_hooks
from fspmd.spec import describe
from fspmd.torch_internals import transforms_active
from fspmd.tracing import recorder
from fspmd.transport.frame import UNEVEN
from fspmd.transport.local_tensor import blocks_of, is_simulated, refuse_python_value
from fspmd.variance import get_variance

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
_SELECTS = frozenset((Tensor.select, torch.select))
_START = 2  # of narrow, among its arguments
_BY_NUMBER = frozenset((Tensor.narrow, torch.narrow, *_SELECTS))
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
INDEXING = frozenset((Tensor.__getitem__, Tensor.__setitem__, *_BY_NUMBER))


def _is_number(entry: Any) -> bool:
    return isinstance(entry, Tensor) and entry.ndim == 0 and entry.dtype in INTEGERS


def _differs(entry: Any) -> bool:
    return _is_number(entry) and (is_simulated(entry) or bool(get_variance(entry).varying))


def _number(entry: Any) -> Any:
    """Makes a number of a 0-d integer tensor: one per rank where it differs from rank to rank."""
    if _differs(entry):
        return rank_number(entry)
    return int(entry) if _is_number(entry) and recorder() is None else entry


def _place(entry: Any) -> Any:
    """Makes a number of the start of a `narrow`. A record may keep it as a tensor, since no shape follows from it."""
    records = recorder() if _differs(entry) else None
    with nullcontext() if records is None else records.placing():
        return _number(entry)


def index_by_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[...]``, ``x[...] = value``, ``x.narrow(dim, start, length)`` or ``x.select(dim, i)``."""
    if func in _SELECTS and any(map(_differs, (*args, *kwargs.values()))):
        return index_by_tensor(Tensor.__getitem__, as_index(*args, **kwargs), {})
    if func in _BY_NUMBER:
        args = tuple([_place(a) if i == _START else _number(a) for i, a in enumerate(args)])
        kwargs = {key: _place(a) if key == "start" else _number(a) for key, a in kwargs.items()}
        return call_uneven(func, args, kwargs, pure=False)
    x, index, *value = args
    entries = tuple(map(_bounds, index)) if isinstance(index, tuple) else (_bounds(index),)
    alone = [_differs(entry) for entry in entries]
    if not any(alone):
        entries = tuple(map(_number, entries))
        return call_uneven(func, (x, entries if isinstance(index, tuple) else entries[0], *value), {}, pure=False)
    is_copy = bool(value) or recorder() is not None or transforms_active()  # else it is a view, as torch's is
    if is_copy and not any(_advanced(e) for e, differs in zip(entries, alone, strict=True) if not differs):
        return _by_aten(x, entries, value)
    return _by_selecting(func, x, entries, alone, value)


def as_index(input: Any, dim: int, index: Any) -> tuple[Any, tuple[Any, ...]]:
    """Writes ``input.select(dim, index)`` as the arguments of ``[]``."""
    return input, (*[slice(None)] * range(input.ndim)[dim], index)


def _by_selecting(func: Any, x: Tensor, entries: tuple[Any, ...], alone: list[bool], value: list[Any]) -> Any:
    """Selects by the integers that differ, each a number per rank, as views; then applies the rest of the index."""
    dims = _dims(x, entries)
    for entry, differs, dim in reversed(list(zip(entries, alone, dims, strict=True))):
        if differs:
            x = call_uneven(Tensor.select, (x, dim, rank_number(entry)), {}, pure=False)
    rest = tuple(entry for entry, differs in zip(entries, alone, strict=True) if not differs)
    return call_uneven(func, (x, rest, *value), {}, pure=False)


def _dims(x: Tensor, entries: tuple[Any, ...]) -> list[int]:
    """Returns the dim of ``x`` at which each entry of an index begins."""
    taken = [_width(entry) for entry in entries]
    widths = [x.ndim - sum(taken) if entry is Ellipsis else width for entry, width in zip(entries, taken, strict=True)]
    return [sum(widths[:i]) for i in range(len(widths))]


def _width(entry: Any) -> int:
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    return entry.ndim if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8) else 1


def _bounds(entry: Any) -> Any:
    if type(entry) is not slice:
        return entry
    return slice(*map(_number, (entry.start, entry.stop, entry.step)))


def _advanced(entry: Any) -> bool:
    return not (entry is None or entry is Ellipsis or isinstance(entry, (int, slice, torch.SymInt)))


def _by_aten(x: Tensor, entries: tuple[Any, ...], value: list[Any]) -> Any:
    plain = tuple(slice(None) if isinstance(entry, Tensor) else entry for entry in entries)
    view = call_uneven(Tensor.__getitem__, (x, plain), {}, pure=False)
    tensors: list[Tensor | None] = []
    dim = 0
    for place, entry in enumerate(entries):
        if entry is Ellipsis:
            dim = view.ndim - sum(e is None or isinstance(e, (slice, Tensor)) for e in entries[place + 1 :])
        elif isinstance(entry, Tensor):
            tensors += [None] * (dim - len(tensors))
            tensors.append(entry.long())
            dim += 1
        elif not isinstance(entry, (int, torch.SymInt)) or isinstance(entry, bool):
            dim += 1
    if not value:
        with without_saved_tensor_hooks():  # this copy stands for a view, which saves no index for backward
            out = torch.ops.aten.index.Tensor(view, tensors)
        if (records := recorder()) is not None:
            records.copied(out, x)
        return out
    source = value[0] if isinstance(value[0], Tensor) else torch.tensor(value[0], device=x.device)
    source = source.to(x.dtype)
    while source.ndim > view.ndim - sum(t is not None for t in tensors) and source.shape[0] == 1:
        source = source.squeeze(0)
    torch.ops.aten.index_put_(view, tensors, source)
    return None


def _agreed(x: Any, asking: str) -> Any:
    """Returns the value that all ranks have, such as after a psum, in lists too: Python may ask for it."""
    if isinstance(x, (list, tuple)) and not isinstance(x, torch.Size):
        return type(x)([_agreed(entry, asking) for entry in x])
    first, *others = blocks_of(x)
    if not all(torch.equal(first, other) for other in others):
        refuse_python_value(x, asking)
    return first


class IndexMode(BodyMode):
    """The mode of an unchecked simulated body, in which no tracker sees the torch calls."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in INDEXING:
            return index_by_tensor(func, args, kwargs)
        op = OPS.get(func) or learn(func)
        if op.python_value is not None and op.python_value(*args, **kwargs):
            args = tuple(_agreed(arg, op.shown) for arg in args)
        if op.in_copies:
            args, kwargs = hold_alike(args, kwargs)
        if func == _SET_DATA and is_simulated(args[1]) and not is_simulated(args[0]):  # torch would read no memory
            shown = describe(args[0].dtype, args[0].shape)
            raise VarianceError(written_in_place(op.shown, shown, args[1].frame.axes, op.advice))
        if not UNEVEN or op.backward:
            return func(*args, **kwargs)
        frame = numbers_frame((*args, *kwargs.values()))
        if frame is not None:
            if not any(isinstance(arg, Tensor) for arg in (*args, *kwargs.values())):
                return call_with_numbers(func, args, kwargs, frame)
            args, kwargs = numbers_to_tensors(op.name, args, kwargs, frame)
        return call_uneven(func, args, kwargs, op.pure)
