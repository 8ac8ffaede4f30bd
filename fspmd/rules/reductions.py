"""Reductions, and functions that work along dims: their rules, and the bodies for sharded dims.

A body combines the results of all ranks' blocks: vector norms, products, counts. Variances and normalization layers
take the mean first, then the squared differences from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.collectives import pmax, psum
from fspmd.collectives.reductions import product
from fspmd.rules.bodies import (
    Bodied,
    Body,
    BodyLayout,
    Dim,
    Site,
    dims_of,
    finding,
    gathering,
    is_followed,
    reducing,
    widened,
)
from fspmd.rules.extremes import extreme
from fspmd.rules.factors import NO_RULE, Factors, Shape, ShapedCall, along, match, parse, without


def summed(call: ShapedCall) -> Factors:
    """The rule of a sum over ``dim``: over sharded dims the results are pending sums."""
    dims = call.dims(1, "dim")
    return Factors((tuple(range(call.ndim)),), (without(call, dims, call.results[0]),), summed=frozenset(dims))


def product_rule(call: ShapedCall) -> Factors:
    """The rule of ``prod`` along whole dims. A product of one element is a sum, to which empty blocks add nothing."""
    dims, shape = call.dims(1, "dim"), call.shapes[0]
    return summed(call) if not shape or prod(shape[d] for d in dims) == 1 else along(call, dims)


def product_of_blocks(shape: Shape, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Run ``prod`` on blocks; ``shape`` is the global shape."""
    single = (prod(shape) if dim is None or not shape else shape[dim]) == 1
    take = x.sum if single else x.prod
    return take(dtype=dtype) if dim is None else take(dim, keepdim, dtype=dtype)


def histogram(call: ShapedCall) -> Factors:
    """The rule of ``histc``: a sum over all elements. If the bounds are equal, they are the extremes of whole dims."""
    dims = frozenset(range(call.ndim))
    low, high = call.argument(2, "min", 0), call.argument(3, "max", 0)
    factors = Factors((tuple(range(call.ndim)),), ((None,),), summed=dims)
    return factors if low != high else factors._replace(whole=dims)


def renorm(call: ShapedCall) -> Factors:
    """The rule of ``renorm``: only the dim that the argument names may be sharded."""
    return along(call, [d for d in range(call.ndim) if d != call.argument(2, "dim") % call.ndim])


def layer_norm_rule(call: ShapedCall) -> Factors:
    """The rule of layer norms: of x, and of a weight and a bias with the normalised dims."""
    shape = tuple(call.argument(1, "normalized_shape"))
    normalised = len(shape)
    if any(own[-normalised:] != shape for own in call.shapes) or not shape:
        return NO_RULE
    dims = tuple(range(call.ndim))
    inner = dims[call.ndim - normalised :]
    outer = dims[: call.ndim - normalised]
    results = (dims, *((*outer, *(None,) * (len(shape) - len(outer))) for shape in call.results[1:]))
    return Factors((dims, *(inner for _ in call.shapes[1:])), results, whole=frozenset(inner))


