"""Random numbers of keys: functions of key and element, whatever the layout, in records, bodies and maps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from processes import Processes
from torch import Tensor

from fspmd import (
    ArgumentError,
    Flat,
    FspmdError,
    P,
    Sharded,
    SpecError,
    TensorSpec,
    axis_index,
    communication_log,
    device_get,
    device_put,
    grad,
    jit,
    jvp,
    make_mesh,
    pcast,
    random,
    shard_map,
    typeof,
    vmap,
)

MESHES = [make_mesh(s, n, transport="simulation") for s, n in (((3,), ("x",)), ((4,), ("x",)), ((2, 3), ("x", "y")))]
KEY = random.key(7)

DRAWS: dict[str, Callable[..., Any]] = {
    "normal": lambda k, **lies: random.normal(k, (5, 6), **lies),
    "halves": lambda k, **lies: random.normal(k, (5, 6), torch.bfloat16, **lies),
    "complex": lambda k, **lies: random.normal(k, (5, 6), torch.complex64, **lies),
    "uniform": lambda k, **lies: random.uniform(k, (5, 6), torch.float64, -2.0, 3.0, **lies),
    "randint": lambda k, **lies: random.randint(k, (5, 6), -3, 9, torch.int32, **lies),
    "bernoulli": lambda k, **lies: random.bernoulli(k, 0.3, (5, 6), **lies),
    "permutation": lambda k, **lies: random.permutation(k, 7, **lies),
}


def _layouts(mesh: Any, ndim: int) -> list[P]:
    axes = mesh.axis_names
    entries = [None, *axes, *([axes, axes[::-1]] if len(axes) > 1 else [])]
    specs = [P(entry) for entry in entries] + [P(unreduced={axes[-1]}), P(axes[0], reduced=set(axes[1:]))]
    return specs + ([P(None, entry) for entry in entries[1:]] + [P(*axes)] if ndim > 1 else [])


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_do_not_depend_on_the_layout(name: str) -> None:
    draw = DRAWS[name]
    plain, before = draw(KEY), torch.random.get_rng_state()
    with communication_log() as log:
        found = [draw(KEY, spec=s, mesh=mesh) for mesh in MESHES for s in _layouts(mesh, plain.dim())]
    assert not len(log)
    for x in found:
        assert isinstance(x, Sharded)
        assert torch.equal(device_get(x), plain), x
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(draw(random.key(8)), plain)


def test_flattened_dims_too() -> None:
    mesh = MESHES[1]
    flat = random.normal(KEY, (24,), spec=P(Flat((6, None), (4, "x"))), mesh=mesh)
    assert torch.equal(device_get(flat), random.normal(KEY, 24))


def test_keys_are_all_different_and_independent() -> None:
    keys = random.split(KEY, 1000)
    more = [random.fold_in(KEY, i) for i in (*range(1000), -1, 2**62, -(2**63))]
    nested = [random.split(k) for k in keys[:50]]
    every = [KEY, *keys, *more, *itertools.chain(*nested)]
    assert len({int(k) for k in every}) == len(every)
    assert torch.equal(random.split(KEY, (10, 100)), keys.view(10, 100))
    assert torch.equal(random.split(KEY, 3), keys[:3])  # of more keys the first are the same
    assert random.fold_in(KEY, torch.tensor(5)) == random.fold_in(KEY, 5)
    numbers = torch.stack([random.normal(k, (512,), torch.float64) for k in keys[:200]])
    correlation = (numbers @ numbers.T / 512 - torch.eye(200)).abs()
    assert correlation.max() < 6 * (2 / 512) ** 0.5
    bits = (torch.stack([KEY, *keys]).unsqueeze(1) >> torch.arange(64)) & 1
    assert (bits.double().mean(0) - 0.5).abs().max() < 5 * 0.5 / 1001**0.5


def test_distributions() -> None:
    n = 200_000
    x = random.normal(KEY, (n,), torch.float64)
    assert abs(x.mean()) < 5 / n**0.5
    assert abs(x.var() - 1) < 5 * (2 / n) ** 0.5
    u = random.uniform(KEY, (n,), minval=-1.0, maxval=3.0)
    assert -1 <= u.min() < -0.999 < 2.999 < u.max() <= 3
    counts = random.randint(KEY, (n,), 5, 9).bincount(minlength=9)
    assert counts[:5].sum() == 0
    assert (counts[5:] - n / 4).abs().max() < 5 * (n * 3 / 16) ** 0.5
    logits = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64).log()
    drawn = random.categorical(KEY, logits.expand(n, 3)).bincount() / n
    assert (drawn - logits.exp()).abs().max() < 5 * 0.5 / n**0.5
    assert random.permutation(KEY, 100).sort().values.equal(torch.arange(100))


def test_numbers_that_lie_as_tensors_do() -> None:
    for mesh in MESHES:
        for spec in _layouts(mesh, 2):
            whole = torch.linspace(0.05, 0.95, 30, dtype=torch.float64).view(5, 6)
            x = device_put(whole, spec, mesh=mesh)
            hits = random.bernoulli(KEY, x)
            assert torch.equal(device_get(hits), random.bernoulli(KEY, whole))
            for axis in (0, 1):
                chosen = random.categorical(KEY, x, axis)
                assert torch.equal(device_get(chosen), random.categorical(KEY, whole, axis))
            assert torch.equal(device_get(random.permutation(KEY, x)), random.permutation(KEY, whole))
    assert hits.spec.partition.axes


@pytest.mark.parametrize("spec", [None, P("x")])
def test_a_record_takes_keys_as_arguments(spec: P | None) -> None:
    mesh = MESHES[1]

    @jit
    def step(key: Tensor, w: Any) -> Any:
        first, second = random.split(key)
        lies = {} if spec is None else {"spec": spec, "mesh": mesh}
        noise = random.normal(first, (8,), torch.float64, **lies)
        kept = random.bernoulli(random.fold_in(second, 3), 0.5, (8,), **lies)
        return w * noise * kept

    w = device_put(torch.arange(8.0).double(), P("x"), mesh=mesh)
    for seed in range(4):
        first, second = random.split(random.key(seed))
        wanted = random.normal(first, (8,), torch.float64) * random.bernoulli(random.fold_in(second, 3), 0.5, (8,))
        found = step(random.key(seed), w)
        torch.testing.assert_close(device_get(found), torch.arange(8.0).double() * wanted)
    assert step.cache_info()[:2] == (3, 1)
    assert not step.lower(KEY, TensorSpec(mesh, P("x"), (8,), torch.float64)).collectives()
    torch.testing.assert_close(device_get(grad(lambda w: step(random.key(3), w).sum())(w)), wanted)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("jitted", [False, True])
def test_each_example_of_a_map_has_its_key(name: str, jitted: bool) -> None:
    draw, keys, mesh = DRAWS[name], random.split(KEY, 3), MESHES[1]
    expected = torch.stack([draw(random.fold_in(k, 1)) for k in keys])
    for lies in ({}, {"spec": P("x"), "mesh": mesh}):
        mapped = vmap(lambda k: draw(random.fold_in(k, 1), **lies))  # noqa: B023
        assert torch.equal(device_get((jit(mapped) if jitted else mapped)(keys)), expected)
    split = vmap(lambda k: random.split(k, 4))(keys)
    assert torch.equal(split, torch.stack([random.split(k, 4) for k in keys]))
    twice = vmap(vmap(draw))(random.split(KEY, (2, 3)))
    assert torch.equal(twice, torch.stack([torch.stack([draw(k) for k in row]) for row in random.split(KEY, (2, 3))]))


@pytest.mark.parametrize("jitted", [False, True])
def test_each_example_of_a_mapped_derivative_has_its_key(jitted: bool) -> None:
    """Gradients, of gradients too, and tangents of each example with a draw of its own: plain, cut, and in a body."""
    w, keys, mesh = torch.arange(1.0, 4.0).double(), random.split(KEY, (2, 3)), MESHES[1]
    draws = torch.stack([random.normal(random.fold_in(k, 1), (3,), torch.float64) for k in keys.flatten()])
    wanted = (3 * w**2 * draws).view(2, 3, 3)

    def loss(w: Tensor, key: Tensor, **lies: Any) -> Tensor:
        return (w**3 * random.normal(random.fold_in(key, 1), (3,), torch.float64, **lies)).sum()

    def second(w: Tensor, key: Tensor) -> Tensor:
        return grad(lambda w: grad(loss)(w, key).sum())(w)

    def tangent(w: Tensor, key: Tensor) -> Tensor:
        return jvp(lambda w: loss(w, key), (w,), (torch.ones_like(w),))[1]

    def over_all(f: Any) -> Any:
        mapped = vmap(vmap(f, in_dims=(None, 0)), in_dims=(None, 0))
        return jit(mapped) if jitted else mapped

    torch.testing.assert_close(over_all(grad(loss))(w, keys), wanted)
    torch.testing.assert_close(over_all(second)(w, keys), 2 * wanted / w)
    torch.testing.assert_close(over_all(tangent)(w, keys), wanted.sum(-1))
    cut = over_all(grad(lambda w, k: loss(w, k, spec=P("x"), mesh=mesh)))(device_put(w, P("x"), mesh=mesh), keys)
    torch.testing.assert_close(device_get(cut), wanted)

    @shard_map(mesh=MESHES[0], in_specs=(P(), P(None, "x")), out_specs=P(None, "x"))
    def body(w: Tensor, keys: Tensor) -> Tensor:
        return over_all(grad(loss))(pcast(w, "x", to="varying"), keys)

    torch.testing.assert_close(device_get(body(w, keys)), wanted)


def test_derivatives_go_past_draws() -> None:
    def f(x: Tensor) -> Tensor:
        return (x * random.normal(KEY, (3,))).sum()

    noise = random.normal(KEY, (3,))
    assert torch.equal(grad(f)(torch.ones(3)), noise)
    assert torch.equal(jvp(f, (torch.ones(3),), (torch.ones(3),))[1], noise.sum())


# --- in bodies ------------------------------------------------------------------------------------------------------


def _in_body(transport: str | None, check_vma: bool, jitted: bool) -> list[Tensor]:
    mesh = make_mesh((2, 2), ("x", "y"), transport=transport, device="cpu")
    types: list[str] = []

    def body(key: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = random.fold_in(key, axis_index("x"))
        alike, apart = random.normal(key, (3,)), random.uniform(own, (3,))
        if check_vma:
            types.extend(map(repr, map(typeof, (alike, apart))))
        return alike, apart, w * random.bernoulli(own, 0.5, w.shape)

    specs = P(), P("x"), P("x")
    f = shard_map(body, mesh=mesh, in_specs=(P(), P("x")), out_specs=specs, check_vma=check_vma)
    found = [device_get((jit(f) if jitted else f)(random.key(s), torch.ones(4))) for s in (0, 1)]
    assert not check_vma or types[:2] == ["f32[3]", "f32[3]{V:x}"]
    return [x for row in found for x in row]


def _expected_in_body() -> list[Tensor]:
    found = []
    for seed in (0, 1):
        own = [random.fold_in(random.key(seed), i) for i in (0, 1)]
        found += [random.normal(random.key(seed), (3,)), torch.cat([random.uniform(k, (3,)) for k in own])]
        found.append(torch.cat([random.bernoulli(k, 0.5, (2,)).float() for k in own]))
    return found


CHOICES = list(itertools.product((True, False), (True, False)))


@pytest.mark.parametrize(("check_vma", "jitted"), CHOICES)
def test_a_key_that_varies_gives_each_rank_its_own(check_vma: bool, jitted: bool) -> None:
    assert all(map(torch.equal, _in_body("simulation", check_vma, jitted), _expected_in_body()))


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    with Processes(4) as pool:
        yield pool


def _on_processes() -> None:
    for choice in CHOICES:
        assert all(map(torch.equal, _in_body(None, *choice), _expected_in_body())), choice
    mesh = make_mesh((2, 2), ("x", "y"), device="cpu")
    for draw in DRAWS.values():
        found = jit(lambda k, draw=draw: draw(k, spec=P("y"), mesh=mesh))(KEY)
        assert torch.equal(device_get(found), draw(KEY))


def test_processes_draw_the_same(four: Processes) -> None:
    four.run(_on_processes)


# --- mistakes -------------------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[Callable[[], Any], type[FspmdError], str]] = {
    "a seed": (lambda: random.normal(0, (3,)), ArgumentError, "normal got the int 0 for key; make one: random.key"),  # type: ignore[arg-type]
    "keys": (lambda: random.normal(random.split(KEY), (3,)), ArgumentError, r"which are several keys; .* vmap\("),
    "a float": (lambda: random.key(0.5), ArgumentError, "key got the float 0.5 for seed"),  # type: ignore[arg-type]
    "a large int": (lambda: random.key(2**64), ArgumentError, "key got the int 18446744073709551616 for seed"),
    "shape": (lambda: random.normal(KEY, (3.0,)), ArgumentError, "give it the global shape"),  # type: ignore[arg-type]
    "dtype": (lambda: random.normal(KEY, (3,), torch.int64), ArgumentError, "random numbers got the dtype torch.int64"),
    "bounds": (lambda: random.randint(KEY, (3,), 4, 4), ArgumentError, "minval below maxval"),
    "bounds of a dtype": (lambda: random.randint(KEY, (3,), 0, 300, torch.uint8), ArgumentError, "goes from 0 to 255"),
    "probability": (lambda: random.bernoulli(KEY, 1.5), ArgumentError, "give it a probability"),
    "spec": (lambda: random.normal(KEY, (3,), spec=P("z"), mesh=MESHES[0]), SpecError, "names the axis 'z'"),
    "number": (lambda: random.split(KEY, -1), ArgumentError, "split got the int -1 for num"),
    "data": (lambda: random.fold_in(KEY, 0.5), ArgumentError, "fold_in got the float 0.5"),  # type: ignore[arg-type]
    "bound": (
        lambda: random.uniform(KEY, (3,), maxval=torch.ones(4)),
        ArgumentError,
        "tensor of shape .4,. for maxval",
    ),
    "bound's kind": (
        lambda: random.uniform(KEY, (3,), minval="a"),
        ArgumentError,
        "uniform got the string 'a' for minval",
    ),  # type: ignore[arg-type]
    "axis": (lambda: random.categorical(KEY, torch.ones(2, 3), 2), ArgumentError, "categorical got the int 2 for axis"),
    "classes": (lambda: random.categorical(KEY, torch.ones(2, 0)), ArgumentError, "give it a dim that has classes"),
    "spec of rows": (
        lambda: random.permutation(KEY, torch.ones(3), spec=P("x"), mesh=MESHES[0]),
        ArgumentError,
        r"got spec= beside a tensor, .* permutation\(key, device_put\(x, P\('x'\)\)\)",
    ),
    "option": (lambda: random.normal(KEY, (3,), device_mesh=1), ArgumentError, "normal got device_mesh="),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    call, kind, words = MISTAKES[name]
    with pytest.raises(kind, match=words):
        call()


def test_no_keys_draw_nothing() -> None:
    keys = random.split(KEY, 3)[:0]
    assert vmap(lambda key: random.normal(key, (4,)))(keys).shape == (0, 4)
    found = vmap(lambda key: random.normal(key, (4,), spec=P("x"), mesh=make_mesh((2,), ("x",))))(keys)
    assert isinstance(found, Sharded)
    assert found.shape == (0, 4)
