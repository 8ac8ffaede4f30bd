"""Diagonals and triangles of matrices with sharded rows or columns: each rank takes the part in its block.

A diagonal is cut as the rows are, or as the columns are. Over the axes of the other dim it is a pending sum. At most
the elements of the diagonal move, if its blocks differ from those of the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fspmd.entries import entry_axes
from fspmd.rules.bodies import Bodied, BodyLayout, Site
from fspmd.rules.factors import Dims, Factors, ShapedCall
from fspmd.rules.lookups import check_source
from fspmd.rules.windows import block_places, fetched, longer, per_rank, still
from fspmd.spec import TensorSpec
from fspmd.transport.carriers import as_words


def diagonal(call: ShapedCall) -> Factors:
    """The rule of ``diagonal``: the last dim of the result has the factor of the rows, or that of the columns."""
    rows, columns = _two(call, 2)
    every: Dims = tuple(range(call.ndim))
    rest = tuple(d for d in every if d not in (rows, columns))
    both = frozenset({rows, columns})
    by_rows = Factors((every,), ((*rest, rows),), summed=frozenset({columns}), whole=both)
    by_columns = by_rows._replace(results=((*rest, columns),), summed=frozenset({rows}))
    return by_rows._replace(alternatives=(by_columns,))


def diagonal_scattered(call: ShapedCall) -> Factors:
    """The rule of ``diagonal_scatter``: the last dim of the source is the diagonal, and is whole."""
    given = [call.argument(*argument) for argument in ((2, "offset", 0), (3, "dim1", 0), (4, "dim2", 1))]
    check_source(call, lambda x: x.diagonal(*given))
    dims = _two(call, 3)
    every: Dims = tuple(range(call.ndim))
    return Factors((every, (*(d for d in every if d not in dims), None)), (every,), whole=frozenset(dims))


def embedded(call: ShapedCall) -> Factors:
    """The rule of ``diag_embed``: the last dim becomes the diagonal of two dims; the first of them is cut as it was."""
    n, last = len(call.results[0]), call.ndim - 1
    rows, columns = (call.argument(at, name, d) % n for at, name, d in ((2, "dim1", -2), (3, "dim2", -1)))
    rest = iter(range(last))
    result = tuple(last if d == rows else None if d == columns else next(rest) for d in range(n))
    return Factors((tuple(range(call.ndim)),), (result,), whole=frozenset({last}))


def _two(call: ShapedCall, place: int) -> tuple[int, int]:
    return call.argument(place, "dim1", 0) % call.ndim, call.argument(place + 1, "dim2", 1) % call.ndim


def _time(layout: BodyLayout) -> float:
    """Return the µs to move the elements of the diagonal in a block."""
    first = layout.operands[0]
    size = layout.row_bytes() * min(first.block_shape[d] for d in layout.whole)
    over = tuple(axis for axis in layout.axes if axis in first.partition.axes)
    return layout._replace(axes=over).price("permute", size, size)


def _take(site: Site, x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    rows, columns = dim1 % x.dim(), dim2 % x.dim()
    above, left = max(-offset, 0), max(offset, 0)  # rows above, and columns left of, the first element
    axes = entry_axes(site.results[0].partition[-1])
    if not site.axes.get(rows) or axes != site.axes[rows]:
        rows, columns, above, left = columns, rows, left, above
    length = site.results[0].shape[-1]
    cut, across = (site.blocks(site.operands[0].shape[d], d) for d in (rows, columns))
    matrices = x.movedim((rows, columns), (-2, -1))
    wide = int(any(n == 0 for _, n in across))  # if a block is empty, each gets one more column, of zeros
    if wide:
        matrices = longer(matrices, -1)
    if not length:
        return matrices[..., 0].narrow(-1, 0, 0)
    over = (*site.axes.get(rows, ()), *site.axes.get(columns, ()))

    def column(at: int) -> tuple[int, Tensor, Tensor]:
        """Return the width of a block; per row, the column of the diagonal and whether it is in the block."""
        first, width = across[at % len(across)]
        places = block_places(cut, at // len(across)) - above
        columns = places + left - first
        return width, columns, (places >= 0) & (places < length) & (columns >= 0) & (columns < width)

    def element(at: int) -> Tensor:
        width, places, here = column(at)
        return torch.arange(len(places)) * (width + wide) + places.where(here, 0)

    def kept(at: int) -> Tensor:
        """Return the index of each row if its element is in the block, else that of the zero after all rows."""
        _, places, here = column(at)
        return torch.arange(len(places)).where(here, len(places))

    own = as_words(matrices).flatten(-2).index_select(-1, per_rank(site, "elements", over, element))
    own = longer(own, -1).index_select(-1, per_rank(site, "kept", over, kept))
    own = own if own.dtype is x.dtype else own.view(x.dtype)
    after = site.blocks(length, rows)
    if after == cut and not above:
        return own
    return fetched(site, "moved", own, own.dim() - 1, axes, cut, lambda at: block_places(after, at) + above)


def _places(site: Site, spec: TensorSpec, d: int, key: int | None = None) -> Tensor:
    """Return the global places of the rows of this rank's block of a dim."""
    key = d if key is None else key
    cut = functools.partial(block_places, site.blocks(spec.shape[d], key))
    return per_rank(site, ("places", d), site.axes.get(key, ()), cut)


