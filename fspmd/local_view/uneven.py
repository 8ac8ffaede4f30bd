"""Torch calls in a body whose operands are uneven simulated blocks.

A size of such a block is a Python number that differs from rank to rank (`LocalInt`). There are two ways to call:

* Rank by rank, torch sees the plain blocks of one rank after another. Calls that autograd follows run so: torch's
  derivatives need plain sizes (``prod``), or take another path for the empty block of one rank (``max_pool2d``).
* At once, torch sees one value, and each aten op is applied to each rank's block. Writes and draws run
  so, and what must be one value for autograd: views, which may be written into, and results that have to show hooks the
  gradient of their own derivative (`uneven_results.py`). So do calls without a gradient, which a record then has as one
  step, whose result may lie in donated memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.errors import ShapeError, VarianceError
from fspmd.local_view.unbind import bind, unbind
from fspmd.local_view.uneven_results import PARTS, Way, parted, way_of, without_hooks
from fspmd.ops.schemas import facts_of
from fspmd.ops.traits import tensors_in
from fspmd.pairs import Call, apply, call, is_transformed
from fspmd.torch_internals import (
    NO_LEVEL,
    NOT_MAPPED,
    DisableTorchFunction,
    batch_dim_of,
    forward_ad,
    level_of,
    schema_of,
    wrapped_by,
)
from fspmd.tracing import DispatchMode, outside_transforms
from fspmd.transport.frame import Frame, union
from fspmd.transport.local_int import SYMBOLS, LocalInt, local_int
from fspmd.transport.local_tensor import (
    block_type,
    blocks_of,
    call_per_rank,
    common_frame,
    held_frame,
    is_simulated,
    is_uneven,
    local_tensor,
)
from fspmd.variance import storage_of, unwrapped

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_SYMBOLS = frozenset(SYMBOLS)


def numbers_frame(values: Iterable[Any], frame: Frame | None = None) -> Frame | None:
    """Returns the frame of the numbers that differ from rank to rank, in lists and slices too; None without any."""
    for value in values:
        kind = type(value)
        if kind in _SYMBOLS:
            if isinstance(value.node, LocalInt):
                frame = value.node.frame if frame is None else union(frame, value.node.frame)
        elif kind is list or kind is tuple or kind is torch.Size:
            frame = numbers_frame(value, frame)
        elif kind is slice:
            frame = numbers_frame((value.start, value.stop, value.step), frame)
    return frame


def call_with_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: Frame) -> Any:
    """Calls a function without tensors, such as ``torch.zeros(x.shape)``, once per rank."""
    if func.__name__.lstrip("_").startswith("sym_"):  # arithmetic on sizes, which `LocalInt` has
        return func(*args, **kwargs)
    with outside_transforms():
        return call_per_rank(func, args, kwargs, frame, draws=True)


def numbers_to_tensors(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: Frame) -> tuple[Any, Any]:
    """Makes 0-d tensors of the numbers that take part in arithmetic (``x * n``). Sizes stay numbers."""
    dtypes = [value.dtype for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    dtype = next((d for d in dtypes if d.is_floating_point), torch.get_default_dtype())

    def converted(place: int | str, value: Any) -> Any:
        if type(value) not in _SYMBOLS or not isinstance(value.node, LocalInt) or not _takes_tensor(name, place):
            return value
        kind = dtype if type(value) is torch.SymFloat else None
        with outside_transforms():
            return local_tensor([torch.tensor(v, dtype=kind) for v in value.node.at(frame)], frame)

    return (
        tuple(converted(place, value) for place, value in enumerate(args)),
        {key: converted(key, value) for key, value in kwargs.items()},
    )


@cached(maxsize=1024)
def _takes_tensor(name: str, place: int | str) -> bool:
    """Whether an argument of a torch function may be a tensor; sizes and dims may not."""
    if name.strip("_") in _COMPARISONS:
        return False
    if name.startswith("__"):
        return name != "__getitem__" and (name != "__setitem__" or place == 2)
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    kinds: set[str] = set()
    for overload in packet.overloads():
        arguments = schema_of(getattr(packet, overload)).arguments
        if any("Tensor" in str(argument.type) for argument in arguments):
            kinds.update(str(argument.type) for i, argument in enumerate(arguments) if place in (i, argument.name))
    return not kinds.isdisjoint({"Tensor", "Optional[Tensor]"}) and kinds.isdisjoint(
        {"int", "Optional[int]", "List[int]"}
    )


def call_uneven(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], pure: bool) -> Any:
    """Calls a torch function whose operands may be uneven blocks, or sizes that differ from rank to rank.

    A ``pure`` call writes nothing and draws nothing, and its views are those that torch knows. It runs rank by rank if
    autograd follows it, or if it needs plain sizes.
    """
    values = (*args, *kwargs.values())
    frame = uneven_frame(values, numbers_frame(values))
    if frame is None:
        return func(*args, **kwargs)
    followed = torch.is_grad_enabled() and any(differentiated(x, forward=True) for x in tensors_in(values))
    if pure and followed and (out := _rank_by_rank(func, args, kwargs)) is not NotImplemented:
        return out
    name, copies = _name_of(func), _copied_per_rank(frame, args, kwargs)
    try:
        with _SizesApart() if forward_ad._current_level >= 0 else nullcontext():
            return parted(func, name, *copies) if followed and name in PARTS else func(*copies[0], **copies[1])
    except (ShapeError, VarianceError, RuntimeError) as error:
        if pure and (out := _rank_by_rank(func, args, kwargs)) is not NotImplemented:
            return out
        if not isinstance(error, RuntimeError) or forward_ad._current_level < 0:
            raise
        message = str(error).partition("\n")[0]
        raise ShapeError(
            f"{name}() failed on blocks whose sizes differ from rank to rank: {message}. Where its derivative needs "
            "plain sizes, compute a new value in place of a write, y = y * 2 or torch.where; or run it per rank with "
            "rank_map; or let the number of ranks divide the sizes"
        ) from error


class _SizesApart(DispatchMode):
    """Torch makes tensors of sizes for a tangent, such as zeros where a value has none. They get a block per rank."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        frame = numbers_frame((*args, *kwargs.values()))
        if frame is None or block_type(frame) in types:
            return func(*args, **kwargs)
        return call_per_rank(torch.zeros if facts_of(func).absent else func, args, kwargs, frame)


