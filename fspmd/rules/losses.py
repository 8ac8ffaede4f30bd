"""Losses as few calls. torch composes them of many functions, and each of these would move its operands again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn import functional as F

from fspmd.errors import ShapeError
from fspmd.rules.factors import Factors, ShapedCall, along, gathered, match, parse
from fspmd.rules.softmaxes import reduction_of
from fspmd.rules.value_checks import check_values
from fspmd.sharded import Sharded, call_torch

#: losses that are elementwise, apart from their reduction
ELEMENTWISE: Final = (
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "hinge_embedding_loss", "huber_loss", "kl_div"),
    *("l1_loss", "margin_ranking_loss", "mse_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss"),
)


def _reduce(x: Any, reduction: str, size_average: bool | None = None, reduce: bool | None = None) -> Any:
    """Reduce a loss as torch's options say: ``"mean"``, ``"sum"``, ``"batchmean"`` or ``"none"``."""
    reduction = reduction_of(size_average, reduce, reduction)
    if reduction == "batchmean":
        return x.sum() / x.size(0)
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return x if reduction == "none" else getattr(x, reduction)()


def _of_elements(func: Callable[..., Any]) -> Callable[..., Any]:
    def loss(*args: Any, reduction: str = "mean", size_average: Any = None, reduce: Any = None, **kwargs: Any) -> Any:
        return _reduce(func(*args, reduction="none", **kwargs), reduction, size_average, reduce)

    return loss


def gaussian(x: Any, target: Any, var: Any, eps: float, full: bool) -> Any:
    """The elements of ``F.gaussian_nll_loss``. The gradient of ``var`` passes its lower bound ``eps``."""
    with torch.no_grad():
        bounded = var.clamp(min=eps)
    var = torch.where(var < eps, bounded + (var - var.detach()), var)
    loss = 0.5 * (torch.log(var) + (x - target) ** 2 / var)
    return loss + 0.5 * math.log(2 * math.pi) if full else loss


