"""`save_huggingface`: a folder of Hugging Face, written from `Sharded` parameters."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.body import check_outside
from fspmd.checkpoints.huggingface_files import Folder, NewFolder, agree, check_mesh, folder_path, shard_names
from fspmd.checkpoints.huggingface_names import FilePart, file_names, is_model, model_of, ties_of, whole
from fspmd.errors import ArgumentError, FspmdError, MeshError, ShapeError, TreeError
from fspmd.meshes.mesh import Mesh
from fspmd.messages import Failure, described, quoted, refuse
from fspmd.placement.broadcast import hear_all
from fspmd.placement.device_put import device_get
from fspmd.sharded import Sharded, is_plain

WHAT: Final = "save_huggingface"


def save_huggingface(
    folder: Folder, params: Mapping[str, Any], model: Any = None, *, max_shard_size: int = 5_000_000_000
) -> None:
    """Write a folder that ``from_pretrained`` opens: ``config.json``, and safetensors files with an index.

    The folder has each global tensor once, tied weights once, and names and parts as ``save_pretrained`` has them. It
    is written under another name, brought to the disk, and renamed at the end: a call that is cut off leaves no folder.

    The first rank of the mesh writes. Each rank holds one whole parameter for a moment. The first rank also holds the
    tensors of the file that it writes next, at most ``max_shard_size`` bytes.

    Args:
        folder: The name of a new folder, or of an empty one.
        params: A mapping from the names of the module to `Sharded` values on one mesh: its parameters, and the buffers
            that its ``state_dict`` has. Other buffers of the module are left out. Plain tensors are global values.
        model: The model of transformers, which may be on the meta device, or its configuration, if this names a class.
            Without it the folder has the safetensors files and their index alone, with the tensors as ``params`` names
            them, which `load_huggingface` and other readers of safetensors take.
        max_shard_size: The most bytes of a file. A larger tensor has a file of its own.

    Communication: an all-gather for each parameter that is cut, an all-reduce for a pending sum, and two gathers of a
    few bytes, so that all ranks raise the same error.

    Raises:
        TreeError, ShapeError, ArgumentError: on all ranks alike, before values move. Names that are missing, names
            that the model does not have, and wrong shapes are all in one error. The folder exists; a package is
            missing; the library could not read the files back. After values moved: a file cannot be written.
        MeshError: values are on several meshes.

    >>> import os, tempfile, transformers
    >>> from fspmd import P, device_put, make_mesh
    >>> config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=4, vocab_size=12)
    >>> model = transformers.GPT2LMHeadModel(config)
    >>> params = device_put(dict(model.named_parameters()), P("x"), mesh=make_mesh((4,), ("x",)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_huggingface(f"{folder}/gpt2", params, model)
    ...     sorted(os.listdir(f"{folder}/gpt2"))
    ['config.json', 'generation_config.json', 'model.safetensors']
    """
    check_outside(WHAT)
    mesh = _one_mesh(params)
    writer = mesh.transport == "simulation" or not any(mesh.coordinate() or ())
    state: list[tuple[_Written, NewFolder | None]] = []

    def begin() -> list[tuple[str, str]]:
        path = folder_path(folder, WHAT)
        if type(max_shard_size) is not int or max_shard_size < 1:
            raise ArgumentError(f"{WHAT} got {described(max_shard_size)} for max_shard_size; give it a number of bytes")
        known = model if model is None or is_model(model) else model_of(model, WHAT)
        written = _Written(params, known, max_shard_size)
        state.append((written, _guarded(lambda: NewFolder(path, WHAT), path) if writer else None))
        return [
            (name, repr(written.values[name])) for name in written.values if isinstance(written.values[name], Sharded)
        ]

    try:
        reports = hear_all(begin, mesh)
        if other := next((report for report in reports if report != reports[0]), None):
            pairs = itertools.zip_longest(reports[0], other)
            first, second = next((a, b) for a, b in pairs if a != b)
            raise TreeError(f"{WHAT}: ranks have other values: {first} and {second}; pass the same on all ranks")
        written, new = state[0]
        failure = written.write(new)
        agree(failure, [mesh])
    except BaseException:
        if state and state[0][1] is not None:
            state[0][1].drop()
        raise


def _guarded(write: Callable[[], Any], path: Path) -> Any:
    """What ``write`` gives; its error, if it fails, as one of ours."""
    try:
        return write()
    except FspmdError:
        raise
    except Exception as error:
        raise ArgumentError(f"{WHAT} could not write {path}: {error}; no folder was made") from error


def _failure(write: Callable[[], Any], path: Path) -> FspmdError | None:
    """The error of ``write``, if it fails."""
    try:
        _guarded(write, path)
    except FspmdError as error:
        return error
    return None


def _one_mesh(params: Any) -> Mesh:
    if not isinstance(params, Mapping):
        raise ArgumentError(f"{WHAT} got {described(params)} for params; give it a dict by name")
    meshes = list({x.spec.mesh: None for x in params.values() if isinstance(x, Sharded)})
    if len(meshes) != 1:
        has = f"on several meshes, {meshes}" if meshes else "no Sharded values"
        raise MeshError(f"{WHAT} got params {has}; give it Sharded values on one mesh")
    check_mesh(meshes[0], WHAT)
    return meshes[0]


class _Written:
    """The tensors of a folder: the parameters that they are parts of, and the file of each."""

    def __init__(self, params: Mapping[str, Any], model: Any, most: int) -> None:
        self.model = model
        self.values = _by_model(params, model)
        shapes = {name: tuple(x.shape) for name, x in self.values.items()}
        made = {k: whole(k, n) for k, n in shapes.items()} if model is None else file_names(shapes, model, WHAT)
        self.parts = {name: x.parts for name, x in made.items()}
        self.dtypes: dict[str, torch.dtype] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, value in self.values.items():
            for part in self.parts[name]:
                self.dtypes[part.name] = torch.promote_types(value.dtype, self.dtypes.get(part.name, value.dtype))
                self.shapes[part.name] = part.shape
        self.sizes = {name: prod(shape) * self.dtypes[name].itemsize for name, shape in self.shapes.items()}
        self.files = dict(zip(self.sizes, shard_names(list(self.sizes.values()), most), strict=True))

    def write(self, new: NewFolder | None) -> FspmdError | None:
        """Bring each parameter to all ranks; the rank with a folder writes it. Return its error, if it fails."""
        failure: FspmdError | None = None
        pending: dict[str, dict[str, Tensor]] = defaultdict(dict)
        left = Counter(self.files[part.name] for parts in self.parts.values() for part in parts)
        for name, value in self.values.items():
            with torch.no_grad():
                x = device_get(value.detach()).cpu()
            for part in self.parts[name] if new is not None and failure is None else ():
                file = self.files[part.name]
                self._put(x, part, pending[file])
                left[file] -= 1
                if new is not None and not left[file] and failure is None:
                    failure = _failure(functools.partial(new.write, file, pending.pop(file)), new.path / file)
        if new is not None and failure is None:
            failure = _failure(functools.partial(self._finish, new), new.folder)
        return failure

    def _put(self, x: Tensor, part: FilePart, tensors: dict[str, Tensor]) -> None:
        """Put a part of a whole parameter into the tensor of the file."""
        spans = zip(part.start, part.extent, part.dims, strict=True)
        x = x[tuple(start if dim is None else slice(start, start + n) for start, n, dim in spans)]
        order = [dim for dim in part.dims if dim is not None]
        if part.name not in tensors:
            tensors[part.name] = torch.empty(part.shape, dtype=self.dtypes[part.name], device="cpu")
        target = tensors[part.name][tuple(slice(low, high) for low, high in part.spans)]
        target.copy_(x.permute([order.index(i) for i in range(len(order))]))

    def _finish(self, new: NewFolder) -> None:
        elements = sum(map(prod, self.shapes.values()))
        new.write_index(self.files, {"total_parameters": elements, "total_size": sum(self.sizes.values())})
        if self.model is not None:
            self._write_config(new)
        new.finish()

    def _write_config(self, new: NewFolder) -> None:
        dtypes = [x.dtype for x in self.values.values() if x.dtype.is_floating_point]
        config = copy.deepcopy(self.model.config)
        config.architectures = [type(self.model).__name__]
        if dtypes:
            config.dtype = str(functools.reduce(torch.promote_types, dtypes)).removeprefix("torch.")
        config.save_pretrained(str(new.path))
        if self.model.can_generate():
            self.model.generation_config.save_pretrained(str(new.path))


def _by_model(params: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """The value of each name that is written, in the order of the model; tied names are one."""
    if model is None:
        return _as_named(params)
    tensors = model.state_dict(keep_vars=True)
    ties, ignored = ties_of(model), set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    groups: dict[str, list[str]] = {}
    for name in tensors:
        groups.setdefault(ties.get(name, name), []).append(name)
    values, failures = {}, []
    for name, names in groups.items():
        given = {id(params[other]): other for other in names if other in params}
        if not given and not ignored.intersection(names):
            failures.append(Failure(f"{name!r} is not in params", TreeError))
        elif len(given) > 1:
            failures.append(Failure(f"{quoted(given.values())} are tied, but differ", TreeError, "give one of them"))
        for other in given.values():
            x, shape = params[other], tuple(tensors[other].shape)
            if not isinstance(x, Sharded) and not is_plain(x):
                failures.append(Failure(f"{other!r} is {described(x)}, not a tensor", ArgumentError))
            elif tuple(x.shape) != shape:
                text = f"{other!r} has the shape {tuple(x.shape)}, but the model has {shape}"
                failures.append(Failure(text, ShapeError))
            values[name] = x
    computed = dict(model.named_buffers())
    for name in params:
        if name not in tensors and name not in computed:
            failures.append(Failure(f"the model has no {name!r}", TreeError))
    if failures:
        refuse(f"{WHAT}: params are not those of a {type(model).__name__}", failures)
    return values


def _as_named(params: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a folder without a model."""
    failures = [
        Failure(f"{name!r} is {described(x)}, not a tensor with a name", ArgumentError)
        for name, x in params.items()
        if type(name) is not str or not (isinstance(x, Sharded) or is_plain(x))
    ]
    if failures:
        refuse(f"{WHAT}: params are not tensors by name", failures)
    return dict(params)
