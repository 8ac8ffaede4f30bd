"""Random bits as a function of (seed, stream, element): each rank draws its own block's, and all agree.

Word i of a key is a hash of ``state + (i + 1) * gamma``, as in SplitMix of Steele, Lea and Flood, "Fast splittable
pseudorandom number generators" (OOPSLA 2014). The hash is Lea's, as in Steele and Vigna, "LXM: better splittable
pseudorandom number generators" (OOPSLA 2021): all of its shifts are by 32 bits, so each is one operation on halves of
words, and a word takes six operations of int64 arithmetic, which torch has on every device. Words of 64 bits that
follow one another are a *group* of elements that follow one another in the global tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fspmd.torch_internals import FakeTensor, count_dispatch_modes, transforms_active
from fspmd.tracing import outside_transforms, step
from fspmd.transport.local_tensor import per_block

Shape = tuple[int, ...]
_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_LEA: Final = 0xDABA0B6EB09322E3
_CHUNK: Final = 1 << 15  # words at a time on a CPU: as many as stay in a core's cache
_CHUNK_ELSEWHERE: Final = 1 << 24


class Key(NamedTuple):
    """Which sequence of words: where it begins, and its step, an odd number."""

    state: int
    gamma: int


def key_of(seed: int, stream: int = 0) -> Key:
    """The key of a seed and a stream, as SplitMix makes that of a generator it splits off."""
    start = _hash(seed & _MASK) + stream * _GOLDEN & _MASK
    gamma = _hash(start ^ _MASK) | 1
    if (gamma ^ gamma >> 1).bit_count() < 24:  # steps of too regular bits
        gamma ^= 0xAAAAAAAAAAAAAAAA
    return Key(_hash(start), gamma)


def _hash(z: int) -> int:
    z = (z ^ z >> 32) * _LEA & _MASK
    z = (z ^ z >> 32) * _LEA & _MASK
    return z ^ z >> 32


def number(value: float, dtype: torch.dtype) -> Any:
    """An operand for tensors of that dtype: a tensor without dims, which torch need not make in each call."""
    return value if count_dispatch_modes() else _number(value, dtype)


@functools.lru_cache(maxsize=1024)
def _number(value: float, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device="cpu")


class Words:
    """Room for some words: ``all`` of them, int64[n]; ``halves``, the same memory as int32[2n]; the ramp 0, 1 ..."""

    __slots__ = ("_high", "_low", "all", "halves", "ramp")

    def __init__(self, words: Tensor, ramp: Tensor) -> None:
        self.all = words
        self.halves = words.view(torch.int32)
        self._low, self._high = self.halves[::2], self.halves[1::2]
        self.ramp = ramp

    def hash(self) -> None:
        """Put the hash of each word in its place."""
        low, high, words, multiplier = self._low, self._high, self.all, number(_SIGNED_LEA, torch.int64)
        low.bitwise_xor_(high)
        words.mul_(multiplier)
        low.bitwise_xor_(high)
        words.mul_(multiplier)
        low.bitwise_xor_(high)


class _Room:
    """A chunk's memory on the CPU, kept from draw to draw, with the views of it that draws of some lengths took."""

    __slots__ = ("_parts", "_ramp", "_words")

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self._words, self._ramp = torch.empty(_CHUNK, dtype=torch.int64, device="cpu"), _ramp()
        self._parts: dict[int, Words] = {}

    def first(self, count: int) -> Words:
        """Room for so many words."""
        found = self._parts.get(count)
        if found is None:
            if len(self._parts) == _PARTS:
                self._parts.clear()
            with torch.inference_mode(False):
                found = self._parts[count] = Words(self._words[:count], self._ramp[:count])
        return found


class _Fresh:
    """Memory for one draw: of another device, or that someone watches."""

    __slots__ = ("_ramp", "_words")

    def __init__(self, count: int, device: torch.device) -> None:
        self._words = torch.empty(count, dtype=torch.int64, device=device)
        self._ramp = torch.arange(count, device=device)

    def first(self, count: int) -> Words:
        """Room for so many words."""
        return Words(self._words[:count], self._ramp[:count])


_PARTS: Final = 32
#: of no thread at the moment; one that draws takes one out, or makes another
_ROOMS: Final[list[_Room]] = []


@functools.cache
def _ramp() -> Tensor:
    return torch.arange(_CHUNK, device="cpu")


def words(counters: Tensor, key: Key) -> Tensor:
    """The words of some counters."""
    found = Words(counters * _signed(key.gamma) + _signed(key.state + key.gamma), counters)
    found.hash()
    return found.all


def derived(key: Tensor, number: int | Tensor, purpose: int) -> Tensor:
    """The key of a number, or of each of several, for a purpose: word ``number`` of what the key and the purpose give.

    It works with whatever ``key`` is: of a transform, or with a value of its own on each rank.
    """
    state = _hashed(key + _signed(purpose * _GOLDEN & _MASK))
    if isinstance(number, int):
        return _hashed(state + _signed((number + 1) * _GOLDEN & _MASK))
    return _hashed(state + (number + 1) * _signed(_GOLDEN))


def _hashed(z: Tensor) -> Tensor:
    """The hash of words in memory of their own."""
    for multiplier in (_SIGNED_LEA, _SIGNED_LEA, 1):
        z = (z ^ (z >> 32 & 0xFFFFFFFF)) * multiplier
    return z


