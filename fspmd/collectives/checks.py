"""Checks of the arguments of collectives, each with what to write instead. They run before any communication."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fspmd.body import Body
from fspmd.errors import ArgumentError, ShapeError
from fspmd.spec import blocks
from fspmd.variance import show


def check_dim(dim: Any, ndim: int, what: str, parameter: str) -> int:
    """A dim as a non-negative int."""
    try:
        value = operator.index(dim)
    except TypeError:
        raise ArgumentError(f"{what} got {parameter}={dim!r} of type {type(dim).__name__}; expected an int") from None
    if not -ndim <= value < ndim:
        allowed = f"from {-ndim} to {ndim - 1}" if ndim else "none: the value is a scalar"
        raise ShapeError(f"{what} got {parameter}={dim}, out of range; dims allowed here: {allowed}")
    return value % ndim


def check_index_groups(groups: Any, size: int, what: str, equal: bool) -> tuple[tuple[int, ...], ...] | None:
    """Index groups as tuples that cover every position of the axis once."""
    if groups is None:
        return None
    try:
        result = tuple(tuple(operator.index(i) for i in group) for group in groups)
    except TypeError:
        raise ArgumentError(f"{what} got axis_index_groups={groups!r}; expected a list of lists of positions") from None
    if sorted(i for group in result for i in group) != list(range(size)) or not all(result):
        raise ShapeError(
            f"{what} got axis_index_groups={groups!r}; together the groups must name every position from 0 to "
            f"{size - 1} exactly once, for example {[list(range(size))]}"
        )
    if equal and len({len(group) for group in result}) > 1:
        raise ShapeError(f"{what} got axis_index_groups={groups!r}; here all groups must have the same size")
    return result


def check_permutation(perm: Any, size: int, what: str) -> tuple[tuple[int, int], ...]:
    """(source, destination) pairs within the axis, no source or destination twice."""
    try:
        pairs = tuple((operator.index(source), operator.index(destination)) for source, destination in perm)
    except (TypeError, ValueError):
        raise ArgumentError(
            f"{what} got perm={perm!r}; expected (source, destination) pairs, for example "
            f"{[(i, (i + 1) % size) for i in range(size)]}"
        ) from None
    outside = sorted({i for pair in pairs for i in pair if not 0 <= i < size})
    if outside:
        raise ShapeError(f"{what} got perm={perm!r}; positions {outside} are outside the axis, 0 to {size - 1}")
    for side, name in ((0, "source"), (1, "destination")):
        seen = [pair[side] for pair in pairs]
        if repeated := sorted({i for i in seen if seen.count(i) > 1}):
            raise ShapeError(f"{what} got perm={perm!r}; each {name} can stand once, but {repeated} stand more often")
    return pairs


def block_lengths(body: Body, axes: tuple[str, ...], size: int) -> tuple[int, ...] | None:
    """The block length of every position along the axes for a dim of ``size``, or None where they are all equal."""
    lengths = tuple(length for _, length in blocks(size, body.sizes(axes)))
    if len(set(lengths)) == 1:
        return None
    body.uneven = True
    return lengths


def check_size(size: Any, what: str) -> int:
    """A global size: a non-negative int."""
    try:
        value = operator.index(size)
    except TypeError:
        raise ArgumentError(f"{what} got size={size!r} of type {type(size).__name__}; expected an int") from None
    if value < 0:
        raise ShapeError(f"{what} got size={size}; a global size is not negative")
    return value


def check_divides(x: Tensor, dim: int, n: int, what: str, remedy: str) -> None:
    """The dim must be a multiple of the number of ranks."""
    if x.shape[dim] % n:
        raise ShapeError(
            f"{what} of {show(x)}: dim {dim} of size {x.shape[dim]} does not divide by {n} ranks; {remedy}"
        )


def check_blocks(
    body: Body, x: Tensor, axes: tuple[str, ...], dim: int, size: int, lengths: Sequence[int] | None, what: str
) -> None:
    """Every rank's block must have its length of a dim of global ``size``; compared across ranks where uneven."""
    n = math.prod(body.sizes(axes))
    if lengths is None:
        if x.shape[dim] * n != size:
            raise ShapeError(
                f"{what} of {show(x)} got size={size}: a global size of {size} over {n} ranks has blocks of "
                f"{size // n}, but dim {dim} of this block is {x.shape[dim]}"
            )
        return
    if complaint := body.transport.check_blocks(x, body.mesh, axes, dim, tuple(lengths)):
        raise ShapeError(f"{what} got size={size}, whose blocks are {tuple(lengths)}, but {complaint}")


def check_size_use(size: int | None, tiled: bool, index_groups: Any, what: str) -> None:
    if size is not None and not tiled:
        raise ArgumentError(f"{what} got size={size} without tiled=True; uneven blocks have no common shape to stack")
    if size is not None and index_groups is not None:
        raise ArgumentError(f"{what} got both size={size} and axis_index_groups; uneven blocks follow the mesh axes")
