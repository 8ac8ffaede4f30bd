"""(shape, stride) algebra on integers: how the coordinates of a grid map to offsets.

A :class:`Layout` is a function from ``range(size)`` to offsets, kept as a flat tuple of modes ``(size, stride)``.
Coordinates are ROW-MAJOR: the last mode is the fastest, as in torch and JAX (the algebra is that of NVIDIA's CuTe,
whose first mode is the fastest). This file knows neither torch nor ranks: a mesh lays its axes over a rank map with it.

>>> grid = Layout((2, 4))
>>> grid
Layout((2, 4):(4, 1))
>>> grid((1, 2)), grid(6)
(6, 6)
>>> list(Layout((2, 2), (1, 2)).offsets())
[0, 2, 1, 3]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

from fspmd.errors import ShapeError


@dataclass(frozen=True, slots=True, repr=False)
class Layout:
    """Modes ``(size, stride)``, slowest first; ``Layout((2, 4))`` alone is dense and row-major.

    ``Layout(())`` has no modes and one offset, 0. Sizes are at least 1, strides at least 0.

    Raises:
        ShapeError: sizes or strides that are no integers, too small, or not equally many.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __init__(self, shape: int | Sequence[int], stride: int | Sequence[int] | None = None) -> None:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if not all(type(size) is int and size >= 1 for size in sizes):
            raise ShapeError(f"Layout({shape!r}): sizes must be integers >= 1")
        if stride is None:
            strides = row_major_strides(sizes)
        else:
            strides = (stride,) if isinstance(stride, int) else tuple(stride)
        if not all(type(step) is int and step >= 0 for step in strides):
            raise ShapeError(f"Layout({shape!r}, {stride!r}): strides must be integers >= 0")
        if len(sizes) != len(strides):
            raise ShapeError(
                f"Layout({shape!r}, {stride!r}): {len(sizes)} sizes but {len(strides)} strides, give one each"
            )
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "stride", strides)

    @property
    def modes(self) -> tuple[tuple[int, int], ...]:
        """The pairs (size, stride), slowest first."""
        return tuple(zip(self.shape, self.stride, strict=True))

    @property
    def size(self) -> int:
        """How many indices the layout takes: the product of its sizes."""
        return math.prod(self.shape)

    @property
    def cosize(self) -> int:
        """One more than the greatest offset."""
        return 1 + sum((size - 1) * stride for size, stride in self.modes)

    def __call__(self, index: int | Sequence[int]) -> int:
        """The offset of a row-major index, or of a coordinate with one entry per mode.

        >>> Layout((2, 3), (10, 1))(4), Layout((2, 3), (10, 1))((1, 1))
        (11, 11)
        """
        if isinstance(index, int):
            if not 0 <= index < self.size:
                raise ShapeError(f"{self}: index {index} is not in range({self.size})")
            offset = 0
            for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
                index, digit = divmod(index, size)
                offset += digit * stride
            return offset
        if len(index) != len(self.shape) or not all(0 <= i < n for i, n in zip(index, self.shape, strict=True)):
            raise ShapeError(f"{self}: coordinate {tuple(index)} does not lie in the shape {self.shape}")
        return sum(i * stride for i, stride in zip(index, self.stride, strict=True))

    def offsets(self, start: int = 0) -> Iterator[int]:
        """The offset of every index in turn, ``start`` added; made one by one."""
        return _walk(self.shape, self.stride, start)

    def coalesce(self) -> Layout:
        """The same function in the fewest modes; equal functions without stride 0 give equal layouts.

        >>> Layout((2, 1, 4, 3), (24, 7, 6, 1)).coalesce()
        Layout((8, 3):(6, 1))
        """
        shape: list[int] = []
        stride: list[int] = []
        for size, step in self.modes:
            if size == 1:
                continue
            if shape and stride[-1] == size * step:
                shape[-1] *= size
                stride[-1] = step
            else:
                shape.append(size)
                stride.append(step)
        return Layout(shape, stride)

    @property
    def is_nested(self) -> bool:
        """True when each stride is greater than the reach of all smaller ones, so that offsets can be taken apart."""
        span = 0
        for step, size in sorted((step, size) for size, step in self.modes if size > 1):
            if step <= span:
                return False
            span += (size - 1) * step
        return True

    def coordinate(self, offset: int) -> tuple[int, ...] | None:
        """The coordinate (an entry per mode) whose offset this is, None when there is none; for nested layouts.

        >>> Layout((2, 3), (1, 4)).coordinate(9), Layout((2, 3), (1, 4)).coordinate(3)
        ((1, 2), None)
        """
        digits = [0] * len(self.shape)
        for i in sorted(range(len(digits)), key=self.stride.__getitem__, reverse=True):
            if self.shape[i] > 1:
                digits[i] = min(offset // self.stride[i], self.shape[i] - 1) if offset > 0 else 0
                offset -= digits[i] * self.stride[i]
        return tuple(digits) if offset == 0 else None

    def window(self, start: int, size: int) -> tuple[int, Layout] | None:
        """``(offset, layout)`` of the indices ``start ... start + size - 1``, None when no layout tells them.

        >>> Layout(8, 3).window(2, 4)
        (6, Layout((4,):(3,)))
        >>> Layout((2, 3), (10, 1)).window(2, 2) is None
        True
        """
        if start < 0 or size < 1 or start + size > self.size:
            raise ShapeError(f"{self}: indices {start} ... {start + size - 1} are not all in range({self.size})")
        offset = 0
        shape, stride = list(self.shape), list(self.stride)
        while shape:
            inner = math.prod(shape[1:])
            first, within = divmod(start, inner)
            offset += first * stride[0]
            if within == 0 and size % inner == 0:
                shape[0] = size // inner
                return offset, Layout(shape, stride)
            if within + size > inner:
                return None
            start = within
            del shape[0], stride[0]
        return offset, Layout(())

    def __repr__(self) -> str:
        return f"Layout({self.shape}:{self.stride})"


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense array whose last dim is the fastest.

    >>> row_major_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


def concat(*layouts: Layout) -> Layout:
    """The modes of all in one layout, the first layout's slowest: its offsets are sums of one offset of each."""
    return Layout([n for a in layouts for n in a.shape], [d for a in layouts for d in a.stride])


def compose(outer: Layout, inner: Layout) -> Layout:
    """The layout of ``index -> outer(inner(index))``.

    >>> compose(Layout((4, 2), (1, 4)), Layout(4, 2))  # every second index of outer
    Layout((4,):(1,))
    >>> compose(Layout((2, 3), (10, 1)), Layout((2, 3)))
    Layout((2, 3):(10, 1))

    Raises:
        ShapeError: inner reaches past ``outer.size``, or no layout expresses the composition.
    """
    if inner.cosize > outer.size:
        raise ShapeError(
            f"compose({outer}, {inner}): the inner offsets reach {inner.cosize - 1}, "
            f"but outer takes indices below {outer.size}"
        )
    outer = outer.coalesce()
    room = [size - 1 for size in outer.shape]
    modes: list[tuple[int, int]] = []
    for count, step in inner.modes:
        taken = _step_through(outer, count, step, room)
        if taken is None:
            raise ShapeError(f"compose({outer}, {inner}): no layout steps {count} times by {step} through {outer}")
        modes.extend(taken)
    return Layout([size for size, _ in modes], [stride for _, stride in modes])


def _step_through(outer: Layout, count: int, step: int, room: list[int]) -> list[tuple[int, int]] | None:
    """Modes (slowest first) of ``outer(step * i)`` for i < count, None when there are none.

    ``outer`` reads an index as digits, one per mode. Inner modes add up without a carry only while every digit has
    room for the sum of what they put there; ``room`` is what is left of each digit, and this mode takes its share.
    """
    if count == 1 or step == 0:
        return [(count, 0)] if count > 1 else []
    digits, rest = [0] * len(room), step
    for i in range(len(room) - 1, 0, -1):
        rest, digits[i] = divmod(rest, outer.shape[i])
    digits[0] = rest
    if all((count - 1) * digit <= left for digit, left in zip(digits, room, strict=True)):
        for i, digit in enumerate(digits):
            room[i] -= (count - 1) * digit
        return [(count, sum(map(int.__mul__, digits, outer.stride)))]
    i = max(i for i, digit in enumerate(digits) if digit)  # fill this digit, then step by one through the next
    size, unit = outer.shape[i], digits[i]
    here = size // unit
    if i == 0 or any(digits[:i]) or size % unit or count % here or (here - 1) * unit > room[i]:
        return None
    room[i] -= (here - 1) * unit
    slower = _step_through(outer, count // here, math.prod(outer.shape[i:]), room)
    return None if slower is None else [*slower, (here, unit * outer.stride[i])]


def fit(offsets: Iterable[int]) -> tuple[int, Layout] | None:
    """``(start, layout)`` with ``start + layout(i)`` the i-th offset; None when no layout tells them.

    >>> fit([5, 6, 15, 16])
    (5, Layout((2, 2):(10, 1)))
    >>> fit([0, 1, 3]) is None
    True
    """
    values = list(offsets)
    if not values:
        return None
    start, every = values[0], values
    modes: list[tuple[int, int]] = []
    while len(every) > 1:
        step = every[1] - every[0]
        run = 2
        while run < len(every) and every[run] - every[run - 1] == step:
            run += 1
        if step < 0 or len(every) % run:
            return None
        modes.insert(0, (run, step))
        every = every[::run]
    layout = Layout([size for size, _ in modes], [stride for _, stride in modes])
    return (start, layout) if all(map(int.__eq__, layout.offsets(start), values)) else None


def _walk(shape: tuple[int, ...], stride: tuple[int, ...], start: int) -> Iterator[int]:
    if not shape:
        yield start
    elif len(shape) == 1:
        yield from range(start, start + shape[0] * stride[0], stride[0]) if stride[0] else repeat(start, shape[0])
    else:
        for i in range(shape[0]):
            yield from _walk(shape[1:], stride[1:], start + i * stride[0])
