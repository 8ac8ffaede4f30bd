"""What a jitted function asks generators of random numbers: correct in each call, or refused when it is recorded."""

from __future__ import annotations

import collections
import copy
import pickle
import random
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from full import FULL
from torch import Tensor

from fspmd import RecordError, jit
from fspmd.programs.reach import reached

Ask = Callable[[torch.Generator], Any]
#: arguments of those methods that take some
GIVEN: dict[str, Any] = {
    "manual_seed": lambda g: 3,
    "set_state": lambda g: g.get_state(),
    "set_offset": lambda g: 16,
    "graphsafe_set_state": lambda g: g,
    "__setstate__": lambda g: g.__reduce__()[2],
    "__reduce_ex__": lambda g: 2,
}
METHODS = [name for name in (*dir(torch.Generator), "__setstate__", "__reduce__") if name not in dir(object)]


def _method(name: str) -> Ask:
    def ask(g: torch.Generator) -> Any:
        found = getattr(g, name)
        return found(*([GIVEN[name](g)] if name in GIVEN else ())) if callable(found) else found

    return ask


ASKED: dict[str, Ask] = {
    **{name: _method(name) for name in (*METHODS, "__reduce__", "__reduce_ex__")},
    "of its type": torch.Generator.initial_seed,
    "of a clone": lambda g: g.clone_state().initial_seed(),
    "pickled": lambda g: pickle.dumps(g)[-1],
    "copied": copy.deepcopy,
    "by another object": lambda g: torch.Generator().set_state(g.get_state()).initial_seed(),
    "torch.initial_seed": lambda g: torch.initial_seed(),
    "torch.seed": lambda g: torch.seed(),
    "get_rng_state": lambda g: torch.get_rng_state(),
    "seeded by chance": lambda g: torch.Generator().seed(),
    "seeded by a number": lambda g: torch.Generator().manual_seed(5).initial_seed(),
    "drawn": lambda g: torch.rand(3, generator=g),
    "drawn between": lambda g: (torch.rand(1, generator=g), g.device, torch.rand(1, generator=g)),
}


def _number(told: Any) -> Any:
    """Something that follows from an answer."""
    if isinstance(told, torch.Generator):
        return _number(told.initial_seed()) + torch.rand((), generator=told)
    if isinstance(told, Tensor):
        return told.double().flatten()[:16].sum()
    if isinstance(told, (tuple, list)):
        return sum(map(_number, told))
    return told % 9973 if isinstance(told, int) else len(str(type(told)))


class _Slots:
    __slots__ = ("inside",)

    def ask(self, ask: Ask) -> Any:
        return ask(self.inside)


class _Class:
    kept: Any = None

    @property
    def ours(self) -> Any:
        return OURS[0]

    @staticmethod
    def first() -> Any:
        return _Class.kept


OURS: Any = collections.deque([None])
_module = types.ModuleType("settings")


def _bound(g: torch.Generator, ask: Ask) -> Callable[..., Any]:
    read = g.initial_seed
    return lambda x: x * _number((read(), ask(g)))


def _of_slots(g: torch.Generator, ask: Ask) -> Callable[..., Any]:
    one = _Slots()
    one.inside = g
    return lambda x: x * _number(one.ask(ask))


def _of_a_class(g: torch.Generator, ask: Ask) -> Callable[..., Any]:
    _Class.kept = g
    return lambda x: x * _number(ask(_Class.first()))


def _of_a_property(g: torch.Generator, ask: Ask) -> Callable[..., Any]:
    OURS[0] = g
    return lambda x: x * _number(ask(_Class().ours))


def _of_a_module(g: torch.Generator, ask: Ask) -> Callable[..., Any]:
    setattr(_module, "generator", g)  # noqa: B010 (not known to type checkers)
    return lambda x: x * _number(ask(_module.generator))


PLACES: dict[str, Callable[[torch.Generator, Ask], Callable[..., Any]]] = {
    "closure": lambda g, ask: lambda x: x * _number(ask(g)),
    "default": lambda g, ask: lambda x: x * _number(ask(torch.default_generator)),
    "bound method": _bound,
    "slots": _of_slots,
    "class": _of_a_class,
    "property": _of_a_property,
    "module": _of_a_module,
}


def _answers(f: Callable[..., Any], generators: list[torch.Generator]) -> Any:
    """Of three calls, between which all is seeded anew but once; the error, if there is one."""
    found = []
    for seed in (5, 6, None):
        for i, g in enumerate(generators):
            if seed is not None:
                g.manual_seed(seed + i)
        try:
            found.append(f(torch.ones(2, dtype=torch.float64)))
        except Exception as error:  # whatever torch raises
            return error
    return torch.stack(found)


