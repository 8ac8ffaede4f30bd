"""Random bits as a function of (seed, stream, element): each rank draws its own block's, and all agree.

SplitMix of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), with the constants of
its Java version: word i of a key is a hash of ``state + (i + 1) * gamma``. It takes three passes of int64 arithmetic,
which torch has on every device, where Philox takes ten. Words of 64 bits that follow one another are a *group* of
elements that follow one another in the global tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fspmd.tracing import outside_transforms, step
from fspmd.transport.local_tensor import LocalTensor

Shape = tuple[int, ...]
_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
#: the passes of a hash: ``z ^= z >>> shift``, then ``z *= multiplier``
_MIX: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
_MIX_GAMMA: Final = ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53), (33, 1))
_CHUNK: Final = {"cpu": 1 << 15}  # words at a time: as many as stay in a core's cache
_CHUNK_ELSEWHERE: Final = 1 << 24


class Key(NamedTuple):
    """Which sequence of words: where it begins, and its step, an odd number."""

    state: int
    gamma: int


def key_of(seed: int, stream: int = 0) -> Key:
    """The key of a seed and a stream, as SplitMix makes that of a generator it splits off."""
    start = _hash(seed & _MASK, _MIX) + stream * _GOLDEN & _MASK
    gamma = _hash(start + _GOLDEN & _MASK, _MIX_GAMMA) | 1
    if (gamma ^ gamma >> 1).bit_count() < 24:  # steps of too regular bits
        gamma ^= 0xAAAAAAAAAAAAAAAA
    return Key(_hash(start, _MIX), gamma)


def _hash(z: int, passes: tuple[tuple[int, int], ...]) -> int:
    for shift, multiplier in passes:
        z = (z ^ z >> shift) * multiplier & _MASK
    return z


def words(counters: Tensor, key: Key) -> Tensor:
    """The words of some counters.

    >>> [x % 2**64 for x in words(torch.arange(2), Key(1234567, 0x9E3779B97F4A7C15)).tolist()]
    [6457827717110365317, 3203168211198807973]
    """
    z = counters * _signed(key.gamma)
    return _mix(z.add_(_signed(key.state + key.gamma)), torch.empty_like(z))


def _mix(z: Tensor, spare: Tensor) -> Tensor:
    """The hash of words, in their place."""
    for shift, multiplier in _MIX:
        torch.bitwise_right_shift(z, shift, out=spare)
        z.bitwise_xor_(spare.bitwise_and_(_MASK >> shift))  # torch's shift hands on the sign
        if multiplier != 1:
            z.mul_(_signed(multiplier))
    return z


def derived(key: Tensor, number: int | Tensor, purpose: int) -> Tensor:
    """The key of a number, or of each of several, for a purpose: word ``number`` of what the key and the purpose give.

    It works with whatever ``key`` is: of a transform, or with a value of its own on each rank.
    """
    state = _hashed(key + _signed(purpose * _GOLDEN & _MASK))
    if isinstance(number, int):
        return _hashed(state + _signed((number + 1) * _GOLDEN & _MASK))
    return _hashed(state + (number + 1) * _signed(_GOLDEN))


def _hashed(z: Tensor) -> Tensor:
    for shift, multiplier in _MIX:
        z = (z ^ (z >> shift & _MASK >> shift)) * _signed(multiplier)
    return z


def _signed(word: int) -> int:
    """64 bits as torch has them."""
    return (word + (1 << 63) & _MASK) - (1 << 63)


class Block(NamedTuple):
    """Where a block lies in its global tensor."""

    whole: Shape
    offset: Shape
    shape: Shape


@dataclass(frozen=True, slots=True)
class Distribution:
    """How ``words`` words become ``group`` elements of ``dtype``.

    ``fill(found, spare, out)`` writes into a contiguous ``out`` the elements of all of ``found``. It may overwrite
    ``found``, and ``spare``, which is as large.
    """

    dtype: torch.dtype
    group: int  # 2 or 1
    fill: Callable[[Tensor, Tensor, Tensor], object]
    words: int = 1


@step
def draw(block: Block, law: Distribution, seed: int | Tensor, device: torch.device, stream: int = 0) -> Tensor:
    """The elements of a block: those the whole tensor has there, whoever draws them and however it is cut.

    A ``seed`` that is a tensor is read when the numbers are drawn; where ranks differ in it, each has its own numbers.
    """
    with outside_transforms():  # or the result of the step would be wrapped, whose value no record knows
        if isinstance(seed, LocalTensor):
            return LocalTensor([_drawn(block, law, int(one), device, stream) for one in seed.shards], seed.frame)
        if isinstance(seed, FakeTensor):
            return torch.empty(block.shape, dtype=law.dtype, device=device)
        return _drawn(block, law, int(seed), device, stream)


def _drawn(block: Block, law: Distribution, seed: int, device: torch.device, stream: int) -> Tensor:
    if not prod(block.shape):
        return torch.empty(block.shape, dtype=law.dtype, device=device)
    dim, length = _run(block)
    starts, phase = _starts(block, dim, law.group, device)
    if isinstance(starts, int):
        first, last = starts // law.group, (starts + length - 1) // law.group
        values = _groups(range(first, last + 1), law, key_of(seed, stream), device)
        return _exactly(values, starts % law.group, length).view(block.shape)
    count = (length - 1 + (law.group - 1 if phase is None else phase)) // law.group + 1
    counters = starts.div(law.group, rounding_mode="floor").unsqueeze(1) + torch.arange(count, device=device)
    values = _groups(counters.view(-1), law, key_of(seed, stream), device).view(len(starts), -1)
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


def _groups(groups: range | Tensor, law: Distribution, key: Key, device: torch.device) -> Tensor:
    """All elements of some groups, in a row."""
    out = torch.empty(len(groups) * law.group, dtype=law.dtype, device=device)
    count = min(len(groups), _CHUNK.get(device.type, _CHUNK_ELSEWHERE) // law.words)
    gamma, number = _signed(key.gamma), count * law.words
    spare = torch.empty(number, dtype=torch.int64, device=device)
    z = steps = torch.arange(number, device=device).mul_(gamma)
    if count < len(groups):
        z = torch.empty_like(steps)
    for at in range(0, len(groups), count):
        if len(some := groups[at : at + count]) < count:  # the last ones
            z, spare = z[: len(some) * law.words], spare[: len(some) * law.words]
        if isinstance(some, range):
            first = _signed(key.state + (some.start * law.words + 1) * key.gamma)
            torch.add(steps[: len(z)], first, out=z)
        else:
            counters = some.unsqueeze(1) * law.words + torch.arange(law.words, device=device)
            torch.mul(counters.view(-1), gamma, out=z).add_(_signed(key.state + key.gamma))
        law.fill(_mix(z, spare), spare, out[at * law.group : (at + len(some)) * law.group])
    return out


def _exactly(values: Tensor, start: int, length: int) -> Tensor:
    """A part, in memory no larger than it."""
    return values if len(values) == length else values[start : start + length].clone()
