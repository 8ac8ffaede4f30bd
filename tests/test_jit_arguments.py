"""Arguments of jitted functions: static ones, and why a call is recorded anew."""

from __future__ import annotations

import enum
import functools
import logging
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from simulated import MESH
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fspmd
from fspmd import ArgumentError, P, device_put, explain_cache_misses, jit


class Kind(enum.Enum):
    SIN = 1
    COS = 2


@dataclass(frozen=True)
class Config:
    scale: float
    table: Any = None


class Pair(NamedTuple):
    first: Any
    second: Any


def f(x: Tensor, how: Any, n: int = 1, *, name: str = "") -> Tensor:
    for _ in range(n):
        x = how(x) if callable(how) else x * how.scale if isinstance(how, Config) else getattr(x, how.name.lower())()
    return x + len(name)


X = torch.linspace(0, 1, 3)
STATIC: tuple[Any, ...] = (
    torch.sin,
    torch.cos,
    Kind.SIN,
    Kind.COS,
    Config(2),
    Config(3.0),
    Config(2, X),
    torch.nn.ReLU(),
)
CHOICES: tuple[dict[str, Any], ...] = (
    {"static_argnums": (1, 2), "static_argnames": "name"},
    {"static_argnums": [-1, -2], "static_argnames": ("name",)},
    {"static_argnames": ("how", "n", "name")},
)


@pytest.mark.parametrize("choice", CHOICES)
def test_static_arguments_are_handed_on_and_tell_records_apart(choice: dict[str, Any]) -> None:
    recorded = jit(f, **choice)
    for _ in range(2):
        for how in STATIC:
            for n, name in ((1, "a"), (2, "")):
                want = f(X, how, n, name=name)
                assert torch.equal(recorded(X, how, n, name=name), want)
                assert torch.equal(recorded(X, how=how, n=n, name=name), want)
    assert recorded.cache_info() == (32, 32, 32)
    assert torch.equal(recorded(X, Config(2.0)), X * 2)
    assert torch.equal(recorded(X, Config(2.0), name=""), X * 2)


def test_static_values_are_compared_by_type_and_equality() -> None:
    seen: list[Any] = []
    recorded = jit(lambda x, *rest: (seen.append(rest), x)[1], static_argnums=(1, 2))
    for _ in range(2):
        for value in (
            1,
            1.0,
            True,
            0.0,
            -0.0,
            (1,),
            (1.0,),
            (0.0,),
            (-0.0,),
            None,
            "a",
            ("a", (None,)),
            frozenset({1}),
            frozenset({1.0}),
            Config(1),
            Config(1.0),
            Config(True, (0.0,)),
            Config(1, (-0.0,)),
            Pair(1, 0.0),
            Pair(1, -0.0),
            np.float32(0.0),
            np.float32(-0.0),
            np.float64(0.0),
        ):
            recorded(X, value)
            recorded(X, X.shape, value)
    assert recorded.cache_info() == (46, 46, 46)
    assert repr(seen[:2]) == repr([(1,), (X.shape, 1)])


def test_modules_that_are_static_are_recorded_anew_in_another_mode() -> None:
    @functools.partial(jit, static_argnums=0)
    def apply(model: torch.nn.Module, x: Tensor) -> Any:
        return model(x)

    model = torch.nn.Dropout(0.5)
    apply(model, X)
    model.eval()
    assert torch.equal(apply(model, X), X)
    assert apply.cache_info() == (0, 2, 1)


def test_as_a_decorator_of_methods_and_within_bodies() -> None:
    class Model:
        scale = 3.0

        @jit(static_argnums=0)
        def __call__(self, x: Tensor) -> Tensor:
            return x * self.scale

    model = Model()
    assert torch.equal(model(X), X * 3)
    body = fspmd.shard_map(model, mesh=MESH, in_specs=P(), out_specs=P())
    assert torch.equal(fspmd.device_get(body(X)), X * 3)


def _variadic(x: Tensor, *rest: Any, **others: Any) -> Tensor:
    return x


WRONG: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (
        f,
        {"static_argnums": 3},
        r"^jit got static_argnums=3, but the function f takes 3 positional arguments: x, how, n$",
    ),
    (f, {"static_argnums": (0, -4)}, r"^jit got static_argnums=\(0, -4\), but the function f takes 3"),
    (
        f,
        {"static_argnames": "width"},
        r"^jit got static_argnames='width', but the function f has no parameter 'width': x,",
    ),
    (f, {"static_argnums": True}, r"^jit got the bool True for static_argnums, which takes an int or a tuple of them"),
    (f, {"static_argnums": "how"}, r"^jit got the string 'how' for static_argnums, which takes an int"),
    (f, {"static_argnames": 1}, r"^jit got the int 1 for static_argnames, which takes a string or"),
    (
        _variadic,
        {"static_argnums": -1},
        r"^jit got -1 in static_argnums, but .* any number .* write a position from 0 on",
    ),
]


