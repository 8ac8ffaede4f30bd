"""The dtypes of a training step, as data."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from fspmd.errors import ArgumentError
from fspmd.messages import described


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes in which parameters are kept and used, and in which gradients are summed.

    Attributes:
        param: of stored parameters, which `accumulate` and `gathered` check. Gradients end in it, so that an optimizer
            updates in it.
        compute: of gathered parameters, and so of the computation. Parameters are cast before they move.
        reduce: in which gradients are summed over ranks. They move in it.
        accumulate: in which gradients are summed over microbatches.

    Raises:
        ArgumentError: one of them is no floating dtype.

    >>> Precision(compute=torch.bfloat16).reduce
    torch.float32
    """

    param: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    accumulate: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for field in fields(self):
            dtype = getattr(self, field.name)
            if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ArgumentError(
                    f"Precision got {described(dtype)} for {field.name}; expected a floating dtype such as "
                    "torch.bfloat16"
                )
