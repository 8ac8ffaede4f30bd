"""What a rank adds that has no term of a sum: of zeros the negative one, which alone changes no number."""

from __future__ import annotations

import torch
from torch import Tensor


def nothing(x: Tensor) -> complex:
    """As a number to fill a tensor like ``x`` with."""
    return complex(-0.0, -0.0) if x.is_complex() else -0.0


def neutral_like(x: Tensor) -> Tensor:
    """A tensor of it."""
    return torch.full_like(x, nothing(x))
