"""Generators of random numbers while a program is recorded: which are known, and whether they are left alone."""

from __future__ import annotations

import ctypes
import gc
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.errors import RecordError
from fspmd.programs.escapes import constant_of, line
from fspmd.sharded import is_plain
from fspmd.torch_internals import DisableTorchFunction, disable_dispatch_modes
from fspmd.tracing import outside_transforms
from fspmd.transport.randomness import go_on, kept_states

_SECRET: Final = int.from_bytes(b"secrets", "big")
_FEW: Final = 16  # numbers of a tensor that are looked at for seeds
_NEAR: Final = 256  # bytes of a generator, of which it has some thousand
_initial_seed: Final = torch.Generator.initial_seed
#: what tells how a generator was seeded, or seeds it by chance; `get_state` gives a tensor, whose use tells on it
_READERS: Final[dict[str, Any]] = {
    name: getattr(torch.Generator, name) for name in ("initial_seed", "seed", "get_offset", "__reduce__")
}
_METHODS: Final[dict[str, Any]] = gc.get_referents(torch.Generator.__dict__)[0]


class Generators:
    """Whether generators are left alone between the steps that draw from them.

    Meanwhile each says that it was seeded by a number that nobody knows: a name of the place in its numbers to which
    steps have brought it. So whoever seeds one, or sets it to another state, is found out, though it be to the state
    that it had: the same call would set it in a replay, too, when it has another. Where a program is recorded without
    values, and nothing is drawn, it goes from name to name alike. It draws the numbers that it would draw, so other
    threads may draw from it.
    """

    def __init__(self, given: Iterable[Any]) -> None:
        """Those among what is ``given``."""
        given = list(given)
        if any(map(_reads, given)):
            raise _read()
        found = [torch.default_generator, *(one for one in given if issubclass(type(one), torch.Generator))]
        # by number, since torch gives dispatch another object
        self.known: dict[int, torch.Generator] = {_number(one): one for one in found}
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
        """Within, what tells how a generator was seeded asks ``check``, of a refusal, whether to say it.

        Who records is refused, before anything can be made of it; other threads are given the true seed.
        """

        def asking(name: str) -> Callable[..., Any]:
            def read(generator: torch.Generator) -> Any:
                if name == "seed" or self.is_name(_initial_seed(generator)):  # of clones, too
                    check(_read())
                told = _READERS[name](generator)
                return self._seed_of(told) if name == "initial_seed" else told

            return read

        _set_methods({name: asking(name) for name in _READERS})
        try:
            yield
        finally:
            _set_methods(_READERS)

    def begin_step(self) -> None:
        """A step may draw."""
        for key, one in self.known.items():
            if one.device.type != "cpu":  # of others the seed is a part of what the numbers follow from
                _name_seed(one, self.seeds[key, self.names[key]])

    def end(self) -> None:
        """The record has ended."""
        for key, one in self.known.items():
            if (seed := self.seeds.get((key, _initial_seed(one)))) is not None:
                _name_seed(one, seed)

    def check(self, used: Iterable[Any] = ()) -> None:
        """Raises where somebody has set one between steps, or where a step draws from one that is not known."""
        if any(_initial_seed(one) != self.names[key] for key, one in self.known.items()):
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
        if is_plain(value):
            with DisableTorchFunction():
                if value.dtype is torch.uint8 and value.numel() in {len(state) for state in self.left.values()}:
                    read = self.is_name(_seed(value.contiguous()))
                elif value.dtype is torch.int64 and 0 < value.numel() <= _FEW:
                    read = any(map(self.is_name, value.flatten().tolist()))
                else:
                    return
        else:
            read = self.is_name(value)
        if read:
            raise _read()

    def is_name(self, value: float) -> bool:
        """Whether a number is the name of a place in the numbers of a generator."""
        return _SECRET < value <= _SECRET + self.count

    def _seed_of(self, name: int) -> int:
        """The true seed of what says ``name``."""
        return next((seed for (_, known), seed in self.seeds.items() if known == name), name)


def _read() -> RecordError:
    return constant_of("the seed or the state of a generator, which another run has otherwise")


def _reads(x: Any) -> bool:
    """Whether it is one of the methods that tell of a seed, taken off before they are watched."""
    if type(x) is types.BuiltinMethodType:
        return type(x.__self__) is torch.Generator and x.__name__ in _READERS
    return type(x) is types.MethodDescriptorType and x in _READERS.values()


def _set_methods(methods: dict[str, Any]) -> None:
    """Of generators, whose type C has made, so that torch's own code and references to methods find them, too."""
    _METHODS.update(methods)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(torch.Generator))


def _number(generator: Any) -> int:
    return generator._cdata  # type: ignore[no-any-return]


def _state(generator: torch.Generator) -> Tensor:
    with outside_transforms(), disable_dispatch_modes(), DisableTorchFunction():
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
