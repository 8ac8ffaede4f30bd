"""Checks of the arguments of collectives, each with what to write instead. They run before any communication."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fspmd.body import Body
from fspmd.errors import ArgumentError, ShapeError
from fspmd.mesh import Mesh
from fspmd.spec import blocks, short_dtype
from fspmd.transport.frame import frame, groups
from fspmd.transport.local_tensor import LocalTensor
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


def check_alike(
    body: Body,
    leaves: Sequence[Any],
    axes: tuple[str, ...],
    what: str,
    dim: int | None = None,
    size: int | None = None,
) -> None:
    """Every rank's blocks must have one shape; along ``dim`` they must be the blocks of a dim of global ``size``.

    Asked of all ranks, so that all fail alike, where blocks may be uneven: one more, small, all-gather there. A body
    without types (``check_vma=False``) asks only where ``size`` says that they are.
    """
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    lengths = None if size is None else block_lengths(body, axes, check_size(size, what))
    simulated = body.mesh.transport == "simulation"
    if simulated:
        if lengths is None and size is None and not any(type(x) is LocalTensor and x.uneven for x in tensors):
            return
    elif lengths is None and not (body.uneven and body.checked):
        if size is not None:
            _check_even(body, tensors, axes, dim, size, what)
        return
    with torch._C.DisableTorchFunction():
        found = body.transport.layouts(tensors, body.mesh)
    _, table = groups(frame(body.mesh, body.mesh.axis_names), axes)
    expected = (size // math.prod(body.sizes(axes)),) * len(table[0]) if size is not None else ()
    for leaf, rows in zip(tensors, zip(*found, strict=True), strict=True):
        for members in table:
            _compare(body, leaf, [rows[i] for i in members], members, axes, what, dim, lengths or expected)


def _check_even(body: Body, tensors: list[Tensor], axes: tuple[str, ...], dim: Any, size: int, what: str) -> None:
    n = math.prod(body.sizes(axes))
    for x in tensors:
        at = check_dim(dim, x.ndim, what, "the dim")
        if x.shape[at] * n != size:
            raise ShapeError(
                f"{what} of {show(x)} got size={size}: a global size of {size} over {n} ranks has blocks of "
                f"{size // n}, but dim {at} of this block is {x.shape[at]}"
            )


def _compare(
    body: Body,
    x: Tensor,
    rows: list[tuple[Any, tuple[int, ...]]],
    members: tuple[int, ...],
    axes: tuple[str, ...],
    what: str,
    dim: int | None,
    lengths: tuple[int, ...],
) -> None:
    """One group's blocks of one leaf, in the order of ``axes``."""
    dtype, first = rows[0]
    for place, (kind, shape) in enumerate(rows):
        expected = list(first)
        if kind is dtype and len(shape) == len(first) and lengths:
            expected[check_dim(dim, len(shape), what, "the dim")] = lengths[place]
        if kind is dtype and shape == tuple(expected):
            continue
        at = where(body.mesh, members[place])
        if lengths and kind is dtype and len(shape) == len(first):
            raise ShapeError(
                f"{what} over {axes} got size={sum(lengths)}, of which torch.chunk makes blocks of {lengths}: {at} "
                f"should have a block of shape {tuple(expected)}, but has {shape}; pass the size that all blocks make "
                "together"
            )
        raise ShapeError(
            f"{what} over {axes}: {at} has {short_dtype(kind)} of shape {shape}, but {where(body.mesh, members[0])} "
            f"has {short_dtype(dtype)} of shape {first}; {_EVEN_OUT.get(what, _PAD)}"
        )


_PAD = "all ranks must pass the same shape: pad the blocks to one size first"
_EVEN_OUT = {
    "all_gather": "for uneven blocks pass tiled=True and size=, the global size of the dim",
    "all_to_all": "for uneven blocks pass tiled=True and size=, the global size of concat_axis",
}


def where(mesh: Mesh, position: int) -> str:
    """``rank 3 at x=1, y=1`` for a position in row-major order."""
    at = next(itertools.islice(itertools.product(*map(range, mesh.shape.values())), position, None))
    place = ", ".join(f"{axis}={c}" for axis, c in zip(mesh.axis_names, at, strict=True))
    return f"rank {mesh.rank_at(at)} at {place}"


def check_size_use(size: int | None, tiled: bool, index_groups: Any, what: str) -> None:
    if size is not None and not tiled:
        raise ArgumentError(f"{what} got size={size} without tiled=True; uneven blocks have no common shape to stack")
    if size is not None and index_groups is not None:
        raise ArgumentError(f"{what} got both size={size} and axis_index_groups; uneven blocks follow the mesh axes")
