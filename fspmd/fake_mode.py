"""Shapes alone: fake tensors whose failures are told by the error that we raise, and not by torch's log as well.

Tensors on the meta device take far less time. Torch lays out what its kernels give there as on a GPU, unless it is told
of which kind of device they are.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from fspmd.torch_internals import (
    DisableTorchFunction,
    aten_grouped_mm,
    disable_dispatch_modes,
    fake_tensor,
    meta_functions,
)


class FakeMode(fake_tensor.FakeTensorMode):
    """Within it torch works out shapes and dtypes, and its logger says nothing of what fails."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.fake_tensor_converter = _Converter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten_grouped_mm and args[0].dtype is not torch.bfloat16:  # torch's kernels take those, this one not
            given: list[torch.Tensor] = [*args[:3], *(kwargs or {}).values()]
            a, b = given[:2]
            groups = () if a.dim() != b.dim() else a.shape[:1] if a.dim() == 3 else given[2].shape
            with self:
                return a.new_empty((*groups, a.shape[-2], b.shape[-1]))
        if func is _VIEW and all(type(n) is int for n in (*args[0].shape, *args[1])):
            with disable_dispatch_modes():  # torch's own fake view finds some where there are none
                torch.empty_strided(args[0].shape, args[0].stride(), device="meta").view(args[1])
        return super().__torch_dispatch__(func, types, args, kwargs or {})


_VIEW: Final = torch.ops.aten.view.default


class _Converter(fake_tensor.FakeTensorConverter):
    """Makes a fake tensor of one with values, without its gradient, which need not have its shape or dtype any more."""

    def from_real_tensor(self, fake_mode: Any, t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with disable_dispatch_modes(), DisableTorchFunction():
            t = t.detach() if t.is_leaf and t.grad is not None else t
        return super().from_real_tensor(fake_mode, t, *args, **kwargs)


class _NotOurs(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        failed = record.exc_info[2] if record.exc_info else None
        return failed is None or not isinstance(failed.tb_frame.f_locals.get("self"), FakeMode)


logging.getLogger(fake_tensor.__name__).addFilter(_NotOurs())


class _Told(threading.local):
    kind = ""


_told: Final = _Told()


@contextmanager
def meta_tensors_as_on(kind: str) -> Iterator[None]:
    """A block in which tensors on the meta device lie in memory as those on such a device."""
    before, _told.kind = _told.kind, kind
    try:
        yield
    finally:
        _told.kind = before


def install() -> None:
    """Have torch's functions on the meta device ask for the kind."""
    original = meta_functions.device_hint
    meta_functions.device_hint = lambda x: _told.kind if _told.kind and x.is_meta else original(x)
