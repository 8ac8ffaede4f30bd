"""Random bits as a function of (seed, stream, element): each rank draws its own block's, and all agree.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), in int64
arithmetic, which torch has on every device. One counter gives four words of 32 bits, which are one *group* of elements
that follow one another in the global tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fspmd.tracing import outside_transforms, step

Shape = tuple[int, ...]
#: words of 32 bits in int64; a Python int where all elements have the same one
Word = Any
_MASK: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_CHUNK: Final = {"cpu": 1 << 15}  # counters at a time: as many as stay in a core's cache
_CHUNK_ELSEWHERE: Final = 1 << 24


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[int, int]) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10: four words of a counter of four and a key of two.

    >>> [hex(word) for word in philox((0, 0, 0, 0), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    (a, low_b, b, low_a), (key_a, key_b) = counter, key
    for _ in range(10):
        product_a, product_b = a * _MULTIPLIERS[0], b * _MULTIPLIERS[1]
        a, b = _mix(product_b, low_b, key_a), _mix(product_a, low_a, key_b)
        low_b, low_a = product_b, product_a  # of which only the lower halves count
        key_a, key_b = (key_a + _WEYL[0]) & _MASK, (key_b + _WEYL[1]) & _MASK
    return a, low_b & _MASK, b, low_a & _MASK


def _mix(product: Word, low: Word, key: int) -> Word:
    """The upper half of a product, xor the lower half of a word, xor a key."""
    if isinstance(low, int):
        return ((product >> 32) ^ ((low ^ key) & _MASK)) & _MASK
    if isinstance(product, int):
        return (low ^ ((product >> 32) ^ key)) & _MASK
    return (product >> 32).bitwise_xor_(low).bitwise_xor_(key).bitwise_and_(_MASK)


class Block(NamedTuple):
    """Where a block lies in its global tensor."""

    whole: Shape
    offset: Shape
    shape: Shape


@dataclass(frozen=True, slots=True)
class Distribution:
    """How the four words of a counter become ``group`` elements of ``dtype``: one column each."""

    dtype: torch.dtype
    group: int  # 4, 2 or 1
    columns: Callable[[Word, Word, Word, Word], Sequence[Tensor]]


@step
def draw(block: Block, law: Distribution, seed: int, device: torch.device, stream: int = 0) -> Tensor:
    """The elements of a block: those the whole tensor has there, whoever draws them and however it is cut."""
    with outside_transforms():  # or the result of the step would be wrapped, whose value no record knows
        return _drawn(block, law, seed, device, stream)


def _drawn(block: Block, law: Distribution, seed: int, device: torch.device, stream: int) -> Tensor:
    if not prod(block.shape):
        return torch.empty(block.shape, dtype=law.dtype, device=device)
    dim, length = _run(block)
    wide = prod(block.whole) > 1 << 32
    starts, phase = _starts(block, dim, law.group, device)
    if isinstance(starts, int):
        first, last = starts // law.group, (starts + length - 1) // law.group
        values = _groups(range(first, last + 1), wide, law, seed, device, stream).view(-1)
        return _exactly(values, starts % law.group, length).view(block.shape)
    count = (length - 1 + (law.group - 1 if phase is None else phase)) // law.group + 1
    counters = starts.div(law.group, rounding_mode="floor").unsqueeze(1) + torch.arange(count, device=device)
    values = _groups(counters.view(-1), wide, law, seed, device, stream).view(len(starts), -1)
    if phase is not None:
        return values[:, phase : phase + length].contiguous().view(block.shape)
    places = (starts % law.group).unsqueeze(1) + torch.arange(length, device=device)
    return values.gather(1, places).view(block.shape)


def _run(block: Block) -> tuple[int, int]:
    """Elements that follow one another in the global tensor: they begin at a dim, and are so many."""
    dim = len(block.shape) - 1
    while dim > 0 and block.shape[dim] == block.whole[dim]:
        dim -= 1
    dim = max(dim, 0)
    return dim, prod(block.shape[dim:])


def _starts(block: Block, dim: int, group: int, device: torch.device) -> tuple[int | Tensor, int | None]:
    """The number of each run's first element; and its place in its group, if that is one for all runs."""
    strides = [prod(block.whole[d + 1 :]) for d in range(len(block.whole))]
    first = sum(o * s for o, s in zip(block.offset, strides, strict=True))
    if prod(block.shape[:dim]) == 1:
        return first, first % group
    starts = torch.full((), first, dtype=torch.int64, device=device)
    for n, stride in zip(block.shape[:dim], strides, strict=False):
        starts = starts.unsqueeze(-1) + torch.arange(n, device=device) * stride
    alike = all(stride % group == 0 or n == 1 for n, stride in zip(block.shape[:dim], strides, strict=False))
    return starts.view(-1), first % group if alike else None


def _groups(
    counters: range | Tensor, wide: bool, law: Distribution, seed: int, device: torch.device, stream: int
) -> Tensor:
    """All elements of each counter, [counters, group]; ``wide``: some counter has more than 32 bits."""
    out = torch.empty(len(counters), law.group, dtype=law.dtype, device=device)
    chunk = _CHUNK.get(device.type, _CHUNK_ELSEWHERE)
    key = seed & _MASK, seed >> 32 & _MASK
    for at in range(0, len(counters), chunk):
        some = counters[at : at + chunk]
        number = torch.arange(some.start, some.stop, device=device) if isinstance(some, range) else some
        low, high = (number & _MASK, number >> 32) if wide else (number, 0)
        words = philox((low, high, stream, 0), key)
        for k, column in enumerate(law.columns(*words)):
            out[at : at + chunk, k] = column
    return out


def _exactly(values: Tensor, start: int, length: int) -> Tensor:
    """A part, in memory no larger than it."""
    return values if len(values) == length else values[start : start + length].clone()
