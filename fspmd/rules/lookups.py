"""Functions that take or set elements by index or by range: their rules, and the bodies for sharded dims.

In a body each rank handles what is in its block. Elements that are taken are a pending sum: one rank has the element,
the others have zero. Nothing moves, forward or backward. An index outside of the global dim is outside of every block
too, so torch raises as usual.

Writes go to a range of a dim, or to one place of it. A source that is cut along the dim moves to the blocks that its
rows belong to. If it is whole there, nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from fspmd.rules.bodies import Bodied, Site
from fspmd.rules.factors import NO_RULE, Dims, Factors, Shape, ShapedCall, gathered, match, parse
from fspmd.rules.windows import block_places, fetched, longer, moving, per_rank, still
from fspmd.transport.carriers import as_words, neutral_number

_SECOND: Final = frozenset({1})


def embedding(call: ShapedCall) -> Factors:
    """The rule of ``F.embedding``. Options that need all indices at once, or write into the table, have no rule."""
    others = zip((3, 5, 6), ("max_norm", "scale_grad_by_freq", "sparse"), strict=True)
    return _table("..., v d -> ... d", call, others)


def torch_embedding(call: ShapedCall) -> Factors:
    """The rule of ``torch.embedding``, which takes the table first."""
    return _table("v d, ... -> ... d", call, zip((3, 4), ("scale_grad_by_freq", "sparse"), strict=True))


def _table(text: str, call: ShapedCall, others: Iterable[tuple[int, str]]) -> Factors:
    if any(call.argument(place, name) for place, name in others):
        return NO_RULE
    factors = match(parse(text), call.shapes)
    return factors._replace(whole=frozenset({factors.names["v"]}))


def gather(call: ShapedCall) -> Factors:
    """The rule of ``gather``: one element of x per element of the index, which may be sharded along ``dim`` too."""
    x, index = call.shapes[:2]
    if not x or len(index) != len(x):
        return gathered(call)._replace(places=_SECOND)
    dim = call.argument(1, "dim") % len(x)
    place = len(x)  # the factor of the index along ``dim``
    along: Dims = tuple(place if d == dim else d if size == x[d] else None for d, size in enumerate(index))
    operand: Dims = tuple(d if d in along or d == dim else None for d in range(len(x)))
    looked_up = frozenset({dim})
    return Factors((operand, along), (along,), summed=looked_up, whole=looked_up, places=_SECOND)


def scatter(call: ShapedCall) -> Factors:
    """The rule of ``scatter``: along dims other than ``dim``, index and source are cut as x, if they are as long."""
    x, *others = call.shapes
    if not x:
        return gathered(call)._replace(places=_SECOND)
    dim = call.argument(1, "dim") % len(x)
    shared = {d for d in range(len(x)) if d != dim and all(len(s) == len(x) and s[d] == x[d] for s in others)}
    dims: Dims = tuple(d if d in shared else None for d in range(len(x)))
    operand: Dims = tuple(d if d in shared or d == dim else None for d in range(len(x)))
    return Factors((operand, *(dims if s else () for s in others)), (operand,), whole=frozenset({dim}), places=_SECOND)


def select(call: ShapedCall) -> Factors:
    """The rule of ``index_select``: slices of x by a vector of indices, which may be sharded."""
    x = call.shapes[0]
    if not x or len(call.shapes[1]) != 1:
        return gathered(call)._replace(places=_SECOND)
    dim = call.argument(1, "dim") % len(x)
    result: Dims = tuple(len(x) if d == dim else d for d in range(len(x)))
    looked_up = frozenset({dim})
    return Factors((tuple(range(len(x))), (len(x),)), (result,), summed=looked_up, whole=looked_up, places=_SECOND)


def put_slices(call: ShapedCall) -> Factors:
    """The rule of ``index_add`` and related functions: the source is cut as x, except along ``dim``."""
    x, _, *sources = call.shapes
    if not x:
        return gathered(call)._replace(places=_SECOND)
    dim = call.argument(1, "dim") % len(x)
    kept: Dims = tuple(None if d == dim else d for d in range(len(x)))
    every: Dims = tuple(range(len(x)))
    return Factors(
        (every, (None,) * len(call.shapes[1]), *(kept if len(s) == len(x) else (None,) * len(s) for s in sources)),
        (every,),
        whole=frozenset({dim}),
        places=_SECOND,
    )


def index(call: ShapedCall) -> Factors:
    """The rule of ``x[..., i, j, ...]`` with tensors of indices, which broadcast and may be sharded."""
    parts = _indexed(call)
    if parts is None:
        return NO_RULE
    kept, places, at, shapes = parts
    joint, each = _broadcast(shapes, len(kept))
    result = [factor for d, factor in enumerate(kept) if d not in places]
    result[at:at] = joint
    indexed, others = frozenset(places), frozenset(range(1, 1 + len(shapes)))
    return Factors((kept, *each), (tuple(result),), summed=indexed, whole=indexed, places=others)


def index_put(call: ShapedCall) -> Factors:
    """The rule of ``index_put``: dims that are not indexed may be sharded; with masks no dim may."""
    parts = _indexed(call)
    if parts is None:
        return gathered(call)._replace(places=frozenset(range(1, len(call.shapes) - 1)))
    kept, places, at, shapes = parts
    joint = max((len(s) for s in shapes), default=0)
    rest = [factor for d, factor in enumerate(kept) if d not in places]
    values: list[int | None] = [*rest[:at], *(None,) * joint, *rest[at:]]
    given = call.shapes[-1]
    values[:0] = [None] * (len(given) - len(values))  # torch itself refuses values with more dims
    sizes = [1 if factor is None else call.shapes[0][factor] for factor in values]
    values, sizes = values[len(values) - len(given) :], sizes[len(sizes) - len(given) :]
    source = tuple(f if size == n else None for f, size, n in zip(values, given, sizes, strict=True))
    others = frozenset(range(1, 1 + len(shapes)))
    return Factors((kept, *((None,) * len(s) for s in shapes), source), (kept,), whole=frozenset(places), places=others)


def _indexed(call: ShapedCall) -> tuple[Dims, list[int], int, Sequence[Shape]] | None:
    """Return the dims of x, the indexed dims, the place of the indices' dims in the result, and the indices' shapes.

    None if there are masks, or if no dim is indexed.
    """
    indices = call.argument(1, "indices")
    if not isinstance(indices, (list, tuple)):
        return None
    places = [d for d, index in enumerate(indices) if index is not None]
    if any(_is_mask(indices[d]) for d in places) or len(call.shapes) < 1 + len(places) or not places:
        return None
    kept: Dims = tuple(range(call.ndim))
    adjacent = places[-1] - places[0] == len(places) - 1
    return kept, places, places[0] if adjacent else 0, call.shapes[1 : 1 + len(places)]


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


def take_by_element(call: ShapedCall) -> Factors:
    """The rule of ``take``: x must be whole; the index may have any shape."""
    dims = tuple(range(len(call.shapes[1])))
    return Factors(((None,) * call.ndim, dims), (dims,), places=_SECOND)


def searched(call: ShapedCall) -> Factors:
    """The rule of ``searchsorted``. Without a sorter, the place in a row is the sum of the places in its blocks."""
    sorter = call.kwargs.get("sorter") is not None
    row = "[b]" if sorter else "b"
    number = isinstance(call.argument(1, "input", call.kwargs.get("self")), (int, float))
    if number:
        text = f"{row}, {row} -> " if sorter else f"{row} -> "
    elif call.ndim == 1:
        text = f"{row}, ..., {row} -> ..."
    else:
        text = f"... {row}, ... v, ... {row} -> ... v"
    return match(parse(text), call.shapes)


def embedding_bag(call: ShapedCall) -> Factors:
    """The rule of ``F.embedding_bag``, with bags as rows or one after another.

    Options that need all indices at once, or write into the table, take whole operands.
    """
    others = zip((3, 5, 7), ("max_norm", "scale_grad_by_freq", "sparse"), strict=True)
    if any(call.argument(place, name) for place, name in others):
        return gathered(call)
    text = "n [i], [v] d, n [i] -> n d" if call.ndim == 2 else "[n], [v] d, [o], [n] -> 1 d"
    return match(parse(text), call.shapes)


def in_block(
    site: Site, places: Tensor, d: Any, size: int, *, aside: bool = False, wraps: bool = False
) -> tuple[Tensor, Tensor]:
    """Return global places as places in this rank's block of dim ``d``, and a mask of those that are in it.

    Places in other blocks become 0, or with ``aside`` the length of the block. Places in no block become the length
    plus one. With ``wraps`` negative places count from the end.
    """
    cut = site.blocks(size, d)
    length = per_rank(site, ("length", d), site.axes[d], lambda at: torch.tensor(cut[at][1]))
    if wraps:
        places = places.where(places >= 0, places + size)
    local = places - site.offset(size, d)
    mine = (local >= 0) & (local < length)
    local = local.where(mine, length if aside else torch.zeros_like(length))
    return local.where((places >= 0) & (places < size), length + 1), mine


def filled(site: Site, x: Tensor, d: int, key: Any) -> Tensor:
    """Append a row of zeros to a dim of the first operand if some block of it is empty."""
    return longer(x, d) if any(n == 0 for _, n in site.blocks(site.operands[0].shape[d], key)) else x


def own(x: Tensor, mine: Tensor) -> Tensor:
    """Replace the elements that are not this rank's by `neutral_number`."""
    bits = as_words(x)  # torch fills words of all dtypes
    out = bits.masked_fill(~mine, neutral_number(bits))
    return out if bits is x else out.view(x.dtype)


