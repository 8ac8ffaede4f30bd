"""Functions that take elements, or set them, by tensors of places.

Where the dim looked along is sharded a body (`gather_scatter.py`) sees to the places in each block. What it takes is a
pending sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from fspmd.rules.factors import Dims, Factors, Shape, match, parse
from fspmd.rules.global_call import NO_RULE, Whole

_SECOND: Final = frozenset({1})


def embedding(whole: Whole) -> Factors:
    """Of places and a table; no rule for what looks at all places at once, or writes into the table."""
    others = zip((3, 5, 6), ("max_norm", "scale_grad_by_freq", "sparse"), strict=True)
    return _table("..., v d -> ... d", whole, others)


def torch_embedding(whole: Whole) -> Factors:
    """The same, of a table and places."""
    return _table("v d, ... -> ... d", whole, zip((3, 4), ("scale_grad_by_freq", "sparse"), strict=True))


def _table(text: str, whole: Whole, others: Iterable[tuple[int, str]]) -> Factors:
    if any(whole.argument(place, name) for place, name in others):
        return NO_RULE
    found = match(parse(text), whole.shapes)
    return found._replace(whole=frozenset({found.names["v"]}))


def gather(whole: Whole) -> Factors:
    """One element of x per element of the index: along ``dim`` the index may be sharded."""
    x, index = whole.shapes[:2]
    if not x or len(index) != len(x):
        return _no_dims(whole, _SECOND)
    dim = whole.argument(1, "dim") % len(x)
    taken: Dims = tuple(len(x) if d == dim else d if size == x[d] else None for d, size in enumerate(index))
    place = len(x)
    along: Dims = tuple(place if d == dim else f for d, f in enumerate(taken))
    operand: Dims = tuple(d if d in taken or d == dim else None for d in range(len(x)))
    one = frozenset({dim})
    return Factors((operand, along), (along,), summed=one, whole=one, places=_SECOND)


def scatter(whole: Whole) -> Factors:
    """The index and the source lie as x does, where they are as long, except along ``dim``."""
    x, *others = whole.shapes
    if not x:
        return _no_dims(whole, _SECOND)
    dim = whole.argument(1, "dim") % len(x)
    shared = {d for d in range(len(x)) if d != dim and all(len(s) == len(x) and s[d] == x[d] for s in others)}
    dims: Dims = tuple(d if d in shared else None for d in range(len(x)))
    own: Dims = tuple(d if d in shared or d == dim else None for d in range(len(x)))
    return Factors((own, *(dims if s else () for s in others)), (own,), whole=frozenset({dim}), places=_SECOND)


def select(whole: Whole) -> Factors:
    """Slices of x by a vector of places, which may be sharded."""
    x = whole.shapes[0]
    if not x or len(whole.shapes[1]) != 1:
        return _no_dims(whole, _SECOND)
    dim = whole.argument(1, "dim") % len(x)
    result: Dims = tuple(len(x) if d == dim else d for d in range(len(x)))
    one = frozenset({dim})
    return Factors((tuple(range(len(x))), (len(x),)), (result,), summed=one, whole=one, places=_SECOND)


def put_slices(whole: Whole) -> Factors:
    """Slices set by a vector of places: the source lies as x, except along ``dim``."""
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
    """``x[..., i, j, ...]`` by tensors of places, which broadcast and may be sharded."""
    found = _looked_up(whole)
    if found is None:
        return NO_RULE
    kept, places, at, shapes = found
    joint = _broadcast(shapes, len(kept))
    result = [factor for d, factor in enumerate(kept) if d not in places]
    result[at:at] = joint[0]
    taken, others = frozenset(places), frozenset(range(1, 1 + len(shapes)))
    return Factors((kept, *joint[1]), (tuple(result),), summed=taken, whole=taken, places=others)


def index_put(whole: Whole) -> Factors:
    """The dims that are not indexed may be sharded; with masks none."""
    found = _looked_up(whole)
    if found is None:
        return _no_dims(whole, frozenset(range(1, len(whole.shapes) - 1)))
    kept, places, at, shapes = found
    joint = max((len(s) for s in shapes), default=0)
    rest = [factor for d, factor in enumerate(kept) if d not in places]
    values: list[int | None] = [*rest[:at], *(None,) * joint, *rest[at:]]
    given = whole.shapes[-1]
    values[:0] = [None] * (len(given) - len(values))  # of more dims torch refuses it, in its words
    sizes = [1 if factor is None else whole.shapes[0][factor] for factor in values]
    values, sizes = values[len(values) - len(given) :], sizes[len(sizes) - len(given) :]
    own = tuple(f if size == n else None for f, size, n in zip(values, given, sizes, strict=True))
    others = frozenset(range(1, 1 + len(shapes)))
    return Factors((kept, *((None,) * len(s) for s in shapes), own), (kept,), whole=frozenset(places), places=others)


def _looked_up(whole: Whole) -> tuple[Dims, list[int], int, Sequence[Shape]] | None:
    """The dims of x, those that are indexed, where the dims of the indices go, and their shapes."""
    indices = whole.argument(1, "indices")
    if not isinstance(indices, (list, tuple)):
        return None
    places = [d for d, one in enumerate(indices) if one is not None]
    if any(_is_mask(indices[d]) for d in places) or len(whole.shapes) < 1 + len(places) or not places:
        return None
    kept: Dims = tuple(range(whole.ndim))
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


def _no_dims(whole: Whole, places: frozenset[int] = frozenset()) -> Factors:
    operands = tuple((None,) * len(shape) for shape in whole.shapes)
    return Factors(operands, tuple((None,) * len(shape) for shape in whole.results), places=places)


def take_by_element(whole: Whole) -> Factors:
    """From the whole of x, by the elements of an index of any shape."""
    dims = tuple(range(len(whole.shapes[1])))
    return Factors(((None,) * whole.ndim, dims), (dims,), places=_SECOND)


def searched(whole: Whole) -> Factors:
    """Places of values in sorted rows: the sums of those in the blocks of a row, but where a sorter names elements."""
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
    """Bags of equal size, or one after another, of a table; whole for what looks at all places, or writes."""
    others = zip((3, 5, 7), ("max_norm", "scale_grad_by_freq", "sparse"), strict=True)
    if any(whole.argument(place, name) for place, name in others):
        return _no_dims(whole)
    text = "n [i], [v] d, n [i] -> n d" if whole.ndim == 2 else "[n], [v] d, [o], [n] -> 1 d"
    return match(parse(text), whole.shapes)