def _signed(word: int) -> int:
    """64 bits as torch has them."""
    return (word + (1 << 63) & _MASK) - (1 << 63)


_SIGNED_LEA: Final = _signed(_LEA)


class Block(NamedTuple):
    """Where a block lies in its global tensor."""

    whole: Shape
    offset: Shape
    shape: Shape


@dataclass(frozen=True, slots=True)
class Distribution:
    """How each word becomes ``group`` elements of ``dtype``.

    ``fill(found, out)`` writes into a contiguous ``out`` the elements of the words ``found``, which it may overwrite.
    """

    dtype: torch.dtype
    group: int  # 2 or 1
    fill: Callable[[Words, Tensor], object]


@step
def draw(block: Block, law: Distribution, seed: int | Tensor, device: torch.device, stream: int = 0) -> Tensor:
    """The elements of a block: those the whole tensor has there, whoever draws them and however it is cut.

    A ``seed`` that is a tensor is read when the numbers are drawn; where ranks differ in it, each has its own numbers.
    """
    if type(seed) is int and not transforms_active():
        return _drawn(block, law, seed, device, stream)
    with outside_transforms():  # or the result of the step would be wrapped, whose value no record knows
        if isinstance(seed, FakeTensor):
            return torch.empty(block.shape, dtype=law.dtype, device=device)
        return per_block(lambda one: _drawn(block, law, int(one), device, stream), seed)


def _drawn(block: Block, law: Distribution, seed: int, device: torch.device, stream: int) -> Tensor:
    run = _run(block)
    if not run.length:
        return torch.empty(block.shape, dtype=law.dtype, device=device)
    key, group = key_of(seed, stream), law.group
    if run.single:
        first, skipped = divmod(run.start, group)
        count = (skipped + run.length - 1) // group + 1
        values = _groups(first, count, law, key, device)
        if count * group != run.length:
            values = values[skipped : skipped + run.length].clone()  # in memory no larger than it
        return values if len(block.shape) == 1 else values.view(block.shape)
    starts, phase = _starts(block, run, group, device)
    length = run.length
    count = (length - 1 + (group - 1 if phase is None else phase)) // group + 1
    counters = starts.div(group, rounding_mode="floor").unsqueeze(1) + torch.arange(count, device=device)
    values = _groups(counters.view(-1), counters.numel(), law, key, device).view(len(starts), -1)
    if phase is not None:
        return values[:, phase : phase + length].contiguous().view(block.shape)
    places = (starts % group).unsqueeze(1) + torch.arange(length, device=device)
    return values.gather(1, places).view(block.shape)


class _Run(NamedTuple):
    """Elements of a block that follow one another in the global tensor: they begin at a dim."""

    dim: int
    length: int  # 0: the block is empty
    start: int  # the number of the block's first element
    single: bool  # there are no others


@functools.lru_cache(maxsize=4096)
def _run(block: Block) -> _Run:
    whole, offset, shape = block
    dim = len(shape) - 1
    while dim > 0 and shape[dim] == whole[dim]:
        dim -= 1
    dim = max(dim, 0)
    start = sum(o * stride for o, stride in zip(offset, _strides(whole), strict=True))
    return _Run(dim, prod(shape[dim:]) if prod(shape) else 0, start, prod(shape[:dim]) == 1)


def _strides(whole: Shape) -> list[int]:
    return [prod(whole[d + 1 :]) for d in range(len(whole))]


def _starts(block: Block, run: _Run, group: int, device: torch.device) -> tuple[Tensor, int | None]:
    """The number of each run's first element; and its place in its group, if that is one for all runs."""
    starts = torch.full((), run.start, dtype=torch.int64, device=device)
    runs = list(zip(block.shape[: run.dim], _strides(block.whole), strict=False))
    for n, stride in runs:
        starts = starts.unsqueeze(-1) + torch.arange(n, device=device) * stride
    alike = all(stride % group == 0 or n == 1 for n, stride in runs)
    return starts.view(-1), run.start % group if alike else None


def _groups(groups: int | Tensor, number: int, law: Distribution, key: Key, device: torch.device) -> Tensor:
    """All elements of some groups, in a row: of so many from the first one on, or of those in a tensor."""
    out = torch.empty(number * law.group, dtype=law.dtype, device=device)
    chunk = _CHUNK if device.type == "cpu" else _CHUNK_ELSEWHERE
    room = _room(min(number, chunk), device)
    gamma = _signed(key.gamma)
    for at in range(0, number, chunk):
        count = min(number - at, chunk)
        found = room.first(count)
        if isinstance(groups, int):
            first = _signed(key.state + (groups + at + 1) * key.gamma)
            torch.add(first, found.ramp, alpha=gamma, out=found.all)
        else:
            torch.add(_signed(key.state + key.gamma), groups[at : at + count], alpha=gamma, out=found.all)
        found.hash()
        law.fill(found, out if count == number else out[at * law.group : (at + count) * law.group])
    if type(room) is _Room:
        _ROOMS.append(room)
    return out


def _room(count: int, device: torch.device) -> _Room | _Fresh:
    if device.type != "cpu" or count_dispatch_modes():
        return _Fresh(count, device)
    try:
        return _ROOMS.pop()
    except IndexError:
        return _Room()