_COMPARISONS: Final = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))  # torch compares with numbers as they are


def _name_of(func: Any) -> str:
    return getattr(getattr(func, "func", func), "__name__", "")  # a partial has the name of its function


def hold_alike(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Gives all operands a block per rank where one has it: the call writes into values that it makes of them."""
    frame = common_frame(map(unwrapped, tensors_in((*args, *kwargs.values()))), None)
    if frame is None:
        return args, kwargs
    return _copied_per_rank(frame, args, kwargs)


def per_rank_like(x: Tensor, like: Tensor) -> Tensor:
    """Gives a cotangent a block for each rank that has a block of the output: torch takes sizes from the cotangent."""
    frame = held_frame(unwrapped(like))
    return x if frame is None else next(hold_each((x,), call("per_rank", frame.mesh, frame.axes)))


def _copied_per_rank(frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    copies = call("per_rank", frame.mesh, frame.axes)
    return tuple(hold_each(args, copies)), dict(zip(kwargs, hold_each(kwargs.values(), copies), strict=True))


def differentiated(x: Tensor, forward: bool = False) -> bool:
    """Whether reverse mode, or with ``forward`` also forward mode, follows a value, at any level of transforms."""
    forward = forward and forward_ad._current_level >= 0
    while not x.requires_grad:
        if level_of(x) == NO_LEVEL:
            return False
        if forward and batch_dim_of(x) == NOT_MAPPED:  # a derivative wraps it
            return True
        x = wrapped_by(x)
    return True


def call_rank_by_rank(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a pure function on the plain blocks of one rank after another, which have the same shape.

    Returns NotImplemented where no operand has blocks, a result is a view, or a result has another shape on each rank.
    """
    if common_frame(map(unwrapped, tensors_in((*args, *kwargs.values()))), None) is None:
        return NotImplemented
    out = _rank_by_rank(func, args, kwargs)
    return NotImplemented if uneven_frame((out,)) is not None else out


def _rank_by_rank(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function on the plain blocks of one rank after another.

    Returns NotImplemented where a result is a view, which would lose its base. So too where hooks on the result must
    see a gradient that comes through its own derivative, and torch can differentiate the blocks of all ranks at once.
    """
    frame = common_frame(
        map(unwrapped, tensors_in((*args, *kwargs.values()))), numbers_frame((*args, *kwargs.values()))
    )
    assert frame is not None  # an uneven block or number is among the arguments
    way: Way = "rank by rank"
    if torch.is_grad_enabled() and not is_transformed():
        way = way_of(
            func, args, kwargs, functools.partial(_of_first, frame), functools.partial(_copied_per_rank, frame)
        )
    if way == "at once":
        return NotImplemented
    results = []
    for row, named in _rows(frame, args, kwargs):
        out = func(*row, **named)
        if not _storages((out,)).isdisjoint(_storages((*row, *named.values()))):
            return NotImplemented
        results.append(out)
    out = _bound(results, frame)
    return without_hooks(out, _name_of(func)) if way == "without hooks" else out


def _rows(
    frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yields the arguments of each rank."""
    columns = [_rank_column(value, frame) for value in (*args, *kwargs.values())]
    for row in zip(*columns, strict=True):
        yield row[: len(args)], dict(zip(kwargs, row[len(args) :], strict=True))


def _of_first(frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return next(_rows(frame, args, kwargs))


def _rank_column(value: Any, frame: Frame) -> Sequence[Any]:
    if isinstance(value, Tensor):
        if not is_simulated(unwrapped(value)):
            if not differentiated(value, forward=True):
                return (value,) * frame.volume
            value = apply(value, call("per_rank", frame.mesh, frame.axes))  # each rank's gradient is its own
        return unbind(value, frame)
    if type(value) in (list, tuple, torch.Size):
        columns = [_rank_column(part, frame) for part in value]
        kind = list if type(value) is list else tuple
        return [kind(row) for row in zip(*columns, strict=True)] if columns else [value] * frame.volume
    return value.node.at(frame) if type(value) in _SYMBOLS else (value,) * frame.volume


def _storages(values: Iterable[Any]) -> set[int]:
    return set(map(storage_of, tensors_in(values)))


def _bound(results: list[Any], frame: Frame) -> Any:
    first = results[0]
    if isinstance(first, Tensor):
        return bind(tuple(results), frame)
    if isinstance(first, (list, tuple)):
        if len({len(result) for result in results}) > 1:
            raise VarianceError("a torch function gave a different number of tensors on different ranks; use rank_map")
        return type(first)([_bound(list(column), frame) for column in zip(*results, strict=True)])
    return first if all(result == first for result in results) else NotImplemented


def hold_each(values: Iterable[Any], copies: Call) -> Iterator[Any]:
    """Yields the values; each tensor, in lists and tuples too, has a block for each rank of the axes of ``copies``."""
    for value in values:
        if isinstance(value, Tensor):
            have = held_frame(unwrapped(value))
            yield value if have is not None and set(copies.axes).issubset(have.axes) else apply(value, copies)
        elif type(value) is list or type(value) is tuple:
            yield type(value)(hold_each(value, copies))
        else:
            yield value


def uneven_frame(values: Iterable[Any], frame: Frame | None = None) -> Frame | None:
    """Returns the common frame of the uneven blocks among the values, or None."""
    for x in map(unwrapped, tensors_in(values)):
        if is_uneven(x) and (own := held_frame(x)) is not None:
            frame = own if frame is None else union(frame, own)
    return frame


def rank_number(x: Tensor) -> Any:
    """Returns a 0-d integer tensor as a Python int; in a simulation, one that has a value per rank."""
    with DisableTorchFunction():
        frame = held_frame(x)
        return int(x) if frame is None else local_int(frame, [int(block) for block in blocks_of(x)])
