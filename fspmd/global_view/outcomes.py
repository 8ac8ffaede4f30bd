"""What a call gives for global tensors: shapes and dtypes, without data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from fspmd.spec import TensorSpec

Shape = tuple[int, ...]
#: where a tensor stands: its number among the arguments (positional ones first), and in a list there
Place = int | tuple[int, int]


def on_one_element(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[tuple[Place, TensorSpec]]
) -> Tensor | None:
    """What a function of elements gives for global tensors without data, or None: the meta device takes far longer."""
    shape = _broadcast([spec.shape for _, spec in operands])
    if shape is None or torch._C._is_any_autocast_enabled():
        return None
    try:
        out = _on(
            lambda spec: torch.ones((1,) * spec.ndim, dtype=spec.dtype, device="cpu"), func, args, kwargs, operands
        )
    except Exception:  # which the meta device tells better
        return None
    if not isinstance(out, Tensor) or out.dim() != len(shape) or out._is_view():
        return None
    return out.new_empty(shape, device="meta")


def like_first(args: tuple[Any, ...], kwargs: dict[str, Any], specs: Sequence[TensorSpec]) -> Tensor | None:
    """The result of a function that keeps shape and dtype, or None where its arguments may say otherwise."""
    first = specs[0]
    alike = first.dtype.is_floating_point and all(spec.dtype is first.dtype for spec in specs)
    if not alike or torch._C._is_any_autocast_enabled():
        return None
    if any(isinstance(arg, torch.dtype) or arg is True for arg in (*args, *kwargs.values())):
        return None
    return torch.empty(first.shape, dtype=first.dtype, device="meta")


def _broadcast(shapes: Sequence[Shape]) -> Shape | None:
    found = []
    for sizes in itertools.zip_longest(*map(reversed, shapes), fillvalue=1):
        wide = {size for size in sizes if size != 1}
        if len(wide) > 1:
            return None
        found.append(wide.pop() if wide else 1)
    return tuple(reversed(found))


def on_meta(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[tuple[Place, TensorSpec]]
) -> Any:
    """What the call gives for global tensors without data."""
    mesh = operands[0][1].mesh
    try:
        try:
            return _on(_empty_on("meta"), func, args, kwargs, operands)
        except NotImplementedError:  # a move to another device, or a kernel that only fake tensors know
            with FakeTensorMode():
                return _on(_empty_on(mesh.device_type), func, args, kwargs, operands)
    except (
        NotImplementedError,
        DataDependentOutputException,
        DynamicOutputShapeException,
    ):  # the shape of the result depends on values
        return None


def _empty_on(device: str) -> Callable[[TensorSpec], Tensor]:
    return lambda spec: torch.empty(spec.shape, dtype=spec.dtype, device=device)


def _on(
    make: Callable[[TensorSpec], Tensor],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Sequence[tuple[Place, TensorSpec]],
) -> Any:
    given = (*args, *kwargs.values())
    values = [list(value) if isinstance(value, (list, tuple)) else value for value in given]
    for place, spec in operands:
        if isinstance(place, tuple):
            values[place[0]][place[1]] = make(spec)
        else:
            values[place] = make(spec)
    values = [type(old)(new) if type(old) is tuple else new for old, new in zip(given, values, strict=True)]
    return func(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
