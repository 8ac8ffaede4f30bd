"""Checks of the arguments of collectives. They run before any communication."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from fspmd.body import Body
from fspmd.entries import uneven_lengths
from fspmd.errors import ArgumentError, ShapeError
from fspmd.meshes.axes import place_at
from fspmd.meshes.mesh import Mesh
from fspmd.messages import as_axis_name, described
from fspmd.spec import short_dtype
from fspmd.torch_internals import DisableTorchFunction
from fspmd.tracing import outside_transforms
from fspmd.transport.frame import UNEVEN, frame_over, groups
from fspmd.transport.local_tensor import is_uneven
from fspmd.variance import show


def _integer(value: Any, what: str, parameter: str, expected: str = "an int") -> int:
    """The value as an int. Bools, tensors and floats are refused."""
    if isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__"):
        hint = ": Python numbers are the same on all ranks" if isinstance(value, Tensor) else ""
        raise ArgumentError(f"{what} got {described(value)} for {parameter}; expected {expected}{hint}")
    return operator.index(value)


def check_dim(dim: Any, ndim: int, what: str, parameter: str) -> int:
    """A dim as a non-negative int."""
    value = _integer(dim, what, parameter)
    if not -ndim <= value < ndim:
        allowed = f"it must be from {-ndim} to {ndim - 1}" if ndim else "the value is a scalar and has no dims"
        raise ShapeError(f"{what} got {parameter}={value}, but {allowed}")
    return value % ndim


def check_source(position: Any, size: int, axes: tuple[str, ...]) -> int:
    """The source of a broadcast: a position along the axes."""
    value = _integer(position, "pbroadcast", "source", f"a position along {as_axis_name(axes)}, an int")
    if not 0 <= value < size:
        raise ShapeError(
            f"pbroadcast got source={value}, but positions along {as_axis_name(axes)} are from 0 to {size - 1}"
        )
    return value


def check_index_groups(groups: Any, size: int, what: str, equal: bool) -> tuple[tuple[int, ...], ...] | None:
    """Index groups as tuples that cover every position of the axis once."""
    if groups is None:
        return None
    half = max(size // 2, 1)
    example = [list(range(half)), list(range(half, size))] if size > 1 else [[0]]
    if not isinstance(groups, Iterable) or not all(isinstance(group, Iterable) for group in groups):
        raise ArgumentError(
            f"{what} got {described(groups)} for axis_index_groups; expected lists of positions, such as {example}"
        )
    result = tuple(tuple(_integer(i, what, "axis_index_groups", "positions") for i in group) for group in groups)
    if sorted(i for group in result for i in group) != list(range(size)) or not all(result):
        raise ShapeError(
            f"{what} got axis_index_groups={groups!r}, but together they must name each position from 0 to {size - 1} "
            f"once, such as {example}"
        )
    if equal and len({len(group) for group in result}) > 1:
        raise ShapeError(f"{what} got axis_index_groups={groups!r}, but here the groups must be of one size")
    return result


def check_permutation(perm: Any, size: int) -> tuple[tuple[int, int], ...]:
    """(source, destination) pairs within the axis. No source and no destination occurs twice."""
    if isinstance(perm, dict):
        raise ArgumentError(f"ppermute got {described(perm)} for perm; write its pairs: perm={list(perm.items())}")
    pairs: list[Any] = list(perm) if isinstance(perm, Iterable) and not isinstance(perm, (str, Tensor)) else [None]
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        raise ArgumentError(
            f"ppermute got {described(perm)} for perm; expected (source, destination) pairs, such as "
            f"{[(i, (i + 1) % size) for i in range(size)]}"
        )
    result = [tuple(_integer(i, "ppermute", "a position in perm") for i in pair) for pair in pairs]
    if outside := sorted({i for pair in result for i in pair if not 0 <= i < size}):
        raise ShapeError(f"ppermute got perm={result}, but positions are from 0 to {size - 1}, not {_listed(outside)}")
    for side, name in ((0, "source"), (1, "destination")):
        seen = [pair[side] for pair in result]
        if repeated := sorted({i for i in seen if seen.count(i) > 1}):
            raise ShapeError(
                f"ppermute got perm={result}, in which {_listed(repeated)} is a {name} more than once; each rank sends "
                "at most once and receives at most once"
            )
    return tuple((source, destination) for source, destination in result)


def check_shuffle(perm: Any, size: int) -> tuple[tuple[int, int], ...]:
    """The pairs of a full permutation, which is given as the source of each position."""
    sources: list[Any] = list(perm) if isinstance(perm, Iterable) and not isinstance(perm, (str, Tensor)) else [None]
    if any(isinstance(i, Tensor) or not hasattr(i, "__index__") for i in sources):
        pairs = all(isinstance(i, (tuple, list)) for i in sources)
        raise ArgumentError(
            f"pshuffle got {described(perm)} for perm; expected the source of each position, such as "
            f"{list(range(size))}{'; for pairs use ppermute' if pairs else ''}"
        )
    if sorted(sources) != list(range(size)):
        raise ShapeError(
            f"pshuffle got perm={sources}, but it must name each position from 0 to {size - 1} once; to send to some "
            "ranks only, use ppermute"
        )
    return tuple((source, i) for i, source in enumerate(sources))


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def block_lengths(body: Body, axes: tuple[str, ...], size: int) -> tuple[int, ...] | None:
    """The block length at each position along the axes, for a dim of ``size``. None: the blocks are even."""
    lengths = uneven_lengths(size, body.sizes(axes))
    if lengths is not None:
        body.mark_uneven()
    return lengths


def check_size(size: Any, what: str) -> int:
    """A global size: a non-negative int."""
    value = _integer(size, what, "size")
    if value < 0:
        raise ShapeError(f"{what} got size={size}; a global size is not negative")
    return value


def check_size_use(size: int | None, tiled: bool, index_groups: Any, what: str) -> None:
    """``size`` requires ``tiled`` and excludes index groups."""
    if size is not None and not tiled:
        raise ArgumentError(f"{what} got size={size} without tiled=True; uneven blocks are joined, not stacked")
    if size is not None and index_groups is not None:
        raise ArgumentError(f"{what} got both size={size} and axis_index_groups; leave out one of them")


def check_tiles(x: Tensor, dim: int, n: int, tiled: bool, what: str, remedy: str) -> None:
    """The size of the dim must be a multiple of the number of ranks. Without ``tiled`` it must be that number."""
    if not tiled and x.shape[dim] != n:
        raise ShapeError(
            f"{what} of {show(x)} without tiled=True: dim {dim} is {x.shape[dim]}, but must be {n}, the number of "
            f"ranks; pass tiled=True to split it into {n} blocks"
        )
    if tiled and x.shape[dim] % n:
        raise ShapeError(f"{what} of {show(x)}: dim {dim} does not divide into {n} equal blocks; {remedy}")


def check_alike(
    body: Body,
    leaves: Sequence[Any],
    axes: tuple[str, ...],
    what: str,
    dim: int | None = None,
    size: int | None = None,
) -> None:
    """All blocks must have one shape. Along ``dim`` they must be the blocks of a dim of global ``size``.

    Where blocks may be uneven, one small all-gather tells all ranks the shapes, so that all ranks fail alike. A body
    without types (``check_vma=False``) knows of uneven specs and of ``size``, not of calls such as ``x[x > 0]``.
    """
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    lengths = None if size is None else block_lengths(body, axes, check_size(size, what))
    simulated = body.mesh.transport == "simulation"
    if simulated and size is None and not (UNEVEN and any(map(is_uneven, tensors))):
        return
    if not (simulated or body.asks):
        return
    asks = simulated or lengths is not None or body.uneven
    if not asks and size is None:
        return
    n = math.prod(body.sizes(axes))
    wanted = lengths or (() if size is None else (size // n,) * n)
    _, table = groups(frame_over(body.mesh, body.mesh.axis_names), axes)
    with DisableTorchFunction(), outside_transforms():
        if asks:
            layouts = body.transport.layouts(tensors, body.mesh)
        else:  # blocks are even: all have the shape of this one
            layouts, table = [tuple((x.dtype, tuple(x.shape)) for x in tensors)] * body.mesh.size, table[:1]
    for rows in zip(*layouts, strict=True):
        for members in table:
            _compare(body, [rows[i] for i in members], members, axes, what, dim, wanted, size)


def _compare(
    body: Body,
    rows: list[tuple[Any, tuple[int, ...]]],
    members: tuple[int, ...],
    axes: tuple[str, ...],
    what: str,
    dim: int | None,
    lengths: tuple[int, ...],
    size: int | None,
) -> None:
    """One group's blocks of one leaf, in the order of ``axes``."""
    dtype, first = rows[0]
    over = f"{what} over {as_axis_name(axes)}"
    sizes = tuple(body.mesh.shape.values())
    places = [where(body.mesh, place_at(position, sizes)) for position in members]
    cut = dim % len(first) if type(dim) is int and -len(first) <= dim < len(first) else None
    if cut is not None and len({(kind, shape[:cut], shape[cut + 1 :]) for kind, shape in rows}) > 1:
        cut = None  # they differ in other dims too
    total = 0 if cut is None else sum(shape[cut] for _, shape in rows)
    for place, (kind, shape) in enumerate(rows):
        expected = list(first)
        if cut is not None and lengths:
            expected[cut] = lengths[place]
        if kind is dtype and shape == tuple(expected):
            continue
        at = places[place]
        if cut is not None and lengths:
            raise ShapeError(
                f"{over} got size={size}, which makes blocks of {_listed(lengths)}: {at} should have one of shape "
                f"{tuple(expected)}, but has {shape}; pass size={total}"
            )
        mend = "all ranks must pass the same shape: pad the blocks to one size first"
        if total and what in ("all_gather", "all_to_all"):
            mend = f"for uneven blocks pass tiled=True and size={total}, the global size"
        raise ShapeError(
            f"{over}: {at} has {short_dtype(kind)} of shape {shape}, but {places[0]} has "
            f"{short_dtype(dtype)} of shape {first}; {mend}"
        )


def where(mesh: Mesh, at: tuple[int, ...]) -> str:
    """``rank 3 at x=1, y=1`` for a coordinate."""
    place = ", ".join(f"{axis}={c}" for axis, c in zip(mesh.axis_names, at, strict=True))
    return f"rank {mesh.rank_at(at)} at {place}"
