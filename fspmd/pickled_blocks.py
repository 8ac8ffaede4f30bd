"""The place of a pickled block on its mesh, so that no other rank takes the block for its own."""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any, Final

from torch import Tensor

from fspmd.errors import MeshError, ShapeError, TreeError
from fspmd.foreign import misfit
from fspmd.meshes import world
from fspmd.messages import described
from fspmd.spec import TensorSpec, describe

Place = tuple[tuple[str, int], ...]  # the index of a block on each axis along which blocks differ

_DAMAGED: Final = "the file is damaged, or was not written by fspmd: load another copy"
_INSTEAD: Final = (
    "save and load a file per rank: torch.save(tree, f'{path}.{rank}'); or write device_get(tree) before torch.save, "
    "and device_put(tree, specs) after torch.load; or use torch.distributed.checkpoint, which keeps blocks apart"
)


def refuse_checkpoint(spec: TensorSpec, place: Place) -> None:
    """Raise `TreeError` if ``torch.distributed.checkpoint`` pickles a block: it pickles on one rank for all."""
    frame = sys._getframe(1) if place and spec.mesh.transport == "process_group" else None
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint"):
            raise TreeError(
                f"torch.distributed.checkpoint got Sharded {spec!r} in a list or a tuple, whose entries it pickles on "
                "one rank for all, but each rank has another block; put it into a dict: "
                "{str(i): x for i, x in enumerate(values)}"
            )
        frame = frame.f_back


def place_of(spec: TensorSpec) -> Place:
    """Return the index of this process on the axes along which blocks of the spec differ."""
    differ = spec.partition.axes | spec.partition.unreduced
    here = zip(spec.mesh.axis_names, spec.mesh.coordinate() or (), strict=False)
    return tuple((axis, index) for axis, index in here if axis in differ)


def check_block(local: Any, spec: TensorSpec, place: Place) -> None:
    """Check what a pickle says of one block, before anybody takes it for ours.

    Raises:
        ShapeError: The block is not the one of its spec at its place.
        MeshError: It was saved by another rank, or among more processes.
    """
    if type(spec) is not TensorSpec or type(place) is not tuple or not all(_is_index(spec, entry) for entry in place):
        raise ShapeError(f"a saved block says that its layout is {spec!r} and its place {place!r}; {_DAMAGED}")
    at = dict(place)
    _check_contents(local, spec, tuple(at.get(axis, 0) for axis in spec.mesh.axis_names))
    _check_place(spec, place)


def check_blocks(spec: TensorSpec, axes: tuple[str, ...], blocks: list[Any], requires_grad: bool) -> None:
    """Check what a pickle says of the blocks that a simulation has saved, of its ranks along ``axes``.

    Raises:
        ShapeError: Blocks are missing, or are not those of the spec, or cannot require a gradient.
    """
    mesh = spec.mesh if type(spec) is TensorSpec else None
    named = mesh is not None and type(axes) is tuple and axes == mesh.ordered(frozenset(axes) & {*mesh.axis_names})
    if mesh is None or not named:
        raise ShapeError(f"saved blocks say that their layout is {spec!r} and differs over {axes!r}; {_DAMAGED}")
    sizes = [mesh.shape[axis] for axis in axes]
    if type(blocks) is not list or len(blocks) != math.prod(sizes) or not spec.partition.axes <= {*axes}:
        raise ShapeError(f"{described(blocks)} was saved as the blocks over {axes!r} of Sharded {spec!r}; {_DAMAGED}")
    for block, index in zip(blocks, itertools.product(*map(range, sizes)), strict=True):
        at = dict(zip(axes, index, strict=True))
        _check_contents(block, spec, tuple(at.get(axis, 0) for axis in mesh.axis_names))
    has_gradient = spec.dtype.is_floating_point or spec.dtype.is_complex
    if type(requires_grad) is not bool or requires_grad > has_gradient:
        raise ShapeError(f"a saved Sharded {spec!r} says requires_grad={requires_grad!r}; {_DAMAGED}")


def checked_rest(spec: TensorSpec, rest: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what else a pickle says of a value: its strides and its offset, and its attributes.

    Raises:
        ShapeError: They are not those of a tensor.
    """
    attributes: dict[str, Any] = rest[-1] if rest and type(rest[-1]) is dict else {}
    lies = rest[:-1] if rest and rest[-1] is attributes else rest
    strides, start = (*lies, 0)[:2] if lies else (None, 0)
    fits = strides is None or (type(strides) is tuple and len(strides) == spec.ndim)
    numbers = (*(strides or ()), *(() if start is None else (start,))) if fits else ()
    if not fits or len(lies) > 2 or not all(type(n) is int and n >= 0 for n in numbers):
        raise ShapeError(f"a saved Sharded {spec!r} says that it lies in memory as {lies!r}; {_DAMAGED}")
    if not all(type(name) is str for name in attributes):
        raise ShapeError(f"a saved Sharded {spec!r} has the attributes {attributes!r}; {_DAMAGED}")
    return lies, attributes


def _is_index(spec: TensorSpec, entry: Any) -> bool:
    if type(entry) is not tuple or len(entry) != 2:
        return False
    axis, index = entry
    return axis in spec.mesh.axis_names and type(index) is int and 0 <= index < spec.mesh.shape[axis]


def _check_contents(block: Any, spec: TensorSpec, coordinate: tuple[int, ...]) -> None:
    expected = spec.local_shape(coordinate)
    if not isinstance(block, Tensor) or misfit(block) or tuple(block.shape) != expected or block.dtype != spec.dtype:
        raise ShapeError(
            f"{described(block)} was saved as the block of Sharded {spec!r} at {coordinate}, which is "
            f"{describe(spec.dtype, expected)}; {_DAMAGED}"
        )


def _check_place(spec: TensorSpec, place: Place) -> None:
    """Raise `MeshError` for a block that was saved by another rank, or among more processes."""
    mesh = spec.mesh
    if mesh.transport != "process_group":
        return
    saved = f"a saved block of Sharded {spec!r}, {_shown(spec, place)},"
    if max(mesh.ranks) >= world.world_size():
        raise MeshError(
            f"{saved} was loaded where {world.world_size()} processes run, but its mesh has the ranks up to "
            f"{max(mesh.ranks)}; load it where as many run, or {_INSTEAD}"
        )
    if mesh.coordinate() is None or place_of(spec) != place:
        here = "no member of its mesh" if mesh.coordinate() is None else _shown(spec, place_of(spec))
        raise MeshError(f"{saved} was loaded on rank {world.process_rank()}, {here}; {_INSTEAD}")


def _shown(spec: TensorSpec, place: Place) -> str:
    """Return the text of a place: ``x=1 (elements 2:4 of dim 0)``."""
    if not place:
        return "the same on all ranks"
    at = ", ".join(f"{axis}={index}" for axis, index in place)
    if spec.flat:
        return at
    coordinate = tuple(dict(place).get(axis, 0) for axis in spec.mesh.axis_names)
    spans = zip(spec.offset(coordinate), spec.local_shape(coordinate), strict=True)
    cut = {dim for dim, _, _ in spec.cuts}
    parts = [f"{start}:{start + n} of dim {dim}" for dim, (start, n) in enumerate(spans) if dim in cut]
    return f"{at} (elements {', '.join(parts)})" if parts else at
