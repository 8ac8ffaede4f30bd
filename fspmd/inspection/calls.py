"""What a torch function on `Sharded` values is given: layouts, and values that all processes must have alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.digests import digests
from fspmd.global_view.refusals import shown
from fspmd.inspection.histories import DIGEST
from fspmd.inspection.values import is_told, number_of
from fspmd.ops.signatures import parameters
from fspmd.sharded import Sharded
from fspmd.spec import TensorSpec, describe
from fspmd.torch_internals import transforms_active
from fspmd.transport.known_values import ArgumentRow, layout_row

_NUMBERS: Final = frozenset((bool, int, float, complex))
_number_of: Final = cached(typed=True)(number_of)


def arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments of a call, and in the place of a list its entries."""
    given: list[Any] = []
    for x in (*args, *kwargs.values()) if kwargs else args:
        if type(x) is list or type(x) is tuple:
            given += x
        else:
            given.append(x)
    return given


def numbers_of(given: Sequence[Any]) -> tuple[int, ...]:
    """Return a number for each argument. Processes that have equal arguments have equal numbers."""
    plain = [x for x in given if isinstance(x, Tensor) and type(x) is not Sharded]
    if not plain:
        return tuple([_number(x) for x in given])
    told = [] if transforms_active() else [x for x in plain if is_told(x)]
    found = dict(zip(map(id, told), digests(told), strict=True))
    known = {id(x): found.get(id(x), 0) for x in plain}
    return tuple([known[id(x)] if id(x) in known else _number(x) for x in given])


def _number(x: Any) -> int:
    """Return the number of an argument that is no plain tensor."""
    kind = type(x)
    if kind is Sharded:
        return _number_of(x.spec)
    if kind in _NUMBERS and x:  # 0.0 == -0.0
        return _number_of(x)
    return number_of(x)


class _Shown(NamedTuple):
    """What is shown of a tensor that is no `Sharded`."""

    dtype: torch.dtype
    shape: torch.Size


def kept_rows(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: tuple[int, ...]
) -> Callable[[], list[ArgumentRow]]:
    """Return a function that tells the arguments of a call in words. It keeps no tensor."""
    return partial(_rows, func, [_without_tensors(x) for x in (*args, *kwargs.values())], [*kwargs], numbers)


def _rows(func: Any, args: list[Any], names: list[str], numbers: tuple[int, ...]) -> list[ArgumentRow]:
    to = shown(func)
    return [
        layout_row(label, to, x) if type(x) is TensorSpec else ArgumentRow(f"{label} of {to}", _text(x, number), False)
        for label, x, number in zip(_labels(func, args, names), arguments(args, {}), numbers, strict=True)
    ]


def _without_tensors(x: Any) -> Any:
    """Return what is shown of an argument: of a `Sharded` its layout, and of a list that of its entries."""
    kind = type(x)
    if kind is Sharded:
        return x.spec
    if kind in _NUMBERS:
        return x
    if kind is list or kind is tuple:
        return [_without_tensors(each) for each in x]
    return _Shown(x.dtype, x.shape) if isinstance(x, Tensor) else None


def _labels(func: Any, args: list[Any], names: list[str]) -> Iterator[str]:
    known = parameters(func)
    places = [known[i] if i < len(known) else f"argument {i + 1}" for i in range(len(args) - len(names))]
    for name, x in zip((*places, *names), args, strict=True):
        if type(x) is list or type(x) is tuple:
            yield from (f"{name}[{i}]" for i in range(len(x)))
        else:
            yield name


def _text(x: Any, number: int) -> str:
    if type(x) in _NUMBERS:
        return f", {x!r}"
    kind = f", {describe(*x)}" if type(x) is _Shown else ""
    return f"{kind}, {DIGEST} {number & (1 << 64) - 1:016x}"
