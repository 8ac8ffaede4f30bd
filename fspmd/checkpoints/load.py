"""`load`: a pytree from a step of a checkpoint, in any layout. It reads the pieces that hold a block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Final
from zlib import crc32

import torch
from torch import Tensor

from fspmd.checkpoints import folders
from fspmd.checkpoints.boxes import (
    Cuboid,
    NamedLeaf,
    boxed,
    decoded,
    is_tensor,
    kind_of,
    named_leaves,
    parts,
    pieces_of,
    whole,
)
from fspmd.checkpoints.crew import crew_of
from fspmd.checkpoints.files import PIECE, PathLike, checked_path, told
from fspmd.checkpoints.index import Leaves, SavedBlock, SavedLeaf, read_index
from fspmd.checkpoints.save import finish_last
from fspmd.errors import ArgumentError, CheckpointError
from fspmd.meshes.mesh import Mesh
from fspmd.messages import Failure, counted, described, refuse
from fspmd.redistribution.redistribute import redistribute
from fspmd.sharded import Sharded
from fspmd.spec import TensorSpec, describe
from fspmd.transport.frame import frame_over
from fspmd.transport.local_tensor import local_tensor

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
        return self._decoded(name, block, "holds no plain value for")

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
        x = self._decoded(name, block, "is damaged at")
        if not isinstance(x, Tensor) or x.dtype is not saved.dtype or tuple(x.shape) != block.box.sizes:
            raise CheckpointError(
                f"{self._path(block)} holds for {name!r} {described(x)}, but its index says "
                f"{describe(saved.dtype or torch.uint8, block.box.sizes)}"
            )
        return x

    def _decoded(self, name: str, block: SavedBlock, words: str) -> Any:
        """Return the value of an item. ``words`` say what is wrong with bytes that are none."""
        data = bytearray(block.length)
        self._pieces(name, block, 0, memoryview(data))
        try:
            return decoded(bytes(data))
        except Exception as error:  # torch raises any
            raise CheckpointError(f"{self._path(block)} {words} {name!r}: {error}") from error

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


def load(
    path: PathLike,
    like: Any,
    *,
    step: int | None = None,
    strict: bool = True,
    mesh: Mesh | None = None,
) -> Any:
    """Load a pytree from the checkpoint in a folder, into the layouts of ``like``.

    The layout in which it was saved does not matter: mesh, number of processes and transport may be others. Each
    process reads the pieces (1 MiB) that its own blocks overlap, and compares their checksums.

    Args:
        path: The folder of all steps, or a folder that torch.distributed.checkpoint wrote.
        like: The tree to be loaded. A `Sharded` or a `TensorSpec` gives a `Sharded` of its layout, a tensor a tensor on
            its device, a generator a new generator. Numbers, strings and None are replaced. Its values are not used,
            and it is not written into. ``requires_grad`` is that of ``like``.
        step: By default the step that ``path/latest`` names.
        strict: Refuse leaves that the checkpoint lacks, or has beside those of ``like``. Without it the former keep
            their values, and the latter are not read.
        mesh: Its processes load together. By default those of `set_mesh`, or else all. A simulation is one process.

    Communication: three all-gathers of small messages, by which all ranks succeed or fail alike. Layouts with pending
    sums or flat dims are made of others by `reshard`.

    Raises:
        CheckpointError: on all ranks alike, there is no such step; or leaves are missing, unexpected, or of another
            shape, dtype or kind: the error names all of them, and nothing was read. Or a file is damaged: the error
            names the file, the leaf and the last complete step before it.
        TreeError, ArgumentError: ``like`` has leaves that cannot be loaded.

    >>> import tempfile
    >>> from fspmd import P, device_get, device_put, make_mesh, save
    >>> path = tempfile.mkdtemp()
    >>> w = device_put(torch.arange(6.0), P("x"), mesh=make_mesh((4,), ("x",)))
    >>> _ = save(path, {"w": w, "rate": 0.1})
    >>> grid = make_mesh((2, 2), ("a", "b"))
    >>> loaded = load(path, {"w": TensorSpec(grid, P(("b", "a")), (6,), torch.float32), "rate": 0.0})
    >>> loaded, device_get(loaded["w"])
    ({'w': Sharded f32[6@(b,a)] on mesh(a=2, b=2), 'rate': 0.1}, tensor([0., 1., 2., 3., 4., 5.]))
    """
    crew = crew_of(mesh, "load")

    def found_folder() -> str:
        finish_last()
        return folders.find(checked_path(path, "load"), step) if crew.place == 0 else ""

    folder = crew.hear(found_folder)[0]

    def compared() -> tuple[list[NamedLeaf], Any, Leaves]:
        wanted, treedef = named_leaves(like, "load", "like", (TensorSpec,))
        try:
            saved = read_index(folder)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{folders.instead_of(folder)}") from error
        _compare(wanted, saved, folder, strict)
        return wanted, treedef, saved

    compared_with: list[Any] = []
    crew.hear(lambda: compared_with.extend(compared()))
    wanted, treedef, saved = compared_with
    blocks: list[Any] = []

    def read() -> None:
        with Reader(folder) as reader:
            for leaf in wanted:
                blocks.append(_read(reader, leaf, saved[leaf.name]) if leaf.name in saved else leaf.value)

    try:
        crew.hear(read)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{folders.instead_of(folder)}") from error
    values: list[Any] = [None] * len(wanted)
    for leaf, block in zip(wanted, blocks, strict=True):
        values[leaf.place] = _finished(leaf, block) if leaf.name in saved else leaf.value
    return treedef.unflatten(values)


# --- like and the checkpoint ------------------------------------------------------------------------------------------


def _compare(wanted: list[NamedLeaf], saved: Leaves, folder: str, strict: bool) -> None:
    """Raise one error for all leaves that do not fit."""
    failures = []
    for leaf in wanted:
        there = saved.get(leaf.name)
        if there is None:
            if strict or isinstance(leaf.value, TensorSpec):
                failures.append(f"{leaf.label} is missing: no leaf {leaf.name!r} was saved")
        elif difference := _difference(leaf.value, there):
            failures.append(f"{leaf.label} {difference}")
        mesh = leaf.value.mesh if isinstance(leaf.value, TensorSpec) else None
        if mesh is not None and mesh.transport == "abstract":
            failures.append(f"{leaf.label} is on {mesh!r}, whose ranks do not exist")
    if strict:
        names = {leaf.name for leaf in wanted}
        failures += [f"{name!r} was saved, but like has no such leaf" for name in sorted(saved) if name not in names]
    if failures:
        advice = "give like the shapes, dtypes and names that were saved; strict=False takes the leaves in both"
        rows = [Failure(text, CheckpointError, advice) for text in failures]
        refuse(f"load: like does not fit {folder}, in {counted(len(rows), 'leaf').replace('leafs', 'leaves')}:", rows)


def _difference(value: Any, there: SavedLeaf) -> str:
    if is_tensor(value):
        x = value.get_state() if isinstance(value, torch.Generator) else value
        dtype, shape = x.dtype, x.shape
        if there.dtype is None:
            return f"is {describe(dtype, shape)}, but a plain value was saved: {there.kind or 'of any kind'}"
        if (dtype, tuple(shape)) != (there.dtype, there.shape):
            return f"is {describe(dtype, shape)}, but {describe(there.dtype, there.shape)} was saved"
        return ""
    if there.dtype is not None:
        return f"is {described(value)}, but the tensor {describe(there.dtype, there.shape)} was saved"
    if there.kind is not None and there.kind != kind_of(value):
        return f"is {described(value)}, but a value of the kind {there.kind!r} was saved"
    return ""


# --- reading ----------------------------------------------------------------------------------------------------------


def _read(reader: Reader, leaf: NamedLeaf, saved: SavedLeaf) -> Any:
    """Return what this process holds of a leaf: a value, a generator, or a tensor for each of its boxes."""
    value = leaf.value
    if not is_tensor(value):
        value_saved = reader.plain(leaf.name, saved)
        if kind_of(value_saved) != kind_of(value):
            raise CheckpointError(f"{leaf.label} is {described(value)}, but {described(value_saved)} was saved")
        return type(value)(value_saved) if type(value) in (list, tuple) else value_saved
    if isinstance(value, (Sharded, TensorSpec)):
        spec = value.spec if isinstance(value, Sharded) else value
        return [reader.tensor(leaf.name, saved, box) for box in _own_boxes(boxed(spec))]
    value_saved = reader.tensor(leaf.name, saved, whole(saved.shape))
    if not isinstance(value, torch.Generator):
        return value_saved
    generator = torch.Generator(value.device)
    generator.set_state(value_saved)
    return generator


def _own_boxes(spec: TensorSpec) -> Iterator[Cuboid]:
    """Yield the boxes that this process holds. In a simulation, one for each rank along the axes that cut."""
    mesh = spec.mesh
    if mesh.transport == "process_group":
        coordinate = mesh.coordinate()
        if coordinate is None:
            yield Cuboid((0,) * spec.ndim, (0,) * spec.ndim)
        else:
            yield Cuboid(spec.offset(coordinate), spec.local_shape(coordinate))
        return
    for coordinate in frame_over(mesh, spec.partition.axes).mesh_coordinates():
        yield Cuboid(spec.offset(coordinate), spec.local_shape(coordinate))


def _finished(leaf: NamedLeaf, loaded: Any) -> Any:
    """Return a leaf of the result, on its device and mesh."""
    value = leaf.value
    if isinstance(value, (Sharded, TensorSpec)):
        spec = value.spec if isinstance(value, Sharded) else value
        lies, mesh = boxed(spec), spec.mesh
        blocks = [block.to(mesh.device) for block in loaded]
        simulated = mesh.transport == "simulation"
        local = local_tensor(blocks, frame_over(mesh, lies.partition.axes)) if simulated else blocks[0]
        x: Any = Sharded(redistribute(local, lies, spec), spec)
        return x.requires_grad_() if isinstance(value, Sharded) and value.requires_grad else x
    if not isinstance(value, Tensor):
        return loaded
    x = loaded.to("cpu" if value.is_meta else value.device)
    return (
        torch.nn.Parameter(x, value.requires_grad)
        if isinstance(value, torch.nn.Parameter)
        else x.requires_grad_(value.requires_grad)
    )
