"""Uniform, normal, integer and Poisson numbers from words of 64 random bits. Most take half a word each.

A half is a signed int32, which needs no mask. Operations write into the result. On a CPU the time depends on the number
of passes over memory, and for few numbers on the number of calls.
"""

from __future__ import annotations

from math import sqrt
from typing import Final

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.errors import ArgumentError
from fspmd.random.counter import Block, Distribution, Words, draw
from fspmd.torch_internals import FakeTensor
from fspmd.tracing import step

_MASK: Final = 0xFFFFFFFF
#: dtype -> the bits of a uniform number on [0, 1) that it represents
_BITS: Final = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
#: up to so many integers, 32 bits draw one; their probabilities differ by at most 2⁻¹², relatively
_FEW: Final = 1 << 20


def _floating(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _BITS:
        known = ", ".join(map(str, _BITS))
        raise ArgumentError(f"random numbers got the dtype {dtype}; draw them as one of {known}, or as integers")
    return dtype


def _buffer(out: Tensor, dtype: torch.dtype) -> Tensor:
    """``out`` if it has the dtype, else a new tensor that is copied into it later."""
    return out if out.dtype is dtype else torch.empty(out.shape, dtype=dtype, device=out.device)


def _upper(words: Words, dtype: torch.dtype, bits: int, out: Tensor) -> Tensor:
    """The uppermost bits as signed numbers: of words on [-2⁶³, 2⁶³) for float64, else of halves on [-2³¹, 2³¹)."""
    if dtype is torch.float64:
        words.all.bitwise_and_(words.number(-1 << 64 - bits, torch.int64))
        return _buffer(out, dtype).copy_(words.all)
    lower = (1 << 32 - bits) - 1
    words.all.bitwise_and_(words.number(~(lower << 32 | lower), torch.int64))
    return _buffer(out, dtype).copy_(words.halves)


@cached
def uniform(dtype: torch.dtype) -> Distribution:
    """Uniform on [0, 1), in steps of the dtype's precision below 1."""
    bits = _BITS[_floating(dtype)]
    wide = dtype is torch.float64
    exact, scale = (torch.float64, 2.0**-64) if wide else (torch.float32, 2.0**-32)

    def fill(words: Words, out: Tensor) -> None:
        u = _upper(words, exact, bits, out)
        torch.add(words.number(0.5, exact), u, alpha=scale, out=u)
        if u is not out:
            out.copy_(u)

    return Distribution(dtype, 1 if wide else 2, fill)


@cached
def normal(dtype: torch.dtype) -> Distribution:
    """Normal with mean 0 and variance 1.

    It is the inverse distribution function at the middles of 2²⁴ equal parts of (0, 1), of 2⁵³ parts for float64. The
    largest number is 5.4 in float32, and 8.2 in float64.
    """
    wide = _floating(dtype) is torch.float64
    exact, bits, scale = (torch.float64, 53, 2.0**-63) if wide else (torch.float32, 24, 2.0**-31)
    scale *= 1 - 2.0**-bits

    def fill(words: Words, out: Tensor) -> None:
        x = _buffer(out, exact).copy_(words.all if wide else words.halves)
        x.mul_(words.number(scale, exact)).erfinv_().mul_(words.number(_ROOT, exact))
        if x is not out:
            out.copy_(x)

    return Distribution(dtype, 1 if wide else 2, fill)


_ROOT: Final = sqrt(2.0)


@cached
def exponential(dtype: torch.dtype) -> Distribution:
    """Exponential with rate 1, and never 0: the negated logarithm of numbers on (0, 1] that are finer towards 0."""
    least = torch.finfo(_floating(dtype)).tiny
    wide = dtype is torch.float64
    exact, bits = (torch.float64, 64) if wide else (torch.float32, 32)

    def fill(words: Words, out: Tensor) -> None:
        u = _buffer(out, exact).copy_(words.all if wide else words.halves).abs_()
        torch.add(words.number(2.0**-bits, exact), u, alpha=2.0 ** (1 - bits), out=u).log_().neg_().clamp_min_(least)
        if u is not out:
            out.copy_(u)

    return Distribution(dtype, 1 if wide else 2, fill)


@cached(maxsize=1024)
def bernoulli(p: float, dtype: torch.dtype = torch.bool) -> Distribution:
    """1 with probability ``p``, up to 2⁻³², else 0."""
    highest = round(p * 2.0**32) - (1 << 31) - 1

    def fill(words: Words, out: Tensor) -> None:
        if highest < -(1 << 31):
            out.zero_()
        else:
            torch.le(words.halves, words.number(highest, torch.int32), out=out)

    return Distribution(dtype if dtype in _COMMON else torch.bool, 2, fill)


#: the dtypes that all functions of torch take which put random numbers in order
_COMMON: Final = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_BITS})


