"""The choice of experts for tokens, its losses, and its balance, as pure functions."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fspmd.collectives import psum
from fspmd.errors import ArgumentError, ShapeError
from fspmd.messages import described
from fspmd.nn.parts import wide
from fspmd.nn.sequences import Axes


class Routing(NamedTuple):
    """Which experts compute which tokens, and figures of the whole batch. A pytree."""

    weights: Tensor  #: [tokens, k], of results of experts
    experts: Tensor  #: [tokens, k], each token's experts, int64
    counts: Tensor  #: [experts], how many tokens of the whole batch each expert has, int64
    balance_loss: Tensor  #: 1 for an even choice, up to experts / k for an uneven one
    z_loss: Tensor  #: the mean square of the logsumexp of a token's logits


def route(
    logits: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    score: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = True,
    axes: Axes = (),
) -> Routing:
    """Choose the k experts with the highest scores for each token.

    Args:
        logits: [tokens, experts]. Scores are computed in float32, or float64.
        k: How many experts each token has.
        bias: [experts]. Added to scores for the choice, not for weights. See `balance`.
        score: What scores are of logits.
        normalize: Whether the weights of a token add up to 1. With ``k=1`` they then have no gradient.
        axes: The mesh axes that cut the batch. The type checker names the line of a result that lacks one.

    Returns:
        A `Routing`. Its counts and losses are those of the whole batch: sums over all tokens, divided by their number,
        whatever ranks have how many. ``balance_loss`` is that of Fedus et al., "Switch Transformers", 2021, eq. 4.

    Communication: one `psum` over ``axes``, forward, of 2 E + 1 numbers in float64: counts, shares of scores, a square.

    Raises:
        ArgumentError: ``k`` or ``score`` is unknown.
        ShapeError: ``logits`` is no matrix, or ``bias`` has another length.

    >>> import torch
    >>> from fspmd.nn import route
    >>> routing = route(torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]]), 2)
    >>> routing.experts.tolist(), routing.counts.tolist()
    ([[0, 2], [1, 2]], [1, 1, 2])
    """
    if not isinstance(logits, Tensor) or logits.dim() != 2 or not logits.is_floating_point():
        raise ShapeError(f"route got {described(logits)} for logits; give it floats [tokens, experts]")
    n = logits.shape[1]
    if type(k) is not int or not 1 <= k <= n:
        raise ArgumentError(f"route got k={k!r} for {n} experts; give it an int from 1 to {n}")
    if score not in ("softmax", "sigmoid"):
        raise ArgumentError(f"route got score={score!r}; expected 'softmax' or 'sigmoid'")
    if bias is not None and tuple(bias.shape) != (n,):
        raise ShapeError(f"route got a bias of shape {tuple(bias.shape)} for {n} experts; give it shape ({n},)")
    logits = logits.to(wide(logits))
    scores = logits.softmax(1) if score == "softmax" else logits.sigmoid()
    shares = scores if score == "softmax" else scores / scores.sum(1, keepdim=True)
    choice = scores.detach() if bias is None else scores.detach() + bias.detach()
    experts = choice.topk(k, 1).indices
    weights = scores.gather(1, experts)
    if normalize:
        weights = weights / weights.sum(1, keepdim=True)
    counts, share, z = counted(experts.flatten(), n), shares.sum(0), logits.logsumexp(1).square().sum()
    if axes:  # float64 holds counts exactly
        sums = psum(torch.cat([x.double().view(-1) for x in (counts, share, z)]), axes).split([n, n, 1])
        counts, share, z = sums[0].long(), sums[1].to(share.dtype), sums[2].to(z.dtype).view(())
    chosen = counts.sum().clamp(min=1)
    balance_loss = (counts.to(share.dtype) * share).sum() * (n * k) / chosen / chosen
    return Routing(weights, experts, counts, balance_loss, z * k / chosen)


def balance(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """The bias for the next step: higher for experts with less than the mean, lower for those with more.

    Call it once a step with the counts of the step, outside of what is recomputed. It is a pure function. From Wang et
    al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024, algorithm 1.

    Args:
        bias: [experts], that of `route`.
        counts: [experts], `Routing.counts`. Add up those of microbatches.
        rate: By how much a bias changes, such as 0.001.

    >>> import torch
    >>> from fspmd.nn import balance
    >>> balance(torch.zeros(3), torch.tensor([4, 0, 2]), 0.5)
    tensor([-0.5000,  0.5000,  0.0000])
    """
    if bias.shape != counts.shape:
        raise ShapeError(f"balance got a bias of shape {tuple(bias.shape)} and counts of {tuple(counts.shape)}")
    with torch.no_grad():
        gap = counts.sum() - counts * counts.shape[0]
        return bias + rate * gap.sign().to(bias.dtype)


def counted(experts: Tensor, n: int) -> Tensor:
    """How often each of n experts is in a list, int64 [n]. No operation of the host."""
    ends = torch.searchsorted(experts.sort().values, torch.arange(n, device=experts.device), right=True)
    return torch.diff(ends, prepend=ends.new_zeros(1))
