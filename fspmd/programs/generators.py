"""Generators of random numbers while a program is recorded: which are known, and whether they are left alone."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fspmd.errors import RecordError
from fspmd.programs.escapes import constant_of, line
from fspmd.programs.reach import reached
from fspmd.transport.randomness import outside_transforms

_FIRST_SECRET: Final = int.from_bytes(b"secrets", "big")
_FEW: Final = 16  # numbers of a tensor that are looked at for seeds


class Generators:
    """Whether generators are left alone between the steps that draw from them.

    Between steps each has a state that nobody knows, so that whoever sets one is found out, though it be to the state
    that it had: the same call would set it in a replay, too, when it has another.
    """

    def __init__(self, given: Iterable[torch.Generator]) -> None:
        # by number, since torch gives dispatch another object
        self.known: dict[int, torch.Generator] = {_number(one): one for one in (torch.default_generator, *given)}
        self.python = _python_states()
        self.own: dict[int, Tensor] = {}  # the states that they are to have
        self.secret = _FIRST_SECRET  # the seed that they have between steps
        self.before: dict[tuple[int, int], Tensor] = {}  # what they were to have at earlier ones

    def hide(self) -> None:
        """A step has ended."""
        self.secret += 1
        for key, one in self.known.items():
            self.own[key] = self.before[key, self.secret] = _state(one)
            one.manual_seed(self.secret)

    def restore(self) -> None:
        """Whatever was set since, they are left alone again."""
        for one in self.known.values():
            one.manual_seed(self.secret)

    def show(self) -> None:
        """A step, or what follows the record, begins."""
        for key, one in self.known.items():
            if self._is_hidden(key):
                one.set_state(self.own[key])

    def check(self, used: Iterable[Any] = ()) -> None:
        """Raises where somebody has set one between steps, or where a step draws from one that is not known."""
        if not all(map(self._is_hidden, self.known)):
            raise RecordError(
                "jit cannot record what sets the state of a generator, as torch.manual_seed, set_rng_state and "
                f"fork_rng do; do it outside of the jitted function{line()}"
            )
        for generator in used:
            if _number(generator) not in self.known:
                raise RecordError(
                    "jit cannot record random numbers of a torch.Generator that is made within the function, or lies "
                    "too deep in what it closes over to be found before, since it could not tell whether it is made or "
                    f"seeded anew each time; pass it as an argument, or close over it{line()}"
                )

    def check_unread(self, value: Any) -> None:
        """Raises for a seed or a state that somebody has read between steps."""
        if isinstance(value, Tensor):
            with torch._C.DisableTorchFunction():
                if value.dtype is torch.uint8 and value.numel() == torch.default_generator.get_state().numel():
                    value = _seed_of(value)
                elif value.dtype is torch.int64 and 0 < value.numel() <= _FEW:
                    value = int(value.max())
                else:
                    return
        if _FIRST_SECRET <= value <= self.secret:
            raise constant_of("the seed or the state of a generator, which another run has otherwise")

    def check_python(self) -> None:
        """Raises where Python's own generator, or NumPy's, was used."""
        for name, state in _python_states().items():
            if state != self.python.get(name, state):
                raise constant_of(f"numbers of {name}, which torch does not know")

    def _is_hidden(self, key: int) -> bool:
        """Whether one has the state that it was left with; or was left with earlier, when it was to have the same."""
        one = self.known[key]
        with outside_transforms(), _disable_current_modes(), torch._C.DisableTorchFunction():  # states have values
            was = self.before.get((key, one.initial_seed()))
            if was is None or not torch.equal(was, self.own[key]):
                return False
            return torch.equal(_state(one), _state(torch.Generator(one.device).manual_seed(one.initial_seed())))


def _number(generator: Any) -> int:
    return generator._cdata  # type: ignore[no-any-return]


def _state(generator: torch.Generator) -> Tensor:
    with outside_transforms(), torch._C.DisableTorchFunction():
        return generator.get_state()


def _python_states() -> dict[str, Any]:
    """Of the generators that are not torch's and that everybody shares."""
    found: dict[str, Any] = {"Python's module random": random.getstate()}
    numpy: Any = sys.modules.get("numpy")
    return found if numpy is None else found | {"numpy.random": pickle.dumps(numpy.random.get_state(legacy=False))}


def _seed_of(state: Tensor) -> int:
    """Of what may be the state of a generator; -1 where it is not."""
    try:
        return torch.Generator().set_state(state).initial_seed()
    except RuntimeError:
        return -1


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


def closed_over(f: Callable[..., Any]) -> list[torch.Generator]:
    """Those that a function reaches."""
    return [x for x in reached(f) if isinstance(x, torch.Generator)]
