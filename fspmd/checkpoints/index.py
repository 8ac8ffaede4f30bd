"""The index of a step: its leaves, and the place and checksums of each block.

A step has two of them. ``.metadata`` is that of torch.distributed.checkpoint, for its readers. ``fspmd.json`` says the
same, the kinds of plain values, and checksums. A folder that only torch wrote has the first alone.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from zlib import crc32

import torch

from fspmd.checkpoints.boxes import Cuboid, Path, whole, wrong_cover
from fspmd.checkpoints.files import read_file, told
from fspmd.errors import CheckpointError
from fspmd.torch_internals import storage_info_class

INDEX: Final = "fspmd.json"
METADATA: Final = ".metadata"
_VERSION: Final = 1


@dataclass(slots=True)
class SavedBlock:
    """A block in a file: an item of torch.save. A plain value is one block."""

    box: Cuboid
    file: str
    start: int  # the bytes of the item in the file
    length: int
    elements: int | None = None  # where its elements begin in the item; None: torch.load has to find them
    checksums: list[int] | None = None  # of the pieces of the item; None: torch wrote it, and there are none


@dataclass(slots=True)
class SavedLeaf:
    """A leaf: a tensor with a dtype and a shape, or a plain value with a kind."""

    path: Path
    dtype: torch.dtype | None
    shape: tuple[int, ...] = ()
    kind: str | None = None  # None for a plain value of which torch tells no kind
    blocks: list[SavedBlock] = field(default_factory=list)

    @property
    def box(self) -> Cuboid:
        """The box of the whole."""
        return whole(self.shape)


Leaves = dict[str, SavedLeaf]


# --- fspmd.json -------------------------------------------------------------------------------------------------------


def index_text(leaves: Leaves, step: int) -> bytes:
    """Return the bytes of ``fspmd.json``: a line, and the checksum of the line."""
    rows = {
        name: [list(x.path), x.dtype and str(x.dtype), x.shape, x.kind, rows_of(x.blocks)] for name, x in leaves.items()
    }
    body = json.dumps({"version": _VERSION, "step": step, "leaves": rows}, separators=(",", ":")).encode()
    return body + f"\n{crc32(body):08x}\n".encode()


def rows_of(blocks: Iterable[SavedBlock]) -> list[Any]:
    """Return blocks as lists, for JSON."""
    return [[x.box.offsets, x.box.sizes, x.file, x.start, x.length, x.elements, x.checksums] for x in blocks]


def blocks_of_rows(rows: Iterable[Any]) -> list[SavedBlock]:
    """Return the blocks of lists."""
    return [SavedBlock(Cuboid(tuple(offsets), tuple(sizes)), *rest) for offsets, sizes, *rest in rows]


def read_index(folder: str) -> Leaves:
    """Return the leaves of a step, from ``fspmd.json``, or from ``.metadata`` where torch alone wrote.

    Raises:
        CheckpointError: a file cannot be read, or is damaged.
    """
    path = os.path.join(folder, INDEX)
    leaves = _own_index(path) if os.path.exists(path) else _index_of_torch(os.path.join(folder, METADATA))
    for name, leaf in leaves.items():
        if leaf.dtype is not None and (wrong := wrong_cover(leaf.shape, (block.box for block in leaf.blocks))):
            raise CheckpointError(f"{folder} does not hold all of {name!r}, {leaf.dtype} of {leaf.shape}: {wrong}")
    return leaves


def _own_index(path: str) -> Leaves:
    data = read_file(path)
    body, _, rest = data.partition(b"\n")
    if rest != f"{crc32(body):08x}\n".encode():
        raise CheckpointError(f"{path} is damaged: its checksum is not that of its text")
    index = json.loads(body)
    if index["version"] != _VERSION:
        raise CheckpointError(f"{path} has the version {index['version']}; this fspmd reads version {_VERSION}")
    return {
        name: SavedLeaf(tuple(keys), dtype and _dtype(dtype), tuple(shape), kind, blocks_of_rows(rows))
        for name, (keys, dtype, shape, kind, rows) in index["leaves"].items()
    }


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"this torch has no dtype {name}")
    return dtype


# --- .metadata --------------------------------------------------------------------------------------------------------


def metadata_of_torch(leaves: Leaves, folder: str) -> bytes:
    """Return the bytes of ``.metadata``."""
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    described: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for name, leaf in leaves.items():
        if leaf.dtype is None:
            described[name] = BytesStorageMetadata()
        else:
            chunks = [ChunkStorageMetadata(torch.Size(x.box.offsets), torch.Size(x.box.sizes)) for x in leaf.blocks]
            described[name] = TensorStorageMetadata(TensorProperties(leaf.dtype), torch.Size(leaf.shape), chunks)
        for block in leaf.blocks:
            index = MetadataIndex(name) if leaf.dtype is None else MetadataIndex(name, block.box.offsets)
            stored[index] = storage_info_class()(block.file, block.start, block.length)
    paths = {name: leaf.path for name, leaf in leaves.items()}
    return pickle.dumps(Metadata(described, paths, stored, StorageMeta(folder), "1.0.0"))


class _Unpickler(pickle.Unpickler):
    """Reads ``.metadata``, and makes no other objects than it has: a crafted file runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        classes = {"torch": ("Size",), "collections": ("OrderedDict", "defaultdict"), "builtins": ("set",)}
        known = (
            module == "torch.distributed.checkpoint.metadata"
            or (module == "torch.distributed.checkpoint.filesystem" and name == storage_info_class().__name__)
            or (module == "torch.serialization" and name.endswith("get_layout"))
            or (module in ("pathlib", "pathlib._local") and name.endswith("Path"))
            or name in classes.get(module, ())
        )
        is_plain = (known or module == "torch") and "." not in name  # "os.system" reaches into what a module imports
        kind = super().find_class(module, name) if is_plain else None
        if not isinstance(kind, torch.dtype) and not (known and getattr(kind, "__module__", None) == module):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint has")
        return kind


