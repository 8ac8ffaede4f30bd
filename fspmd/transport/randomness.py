"""Random numbers that differ from rank to rank where a value varies, and are the same on every transport.

A random op on a varying value draws one seed from the ordinary generator. The seed is equal on all ranks, so their
generators stay equal. Each coordinate has its own stream, seeded by a hash of the seed and its index. Without streams
every rank draws the numbers of the ordinary generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch

from fspmd.torch_internals import DisableTorchFunction, count_dispatch_modes, transforms_active
from fspmd.tracing import outside_transforms, state
from fspmd.transport.frame import Frame, spread

_MASK = (1 << 63) - 1
_CPU = torch.device("cpu")
#: memory for a seed that no thread uses
_FREE: Final[list[torch.Tensor]] = []


@state
def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw one seed from a generator. The default is the generator of the CPU."""
    if generator is None and not transforms_active() and not count_dispatch_modes():
        try:
            seed = _FREE.pop()
        except IndexError:
            with torch.inference_mode(False):
                seed = torch.empty((), dtype=torch.int64, device="cpu")
        with DisableTorchFunction():
            drawn = seed.random_(_MASK).item()
        _FREE.append(seed)
        return int(drawn)
    device = _CPU if generator is None else generator.device
    with DisableTorchFunction(), outside_transforms():
        return int(torch.empty((), dtype=torch.int64, device=device).random_(_MASK, generator=generator))


def fold_in(seed: int, index: int) -> int:
    """Return the seed of the stream of a coordinate: splitmix64 of (seed, index)."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) & _MASK


class Streams:
    """The streams of a seed for the coordinates of a frame, within one random torch function."""

    def __init__(self, frame: Frame, seed: int) -> None:
        self.frame = frame
        self.seed = seed
        self.states: dict[tuple[Frame, int], list[torch.Tensor]] = {}  # the states of streams that were used before


_STREAMS: ContextVar[Streams | None] = ContextVar("fspmd_streams", default=None)


def _get_states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _seed(seed: int) -> None:
    """Seed the generators whose states are kept.

    ``torch.manual_seed`` would leave the seed for devices that begin later, and spends a millisecond on that.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def _set_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


@contextmanager
def one_stream(seed: int, index: int) -> Iterator[None]:
    """Draw from the stream of a coordinate in a ``with`` block, and then reset the ordinary generator."""
    before = begin_stream(seed, index)
    try:
        yield
    finally:
        go_on(before)


@state
def begin_stream(seed: int, index: int) -> Any:
    """Turn the generator into the stream of a coordinate, and return its previous state."""
    with DisableTorchFunction():
        before = _get_states()
        _seed(fold_in(seed, index))
    return GeneratorStates(before)


@state
def go_on(before: GeneratorStates) -> None:
    """Reset the generator to a previous state."""
    with DisableTorchFunction():
        _set_states(before.states)


@state
def kept_states() -> Any:
    """Return the state of the generator."""
    with DisableTorchFunction():
        return GeneratorStates(_get_states())


@contextmanager
def kept() -> Iterator[None]:
    """Keep the states of the generators over a ``with`` block."""
    before = kept_states()
    try:
        yield
    finally:
        go_on(before)


@dataclass(frozen=True, slots=True)
class GeneratorStates:
    """The states of the generators of all devices in use."""

    states: list[torch.Tensor]


@contextmanager
def streams(frame: Frame, seed: int) -> Iterator[None]:
    """Let simulated random ops in a ``with`` block draw from streams of ``seed``, one per coordinate of ``frame``."""
    token = _begin_streams(frame, seed)
    try:
        yield
    finally:
        _end_streams(token)


@state
def _begin_streams(frame: Frame, seed: int) -> Any:
    return _STREAMS.set(Streams(frame, seed))


@state
def _end_streams(token: Any) -> None:
    _STREAMS.reset(token)


Switch = Callable[[int], None]


@contextmanager
def per_rank_generators(frame: Frame, generator: torch.Generator | None = None) -> Iterator[Switch]:
    """Yield ``switch(i)``, which turns the generator into that of the i-th coordinate of ``frame``."""
    active = _STREAMS.get()
    if generator is not None:
        start = generator.get_state()

        def rewind(index: int) -> None:
            generator.set_state(start)

        yield rewind
    elif active is None or not set(active.frame.axes) <= set(frame.axes):
        before = _get_states()
        yield lambda index: _set_states(before)
    else:
        yield from _stream_per_rank(active, frame)


def _stream_per_rank(active: Streams, frame: Frame) -> Iterator[Switch]:
    place = spread(active.frame, frame)
    current: list[int] = []

    def leave() -> None:
        if current:
            active.states[frame, current.pop()] = _get_states()

    def switch(index: int) -> None:
        leave()
        current.append(index)
        known = active.states.get((frame, index))
        if known is None:
            _seed(fold_in(active.seed, place[index]))
        else:
            _set_states(known)

    before = _get_states()
    try:
        yield switch
    finally:
        leave()
        _set_states(before)
