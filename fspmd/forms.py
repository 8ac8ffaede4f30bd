"""The strides that torch would give a global tensor. `Sharded.stride` returns them, and calls may depend on them.

A *form* is the spec itself if torch would lay out the global tensor as a new tensor, and otherwise a `Strided`. The
form cannot be read off the blocks: they are moved, and dims of one element have any stride.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

from torch import Tensor

from fspmd.cache import cached
from fspmd.spec import TensorSpec

Strides = tuple[int, ...]
_FORMS: Final[WeakValueDictionary[Any, Strided]] = WeakValueDictionary()


class Strided:
    """The form of a value that torch would not lay out as a new tensor, or that is made of less. Interned.

    What is *made of less* is an embedding, an expanded tensor, or a result of these of the same size
    (`global_view/origins.py`). Other values have other keys, so their calls pay nothing for it.
    """

    __slots__ = ("__weakref__", "later", "made", "spec", "strides")
    spec: TensorSpec
    strides: Strides | None  # None: unknown
    later: bool | None  # whether the offset is above 0; the value knows which; None: unknown
    made: bool  # of less

    def __repr__(self) -> str:
        strides = "unknown strides" if self.strides is None else f"strides {self.strides}"
        return f"{self.spec!r} with {strides}{', later in its memory' if self.later else ''}"

    @property
    def laid(self) -> Laid:
        """The strides of a value of this form, and its offset if it is 0."""
        return Laid(self.strides, 0 if self.later is False else None)

    @property
    def like(self) -> Laid:
        """The strides of a value of this form, and an offset that makes it: 1 stands for any above 0."""
        return Laid(self.strides, None if self.later is None else int(self.later))


Form = TensorSpec | Strided


class Laid(NamedTuple):
    """The strides of a value in memory, and its offset. None means unknown."""

    strides: Strides | None
    start: int | None = 0


UNKNOWN: Final = Laid(None, None)


@cached
def form_of(spec: TensorSpec, laid: Laid, made: bool = False) -> Form:
    """Return the form of a value that lies so in memory, and is ``made`` of less."""
    strides, start = laid
    if start == 0 and strides == packed(spec.shape) and not made:
        return spec
    key = spec, strides, None if start is None else start > 0, made
    form = _FORMS.get(key)
    if form is None:
        form = Strided()
        form.spec, form.strides, form.later, form.made = key
        form = _FORMS.setdefault(key, form)
    return form


def is_made(form: Any) -> bool:
    """Return whether a form is that of a value that is made of less."""
    return isinstance(form, Strided) and form.made


def as_made(form: Form, made: bool = True) -> Form:
    """Return the form of a value that lies as another one, and is ``made`` of less or not."""
    if isinstance(form, Strided):
        return form_of(form.spec, form.like, made)
    return form_of(form, Laid(packed(form.shape)), made)


@cached
def packed(shape: tuple[int, ...]) -> Strides:
    """Return the strides of a new tensor.

    >>> packed((2, 3, 4)), packed((2, 0, 4))
    ((12, 4, 1), (4, 4, 1))
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def lies_as_new(x: Tensor) -> bool:
    """Return whether a plain tensor has the strides and the offset of a new one.

    By the stride of a dim of size 1 torch tells the memory format of images and of weights of convolutions.
    """
    if not x.is_contiguous() or x.storage_offset():
        return False
    return x.ndim < 3 or 1 not in x.shape or x.stride() == packed(x.shape)


def order_in_memory(strides: Strides) -> list[int]:
    """Return the dims of a value, the outermost in memory first.

    >>> order_in_memory((1, 12, 4))
    [1, 2, 0]
    """
    return sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))


def overlaps(shape: tuple[int, ...], strides: Strides) -> bool:
    """Return whether elements of a value may share memory, as those of windows do.

    >>> overlaps((2, 9), (3, 1)), overlaps((2, 3), (0, 1)), overlaps((3, 2), (1, 4)), overlaps((1, 9), (3, 1))
    (True, True, False, False)
    """
    if 0 in shape:
        return False
    last = 0  # the place of the last element, of the dims so far
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride <= last:
            return True
        last += (size - 1) * stride
    return False


def is_dense(shape: tuple[int, ...], strides: Strides) -> bool:
    """Return whether the elements of a value fill its memory, each place once.

    >>> is_dense((2, 3), (1, 2)), is_dense((2, 3), (0, 1)), is_dense((2, 3), (6, 2))
    (True, False, False)
    """
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != step:
            return False
        step *= size
    return True
