"""Folders of safetensors files: the tensors that they have, slices of them, and new folders that appear whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.body import usable_mesh
from fspmd.checkpoints.files import sync
from fspmd.checkpoints.huggingface_names import package
from fspmd.errors import ArgumentError, MeshError, RecordError
from fspmd.meshes.mesh import Mesh
from fspmd.messages import described
from fspmd.placement.broadcast import hear_all
from fspmd.tracing import is_recording

Folder = str | os.PathLike[str]
_ONE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
CONFIG: Final = "config.json"
_DTYPES: Final = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of an open file."""

    file: Any
    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: torch has none

    def read(self, index: tuple[slice, ...]) -> Tensor:
        """A slice of it; nothing else is read."""
        if not self.shape:
            return self.file.get_tensor(self.name)  # type: ignore[no-any-return]
        try:
            return self.file.get_slice(self.name)[index]  # type: ignore[no-any-return]
        except Exception as error:
            raise ArgumentError(f"{self.path} is damaged: {self.name!r} cannot be read: {error}") from error


@contextmanager
def opened(folder: Path, what: str) -> Iterator[dict[str, StoredTensor]]:
    """The tensors of a folder by name. Only the heads of its files are read.

    Raises:
        ArgumentError: a file is missing or damaged. The error names all of them.
    """
    safe_open = package("safetensors", what).safe_open
    listed = _listed(folder, what)
    failures, stored = [], dict[str, StoredTensor]()
    with ExitStack() as stack:
        for path, names in listed.items():
            try:
                file = stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
                has = set(file.keys())
            except Exception as error:
                failures.append(f"{path} is missing" if not path.exists() else f"{path} is damaged: {error}")
                continue
            if lost := sorted(set(names or ()) - has):
                failures.append(f"{path} lacks {lost[0]!r}, which the index names{_more(lost)}")
            for name in has:
                if name in stored:
                    failures.append(f"{path} and {stored[name].path} both have {name!r}")
                head = file.get_slice(name)
                stored[name] = StoredTensor(file, name, path, tuple(head.get_shape()), _DTYPES.get(head.get_dtype()))
        if failures:
            raise ArgumentError(f"{what}: {'; '.join(failures)}; copy the files once more")
        yield stored


def _listed(folder: Path, what: str) -> dict[Path, list[str] | None]:
    """The files of a folder, and the tensors that its index names for each (None: there is no index)."""
    index = folder / _INDEX
    if not index.exists():
        if (folder / _ONE).exists():
            return {folder / _ONE: None}
        raise ArgumentError(
            f"{what}: {folder} has neither {_ONE} nor {_INDEX}; give it a folder of save_pretrained, or of "
            "huggingface_hub.snapshot_download"
        )
    try:
        weights = json.loads(index.read_text())["weight_map"]
        files = {str(file): [name for name in weights if weights[name] == file] for file in weights.values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ArgumentError(f"{what}: {index} is damaged: {error!r}; copy the file once more") from error
    for file in files:
        if Path(file).name != file:
            raise ArgumentError(f"{what}: {index} names {file!r}, which is not a file of the folder")
    return {folder / file: names for file, names in sorted(files.items())}


def _more(names: Sequence[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


# --- new folders -----------------------------------------------------------------------------------------------------


def shard_names(sizes: Sequence[int], most: int) -> list[str]:
    """The file of each tensor of such sizes in bytes. A file has at most ``most``, or one tensor.

    >>> shard_names([4, 4, 4], 8)
    ['model-00001-of-00002.safetensors', 'model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    shards, filled = [0] * len(sizes), 0
    for i, size in enumerate(sizes):
        new = i > 0 and filled + size > most
        shards[i] = (shards[i - 1] if i else 0) + new
        filled = size if new else filled + size
    n = shards[-1] + 1 if shards else 1
    return [_ONE] * len(sizes) if n == 1 else [f"model-{i + 1:05}-of-{n:05}.safetensors" for i in shards]


class NewFolder:
    """A folder that is written under another name, and then renamed: it appears whole, or not at all."""

    def __init__(self, folder: Path, what: str) -> None:
        folder = Path(os.path.abspath(folder))
        self.folder, self.what = folder, what
        self.path = folder.with_name(f".{folder.name}.partial")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ArgumentError(f"{what}: {folder} exists and is not empty; give the name of a new folder")
        self._save = package("safetensors.torch", what).save_file
        if self.path.exists():  # of a call that was cut off
            shutil.rmtree(self.path)
        self.path.mkdir(parents=True)

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a file of tensors."""
        self._save(dict(tensors), str(self.path / name), metadata={"format": "pt"})

    def write_index(self, files: Mapping[str, str], metadata: Mapping[str, int]) -> None:
        """Write which file has each tensor, unless there is one file."""
        if {*files.values()} - {_ONE}:
            text = json.dumps({"metadata": dict(metadata), "weight_map": dict(sorted(files.items()))}, indent=2)
            (self.path / _INDEX).write_text(text + "\n")

    def finish(self) -> None:
        """Give the folder its name, once all of it is on the disk."""
        for path in (*self.path.iterdir(), self.path):
            sync(path)
        os.rename(self.path, self.folder)
        try:
            sync(self.folder.parent)
        except OSError as error:
            raise ArgumentError(
                f"{self.what}: {self.folder} is written, but may be lost if the power fails: {error}; call os.sync()"
            ) from error

    def drop(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.path, ignore_errors=True)


# --- ranks -----------------------------------------------------------------------------------------------------------


def folder_path(folder: Any, what: str) -> Path:
    """The path of a folder."""
    if not isinstance(folder, (str, os.PathLike)):
        raise ArgumentError(f"{what} got {described(folder)} for folder; give it the path of a folder")
    return Path(folder)


def check_mesh(mesh: Mesh, what: str) -> None:
    """Raise `MeshError` if this process has no values on a mesh, and `RecordError` within `jit`."""
    if is_recording():
        raise RecordError(f"{what} was called within jit, which records no files; call it before the jitted function")
    usable_mesh(mesh, what)
    if mesh.transport == "abstract":
        raise MeshError(f"{what}: {mesh!r} has no values; make a mesh of processes, or a simulation")


def agree(failure: Exception | None, meshes: Iterable[Mesh]) -> None:
    """Raise the failure of a rank on all ranks of the meshes."""

    def report() -> None:
        if failure is not None:
            raise failure

    for mesh in dict.fromkeys(meshes):
        try:
            hear_all(report, mesh)
        except Exception as heard:
            failure = failure or heard
    report()
