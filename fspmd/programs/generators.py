"""Which generators of random numbers a recorded function may draw from, and that it leaves their seeds alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fspmd.errors import RecordError
from fspmd.programs.impurities import line
from fspmd.torch_internals import DisableTorchFunction, disable_dispatch_modes
from fspmd.tracing import outside_transforms
from fspmd.transport.randomness import go_on, kept_states


class Generators:
    """torch's own, and those that the function is given or reaches.

    A draw is a step of the record. What a function reads of a seed or a state is a constant of it.
    """

    def __init__(self, given: Iterable[Any], imagines: bool) -> None:
        """Those among what is ``given``. ``imagines``: steps draw nothing while the function is recorded."""
        found = [torch.default_generator, *(one for one in given if issubclass(type(one), torch.Generator))]
        # by number, since torch gives dispatch another object
        self.known: dict[int, torch.Generator] = {_number(one): one for one in found}
        self.imagines = imagines
        self.note()

    def note(self) -> None:
        """The seeds are those that steps have set."""
        self._seeds = {key: one.initial_seed() for key, one in self.known.items()}

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Within, each has drawn one number, so that one whose state is that of its seed was seeded there."""
        if not self.imagines:
            yield
            return
        before = self._states()
        with _plainly():
            for one in self.known.values():
                torch.empty((), device=one.device).uniform_(generator=one)
        after = self._states()
        try:
            yield
        finally:
            with _plainly():
                for key, state in self._states().items():
                    if torch.equal(state, after[key]):  # else another thread has drawn: let it go on
                        self.known[key].set_state(before[key])

    def check(self, used: Iterable[Any] = ()) -> None:
        """Raises where somebody has seeded one between steps, or where a step draws from one that is not known."""
        if any(one.initial_seed() != self._seeds[key] for key, one in self.known.items()):
            raise _sets()
        for generator in used:
            if _number(generator) not in self.known:
                raise RecordError(
                    "jit cannot record random numbers of a torch.Generator that is made within the function, or lies "
                    "too deep in what it closes over to be found before, since it could not tell whether it is made or "
                    f"seeded anew each time; pass it as an argument, or close over it{line()}"
                )

    def finish(self) -> None:
        """Raises where somebody has seeded one, to the seed that it had, too."""
        self.check()
        if self.imagines:
            for one in self.known.values():
                fresh = torch.Generator(one.device).manual_seed(one.initial_seed())
                with _plainly():
                    if torch.equal(fresh.get_state(), one.get_state()):
                        raise _sets()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What runs inside leaves all of them as they are."""
        every, before = kept_states(), self._states()
        try:
            yield
        finally:
            with _plainly():
                go_on(every)
                for key, one in self.known.items():
                    one.set_state(before[key])

    def _states(self) -> dict[int, Tensor]:
        with _plainly():
            return {key: one.get_state() for key, one in self.known.items()}


def _sets() -> RecordError:
    return RecordError(
        "jit cannot record what sets the state of a generator, as torch.manual_seed and set_rng_state do; do it "
        f"outside of the jitted function{line()}"
    )


@contextmanager
def _plainly() -> Iterator[None]:
    with outside_transforms(), disable_dispatch_modes(), DisableTorchFunction():
        yield


def _number(generator: Any) -> int:
    return generator._cdata  # type: ignore[no-any-return]


def generators_of(values: Iterable[Any]) -> list[torch.Generator]:
    """Those among arguments, and in containers of them."""
    found: list[torch.Generator] = []
    for value in values:
        if isinstance(value, torch.Generator):
            found.append(value)
        elif isinstance(value, dict):
            found += generators_of(value.values())
        elif type(value) in (list, tuple):
            found += generators_of(value)
    return found
