"""Uniform, normal and other numbers from words of 64 random bits, most of them from halves of a word.

A half is a signed int32, so that it needs no mask, and all that is done is done in the place of the result: on a CPU
each pass over memory counts, and of few numbers each call.
"""

from __future__ import annotations

import functools
from math import sqrt
from typing import Final

import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.random.counter import Distribution, Words, number

_MASK: Final = 0xFFFFFFFF
#: bits of a uniform number on [0, 1) that a dtype tells apart
_BITS: Final = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_FEW: Final = 1 << 20  # integers of which 32 bits draw one: none is likelier than another by more than 2⁻¹²


def _floating(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _BITS:
        known = ", ".join(map(str, _BITS))
        raise ArgumentError(f"random numbers of {dtype} were asked for; draw them as one of {known}, or as integers")
    return dtype


def _room(out: Tensor, dtype: torch.dtype) -> Tensor:
    """``out``, or what is to be written into it, of another dtype."""
    return out if out.dtype is dtype else torch.empty(out.shape, dtype=dtype, device=out.device)


def _upper(found: Words, dtype: torch.dtype, bits: int, out: Tensor) -> Tensor:
    """The uppermost bits, as signed numbers of ``dtype`` from -2⁶³ or -2³¹ up to, without, 2⁶³ or 2³¹."""
    if dtype is torch.float64:
        found.all.bitwise_and_(number(-1 << 64 - bits, torch.int64))
        return _room(out, dtype).copy_(found.all)
    lower = (1 << 32 - bits) - 1
    found.all.bitwise_and_(number(~(lower << 32 | lower), torch.int64))
    return _room(out, dtype).copy_(found.halves)


@functools.cache
def uniform(dtype: torch.dtype) -> Distribution:
    """On [0, 1), in steps of the dtype's precision below 1."""
    bits = _BITS[_floating(dtype)]
    wide = dtype is torch.float64
    exact, scale = (torch.float64, 2.0**-64) if wide else (torch.float32, 2.0**-32)

    def fill(found: Words, out: Tensor) -> None:
        u = _upper(found, exact, bits, out)
        torch.add(number(0.5, exact), u, alpha=scale, out=u)
        if u is not out:
            out.copy_(u)

    return Distribution(dtype, 1 if wide else 2, fill)


@functools.cache
def normal(dtype: torch.dtype) -> Distribution:
    """Of mean 0 and variance 1: the inverse distribution function of the middles of 2²⁴, or 2⁵³, equal parts of (0, 1).

    So the largest is 5.4 in float32, and 8.2 in float64.
    """
    wide = _floating(dtype) is torch.float64
    exact, bits, scale = (torch.float64, 53, 2.0**-63) if wide else (torch.float32, 24, 2.0**-31)
    scale *= 1 - 2.0**-bits

    def fill(found: Words, out: Tensor) -> None:
        x = _room(out, exact).copy_(found.all if wide else found.halves)
        x.mul_(number(scale, exact)).erfinv_().mul_(number(_ROOT, exact))
        if x is not out:
            out.copy_(x)

    return Distribution(dtype, 1 if wide else 2, fill)


_ROOT: Final = sqrt(2.0)


@functools.cache
def exponential(dtype: torch.dtype) -> Distribution:
    """Of rate 1, and never 0: the negated logarithm of numbers on (0, 1] that are finer towards 0."""
    least = torch.finfo(_floating(dtype)).tiny
    wide = dtype is torch.float64
    exact, bits = (torch.float64, 64) if wide else (torch.float32, 32)

    def fill(found: Words, out: Tensor) -> None:
        u = _room(out, exact).copy_(found.all if wide else found.halves).abs_()
        torch.add(number(2.0**-bits, exact), u, alpha=2.0 ** (1 - bits), out=u).log_().neg_().clamp_min_(least)
        if u is not out:
            out.copy_(u)

    return Distribution(dtype, 1 if wide else 2, fill)


def bernoulli(p: float) -> Distribution:
    """True with probability ``p``, to 2⁻³²."""
    highest = round(p * 2.0**32) - (1 << 31) - 1

    def fill(found: Words, out: Tensor) -> None:
        if highest < -(1 << 31):
            out.zero_()
        else:
            torch.le(found.halves, number(highest, torch.int32), out=out)

    return Distribution(torch.bool, 2, fill)


def _fractions(found: Words, out: Tensor) -> None:
    torch.add(number(0.5, torch.float64), out.copy_(found.halves), alpha=2.0**-32, out=out)


#: 32 bits on [0, 1), exactly: true where below a probability
FRACTIONS: Final = Distribution(torch.float64, 2, _fractions)


def integers(low: int, high: int, dtype: torch.dtype) -> Distribution:
    """From ``low`` up to, without, ``high``: the upper half of random bits times their number, at most 2⁶⁴.

    Of 32 bits for a few integers, of 64 for more: then none is likelier than another by more than 2⁻⁶⁴.
    """
    count = high - low
    upper, lower = count >> 32, count & _MASK
    first = low if low < 1 << 63 else low - (1 << 64)
    near = -(1 << 30) <= low < 1 << 30  # so that it fits above 32 bits

    def few(found: Words, out: Tensor) -> None:
        n = _room(out, torch.int64).copy_(found.halves)  # 2³¹ below the random bits
        torch.add(number((count << 31) + (low << 32 if near else 0), torch.int64), n, alpha=count, out=n)
        torch.bitwise_right_shift(n, number(32, torch.int64), out=n)
        if not near:
            n.add_(first)
        if n is not out:
            out.copy_(n)

    def many(found: Words, out: Tensor) -> None:
        z = found.all
        a, b = torch.bitwise_right_shift(z, 32).bitwise_and_(_MASK), z.bitwise_and_(_MASK)
        below = torch.bitwise_right_shift(b * lower, 32).bitwise_and_(_MASK)
        if count < 1 << 31:  # no product needs more than 63 bits
            n = torch.bitwise_right_shift(a.mul_(lower).add_(below), 32)
        else:
            left, right = a * lower, b * upper
            middle = (left & _MASK) + (right & _MASK) + below
            n = a * upper + (left >> 32 & _MASK) + (right >> 32 & _MASK) + (middle >> 32)
        out.copy_(n.add_(first))

    return Distribution(dtype, 2, few) if count <= _FEW else Distribution(dtype, 1, many)
