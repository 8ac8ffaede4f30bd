"""The rules of functions that take or set elements by tensors of indices.

Along a sharded dim a body (`gather_scatter.py`) handles the indices in each block. Elements that it takes are a pending
sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from fspmd.rules.factors import NO_RULE, Dims, Factors, Shape, Whole, match, parse

_SECOND: Final = frozenset({1})


def embedding(whole: Whole) -> Factors:
    """The rule of ``F.embedding``. Options that need all indices at once, or write into the table, have no rule."""
    others = zip((3, 5, 6), ("max_norm", "scale_grad_by_freq", "sparse"), strict=True)
    return _table("..., v d -> ... d", whole, others)


def torch_embedding(whole: Whole) -> Factors:
    """The rule of ``torch.embedding``, which takes the table first."""
    return _table("v d, ... -> ... d", whole, zip((3, 4), ("scale_grad_by_freq", "sparse"), strict=True))


def _table(text: str, whole: Whole, others: Iterable[tuple[int, str]]) -> Factors:
    if any(whole.argument(place, name) for place, name in others):
        return NO_RULE
    factors = match(parse(text), whole.shapes)
    return factors._replace(whole=frozenset({factors.names["v"]}))


def gather(whole: Whole) -> Factors:
    """The rule of ``gather``: one element of x per element of the index, which may be sharded along ``dim`` too."""
    x, index = whole.shapes[:2]
    if not x or len(index) != len(x):
        return _no_dims(whole, _SECOND)
    dim = whole.argument(1, "dim") % len(x)
    place = len(x)  # the factor of the index along ``dim``
    along: Dims = tuple(place if d == dim else d if size == x[d] else None for d, size in enumerate(index))
    operand: Dims = tuple(d if d in along or d == dim else None for d in range(len(x)))
    looked_up = frozenset({dim})
    return Factors((operand, along), (along,), summed=looked_up, whole=looked_up, places=_SECOND)


def scatter(whole: Whole) -> Factors:
    """The rule of ``scatter``: along dims other than ``dim``, index and source are cut as x, if they are as long."""
    x, *others = whole.shapes
    if not x:
        return _no_dims(whole, _SECOND)
    dim = whole.argument(1, "dim") % len(x)
    shared = {d for d in range(len(x)) if d != dim and all(len(s) == len(x) and s[d] == x[d] for s in others)}
    dims: Dims = tuple(d if d in shared else None for d in range(len(x)))
    operand: Dims = tuple(d if d in shared or d == dim else None for d in range(len(x)))
    return Factors((operand, *(dims if s else () for s in others)), (operand,), whole=frozenset({dim}), places=_SECOND)


def select(whole: Whole) -> Factors:
    """The rule of ``index_select``: slices of x by a vector of indices, which may be sharded."""
    x = whole.shapes[0]
    if not x or len(whole.shapes[1]) != 1:
        return _no_dims(whole, _SECOND)
    dim = whole.argument(1, "dim") % len(x)
    result: Dims = tuple(len(x) if d == dim else d for d in range(len(x)))
    looked_up = frozenset({dim})
    return Factors((tuple(range(len(x))), (len(x),)), (result,), summed=looked_up, whole=looked_up, places=_SECOND)


def put_slices(whole: Whole) -> Factors:
    """The rule of ``index_add`` and related functions: the source is cut as x, except along ``dim``."""
    x, _, *sources = whole.shapes
    if not x:
        return _no_dims(whole, _SECOND)
    dim = whole.argument(1, "dim") % len(x)
    kept: Dims = tuple(None if d == dim else d for d in range(len(x)))
    every: Dims = tuple(range(len(x)))
    return Factors(
        (every, (None,) * len(whole.shapes[1]), *(kept if len(s) == len(x) else (None,) * len(s) for s in sources)),
        (every,),
        whole=frozenset({dim}),
        places=_SECOND,
    )


def index(whole: Whole) -> Factors:
    """The rule of ``x[..., i, j, ...]`` with tensors of indices, which broadcast and may be sharded."""
    parts = _looked_up(whole)
    if parts is None:
        return NO_RULE
    kept, places, at, shapes = parts
    joint, each = _broadcast(shapes, len(kept))
    result = [factor for d, factor in enumerate(kept) if d not in places]
    result[at:at] = joint
    indexed, others = frozenset(places), frozenset(range(1, 1 + len(shapes)))
    return Factors((kept, *each), (tuple(result),), summed=indexed, whole=indexed, places=others)


def index_put(whole: Whole) -> Factors:
    """The rule of ``index_put``: dims that are not indexed may be sharded; with masks no dim may."""
    parts = _looked_up(whole)
    if parts is None:
        return _no_dims(whole, frozenset(range(1, len(whole.shapes) - 1)))
    kept, places, at, shapes = parts
    joint = max((len(s) for s in shapes), default=0)
    rest = [factor for d, factor in enumerate(kept) if d not in places]
    values: list[int | None] = [*rest[:at], *(None,) * joint, *rest[at:]]
    given = whole.shapes[-1]
    values[:0] = [None] * (len(given) - len(values))  # torch itself refuses values with more dims
    sizes = [1 if factor is None else whole.shapes[0][factor] for factor in values]
    values, sizes = values[len(values) - len(given) :], sizes[len(sizes) - len(given) :]
    source = tuple(f if size == n else None for f, size, n in zip(values, given, sizes, strict=True))
    others = frozenset(range(1, 1 + len(shapes)))
    return Factors((kept, *((None,) * len(s) for s in shapes), source), (kept,), whole=frozenset(places), places=others)


def _looked_up(whole: Whole) -> tuple[Dims, list[int], int, Sequence[Shape]] | None:
    """Return the dims of x, the indexed dims, the place of the indices' dims in the result, and the indices' shapes.

    None if there are masks, or if no dim is indexed.
    """
    indices = whole.argument(1, "indices")
    if not isinstance(indices, (list, tuple)):
        return None
    places = [d for d, index in enumerate(indices) if index is not None]
    if any(_is_mask(indices[d]) for d in places) or len(whole.shapes) < 1 + len(places) or not places:
        return None
    kept: Dims = tuple(range(whole.ndim))
    adjacent = places[-1] - places[0] == len(places) - 1
    return kept, places, places[0] if adjacent else 0, whole.shapes[1 : 1 + len(places)]


def _is_mask(x: Any) -> bool:
    return getattr(x, "dtype", None) in (torch.bool, torch.uint8)


def _broadcast(shapes: Sequence[Shape], first: int) -> tuple[Dims, list[Dims]]:
    """Return the factors of the broadcast shape, and those of each shape. Numbers begin at ``first``."""
    n = max(map(len, shapes))
    sizes = [max((s[len(s) - n + d] for s in shapes if len(s) >= n - d), default=1) for d in range(n)]
    sizes = [0 if any(len(s) >= n - d and s[len(s) - n + d] == 0 for s in shapes) else sizes[d] for d in range(n)]
    each = [
        tuple(first + n - len(s) + d if size == sizes[n - len(s) + d] else None for d, size in enumerate(s))
        for s in shapes
    ]
    return tuple(range(first, first + n)), each


def _no_dims(whole: Whole, places: frozenset[int] = frozenset()) -> Factors:
    operands = tuple((None,) * len(shape) for shape in whole.shapes)
    return Factors(operands, tuple((None,) * len(shape) for shape in whole.results), places=places)


def take_by_element(whole: Whole) -> Factors:
    """The rule of ``take``: x must be whole; the index may have any shape."""
    dims = tuple(range(len(whole.shapes[1])))
    return Factors(((None,) * whole.ndim, dims), (dims,), places=_SECOND)


def searched(whole: Whole) -> Factors:
    """The rule of ``searchsorted``. Without a sorter, the place in a row is the sum of the places in its blocks."""
    sorter = whole.kwargs.get("sorter") is not None
    row = "[b]" if sorter else "b"
    number = isinstance(whole.argument(1, "input", whole.kwargs.get("self")), (int, float))
    if number:
        text = f"{row}, {row} -> " if sorter else f"{row} -> "
    elif whole.ndim == 1:
        text = f"{row}, ..., {row} -> ..."
    else:
        text = f"... {row}, ... v, ... {row} -> ... v"
    return match(parse(text), whole.shapes)


def embedding_bag(whole: Whole) -> Factors:
    """The rule of ``F.embedding_bag``, with bags as rows or one after another.

    Options that need all indices at once, or write into the table, take whole operands.
    """
    others = zip((3, 5, 7), ("max_norm", "scale_grad_by_freq", "sparse"), strict=True)
    if any(whole.argument(place, name) for place, name in others):
        return _no_dims(whole)
    text = "n [i], [v] d, n [i] -> n d" if whole.ndim == 2 else "[n], [v] d, [o], [n] -> 1 d"
    return match(parse(text), whole.shapes)
