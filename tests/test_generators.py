"""Generators of random numbers in jitted functions, and what a function reaches."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from fspmd import RecordError, jit
from fspmd.programs.reachable import reachable_from


def test_generators_are_drawn_from_by_steps() -> None:
    """Of the default one, and of one that is given, closed over or deep in what the function reaches."""
    g = torch.Generator()
    held = {"deep": [(g,)]}
    for f in (
        lambda x: x + torch.rand(3),
        lambda x: x + torch.rand(3, generator=g) + torch.rand(3, generator=g),
        lambda x: torch.bernoulli(x / 2, generator=held["deep"][0][0]),
    ):
        recorded = jit(f)
        for seed in (5, 6, None):
            found = []
            for run in f, recorded:
                if seed is not None:
                    torch.manual_seed(seed)
                    g.manual_seed(seed)
                state = torch.get_rng_state(), g.get_state()
                found.append(run(torch.ones(3)))
                if seed is None and run is f:
                    torch.set_rng_state(state[0])
                    g.set_state(state[1])
            assert torch.equal(*found)


def test_what_is_read_of_a_generator_is_a_constant() -> None:
    g = torch.Generator().manual_seed(5)
    f = jit(lambda x: x * g.initial_seed() + random.random() + np.random.rand())
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = f(torch.ones(2))
    g.manual_seed(6)
    assert torch.equal(f(torch.ones(2)), first)
    assert torch.equal(torch.get_rng_state(), state)  # to record draws nothing


@pytest.mark.parametrize("seed", [5, 6])
def test_seeds_that_are_set_are_refused(seed: int) -> None:
    """To the seed that the generator has already, too; nothing is left behind."""
    g = torch.Generator()
    for f in (
        lambda x: x + torch.rand(3, generator=g.manual_seed(5)),
        lambda x: (torch.manual_seed(5), x + torch.rand(3))[1],
        lambda x: (x + torch.rand(3), torch.manual_seed(5))[0],
    ):
        torch.manual_seed(seed)
        g.manual_seed(seed)
        with pytest.raises(RecordError, match=r"^jit cannot record a function that sets the state of a generator"):
            jit(f)(torch.ones(3))
        torch.manual_seed(seed)
        assert jit(lambda x: x + 1)(torch.ones(1)).item() == 2


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
    assert any(one is rng for one in reachable_from(lambda: trap))
    f = jit(lambda x: x if trap is None else x + 1)
    assert f(torch.ones(1)).item() == f(torch.ones(1)).item() == 2


class _Drawing(torch.nn.Linear):
    generator = torch.Generator()


def test_classes_of_libraries_are_not_searched() -> None:
    """Those of users are, also if they derive from them."""
    assert any(one is _Drawing.generator for one in reachable_from(lambda: _Drawing(2, 2), _Drawing))
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(10)))
    found = list(reachable_from(model))
    assert all(any(one is p for one in found) for p in model.parameters())
    assert not any(one is torch.nn.Module.forward for one in found)


class _Noisy(_Drawing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + torch.rand(2, 2, generator=_Drawing.generator)


def _noise(_: torch.nn.Identity, x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(2, 2, generator=_Drawing.generator)


def test_what_users_derive_from_or_put_on_a_class_of_a_library_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parametrization makes a class of torch's own that derives from the user's; a method may be replaced."""
    parametrized = _Noisy(2, 2)
    torch.nn.utils.parametrize.register_parametrization(parametrized, "weight", torch.nn.Tanh())
    assert type(parametrized).__module__.startswith("torch.")
    monkeypatch.setattr(torch.nn.Identity, "forward", _noise)
    for model in (parametrized, torch.nn.Identity()):
        run = jit(lambda x, model=model: model(x))
        states = [_Drawing.generator.get_state()]
        drawn = [run(torch.ones(2, 2)).detach() for _ in range(2)]
        states.append(_Drawing.generator.get_state())
        _Drawing.generator.set_state(states[0])
        assert all(torch.equal(value, model(torch.ones(2, 2))) for value in drawn)
        assert torch.equal(_Drawing.generator.get_state(), states[1])
