"""Dropout and related functions. The noise lies as the operand does, and is the same global tensor in every layout.

They are written in functions that have rules, and add no communication of their own. Backward multiplies by the same
noise. A recomputation that restores torch's generator draws it again.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.errors import ArgumentError, ShapeError
from fspmd.random.blocks import drawn, fill
from fspmd.random.counter import Block
from fspmd.random.distributions import bernoulli, exponential, uniform
from fspmd.rules.like_functions import Handler, Value, drawn_like, settle, settled
from fspmd.spec import P, TensorSpec

_ALPHA: Final = 1.7580993408473766  # SELU's alpha times its scale; alpha dropout sets dropped elements to -_ALPHA


def _kept(x: Value, p: float, features: bool, scale: float = 1.0) -> Value:
    """Return ``scale`` where an element is kept, and 0 where it is dropped.

    ``features``: whole channels are dropped, so the mask has size 1 along all dims from the third on.
    """
    p = float(p)
    if not 0 <= p <= 1:
        raise ArgumentError(f"dropout got p={p!r}; give it a probability, between 0 and 1")
    spec = settled(x.spec)
    if features:
        if x.ndim < 2:
            raise ShapeError(f"feature dropout got {x!r}; give it a batch of channels: two dims or more")
        shape = (*x.shape[:2], *(1,) * (x.ndim - 2))
        spec = TensorSpec(spec.mesh, P(*spec.partition.entries[:2]), shape, spec.dtype)
    return drawn(spec, lambda dtype: bernoulli(1 - p), x.device, lambda hit: hit.to(spec.dtype).mul_(scale))


def _keeps_all(p: float, training: bool) -> bool:
    """Whether a dropout returns its operand and, as in torch, draws nothing."""
    return not training or p == 0


def _dropout(features: bool, x: Value, p: float = 0.5, training: bool = True, inplace: bool = False) -> Value:
    if _keeps_all(p, training):
        return x
    noise = _kept(x, p, features, 1 / (1 - p) if p < 1 else 0.0)
    return x.mul_(noise) if inplace else x * noise


def _alpha_dropout(features: bool, x: Value, p: float = 0.5, training: bool = False, inplace: bool = False) -> Value:
    """Alpha dropout: dropped elements become SELU's lower limit. The result keeps the mean and variance of ``x``."""
    if _keeps_all(p, training):
        return x
    kept = _kept(x, p, features)
    scale = ((1 - p) * (1 + p * _ALPHA**2)) ** -0.5 if p < 1 else 0.0
    shift = (kept - 1) * (_ALPHA * scale) + _ALPHA * scale * p
    return x.mul_(kept * scale).add_(shift) if inplace else x * (kept * scale) + shift


def _of_channels(batched: int, x: Value, p: float = 0.5, training: bool = True, inplace: bool = False) -> Value:
    """``dropout1d`` and ``dropout3d``, which also take [C, ...] without a batch."""
    if x.ndim not in (batched - 1, batched):
        raise ShapeError(f"dropout{batched - 2}d got {x!r}; give it {batched} dims, or {batched - 1} without a batch")
    if x.ndim == batched:
        return _dropout(True, x, p, training, inplace)
    out = _dropout(True, x.unsqueeze(0), p, training, False).squeeze(0)
    return x.copy_(out) if inplace else out


def _native_dropout(x: Value, p: float, train: bool | None) -> tuple[Value, Value]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    noise = _kept(x, p, False, 1 / (1 - p) if p < 1 else 0.0)
    return x * noise, noise != 0


def _rrelu(
    x: Value, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False, **_: Any
) -> Value:
    if not 0 <= lower <= upper:
        raise ArgumentError(f"rrelu got lower={lower!r} and upper={upper!r}; give it 0 <= lower <= upper")
    if training:
        slopes: Any = drawn_like(x, uniform, lambda u: u.mul_(upper - lower).add_(lower))
    else:
        slopes = (lower + upper) / 2
    value = settle(x)
    out = torch.where(value > 0, value, value * slopes)
    return x.copy_(out) if inplace else out


def _gumbel_softmax(logits: Value, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Value:
    logits = settle(logits)
    gumbels = drawn_like(logits, exponential, lambda e: e.log_().neg_())
    soft = ((logits + gumbels) / tau).softmax(dim)
    if not hard:
        return soft
    best = soft.detach().argmax(dim, keepdim=True)
    return (_places(logits, dim % logits.ndim) == best).to(soft.dtype) - soft.detach() + soft


def _places(x: Value, dim: int) -> Value:
    """Return the indices along a dim, in a shape that broadcasts with ``x``, cut as ``x`` is."""
    shape = tuple(n if d == dim else 1 for d, n in enumerate(x.shape))
    partition = P(*(entry if d == dim else None for d, entry in enumerate(x.spec.partition)))

    def make(block: Block) -> Tensor:
        start = block.offset[dim]
        return torch.arange(start, start + block.shape[dim], device=x.device).view(block.shape)

    return fill(TensorSpec(x.spec.mesh, partition, shape, torch.int64), make, x.device)


def _in_place(function: Handler, *args: Any, **options: Any) -> Value:
    return function(*args, **options, inplace=True)


_BOTH: Final[dict[str, Handler]] = {
    "dropout": functools.partial(_dropout, False),
    "feature_dropout": functools.partial(_dropout, True),
    "alpha_dropout": functools.partial(_alpha_dropout, False),
    "feature_alpha_dropout": functools.partial(_alpha_dropout, True),
    "rrelu": _rrelu,
}
DROPOUTS: Final[dict[str, Handler]] = {
    **_BOTH,
    **{f"{name}_": functools.partial(_in_place, function) for name, function in _BOTH.items()},
    "dropout1d": functools.partial(_of_channels, 3),
    "dropout2d": functools.partial(_dropout, True),
    "dropout3d": functools.partial(_of_channels, 5),
    "native_dropout": _native_dropout,
    "gumbel_softmax": _gumbel_softmax,
}
