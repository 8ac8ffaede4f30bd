"""How torch would keep a global tensor in memory: what `Sharded.stride` tells, and a part of what decides a call.

A *form* is the spec itself where torch would keep a new tensor, and else a `Strided`. Blocks tell nothing of it: they
are moved, and dims of one element have any stride.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

from fspmd.spec import TensorSpec

Strides = tuple[int, ...]
_FORMS: Final[WeakValueDictionary[Any, Strided]] = WeakValueDictionary()


class Strided:
    """A spec of a value that torch would keep otherwise than a new tensor. Interned, as specs are."""

    __slots__ = ("__weakref__", "later", "spec", "strides")
    spec: TensorSpec
    strides: Strides | None  # None: nobody knows
    later: bool | None  # it begins later in its memory, where is known to the value; None: nobody knows

    def __repr__(self) -> str:
        strides = "unknown strides" if self.strides is None else f"strides {self.strides}"
        return f"{self.spec!r} with {strides}{', later in its memory' if self.later else ''}"

    @property
    def laid(self) -> Laid:
        """What it tells of a value."""
        return Laid(self.strides, 0 if self.later is False else None)


Form = TensorSpec | Strided


class Laid(NamedTuple):
    """How a value lies in memory: its strides, None where nobody knows, and where it begins, None as well."""

    strides: Strides | None
    start: int | None = 0


UNKNOWN: Final = Laid(None, None)


def form_of(spec: TensorSpec, strides: Strides | None, later: bool | None) -> Form:
    """The form of a value with such strides."""
    if later is False and strides == packed(spec.shape):
        return spec
    key = spec, strides, later
    found = _FORMS.get(key)
    if found is None:
        found = Strided()
        found.spec, found.strides, found.later = key
        found = _FORMS.setdefault(key, found)
    return found


def packed(shape: tuple[int, ...]) -> Strides:
    """The strides of a new tensor.

    >>> packed((2, 3, 4)), packed((2, 0, 4))
    ((12, 4, 1), (4, 4, 1))
    """
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))


def order_in_memory(strides: Strides) -> list[int]:
    """The dims of a value, the outermost in its memory first.

    >>> order_in_memory((1, 12, 4))
    [1, 2, 0]
    """
    return sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))


def is_dense(shape: tuple[int, ...], strides: Strides) -> bool:
    """Whether such a value has each place of its memory for one element.

    >>> is_dense((2, 3), (1, 2)), is_dense((2, 3), (0, 1)), is_dense((2, 3), (6, 2))
    (True, False, False)
    """
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != step:
            return False
        step *= size
    return True
