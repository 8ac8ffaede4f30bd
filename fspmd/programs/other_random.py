"""Random numbers that are not torch's: whether somebody has drawn some while a program was recorded."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterable
from typing import Any

from fspmd.programs.escapes import constant_of


class OtherRandom:
    """Python's and NumPy's own generators, which everybody shares, and those among ``found``, as they are."""

    def __init__(self, found: Iterable[Any]) -> None:
        self.shared = _shared()
        every = {id(x): x for x in (*self.shared.values(), *found) if _state(x) is not None}
        self.found = list(every.values())
        self.states = list(map(_state, self.found))

    def check(self) -> None:
        """Raises where one was drawn from, or set, since."""
        for x, state in zip(self.found, self.states, strict=True):
            if _state(x) != state:
                own = f"a {type(x).__module__}.{type(x).__qualname__}"
                name = next((name for name, one in self.shared.items() if one is x), own)
                raise constant_of(f"numbers of {name}, which torch does not know")


def _shared() -> dict[str, Any]:
    """By what users call the modules whose functions draw from them."""
    numpy: Any = sys.modules.get("numpy")
    own = {"Python's module random": getattr(random.random, "__self__", None)}
    return own if numpy is None else own | {"numpy.random": getattr(numpy.random.rand, "__self__", None)}


def _state(x: Any) -> Any:
    """Of a generator; None of anything else."""
    kind = type(x)  # what stands for others may have another `__class__`
    if issubclass(kind, random.Random):
        return None if issubclass(kind, random.SystemRandom) else random.Random.getstate(x)
    of_numpy: Any = sys.modules.get("numpy.random")
    if of_numpy is None:
        return None
    if issubclass(kind, of_numpy.RandomState):
        return pickle.dumps(x.get_state(legacy=False))
    bits = x.bit_generator if issubclass(kind, of_numpy.Generator) else x
    return pickle.dumps(bits.state) if issubclass(type(bits), of_numpy.BitGenerator) else None
