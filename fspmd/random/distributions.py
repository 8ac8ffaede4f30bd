"""Uniform, normal and other numbers from words of 32 random bits."""

from __future__ import annotations

import functools
from math import pi
from typing import Final

import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.random.counter import Distribution, Word

_MASK: Final = 0xFFFFFFFF
#: bits of a uniform number on [0, 1) that a dtype tells apart
_BITS: Final = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _floating(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _BITS:
        known = ", ".join(map(str, _BITS))
        raise ArgumentError(f"random numbers of {dtype} were asked for; draw them as one of {known}, or as integers")
    return dtype


@functools.cache
def uniform(dtype: torch.dtype) -> Distribution:
    """On [0, 1), in steps of the dtype's precision below 1."""
    bits = _BITS[_floating(dtype)]
    if bits > 32:
        return Distribution(dtype, 2, lambda a, b, c, d: (_double(a, b), _double(c, d)))
    shift, scale = 32 - bits, 2.0**-bits

    def columns(*words: Word) -> list[Tensor]:
        return [(word >> shift).to(torch.float32).mul_(scale) for word in words]

    return Distribution(dtype, 4, columns)


def _double(high: Word, low: Word) -> Tensor:
    """53 bits on [0, 1)."""
    return ((high << 21) | (low >> 11)).to(torch.float64).mul_(2.0**-53)  # type: ignore[no-any-return]


def _above_zero(high: Word, low: Word, wide: bool) -> Tensor:
    """On (0, 1], finer towards 0."""
    if wide:
        return ((high << 21) | (low >> 11)).to(torch.float64).add_(1.0).mul_(2.0**-53)  # type: ignore[no-any-return]
    return high.to(torch.float32).add_(0.5).mul_(2.0**-32)  # type: ignore[no-any-return]


@functools.cache
def normal(dtype: torch.dtype) -> Distribution:
    """Of mean 0 and variance 1: Box and Muller's pairs."""
    wide = _floating(dtype) is torch.float64

    def pair(radius: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
        radius = radius.log_().mul_(-2.0).sqrt_()
        angle = angle.mul_(2 * pi)
        return angle.cos().mul_(radius), angle.sin_().mul_(radius)

    def columns(a: Word, b: Word, c: Word, d: Word) -> tuple[Tensor, ...]:
        if wide:
            return pair(_above_zero(a, b, wide), _double(c, d))
        first = pair(_above_zero(a, a, wide), b.to(torch.float32).mul_(2.0**-32))
        return *first, *pair(_above_zero(c, c, wide), d.to(torch.float32).mul_(2.0**-32))

    return Distribution(dtype, 2 if wide else 4, columns)


@functools.cache
def exponential(dtype: torch.dtype) -> Distribution:
    """Of rate 1, and never 0."""
    least = torch.finfo(_floating(dtype)).tiny

    def one(high: Word, low: Word) -> Tensor:
        return _above_zero(high, low, dtype is torch.float64).log_().neg_().clamp_min_(least)

    if dtype is torch.float64:
        return Distribution(dtype, 2, lambda a, b, c, d: (one(a, b), one(c, d)))
    return Distribution(dtype, 4, lambda *words: [one(word, word) for word in words])


def bernoulli(p: float) -> Distribution:
    """True with probability ``p``, to 2⁻³²."""
    threshold = round(p * 2.0**32)
    return Distribution(torch.bool, 4, lambda *words: [word < threshold for word in words])


#: 32 bits on [0, 1), exactly: true where below a probability
FRACTIONS: Final = Distribution(torch.float64, 4, lambda *words: [word.to(torch.float64) * 2.0**-32 for word in words])


def integers(low: int, high: int, dtype: torch.dtype) -> Distribution:
    """From ``low`` up to, without, ``high``: the upper 64 bits of 64 random ones times their number, at most 2⁶⁴.

    No integer is likelier than another by more than 2⁻⁶⁴.
    """
    count = high - low
    upper, lower = count >> 32, count & _MASK
    first = low if low < 1 << 63 else low - (1 << 64)

    def one(a: Word, b: Word) -> Tensor:
        below = (b * lower) >> 32 & _MASK
        if count < 1 << 31:  # no product needs more than 63 bits
            return ((a * lower + below) >> 32).add_(first)  # type: ignore[no-any-return]
        left, right = a * lower, b * upper
        middle = (left & _MASK) + (right & _MASK) + below
        found = a * upper + (left >> 32 & _MASK) + (right >> 32 & _MASK) + (middle >> 32)
        return found.add_(first)  # type: ignore[no-any-return]

    def columns(a: Word, b: Word, c: Word, d: Word) -> tuple[Tensor, Tensor]:
        return one(a, b), one(c, d)

    return Distribution(dtype, 2, columns)
