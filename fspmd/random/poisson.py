"""Poisson counts for a block of rates. Each count depends on the random numbers of its own element."""

from __future__ import annotations

import torch
from torch import Tensor

from fspmd.random.counter import Block, draw
from fspmd.random.distributions import uniform
from fspmd.torch_internals import FakeTensor
from fspmd.tracing import step

_FEW = 10.0  # below this rate a count is found by adding up probabilities, from it on by rejection


def counts(block: Block, rates: Tensor, seed: int) -> Tensor:
    """One count per rate. Both are float64."""
    uniforms = draw(block, uniform(torch.float64), seed, rates.device)
    return torch.where(rates < _FEW, _few(rates.clamp(max=_FEW), uniforms), _many(block, rates.clamp(min=_FEW), seed))


def _few(rates: Tensor, uniforms: Tensor) -> Tensor:
    """The first count for which the probabilities up to it sum to more than the uniform number."""
    probability = torch.exp(-rates)
    total, result = probability.clone(), torch.zeros_like(rates)
    for k in range(1, 64):  # at a rate of 10 the probability of a count of 64 or more is below 2⁻⁵³
        result += uniforms >= total
        probability *= rates / k
        total += probability
    return result


@step
def _many(block: Block, rates: Tensor, seed: int) -> Tensor:
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