def _index_of_torch(path: str) -> Leaves:
    data = read_file(path)
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        return _leaves_of(metadata)
    except Exception as error:  # of damaged bytes, pickle raises any
        raise CheckpointError(f"{path} is damaged, or of another version of torch: {error}") from error


def _leaves_of(metadata: Any) -> Leaves:
    leaves: Leaves = {}
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    for name, of in metadata.state_dict_metadata.items():
        path = tuple(paths.get(name, (name,)))
        is_tensor = hasattr(of, "properties")
        leaves[name] = SavedLeaf(path, of.properties.dtype, tuple(of.size)) if is_tensor else SavedLeaf(path, None)
    for index, of in metadata.storage_data.items():
        if getattr(of, "transform_descriptors", None):
            raise CheckpointError(f"its blocks are stored with {of.transform_descriptors}; fspmd reads plain blocks")
        leaf = leaves[index.fqn]
        sizes: Sequence[int] = ()
        if leaf.dtype is not None:
            chunks = metadata.state_dict_metadata[index.fqn].chunks
            hint = index.index
            if hint is not None and hint < len(chunks) and chunks[hint].offsets == index.offset:
                sizes = chunks[hint].sizes
            else:
                sizes = next(chunk.sizes for chunk in chunks if chunk.offsets == index.offset)
        box = Cuboid(tuple(index.offset or ()), tuple(sizes))
        leaf.blocks.append(SavedBlock(box, of.relative_path, of.offset, of.length))
    return leaves


def missing_bytes(folder: str, leaves: Leaves) -> str:
    """Return the first file of a step that is gone or too short, or ""."""
    ends: dict[str, int] = {}
    for leaf in leaves.values():
        for block in leaf.blocks:
            ends[block.file] = max(ends.get(block.file, 0), block.start + block.length)
    for file, end in sorted(ends.items()):
        path = os.path.join(folder, file)
        if not os.path.exists(path):
            return f"{path} is missing"
        with told("look at", path):
            if (size := os.path.getsize(path)) < end:
                return f"{path} is truncated: it has {size} of {end} bytes"
    return ""