def _set(site: Site, x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    rows, columns = dim1 % x.dim(), dim2 % x.dim()
    if not src.shape[-1]:
        return x.clone()
    own, across = (_places(site, site.operands[0], d) for d in (rows, columns))
    at = (own - max(-offset, 0)).clamp(0, src.shape[-1] - 1)
    here = across - own[:, None] == offset
    values = src.to(x.dtype).index_select(-1, at).unsqueeze(-1)
    return torch.where(here, values, x.movedim((rows, columns), (-2, -1))).movedim((-2, -1), (rows, columns))


def _embed(site: Site, x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    last, above, result = x.dim() - 1, max(-offset, 0), site.results[0]
    rows, columns = dim1 % result.ndim, dim2 % result.ndim
    length = site.operands[0].shape[-1]
    after = site.blocks(result.shape[rows], last)

    def wanted(at: int) -> Tensor:
        places = block_places(after, at) - above
        return places.where((places >= 0) & (places < length), -1)

    def height(at: int) -> Tensor:
        return torch.tensor(after[at][1])

    def rows_of(at: int) -> Tensor:
        return torch.arange(after[at][1])

    x = fetched(site, "rows", x, last, site.axes[last], site.blocks(length, last), wanted)
    own = _places(site, result, rows, last)
    here = torch.arange(result.shape[columns], device=x.device) - own[:, None] == offset
    row, zeros = (per_rank(site, key, site.axes[last], make) for key, make in (("row", rows_of), ("zeros", height)))
    index = torch.where(here, row[:, None], zeros).flatten()
    matrices: Tensor = longer(x, last).index_select(last, index).unflatten(last, (-1, result.shape[columns]))
    return matrices.movedim((-2, -1), (rows, columns))


take, embed = Bodied(_take, _time), Bodied(_embed, _time)
put = still(_set)


# --- triangles --------------------------------------------------------------------------------------------------------


def triangle(beyond: Callable[[Tensor, int], Tensor]) -> Bodied:
    """Return the body of ``tril`` or ``triu``: each rank zeroes the elements of its block ``beyond`` the diagonal."""

    def body(site: Site, x: Tensor, diagonal: int = 0) -> Tensor:
        places = []
        for name, size in zip("mn", site.operands[0].shape[-2:], strict=True):
            cut = site.blocks(size, name)
            places.append(per_rank(site, name, site.axes.get(name, ()), functools.partial(block_places, cut)))
        return x.masked_fill(beyond(places[1] - places[0][:, None], diagonal), 0)

    return still(body)


tril = triangle(lambda behind, diagonal: behind > diagonal)
triu = triangle(lambda behind, diagonal: behind < diagonal)
