"""Random bits as a function of (seed, stream, element). Each rank draws its own block, and all ranks agree.

Word i of a key is a hash of ``state + (i + 1) * gamma``, as in SplitMix of Steele, Lea and Flood, "Fast splittable
pseudorandom number generators" (OOPSLA 2014). The hash is Lea's, as in Steele and Vigna, "LXM: better splittable
pseudorandom number generators" (OOPSLA 2021). All of its shifts are by 32 bits, so each is one operation on halves of
words. A word takes six operations of int64 arithmetic, which torch has on every device. A word has 64 bits. It becomes
a *group* of one or two elements, and consecutive words become consecutive elements of the global tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.torch_internals import FakeTensor, count_dispatch_modes, elementwise_kernel, transforms_active
from fspmd.tracing import outside_transforms, step
from fspmd.transport.local_tensor import per_block

Shape = tuple[int, ...]
_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_LEA: Final = 0xDABA0B6EB09322E3
_CHUNK: Final = 1 << 15  # words at a time on a CPU; a core's cache has room for them
_CHUNK_ELSEWHERE: Final = 1 << 24


class Key(NamedTuple):
    """A sequence of words: its start, and its step, which is odd."""

    state: int
    gamma: int


def key_of(seed: int, stream: int = 0) -> Key:
    """The key of a seed and a stream, computed as SplitMix computes the key of a generator that it splits off."""
    start = _hash(seed & _MASK) + stream * _GOLDEN & _MASK
    gamma = _hash(start ^ _MASK) | 1
    if (gamma ^ gamma >> 1).bit_count() < 24:  # the bits of the step are too regular
        gamma ^= 0xAAAAAAAAAAAAAAAA
    return Key(_hash(start), gamma)


def _hash(z: int) -> int:
    z = (z ^ z >> 32) * _LEA & _MASK
    z = (z ^ z >> 32) * _LEA & _MASK
    return z ^ z >> 32


@cached(maxsize=1024)
def _as_tensor(value: float, dtype: torch.dtype) -> Any:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device="cpu")


def _as_number(value: float, dtype: torch.dtype) -> Any:
    return value


class Words:
    """Some words, to be computed in place.

    ``all`` is int64[n], ``halves`` is the same memory as int32[2n], and ``ramp`` is 0, 1, ... as int64[n].
    ``number(value, dtype)`` is a number as an operand for tensors of a dtype: on a CPU a cached 0-d tensor, so that
    torch does not make one per call.
    """

    __slots__ = ("_high", "_low", "_multiplier", "all", "halves", "number", "ramp")

    def __init__(self, words: Tensor, ramp: Tensor, number: Callable[[float, torch.dtype], Any] = _as_number) -> None:
        self.all = words
        self.halves = words.view(torch.int32)
        self._low, self._high = self.halves[::2], self.halves[1::2]
        self._multiplier = number(_SIGNED_LEA, torch.int64)
        self.ramp = ramp
        self.number = number

    def hash(self, first: int, gamma: int, counters: Tensor | None = None) -> None:
        """Write the hashes of ``first + counter * gamma``. The counters are the ramp if none are given."""
        low, high, words, multiplier = self._low, self._high, self.all, self._multiplier
        torch.add(first, self.ramp if counters is None else counters, alpha=gamma, out=words)
        low.bitwise_xor_(high)
        words.mul_(multiplier)
        low.bitwise_xor_(high)
        words.mul_(multiplier)
        low.bitwise_xor_(high)


class _CachedMemory:
    """Memory for a chunk of words on the CPU, kept from draw to draw, and its views for some lengths."""

    __slots__ = ("_ramp", "_views", "_words")

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self._words, self._ramp = torch.empty(_CHUNK, dtype=torch.int64, device="cpu"), _ramp()
        self._views: dict[int, Words] = {}

    def hashed(self, count: int, first: int, gamma: int, counters: Tensor | None) -> Words:
        """The words of ``count`` counters, which may be overwritten."""
        view = self._views.get(count)
        if view is None:
            if len(self._views) == _VIEWS:
                self._views.clear()
            with torch.inference_mode(False):
                view = self._views[count] = Words(self._words[:count], self._ramp[:count], _as_tensor)
        view.hash(first, gamma, counters)
        return view


class _FreshMemory:
    """Memory for one draw, on another device or under a dispatch mode."""

    __slots__ = ("_ramp", "_words")

    def __init__(self, count: int, device: torch.device) -> None:
        self._words = torch.empty(count, dtype=torch.int64, device=device)
        self._ramp = torch.arange(count, device=device)

    def hashed(self, count: int, first: int, gamma: int, counters: Tensor | None) -> Words:
        """The words of ``count`` counters, which may be overwritten."""
        words = Words(self._words[:count], self._ramp[:count])
        words.hash(first, gamma, counters)
        return words


class _GpuMemory:
    """A draw on a GPU: one kernel makes the words."""

    __slots__ = ("_ramp",)

    def __init__(self, count: int, device: torch.device) -> None:
        self._ramp = torch.arange(count, device=device)

    def hashed(self, count: int, first: int, gamma: int, counters: Tensor | None) -> Words:
        """The words of ``count`` counters."""
        ramp = self._ramp[:count]
        return Words(_words_on_gpu()(ramp if counters is None else counters, first=first, gamma=gamma), ramp)


@cached
def _words_on_gpu() -> Callable[..., Tensor]:
    hashing = "z = (z ^ (z >> 32)) * m; z = (z ^ (z >> 32)) * m; z ^= z >> 32;"
    kernel: Callable[..., Tensor] = elementwise_kernel(
        "template <typename T> T words(T counter, T first, T gamma) {"
        f" unsigned long long m = {_LEA}ULL, z = (unsigned long long)first;"
        f" z += (unsigned long long)counter * (unsigned long long)gamma; {hashing} return (T)z; }}",
        first=0,
        gamma=0,
    )
    return kernel


_VIEWS: Final = 32
#: memory that no thread uses; a thread that draws takes one out, or makes another
_FREE: Final[list[_CachedMemory]] = []


@cached
def _ramp() -> Tensor:
    return torch.arange(_CHUNK, device="cpu")


def words(counters: Tensor, key: Key) -> Tensor:
    """The words of some counters."""
    hashed = Words(torch.empty_like(counters), counters)
    hashed.hash(_signed(key.state + key.gamma), _signed(key.gamma))
    return hashed.all


def derived(key: Tensor, number: int | Tensor, purpose: int) -> Tensor:
    """The new key for a number, or one for each of several numbers: word ``number`` of a sequence that ``key`` and
    ``purpose`` give.

    ``key`` may belong to a transform of torch, or have another value on each rank.
    """
    state = _hashed(key + _signed(purpose * _GOLDEN & _MASK))
    if isinstance(number, int):
        return _hashed(state + _signed((number + 1) * _GOLDEN & _MASK))
    return _hashed(state + (number + 1) * _signed(_GOLDEN))


def _hashed(z: Tensor) -> Tensor:
    """The hash of words, as a new tensor."""
    for multiplier in (_SIGNED_LEA, _SIGNED_LEA, 1):
        z = (z ^ (z >> 32 & 0xFFFFFFFF)) * multiplier
    return z


def _signed(word: int) -> int:
    """64 bits as a signed integer, as torch has them."""
    return (word + (1 << 63) & _MASK) - (1 << 63)


_SIGNED_LEA: Final = _signed(_LEA)


class Block(NamedTuple):
    """The place of a block in its global tensor, whose shape is ``whole``."""

    whole: Shape
    offset: Shape
    shape: Shape


@dataclass(frozen=True, slots=True)
class Distribution:
    """A function from words to elements of ``dtype``: each word becomes ``group`` elements.

    ``fill(words, out)`` writes the elements of the words into a contiguous ``out``. It may overwrite the words.
    """

    dtype: torch.dtype
    group: int  # 1 or 2
    fill: Callable[[Words, Tensor], object]


@step
def draw(block: Block, law: Distribution, seed: int | Tensor, device: torch.device, stream: int = 0) -> Tensor:
    """The random elements of a block. They depend on the place in the global tensor, and not on the cut or the rank.

    A ``seed`` that is a tensor is read when the numbers are drawn. Ranks with different seeds draw different numbers.
    """
    if type(seed) is int and not transforms_active():
        return _drawn(block, law, seed, device, stream)
    with outside_transforms():  # a transform would wrap the result, and a record does not know wrapped values
        if isinstance(seed, FakeTensor):
            return torch.empty(block.shape, dtype=law.dtype, device=device)
        return per_block(lambda rank_seed: _drawn(block, law, int(rank_seed), device, stream), seed)


def _drawn(block: Block, law: Distribution, seed: int, device: torch.device, stream: int) -> Tensor:
    """The elements of a block: of one run of consecutive elements, or of several runs of one length."""
    run = _run(block)
    if not run.length:
        return torch.empty(block.shape, dtype=law.dtype, device=device)
    key, group = key_of(seed, stream), law.group
    if run.single:
        first, skipped = divmod(run.start, group)
        count = (skipped + run.length - 1) // group + 1
        values = _groups(first, count, law, key, device)
        if count * group != run.length:
            values = values[skipped : skipped + run.length].clone()  # without the memory of skipped elements
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
    """The runs of a block: elements that are consecutive in the global tensor."""

    dim: int  # a run is one index of the dims before this one
    length: int  # of each run; 0 if the block is empty
    start: int  # the number of the block's first element in the global tensor
    single: bool  # the block is one run


@cached
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
    """The number of each run's first element, and its place in its group; None if the places of the runs differ."""
    starts = torch.full((), run.start, dtype=torch.int64, device=device)
    runs = list(zip(block.shape[: run.dim], _strides(block.whole), strict=False))
    for n, stride in runs:
        starts = starts.unsqueeze(-1) + torch.arange(n, device=device) * stride
    same = all(stride % group == 0 or n == 1 for n, stride in runs)
    return starts.view(-1), run.start % group if same else None


