"""`shard_map` by its definition: the body runs once for every mesh coordinate, and a collective waits for all of them.

Gradients follow from plain autograd, since all ranks are one graph.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

Spec = Sequence[Any]  # of each dim None, the name of an axis, or a tuple of names
_here = threading.local()  # of each rank: its mesh, its coordinate, and where it meets the others


def shard_map(
    body: Callable[..., Tensor], mesh: dict[str, int], in_specs: Sequence[Spec], out_spec: Spec
) -> Callable[..., Tensor]:
    """``body`` takes and gives blocks; what is returned takes and gives whole tensors. ``mesh`` has sizes by name."""
    coordinates = [dict(zip(mesh, index, strict=True)) for index in itertools.product(*map(range, mesh.values()))]

    def run(*args: Tensor) -> Tensor:
        barrier, given = threading.Barrier(len(coordinates)), dict[Any, Tensor]()

        def rank(at: dict[str, int]) -> Tensor:
            _here.mesh, _here.at, _here.barrier, _here.given = mesh, at, barrier, given
            try:
                return body(*[_block(x, spec, mesh, at) for x, spec in zip(args, in_specs, strict=True)])
            except BaseException:
                barrier.abort()  # nobody waits for a rank that has failed
                raise

        with ThreadPoolExecutor(len(coordinates)) as ranks:
            blocks = list(ranks.map(rank, coordinates))
        return _whole(list(zip(coordinates, blocks, strict=True)), out_spec)

    return run


def _block(x: Tensor, spec: Spec, mesh: dict[str, int], at: dict[str, int]) -> Tensor:
    """The part of ``x`` that lies at a coordinate: of n blocks each has ceil(size / n) elements, the last ones less."""
    for dim, entry in enumerate(spec):
        for axis in _axes(entry):
            size = -(-x.shape[dim] // mesh[axis])
            start = min(at[axis] * size, x.shape[dim])
            x = x.narrow(dim, start, min(size, x.shape[dim] - start))
    return x


def _place(entry: Any, mesh: dict[str, int], at: dict[str, int]) -> tuple[int, int]:
    """How many blocks the axes of an entry make, the first axis the slowest, and the number of the one at ``at``."""
    number = 0
    for axis in _axes(entry):
        number = number * mesh[axis] + at[axis]
    return math.prod(mesh[axis] for axis in _axes(entry)), number


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _whole(blocks: list[tuple[dict[str, int], Tensor]], spec: Spec) -> Tensor:
    """The tensor of these blocks; over axes that the spec leaves out they are equal, and the first counts."""
    for dim, entry in enumerate(spec):
        for axis in reversed(_axes(entry)):
            joined = []
            for at, _ in blocks:
                if at[axis] == 0:
                    row = [x for other, x in blocks if {**other, axis: 0} == at]
                    joined.append((at, torch.cat(row, dim)))
            blocks = joined
    return blocks[0][1]


def _exchange(x: Tensor, axes: Any) -> list[Tensor]:
    """What each rank of this rank's group over some axes has given, in their order."""
    _here.given[tuple(_here.at.items())] = x
    _here.barrier.wait()
    sizes = [range(_here.mesh[axis]) for axis in _axes(axes)]
    group = [{**_here.at, **dict(zip(_axes(axes), index, strict=True))} for index in itertools.product(*sizes)]
    found = [_here.given[tuple(at.items())] for at in group]
    _here.barrier.wait()
    return found


def axis_index(axes: Any) -> int:
    """This rank's number over some axes."""
    return _place(axes, _here.mesh, _here.at)[1]


def psum(x: Tensor, axes: Any) -> Tensor:
    """The sum of what the ranks of a group have."""
    return torch.stack(_exchange(x, axes)).sum(0)


def all_gather(x: Tensor, axes: Any, *, axis: int = 0, tiled: bool = False) -> Tensor:
    """What the ranks of a group have: stacked, or ``tiled`` joined along a dim."""
    return (torch.cat if tiled else torch.stack)(_exchange(x, axes), axis)


def psum_scatter(x: Tensor, axes: Any, *, scatter_dimension: int = 0, tiled: bool = False) -> Tensor:
    """This rank's row of the sum, or ``tiled`` its block of rows."""
    rows = psum(x, axes).tensor_split(len(_exchange(x, axes)), scatter_dimension)
    return rows[axis_index(axes)] if tiled else rows[axis_index(axes)].squeeze(scatter_dimension)


def all_to_all(x: Tensor, axes: Any, split_axis: int, concat_axis: int, *, tiled: bool = False) -> Tensor:
    """From each rank of a group the part meant for this one: stacked, or ``tiled`` joined along a dim."""
    given = _exchange(x, axes)
    parts = [one.tensor_split(len(given), split_axis)[axis_index(axes)] for one in given]
    return (
        torch.cat(parts, concat_axis) if tiled else torch.stack([one.squeeze(split_axis) for one in parts], concat_axis)
    )


def ppermute(x: Tensor, axis: str, perm: Sequence[tuple[int, int]]) -> Tensor:
    """What the source of this rank has, and zeros where it has none."""
    given = _exchange(x, axis)
    sources = [source for source, destination in perm if destination == axis_index(axis)]
    return given[sources[0]] if sources else torch.zeros_like(x)