@pytest.mark.parametrize(("function", "options", "message"), WRONG)
def test_options_that_name_no_parameter(function: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        jit(function, **options)
    with pytest.raises(ArgumentError, match=message):
        jit(**options)(function)


def test_values_that_cannot_be_static() -> None:
    recorded = jit(f, static_argnames=("how", "name"))
    message = r"^the static argument how of the function f is the list \[1\]; it must be hashable: pass a number,"
    for call in (lambda: recorded(X, [1]), lambda: recorded(X, how=[1])):
        with pytest.raises(ArgumentError, match=message):
            call()
    for x in (X, device_put(torch.ones(8), P("x"), mesh=MESH)):
        with pytest.raises(ArgumentError, match=r"^the static argument how of .*; leave it out of static_argnums$"):
            recorded(x, x)


# --- why a call is recorded anew -------------------------------------------------------------------------------------


def g(x: Any, scale: Any = 1.0, *, mode: Any = None) -> Any:
    return x["w"][0] * 2


W = torch.ones(4, 8)
S = device_put(W, P("x"), mesh=MESH)
#: what is called first, what then, and the reasons
MISSES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], list[str]]] = {
    "shape": (({"w": [W]},), ({"w": [W[:3]]},), ["x['w'][0]: shape (4, 8) -> (3, 8)"]),
    "dtype": (({"w": [W]},), ({"w": [W.double()]},), ["x['w'][0]: dtype torch.float32 -> torch.float64"]),
    "gradient": (
        ({"w": [W]},),
        ({"w": [W.clone().requires_grad_()]},),
        ["x['w'][0]: requires_grad False -> True"],
    ),
    "spec": (
        ({"w": [S]},),
        ({"w": [fspmd.reshard(S, P(None, "x"))]},),
        ["x['w'][0]: spec P('x', None) -> P(None, 'x')"],
    ),
    "value": (({"w": [W]}, 1.0), ({"w": [W]}, 2), ["scale: type float -> int", "scale: value 1.0 -> 2"]),
    "static": (({"w": [W]}, 1.0, "a"), ({"w": [W]}, 1.0, "b"), ["mode: static value 'a' -> 'b'"]),
    "tree": (
        ({"w": [W]},),
        ({"w": [W], "b": W},),
        ["x['b']: the record lacks it", "x: tree {'w': [*]} -> {'w': [*], 'b': *}"],
    ),
    "arguments": (
        ({"w": [W]},),
        ({"w": [W]}, 1.0),
        ["scale: the record lacks it", "arguments x, mode= -> x, scale, mode="],
    ),
}


@pytest.mark.parametrize("name", MISSES)
def test_reasons(name: str) -> None:
    first, then, reasons = MISSES[name]
    recorded = jit(g, static_argnames="mode")

    def run(x: Any, scale: Any = None, mode: Any = "") -> None:
        recorded(x, *([] if scale is None else [scale]), mode=mode)

    run({"w": [torch.ones(7)], "v": 3, "u": 4}, 7)  # further away
    run(*first)
    with explain_cache_misses() as misses:
        run(*first)
        run(*then)
    (miss,) = misses
    assert list(miss.reasons) == reasons
    assert (miss.function, miss.records) == ("g", 2)
    assert miss.where.startswith("test_jit_arguments.py:")


def test_surroundings() -> None:
    recorded = jit(lambda x: x * 2)
    with explain_cache_misses() as misses:
        recorded(W)
        with torch.no_grad():
            recorded(W)
        with fspmd.set_mesh(MESH):
            recorded(W)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            recorded(W)
        with torch.device("meta"):
            recorded(W)
    assert [miss.reasons[0].split(" ")[0] for miss in misses] == ["it", "grad", "mesh", "autocast", "default"]
    assert [len(miss.reasons) for miss in misses] == [1] * 5
    assert misses[1].reasons == ("grad mode True -> False",)