def _groups(groups: int | Tensor, number: int, law: Distribution, key: Key, device: torch.device) -> Tensor:
    """The elements of ``number`` groups, in a row. ``groups`` is the first of consecutive groups, or has them all."""
    out = torch.empty(number * law.group, dtype=law.dtype, device=device)
    chunk = _CHUNK if device.type == "cpu" else _CHUNK_ELSEWHERE
    memory = _memory(min(number, chunk), device)
    gamma = _signed(key.gamma)
    for at in range(0, number, chunk):
        count = min(number - at, chunk)
        if isinstance(groups, int):
            first, counters = _signed(key.state + (groups + at + 1) * key.gamma), None
        else:
            first, counters = _signed(key.state + key.gamma), groups[at : at + count]
        chunk_words = memory.hashed(count, first, gamma, counters)
        law.fill(chunk_words, out if count == number else out[at * law.group : (at + count) * law.group])
    if type(memory) is _CachedMemory:
        _FREE.append(memory)
    return out


def _memory(count: int, device: torch.device) -> _CachedMemory | _FreshMemory | _GpuMemory:
    """Memory for a draw whose chunks have at most ``count`` words."""
    if count_dispatch_modes() or device.type not in ("cpu", "cuda"):
        return _FreshMemory(count, device)
    if device.type == "cuda":
        return _GpuMemory(count, device)
    try:
        return _FREE.pop()
    except IndexError:
        return _CachedMemory()