def _gaussian_nll(x: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean") -> Any:
    if isinstance(var, float):
        var = torch.full_like(x, var)
    check_values(var < 0, torch.logical_not, "gaussian_nll_loss got var with negative entries; give it variances")
    if var.shape != x.shape:
        if var.shape == x.shape[:-1]:
            var = var.unsqueeze(-1)
        elif x.dim() != var.dim() or sum(n for m, n in zip(x.shape, var.shape, strict=True) if m != n) != 1:
            raise ValueError("var is of incorrect size")
    return _reduce(call_torch(gaussian, (x, target, var, eps, full)), reduction)


# --- losses of rows -------------------------------------------------------------------------------------------------


def alike(*values: Any) -> Any:
    """Return the values laid out alike, and whole along the last dim, where a loss compares rows."""
    return values


def of_rows(call: ShapedCall) -> Factors:
    """The rule of `alike`."""
    return along(call, [call.ndim - 1], kept=True)


def _alike(*values: Any) -> Any:
    """Lay values out alike if their specs differ, so that each moves once, and not in every call."""
    specs = {x.spec for x in values if isinstance(x, Sharded)}
    same = len({x.shape for x in values}) == 1 and len({x.dtype for x in values}) == 1
    return values if len(specs) < 2 or not same else call_torch(alike, values)


def _pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    x1, x2 = _alike(x1, x2)
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


def _cosine_embedding(
    x: Any,
    y: Any,
    target: Any,
    margin: float = 0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    x, y = _alike(x, y)
    least = 1e-12  # as in torch
    cos = (x * y).sum(-1) / (((x * x).sum(-1) + least) * ((y * y).sum(-1) + least)).sqrt()
    far = torch.where(target == -1, (cos - margin).clamp_min(0), 0)
    return _reduce(torch.where(target == 1, 1 - cos, 0) + far, reduction, size_average, reduce)


def _triplet_margin(
    anchor: Any,
    positive: Any,
    negative: Any,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    reduction = reduction_of(size_average, reduce, reduction)

    def distance(x: Any, y: Any) -> Any:
        return F.pairwise_distance(x, y, p, eps)

    return _triplet(
        anchor, positive, negative, distance_function=distance, margin=margin, swap=swap, reduction=reduction
    )


def _triplet(
    anchor: Any,
    positive: Any,
    negative: Any,
    *,
    distance_function: Callable[..., Any] | None = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: str = "mean",
) -> Any:
    if margin <= 0:
        raise ValueError(f"margin must be greater than 0, got {margin}")
    distance = distance_function or F.pairwise_distance
    anchor, positive, negative = _alike(anchor, positive, negative)
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = torch.minimum(far, distance(positive, negative))
    return _reduce((margin + near - far).clamp_min(0), reduction)


def _multilabel_margin(
    x: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> Any:
    return multilabel_margin(x, target, reduction_of(size_average, reduce, reduction))[0]


def multilabel_margin(x: Any, target: Any, reduction: Any) -> tuple[Any, Any]:
    """Return the loss, and a mask of the target classes. torch's own graph takes labels after the first -1 for 0."""
    given = target
    reduction = ("none", "mean", "sum")[reduction] if isinstance(reduction, int) else reduction
    if x.shape != target.shape or x.dim() > 2 or 0 in x.shape[-1:]:
        shapes = f"{tuple(x.shape)} and {tuple(target.shape)}"
        raise ShapeError(f"multilabel_margin_loss got shapes {shapes}; give it input and target alike, [N, C] or [C]")
    if not x.dim():
        x, target = x.unsqueeze(0), target.unsqueeze(0)
    labels = (target == -1).cumsum(-1) == 0  # before the first -1
    chosen = x.gather(-1, torch.where(labels, target, 0))
    classes = torch.arange(x.size(-1), device=x.device)
    hit = (labels.unsqueeze(-1) & (target.unsqueeze(-1) == classes)).any(-2)
    margins = (1 - chosen.unsqueeze(-1) + x.unsqueeze(-2)).clamp_min(0)
    counted = labels.unsqueeze(-1) & ~hit.unsqueeze(-2)
    loss = _reduce((margins * counted).sum((-2, -1)) / x.size(-1), reduction)
    return loss, hit.reshape(given.shape).to(x.dtype)


def ctc(x: Any, target: Any, lengths: Any, target_lengths: Any, blank: int, zero_infinity: bool) -> Any:
    """The CTC loss of each sample of a batch. The meta device has no shape for it, so it is given here."""
    if x.is_meta:
        return x.new_empty(x.shape[1:-1])
    return F.ctc_loss(x, target, lengths, target_lengths, blank, "none", zero_infinity)


def of_samples(call: ShapedCall) -> Factors:
    """The rule of `ctc`. Concatenated targets, without a dim for the samples, take whole operands."""
    padded = [*map(len, call.shapes)] == [3, 2, 1, 1]
    return match(parse("[t] n [c], n [s], n, n -> n"), call.shapes) if padded else gathered(call)


def _ctc(
    x: Any,
    target: Any,
    lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Any:
    lengths, target_lengths = (
        given if isinstance(given, torch.Tensor) else torch.tensor(given, dtype=torch.int64, device=x.device)
        for given in (lengths, target_lengths)
    )
    loss = call_torch(ctc, (x, target, lengths, target_lengths, blank, zero_infinity))
    return _reduce(loss / target_lengths.clamp(min=1) if reduction == "mean" else loss, reduction)


def smoothed_of_linear(
    x: Any,
    linear_weight: Any,
    target: Any,
    *,
    linear_bias: Any = None,
    ignore_index: int | None = None,
    options: Any = None,
    **others: Any,
) -> Any:
    """``linear_cross_entropy`` with ``label_smoothing``: a linear layer, and then ``F.cross_entropy``."""
    classes = tuple(linear_weight.shape[:-1])
    if x.dim() not in (1, 2) or not classes or (x.dim() == 1 and len(classes) > 1):
        raise ShapeError(
            f"linear_cross_entropy got {x!r} and {linear_weight!r}; give it [N, in] and [classes, ..., in]"
        )
    logits = F.linear(x, linear_weight.flatten(0, -2), None if linear_bias is None else linear_bias.flatten())
    logits = logits.reshape(*x.shape[:-1], *classes)
    if ignore_index is not None and target.shape == logits.shape:
        raise RuntimeError("ignore_index cannot be specified when target contains probabilities")
    return F.cross_entropy(logits, target, ignore_index=-100 if ignore_index is None else ignore_index, **others)


LOSSES: Final[dict[Any, Callable[..., Any]]] = {
    **{getattr(F, name): _of_elements(getattr(F, name)) for name in ELEMENTWISE},
    F.gaussian_nll_loss: _gaussian_nll,
    F.ctc_loss: _ctc,
    F.pairwise_distance: _pairwise_distance,
    F.multilabel_margin_loss: _multilabel_margin,
    F.cosine_embedding_loss: _cosine_embedding,
    F.triplet_margin_loss: _triplet_margin,
    F.triplet_margin_with_distance_loss: _triplet,
}
#: decompositions of ops in place of torch's own, which are wrong
DECOMPOSED: Final[dict[Any, Callable[..., Any]]] = {
    torch.ops.aten.multilabel_margin_loss_forward.default: multilabel_margin
}
#: losses that take a weight per element
WEIGHED: Final = frozenset((F.mse_loss, F.l1_loss))
