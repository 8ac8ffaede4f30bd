"""Tensors that a recorded function closes over: whether they are still of the kind with which they were recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fspmd.programs.keys import guard
from fspmd.transport.local_tensor import blocks_of


class Closed:
    """Some tensors, and their kinds when this was made.

    Values are read anew in every replay, but shapes, dtypes, devices and how a tensor lies in memory are constants of
    the record, and so is that it had no gradient; ``module.to(dtype)`` and ``x.data = y`` change them.
    """

    __slots__ = ("_check", "_forms", "_still", "tensors")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)
        self._forms = list(map(_form, self.tensors))
        self._still = [x for x in self.tensors if _may_thaw(x)] if torch.is_grad_enabled() else []
        self._check = _check_of(self.tensors)

    def __bool__(self) -> bool:
        return bool(self.tensors)

    def holds(self) -> bool:
        """Whether they are as they were."""
        if not self.tensors or self._check(*self.tensors):
            return True
        if next(self.changes(), None) is not None:
            return False
        self._check = _check_of(self.tensors)  # some have no gradient anymore, which they need not
        return True

    def changes(self) -> Iterator[str]:
        """What has become of those that are not."""
        for x, was in zip(self.tensors, self._forms, strict=True):
            now, shape = _form(x), was["shape"][0]
            for name, value in was.items():
                if now[name] != value:
                    told = " -> ".join(str(one[name][0]) for one in (was, now))
                    yield f"a tensor of shape {shape} that it closes over: {name} {told}"
        for x in self._still:
            if x.requires_grad:
                yield f"a tensor of shape {tuple(x.shape)} that it closes over: requires_grad False -> True"


def _form(x: Tensor) -> dict[str, list[Any]]:
    blocks = blocks_of(x)
    return {
        "shape": [tuple(one.shape) for one in blocks],
        "dtype": [one.dtype for one in blocks],
        "device": [one.device for one in blocks],
        "strides": [one.stride() for one in blocks],
    }


def _check_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """What tells, soon, that all are as they are; it may miss it."""
    return (tensors and guard(tensors)) or _unknown


def _unknown(*tensors: Tensor) -> bool:
    return False


def _may_thaw(x: Tensor) -> bool:
    return x.is_leaf and not x.requires_grad and (x.is_floating_point() or x.is_complex())
