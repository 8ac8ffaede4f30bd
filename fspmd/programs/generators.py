"""Generators of random numbers while a function is recorded: draws are steps, and seeds must not be set."""

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
    """torch's own generator, and those that the function is given or reaches.

    A draw is a step of the record. A seed or a state that the function reads is a constant of it.
    """

    def __init__(self, given: Iterable[Any], is_fake: bool) -> None:
        """``given``: values with generators among them. ``is_fake``: steps draw nothing while they are recorded."""
        found = [torch.default_generator, *(one for one in given if issubclass(type(one), torch.Generator))]
        # by number, since torch gives dispatch another object
        self._known: dict[int, torch.Generator] = {_number(one): one for one in found}
        self._seeds = {key: one.initial_seed() for key, one in self._known.items()}
        self._is_fake = is_fake

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within, each has drawn one number more. So a generator whose state is that of its seed was seeded within."""
        with self.kept(draws=True):
            yield

    @contextmanager
    def kept(self, draws: bool = False) -> Iterator[None]:
        """The generators are afterwards in the states that they have now. ``draws``: each draws one number first."""
        with _plainly():
            every = kept_states()
            states: dict[int, Tensor] = {key: one.get_state() for key, one in self._known.items()}
            for one in self._known.values() if draws else ():
                torch.empty((), device=one.device).uniform_(generator=one)
        try:
            yield
        finally:
            with _plainly():
                go_on(every)
                for key, one in self._known.items():
                    one.set_state(states[key])

    def check_draw(self, arguments: Iterable[Any]) -> None:
        """Raise `RecordError` where a step draws from a generator that the function makes, or has seeded."""
        if self._is_fake:  # else steps that ran have set seeds, and set them back
            self._check_seeds()
        for generator in generators_of(arguments):
            if _number(generator) not in self._known:
                raise RecordError(
                    "jit cannot record random numbers of a torch.Generator that is made within the function, or lies "
                    "too deep in its closure to be found: it could not tell whether the generator is made or "
                    f"seeded anew in each call; pass it as an argument, or close over it{line()}"
                )

    def check_end(self) -> None:
        """Raise `RecordError` where the function has seeded a generator, be it to the seed that it had."""
        self._check_seeds()
        with _plainly():
            for one in self._known.values() if self._is_fake else ():
                fresh = torch.Generator(one.device).manual_seed(one.initial_seed())
                if torch.equal(fresh.get_state(), one.get_state()):
                    raise _sets_state()

    def _check_seeds(self) -> None:
        if any(one.initial_seed() != self._seeds[key] for key, one in self._known.items()):
            raise _sets_state()


def _sets_state() -> RecordError:
    return RecordError(
        "jit cannot record a function that sets the state of a generator, as torch.manual_seed and set_rng_state do; "
        f"do it outside of the jitted function{line()}"
    )


@contextmanager
def _plainly() -> Iterator[None]:
    """Within, torch functions are no steps, and tensors have values."""
    with outside_transforms(), disable_dispatch_modes(), DisableTorchFunction():
        yield


def _number(generator: Any) -> int:
    return generator._cdata  # type: ignore[no-any-return]


def generators_of(values: Iterable[Any]) -> Iterator[torch.Generator]:
    """Generators among arguments, and in containers of them."""
    for value in values:
        if isinstance(value, torch.Generator):
            yield value
        elif isinstance(value, dict):
            yield from generators_of(value.values())
        elif type(value) in (list, tuple):
            yield from generators_of(value)
