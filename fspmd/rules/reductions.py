"""Functions that take dims together, or work along them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from fspmd.rules.elementwise import elementwise
from fspmd.rules.factors import Dims, Factors, Shape
from fspmd.rules.global_call import NO_RULE, Rule, Whole


def _without(whole: Whole, dims: Sequence[int], shape: Shape) -> Dims:
    """The dims of a result from which some are gone, or stand with another size; others may follow."""
    if len(shape) >= whole.ndim:
        return (*(None if d in dims else d for d in range(whole.ndim)), *(None,) * (len(shape) - whole.ndim))
    kept = [d for d in range(whole.ndim) if d not in dims]
    return (*kept, *(None,) * (len(shape) - len(kept)))


def summed(whole: Whole) -> Factors:
    """Over sharded dims the results are pending sums."""
    dims = whole.dims(1, "dim")
    return Factors((tuple(range(whole.ndim)),), (_without(whole, dims, whole.results[0]),), summed=frozenset(dims))


def product(whole: Whole) -> Factors:
    """Along dims that must be whole; of one element it is a sum, to which empty blocks add nothing."""
    dims, shape = whole.dims(1, "dim"), whole.shapes[0]
    return summed(whole) if not shape or prod(shape[d] for d in dims) == 1 else along(whole, dims)


def product_of_blocks(shape: Shape, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The same on blocks; ``shape`` is that of the global tensor."""
    single = (prod(shape) if dim is None or not shape else shape[dim]) == 1
    take = x.sum if single else x.prod
    return take(dtype=dtype) if dim is None else take(dim, keepdim, dtype=dtype)


def histogram(whole: Whole) -> Factors:
    """Counts of all elements between two bounds, or where there are none between the least and the greatest."""
    dims = frozenset(range(whole.ndim))
    low, high = whole.argument(2, "min", 0), whole.argument(3, "max", 0)
    found = Factors((tuple(range(whole.ndim)),), ((None,),), summed=dims)
    return found if low != high else found._replace(whole=dims)


def over(place: int = 1, name: str = "dim", default: int | None = None, *, kept: bool = False) -> Rule:
    """Along dims that must be whole: all by default, or ``default``. Further operands lie alike, or are whole.

    ``kept``: the result has them as the operand does.
    """
    return lambda whole: along(whole, whole.dims(place, name, default), kept=kept)


def along(whole: Whole, dims: Sequence[int], *, kept: bool = False) -> Factors:
    """The dims that must be whole, as `over` says."""
    every: Dims = tuple(range(whole.ndim))
    first = whole.shapes[0]
    operands = [every if shape == first else (None,) * len(shape) for shape in whole.shapes]
    results = [every if kept and shape == first else _without(whole, dims, shape) for shape in whole.results]
    return Factors(tuple(operands), tuple(results), whole=frozenset(dims))


def all_but(place: int, name: str) -> Rule:
    """Only the dim that an argument names may be sharded."""
    return lambda whole: along(whole, [d for d in range(whole.ndim) if d != whole.argument(place, name) % whole.ndim])


def extreme(whole: Whole) -> Factors:
    """``max`` and ``min``: of all, of a dim, or of two operands place by place."""
    return along(whole, whole.dims(1, "dim")) if len(whole.shapes) == 1 else elementwise(whole)


def layer_norm(whole: Whole) -> Factors:
    """Of x, and a weight and a bias of the normalised dims."""
    shape = tuple(whole.argument(1, "normalized_shape"))
    normalised = len(shape)
    if any(own[-normalised:] != shape for own in whole.shapes) or not shape:
        return NO_RULE
    dims = tuple(range(whole.ndim))
    inner = dims[whole.ndim - normalised :]
    outer = dims[: whole.ndim - normalised]
    results = (dims, *((*outer, *(None,) * (len(shape) - len(outer))) for shape in whole.results[1:]))
    return Factors((dims, *(inner for _ in whole.shapes[1:])), results, whole=frozenset(inner))


def mean_of_blocks(shape: Shape, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The sum over the block, divided by the size of the whole; ``shape`` is that of the global tensor."""
    if type(x) is torch.Tensor and x.shape == shape:
        return x.mean(dtype=dtype) if dim is None else x.mean(dim, keepdim, dtype=dtype)
    over = [dim] if isinstance(dim, int) else dim or range(len(shape))
    count = prod(shape[d] for d in over) if shape else 1
    dtype = x.dtype if dtype is None else dtype
    wide = torch.float32 if dtype.itemsize == 2 else dtype  # a sum of many numbers overflows where their mean does not
    return ((x.sum(dtype=wide) if dim is None else x.sum(dim, keepdim, dtype=wide)) / count).to(dtype)
