"""Frames of simulated values: the axes over which a value has one shard per coordinate, and their index arithmetic.

A simulated value that differs only along ``tp`` needs one shard per ``tp`` coordinate, however many ranks the mesh
has. Its *frame* is that set of axes, in mesh order. Shards are in row-major order over the axes of the frame.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, Final
from weakref import WeakValueDictionary

from fspmd.cache import cached
from fspmd.errors import MeshError
from fspmd.meshes.mesh import Mesh


class Frame:
    """A mesh and the axes over which a simulated value has one shard per coordinate. Interned: see `frame_over`."""

    __slots__ = ("__weakref__", "axes", "mesh", "sizes", "volume")

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self.mesh = mesh
        self.axes = axes
        self.sizes = tuple(mesh.shape[axis] for axis in axes)
        self.volume = math.prod(self.sizes)

    def __repr__(self) -> str:
        return f"Frame({', '.join(f'{a}={n}' for a, n in zip(self.axes, self.sizes, strict=True))})"

    def coordinates(self) -> Iterable[tuple[int, ...]]:
        """Return every coordinate over the axes of the frame, row-major."""
        return itertools.product(*map(range, self.sizes))

    def mesh_coordinates(self) -> Iterator[tuple[int, ...]]:
        """Yield the same coordinates on the whole mesh: those of the first rank that has each block."""
        origin = dict.fromkeys(self.mesh.axis_names, 0)
        for index in self.coordinates():
            yield tuple((origin | dict(zip(self.axes, index, strict=True))).values())


_FRAMES: Final[WeakValueDictionary[Any, Frame]] = WeakValueDictionary()


@cached
def frame_over(mesh: Mesh, axes: tuple[str, ...] | frozenset[str]) -> Frame:
    """Return the frame of a set of axes of ``mesh``."""
    ordered = tuple([axis for axis in mesh.axis_names if axis in axes])
    return _FRAMES.setdefault((mesh, ordered), Frame(mesh, ordered))


#: Transports on which sizes have differed from rank to rank. Until there is one, no call looks at sizes.
UNEVEN: set[str] = set()


@cached
def union(a: Frame, b: Frame) -> Frame:
    """Return the smallest frame that has the axes of both. Their meshes are one mesh, or a mesh and its slice."""
    mesh = a.mesh if a.mesh is b.mesh or a.mesh.contains(b.mesh) else b.mesh
    if mesh is b.mesh and a.mesh is not b.mesh and not b.mesh.contains(a.mesh):
        raise MeshError(
            f"blocks of a body on {a.mesh!r} were used together with blocks on {b.mesh!r}; return them from their own "
            "body, and pass the result to the other as an argument"
        )
    return frame_over(mesh, a.axes + b.axes)


@cached
def spread(source: Frame, target: Frame) -> tuple[int, ...]:
    """Return for each shard of ``target`` the index of the equal shard of ``source``, whose axes are a part of its."""
    assert set(source.axes) <= set(target.axes), f"{source} has axes that {target} lacks"
    dims = [target.axes.index(axis) for axis in source.axes]
    number = {coordinate: i for i, coordinate in enumerate(source.coordinates())}
    return tuple([number[tuple([at[d] for d in dims])] for at in target.coordinates()])


@cached
def groups(whole: Frame, axes: tuple[str, ...]) -> tuple[Frame, tuple[tuple[int, ...], ...]]:
    """Return the frame without ``axes``, and for each of its shards the group of indices of the shards of ``whole``.

    Within a group the order is that of ``axes``, major first.
    """
    rest = frame_over(whole.mesh, tuple([axis for axis in whole.axes if axis not in axes]))
    dims = [whole.axes.index(axis) for axis in (*rest.axes, *axes)]
    coordinates = list(whole.coordinates())
    order = sorted(range(whole.volume), key=lambda i: [coordinates[i][d] for d in dims])
    n = whole.volume // rest.volume
    return rest, tuple([tuple(order[i : i + n]) for i in range(0, whole.volume, n)])
