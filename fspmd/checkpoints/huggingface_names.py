"""The tensors of Hugging Face files as boxes of a model's parameters: renamed, stacked, joined and tied.

A file may keep a parameter under another name, or in parts: ``mlp.experts.gate_up_proj`` of a Mixtral is a tensor for
each expert and each of the two. The library has a list of such conversions for each model. They are read here as
places, so that a slice of a parameter is read without the rest.
"""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from fspmd.errors import ArgumentError, FspmdError, ShapeError, TreeError
from fspmd.messages import described, quoted

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FilePart:
    """A box of a file's tensor that is a box of a parameter."""

    name: str
    shape: Shape  # of the file's tensor
    start: Shape  # of the box in the parameter
    dims: tuple[int | None, ...]  # for each dim of the parameter that of the file's tensor; None: the box is one index
    spans: tuple[tuple[int, int], ...]  # of the box in the file's tensor: from, to

    @property
    def extent(self) -> Shape:
        """The size of the box, by the dims of the parameter."""
        return tuple(1 if dim is None else self.spans[dim][1] - self.spans[dim][0] for dim in self.dims)


@dataclass(frozen=True, slots=True)
class FileParameter:
    """A parameter made of parts, which cover it exactly."""

    shape: Shape
    parts: tuple[FilePart, ...]

    def inserted(self, dim: int, index: int) -> FileParameter:
        """The same as one index of a new dim."""

        def widen(values: Sequence[Any], value: Any) -> tuple[Any, ...]:
            return (*values[:dim], value, *values[dim:])

        parts = [replace(p, start=widen(p.start, index), dims=widen(p.dims, None)) for p in self.parts]
        return FileParameter(widen(self.shape, 1), tuple(parts))

    def moved(self, dim: int, offset: int) -> FileParameter:
        """The same, further along a dim."""
        parts = [replace(p, start=_with(p.start, dim, p.start[dim] + offset)) for p in self.parts]
        return FileParameter(self.shape, tuple(parts))

    def transposed(self, dim: int, other: int) -> FileParameter:
        """The same with two dims swapped."""

        def swap(values: Sequence[Any]) -> tuple[Any, ...]:
            return _with(_with(values, dim, values[other]), other, values[dim])

        parts = [replace(p, start=swap(p.start), dims=swap(p.dims)) for p in self.parts]
        return FileParameter(swap(self.shape), tuple(parts))

    def chunks(self, n: int, dim: int) -> list[FileParameter]:
        """As ``torch.chunk`` cuts it."""
        size = self.shape[dim]
        step = max(-(-size // n), 1)
        return [self._sliced(dim, low, min(low + step, size)) for low in range(0, size, step)]

    def _sliced(self, dim: int, low: int, high: int) -> FileParameter:
        parts = []
        for part in self.parts:
            begin, of = part.start[dim], part.dims[dim]
            first, last = max(begin, low), min(begin + part.extent[dim], high)
            if first < last:
                spans = part.spans
                if of is not None:
                    at = spans[of][0] - begin
                    spans = _with(spans, of, (first + at, last + at))
                parts.append(replace(part, start=_with(part.start, dim, first - low), spans=spans))
        return FileParameter(_with(self.shape, dim, high - low), tuple(parts))


def _with(values: Sequence[Any], index: int, value: Any) -> tuple[Any, ...]:
    """The values with another at an index."""
    return (*values[:index], value, *values[index + 1 :])


def whole(name: str, shape: Shape) -> FileParameter:
    """A parameter that the file has as it is.

    >>> whole("w", (2, 3)).parts
    (FilePart(name='w', shape=(2, 3), start=(0, 0), dims=(0, 1), spans=((0, 2), (0, 3))),)
    """
    spans = tuple((0, n) for n in shape)
    return FileParameter(shape, (FilePart(name, shape, (0,) * len(shape), tuple(range(len(shape))), spans),))


def stacked(several: Sequence[FileParameter], dim: int) -> FileParameter:
    """Parameters of one shape along a new dim.

    >>> stacked([whole("a", (2,)), whole("b", (2,))], 0).parts[1]
    FilePart(name='b', shape=(2,), start=(1, 0), dims=(None, 0), spans=((0, 2),))
    """
    _check_alike([x.shape for x in several], several)
    rows = [x.inserted(dim, i) for i, x in enumerate(several)]
    return FileParameter(_with(rows[0].shape, dim, len(rows)), parts_of(rows))


def concatenated(several: Sequence[FileParameter], dim: int) -> FileParameter:
    """Parameters one after another along a dim."""
    _check_alike([(*x.shape[:dim], *x.shape[dim + 1 :]) for x in several], several)
    at, moved = 0, []
    for x in several:
        moved.append(x.moved(dim, at))
        at += x.shape[dim]
    return FileParameter(_with(several[0].shape, dim, at), parts_of(moved))


def parts_of(several: Iterable[FileParameter]) -> tuple[FilePart, ...]:
    return tuple(part for x in several for part in x.parts)


def _check_alike(shapes: Sequence[Shape], several: Sequence[FileParameter]) -> None:
    for shape, x in zip(shapes, several, strict=True):
        if shape != shapes[0]:
            first, other = several[0], x
            raise ShapeError(
                f"{first.parts[0].name!r} makes {first.shape} of one parameter, but {other.parts[0].name!r} makes "
                f"{other.shape}, which does not fit beside it"
            )


def package(name: str, what: str) -> Any:
    """Import a package that fspmd itself does not need.

    Raises:
        ArgumentError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        root = name.partition(".")[0]
        raise ArgumentError(f"{what} needs the package {root!r}: pip install {root} ({error})") from error


def model_of(config: Any, what: str) -> Any:
    """A model without memory, of the class that its configuration names."""
    transformers = package("transformers", what)
    names = getattr(config, "architectures", None) or ()
    model_class = getattr(transformers, names[0], None) if names else None
    if model_class is None:
        named = f"names the class {names[0]!r}, which transformers does not have" if names else "names no class"
        raise ArgumentError(
            f"{what}: the configuration {named}; make the model on the meta device, and pass it as model="
        )
    with torch.device("meta"):
        return model_class(config)


def is_model(x: Any) -> bool:
    """Whether ``x`` is a model of transformers."""
    return hasattr(x, "config") and hasattr(x, "base_model_prefix") and hasattr(x, "state_dict")


def ties_of(model: Any) -> dict[str, str]:
    """The names that a model has tied to others, and those others."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def is_ignored(name: str, model: Any) -> bool:
    """Whether the library ignores a name in files, as it does old buffers."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def parameters_of(
    shapes: Mapping[str, Shape], model: Any, targets: Mapping[str, Shape], what: str
) -> dict[str, FileParameter]:
    """The parameters that tensors of files make, by the names of ``targets`` where these have them.

    ``model`` decides which names and parts the files have. If it is None, files have parameters as they are.

    Raises:
        ArgumentError: a tensor is converted by an operation that is not known here.
        TreeError, ShapeError: two tensors have one name, or parts do not fit together.
    """
    if model is None:
        return {name: whole(name, shape) for name, shape in shapes.items()}
    loading = package("transformers.core_model_loading", what)
    mapping = package("transformers.conversion_mapping", what).get_model_conversion_mapping(model)
    renamings = [tensor for tensor in mapping if isinstance(tensor, loading.WeightRenaming)]
    converters = [tensor for tensor in mapping if isinstance(tensor, loading.WeightConverter)]
    sources: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(shapes, key=_natural):
        renamed, pattern = loading.rename_source_key(
            name, renamings, converters, model.base_model_prefix or None, dict.fromkeys(targets, True)
        )
        sources[renamed][pattern].append(name)
    by_pattern = {pattern: tensor for tensor in converters for pattern in tensor.source_patterns}
    parameters: dict[str, FileParameter] = {}
    for name, patterns in sources.items():
        given = {pattern: [whole(tensor, shapes[tensor]) for tensor in names] for pattern, names in patterns.items()}
        direct = given.pop(None, [])
        made = dict.fromkeys([name], direct[0]) if direct else _converted(given, by_pattern, targets, what, name)
        if len(direct) > 1 or (direct and given) or parameters.keys() & made.keys():
            names = [tensor for names in patterns.values() for tensor in names]
            raise TreeError(f"{what}: the files have several tensors for {name!r}: {_some(names)}")
        parameters |= made
    return parameters


def file_names(shapes: Mapping[str, Shape], model: Any, what: str) -> dict[str, FileParameter]:
    """The tensors that a file has for each parameter: as the library writes them, or as they are in memory.

    Raises:
        ArgumentError: the library would not read either of the two back as these parameters.
    """
    loading = package("transformers.core_model_loading", what)
    kept: dict[str, Shape] = {}
    failure: Exception | None = None
    try:
        written = loading.revert_weight_conversion(model, {k: torch.empty(n, device="meta") for k, n in shapes.items()})
        kept = {name: tuple(x.shape) for name, x in written.items()}
    except Exception as error:  # an operation that cannot be reversed
        failure = error
    for names in (kept, dict(shapes)):
        try:
            made = parameters_of(names, model, shapes, what)
        except FspmdError as error:
            failure = error
            continue
        if {name: x.shape for name, x in made.items()} == dict(shapes) and _covered(made) == _volumes(names):
            return made
    raise ArgumentError(
        f"{what}: the files of a {type(model).__name__} cannot be named so that the library reads them back"
        f"{f' ({failure})' if failure else ''}; write model.save_pretrained of the whole model"
    )


def _volumes(shapes: Mapping[str, Shape]) -> dict[str, int]:
    return {name: prod(shape) for name, shape in shapes.items() if prod(shape)}


def _covered(parameters: Mapping[str, FileParameter]) -> dict[str, int]:
    """How many elements of each tensor of a file parameters have."""
    covered: dict[str, int] = defaultdict(int)
    for part in parts_of(parameters.values()):
        covered[part.name] += prod(part.extent)
    return {name: n for name, n in covered.items() if n}


def _converted(
    given: dict[Any, list[FileParameter]],
    converters: Mapping[Any, Any],
    targets: Mapping[str, Shape],
    what: str,
    name: str,
) -> dict[str, FileParameter]:
    """The parameters that a converter makes of the tensors that it collects, by pattern. ``name`` is the first."""
    (converter,) = {id(converter_): converter_ for converter_ in map(converters.__getitem__, given)}.values()
    values = [given[pattern] for pattern in converter.source_patterns if pattern in given]
    patterns = list(converter.target_patterns)
    try:
        for operation in converter.operations:
            values = _operated(values, operation, len(patterns), targets.get(name))
        if len(values) != 1 or len(values[0]) != len(patterns) or patterns[0] not in name:
            raise ArgumentError(f"{len(patterns)} parameters are made of it in a way that is not known")
    except FspmdError as error:
        sources = [part.name for several in given.values() for part in parts_of(several)]
        raise type(error)(f"{what}: {name!r} of {_some(sources)}: {error}") from error
    before, _, after = name.partition(patterns[0])
    return {f"{before}{pattern}{after}": x for pattern, x in zip(patterns, values[0], strict=True)}


def _operated(
    values: list[list[FileParameter]], operation: Any, results: int, target: Shape | None
) -> list[list[FileParameter]]:
    """What an operation of transformers makes of a list of tensors for each pattern."""
    kind = type(operation).__name__
    if kind == "MergeModulelist":
        for several in values:
            _check_numbers([x.parts[0].name for x in several])
        return [[stacked(several, operation.dim)] for several in values]
    if kind == "Concatenate":
        return [[concatenated([x for several in values for x in several], operation.dim)]]
    if len(values) == 1 and len(values[0]) == 1:
        ((x,),) = values
        if kind == "Transpose":
            stays = getattr(operation, "check_dims", False) and x.shape == target
            return values if stays else [[x.transposed(operation.dim0, operation.dim1)]]
        if kind == "Chunk" and getattr(operation, "num_shards_attribute", None) is None:
            return [x.chunks(results, operation.dim)]
    raise ArgumentError(f"it is made by {described(operation)}, which is not known here")


def _check_numbers(names: list[str]) -> None:
    """Check that names that differ by a number have the numbers from 0 on."""
    for keys in zip(*(name.split(".") for name in names), strict=False):
        numbers = [int(key) for key in keys if key.isdecimal()]
        if len(set(keys)) > 1 and len(numbers) == len(keys) and numbers != list(range(len(keys))):
            raise TreeError(f"they have the numbers {', '.join(keys)}, not those from 0 to {len(keys) - 1}")


def _some(names: Sequence[str]) -> str:
    return quoted(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A key to sort names by, numbers as numbers: expert 10 after expert 9."""
    return tuple((1, int(key), "") if key.isdecimal() else (0, 0, key) for key in name.split("."))
