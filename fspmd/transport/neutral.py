"""The term of a rank that has nothing to add to a sum: negative zeros, which leave every number as it is."""

from __future__ import annotations

import torch
from torch import Tensor


def nothing(x: Tensor) -> complex:
    """Return the negative zero of the dtype of ``x``."""
    return complex(-0.0, -0.0) if x.is_complex() else -0.0


def neutral_like(x: Tensor) -> Tensor:
    """Return a tensor of negative zeros like ``x``."""
    return torch.full_like(x, nothing(x))