# --- take: results are pending sums -----------------------------------------------------------------------------------


def _looked_up(site: Site, places: Tensor, table: Tensor, size: int, padding: int) -> Tensor:
    local, mine = in_block(site, places, "v", size)
    table = longer(table, 0) if any(n == 0 for _, n in site.blocks(size, "v")) else table
    out = F.embedding(local, table)
    if -size <= padding:  # the padding row gets no gradient
        out = torch.where((places == padding % size)[..., None], out.detach(), out)
    return own(out, mine[..., None])


@still
def embedding_body(
    site: Site, places: Tensor, table: Tensor, padding_idx: int | None = None, *_: Any, **__: Any
) -> Tensor:
    size = site.operands[1].shape[0]
    return _looked_up(site, places, table, size, -size - 1 if padding_idx is None else padding_idx)


@still
def torch_embedding_body(
    site: Site, weight: Tensor, indices: Tensor, padding_idx: int = -1, *_: Any, **__: Any
) -> Tensor:
    size = site.operands[0].shape[0]
    return _looked_up(site, indices, weight, size, padding_idx if padding_idx >= 0 else -size - 1)


@still
def gather_body(site: Site, x: Tensor, dim: int, index: Tensor, **_: Any) -> Tensor:
    d = dim % x.dim()
    local, mine = in_block(site, index, d, site.operands[0].shape[d])
    return own(filled(site, x, d, d).gather(d, local), mine)