CASES = [
    (asked, place)
    for i, asked in enumerate(ASKED)
    for j, place in enumerate(PLACES)
    if FULL or not (i + j) % 5 or place == "closure"
]


@pytest.mark.parametrize(("asked", "place"), CASES)
def test_what_generators_are_asked(asked: str, place: str) -> None:
    g = torch.Generator()
    f = PLACES[place](g, ASKED[asked])
    every = [torch.default_generator, g]
    expected, recorded = _answers(f, every), _answers(jit(f), every)
    if isinstance(recorded, RecordError):
        assert place == "bound method" or asked not in ("device", "seeded by a number", "drawn", "drawn between")
        assert all(one.initial_seed() in (3, 5 + i) for i, one in enumerate(every))  # nothing is left behind
    elif isinstance(expected, Exception):
        assert type(recorded) is type(expected)
    else:
        torch.testing.assert_close(recorded, expected, rtol=0, atol=0)


def test_who_does_not_record_is_told_the_seed() -> None:
    """Of generators that say another one while somebody records."""
    g = torch.Generator().manual_seed(5)
    told = []

    def f(x: Tensor) -> Tensor:
        from threading import Thread

        thread = Thread(target=lambda: told.append((g.initial_seed(), torch.rand((), generator=g))))
        thread.start()
        thread.join()
        return x + 1

    jit(f)(torch.ones(1))
    assert told == [(5, torch.rand((), generator=torch.Generator().manual_seed(5)))]


OTHERS: dict[str, tuple[Any, Callable[[Any], float]]] = {
    "random.Random": (random.Random(3), lambda r: r.random()),
    "bound method": (random.Random(3).random, lambda draw: draw()),
    "numpy Generator": (np.random.default_rng(3), lambda r: r.random()),
    "numpy method": (np.random.default_rng(3).normal, lambda draw: draw()),
    "numpy RandomState": (np.random.RandomState(3), lambda r: r.rand()),
    "numpy BitGenerator": (np.random.PCG64(3), lambda r: float(r.random_raw())),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("given", [False, True])
def test_generators_that_are_not_torchs(name: str, given: bool) -> None:
    one, draw = OTHERS[name]
    f = jit(lambda x, r: x * draw(r)) if given else jit(lambda x, r: x * draw(one))
    with pytest.raises(RecordError, match=r"^jit cannot record numbers of a [\w.]+, which torch does not know"):
        f(torch.ones(2), one)
    assert jit(lambda x: x + (one is None))(torch.ones(1)).item() == 1  # that it is there does no harm


def _never(*_: Any) -> Any:
    raise AssertionError("the search for generators ran the user's Python")


def _trap(kind: type = object, meta: type = type, **attributes: Any) -> Any:
    return meta("Trap", (kind,), attributes)()


_META = type("Meta", (type,), {"__getattr__": _never, "__bases__": property(_never), "mro": type.mro})
#: objects whose classes have their own say in what they are asked
TRAPS: dict[str, Callable[[Any], Any]] = {
    "attributes": lambda r: _trap(__getattr__=_never, held=[r]),
    "all attributes": lambda r: _trap(__getattribute__=_never, held=[r]),
    "class": lambda r: _trap(__class__=property(_never), held=[r]),
    "attributes' attributes": lambda r: _trap(held=[_trap(__getattr__=_never), r]),
    "dict": lambda r: _trap(__dict__=property(_never), held=[r]),
    "properties": lambda r: _trap(seed=property(_never), held=[r]),
    "unset slots": lambda r: _trap(__slots__=("rng",), __getattr__=_never, held=[r]),
    "values": lambda r: _trap(dict, values=_never, items=_never, __iter__=_never, held=[r]),
    "items": lambda r: _trap(list, __iter__=_never, __len__=_never, held=[r]),
    "comparisons": lambda r: _trap(__eq__=_never, __bool__=_never, __hash__=_never, held=[r]),
    "class of classes": lambda r: _trap(meta=_META, held=[r]),
    "descriptors": lambda r: _trap(held=[r], one=_trap(__get__=_never)),
    "mock": lambda r: mock.Mock(spec=torch.Generator, held=[r]),
    "state": lambda r: _trap(random.Random, getstate=_never, held=[r]),
    "function": lambda r: vars(f := lambda x: x).update(held=r) or f,
}


@pytest.mark.parametrize("name", TRAPS)
def test_what_is_searched_is_not_run(name: str) -> None:
    rng = random.Random(3)
    trap = TRAPS[name](rng)
    assert any(one is rng for one in reached(lambda: trap))
    f = jit(lambda x: x if trap is None else x + 1)
    assert f(torch.ones(1)).item() == f(torch.ones(1)).item() == 2
