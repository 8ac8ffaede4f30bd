"""Poisson counts of a block of rates, each from numbers of its own element."""

from __future__ import annotations

import torch
from torch import Tensor

from fspmd.random.counter import Block, draw
from fspmd.random.distributions import uniform
from fspmd.torch_internals import FakeTensor
from fspmd.tracing import step

_FEW = 10.0  # below it counts are found by adding up probabilities, from it on by rejection


def counts(block: Block, rates: Tensor, seed: int) -> Tensor:
    """One count per rate; both float64."""
    uniforms = draw(block, uniform(torch.float64), seed, rates.device)
    return torch.where(rates < _FEW, _few(rates.clamp(max=_FEW), uniforms), _many(block, rates.clamp(min=_FEW), seed))


def _few(rates: Tensor, uniforms: Tensor) -> Tensor:
    """The first count up to which the probabilities sum to more than the uniform number."""
    probability = torch.exp(-rates)
    total, found = probability.clone(), torch.zeros_like(rates)
    for k in range(1, 64):  # a count of 64 or more of a rate of 10 is rarer than 2⁻⁵³
        found += uniforms >= total
        probability *= rates / k
        total += probability
    return found


@step
def _many(block: Block, rates: Tensor, seed: int) -> Tensor:
    """Transformed rejection with squeeze: W. Hörmann, Insurance: Mathematics and Economics 12 (1993), PTRS.

    It draws until all are accepted, so it is one step of a record; of tensors without values it gives the shape.
    """
    if isinstance(rates, FakeTensor):
        return torch.empty_like(rates)
    law = uniform(torch.float64)
    b = 0.931 + 2.53 * rates.sqrt()
    a = -0.059 + 0.02483 * b
    inverse = 1.1239 + 1.1328 / (b - 3.4)
    found, waiting, attempt = rates, rates.isfinite(), 1
    while waiting.any():
        u = draw(block, law, seed, rates.device, 2 * attempt) - 0.5
        v = draw(block, law, seed, rates.device, 2 * attempt + 1)
        side = 0.5 - u.abs()
        k = ((2 * a / side + b) * u + rates + 0.43).floor()
        squeezed = (side >= 0.07) & (v <= 0.9277 - 3.6224 / (b - 2))
        possible = (k >= 0) & ((side >= 0.013) | (v <= side))
        left = (v * inverse / (a / side**2 + b)).log()
        accepted = waiting & (squeezed | (possible & (left <= k * rates.log() - rates - torch.lgamma(k + 1))))
        found = torch.where(accepted, k, found)
        waiting = waiting & ~accepted
        attempt += 1
    return found
