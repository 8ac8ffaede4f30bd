"""A parameter as boxes of the tensors of files: stacked, joined, transposed and cut without their values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fspmd.errors import ShapeError

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
