"""Conversion from and to torch's DeviceMesh. Both directions keep the process groups that exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from fspmd.errors import MeshError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DeviceMeshParts", "read_device_mesh", "write_device_mesh"]


class DeviceMeshParts(NamedTuple):
    """The parts of a DeviceMesh: named dims, ranks row-major, this process's group per dim (none outside the mesh)."""

    shape: dict[str, int]
    ranks: list[int]
    device_type: str
    groups: list[ProcessGroup]


def read_device_mesh(device_mesh: DeviceMesh) -> DeviceMeshParts:
    """Return the parts of a DeviceMesh, without communication.

    Raises:
        MeshError: It is not a DeviceMesh, its dims have no names, or it is a slice without this process.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(device_mesh, DeviceMesh):
        raise MeshError(f"from_device_mesh takes a torch DeviceMesh, but got {type(device_mesh).__name__}")
    names = device_mesh.mesh_dim_names
    if names is None:
        raise MeshError(
            f"from_device_mesh({device_mesh}): its dims have no names, make it with "
            f"init_device_mesh(..., mesh_dim_names={tuple(f'axis{i}' for i in range(device_mesh.ndim))})"
        )
    try:
        ranks = device_mesh.mesh.flatten().tolist()
    except RuntimeError as error:
        raise MeshError(
            f"from_device_mesh({device_mesh}): this process is not in this slice, so it does not know the ranks of the "
            "slice: convert the whole DeviceMesh and slice the result"
        ) from error
    groups = []
    if getattr(device_mesh, "_dim_group_names", None):
        groups = [device_mesh.get_group(dim) for dim in range(device_mesh.ndim)]
    shape = dict(zip(names, device_mesh.shape, strict=True))
    return DeviceMeshParts(shape, ranks, device_mesh.device_type, groups)


def write_device_mesh(
    shape: Mapping[str, int], ranks: Sequence[int], device_type: str, *, rank: int, groups: Sequence[ProcessGroup]
) -> DeviceMesh:
    """Return a DeviceMesh over existing groups: one per dim, or none for a non-member or a simulated mesh."""
    from torch.distributed.device_mesh import DeviceMesh

    grid = torch.tensor(list(ranks), dtype=torch.int, device="cpu").view(tuple(shape.values()))
    names = tuple(shape)
    if groups:
        return DeviceMesh.from_group(list(groups), device_type, grid, mesh_dim_names=names)
    device_mesh = DeviceMesh(device_type, grid, mesh_dim_names=names, _init_backend=False, _rank=rank)
    device_mesh._dim_group_names = []
    return device_mesh
