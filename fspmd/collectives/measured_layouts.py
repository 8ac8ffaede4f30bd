"""Layouts of blocks, measured: the ranks tell each other the shapes and dtypes of the blocks that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fspmd.collectives.checks import where
from fspmd.entries import Flat, entry_axes
from fspmd.errors import ArgumentError, ShapeError, SpecError
from fspmd.messages import counted
from fspmd.spec import P, TensorSpec, complain, short_dtype
from fspmd.tracing import outside_transforms
from fspmd.transport import transport_named
from fspmd.transport.call import Layout
from fspmd.transport.frame import frame_over


def spec_of_blocks(x: Tensor | None, partition: P, mesh: Any, name: object) -> TensorSpec:
    """Return the layout whose blocks the ranks hold. None stands for a value that is not a tensor.

    Raises:
        FspmdError: The blocks do not fit together. All ranks raise, and the message names the first rank that differs.
    """
    with outside_transforms():
        layouts = [layout for (layout,) in transport_named(mesh.transport).layouts([x], mesh)]
    return spec_of_layouts(layouts, partition, mesh, name)


def spec_of_layouts(layouts: Sequence[Layout | None], partition: P, mesh: Any, name: object) -> TensorSpec:
    """Return `spec_of_blocks` for the dtype and shape of each rank, in row-major order."""
    coordinates = list(frame_over(mesh, mesh.axis_names).coordinates())
    checked = []
    for at, layout in zip(coordinates, layouts, strict=True):
        if layout is None:
            raise ArgumentError(f"{name}: {where(mesh, at)} has no tensor; every rank must pass its block")
        checked.append(layout)
    dtype, first = checked[0]
    for at, (kind, shape) in zip(coordinates, checked, strict=True):
        if kind != dtype or len(shape) != len(first):
            raise ShapeError(
                f"{name}: {where(mesh, at)} has {short_dtype(kind)} of shape {shape}, but the first rank has "
                f"{short_dtype(dtype)} of shape {first}; all ranks must hold one dtype and one number of dims"
            )
    if wrong := complain(partition, mesh, len(first)):
        raise SpecError(f"{name} of blocks with {counted(len(first), 'dim')}: {wrong}")
    total = list(first)
    for dim, entry in enumerate(partition):
        if isinstance(entry, Flat):
            total[dim] = entry.size
            continue
        axes = entry_axes(entry)
        total[dim] = sum(
            shape[dim]
            for at, (_, shape) in zip(coordinates, checked, strict=True)
            if all(c == 0 or axis in axes for axis, c in zip(mesh.axis_names, at, strict=True))
        )
    spec = TensorSpec(mesh, partition, total, dtype)
    for at, (_, shape) in zip(coordinates, checked, strict=True):
        if shape != spec.local_shape(at):
            raise ShapeError(
                f"{name}: {where(mesh, at)} has a block of shape {shape}, but torch.chunk of the whole, {spec!r}, "
                f"gives it {spec.local_shape(at)}; pad the blocks to one shape, or put them together first: all_gather"
            )
    return spec
