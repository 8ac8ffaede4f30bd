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
from fspmd.transport.randomness import go_on, kept_states

_SECRET: Final = int.from_bytes(b"secrets", "big")
_FEW: Final = 16  # numbers of a tensor that are looked at for seeds
_NEAR: Final = 256  # bytes of a generator, of which it has some thousand


class Generators:
    """Whether generators are left alone between the steps that draw from them.

    Meanwhile each says that it was seeded by a number that nobody knows: a name of the place in its numbers to which
    steps have brought it. So whoever seeds one, or sets it to another state, is found out, though it be to the state
    that it had: the same call would set it in a replay, too, when it has another. Where a program is recorded without
    values, and nothing is drawn, it goes from name to name alike. It draws the numbers that it would draw, so other
    threads may draw from it.
    """

    def __init__(self, given: Iterable[torch.Generator]) -> None:
        # by number, since torch gives dispatch another object
        self.known: dict[int, torch.Generator] = {_number(one): one for one in (torch.default_generator, *given)}
        self.python = _python_states()
        self.names: dict[int, int] = {}
        self.count = 0  # of names
        self.seeds: dict[tuple[int, int], int] = {}  # the true ones, by generator and name
        self.left: dict[int, Tensor] = {}  # the states in which a step left them

    def hide(self, used: Iterable[torch.Generator] = ()) -> None:
        """The record begins, or a step has ended, which would have drawn from those ``used``."""
        drawn = set(map(_number, used))
        for key, one in self.known.items():
            state = _state(one)
            name = _seed(state)
            is_secret = (key, name) in self.seeds
            if not is_secret or key in drawn or (name == self.names[key] and _bytes(state) != _bytes(self.left[key])):
                self.count += 1
                self.seeds[key, _SECRET + self.count] = self.seeds[key, name] if is_secret else name
                name = _SECRET + self.count
                _name_seed(one, name)
            self.names[key], self.left[key] = name, _state(one)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """What a step draws inside is drawn again after it, and the states that it sets are not; but it has ended."""
        every, before = kept_states(), {key: _state(one) for key, one in self.known.items()}
        try:
            yield
        finally:
            self.hide()
            go_on(every)
            for key, one in self.known.items():
                one.set_state(before[key])
                _name_seed(one, self.names[key])
                self.left[key] = _state(one)

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
            return self.seeds[key, self.names[key]]

        before, of_torch.default_generator = of_torch.default_generator, _Unread(seed)
        try:
            yield
        finally:
            of_torch.default_generator = before

    def begin_step(self) -> None:
        """A step may draw."""
        for key, one in self.known.items():
            if one.device.type != "cpu":  # of others the seed is a part of what the numbers follow from
                _name_seed(one, self.seeds[key, self.names[key]])

    def end(self) -> None:
        """The record has ended."""
        for key, one in self.known.items():
            if (seed := self.seeds.get((key, one.initial_seed()))) is not None:
                _name_seed(one, seed)

    def check(self, used: Iterable[Any] = ()) -> None:
        """Raises where somebody has set one between steps, or where a step draws from one that is not known."""
        if any(one.initial_seed() != self.names[key] for key, one in self.known.items()):
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
                    read = self._is_name(_seed_of(value))
                elif value.dtype is torch.int64 and 0 < value.numel() <= _FEW:
                    read = any(map(self._is_name, value.flatten().tolist()))
                else:
                    return
        else:
            read = self._is_name(value)
        if read:
            raise _read()

    def _is_name(self, value: float) -> bool:
        return _SECRET < value <= _SECRET + self.count

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


def _seed(state: Tensor) -> int:
    """What the state of a generator begins with."""
    return ctypes.c_uint64.from_address(state.data_ptr()).value


def _bytes(state: Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def _name_seed(generator: torch.Generator, seed: int) -> None:
    """Have it say that it was seeded by ``seed``, and let all else be."""
    if generator.device.type == "cpu" and _SEED_AT is not None:  # its state, set anew, would undo what others draw
        ctypes.c_uint64.from_address(_number(generator) + _SEED_AT).value = seed
        return
    state = _state(generator)
    ctypes.c_uint64.from_address(state.data_ptr()).value = seed
    generator.set_state(state)


def _seed_at() -> int | None:
    """Where in the memory of a generator its seed lies; None where it is not found."""
    one, found = torch.Generator(), set(range(0, _NEAR, 8))
    for seed in (_SECRET, ~_SECRET & 0xFFFFFFFFFFFFFFFF):
        one.manual_seed(seed)
        found = {at for at in found if ctypes.c_uint64.from_address(_number(one) + at).value == seed}
    return found.pop() if len(found) == 1 else None


_SEED_AT: Final = _seed_at()


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
