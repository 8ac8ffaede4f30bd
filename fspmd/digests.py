"""64-bit digests of tensors. A digest depends on each bit and its place, and reads the memory about once.

The words of a tensor, of 32 bits, lie in rows of *lanes*. Each lane runs over its words: it multiplies by an odd
number, and adds the word. So low bits reach all higher ones. Every second row is added as words of 16 bits, to lanes
that have moved by one. The high half of a lane then becomes a low half, so that its bits reach the others as well. At
the end each lane is hashed to 64 bits with its number, and the hashes are summed. One change is always seen. Processors
multiply words of 32 bits as fast as they read them, and those of 64 bits at half that speed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.torch_internals import DisableTorchFunction

_LANES: Final = 1 << 17  # a core's cache has room for them
_LANES_ELSEWHERE: Final = 1 << 22
_SMALL: Final = 1 << 16  # bytes on the CPU that hashlib takes sooner than torch
_FEW: Final = 64  # bytes that a list of numbers gives sooner than their memory
_STEP: Final = 0x2C9277B5  # odd
_STEP_OF_HALVES: Final = 0x2C95  # odd
_LEA: Final = 0xDABA0B6EB09322E3 - (1 << 64)
_GOLDEN: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_MASK: Final = (1 << 64) - 1


def digests(tensors: Sequence[Tensor]) -> list[int]:
    """The digest of the bits of each dense tensor, an int64. NaNs and -0.0 count as their bits.

    Elements count in row-major order, whatever the strides are. The shape and the dtype count only by the number of
    bytes. The digest of a tensor is the same on all devices of a type.

    >>> x = torch.zeros(3)
    >>> a, b, c = digests([x, x.clone(), -x])
    >>> a == b, a == c
    (True, False)
    """
    parts: list[Any] = []
    with torch.no_grad(), DisableTorchFunction():
        for x in tensors:
            data = raw_bytes(x)
            is_small = data.numel() <= _SMALL and data.device.type == "cpu"
            parts.append(_of_memory(data) if is_small else _of_words(data))
        for device in {x.device for x in parts if isinstance(x, Tensor)}:
            places = [i for i, x in enumerate(parts) if isinstance(x, Tensor) and x.device == device]
            for i, number in zip(places, torch.stack([parts[i] for i in places]).tolist(), strict=True):
                parts[i] = number  # one wait for all
    return parts


def raw_bytes(x: Tensor) -> Tensor:
    """The bytes of a dense tensor in row-major order, uint8[n]; a view if that is possible."""
    flat = x.detach().resolve_conj().resolve_neg().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # a dim of size 1 may have any stride
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def _of_memory(data: Tensor) -> int:
    return of_bytes(bytes(data.tolist()) if data.numel() <= _FEW else bytes_of(data))


def bytes_of(x: Tensor) -> bytearray:
    """The bytes of a contiguous tensor of the host. Torch itself would ask NumPy for them."""
    data = bytearray(x.nbytes)
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(x.view(-1).view(torch.uint8))
    return data


def of_bytes(data: bytes | bytearray) -> int:
    """The digest of bytes, an int64."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _of_words(data: Tensor) -> Tensor:
    """The digest of bytes in the memory of a device, int64[]."""
    lanes = 1 << max(10, (data.numel() >> 6).bit_length())  # some 16 rows
    lanes = min(lanes, _LANES if data.device.type == "cpu" else _LANES_ELSEWHERE)
    if data.storage_offset() % 4:
        data = data.clone()
    whole, rest = divmod(data.numel(), 4 * lanes)
    rows = data[: whole * lanes * 4].view(torch.int32).view(whole, lanes)
    halves = rows.view(torch.int16)
    states = [_Lanes(lanes, data.device), _Lanes(lanes, data.device)]
    for i, (row, row_of_halves) in enumerate(zip(rows.unbind(), halves.unbind(), strict=True)):
        before, after = states[i % 2], states[1 - i % 2]
        if i % 2:
            before.last.copy_(before.first)
            torch.add(row_of_halves, before.moved, alpha=_STEP_OF_HALVES, out=after.halves)
        else:
            torch.add(row, before.words, alpha=_STEP, out=after.words)
    state = states[whole % 2]
    if rest:
        last = data.new_zeros(-(-rest // 4) * 4)
        last[:rest] = data[-rest:]
        part = state.words[: len(last) // 4]
        torch.add(last.view(torch.int32), part, alpha=_STEP, out=part)
    words = state.words.to(torch.int64).add_(_numbers(lanes, data.device), alpha=_GOLDEN)
    both = words.view(torch.int32)
    low, high = both[::2], both[1::2]
    for _ in range(2):
        low.bitwise_xor_(high)
        words.mul_(_LEA)
    low.bitwise_xor_(high)
    return words.sum().add_(data.numel())


class _Lanes:
    """The state of all lanes, its halves, and its halves moved by one: the first follows the last."""

    __slots__ = ("first", "halves", "last", "moved", "words")

    def __init__(self, lanes: int, device: torch.device) -> None:
        memory = torch.zeros(lanes + 1, dtype=torch.int32, device=device)
        halves = memory.view(torch.int16)
        self.words, self.halves, self.moved = memory[:lanes], halves[: 2 * lanes], halves[1 : 2 * lanes + 1]
        self.first, self.last = halves[:1], halves[2 * lanes : 2 * lanes + 1]


@cached(maxsize=16)
def _numbers(lanes: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(1, 1 + lanes, device=device)


class Difference(NamedTuple):
    """A difference between two tensors of one shape and dtype."""

    elements: int  # how many have other bits
    largest: float  # the largest distance; nan where one is a NaN
    first: int  # the place of the first of them, row-major


def difference(a: Tensor, b: Tensor) -> Difference | None:
    """The difference between two dense tensors of one shape and dtype; None if all bits are equal.

    >>> difference(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([-0.0, 1.0, 2.5]))
    Difference(elements=2, largest=0.5, first=0)
    """
    with torch.no_grad(), DisableTorchFunction():
        width = a.element_size()
        differs = (raw_bytes(a).view(-1, width) != raw_bytes(b).view(-1, width)).any(-1)
        count = int(differs.sum())
        if not count:
            return None
        wide = torch.complex128 if a.is_complex() else torch.float64
        x, y = (t.reshape(-1)[differs].to(wide) for t in (a, b))
        return Difference(count, float((x - y).abs().max()), int(differs.nonzero()[0]))


def mixed(*numbers: int) -> int:
    """A 64-bit number that depends on all numbers and their order, in the range of int64.

    >>> mixed(1, 2) == mixed(1, 2), mixed(1, 2) == mixed(2, 1)
    (True, False)
    """
    state = 0
    for number in numbers:
        state = (state ^ number & _MASK) * (_LEA & _MASK) & _MASK
        state = (state ^ state >> 32) * (_LEA & _MASK) & _MASK
        state ^= state >> 32
    return state - (1 << 64) if state >> 63 else state
