"""Functions that take dims together, or work along them."""

from __future__ import annotations

from typing import Any

import torch

from fspmd.rules.factors import Dims, Factors, Shape, match, parse
from fspmd.rules.whole import NO_RULE, Rule, Whole


def _reduced(whole: Whole, dims: tuple[int, ...]) -> Dims:
    """The dims of a result from which some are gone, or kept with size 1."""
    if whole.results and len(whole.results[0]) == whole.ndim:
        return tuple(None if d in dims else d for d in range(whole.ndim))
    return tuple(d for d in range(whole.ndim) if d not in dims)


def summed(whole: Whole) -> Factors:
    """Over sharded dims the results are pending sums."""
    dims = whole.dims(1, "dim")
    return Factors((tuple(range(whole.ndim)),), (_reduced(whole, dims),), summed=frozenset(dims))


def reduced(whole: Whole) -> Factors:
    """Over whole dims; one or several results alike."""
    dims = whole.dims(1, "dim")
    result = _reduced(whole, dims)
    return Factors((tuple(range(whole.ndim)),), tuple(result for _ in whole.results), whole=frozenset(dims))


def one_reduced(place: int, name: str, default: int) -> Rule:
    """Over one whole dim, by default ``default``: kthvalue, mode, median with a dim."""

    def rule(whole: Whole) -> Factors:
        dim = whole.argument(place, name, default)
        over = dim % whole.ndim if whole.ndim else 0
        result = _reduced(whole, (over,))
        return Factors((tuple(range(whole.ndim)),), tuple(result for _ in whole.results), whole=frozenset({over}))

    return rule


def along(place: int, name: str, default: int | None = None) -> Rule:
    """Along one dim (or several), which must be whole; the results lie as the operand."""

    def rule(whole: Whole) -> Factors:
        given = whole.argument(place, name, default)
        dims = whole.dims(place, name) if given is None or not isinstance(given, int) else (given % max(1, whole.ndim),)
        result = tuple(None if d in dims else d for d in range(whole.ndim))
        return Factors((tuple(range(whole.ndim)),), tuple(result for _ in whole.results), whole=frozenset(dims))

    return rule


def layer_norm(whole: Whole) -> Factors:
    """Of x, and a weight and a bias of the normalised dims."""
    normalised = len(whole.argument(1, "normalized_shape"))
    dims = tuple(range(whole.ndim))
    inner = dims[whole.ndim - normalised :]
    return Factors((dims, *(inner for _ in whole.shapes[1:])), (dims,), whole=frozenset(inner))


def embedding(whole: Whole) -> Factors:
    """No rule for what looks at all indices at once, or writes into the table."""
    others = zip((3, 5, 6), ("max_norm", "scale_grad_by_freq", "sparse"), strict=True)
    if any(whole.argument(place, name) for place, name in others):
        return NO_RULE
    return match(parse("..., [v] d -> ... d"), whole.shapes)


def mean_of_blocks(shape: Shape, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The sum over the block, divided by the size of the whole; ``shape`` is that of the global tensor."""
    over = range(len(shape)) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    count = 1
    for d in over:
        count *= shape[d]
    dtype = x.dtype if dtype is None else dtype
    wide = torch.float32 if dtype.itemsize == 2 else dtype  # a sum of many numbers overflows where their mean does not
    return ((x.sum(dtype=wide) if dim is None else x.sum(dim, keepdim, dtype=wide)) / count).to(dtype)