@still
def index_select_body(site: Site, x: Tensor, dim: int, index: Tensor) -> Tensor:
    d = dim % x.dim()
    local, mine = in_block(site, index, d, site.operands[0].shape[d])
    mine = mine.view(-1, *(1,) * (x.dim() - 1 - d))
    return own(filled(site, x, d, d).index_select(d, local), mine)


@still
def index_body(site: Site, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    here, mine = list(indices), torch.ones((), dtype=torch.bool, device=x.device)
    for d, places in enumerate(indices):
        if places is not None and site.axes.get(d):
            here[d], in_it = in_block(site, places, d, site.operands[0].shape[d], wraps=True)
            mine = mine & in_it
            x = filled(site, x, d, d)
    out: Tensor = torch.ops.aten.index.Tensor(x, here)
    given = [d for d, places in enumerate(indices) if places is not None]
    behind = x.dim() - 1 - given[-1] if given[-1] - given[0] == len(given) - 1 else x.dim() - len(given)
    return own(out, mine.view(*mine.shape, *(1,) * behind))


# --- set: a block gets one more row, which takes the values for other blocks ------------------------------------------


def setting(function: Callable[..., Tensor], *, wraps: bool = False) -> Bodied:
    """Return the body of a function ``(x, dim, index, ...)`` that sets elements of x."""

    def body(site: Site, x: Tensor, dim: int, index: Tensor, *rest: Any, **named: Any) -> Tensor:
        d = dim % x.dim()
        local, _ = in_block(site, index, d, site.operands[0].shape[d], aside=True, wraps=wraps)
        return function(longer(x, d), d, local, *rest, **named).narrow(d, 0, x.shape[d])

    return still(body)


@still
def index_put_body(
    site: Site, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, *_: Any
) -> Tensor:
    here, wide = list(indices), x
    cut = [d for d, places in enumerate(indices) if places is not None and site.axes.get(d)]
    for d, places in enumerate(indices):
        if places is not None and d in cut:
            here[d] = in_block(site, places, d, site.operands[0].shape[d], aside=True, wraps=True)[0]
            wide = longer(wide, d)
    out: Tensor = torch.ops.aten.index_put.default(wide, here, values, accumulate)
    for d in cut:
        out = out.narrow(d, 0, x.shape[d])
    return out


def check_source(call: ShapedCall, part: Callable[[Tensor], Tensor]) -> None:
    """Raise IndexError if the source has another shape than the part that is set. torch's meta kernels do not check."""
    expected = tuple(part(torch.empty(call.shapes[0], device="meta")).shape)
    if call.shapes[1] != expected:
        raise IndexError(f"expected src of the shape of that part, {expected}, got {call.shapes[1]}")


def slice_scattered(call: ShapedCall) -> Factors:
    """The rule of ``slice_scatter``: the dim must be whole; the source is whole along it, or cut as the operand."""
    names = ((2, "dim", 0), (3, "start", None), (4, "end", None), (5, "step", 1))
    given = [call.argument(*argument) for argument in names]
    check_source(call, lambda x: torch.ops.aten.slice.Tensor(x, *given))
    dim = given[0] % call.ndim
    every: Dims = tuple(range(call.ndim))
    beside: Dims = tuple(None if d == dim else d for d in every)
    factors = Factors((every, beside), (every,), whole=frozenset({dim}))
    return factors._replace(alternatives=(factors._replace(operands=(every, every)),))


def select_scattered(call: ShapedCall) -> Factors:
    """The rule of ``select_scatter``: the dim must be whole."""
    dim = call.argument(2, "dim", 0)
    check_source(call, lambda x: x.select(dim, call.argument(3, "index", 0)))
    dim %= call.ndim
    every: Dims = tuple(range(call.ndim))
    return Factors((every, tuple(d for d in every if d != dim)), (every,), whole=frozenset({dim}))


@moving(1)
def set_slice(
    site: Site,
    x: Tensor,
    src: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    """The body of ``slice_scatter``."""
    d = dim % x.dim()
    return _set(site, x, src, d, range(*slice(start, end, step).indices(site.operands[0].shape[d])))


@still
def set_row(site: Site, x: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """The body of ``select_scatter``."""
    d = dim % x.dim()
    place = index % site.operands[0].shape[d]
    return _set(site, x, src.unsqueeze(d), d, range(place, place + 1))


def _set(site: Site, x: Tensor, src: Tensor, d: int, places: range) -> Tensor:
    """Set the rows of a dim at ``places`` to those of ``src``."""
    axes, cut = site.axes[d], site.blocks(site.operands[0].shape[d], d)
    source, src = site.operands[1], src.to(x.dtype)
    if source.ndim == x.dim() and source.partition[d] is not None:
        own = fetched(site, "own", src, d, axes, site.blocks(source.shape[d], d), lambda at: _inset(cut, places, at)[1])
    else:
        own = src.index_select(d, per_rank(site, "own", axes, lambda at: _inset(cut, places, at)[1]))
    index = per_rank(site, "index", axes, lambda at: _order(cut, places, at))
    return torch.cat([x, own], d).index_select(d, index)


def _inset(cut: Sequence[tuple[int, int]], places: range, at: int) -> tuple[Tensor, Tensor]:
    """Return a mask of the rows of a block that are set, and the rows of the source that go there."""
    behind = block_places(cut, at) - places.start
    hit = (behind >= 0) & (behind < len(places) * places.step) & (behind % places.step == 0)
    return hit, behind[hit] // places.step


def _order(cut: Sequence[tuple[int, int]], places: range, at: int) -> Tensor:
    """Return the index of each row of the result, in the rows of the block followed by those that are set in it."""
    hit, _ = _inset(cut, places, at)
    index = torch.arange(len(hit))
    index[hit] = len(hit) + torch.arange(int(hit.sum()))
    return index