def mean_of_blocks(shape: Shape, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Return the sum over the block divided by the global count; ``shape`` is the global shape."""
    if type(x) is torch.Tensor and x.shape == shape:
        return x.mean(dtype=dtype) if dim is None else x.mean(dim, keepdim, dtype=dtype)
    over = [dim] if isinstance(dim, int) else dim or range(len(shape))
    count = prod(shape[d] for d in over) if shape else 1
    dtype = x.dtype if dtype is None else dtype
    wide = torch.float32 if dtype.itemsize == 2 else dtype  # a sum may overflow where the mean does not
    return ((x.sum(dtype=wide) if dim is None else x.sum(dim, keepdim, dtype=wide)) / count).to(dtype)


def _squared(x: Tensor) -> Tensor:
    return (x * x.conj()).real if x.is_complex() else x * x


def _mean(site: Site, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the mean over all blocks along dims, which are kept."""
    count = prod(site.operands[0].shape[d] for d in dims)
    return psum(x.sum(dims, keepdim=True), site.over(dims)) / count


def _variance(
    site: Site,
    x: Tensor,
    dim: Dim | bool = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the variance and the mean; takes the arguments of all overloads of ``torch.var``.

    For any number m, ``sum((x - m)^2) = sum((x - mean)^2) + n (mean - m)^2``. Here m is the value of the mean as a
    constant. Then the last term is zero and so is its gradient, and backward needs no sum over ranks.
    """
    if isinstance(dim, bool):
        unbiased = dim
    dims = dims_of(x, None if isinstance(dim, bool) else dim)
    x = widened(x)
    mean = _mean(site, x, dims)
    constant = mean.detach()
    count = prod(site.operands[0].shape[d] for d in dims)
    squares = psum(_squared(x - constant).sum(dims, keepdim=True), site.over(dims)) - count * _squared(mean - constant)
    variance = squares / max(count - (unbiased if correction is None else correction), 0)
    return (variance, mean) if keepdim else (variance.squeeze(dims), mean.squeeze(dims))


def root(x: Tensor, p: float = 2) -> Tensor:
    """Return the p-th root. Zeros get no gradient, as in norms of torch."""
    positive = x > 0
    safe = x.where(positive, 1)
    return torch.where(positive, safe.sqrt() if p == 2 else safe.pow(1 / p), x * 0)


def _reduction(*parts: Any) -> Body:
    def body(site: Site, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        moments = _variance(site, x, *args, **kwargs)
        outs = tuple(part(x).to(spec.dtype) for part, x, spec in zip(parts, moments, site.results, strict=False))
        return outs if len(parts) > 1 else outs[0]

    return body


def _same(x: Tensor) -> Tensor:
    return x


#: bodies with two all-reduces of one number per row forward, and none backward
MOMENTS = {
    name: reducing(2, 0)(_reduction(*parts))
    for name, parts in (("var", (_same,)), ("std", (root,)), ("var_mean", (_same, _same)), ("std_mean", (root, _same)))
}


def _inner(x: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(x.dim() - len(shape), x.dim()))


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _normalised(site: Site, x: Tensor, shape: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x normalised, the mean, and the reciprocal of the standard deviation."""
    dims = _inner(x, shape)
    x = widened(x)
    mean = _mean(site, x, dims)
    x = x - mean
    scale = torch.rsqrt(_mean(site, x * x, dims) + eps)
    return x * scale, mean, scale


@reducing(2)
def layer_norm(
    site: Site,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
    **__: Any,
) -> Tensor:
    """The body of ``layer_norm``: two all-reduces of one number per row forward, two backward."""
    return _affine(_normalised(site, x, normalized_shape, eps)[0], weight, bias).to(x.dtype)


@reducing(2)
def native_layer_norm(
    site: Site, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    """The body of ``native_layer_norm``, which also gives the mean and the reciprocal of the standard deviation."""
    out, *others = _normalised(site, x, normalized_shape, eps)
    outs = [_affine(out, weight, bias), *others]
    return tuple(result.to(spec.dtype) for result, spec in zip(outs, site.results, strict=True))


@reducing(1)
def rms_norm(
    site: Site, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """The body of ``rms_norm``: one all-reduce of one number per row forward, one backward."""
    wide = widened(x)
    mean = _mean(site, _squared(wide), _inner(x, normalized_shape))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    return _affine(wide * torch.rsqrt(mean + eps), weight, None).to(site.results[0].dtype)


def _power(x: Tensor, p: float) -> Tensor:
    """Return ``x ** p`` of absolute values. Zeros get no gradient."""
    if p in (1, 2):
        return x if p == 1 else x * x
    nonzero = x != 0
    powers = x.where(nonzero, 1).pow(p)
    return powers.where(nonzero, 0 if p >= 0 else torch.inf)


@reducing(1, 0)
def vector_norm(
    site: Site, x: Tensor, ord: float = 2, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The body of vector norms: one all-reduce of one number per row forward, none backward.

    A norm of infinite order is an `extreme`.
    """
    dims = dims_of(x, dim)
    x = widened(x if dtype is None else x.to(dtype)).abs()
    if math.isinf(ord):
        norm = extreme(site, x, dims, ord > 0)
    else:
        norm = psum(_power(x, ord).sum(dims, keepdim=True), site.over(dims))
        if ord not in (0, 1):
            norm = root(norm, ord) if ord > 0 else norm.pow(1 / ord)
    return (norm if keepdim else norm.squeeze(dims)).to(site.results[0].dtype)


def distances(call: ShapedCall) -> Factors:
    """The rule of ``cdist``. Columns may be sharded by a body that sums powers of differences, if ``p`` is finite."""
    return match(_DISTANCES[call.argument(2, "p", 2.0) == math.inf], call.shapes)


_DISTANCES: Final = {False: parse("... m [k], ... n [k] -> ... m n"), True: parse("... m 1, ... n 1 -> ... m n")}


def distances_within(call: ShapedCall) -> Factors:
    """The rule of ``pdist``, the distances between the rows of one matrix."""
    return match(_WITHIN[call.argument(1, "p", 2.0) == math.inf], call.shapes)


_WITHIN: Final = {False: parse("1 [k] -> 1"), True: parse("1 1 -> 1")}

#: names of the ways to compute distances, by the number that aten has for each
_CDIST_MODES: Final = ("use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist")


@reducing(1, 0, each=True)
def distances_body(site: Site, x: Tensor, y: Tensor, p: float, mode: int | None) -> Tensor:
    """The body of ``cdist``: one all-reduce of one number per pair of rows forward, none backward."""
    return _added_up(site, torch.cdist(x, y, p, _CDIST_MODES[mode or 0]), p)


@reducing(1, 0, each=True)
def distances_within_body(site: Site, x: Tensor, p: float = 2) -> Tensor:
    """The body of ``pdist``: the same for the rows of one matrix."""
    return _added_up(site, torch.pdist(x, p), p)


def _added_up(site: Site, own: Tensor, p: float) -> Tensor:
    """Return distances, given those along the columns of this rank's block."""
    if p == 0:
        return psum(own, site.over(("k",)))
    powers = psum(_power(own, p), site.over(("k",)))
    return powers if p == 1 else root(powers, p)


def _prod(site: Site, x: Tensor, dim: int | None = None, keepdim: bool = False, **_: Any) -> Tensor:
    """The body of ``prod``: one all-reduce of one number per row.

    With a gradient it is one all-gather forward, and nothing backward.
    """
    dtype = site.results[0].dtype
    x = x.to(dtype)
    if dtype.is_floating_point:
        x = widened(x)
    dims = dims_of(x, dim)
    own = x.prod() if dim is None else x.prod(dim, keepdim)
    if dtype.is_complex or is_followed(x):
        return site.gathered(dims, own)[0].prod(0).to(dtype)
    return product(own, site.over(dims)).to(dtype)


def _reduced(layout: BodyLayout) -> float:
    """Return the µs of `_prod` without gradients: an all-reduce, or for complex numbers an all-gather."""
    price = gathering(1) if layout.operands[0].dtype.is_complex else reducing(1)
    return price(_prod).time(layout)


def _gathered(layout: BodyLayout) -> float:
    """Return the µs that gradients add: those of the all-gather in place of the all-reduce."""
    return gathering(1)(_prod).time(layout) - _reduced(layout)


prod_body = Bodied(_prod, _reduced, _gathered)


def _counted(how: str) -> Body:
    """Return the body of ``any`` or ``all``: one all-reduce of one byte per row."""

    def body(site: Site, x: Tensor, dim: Dim = None, keepdim: bool = False, **_: Any) -> Tensor:
        dims = dims_of(x, dim)
        hits = x == 0 if how == "all" else x != 0
        some = pmax(hits.any(dims, keepdim=keepdim).to(torch.uint8), site.over(dims))
        return (some == 0 if how == "all" else some > 0).to(site.results[0].dtype)

    return body


COUNTS = {name: finding(1, 0)(_counted(name)) for name in ("any", "all")}
