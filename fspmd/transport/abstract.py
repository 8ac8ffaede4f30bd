"""Collectives of one rank without the others: they give shapes, and no values. Programs are lowered with them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from fspmd.errors import MeshError
from fspmd.meshes.axes import row_major
from fspmd.meshes.mesh import Mesh
from fspmd.tracing import constant
from fspmd.transport.call import Layout, Options, Transport
from fspmd.transport.carriers import neutral_like

Axes = tuple[str, ...]


class AbstractTransport(Transport):
    """Returns zeros of the shape that a process of the mesh would get. Operands have no values either."""

    coalesces = True

    def __init__(self, of_values: bool = False) -> None:
        self.of_values = of_values  # whether operands may have values, which are ignored

    def _zeros(self, x: Tensor, shape: Sequence[int], mesh: Mesh) -> Tensor:
        if not self.of_values and not x.is_meta and not _is_fake(x):
            raise MeshError(
                f"{mesh!r} is abstract: it has no ranks that could communicate; lower programs for it with "
                'jit(f).lower(...), and run them on a mesh of transport="simulation" or "process_group"'
            )
        return x.new_zeros(tuple(shape))

    def reduce(self, x: Tensor, mesh: Mesh, axes: Axes, o: Options) -> Tensor:
        return self._zeros(x, x.shape, mesh)

    broadcast = permute = reduce_to_root = reduce

    def gather(self, x: Tensor, mesh: Mesh, axes: Axes, o: Options) -> Tensor:
        shape = list(x.shape) or [1]
        shape[o.dim] = shape[o.dim] * place_in_group(mesh, axes, o)[0] if o.sizes is None else sum(o.sizes)
        return self._zeros(x, shape, mesh)

    def reduce_scatter(self, x: Tensor, mesh: Mesh, axes: Axes, o: Options) -> Tensor:
        return self._zeros(x, _scattered(x, mesh, axes, o), mesh)

    def gather_into(self, out: Tensor, x: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
        return out.copy_(self._zeros(out, out.shape, mesh))

    reduce_scatter_into = gather_into

    def slice(self, x: Tensor, mesh: Mesh, axes: Axes, o: Options) -> Tensor:
        n, index = place_in_group(mesh, axes, o)
        if o.sizes is None:
            length = x.shape[o.dim] // n
            return x.narrow(o.dim, index * length, length)
        return x.narrow(o.dim, sum(o.sizes[:index]), o.sizes[index])

    def exchange(self, x: Tensor, mesh: Mesh, axes: Axes, o: Options) -> Tensor:
        shape = _scattered(x, mesh, axes, o)
        if o.concat_sizes is not None and o.concat_dim != o.dim:
            shape[o.concat_dim] = sum(o.concat_sizes)
        else:
            shape[o.concat_dim] *= place_in_group(mesh, axes, o)[0]
        return self._zeros(x, shape, mesh)

    def ragged(self, x: Tensor, mesh: Mesh, axes: Axes, o: Options) -> Tensor:
        assert o.routes is not None
        shape = list(x.shape)
        shape[o.dim] = o.routes.routes[0].lands.length
        return self._zeros(x, shape, mesh)

    def reblock(self, x: Tensor, mesh: Mesh, axes: Axes, o: Options) -> Tensor:
        assert o.move is not None
        target = o.move.target
        at = target.mesh.coordinate()
        lead = x.shape[: max(0, x.ndim - o.move.source.ndim)]
        return self._zeros(x, (0,) if at is None else (*lead, *target.local_shape(at)), mesh)

    def alias(self, x: Tensor, mesh: Mesh, axes: Axes, o: Options) -> Tensor:
        return x.view_as(x)

    pick = alias

    def at_root(self, x: Tensor, mesh: Mesh, axes: Axes, o: Options) -> Tensor:
        return x.clone() if place_in_group(mesh, axes, o)[1] == o.root else neutral_like(x)

    def agree(self, complaint: str, mesh: Mesh) -> str:
        return complaint

    def layouts(self, blocks: Sequence[Tensor | None], mesh: Mesh) -> list[tuple[Layout | None, ...]]:
        """Return the layouts as if every rank had the blocks of this rank."""
        return [tuple(None if x is None else (x.dtype, tuple(x.shape)) for x in blocks)] * mesh.size

    def tell(self, message: bytes, mesh: Mesh, source: int) -> bytes:
        return message

    @constant
    def index(self, mesh: Mesh, axes: Axes) -> Tensor:
        return torch.tensor(place_in_group(mesh, axes, Options())[1], device=mesh.device)


def _is_fake(x: Tensor) -> bool:
    return hasattr(x, "fake_mode")


def place_in_group(mesh: Mesh, axes: Axes, o: Options) -> tuple[int, int]:
    """Return the number of ranks in this rank's group, and its index there."""
    at = dict(zip(mesh.axis_names, mesh.coordinate() or (), strict=False))
    index = row_major([at.get(axis, 0) for axis in axes], [mesh.shape[axis] for axis in axes])
    for group in o.index_groups or ():
        if index in group:
            return len(group), group.index(index)
    return prod(mesh.shape[axis] for axis in axes), index


def _scattered(x: Tensor, mesh: Mesh, axes: Axes, o: Options) -> list[int]:
    n, index = place_in_group(mesh, axes, o)
    shape = list(x.shape)
    shape[o.dim] = shape[o.dim] // n if o.sizes is None else o.sizes[index]
    return shape


def imagined() -> Transport:
    """Return the transport that stands in for processes in a recording, where no rank waits for another."""
    return _IMAGINED


def shape_after(kernel: str, shape: tuple[int, ...], mesh: Mesh, axes: Axes, o: Options) -> tuple[int, ...]:
    """Return the shape of a kernel's result on this rank, or on the first simulated rank."""
    return tuple(getattr(_IMAGINED, kernel)(torch.empty(shape, device="meta"), mesh, axes, o).shape)


_IMAGINED = AbstractTransport(of_values=True)
