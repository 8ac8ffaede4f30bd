"""Checks of what functions are given. They raise before anything moves, and of shapes and types alike on all ranks."""

from __future__ import annotations

import itertools
from math import prod
from typing import Any

import torch
from torch import Tensor

from fspmd.body import bound_body, resolve_axes
from fspmd.entries import blocks
from fspmd.errors import ArgumentError, ShapeError, VarianceError
from fspmd.meshes.axes import row_major
from fspmd.messages import quoted
from fspmd.nn.sequences import Axes, SequenceLayout, contiguous, joined
from fspmd.sharded import is_sharded
from fspmd.torch_internals import NO_LEVEL, DisableTorchFunction, FakeTensor, level_of
from fspmd.tracing import outside_transforms, reading
from fspmd.transport.local_tensor import blocks_of
from fspmd.variance import get_variance, show, unwrapped

Shape = tuple[int, ...]
Everywhere = dict[tuple[int, ...] | None, list[Shape]]  # the shapes of tensors by the mesh coordinate; None: everywhere


def shapes_of(*tensors: Tensor) -> list[Shape]:
    """The shapes of this rank's blocks."""
    return [tuple(x.shape) for x in tensors]


def shapes_everywhere(what: str, *tensors: Tensor) -> Everywhere:
    """The shapes of all ranks' blocks, of each rank that is known. Ranks tell each other shapes that may differ."""
    body = bound_body(what)
    mesh, mine = body.mesh, shapes_of(*tensors)
    if mesh.transport == "abstract" or (body.uneven and not body.asks):
        return {mesh.coordinate() or (0,) * len(mesh.shape): mine}
    differs = any(isinstance(n, torch.SymInt) for shape in mine for n in shape)
    if not differs and (mesh.transport == "simulation" or not body.uneven):
        return {None: mine}
    with DisableTorchFunction(), outside_transforms():
        rows = body.transport.layouts(tensors, mesh)
    coordinates = itertools.product(*map(range, mesh.shape.values()))
    return {at: [layout[1] for layout in row if layout is not None] for at, row in zip(coordinates, rows, strict=True)}


def check_varies(what: str, axis: Axes, words: str, *operands: Tensor) -> None:
    """Raise `VarianceError` in a body with types unless some operand differs over each axis.

    Ranks that have the same would count it once each: a sum over one axis too many. ``words``: what the operands are.
    """
    body = bound_body(what)
    if not body.checked:
        return
    varying = frozenset().union(*(get_variance(x).varying for x in operands))
    if equal := [name for name in resolve_axes(body, axis, what) if name not in varying]:
        raise VarianceError(
            f"{what} got {words} of type {', '.join(map(show, operands))}, equal on all ranks of {quoted(equal)}, "
            "which it would count as often as there are ranks; leave the axis out, or cut what is given over it"
        )


def check_equal(what: str, axis: Axes, words: str, x: Tensor) -> None:
    """Raise `VarianceError` in a body with types unless a value is equal on all ranks of an axis."""
    body = bound_body(what)
    varying = get_variance(x).varying
    if body.checked and (differs := [name for name in resolve_axes(body, axis, what) if name in varying]):
        raise VarianceError(
            f"{what} got {words} of type {show(x)}, which differ from rank to rank of {quoted(differs)}; give it the "
            "same on all of these ranks"
        )


def check_operands(query: Tensor, key: Tensor, value: Tensor, what: str, everywhere: Everywhere | None = None) -> None:
    """Raise `ShapeError` or `ArgumentError` unless queries, keys and values fit together."""
    dtypes = [x.dtype for x in (query, key, value)]
    if len({*dtypes}) > 1 or not query.is_floating_point():
        raise ArgumentError(
            f"{what} got a query, key and value of {', '.join(map(str, dtypes))}; give it one floating dtype"
        )
    for shapes in [shapes_of(query, key, value)] if everywhere is None else everywhere.values():
        if not _fit(*shapes[:3]):
            raise ShapeError(
                f"{what} got a query, key and value of shapes {', '.join(map(str, shapes[:3]))}; they must be "
                "[..., heads, queries, width], [..., kv_heads, keys, width] and [..., kv_heads, keys, value_width], "
                "with heads a multiple of kv_heads"
            )


def _fit(query: Shape, key: Shape, value: Shape) -> bool:
    return (
        min(map(len, (query, key, value))) >= 3
        and query[-1] == key[-1]
        and key[:-1] == value[:-1]
        and query[:-3] == key[:-3]
        and key[-3] > 0
        and query[-3] % key[-3] == 0
    )


@reading
def check_slots(what: str, slots: Tensor, room: int) -> None:
    """Raise `ArgumentError` on CPUs unless slots of a cache exist, and no two sequences have one."""
    for row in _numbers_on_host(slots):
        if wrong := sorted({slot for slot in row if not 0 <= slot < room or row.count(slot) > 1}):
            raise ArgumentError(
                f"{what} got the slots {row} of a cache of {room} slots, of which {', '.join(map(str, wrong))} is out "
                f"of range or given twice; give it numbers from 0 to {room - 1}, each at most once"
            )


