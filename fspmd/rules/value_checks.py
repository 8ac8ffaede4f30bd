"""Checks of values, such as probabilities, by each rank on its own block.

Asking all ranks would be a collective in every call. The checks do not wait for a GPU either: as in torch's kernels, a
failed check there is an assertion on the device, and a later call raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.sharded import is_sharded
from fspmd.torch_internals import DisableTorchFunction, assert_async
from fspmd.tracing import outside_transforms, reading
from fspmd.transport.local_tensor import blocks_of
from fspmd.variance import unwrapped


def check_values(values: Any, fits: Callable[[Any], Any], message: str) -> None:
    """Raise `ArgumentError` with a message if some value does not fit. Pending sums are not checked."""
    if is_sharded(values):
        values = None if values.spec.partition.unreduced else values.local
    if isinstance(values, (int, float)):
        values = torch.tensor(values)
    if isinstance(values, Tensor):
        _require(unwrapped(values.detach()), fits, message)


@reading
def _require(values: Tensor, fits: Callable[[Any], Any], message: str) -> None:
    if values.is_meta:
        return  # there are no values
    with outside_transforms(), DisableTorchFunction():
        for block in blocks_of(values):
            good = fits(block).all()
            if good.device.type != "cpu":
                assert_async(good, message)
            elif not good:
                raise ArgumentError(message)


def check_matrices(check: Callable[..., None], info: Tensor, name: str, is_matrix: bool) -> None:
    """Raise the error of torch's ``check`` if ``info`` of a factorization says that a matrix is singular."""
    _check_matrices(check, unwrapped(info), name, is_matrix)


@reading
def _check_matrices(check: Callable[..., None], info: Tensor, name: str, is_matrix: bool) -> None:
    with DisableTorchFunction(), outside_transforms():
        for block in blocks_of(info):
            check(block, name, is_matrix=is_matrix)
