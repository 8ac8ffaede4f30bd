"""Cross entropy of labels, one number a row: where classes are sharded no row of logits moves, forward or backward.

Of logits ``x[c]`` and a label t it is ``log(sum_c exp(x[c] - m)) - (x[t] - m)`` with the row's maximum m, which has no
derivative. The gradient is ``softmax(x) - one_hot(t)``, which each rank has of its own classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fspmd.collectives import psum
from fspmd.rules.bodies import Bodied, BodyLayout, Site, widened
from fspmd.rules.factors import Factors
from fspmd.rules.gather_scatter import filled, in_block, own
from fspmd.rules.global_call import Whole
from fspmd.rules.softmaxes import peak
from fspmd.sharded import call_torch


def of_labels(x: Any, target: Any, ignore_index: int) -> Any:
    """``[n, c, ...]``, ``[n, ...]`` -> ``[n, ...]``, or ``[c]``, ``[]`` -> ``[]``; 0 where a label is ignored."""
    return F.cross_entropy(x, target, ignore_index=ignore_index, reduction="none")


def labelled(whole: Whole) -> Factors:
    """The rule of `of_labels`."""
    d = class_dim(whole.ndim)
    rows = tuple(dim for dim in range(whole.ndim) if dim != d)
    return Factors((tuple(range(whole.ndim)), rows), (rows,), whole=frozenset({d}))


def class_dim(ndim: int) -> int:
    """Which dim of logits is that of classes."""
    return min(1, ndim - 1)


def _sharded_loss(site: Site, x: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """An all-reduce of the maximum of each row, and one of its sum and of its label's logit; none backward."""
    d = class_dim(x.dim())
    x = widened(x)
    x = x - peak(site, x, (d,))
    ignored = target == ignore_index
    places, mine = in_block(site, target.masked_fill(ignored, 0).unsqueeze(d), d, site.operands[0].shape[d])
    chosen = own(filled(site, x, d, d).gather(d, places), mine)
    total, chosen = psum(torch.cat([x.exp().sum(d, keepdim=True), chosen], d), site.over((d,))).split(1, d)
    found: Tensor = (total.log() - chosen).squeeze(d).masked_fill(ignored, 0)
    return found.to(site.results[0].dtype)


def _time(lying: BodyLayout) -> float:
    size = int(lying.row_bytes())
    return lying.price("reduce", size, size) + lying.price("reduce", 2 * size, 2 * size)


labelled_on_blocks = Bodied(_sharded_loss, _time, 0.0)


def has_labels(input: Any = None, target: Any = None, *_: Any, **__: Any) -> bool:
    """Whether targets are one label a row."""
    if not isinstance(input, Tensor) or not isinstance(target, Tensor) or not input.ndim:
        return False
    rows = [size for dim, size in enumerate(input.shape) if dim != class_dim(input.ndim)]
    return target.dtype is torch.int64 and input.dtype.is_floating_point and [*target.shape] == rows


def reduction_of(size_average: Any, reduce: Any, reduction: str) -> str:
    """The name of a reduction, which older options, if given, stand for."""
    if size_average is None and reduce is None:
        return reduction
    if reduce is not None and not reduce:
        return "none"
    return "mean" if size_average is None or size_average else "sum"


def cross_entropy(
    x: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Of labels: of a sharded batch one all-reduce of two numbers, the sum and how many it is of."""
    reduction = reduction_of(size_average, reduce, reduction)
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    found = call_torch(of_labels, (x, target, ignore_index))
    ignored = target == ignore_index
    counted = ~ignored
    if weight is not None:
        counted = weight[target.masked_fill(ignored, 0)].masked_fill(ignored, 0)
        found = found * counted
    if reduction == "none":
        return found
    wide = torch.promote_types(found.dtype, torch.float32)
    total = found.sum(dtype=wide)
    if reduction == "mean":
        total = call_torch(ratio, (torch.stack([total, counted.sum(dtype=wide)]),))
    return total.to(found.dtype)


def ratio(both: Any) -> Any:
    """Of two numbers side by side, so that pending sums of both are one all-reduce."""
    return both[0] / both[1]
