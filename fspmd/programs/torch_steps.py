"""The aten steps that a function of torch runs on operands of given kinds, to compare with the steps of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fspmd.cache import cached
from fspmd.ops.traits import without_autocast
from fspmd.programs.fake_tensors import fake_mode
from fspmd.programs.program import device_of
from fspmd.torch_internals import DisableTorchFunction, disable_dispatch_modes
from fspmd.tracing import DispatchMode


class EmptyTensor(NamedTuple):
    """An operand without values. ``strides``: None if it is contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None
    device: torch.device

    def empty(self) -> Tensor:
        """A tensor of this kind."""
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


class _OperandAt(NamedTuple):
    """The operand at a place of a call."""

    place: int


class _AtenStep(NamedTuple):
    """A step. Its arguments hold an `_OperandAt` or a `_AtenStep` for each tensor."""

    target: Any
    args: Any
    kwargs: Any


def runs(function: Callable[..., Any], args: tuple[Any, ...], last: fx.Node) -> bool:
    """Whether ``last`` is the result of the steps that torch runs for a call below autograd, on these very nodes."""
    kinds = [_kind(x) if isinstance(x, fx.Node) else x for x in args]
    return None not in kinds and _equal(_shown(function, *kinds), last, args)


def _kind(node: fx.Node) -> EmptyTensor | None:
    value, device = node.meta.get("value"), device_of(node)
    if value is None or device is None:
        return None
    return EmptyTensor(value.shape, value.dtype, node.meta.get("strides"), device)


def _equal(expected: Any, found: Any, operands: tuple[Any, ...]) -> bool:
    """Whether an argument of a step of torch is that of a step of a program."""
    if isinstance(expected, _OperandAt):
        return found is operands[expected.place]
    if isinstance(expected, _AtenStep):
        return (
            isinstance(found, fx.Node)
            and found.target is expected.target
            and _equal(expected.args, tuple(found.args), operands)
            and _equal([*expected.kwargs.items()], [*found.kwargs.items()], operands)
        )
    if isinstance(expected, (list, tuple)):
        return (
            isinstance(found, (list, tuple))
            and len(expected) == len(found)
            and all(_equal(x, y, operands) for x, y in zip(expected, found, strict=True))
        )
    return type(expected) is type(found) and bool(expected == found)


@cached
def _shown(function: Callable[..., Any], *args: Any) -> Any:
    """The steps of a call; None where torch refuses it. Each `EmptyTensor` stands for an operand."""
    with disable_dispatch_modes(), DisableTorchFunction(), torch.no_grad(), without_autocast(), fake_mode():
        tensors = [x.empty() if isinstance(x, EmptyTensor) else x for x in args]
        seen = _StepsSeen(tensors)
        try:
            with seen:
                result = function(*tensors)
        except (RuntimeError, TypeError, ValueError):
            return None
    return seen.told(result)


class _StepsSeen(DispatchMode):
    """Sees the steps that make each tensor."""

    def __init__(self, operands: list[Any]) -> None:
        super().__init__()
        self.kept: list[Any] = [*operands]  # so that no id is given anew
        self.made: dict[int, Any] = {id(x): _OperandAt(i) for i, x in enumerate(operands) if isinstance(x, Tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = _AtenStep(func, self.told(args), self.told(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):  # a function of several results is none that is looked for
            self.kept.append(out)
            self.made[id(out)] = call
        return out

    def told(self, value: Any) -> Any:
        """A value with the step that made it for each tensor; None for a tensor that no step has made."""
        if isinstance(value, Tensor):
            return self.made.get(id(value))
        if isinstance(value, dict):
            return {name: self.told(entry) for name, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [*map(self.told, value)]
        return value