def check_counts(what: str, counts: Tensor, n: int) -> None:
    """Raise `ArgumentError` on CPUs unless each sequence has between none and all of n positions."""
    for row in _numbers_on_host(counts):
        if any(not 0 <= count <= n for count in row):
            raise ArgumentError(
                f"{what} got the counts {row} of {n} positions; give it a number from 0 to {n} for each sequence"
            )


def check_groups(what: str, rows: Tensor, counts: Tensor) -> None:
    """Raise `ArgumentError` on CPUs unless groups of these sizes fit into the rows: those of this or each rank."""
    blocks_of_counts: Any = counts
    if is_sharded(counts):
        if blocks_of_counts.spec.partition.unreduced:
            return
        blocks_of_counts = blocks_of_counts.local
    numbers, lengths = _numbers_on_host(blocks_of_counts), _lengths(rows)
    if len(lengths) != len(numbers):  # the same rows for all, or other ones
        lengths = [max(lengths)] * len(numbers)
    for row, n in zip(numbers, lengths, strict=True):
        if any(count < 0 for count in row) or sum(row) > n:
            raise ArgumentError(
                f"{what} got the counts {row}, {sum(row)} together, for {n} rows; give it how many rows each group "
                "has, from 0 on, at most all rows together"
            )


def _lengths(x: Tensor) -> list[int]:
    """How many rows each simulated rank has, or this one."""
    with DisableTorchFunction(), outside_transforms():
        if is_sharded(x) or level_of(x) != NO_LEVEL:
            return [x.shape[0]]
        return [block.shape[0] for block in blocks_of(unwrapped(x))]


def _numbers_on_host(x: Tensor) -> list[list[int]]:
    """The numbers of each simulated rank, or of this one. None are read from a GPU, which would wait."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return []
    with DisableTorchFunction(), outside_transforms():
        blocks = [block for block in blocks_of(unwrapped(x)) if not isinstance(block, FakeTensor)]
        is_mapped = level_of(x) != NO_LEVEL  # by vmap, which adds a dim
        return [row for block in blocks for row in (block.reshape(-1, 1) if is_mapped else block[None]).tolist()]


def check_layout(
    layout: SequenceLayout | None, everywhere: Everywhere, rings: tuple[str, ...], inner: tuple[str, ...], what: str
) -> SequenceLayout:
    """The layout, or a contiguous one, of a sequence that ``rings`` cut into blocks, and ``inner`` these into parts.

    A layout over the ranks of all these axes becomes one over ``rings`` alone.

    Raises:
        ShapeError: The layout has other ranks or blocks than the axes, or another length than the blocks.
    """
    body, names = bound_body(what), rings + inner
    of_rings, sizes = body.sizes(rings), body.sizes(names)
    ranks, every = prod(of_rings), prod(sizes)
    lengths = {at: query[-2] for at, (query, *_) in everywhere.items()}
    if layout is None:
        if len(set(lengths.values())) > 1:
            raise ShapeError(
                f"{what} got blocks of different lengths, {', '.join(map(str, lengths.values()))}, and no layout; pass "
                f"one of the whole sequence: contiguous(length, {every})"
            )
        layout = contiguous(next(iter(lengths.values())) * every, ranks)  # so any axes cut it alike
    whole, parts = blocks(layout.length, of_rings), blocks(layout.length, sizes)
    if layout.cuts != whole and layout.cuts == parts:
        layout = joined(layout, of_rings or 1)
    if len(layout.cuts) not in (ranks, every):
        raise ShapeError(
            f"{what} cuts the sequence over {every} ranks, and got a layout of {len(layout.cuts)}; make one: "
            f"contiguous({layout.length}, {every})"
        )
    if layout.cuts != whole:
        over, right, wanted = (rings, of_rings, whole) if len(layout.cuts) == ranks else (names, sizes, parts)
        raise ShapeError(
            f"{what} over {over}, which cut {layout.length} positions into blocks of {[n for _, n in wanted]}, got a "
            f"layout with blocks of {[n for _, n in layout.cuts]}; give the layout the sizes of the axes, such as "
            f"contiguous({layout.length}, {right})"
        )
    mesh, cut = body.mesh, [n for _, n in parts]
    for at, length in lengths.items():
        needed = set(cut) if at is None else {cut[row_major([at[mesh.axis_names.index(x)] for x in names], sizes)]}
        if needed != {length}:
            place = "" if at is None else f" at {dict(zip(mesh.axis_names, at, strict=True))}"
            raise ShapeError(
                f"{what} got a block of {length} positions{place}, where the layout, of {layout.length}, has "
                f"{' and '.join(map(str, sorted(needed)))}; make the layout for the length of the whole sequence"
            )
    return layout
