"""Generators of random numbers while a program is recorded: which are known, and whether they are left alone."""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fspmd.errors import RecordError
from fspmd.programs.escapes import constant_of, line
from fspmd.programs.reach import reached
from fspmd.tracing import outside_transforms

_SECRET: Final = int.from_bytes(b"secrets", "big")
_FEW: Final = 16  # numbers of a tensor that are looked at for seeds


class Generators:
    """Whether generators are left alone between the steps that draw from them.

    Meanwhile each says that it was seeded by a number that nobody knows, so that whoever seeds one, or sets it to a
    state from elsewhere, is found out, though it be to the state that it had: the same call would set it in a replay,
    too, when it has another. It draws the numbers that it would draw, so other threads may draw from it.
    """

    def __init__(self, given: Iterable[torch.Generator]) -> None:
        # by number, since torch gives dispatch another object
        self.known: dict[int, torch.Generator] = {_number(one): one for one in (torch.default_generator, *given)}
        self.python = _python_states()
        self.seeds: dict[int, int] = {}  # the true ones
        self.left: dict[int, Tensor] = {}  # the states in which a step left them
        self.earlier: dict[int, set[bytes]] = {key: set() for key in self.known}  # that steps left them in

    def hide(self) -> None:
        """The record begins, or a step has ended."""
        for key, one in self.known.items():
            if (seed := one.initial_seed()) != _SECRET:
                self.seeds[key] = seed
                _name_seed(one, _SECRET)
            self.left[key] = _state(one)
            self.earlier[key].add(_bytes(self.left[key]))

    def restore(self) -> None:
        """Whatever was set since, they are left alone again."""
        for key, one in self.known.items():
            one.set_state(self.left[key])

    @contextmanager
    def unread(self, check: Callable[[RecordError], None]) -> Iterator[None]:
        """Within, ``torch.initial_seed()`` asks ``check``, of a refusal, whether to give the seed."""
        key, of_torch = _number(torch.default_generator), cast(Any, torch.random)

        def seed() -> int:
            check(_read())
            return self.seeds[key]

        of_torch.default_generator = _Unread(seed)
        try:
            yield
        finally:
            of_torch.default_generator = torch.default_generator

    def begin_step(self) -> None:
        """A step may draw."""
        for key, one in self.known.items():
            if one.device.type != "cpu":  # of others the seed is a part of what the numbers follow from
                _name_seed(one, self.seeds[key])

    def end(self) -> None:
        """The record has ended."""
        for key, one in self.known.items():
            if one.initial_seed() == _SECRET:
                _name_seed(one, self.seeds[key])

    def check(self, used: Iterable[Any] = ()) -> None:
        """Raises where somebody has set one between steps, or where a step draws from one that is not known."""
        if not all(map(self._is_left_alone, self.known)):
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

    def _is_left_alone(self, key: int) -> bool:
        """Whether nobody has seeded one, or set it back; it may have gone on, if another thread draws from it."""
        one = self.known[key]
        state = _bytes(_state(one))
        return one.initial_seed() == _SECRET and (state == _bytes(self.left[key]) or state not in self.earlier[key])

    def check_unread(self, value: Any) -> None:
        """Raises for a seed or a state that somebody has read between steps."""
        if isinstance(value, Tensor):
            with torch._C.DisableTorchFunction():
                if value.dtype is torch.uint8 and value.numel() == torch.default_generator.get_state().numel():
                    read = _seed_of(value) == _SECRET
                elif value.dtype is torch.int64 and 0 < value.numel() <= _FEW:
                    read = bool((value == _SECRET).any())
                else:
                    return
        else:
            read = value == _SECRET
        if read:
            raise _read()

    def check_python(self) -> None:
        """Raises where Python's own generator, or NumPy's, was used."""
        for name, state in _python_states().items():
            if state != self.python.get(name, state):
                raise constant_of(f"numbers of {name}, which torch does not know")


class _Unread:
    """Stands for the default generator in `torch.random`, so that ``torch.initial_seed()`` gives no secret away.

    Who records is refused the true seed, before anything can be made of it; other threads are given it.
    """

    def __init__(self, seed: Callable[[], int]) -> None:
        self.initial_seed = seed

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)


def _read() -> RecordError:
    return constant_of("the seed or the state of a generator, which another run has otherwise")


def _number(generator: Any) -> int:
    return generator._cdata  # type: ignore[no-any-return]


def _state(generator: torch.Generator) -> Tensor:
    with outside_transforms(), _disable_current_modes(), torch._C.DisableTorchFunction():
        return generator.get_state()


def _bytes(state: Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def _name_seed(generator: torch.Generator, seed: int) -> None:
    """Have it say that it was seeded by ``seed``, which is what its state begins with, and let all else be."""
    with outside_transforms(), _disable_current_modes(), torch._C.DisableTorchFunction():
        state = generator.get_state()  # from here on nothing lets another thread run, which may draw from it
        ctypes.c_uint64.from_address(state.data_ptr()).value = seed
        generator.set_state(state)


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
