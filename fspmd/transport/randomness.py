"""Random numbers that differ from rank to rank where a value varies, alike on every transport.

A random op on a rank-varying value draws one seed from the ordinary generator (equal on all ranks, so all ranks stay
in step) and gives each coordinate its own stream, a hash of that seed and the coordinate's index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from fspmd.transport.frame import Frame

_MASK = (1 << 63) - 1


def draw_seed() -> int:
    """One seed from the default CPU generator, which it advances by one draw."""
    with torch._C.DisableTorchFunction():
        return int(torch.randint(_MASK, (), dtype=torch.int64))


def fold_in(seed: int, index: int) -> int:
    """The seed of one coordinate's stream: splitmix64 of (seed, index)."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) & _MASK


class Streams:
    """The generator states of the coordinates of a frame, within one random torch function."""

    def __init__(self, held: Frame, seed: int) -> None:
        self.frame = held
        self.seed = seed
        self.states: dict[int, list[torch.Tensor]] = {}


_STREAMS: ContextVar[Streams | None] = ContextVar("fspmd_streams", default=None)


def _get_states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _set_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


@contextmanager
def one_stream(seed: int, index: int) -> Iterator[None]:
    """Draw from the stream of one coordinate, then go on with the ordinary generator as it was."""
    with torch._C.DisableTorchFunction():
        before = _get_states()
        torch.manual_seed(fold_in(seed, index))
    try:
        yield
    finally:
        with torch._C.DisableTorchFunction():
            _set_states(before)


@contextmanager
def streams(held: Frame, seed: int) -> Iterator[None]:
    """Simulated random ops inside draw from the streams of ``seed`` over the coordinates of ``held``."""
    token = _STREAMS.set(Streams(held, seed))
    try:
        yield
    finally:
        _STREAMS.reset(token)


@contextmanager
def per_rank_generators(held: Frame) -> Iterator[Callable[[int], None]]:
    """Yields ``switch(i)``, which makes the ordinary generator that of the i-th coordinate of ``held``."""
    active = _STREAMS.get()
    if active is None or active.frame is not held:
        active = Streams(held, draw_seed())
    current: list[int] = []

    def switch(index: int) -> None:
        if current:
            active.states[current.pop()] = _get_states()
        current.append(index)
        if index in active.states:
            _set_states(active.states[index])
        else:
            torch.manual_seed(fold_in(active.seed, index))

    before = _get_states()
    try:
        yield switch
    finally:
        if current:
            active.states[current.pop()] = _get_states()
        _set_states(before)
