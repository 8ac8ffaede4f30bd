"""Whether values are such as a function takes, as far as a rank can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fspmd.sharded import is_sharded
from fspmd.transport.local_tensor import LocalTensor


def all_fit(values: Any, fits: Callable[[Any], Any]) -> bool:
    """Of values cut over ranks a rank looks at its own block, as torch does with places out of range.

    To ask all ranks would be a collective in every call, and a wait for its answer. Pending sums are not looked at.
    """
    if is_sharded(values):
        values = None if values.spec.partition.unreduced else values.local
    if isinstance(values, (int, float)):
        values = torch.tensor(values)
    if not isinstance(values, Tensor):
        return True
    good = fits(values.detach())
    return all(bool(block.all()) for block in (good.shards if type(good) is LocalTensor else [good]))
