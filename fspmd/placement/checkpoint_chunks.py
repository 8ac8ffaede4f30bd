"""The blocks of a `Sharded` for ``torch.distributed.checkpoint``, which writes and reads them as chunks.

A checkpoint has global tensors. Each rank writes its own blocks, and any mesh and layout can read them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fspmd.errors import ArgumentError, SpecError
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec
from fspmd.transport.local_tensor import placed_blocks

Offsets = tuple[int, ...]


def chunks_of(x: Sharded) -> Iterator[tuple[Offsets, Tensor]]:
    """The different blocks of this process, and the offsets at which each begins in the global tensor.

    Raises:
        SpecError: the blocks are no boxes of the global tensor.
    """
    spec, mesh = x.spec, x.spec.mesh
    if spec.partition.unreduced or spec.flat:
        why = "its value is a pending sum" if not spec.flat else "its blocks are no boxes of the global tensor"
        target = P(*(None if spec.flat else entry for entry in spec.partition))
        raise SpecError(
            f"torch.distributed.checkpoint got {x!r}, whose blocks cannot be saved or loaded: {why}; move it first: "
            f"reshard(x, {target!r})"
        )
    seen = set()
    for index, block in placed_blocks(x.local, mesh):
        coordinate = tuple(index.values())
        offsets = spec.offset(coordinate)
        if (block.numel() or _writes_empty_tensor(spec, coordinate)) and offsets not in seen:
            seen.add(offsets)
            yield offsets, block


def _writes_empty_tensor(spec: TensorSpec, coordinate: tuple[int, ...]) -> bool:
    """Whether the rank at a coordinate writes a global tensor without elements."""
    return 0 in spec.shape and not any(coordinate)


def create_write_items(x: Sharded, name: str, _: Any) -> list[Any]:
    """The items that this process writes: one for each block."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(torch.empty(0, dtype=x.dtype, requires_grad=x.requires_grad))
    size, items, chunks = torch.Size(x.spec.shape), [], create_chunk_list(x)
    if len(chunks) > 1:
        _refuse_files_of_one_block(x)
    for chunk in chunks:
        data = TensorWriteData(chunk, properties, size)
        items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    return items


def _refuse_files_of_one_block(x: Sharded) -> None:
    """Raise `ArgumentError` if a writer for safetensors asks: its file has one block of each tensor."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # no argument tells the writer
        writer = frame.f_locals.get("storage_writer")
        if type(writer).__name__ == "HuggingFaceStorageWriter":
            raise ArgumentError(
                f"HuggingFaceStorageWriter got {x!r}, of which this process has several blocks; its file keeps one; "
                "save device_get(tree), or write with torch.distributed.checkpoint.FileSystemWriter"
            )
        frame = frame.f_back


def create_chunk_list(x: Sharded) -> list[Any]:
    """The chunks of the global tensor that this process has."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(torch.Size(offsets), block.shape) for offsets, block in chunks_of(x)]


def get_tensor_shard(x: Sharded, index: Any) -> Tensor:
    """The block that begins at an offset, to be read or written."""
    for offsets, block in chunks_of(x):
        if offsets == tuple(index.offset or ()):
            return block
    raise ArgumentError(
        f"torch.distributed.checkpoint asked for the block of {x!r} at {index}, which this process does not have"
    )


def install() -> None:
    """Give `Sharded` the methods that ``torch.distributed.checkpoint`` calls on tensors that save themselves."""
    methods = (
        ("__create_write_items__", create_write_items),
        ("__create_chunk_list__", create_chunk_list),
        ("__get_tensor_shard__", get_tensor_shard),
    )
    for name, method in methods:
        setattr(Sharded, name, method)
