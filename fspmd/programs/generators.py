"""Generators of random numbers while a function is recorded. Draws are steps; the function must not set seeds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fspmd.errors import RecordError
from fspmd.programs.refusals import line
from fspmd.torch_internals import DisableTorchFunction, disable_dispatch_modes
from fspmd.tracing import outside_transforms
from fspmd.transport.randomness import go_on, kept_states


class Generators:
    """torch's default generator, and the generators that the function gets or reaches.

    A draw is a step of the record. A seed or a state that the function reads is a constant of the record.
    """

    def __init__(self, given: Iterable[Any], is_fake: bool) -> None:
        """``given``: values with generators among them. ``is_fake``: steps draw nothing while they are recorded."""
        generators = [torch.default_generator, *(x for x in given if issubclass(type(x), torch.Generator))]
        # by number, since torch passes another object to dispatch
        self._known: dict[int, torch.Generator] = {_number(generator): generator for generator in generators}
        self._seeds = {key: generator.initial_seed() for key, generator in self._known.items()}
        self._is_fake = is_fake

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within, each generator has drawn one number more, so its state equals that of its seed only after seeding."""
        with self.kept(draws=True):
            yield

    @contextmanager
    def kept(self, draws: bool = False) -> Iterator[None]:
        """Restore the states of the generators at the end. ``draws``: each draws one number at the beginning."""
        with _unrecorded():
            default_states = kept_states()
            states: dict[int, Tensor] = {key: generator.get_state() for key, generator in self._known.items()}
            for generator in self._known.values() if draws else ():
                torch.empty((), device=generator.device).uniform_(generator=generator)
        try:
            yield
        finally:
            with _unrecorded():
                go_on(default_states)
                for key, generator in self._known.items():
                    generator.set_state(states[key])

    def check_draw(self, arguments: Iterable[Any]) -> None:
        """Raise `RecordError` where a step draws from a generator that the function has made or seeded."""
        if self._is_fake:  # steps that run on values set seeds, and restore them
            self._check_seeds()
        for generator in generators_of(arguments):
            if _number(generator) not in self._known:
                raise RecordError(
                    "jit cannot record random numbers of a torch.Generator that the function makes, or that lies too "
                    "deep in its closure to be found, since the function might make or seed it anew in each call; "
                    f"pass it as an argument, or close over it{line()}"
                )

    def check_end(self) -> None:
        """Raise `RecordError` where the function has seeded a generator, also where the seed is the same as before."""
        self._check_seeds()
        with _unrecorded():
            for generator in self._known.values() if self._is_fake else ():
                seeded = torch.Generator(generator.device).manual_seed(generator.initial_seed())
                if torch.equal(seeded.get_state(), generator.get_state()):
                    raise _sets_state()

    def _check_seeds(self) -> None:
        if any(generator.initial_seed() != self._seeds[key] for key, generator in self._known.items()):
            raise _sets_state()


def _sets_state() -> RecordError:
    return RecordError(
        "jit cannot record a function that sets the state of a generator, as torch.manual_seed and set_rng_state do; "
        f"set it outside of the jitted function{line()}"
    )


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Within, torch functions are no steps, and tensors have values."""
    with outside_transforms(), disable_dispatch_modes(), DisableTorchFunction():
        yield


def _number(generator: Any) -> int:
    return generator._cdata  # type: ignore[no-any-return]


def generators_of(values: Iterable[Any]) -> Iterator[torch.Generator]:
    """The generators among values, and in their lists, tuples and dicts."""
    for value in values:
        if isinstance(value, torch.Generator):
            yield value
        elif isinstance(value, dict):
            yield from generators_of(value.values())
        elif type(value) in (list, tuple):
            yield from generators_of(value)
