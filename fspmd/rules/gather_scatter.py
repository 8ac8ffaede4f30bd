"""Elements taken, or set, by places along a sharded dim: each rank sees to those places that fall into its block.

What is taken is a pending sum, of which one rank has the term; nothing moves, forward or backward. A place outside of
the global dim is one outside of every block, so that torch complains as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fspmd.rules.bodies import Bodied, Site
from fspmd.rules.windows import longer, per_rank, still
from fspmd.transport.carriers import as_words
from fspmd.transport.neutral import nothing


def in_block(
    site: Site, places: Tensor, d: Any, size: int, *, aside: bool = False, wraps: bool = False
) -> tuple[Tensor, Tensor]:
    """Global places as those of this block of dim ``d``, and which of them are in it.

    The others are the first place, or ``aside``, behind the last one; those of no block are farther behind. ``wraps``:
    negative ones count from the end.
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
    """With one row of zeros at the end of a dim of the first operand, if some block has none."""
    return longer(x, d) if any(n == 0 for _, n in site.blocks(site.operands[0].shape[d], key)) else x


def own(x: Tensor, mine: Tensor) -> Tensor:
    """Nothing where it is not this rank's."""
    bits = as_words(x)  # which torch fills
    out = bits.masked_fill(~mine, nothing(bits))
    return out if bits is x else out.view(x.dtype)


# --- taken: results are pending sums ----------------------------------------------------------------------------------


def _looked_up(site: Site, places: Tensor, table: Tensor, size: int, padding: int) -> Tensor:
    local, mine = in_block(site, places, "v", size)
    table = longer(table, 0) if any(n == 0 for _, n in site.blocks(size, "v")) else table
    out = F.embedding(local, table)
    if -size <= padding:  # no gradient for the padding
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
            here[d], found = in_block(site, places, d, site.operands[0].shape[d], wraps=True)
            mine = mine & found
            x = filled(site, x, d, d)
    out: Tensor = torch.ops.aten.index.Tensor(x, here)
    given = [d for d, one in enumerate(indices) if one is not None]
    behind = x.dim() - 1 - given[-1] if given[-1] - given[0] == len(given) - 1 else x.dim() - len(given)
    return own(out, mine.view(*mine.shape, *(1,) * behind))


# --- set: in a block that is one row longer, to which go those that belong elsewhere ----------------------------------


def setting(function: Callable[..., Tensor], *, wraps: bool = False) -> Bodied:
    """Of functions of x, a dim, places and more."""

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
