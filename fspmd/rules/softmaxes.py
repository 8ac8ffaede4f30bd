"""Softmax, log-softmax and cross entropy along sharded dims, by the maximum and the sum over all blocks.

In cross entropy of labels only a few numbers per row move forward, and nothing moves backward. For logits ``x[c]`` and
a label ``t`` it is ``log(sum_c exp(x[c] - m)) - (x[t] - m)``, where ``m`` is the maximum of the row, treated as a
constant. The gradient is ``softmax(x) - one_hot(t)``; each rank computes it for its own classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fspmd.collectives import pmax, psum
from fspmd.rules.bodies import Bodied, BodyLayout, Dim, Site, dims_of, padded, reducing, widened
from fspmd.rules.factors import Factors, ShapedCall
from fspmd.rules.lookups import filled, in_block, own
from fspmd.sharded import call_torch


def peak(site: Site, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the greatest element along dims, over all blocks, as a constant for autograd."""
    x = x.detach()
    x = x.real if x.is_complex() else x
    for d in dims:
        x = padded(site, x, d, -torch.inf)
    top = pmax(x.amax(dims, keepdim=True), site.over(dims))
    return top.where(top.isfinite(), 0)


def _shifted(site: Site, x: Tensor, dim: int | None, options: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return the elements less the greatest one, and the sum of their exponentials. ``options`` may have a dtype."""
    d = (0 if x.dim() in (1, 3) else 1) if dim is None else dim % x.dim()
    for option in options:
        if isinstance(option, torch.dtype):
            x = x.to(option)
    x = widened(x)
    x = x - peak(site, x, (d,))
    return x, psum(x.exp().sum(d, keepdim=True), site.over((d,)))


def _softmax(finish: Callable[[Tensor, Tensor], Tensor]) -> Bodied:
    """Return a body with two all-reduces of one number per row forward, and one backward.

    ``finish`` takes the shifted elements, and the sum of their exponentials.
    """

    def body(site: Site, x: Tensor, dim: int | None = None, *options: Any, **named: Any) -> Tensor:
        return finish(*_shifted(site, x, dim, (*options, *named.values()))).to(site.results[0].dtype)

    return reducing(2, 1)(body)


softmax = _softmax(lambda x, total: x.exp() / total)
log_softmax = _softmax(lambda x, total: x - total.log())
#: zeros where all elements are minus infinity
safe_softmax = _softmax(lambda x, total: x.exp() / total.where(total != 0, 1))


def _softmax_backward(in_log: bool) -> Bodied:
    """Return the gradient of a softmax, given its result: one all-reduce of one number per row, also backward."""

    def body(site: Site, grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        weighed = widened(grad) if in_log else widened(grad) * output
        total = psum(weighed.sum(dim, keepdim=True), site.over((dim % grad.dim(),)))
        return (weighed - (output.exp() if in_log else output) * total).to(dtype)

    return reducing(1)(body)


softmax_backward, log_softmax_backward = _softmax_backward(False), _softmax_backward(True)


@reducing(2, 0)
def logsumexp(site: Site, x: Tensor, dim: Dim, keepdim: bool = False) -> Tensor:
    """The body of ``logsumexp``: two all-reduces of one number per row forward, none backward."""
    dims = dims_of(x, dim)
    dtype = site.results[0].dtype
    x = widened(x.to(dtype))
    top = peak(site, x, dims)
    total = psum((x - top).exp().sum(dims, keepdim=True), site.over(dims)).log() + top
    return (total if keepdim else total.squeeze(dims)).to(dtype)


def of_labels(x: Any, target: Any, ignore_index: int) -> Any:
    """The loss of each row: ``[n, c, ...]``, ``[n, ...]`` -> ``[n, ...]``, or ``[c]``, ``[]`` -> ``[]``.

    It is 0 where a label is ignored.
    """
    return F.cross_entropy(x, target, ignore_index=ignore_index, reduction="none")


def labelled(call: ShapedCall) -> Factors:
    """The rule of `of_labels`."""
    d = class_dim(call.ndim)
    rows = tuple(dim for dim in range(call.ndim) if dim != d)
    return Factors((tuple(range(call.ndim)), rows), (rows,), whole=frozenset({d}))


def class_dim(ndim: int) -> int:
    """Return the dim of the classes, of logits with so many dims."""
    return min(1, ndim - 1)


def _sharded_loss(site: Site, x: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """The body of `of_labels`: an all-reduce of each row's maximum, and one of its sum and its label's logit.

    Backward does not communicate.
    """
    d = class_dim(x.dim())
    x = widened(x)
    x = x - peak(site, x, (d,))
    ignored = target == ignore_index
    places, mine = in_block(site, target.masked_fill(ignored, 0).unsqueeze(d), d, site.operands[0].shape[d])
    chosen = own(filled(site, x, d, d).gather(d, places), mine)
    total, chosen = psum(torch.cat([x.exp().sum(d, keepdim=True), chosen], d), site.over((d,))).split(1, d)
    loss: Tensor = (total.log() - chosen).squeeze(d).masked_fill(ignored, 0)
    return loss.to(site.results[0].dtype)


def _time(layout: BodyLayout) -> float:
    size = int(layout.row_bytes())
    return layout.price("reduce", size, size) + layout.price("reduce", 2 * size, 2 * size)


labelled_on_blocks = Bodied(_sharded_loss, _time, 0.0)


def has_labels(input: Any = None, target: Any = None, *_: Any, **__: Any) -> bool:
    """Whether the targets are one label per row."""
    if not _are_classified(input, target):
        return False
    rows = [size for dim, size in enumerate(input.shape) if dim != class_dim(input.ndim)]
    return target.dtype is torch.int64 and input.dtype.is_floating_point and [*target.shape] == rows


def has_probabilities(input: Any = None, target: Any = None, *_: Any, **__: Any) -> bool:
    """Whether the targets are a probability for each class."""
    return _are_classified(input, target) and target.dtype.is_floating_point and target.shape == input.shape


def _are_classified(input: Any, target: Any) -> bool:
    """Whether both are tensors, and the first has a dim of classes."""
    return isinstance(input, Tensor) and isinstance(target, Tensor) and input.ndim > 0


def reduction_of(size_average: Any, reduce: Any, reduction: str) -> str:
    """Return the name of a reduction. The deprecated options ``size_average`` and ``reduce`` override it."""
    if size_average is None and reduce is None:
        return reduction
    if reduce is not None and not reduce:
        return "none"
    return "mean" if size_average is None or size_average else "sum"


def _smooths(label_smoothing: float) -> bool:
    """Whether a number smooths labels. A negative one does not."""
    if label_smoothing > 1:
        raise RuntimeError  # torch's own call then raises with its message
    return label_smoothing > 0


def _smoothed(x: Any, target: Any, weight: Any, ignored: Any, smoothing: float) -> Any:
    """The smoothed loss of each row. torch's graph has ``smoothing`` as a constant, so each would be traced anew."""
    d = class_dim(x.ndim)
    logs = x.log_softmax(d)
    if torch.is_autocast_enabled(logs.device.type):  # torch's graph calls nll_loss, which autocast widens
        logs = logs.to(torch.promote_types(logs.dtype, torch.float32))
    if weight is not None:
        logs = logs * weight.reshape(-1, *[1] * (x.ndim - d - 1))
    labels = target.masked_fill(ignored, 0).unsqueeze(d)
    rows = logs.gather(d, labels).squeeze(d) * (1 - smoothing) + logs.sum(d) * (smoothing / x.shape[d])
    return -rows.masked_fill(ignored, 0)


def of_smoothed_probabilities(x: Any, target: Any, *, label_smoothing: float, **options: Any) -> Any:
    """``F.cross_entropy`` of probabilities, which are smoothed first."""
    if _smooths(label_smoothing):
        target = target * (1 - label_smoothing) + label_smoothing / x.shape[class_dim(x.ndim)]
    return F.cross_entropy(x, target, **options)


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
    """``F.cross_entropy`` of labels. For a sharded batch one all-reduce adds up the loss and its weight."""
    reduction = reduction_of(size_average, reduce, reduction)
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if weight is not None and [*weight.shape] != [x.shape[class_dim(x.ndim)]]:
        raise RuntimeError  # torch's own call then raises with its message
    smooths = _smooths(label_smoothing)
    losses: Any = None if smooths else call_torch(of_labels, (x, target, ignore_index))
    ignored = target == ignore_index
    counted = ~ignored if weight is None else weight[target.masked_fill(ignored, 0)].masked_fill(ignored, 0)
    if smooths:
        losses = _smoothed(x, target, weight, ignored, label_smoothing)
    elif weight is not None:
        losses = losses * counted
    if reduction == "none":
        return losses
    wide = torch.promote_types(losses.dtype, torch.float32)
    total = losses.sum(dtype=wide)
    if reduction == "mean":
        total = call_torch(ratio, (torch.stack([total, counted.sum(dtype=wide)]),))
    return total.to(losses.dtype)


def ratio(pair: Any) -> Any:
    """Return the quotient of the two elements of ``pair``, whose pending sums are settled in one all-reduce."""
    return pair[0] / pair[1]
