"""`load_huggingface`: the parameters of a folder of Hugging Face, each rank its own blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from fspmd.body import check_outside
from fspmd.checkpoints.boxes import Cuboid, boxed
from fspmd.checkpoints.huggingface_files import CONFIG, Folder, StoredTensor, agree, check_mesh, folder_path, opened
from fspmd.checkpoints.huggingface_names import (
    FileParameter,
    FilePart,
    is_ignored,
    is_model,
    model_of,
    package,
    parameters_of,
    ties_of,
)
from fspmd.errors import ArgumentError, FspmdError, ShapeError, TreeError
from fspmd.messages import Failure, described, refuse
from fspmd.redistribution.redistribute import redistribute
from fspmd.sharded import Sharded
from fspmd.spec import TensorSpec
from fspmd.transport.frame import frame_over
from fspmd.transport.local_tensor import blocks_of, local_tensor

WHAT: Final = "load_huggingface"


def load_huggingface(
    folder: Folder, like: Mapping[str, Any] | nn.Module, *, model: Any = None, strict: bool = True
) -> dict[str, Sharded]:
    """The parameters that a folder of ``save_pretrained`` has, each rank its own blocks.

    A rank reads the slices of the safetensors files that its blocks overlap, and the heads of the files. Names are
    those of the module: prefixes, renamed weights, fused experts and tied weights are as ``from_pretrained`` has them.

    Args:
        folder: The folder, with ``model.safetensors``, or with an index of several files. If it has a ``config.json``,
            the package transformers must be installed.
        like: A mapping from names to `TensorSpec` or `Sharded` values, of which only the layout is used. Or a module
            whose parameters and persistent buffers are `Sharded`. Values of another dtype than that of the file are
            cast to it.
        model: The model of transformers, by default ``like`` if it is one, else of the class that ``config.json``
            names. It decides the names in the files. It may be on the meta device.
        strict: Whether tensors of the files that ``like`` does not name are an error.

    Returns:
        A `Sharded` value for each name of ``like``, in its order. It requires grad where that of ``like`` does.

    Communication: one gather of a few bytes for each mesh, so that all ranks raise the same error. Layouts with flat
    dims are made of others by `reshard`.

    Raises:
        TreeError, ShapeError, ArgumentError: on all ranks alike. Names that are missing, names that ``like`` does not
            have, wrong shapes and wrong dtypes are all in one error, before values are read. A file is missing or
            damaged; two tied weights differ in the files; a package is missing.

    >>> import tempfile
    >>> from fspmd import P, make_mesh
    >>> from safetensors.torch import save_file
    >>> spec = TensorSpec(make_mesh((4,), ("x",)), P("x"), (6, 2), torch.bfloat16)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"w": torch.ones(6, 2)}, f"{folder}/model.safetensors")
    ...     load_huggingface(folder, {"w": spec})
    {'w': Sharded bf16[6@x, 2] on mesh(x=4)}
    """
    check_outside(WHAT)
    specs, trained = _layouts(like)
    if model is None and is_model(like):
        model = like

    result: dict[str, Sharded] = {}
    failure: Exception | None = None
    try:
        result = _load(folder_path(folder, WHAT), specs, model, strict)
    except Exception as error:  # the other ranks wait to hear of it
        failure = error
    agree(failure, [spec.mesh for spec in specs.values()])
    for name in trained:
        result[name].requires_grad_()
    return result


def _layouts(like: Any) -> tuple[dict[str, TensorSpec], list[str]]:
    """The layout of each name, and the names of values that require grad."""
    if isinstance(like, nn.Module):
        first: dict[int, tuple[str, Any]] = {}
        for name, x in like.state_dict(keep_vars=True).items():  # without the buffers that no file has
            first.setdefault(id(x), (name, x))  # tied names are one value
        like = dict(first.values())
    if not isinstance(like, Mapping):
        raise ArgumentError(
            f"{WHAT} got {described(like)} for like; give it a dict from names to TensorSpec or Sharded values, or a "
            "module that has such parameters"
        )
    failures = [
        Failure(f"{name!r} is {described(x)}", ArgumentError)
        for name, x in like.items()
        if not isinstance(x, (TensorSpec, Sharded))
    ]
    if failures:
        refuse(f"{WHAT} needs a TensorSpec or a Sharded for each name of like", failures)
    specs = {name: x.spec if isinstance(x, Sharded) else x for name, x in like.items()}
    for mesh in {spec.mesh: None for spec in specs.values()}:
        check_mesh(mesh, WHAT)
    return specs, [name for name, x in like.items() if isinstance(x, Sharded) and x.requires_grad]


def _load(folder: Path, specs: Mapping[str, TensorSpec], model: Any, strict: bool) -> dict[str, Sharded]:
    if model is None and (folder / CONFIG).exists():
        model = model_of(_config(folder), WHAT)
    with opened(folder, WHAT) as stored:
        shapes = {name: x.shape for name, x in stored.items()}
        parameters = parameters_of(shapes, model, {name: spec.shape for name, spec in specs.items()}, WHAT)
        chosen, twins = _chosen(parameters, specs, stored, model, strict, folder)
        made: dict[tuple[FileParameter, TensorSpec], Sharded] = {}
        for name, spec in specs.items():  # a tied value is read once per layout
            key = chosen[name], spec
            if key not in made:
                made[key] = _sharded(*key, stored)
        result = {name: made[chosen[name], spec] for name, spec in specs.items()}
        for name, twin, other in twins:
            _check_equal(result[name], name, _sharded(other, specs[name], stored), twin)
    return result


def _config(folder: Path) -> Any:
    try:
        return package("transformers", WHAT).AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except FspmdError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"{WHAT}: transformers cannot read {folder / CONFIG}: {error}; make the model on the meta device, and "
            "pass it as model="
        ) from error


def _chosen(
    parameters: Mapping[str, FileParameter],
    specs: Mapping[str, TensorSpec],
    stored: Mapping[str, StoredTensor],
    model: Any,
    strict: bool,
    folder: Path,
) -> tuple[dict[str, FileParameter], list[tuple[str, str, FileParameter]]]:
    """The source of each name, and tied names that the files have as well: (name, tied name, its source)."""
    sources = ties_of(model)
    chosen: dict[str, FileParameter] = {}
    twins: list[tuple[str, str, FileParameter]] = []
    failures = []
    groups: dict[str, list[str]] = {}
    for name in parameters:
        groups.setdefault(sources.get(name, name), []).append(name)
    for name, spec in specs.items():
        tied = groups.get(sources.get(name, name), [])
        source = name if name in parameters else next(iter(tied), None)
        if source is None:
            failures.append(Failure(f"{name!r} is not in the files", TreeError, _MISSING))
            continue
        x = chosen[name] = parameters[source]
        twins += [(name, other, parameters[other]) for other in tied if other not in specs and other != source]
        wanted = spec.text
        dtypes = [stored[part.name].dtype for part in x.parts]
        unfit = [has for has in dtypes if has is None or not torch.can_cast(has, spec.dtype)]
        if x.shape != spec.shape:
            failures.append(
                Failure(f"{name!r} has the shape {x.shape} in the files, but like has {wanted}", ShapeError)
            )
        elif unfit:
            kind = unfit[0] or "a dtype that torch does not have"
            failures.append(Failure(f"{name!r} has {kind} in the files, but like has {wanted}", ArgumentError))
    known = {sources.get(name, name) for name in specs}
    for name in parameters if strict else ():
        if sources.get(name, name) not in known and not is_ignored(name, model):
            failures.append(Failure(f"{name!r} is in the files alone", TreeError, _UNEXPECTED))
    if failures:
        refuse(f"{WHAT}: {folder} does not have what like names", failures)
    return chosen, twins


_MISSING: Final = (
    "leave out of like the buffers that the model computes itself; if the names are of another class than config.json "
    "names, pass model="
)
_UNEXPECTED: Final = "to leave tensors of the files out, write strict=False"


def _check_equal(x: Sharded, name: str, other: Sharded, twin: str) -> None:
    blocks, others = (blocks_of(side.local) for side in (x, other))
    if not all(map(torch.equal, blocks, others)):
        raise TreeError(
            f"{WHAT}: {name!r} and {twin!r} are tied in the model, but differ in the files; write "
            "tie_word_embeddings=False into config.json, or give like both names"
        )


def _sharded(source: FileParameter, spec: TensorSpec, stored: Mapping[str, StoredTensor]) -> Sharded:
    """A value of a layout, of which this process reads its blocks."""
    lies, mesh = boxed(spec), spec.mesh
    if mesh.transport == "simulation":
        frame = frame_over(mesh, lies.partition.axes)
        local = local_tensor([_block(source, lies, at, stored) for at in frame.mesh_coordinates()], frame)
    else:
        local = _block(source, lies, mesh.coordinate() or (), stored)
    return Sharded(redistribute(local, lies, spec), spec)


def _block(source: FileParameter, spec: TensorSpec, at: tuple[int, ...], stored: Mapping[str, StoredTensor]) -> Tensor:
    """The block at a coordinate, read from each part that it overlaps."""
    box = Cuboid(spec.offset(at), spec.local_shape(at))
    block = torch.empty(box.sizes, dtype=spec.dtype, device="cpu")
    for part in source.parts:
        cuboid = Cuboid(part.start, part.extent)
        if (shared := cuboid.overlap(box)) is not None:
            block[shared.within(box)].copy_(_read(part, shared.within(cuboid), stored))
    return block.to(spec.mesh.device)


def _read(part: FilePart, spans: Sequence[slice], stored: Mapping[str, StoredTensor]) -> Tensor:
    """A box of a part, with the dims of the parameter."""
    index = [slice(low, high) for low, high in part.spans]
    for dim, span in zip(part.dims, spans, strict=True):
        if dim is not None:
            index[dim] = slice(part.spans[dim][0] + span.start, part.spans[dim][0] + span.stop)
    x = stored[part.name].read(tuple(index))
    x = x.permute([dim for dim in part.dims if dim is not None])
    return x[tuple(None if dim is None else slice(None) for dim in part.dims)] if part.dims else x
