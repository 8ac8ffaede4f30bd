"""The blocks of a `Sharded` as ``torch.distributed.checkpoint`` writes and reads them: chunks of the global tensor.

So a checkpoint holds global tensors, of which each rank writes its own blocks, and any mesh and layout can read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fspmd.errors import ArgumentError, SpecError
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec
from fspmd.transport.local_tensor import placed_blocks

Offsets = tuple[int, ...]


def chunks_of(x: Sharded) -> Iterator[tuple[Offsets, Tensor]]:
    """The different blocks that this process holds, and where each begins in the global tensor.

    Raises:
        SpecError: a layout of which no block is a box of the global tensor.
    """
    spec, mesh = x.spec, x.spec.mesh
    if spec.partition.unreduced or spec.flat:
        why = "its value is a sum that is pending" if not spec.flat else "its blocks are no boxes of the global tensor"
        kept = P(*(None if spec.flat else entry for entry in spec.partition))
        raise SpecError(
            f"torch.distributed.checkpoint got {x!r}, of which no block can be saved or loaded: {why}; move it first: "
            f"reshard(x, {kept!r})"
        )
    seen = set()
    for at, block in placed_blocks(x.local, mesh):
        coordinate = tuple(at.values())
        offsets = spec.offset(coordinate)
        if (block.numel() or _writes_empty_tensor(spec, coordinate)) and offsets not in seen:
            seen.add(offsets)
            yield offsets, block


def _writes_empty_tensor(spec: TensorSpec, coordinate: tuple[int, ...]) -> bool:
    """Whether a tensor without elements is written by whoever stands here."""
    return 0 in spec.shape and not any(coordinate)


def create_write_items(x: Sharded, name: str, _: Any) -> list[Any]:
    """What this process writes."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(torch.empty(0, dtype=x.dtype, requires_grad=x.requires_grad))
    size, found = torch.Size(x.spec.shape), []
    for chunk in create_chunk_list(x):
        data = TensorWriteData(chunk, properties, size)
        found.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    return found


def create_chunk_list(x: Sharded) -> list[Any]:
    """What this process holds of the global tensor."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(torch.Size(offsets), block.shape) for offsets, block in chunks_of(x)]


def get_tensor_shard(x: Sharded, index: Any) -> Tensor:
    """The block that begins at an offset, to be read or written."""
    found = next((block for offsets, block in chunks_of(x) if offsets == tuple(index.offset or ())), None)
    if found is None:
        raise ArgumentError(f"torch.distributed.checkpoint asked for the block of {x!r} at {index}, which is not here")
    return found


def install() -> None:
    """What ``torch.distributed.checkpoint`` asks of a tensor that has its own way to be saved."""
    methods = (
        ("__create_write_items__", create_write_items),
        ("__create_chunk_list__", create_chunk_list),
        ("__get_tensor_shard__", get_tensor_shard),
    )
    for name, method in methods:
        setattr(Sharded, name, method)
