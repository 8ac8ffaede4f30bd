"""Functions that take elements, or set them, by tensors of places: the dims looked along are whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fspmd.rules.factors import Dims, Factors, Shape
from fspmd.rules.whole import NO_RULE, Whole


def gather(whole: Whole) -> Factors:
    """One element of x per element of the index: along ``dim`` the index may be sharded."""
    x, index = whole.shapes[:2]
    if not x or len(index) != len(x):
        return _nothing(whole)
    dim = whole.argument(1, "dim") % len(x)
    taken: Dims = tuple(len(x) if d == dim else d if size == x[d] else None for d, size in enumerate(index))
    operand: Dims = tuple(d if d in taken else None for d in range(len(x)))
    return Factors((operand, taken), (taken,))


def scatter(whole: Whole) -> Factors:
    """The index and the source lie as x does, where they are as long, except along ``dim``."""
    x, *others = whole.shapes
    if not x:
        return _nothing(whole)
    dim = whole.argument(1, "dim") % len(x)
    shared = {d for d in range(len(x)) if d != dim and all(len(s) == len(x) and s[d] == x[d] for s in others)}
    dims: Dims = tuple(d if d in shared else None for d in range(len(x)))
    return Factors((dims,) * len(whole.shapes), (dims,))


def select(whole: Whole) -> Factors:
    """Slices of x by a vector of places, which may be sharded."""
    x = whole.shapes[0]
    if not x or len(whole.shapes[1]) != 1:
        return _nothing(whole)
    dim = whole.argument(1, "dim") % len(x)
    kept: Dims = tuple(None if d == dim else d for d in range(len(x)))
    return Factors((kept, (len(x),)), (tuple(len(x) if d is None else d for d in kept),))


def put_slices(whole: Whole) -> Factors:
    """Slices set by a vector of places: the source lies as x, except along ``dim``."""
    x, _, *sources = whole.shapes
    if not x:
        return _nothing(whole)
    dim = whole.argument(1, "dim") % len(x)
    kept: Dims = tuple(None if d == dim else d for d in range(len(x)))
    return Factors(
        (kept, (None,) * len(whole.shapes[1]), *(kept if len(s) == len(x) else (None,) * len(s) for s in sources)),
        (kept,),
    )


def index(whole: Whole) -> Factors:
    """``x[..., i, j, ...]`` by tensors of places, which broadcast and may be sharded."""
    found = _looked_up(whole)
    if found is None:
        return NO_RULE
    kept, places, at, shapes = found
    joint = _broadcast(shapes, len(kept))
    result = list(kept)
    for d in reversed(places):
        del result[d]
    result[at:at] = joint[0]
    return Factors((kept, *joint[1]), (tuple(result),))


def index_put(whole: Whole) -> Factors:
    """The dims that are not indexed may be sharded; with masks none."""
    found = _looked_up(whole)
    if found is None:
        return _nothing(whole)
    kept, places, at, shapes = found
    joint = max((len(s) for s in shapes), default=0)
    rest = [factor for d, factor in enumerate(kept) if d not in places]
    values: list[int | None] = [*rest[:at], *(None,) * joint, *rest[at:]]
    given = whole.shapes[-1]
    sizes = [1 if factor is None else whole.shapes[0][factor] for factor in values]
    values, sizes = values[len(values) - len(given) :], sizes[len(sizes) - len(given) :]
    own = tuple(f if size == n else None for f, size, n in zip(values, given, sizes, strict=True))
    return Factors((kept, *((None,) * len(s) for s in shapes), own), (kept,))


def _looked_up(whole: Whole) -> tuple[Dims, list[int], int, Sequence[Shape]] | None:
    """x with the indexed dims whole, those dims, where the dims of the indices go, and their shapes."""
    indices = whole.args[1]
    if not isinstance(indices, (list, tuple)):
        return None
    places = [d for d, one in enumerate(indices) if one is not None]
    if any(_is_mask(indices[d]) for d in places) or len(whole.shapes) < 1 + len(places) or not places:
        return None
    kept: Dims = tuple(None if d in places else d for d in range(whole.ndim))
    adjacent = places[-1] - places[0] == len(places) - 1
    return kept, places, places[0] if adjacent else 0, whole.shapes[1 : 1 + len(places)]


def _is_mask(x: Any) -> bool:
    return getattr(x, "dtype", None) in (torch.bool, torch.uint8)


def _broadcast(shapes: Sequence[Shape], first: int) -> tuple[Dims, list[Dims]]:
    """Factors, from ``first`` on, of shapes that broadcast; those of the result before those of each."""
    n = max(map(len, shapes))
    sizes = [max((s[len(s) - n + d] for s in shapes if len(s) >= n - d), default=1) for d in range(n)]
    sizes = [0 if any(len(s) >= n - d and s[len(s) - n + d] == 0 for s in shapes) else sizes[d] for d in range(n)]
    each = [
        tuple(first + n - len(s) + d if size == sizes[n - len(s) + d] else None for d, size in enumerate(s))
        for s in shapes
    ]
    return tuple(range(first, first + n)), each


def _nothing(whole: Whole) -> Factors:
    operands = tuple((None,) * len(shape) for shape in whole.shapes)
    return Factors(operands, tuple((None,) * len(shape) for shape in whole.results))


def taken_whole(whole: Whole) -> Factors:
    """From the whole of x, by the elements of an index of any shape."""
    dims = tuple(range(len(whole.shapes[1])))
    return Factors(((None,) * whole.ndim, dims), (dims,))
