"""Writes of values into a range of a dim, or at one place of it: each rank sets the rows in its block.

A source that is cut along the dim moves to the blocks that its rows belong to. If it is whole there, nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fspmd.rules.bodies import Site
from fspmd.rules.factors import Dims, Factors
from fspmd.rules.global_call import Whole
from fspmd.rules.windows import block_places, fetched, moving, per_rank, still


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