def _fractions(words: Words, out: Tensor) -> None:
    torch.add(words.number(0.5, torch.float64), out.copy_(words.halves), alpha=2.0**-32, out=out)


#: 32 random bits as an exact number on [0, 1), to be compared with a tensor of probabilities
FRACTIONS: Final = Distribution(torch.float64, 2, _fractions)


@cached(maxsize=1024)
def integers(low: int, high: int, dtype: torch.dtype) -> Distribution:
    """Integers from ``low`` to ``high - 1``, of which there are n, at most 2⁶⁴: the upper half of random bits times n.

    32 bits draw one of a few integers, 64 bits one of many. The probabilities of many differ by at most 2⁻⁶⁴.
    """
    count = high - low
    upper, lower = count >> 32, count & _MASK
    first = low if low < 1 << 63 else low - (1 << 64)
    near = -(1 << 30) <= low < 1 << 30  # `low` fits above 32 bits of an int64

    def few(words: Words, out: Tensor) -> None:
        n = _buffer(out, torch.int64).copy_(words.halves)  # the random bits, less 2³¹
        torch.add(words.number((count << 31) + (low << 32 if near else 0), torch.int64), n, alpha=count, out=n)
        torch.bitwise_right_shift(n, words.number(32, torch.int64), out=n)
        if not near:
            n.add_(first)
        if n is not out:
            out.copy_(n)

    def many(words: Words, out: Tensor) -> None:
        z = words.all
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


_SMALL_RATE: Final = 10.0  # below this rate a count is found by adding up probabilities, from it on by rejection


def poisson(block: Block, rates: Tensor, seed: int) -> Tensor:
    """One Poisson count per rate, by the random numbers of its own element. Rates and counts are float64."""
    uniforms = draw(block, uniform(torch.float64), seed, rates.device)
    few, many = rates.clamp(max=_SMALL_RATE), rates.clamp(min=_SMALL_RATE)
    return torch.where(rates < _SMALL_RATE, _by_sums(few, uniforms), _by_rejection(block, many, seed))


def _by_sums(rates: Tensor, uniforms: Tensor) -> Tensor:
    """The first count for which the probabilities up to it sum to more than the uniform number."""
    probability = torch.exp(-rates)
    total, result = probability.clone(), torch.zeros_like(rates)
    for k in range(1, 64):  # at a rate of 10 the probability of a count of 64 or more is below 2⁻⁵³
        result += uniforms >= total
        probability *= rates / k
        total += probability
    return result


@step
def _by_rejection(block: Block, rates: Tensor, seed: int) -> Tensor:
    """Transformed rejection with squeeze: W. Hörmann, Insurance: Mathematics and Economics 12 (1993), PTRS.

    It draws until all counts are accepted. It is therefore one step of a record, which has the shape alone.
    """
    if isinstance(rates, FakeTensor):
        return torch.empty_like(rates)
    law = uniform(torch.float64)
    b = 0.931 + 2.53 * rates.sqrt()
    a = -0.059 + 0.02483 * b
    inverse = 1.1239 + 1.1328 / (b - 3.4)
    result, rejected, attempt = rates, rates.isfinite(), 1
    while rejected.any():
        u = draw(block, law, seed, rates.device, 2 * attempt) - 0.5
        v = draw(block, law, seed, rates.device, 2 * attempt + 1)
        side = 0.5 - u.abs()
        k = ((2 * a / side + b) * u + rates + 0.43).floor()
        squeezed = (side >= 0.07) & (v <= 0.9277 - 3.6224 / (b - 2))
        possible = (k >= 0) & ((side >= 0.013) | (v <= side))
        left = (v * inverse / (a / side**2 + b)).log()
        accepted = rejected & (squeezed | (possible & (left <= k * rates.log() - rates - torch.lgamma(k + 1))))
        result = torch.where(accepted, k, result)
        rejected = rejected & ~accepted
        attempt += 1
    return result
