"""Uniform, normal and other numbers from words of 64 random bits, most of them from halves of a word.

A half is a signed int32, so that it needs no mask, and all that is done is done in the place of the result: on a CPU
each pass over memory counts.
"""

from __future__ import annotations

import functools
from math import pi
from typing import Final

import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.random.counter import Distribution

_MASK: Final = 0xFFFFFFFF
#: bits of a uniform number on [0, 1) that a dtype tells apart
_BITS: Final = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_FEW: Final = 1 << 20  # integers of which 32 bits draw one: none is likelier than another by more than 2⁻¹²


def _floating(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _BITS:
        known = ", ".join(map(str, _BITS))
        raise ArgumentError(f"random numbers of {dtype} were asked for; draw them as one of {known}, or as integers")
    return dtype


def _halves(z: Tensor) -> Tensor:
    return z.view(torch.int32)


def _write(out: Tensor, spare: Tensor, dtype: torch.dtype) -> Tensor:
    """``out``, or what is to be written into it, of another dtype."""
    if out.dtype is dtype:
        return out
    room = spare.view(dtype)
    return room if len(room) == len(out) else torch.empty(out.shape, dtype=dtype, device=out.device)


@functools.cache
def uniform(dtype: torch.dtype) -> Distribution:
    """On [0, 1), in steps of the dtype's precision below 1."""
    bits = _BITS[_floating(dtype)]
    wide = bits > 32
    shift, scale = (64 if wide else 32) - bits, 2.0**-bits

    def fill(z: Tensor, spare: Tensor, out: Tensor) -> None:
        source = z if wide else _halves(z)
        u = _write(out, spare, torch.float64 if wide else torch.float32)
        u.copy_(torch.bitwise_right_shift(source, shift, out=source)).mul_(scale).add_(0.5)
        if u is not out:
            out.copy_(u)

    return Distribution(dtype, 1 if wide else 2, fill)


def _above_zero(found: Tensor, bits: int) -> Tensor:
    """On (0, 1], finer towards 0, of signed numbers of so many bits, in their place."""
    return found.abs_().mul_(2.0 ** (1 - bits)).add_(2.0**-bits)


@functools.cache
def normal(dtype: torch.dtype) -> Distribution:
    """Of mean 0 and variance 1: Box and Muller's pairs."""
    wide = _floating(dtype) is torch.float64
    exact, bits = (torch.float64, 64) if wide else (torch.float32, 32)

    def fill(z: Tensor, spare: Tensor, out: Tensor) -> None:
        pairs = (z if wide else _halves(z)).view(-1, 2)
        radius, angle = spare.view(exact).chunk(2)
        _above_zero(radius.copy_(pairs[:, 0]), bits).log_().mul_(-2.0).sqrt_()
        angle.copy_(pairs[:, 1]).mul_(2 * pi * 2.0**-bits)
        cosine, places = z.view(exact)[: len(angle)], out.view(-1, 2)
        torch.cos(angle, out=cosine)
        for trigonometric, place in ((cosine, places[:, 0]), (angle.sin_(), places[:, 1])):
            if out.dtype is exact:
                torch.mul(trigonometric, radius, out=place)
            else:
                place.copy_(trigonometric.mul_(radius))

    return Distribution(dtype, 2, fill, 2 if wide else 1)


@functools.cache
def exponential(dtype: torch.dtype) -> Distribution:
    """Of rate 1, and never 0."""
    least = torch.finfo(_floating(dtype)).tiny
    wide = dtype is torch.float64

    def fill(z: Tensor, spare: Tensor, out: Tensor) -> None:
        u = _write(out, spare, torch.float64 if wide else torch.float32)
        u.copy_(z if wide else _halves(z))
        _above_zero(u, 64 if wide else 32).log_().neg_().clamp_min_(least)
        if u is not out:
            out.copy_(u)

    return Distribution(dtype, 1 if wide else 2, fill)


def bernoulli(p: float) -> Distribution:
    """True with probability ``p``, to 2⁻³²."""
    highest = round(p * 2.0**32) - (1 << 31) - 1

    def fill(z: Tensor, spare: Tensor, out: Tensor) -> None:
        if highest < -(1 << 31):
            out.zero_()
        else:
            torch.le(_halves(z), highest, out=out)

    return Distribution(torch.bool, 2, fill)


#: 32 bits on [0, 1), exactly: true where below a probability
FRACTIONS: Final = Distribution(torch.float64, 2, lambda z, spare, out: out.copy_(_halves(z)).mul_(2.0**-32).add_(0.5))


def integers(low: int, high: int, dtype: torch.dtype) -> Distribution:
    """From ``low`` up to, without, ``high``: the upper half of random bits times their number, at most 2⁶⁴.

    Of 32 bits for a few integers, of 64 for more: then none is likelier than another by more than 2⁻⁶⁴.
    """
    count = high - low
    upper, lower = count >> 32, count & _MASK
    first = low if low < 1 << 63 else low - (1 << 64)

    def few(z: Tensor, spare: Tensor, out: Tensor) -> None:
        found = _write(out, spare, torch.int64).copy_(_halves(z)).bitwise_and_(_MASK).mul_(count)
        torch.bitwise_right_shift(found, 32, out=found)
        out.copy_(found.add_(first)) if found is not out else found.add_(first)

    def many(z: Tensor, spare: Tensor, out: Tensor) -> None:
        a, b = torch.bitwise_right_shift(z, 32).bitwise_and_(_MASK), z.bitwise_and_(_MASK)
        below = torch.bitwise_right_shift(b * lower, 32).bitwise_and_(_MASK)
        if count < 1 << 31:  # no product needs more than 63 bits
            found = torch.bitwise_right_shift(a.mul_(lower).add_(below), 32)
        else:
            left, right = a * lower, b * upper
            middle = (left & _MASK) + (right & _MASK) + below
            found = a * upper + (left >> 32 & _MASK) + (right >> 32 & _MASK) + (middle >> 32)
        out.copy_(found.add_(first))

    return Distribution(dtype, 2, few) if count <= _FEW else Distribution(dtype, 1, many)
