"""Which simulated ranks hold a value apart: a sub-grid of mesh axes, and the index arithmetic on it.

A simulated value that differs only along ``tp`` needs one shard per ``tp`` coordinate, however many ranks the mesh
has. Its *frame* is that set of axes; shards stand in row-major order over the frame's axes, which stand in mesh order.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any, Final
from weakref import WeakValueDictionary

from fspmd.errors import MeshError
from fspmd.meshes.mesh import Mesh


class Frame:
    """A mesh and the axes over which a simulated value is held apart. Interned: make it with `frame`."""

    __slots__ = ("__weakref__", "axes", "mesh", "sizes", "volume")

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self.mesh = mesh
        self.axes = axes
        self.sizes = tuple(mesh.shape[axis] for axis in axes)
        self.volume = math.prod(self.sizes)

    def __repr__(self) -> str:
        return f"Frame({', '.join(f'{a}={n}' for a, n in zip(self.axes, self.sizes, strict=True))})"

    def coordinates(self) -> Iterable[tuple[int, ...]]:
        """Every coordinate over the frame's axes, row-major."""
        return itertools.product(*map(range, self.sizes))


_FRAMES: Final[WeakValueDictionary[Any, Frame]] = WeakValueDictionary()


@functools.lru_cache(maxsize=4096)
def frame(mesh: Mesh, axes: tuple[str, ...] | frozenset[str]) -> Frame:
    """The frame of a set of axes of ``mesh``."""
    ordered = mesh.ordered(axes)
    return _FRAMES.setdefault((mesh, ordered), Frame(mesh, ordered))


#: meshes on which sizes have differed from rank to rank: of blocks, or of slices. On simulated ones a value cast to
#: varying is held once per rank: autograd asks it for such sizes, which a plain tensor cannot answer.
UNEVEN: set[Mesh] = set()


@functools.lru_cache(maxsize=4096)
def union(a: Frame, b: Frame) -> Frame:
    """The smallest frame that holds both; of one mesh, or of a mesh and its slice."""
    mesh = a.mesh if a.mesh is b.mesh or a.mesh.contains(b.mesh) else b.mesh
    if mesh is b.mesh and a.mesh is not b.mesh and not b.mesh.contains(a.mesh):
        raise MeshError(
            f"blocks of a body on {a.mesh!r} were used together with blocks on {b.mesh!r}; return them from their own "
            "body, and pass the result to the other as an argument"
        )
    return frame(mesh, a.axes + b.axes)


@functools.lru_cache(maxsize=4096)
def spread(source: Frame, target: Frame) -> tuple[int, ...]:
    """For every shard of ``target`` the index of the ``source`` shard it equals (target's axes include source's)."""
    assert set(source.axes) <= set(target.axes), f"{source} holds apart what {target} does not"
    weights = dict.fromkeys(target.axes, 0)
    stride = 1
    for axis, size in zip(reversed(source.axes), reversed(source.sizes), strict=True):
        weights[axis] = stride
        stride *= size
    return tuple(
        sum(weights[axis] * c for axis, c in zip(target.axes, coordinate, strict=True))
        for coordinate in target.coordinates()
    )


@functools.lru_cache(maxsize=4096)
def groups(whole: Frame, axes: tuple[str, ...]) -> tuple[Frame, tuple[tuple[int, ...], ...]]:
    """The frame without ``axes``, and for each of its shards the group: indices into ``whole``'s shards.

    Within a group the order is that of ``axes`` as given, major first.
    """
    rest = frame(whole.mesh, tuple([axis for axis in whole.axes if axis not in axes]))
    strides = dict(zip(whole.axes, _strides(whole.sizes), strict=True))
    members = [
        sum(c * strides[axis] for axis, c in zip(axes, coordinate, strict=True))
        for coordinate in itertools.product(*(range(whole.mesh.shape[axis]) for axis in axes))
    ]
    bases = [sum(c * strides[axis] for axis, c in zip(rest.axes, at, strict=True)) for at in rest.coordinates()]
    return rest, tuple(tuple(base + member for member in members) for base in bases)


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides, stride = [], 1
    for size in reversed(sizes):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))
