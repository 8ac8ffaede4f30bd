"""Fake tensors, which have shapes and no values. Torch's log stays silent about their errors, since fspmd raises them.

Tensors on the meta device are far faster. Torch lays out the results of its kernels there as on a GPU, unless it is
given another kind of device.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from fspmd.torch_internals import (
    DataDependentOutputException,
    DisableTorchFunction,
    DynamicOutputShapeException,
    aten_grouped_mm,
    disable_dispatch_modes,
    fake_tensor,
    meta_functions,
)


class UnknownValues(RuntimeError):
    """A function on fake tensors needs values, for its result or for the shape of its result.

    Attributes:
        func: The aten function.
        for_shape: Whether the shape depends on the values.
    """

    def __init__(self, func: Any, for_shape: bool) -> None:
        super().__init__(f"{func} needs values")
        self.func = func
        self.for_shape = for_shape


class FakeMode(fake_tensor.FakeTensorMode):
    """A mode in which torch computes shapes and dtypes. Its logger does not report errors."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.fake_tensor_converter = _Converter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten_grouped_mm and args[0].dtype is not torch.bfloat16:  # only torch's real kernels take others
            operands: list[torch.Tensor] = [*args[:3], *(kwargs or {}).values()]
            a, b = operands[:2]
            groups = () if a.dim() != b.dim() else a.shape[:1] if a.dim() == 3 else operands[2].shape
            with self:
                return a.new_empty((*groups, a.shape[-2], b.shape[-1]))
        if func is _VIEW and all(type(n) is int for n in (*args[0].shape, *args[1])):
            with disable_dispatch_modes():  # the fake view accepts some views that do not exist; this raises for them
                torch.empty_strided(args[0].shape, args[0].stride(), device="meta").view(args[1])
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs or {})
        except DataDependentOutputException as error:
            raise UnknownValues(error.func, False) from error
        except DynamicOutputShapeException as error:
            raise UnknownValues(error.func, True) from error
        if isinstance(out, torch.Tensor) and torch.Tag.pointwise in func.tags and (func, out.dtype) not in _RIGHT:
            return self._laid_out(args, out)
        return out

    def _laid_out(self, args: Any, out: torch.Tensor) -> torch.Tensor:
        """The result of a function of elements, laid out as its kernel does.

        Torch computes some such results by several functions, or in float32 for operands of 16 bits. An expanded
        operand is then laid out anew. No kernel does that.
        """
        operands = [x for x in args if isinstance(x, torch.Tensor)]
        like = _LIKE.get(len(operands))
        is_expanded = any(0 in x.stride() for x in operands)
        if not is_expanded or like is None or any(x is out or x.dtype is not out.dtype for x in operands):
            return out
        with self:
            wide = (torch.empty_strided(x.shape, x.stride(), dtype=_WIDE, device=x.device) for x in operands)
            strides = like(*wide).stride()
            if strides == out.stride():
                return out
            return torch.empty_strided(out.shape, strides, dtype=out.dtype, device=out.device)


_VIEW: Final = torch.ops.aten.view.default
_WIDE: Final = torch.float32
#: by the number of operands, a function of elements whose shape function lays the result out as kernels do, in `_WIDE`
_LIKE: Final[dict[int, Any]] = {2: torch.ops.aten.mul.Tensor, 3: torch.ops.aten.addcmul.default}
_RIGHT: Final = {(func, _WIDE) for func in _LIKE.values()}


class _Converter(fake_tensor.FakeTensorConverter):
    """Converts a real tensor without its gradient, which may have another shape or dtype by now."""

    def from_real_tensor(self, fake_mode: Any, t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with disable_dispatch_modes(), DisableTorchFunction():
            t = t.detach() if t.is_leaf and t.grad is not None else t
        return super().from_real_tensor(fake_mode, t, *args, **kwargs)


class _NotOurs(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        failed = record.exc_info[2] if record.exc_info else None
        return failed is None or not isinstance(failed.tb_frame.f_locals.get("self"), FakeMode)


logging.getLogger(fake_tensor.__name__).addFilter(_NotOurs())


class _Device(threading.local):
    kind = ""


_device: Final = _Device()


@contextmanager
def meta_tensors_as_on(kind: str) -> Iterator[None]:
    """Lay out tensors on the meta device as on a device of this kind, within a ``with`` block."""
    before, _device.kind = _device.kind, kind
    try:
        yield
    finally:
        _device.kind = before


def install() -> None:
    """Make torch's functions on the meta device ask for the kind."""
    original = meta_functions.device_hint
    meta_functions.device_hint = lambda x: _device.kind if _device.kind and x.is_meta else original(x)
