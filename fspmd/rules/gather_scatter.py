"""Bodies that take or set elements along a sharded dim, by index or by range. Each rank handles what is in its block.

Elements that are taken are a pending sum: one rank has the element, the others have zero. Nothing moves, forward or
backward. An index outside of the global dim is outside of every block too, so torch raises as usual.

Writes go to a range of a dim, or to one place of it. A source that is cut along the dim moves to the blocks that its
rows belong to. If it is whole there, nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fspmd.rules.bodies import Bodied, Site
from fspmd.rules.factors import Dims, Factors, Whole
from fspmd.rules.windows import block_places, fetched, longer, moving, per_rank, still
from fspmd.transport.carriers import as_words, nothing


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
    """Replace the elements that are not this rank's by `nothing`."""
    bits = as_words(x)  # torch fills words of all dtypes
    out = bits.masked_fill(~mine, nothing(bits))
    return out if bits is x else out.view(x.dtype)


# --- take: results are pending sums -----------------------------------------------------------------------------------


def _looked_up(site: Site, places: Tensor, table: Tensor, size: int, padding: int) -> Tensor:
    local, mine = in_block(site, places, "v", size)
    table = longer(table, 0) if any(n == 0 for _, n in site.blocks(size, "v")) else table
    out = F.embedding(local, table)
    if -size <= padding:  # the padding row gets no gradient
        out = torch.where((places == padding % size)[..., None], out.detach(), out)
    return own(out, mine[..., None])


def _embedding(site: Site, places: Tensor, table: Tensor, padding_idx: int | None = None, *_: Any, **__: Any) -> Tensor:
    size = site.operands[1].shape[0]
    return _looked_up(site, places, table, size, -size - 1 if padding_idx is None else padding_idx)


def _torch_embedding(site: Site, weight: Tensor, indices: Tensor, padding_idx: int = -1, *_: Any, **__: Any) -> Tensor:
    size = site.operands[0].shape[0]
    return _looked_up(site, indices, weight, size, padding_idx if padding_idx >= 0 else -size - 1)


def _gather(site: Site, x: Tensor, dim: int, index: Tensor, **_: Any) -> Tensor:
    d = dim % x.dim()
    local, mine = in_block(site, index, d, site.operands[0].shape[d])
    return own(filled(site, x, d, d).gather(d, local), mine)


def _index_select(site: Site, x: Tensor, dim: int, index: Tensor) -> Tensor:
    d = dim % x.dim()
    local, mine = in_block(site, index, d, site.operands[0].shape[d])
    mine = mine.view(-1, *(1,) * (x.dim() - 1 - d))
    return own(filled(site, x, d, d).index_select(d, local), mine)


def _index(site: Site, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
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


def _index_put(
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


embedding, torch_embedding = still(_embedding), still(_torch_embedding)
gather, index_select = still(_gather), still(_index_select)
index, index_put = still(_index), still(_index_put)


def check_source(whole: Whole, part: Callable[[Tensor], Tensor]) -> None:
    """Raise IndexError if the source has another shape than the part that is set. torch's meta kernels do not check."""
    expected = tuple(part(torch.empty(whole.shapes[0], device="meta")).shape)
    if whole.shapes[1] != expected:
        raise IndexError(f"expected src of the shape of that part, {expected}, got {whole.shapes[1]}")


def slice_scattered(whole: Whole) -> Factors:
    """The rule of ``slice_scatter``: the dim must be whole; the source is whole along it, or cut as the operand."""
    names = ((2, "dim", 0), (3, "start", None), (4, "end", None), (5, "step", 1))
    given = [whole.argument(*argument) for argument in names]
    check_source(whole, lambda x: torch.ops.aten.slice.Tensor(x, *given))
    dim = given[0] % whole.ndim
    every: Dims = tuple(range(whole.ndim))
    beside: Dims = tuple(None if d == dim else d for d in every)
    factors = Factors((every, beside), (every,), whole=frozenset({dim}))
    return factors._replace(others=(factors._replace(operands=(every, every)),))


def select_scattered(whole: Whole) -> Factors:
    """The rule of ``select_scatter``: the dim must be whole."""
    dim = whole.argument(2, "dim", 0)
    check_source(whole, lambda x: x.select(dim, whole.argument(3, "index", 0)))
    dim %= whole.ndim
    every: Dims = tuple(range(whole.ndim))
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
