"""The rules of reductions, and of functions that work along dims."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from fspmd.rules.factors import NO_RULE, Dims, Factors, Rule, Shape, Whole, elementwise


def _without(whole: Whole, dims: Sequence[int], shape: Shape) -> Dims:
    """Return the dims of a result in which ``dims`` are missing, or have another size; new dims may follow."""
    if len(shape) >= whole.ndim:
        return (*(None if d in dims else d for d in range(whole.ndim)), *(None,) * (len(shape) - whole.ndim))
    kept = [d for d in range(whole.ndim) if d not in dims]
    return (*kept, *(None,) * (len(shape) - len(kept)))


def summed(whole: Whole) -> Factors:
    """The rule of a sum over ``dim``: over sharded dims the results are pending sums."""
    dims = whole.dims(1, "dim")
    return Factors((tuple(range(whole.ndim)),), (_without(whole, dims, whole.results[0]),), summed=frozenset(dims))


def product(whole: Whole) -> Factors:
    """The rule of ``prod`` along whole dims. A product of one element is a sum, to which empty blocks add nothing."""
    dims, shape = whole.dims(1, "dim"), whole.shapes[0]
    return summed(whole) if not shape or prod(shape[d] for d in dims) == 1 else along(whole, dims)


def product_of_blocks(shape: Shape, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Run ``prod`` on blocks; ``shape`` is the global shape."""
    single = (prod(shape) if dim is None or not shape else shape[dim]) == 1
    take = x.sum if single else x.prod
    return take(dtype=dtype) if dim is None else take(dim, keepdim, dtype=dtype)


def histogram(whole: Whole) -> Factors:
    """The rule of ``histc``: a sum over all elements. If the bounds are equal, they are the extremes of whole dims."""
    dims = frozenset(range(whole.ndim))
    low, high = whole.argument(2, "min", 0), whole.argument(3, "max", 0)
    factors = Factors((tuple(range(whole.ndim)),), ((None,),), summed=dims)
    return factors if low != high else factors._replace(whole=dims)


def over(place: int = 1, name: str = "dim", default: int | None = None, *, kept: bool = False) -> Rule:
    """Return the rule of a function along dims that must be whole.

    Further operands lie alike if they have the shape of the first, and are whole otherwise.

    Args:
        place: The place of the argument that names the dims.
        name: Its name.
        default: The dim if it is missing; None means all dims.
        kept: The result has these dims too.
    """
    return lambda whole: along(whole, whole.dims(place, name, default), kept=kept)


def along(whole: Whole, dims: Sequence[int], *, kept: bool = False) -> Factors:
    """Return the factors of a function along ``dims``, which must be whole (see `over`)."""
    every: Dims = tuple(range(whole.ndim))
    first = whole.shapes[0]
    operands = [every if shape == first else (None,) * len(shape) for shape in whole.shapes]
    results = [every if kept and shape == first else _without(whole, dims, shape) for shape in whole.results]
    return Factors(tuple(operands), tuple(results), whole=frozenset(dims))


def all_but(place: int, name: str) -> Rule:
    """Return a rule in which only the dim that an argument names may be sharded."""
    return lambda whole: along(whole, [d for d in range(whole.ndim) if d != whole.argument(place, name) % whole.ndim])


def extreme(whole: Whole) -> Factors:
    """The rule of ``max`` and ``min``: of all elements, along a dim, or elementwise of two operands."""
    return along(whole, whole.dims(1, "dim")) if len(whole.shapes) == 1 else elementwise(whole)


def layer_norm(whole: Whole) -> Factors:
    """The rule of layer norms: of x, and of a weight and a bias with the normalised dims."""
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
    """Return the sum over the block divided by the global count; ``shape`` is the global shape."""
    if type(x) is torch.Tensor and x.shape == shape:
        return x.mean(dtype=dtype) if dim is None else x.mean(dim, keepdim, dtype=dtype)
    over = [dim] if isinstance(dim, int) else dim or range(len(shape))
    count = prod(shape[d] for d in over) if shape else 1
    dtype = x.dtype if dtype is None else dtype
    wide = torch.float32 if dtype.itemsize == 2 else dtype  # a sum may overflow where the mean does not
    return ((x.sum(dtype=wide) if dim is None else x.sum(dim, keepdim, dtype=wide)) / count).to(dtype)
