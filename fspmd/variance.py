"""The four types that a value can have over a mesh axis, and their join.

==============  =====================================================  ==========  ==================
type            meaning over the axis                                  gradient    written in a spec
==============  =====================================================  ==========  ==================
invariant (I)   equal on all ranks                                     invariant   not mentioned
varying (V)     differs from rank to rank                              varying     ``P("x")``
unreduced (U)   the true value is the sum over the axis, pending       reduced     ``P(unreduced=…)``
reduced (R)     equal on all ranks, its gradient is a pending sum      unreduced   ``P(reduced=…)``
==============  =====================================================  ==========  ==================

A tensor carries its type in an attribute. A tensor without it is invariant.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.cache import Interned, cached
from fspmd.spec import P, describe
from fspmd.torch_internals import NO_LEVEL, DisableTorchFunction, address_of, level_of, wrapped_by

ATTRIBUTE: Final = "_fspmd_variance"
OUTPUT_TYPES: Final = "_fspmd_output_types"  # on the graph node of a custom autograd.Function: types by output
BORROWED: Final = "_fspmd_borrowed"  # set on the result of pcast, which shares the memory of its argument
_EMPTY: Final[frozenset[str]] = frozenset()


class Variance:
    """The type of a value over each mesh axis: invariant over an axis that is not named. Equal types are one object."""

    __slots__ = ("__weakref__", "_dual", "reduced", "unreduced", "varying")
    varying: frozenset[str]
    unreduced: frozenset[str]
    reduced: frozenset[str]

    def __new__(
        cls, varying: Iterable[str] = (), unreduced: Iterable[str] = (), reduced: Iterable[str] = ()
    ) -> Variance:
        key = (frozenset(varying), frozenset(unreduced), frozenset(reduced))
        variance = _INTERNED.get(key)
        if variance is None:
            variance = object.__new__(cls)
            variance.varying, variance.unreduced, variance.reduced = key
            variance._dual = None
            variance = _INTERNED.intern(key, variance)
        return variance

    _dual: Variance | None

    @property
    def dual(self) -> Variance:
        """The type of the gradient: unreduced and reduced change places."""
        if self._dual is None:
            self._dual = Variance(self.varying, self.reduced, self.unreduced)
        return self._dual

    def state(self, axis: str) -> str:
        """Return the letter of the type over an axis: I, V, U or R."""
        if axis in self.varying:
            return "V"
        return "U" if axis in self.unreduced else "R" if axis in self.reduced else "I"

    def moved(self, axes: Iterable[str], to: str) -> Variance:
        """Return the type with ``axes`` in the state ``to``."""
        chosen = frozenset(axes)
        sets = [
            (group - chosen) | (chosen if letter == to else _EMPTY)
            for letter, group in (("V", self.varying), ("U", self.unreduced), ("R", self.reduced))
        ]
        return Variance(*sets)

    def __reduce__(self) -> tuple[Any, ...]:
        return Variance, tuple(map(sorted, (self.varying, self.unreduced, self.reduced)))

    def __repr__(self) -> str:
        named = (("V", self.varying), ("U", self.unreduced), ("R", self.reduced))
        return "{" + " ".join(f"{letter}:{','.join(sorted(axes))}" for letter, axes in named if axes) + "}"


_INTERNED: Final[Interned[Any, Variance]] = Interned()
INVARIANT: Final = Variance()
torch.serialization.add_safe_globals([Variance])  # blocks are saved with their types


@cached
def variance_of_spec(partition: P) -> Variance:
    """Return the type, inside a body, of a value that enters or leaves with this partition."""
    return Variance(partition.axes, partition.unreduced, partition.reduced)


def get_variance(x: Tensor) -> Variance:
    """Return the type of a tensor. A tensor that a ``torch.func`` transform wraps keeps its type."""
    return getattr(x, ATTRIBUTE, None) or inherited(x)


def inherited(x: Tensor) -> Variance:
    """Return the type of a tensor without the attribute: that of the tensor within a wrapper, or of a saved output.

    A view that no mode has seen, such as ``torch.FloatTensor(x)``, has the type of the tensor whose memory it shows.
    """
    while level_of(x) != NO_LEVEL:
        x = wrapped_by(x)
        variance: Variance | None = getattr(x, ATTRIBUTE, None)
        if variance is not None:
            return variance
    # an output that a custom Function saved for backward comes back as a new tensor of the same graph node
    if x.requires_grad and (types := getattr(x.grad_fn, OUTPUT_TYPES, None)) is not None:
        return types.get(x.output_nr, INVARIANT)  # type: ignore[no-any-return]
    return getattr(x._base, ATTRIBUTE, INVARIANT)


def unwrapped(x: Tensor) -> Tensor:
    """Return the tensor within all wrappers of ``torch.func`` transforms."""
    while level_of(x) != NO_LEVEL:
        x = wrapped_by(x)
    return x


def storage_of(x: Tensor) -> int:
    """Return the number of a tensor's storage, also within ``torch.func`` transforms."""
    with DisableTorchFunction():
        number: int = address_of(unwrapped(x).untyped_storage())
    return number


def copied(x: Tensor) -> Tensor:
    """Return a copy of a value, of the same type."""
    with DisableTorchFunction():
        return set_variance(x.clone(), get_variance(x))


def set_variance(x: Tensor, variance: Variance) -> Tensor:
    """Set the type on a tensor, and on the tensors within its wrappers, so that it outlives their transforms."""
    if variance is INVARIANT and getattr(x, ATTRIBUTE, None) is None and x._base is None:
        return x
    setattr(x, ATTRIBUTE, variance)
    inner = x
    while level_of(inner) != NO_LEVEL:
        inner = wrapped_by(inner)
        setattr(inner, ATTRIBUTE, variance)
    return x


@cached
def join(a: Variance, b: Variance) -> Variance:
    """Return the type of a result of two operands, none unreduced: varying before reduced, reduced before invariant."""
    varying = a.varying | b.varying
    return Variance(varying, a.unreduced | b.unreduced, (a.reduced | b.reduced) - varying)


def show(x: Tensor) -> str:
    """Return the text of a block: dtype, shape and type.

    >>> import torch
    >>> show(set_variance(torch.zeros(8, 4), Variance(varying={"x"})))
    'f32[8,4]{V:x}'
    """
    with DisableTorchFunction():
        variance, text = get_variance(x), describe(x.dtype, x.shape).replace(", ", ",")
    return text if variance is INVARIANT else f"{text}{variance!r}"
