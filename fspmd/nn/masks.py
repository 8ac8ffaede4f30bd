"""Attention masks as data: which query sees which key, by their positions in the whole sequence.

A mask is a value. It knows nothing about layouts or ranks: `ring_attention` and its relatives ask it about the
positions of their blocks, so that one mask serves every layout of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fspmd.errors import ArgumentError, ShapeError
from fspmd.messages import described
from fspmd.nn.arguments import Count, check_fields


@dataclass(frozen=True, eq=False)
class Mask:
    """The base of all masks. ``a & b`` allows what both allow, ``a | b`` what one of them allows.

    Masks of your own that are frozen dataclasses share the tables of their tiles with equal masks.

    >>> prefix_lm = Causal() | Prefix(2)
    >>> prefix_lm.allows(torch.arange(4)[:, None], torch.arange(4)).int()
    tensor([[1, 1, 0, 0],
            [1, 1, 0, 0],
            [1, 1, 1, 0],
            [1, 1, 1, 1]], dtype=torch.int32)
    """

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether queries see keys: bool, of the shape to which the two tensors of positions broadcast."""
        raise NotImplementedError

    def over(self, queries: range, keys: range) -> bool | None:
        """Whether all queries of a range see all keys of another (True) or none (False). None: neither is known."""
        return None

    def is_triangle(self, span: range) -> bool:
        """Whether, of any positions of a span, each sees exactly those up to itself. False: this is not known."""
        return False

    def check(self, length: int) -> None:
        """Raise `ShapeError` unless the mask knows all positions of a sequence of a length."""

    @property
    def outline(self) -> Mask:
        """A mask that says the same `over` all ranges. Masks with equal outlines share the tables of their tiles."""
        return self

    def __and__(self, other: Mask) -> Mask:
        return AllOf(self, as_mask(other, "Mask.__and__"))

    def __or__(self, other: Mask) -> Mask:
        return AnyOf(self, as_mask(other, "Mask.__or__"))


def as_mask(x: object, what: str) -> Mask:
    """Return the mask. Raise `ArgumentError` for any other object."""
    if not isinstance(x, Mask):
        raise ArgumentError(f"{what} got {described(x)} for a mask; give it a mask, such as Causal()")
    return x


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.ones((), dtype=torch.bool, device=query.device).expand(
            torch.broadcast_shapes(query.shape, key.shape)
        )

    def over(self, queries: range, keys: range) -> bool | None:
        return True


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees the keys up to its own position."""

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return key <= query

    def over(self, queries: range, keys: range) -> bool | None:
        return _known(keys[-1] <= queries[0], keys[0] > queries[-1])

    def is_triangle(self, span: range) -> bool:
        return True


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """A query sees the keys at a distance below ``size``, before and after it. With `Causal` it sees those before."""

    size: Count

    def __post_init__(self) -> None:
        check_fields(self)

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return (key > query - self.size) & (key < query + self.size)  # bools alone: distances would need 8 bytes each

    def over(self, queries: range, keys: range) -> bool | None:
        farthest = max(queries[-1] - keys[0], keys[-1] - queries[0])
        nearest = max(queries[0] - keys[-1], keys[0] - queries[-1])
        return _known(farthest < self.size, nearest >= self.size)


@dataclass(frozen=True)
class Prefix(Mask):
    """Every query sees the first ``size`` keys. ``Causal() | Prefix(n)`` is the mask of a prefix language model."""

    size: Count

    def __post_init__(self) -> None:
        check_fields(self)

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return (key < self.size).expand(torch.broadcast_shapes(query.shape, key.shape))

    def over(self, queries: range, keys: range) -> bool | None:
        return _known(keys[-1] < self.size, keys[0] >= self.size)


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Packed sequences: a query sees the keys of its own document.

    ``ids`` has the number of the document at each position: int [S]. Every process has all of it.
    """

    ids: Tensor

    def __post_init__(self) -> None:
        ids = self.ids
        if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.is_floating_point() or ids.is_complex():
            raise ArgumentError(f"Documents got {described(self.ids)}; give it the document of each position, int [S]")

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        ids = self.ids.to(query.device)
        return ids[query] == ids[key]

    def over(self, queries: range, keys: range) -> bool | None:
        (first, last), (first_key, last_key) = (
            [int(bound) for bound in self.ids[part.start : part.stop].aminmax()] for part in (queries, keys)
        )
        return _known(first == last == first_key == last_key, last < first_key or last_key < first)

    @property
    def outline(self) -> Mask:
        return _UNKNOWN  # says nothing, since the ids are data: each step of training may have others

    def check(self, length: int) -> None:
        if len(self.ids) < length:
            raise ShapeError(
                f"Documents has the ids of {len(self.ids)} positions, and the sequence has {length}; give it the "
                "document of each position of the whole sequence"
            )


@dataclass(frozen=True)
class _Both(Mask):
    """Two masks."""

    decisive: ClassVar[bool]  # what one of them says of a pair whatever the other says
    first: Mask
    second: Mask

    def check(self, length: int) -> None:
        self.first.check(length)
        self.second.check(length)

    @property
    def outline(self) -> Mask:
        return type(self)(self.first.outline, self.second.outline)

    def over(self, queries: range, keys: range) -> bool | None:
        known = self.first.over(queries, keys), self.second.over(queries, keys)
        return self.decisive if self.decisive in known else None if None in known else not self.decisive

    def is_triangle(self, span: range) -> bool:
        """Whether one is a triangle, and the other is one too, or decides nothing over the span."""
        masks, other = (self.first, self.second), not self.decisive
        some = [mask.is_triangle(span) for mask in masks]
        return any(some) and all(same or mask.over(span, span) is other for same, mask in zip(some, masks, strict=True))


class AllOf(_Both):
    """What both masks allow."""

    decisive = False

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return self.first.allows(query, key) & self.second.allows(query, key)


class AnyOf(_Both):
    """What one of two masks allows."""

    decisive = True

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return self.first.allows(query, key) | self.second.allows(query, key)


_UNKNOWN = Mask()


def _known(all_seen: bool, none_seen: bool) -> bool | None:
    return True if all_seen else False if none_seen else None
