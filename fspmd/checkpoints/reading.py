"""Reads boxes of tensors from the files of a step: the pieces that hold them, and their checksums."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any, Final
from zlib import crc32

import torch
from torch import Tensor

from fspmd.checkpoints.boxes import Cuboid, parts, pieces_of
from fspmd.checkpoints.files import PIECE, told
from fspmd.checkpoints.index import SavedBlock, SavedLeaf
from fspmd.checkpoints.leaves import decoded, shown
from fspmd.errors import ArgumentError, CheckpointError
from fspmd.messages import described

_AT_ONCE: Final = 1 << 26  # bytes that are read together, beside the result


class Reader:
    """Reads blocks of a step, each file opened once."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._descriptors: dict[str, int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def plain(self, name: str, saved: SavedLeaf) -> Any:
        """Return a plain value."""
        (block,) = saved.blocks
        try:
            return decoded(self._whole(name, block))
        except CheckpointError:
            raise
        except Exception as error:  # torch raises any
            raise CheckpointError(f"{self._path(block)} holds no plain value for {name!r}: {error}") from error

    def tensor(self, name: str, saved: SavedLeaf, box: Cuboid) -> Tensor:
        """Return a box of a tensor."""
        assert saved.dtype is not None
        out = torch.empty(box.sizes, dtype=saved.dtype, device="cpu")
        for block in saved.blocks:
            shared = block.box.overlap(box) if box.numel else None
            if shared is None:
                continue
            if block.elements is None:
                out[shared.within(box)] = self._item(name, saved, block)[shared.within(block.box)]
                continue
            for part in parts(shared, max(1, _AT_ONCE // saved.dtype.itemsize)):
                self._part(name, saved.dtype, block, part, out[part.within(box)])
        return out

    def _part(self, name: str, dtype: torch.dtype, block: SavedBlock, part: Cuboid, out: Tensor) -> None:
        """Read a part of a block into ``out``."""
        assert block.elements is not None
        strides, stride = [0] * len(block.box.sizes), 1
        for dim in reversed(range(len(strides))):
            strides[dim], stride = stride, stride * block.box.sizes[dim]
        spans = part.within(block.box)
        first = sum(span.start * step for span, step in zip(spans, strides, strict=True)) * dtype.itemsize
        runs = pieces_of(part, block.box, dtype.itemsize, block.elements, PIECE)
        begin, end = runs[0][0] * PIECE, min((runs[-1][0] + runs[-1][1]) * PIECE, block.length)
        memory = bytearray(end - begin)
        data, view = torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory)
        for piece, number in runs:
            at, stop = piece * PIECE - begin, min((piece + number) * PIECE, block.length) - begin
            self._pieces(name, block, piece, view[at:stop])
        skipped = block.elements + first - begin
        usable = (len(data) - skipped) // dtype.itemsize * dtype.itemsize
        elements = (
            data[skipped : skipped + usable].clone() if skipped % dtype.itemsize else data[skipped : skipped + usable]
        )
        out.copy_(elements.view(dtype).as_strided(part.sizes, strides, elements.storage_offset() // dtype.itemsize))

    def _item(self, name: str, saved: SavedLeaf, block: SavedBlock) -> Tensor:
        """Return a block that torch wrote."""
        try:
            x = decoded(self._whole(name, block))
        except CheckpointError:
            raise
        except Exception as error:  # torch raises any
            raise CheckpointError(f"{self._path(block)} is damaged at {name!r}: {error}") from error
        if not isinstance(x, Tensor) or x.dtype is not saved.dtype or tuple(x.shape) != block.box.sizes:
            raise CheckpointError(
                f"{self._path(block)} holds for {name!r} {described(x)}, but its index says "
                f"{shown(saved.dtype or torch.uint8, block.box.sizes)}"
            )
        return x

    def _whole(self, name: str, block: SavedBlock) -> bytes:
        """Return the bytes of an item."""
        data = bytearray(block.length)
        self._pieces(name, block, 0, memoryview(data))
        return bytes(data)

    def _pieces(self, name: str, block: SavedBlock, piece: int, out: memoryview) -> None:
        """Read the pieces of an item from ``piece`` on into ``out``, and compare their checksums."""
        path, start, filled = self._path(block), block.start + piece * PIECE, 0
        with told("read", path):
            descriptor = self._open(block.file, path)
            while filled < len(out) and (n := os.preadv(descriptor, [out[filled:]], start + filled)):
                filled += n
        if filled < len(out):
            raise CheckpointError(f"{path} is truncated: {name!r} lies beyond its end")
        checksums = (block.checksums or [])[piece:]  # of torch's files there are none
        for expected, at in zip(checksums, range(0, len(out), PIECE), strict=False):
            if crc32(out[at : at + PIECE]) != expected:
                raise CheckpointError(f"{path} is damaged: {name!r} has another checksum than it was saved with")

    def _open(self, file: str, path: str) -> int:
        if file not in self._descriptors:
            if os.path.basename(file) != file:
                raise ArgumentError(f"{path} lies outside of the step's folder")
            self._descriptors[file] = os.open(path, os.O_RDONLY)
            self._stack.callback(os.close, self._descriptors[file])
        return self._descriptors[file]

    def _path(self, block: SavedBlock) -> str:
        return os.path.join(self.folder, block.file)