def _in_backward(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        x.register_hook(lambda g: (run(g), g)[1])
        return torch.autograd.grad(x.sum(), x)[0]

    return step


#: places in which a function runs unrecorded, each a call of a function of a tensor
PLACES: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "vmap": lambda run: torch.vmap(run)(W),
    "grad": lambda run: torch.func.grad(lambda x: run(x).sum())(W),
    "jvp": lambda run: torch.func.jvp(run, (W,), (W,)),
    "functionalize": lambda run: torch.func.functionalize(run)(W),
    "a transform in another": lambda run: torch.vmap(torch.func.grad(lambda x: run(x).sum()))(W),
    "torch.jit.trace": lambda run: torch.jit.trace(run, W, check_trace=False),
    "make_fx": lambda run: make_fx(run)(W),
    "make_fx above autograd": lambda run: make_fx(run, pre_dispatch=True)(W),
    "the backward of make_fx": lambda run: make_fx(_in_backward(run))(W),
    "a checkpoint": lambda run: checkpoint(run, W, use_reentrant=False, preserve_rng_state=False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", PLACES)
def test_a_record_that_is_near_is_replayed_in_no_other_place(place: str) -> None:
    runs = []
    recorded = jit(lambda x: (runs.append(None), x * 2)[1])
    recorded(W), recorded(W)
    assert (len(runs), *recorded.cache_info()) == (1, 1, 1, 1)
    PLACES[place](lambda x: recorded(W) + x)
    assert len(runs) > 1
    assert recorded.cache_info() == (1, 1, 1)


def test_records_under_autocast_and_modes_are_near_too() -> None:
    recorded = jit(lambda x: x @ x.mT)
    for _ in range(3):
        found = []
        for around in (nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("cpu")):
            with around:
                found.append(recorded(W).dtype)
        assert found == [torch.float32, torch.bfloat16, torch.float32]
    assert recorded.cache_info() == (6, 3, 3)


def test_arguments_that_lie_on_a_mesh_and_others() -> None:
    """What they are to the user, and not how a simulation holds them."""
    step = jit(lambda x: x * 2)
    with explain_cache_misses() as misses:
        step(W)
        for spec in P("x"), P():
            step(device_put(W, spec, mesh=MESH))
    assert misses[1].reasons == (
        "x: type Tensor -> Sharded",
        "x: spec None -> P('x', None)",
        "x: mesh None -> mesh(x=4)",
    )
    assert misses[2].reasons == ("x: spec P('x', None) -> P(None, None)",)


def test_records_of_no_more_use(caplog: pytest.LogCaptureFixture) -> None:
    model, w = torch.nn.Dropout(0.5), torch.ones(8)
    recorded = jit(lambda x: model(x) * w)
    recorded(W)
    with explain_cache_misses() as outer, caplog.at_level(logging.WARNING, "fspmd.jit"):
        model.eval()
        with explain_cache_misses() as inner:
            recorded(W)
        w.requires_grad_()
        recorded(W)
    recorded(W[:2])
    assert [miss.reasons for miss in inner] == [("a module Dropout: training True -> False",)]
    thawed = "a tensor of shape (8,) that it closes over: requires_grad False -> True"
    assert [miss.reasons for miss in outer] == [inner[0].reasons, (thawed,)]
    assert [one.getMessage() for one in caplog.records] == [str(one) for one in outer]
    assert str(outer[1]).startswith("<lambda> is recorded at test_jit_arguments.py:")
    assert str(outer[1]).endswith(f"; its record differs in 1 part:\n  * {thawed}")


# --- calls that find their record by the way --------------------------------------------------------------------------


def _told(x: Tensor, y: Tensor) -> Any:
    """A result, and what a function knows of its arguments and surroundings, which are constants of its record."""
    facts = [(type(one), one.dtype, one.shape, one.requires_grad, one.is_conj(), one.is_neg()) for one in (x, y)]
    around = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype()
    return (x + 2 * y).sum(), (facts, around)


def _shuffled(tree: Any, chosen: random.Random) -> Any:
    """With the keys of dicts put in, by chance, in another order."""
    if not isinstance(tree, dict):
        return [_shuffled(one, chosen) for one in tree] if isinstance(tree, list) else tree
    keys = chosen.sample(list(tree), len(tree))
    return {key: _shuffled(tree[key], chosen) for key in keys}


def _in_a_row(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [x for one in (tree.values() if isinstance(tree, dict) else tree) for x in _in_a_row(one)]


@pytest.mark.parametrize("seed", range(4))
def test_functions_see_the_keys_of_dicts_in_the_order_of_their_call(seed: int) -> None:
    def f(tree: Any, **named: Any) -> Any:
        return torch.cat(_in_a_row(tree) + _in_a_row(named)), named, {"b": tree, "a": 1}

    def g(tree: Any) -> Any:
        return torch.stack(_in_a_row(tree)).cumsum(0)

    mapped = fspmd.shard_map(g, mesh=MESH, in_specs=P("x"), out_specs=P(None, "x"))
    chosen, recorded = random.Random(seed), jit(f, donate_argnames="q")
    for n in range(20):
        parts = [torch.full((4,), 10.0 * n + i) for i in range(6)]
        tree = {"w": parts[0], "b": [parts[1], {1: parts[2], 0: parts[3]}], "c": {"z": parts[4], "y": parts[5]}}
        tree = _shuffled(tree, chosen)
        named = _shuffled({"p": parts[0] + 1, "q": parts[1] + 1}, chosen)
        expected, found = f(tree, **named), recorded(tree, **{k: x.clone() for k, x in named.items()})
        assert str(found) == str(expected)
        for one in mapped, jit(mapped):
            assert torch.equal(fspmd.device_get(one(tree)), g(tree))
    assert recorded.cache_info().hits < 20


def _kinds() -> list[Callable[[], Tensor]]:
    number = torch.complex(torch.arange(6.0), torch.ones(6)).view(2, 3)
    return [
        lambda: torch.rand(2, 3),
        lambda: torch.rand(2, 3, dtype=torch.float64),
        lambda: torch.rand(1, 3),
        lambda: torch.rand(3, 2).t(),
        lambda: torch.rand(1, 3).expand(2, 3),
        lambda: torch.rand(2, 3, requires_grad=True),
        lambda: torch.rand(2, 3, requires_grad=True) * 2,
        lambda: torch.nn.Parameter(torch.rand(2, 3)),
        lambda: torch.nn.Parameter(torch.rand(2, 3), requires_grad=False),
        lambda: number,
        number.conj,
        lambda: number.conj().imag,
    ]


@pytest.mark.parametrize("seed", range(4))
def test_calls_of_many_kinds_in_any_order(seed: int) -> None:
    recorded, chosen = jit(_told), random.Random(seed)
    around: list[Callable[[], Any]] = [
        nullcontext,
        nullcontext,
        torch.no_grad,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        torch.inference_mode,
        lambda: torch.device("cpu"),
    ]
    some = [(chosen.choice(_kinds()), chosen.choice(_kinds()), chosen.choice(around)) for _ in range(12)]
    calls = 0
    for make_x, make_y, within in chosen.choices(some, k=60):
        x, y = make_x(), make_y()
        with within():
            found, told = recorded(x, y)
            expected, true = _told(x, y)
        torch.testing.assert_close(found, expected)
        assert (found.requires_grad, told[1]) == (expected.requires_grad, true[1])
        assert [one[1:] for one in told[0]] == [one[1:] for one in true[0]]
        calls += 1
    info = recorded.cache_info()
    assert info.hits + info.misses == calls
    assert info.misses == info.currsize <= len(some)


_LAID: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    lambda x: x[:1].expand(32, 70),
    lambda x: x[:, :1].expand(32, 70),
    lambda x: x[:1, :1].expand(32, 70),
    lambda x: x.flatten()[:101].unfold(0, 70, 1),
    lambda x: x.t().contiguous().t(),
]
_READING: list[Callable[[Tensor], Tensor]] = [
    lambda x: x * 2,
    lambda x: x.sum(),
    lambda x: x.sum(0),
    lambda x: x.mean(1),
    lambda x: x.norm(),
    lambda x: x @ x.mT,
]


@pytest.mark.parametrize("lay", [lambda x: x, lambda x: device_put(x, P("x"), mesh=MESH)], ids=["plain", "sharded"])
@pytest.mark.parametrize("seed", range(4))
def test_arguments_whose_elements_share_memory(seed: int, lay: Any) -> None:
    """Results are those of the function, to the bit where strides are those of the recording, whatever came before."""
    chosen = random.Random(seed)
    for f in _READING:
        recorded = jit(f)
        layouts = chosen.sample(_LAID[:-1], 5)
        for lies in [*layouts, *layouts, _LAID[-1]]:
            x = lies(lay(torch.randn(32, 70, dtype=chosen.choice([torch.float32, torch.float64]))))
            found, expected = recorded(x), f(x)
            if lies is _LAID[-1]:
                torch.testing.assert_close(found, expected)
            else:
                assert torch.equal(found, expected)
    x = lay(torch.ones(8, 1)).expand(8, 3)
    for write in (lambda x: x.add_(1), jit(lambda x: x.add_(1))):
        with pytest.raises((RuntimeError, ArgumentError), match="memory"):
            write(x)


@pytest.mark.parametrize("place", range(len(_LAID)))
def test_a_lowered_program_takes_any_strides(place: int) -> None:
    for f in _READING:
        compiled = jit(f).lower(_LAID[place](torch.randn(32, 70, dtype=torch.float64))).compile()
        for lies in _LAID:
            x = lies(torch.randn(32, 70, dtype=torch.float64))
            torch.testing.assert_close(compiled(x), f(x))


def test_records_of_calls_that_differ_in_shape_alone_are_all_found() -> None:
    recorded = jit(lambda x, y: x * len(x) + y)
    for _ in range(3):
        for n in range(1, 8):
            assert torch.equal(recorded(torch.ones(n), torch.ones(n)), torch.full((n,), n + 1.0))
    assert recorded.cache_info() == (14, 7, 7)
    recorded.clear_cache()
    recorded(torch.ones(2), torch.ones(2))
    assert recorded.cache_info() == (0, 1, 1)
