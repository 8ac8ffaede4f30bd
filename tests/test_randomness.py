"""Random numbers in a body: equal where a value is invariant, a stream per rank where it varies.

Each program runs on simulated ranks here and on four Gloo processes; all numbers drawn, and the state in which the
ordinary generator is left, must be the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import Processes
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fspmd
from fspmd import P, device_get, make_mesh, pcast, psum, rank_map, shard_map
from fspmd.transport.frame import frame_over
from fspmd.transport.randomness import draw_seed, fold_in, one_stream, per_rank_generators, streams

Body = Callable[[Tensor, Tensor], Any]


def masked(x: Tensor) -> Tensor:
    return F.dropout(torch.ones_like(x), 0.5)


def seeded(x: Tensor, generator: torch.Generator | None = None) -> torch.Generator:
    return torch.Generator().manual_seed(7)


def attention(x: Tensor, training: bool = True) -> Tensor:
    q = x.view(2, 1, 4, 8)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5 if training else 0.0)


#: bodies of a block that varies over both axes (8 x 8) and one that is invariant (4 x 4)
VARYING: dict[str, Body] = {
    "dropout": lambda x, w: F.dropout(x, 0.3),
    "dropout in a module": lambda x, w: torch.nn.Dropout(0.3)(x),
    "Dropout2d": lambda x, w: F.dropout2d(x.view(2, 4, 2, 4), 0.5),
    "alpha_dropout": lambda x, w: F.alpha_dropout(x, 0.3, training=True),
    "rand_like": lambda x, w: torch.rand_like(x),
    "randn_like": lambda x, w: torch.randn_like(x),
    "randint_like": lambda x, w: torch.randint_like(x, 10),
    "bernoulli": lambda x, w: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x, w: torch.empty_like(x).bernoulli_(0.3),
    "normal_": lambda x, w: torch.zeros_like(x).normal_(),
    "uniform_": lambda x, w: torch.zeros_like(x).uniform_(),
    "exponential_": lambda x, w: torch.zeros_like(x).exponential_(),
    "random_": lambda x, w: torch.zeros_like(x).random_(0, 9),
    "torch.normal": lambda x, w: torch.normal(x, 0.1),
    "poisson": lambda x, w: torch.poisson(x.abs()),
    "multinomial": lambda x, w: torch.multinomial(x.softmax(1), 3),
    "gumbel_softmax": lambda x, w: F.gumbel_softmax(x),
    "rrelu": lambda x, w: F.rrelu(x, training=True),
    "kaiming_uniform_": lambda x, w: torch.nn.init.kaiming_uniform_(torch.zeros_like(x)),
    "attention": lambda x, w: attention(x),
    "aten overload": lambda x, w: torch.ops.aten.rand_like.default(x),
    "aten native_dropout": lambda x, w: torch.ops.aten.native_dropout(x, 0.5, True)[0],
    "of a cast": lambda x, w: F.dropout(pcast(w, ("x", "y"), to="varying"), 0.5),
    "of a gathered value": lambda x, w: F.dropout(fspmd.all_gather(x.sum(0), ("x", "y")), 0.5),
    "beside an invariant": lambda x, w: torch.where(torch.rand_like(x) < 0.5, x, torch.rand(())),
    "one after another": lambda x, w: torch.cat([masked(x), masked(x)]),
    "in a given generator": lambda x, w: torch.zeros_like(x).normal_(generator=seeded(x)),
    "a given generator goes on": lambda x, w: [torch.zeros_like(x).uniform_(generator=g) for g in [seeded(x)] * 2][1],
    "rank_map": lambda x, w: rank_map(lambda x: x[:, :2] + torch.rand(8, 2), x),
    "checkpoint": lambda x, w: fspmd.grad(fspmd.checkpoint(lambda x: F.dropout(x * x, 0.5).sum()))(x),
    "vmap": lambda x, w: fspmd.vmap(lambda row: F.dropout(row, 0.5), randomness="different")(x),
    "grad": lambda x, w: fspmd.grad(lambda x: F.dropout(x.sin(), 0.5).sum())(x),
    "torch.func.grad": lambda x, w: torch.func.grad(lambda x: F.dropout(x.sin(), 0.5).sum())(x),
}
INVARIANT: dict[str, Body] = {
    "rand": lambda x, w: torch.rand(3, 3),
    "randn": lambda x, w: torch.randn(3),
    "randperm": lambda x, w: torch.randperm(9),
    "dropout": lambda x, w: F.dropout(w, 0.5),
    "rand_like": lambda x, w: torch.rand_like(psum(x, ("x", "y"))),
    "after varying draws": lambda x, w: torch.rand(3) + 0 * psum(F.dropout(x, 0.5).sum(), ("x", "y")),
    "after rank_map": lambda x, w: torch.rand(3) + 0 * psum(rank_map(lambda x: torch.rand(2).sum(), x), ("x", "y")),
    "in a given generator": lambda x, w: torch.rand(3, generator=seeded(x)),
}
ONE_AXIS: dict[str, Body] = {
    "dropout": lambda x, w: F.dropout(psum(torch.ones_like(x), "y"), 0.5),
    "rand_like": lambda x, w: torch.rand_like(psum(x, "y")),
}


def drawn(body: Body, out_specs: P, check_vma: bool = True) -> tuple[Tensor, Tensor]:
    """All that the body returns, as one global tensor, and the state the generator is left in."""
    mesh = make_mesh((2, 2), ("x", "y"), device="cpu")
    x, w = torch.linspace(-1, 1, 256, dtype=torch.float64).view(16, 16), torch.ones(4, 4)

    def flat(x: Tensor, w: Tensor) -> Tensor:
        return body(x, w).unsqueeze(0)

    torch.manual_seed(3)
    f = shard_map(flat, mesh=mesh, in_specs=(P("x", "y"), P()), out_specs=out_specs, check_vma=check_vma)
    return device_get(f(x, w)), torch.get_rng_state()


def all_drawn() -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    kinds = {"varying": (VARYING, P(("x", "y"))), "invariant": (INVARIANT, P()), "one axis": (ONE_AXIS, P("x"))}
    return {(kind, name): drawn(body, spec) for kind, (bodies, spec) in kinds.items() for name, body in bodies.items()}


@pytest.fixture(scope="module")
def gloo() -> Iterator[Processes]:
    with Processes(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def on_gloo(gloo: Processes) -> list[dict[tuple[str, str], tuple[Tensor, Tensor]]]:
    return gloo.run(all_drawn)


@pytest.mark.parametrize("name", VARYING)
def test_varying_draws_differ_from_rank_to_rank(name: str) -> None:
    blocks, _ = drawn(VARYING[name], P(("x", "y")))
    assert len(blocks) == 4
    for i in range(4):
        for j in range(i):
            assert not torch.equal(blocks[i], blocks[j])


@pytest.mark.parametrize("name", ONE_AXIS)
def test_draws_are_equal_along_axes_that_a_value_does_not_vary_over(name: str) -> None:
    blocks, _ = drawn(ONE_AXIS[name], P("x"))
    assert len(blocks) == 2
    assert not torch.equal(blocks[0], blocks[1])


@pytest.mark.one_of(4)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("varying", name) for name in VARYING),
        *(("invariant", name) for name in INVARIANT),
        *(("one axis", name) for name in ONE_AXIS),
    ],
)
def test_processes_draw_what_simulated_ranks_draw(
    kind: str, name: str, on_gloo: list[dict[tuple[str, str], tuple[Tensor, Tensor]]]
) -> None:
    """The same numbers, and every rank's generator left in the same state."""
    bodies, spec = {"varying": (VARYING, P(("x", "y"))), "invariant": (INVARIANT, P())}.get(kind, (ONE_AXIS, P("x")))
    values, state = drawn(bodies[name], spec)
    for results in on_gloo:
        found, left = results[kind, name]
        torch.testing.assert_close(found, values, rtol=0, atol=0)
        assert torch.equal(left, state)


@pytest.mark.parametrize("name", VARYING)
def test_equal_seeds_draw_equal_numbers(name: str) -> None:
    assert torch.equal(drawn(VARYING[name], P(("x", "y")))[0], drawn(VARYING[name], P(("x", "y")))[0])


def test_an_invariant_draw_is_that_of_torch_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3, 3)
    assert torch.equal(drawn(INVARIANT["rand"], P())[0][0], expected)


def test_drawing_nothing_leaves_the_generator_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for body in (
        lambda x, w: F.dropout(x, 0.5, training=False),
        lambda x, w: F.dropout(x, 0.0),
        lambda x, w: attention(x, training=False),
        lambda x, w: torch.nn.Dropout(0.3).eval()(x),
        lambda x, w: F.rrelu(x, training=False),
        lambda x, w: torch.native_dropout(x, 0.5, False)[0],
        lambda x, w: torch.ops.aten.native_dropout(x, 0.5, train=False)[0],
        lambda x, w: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*[x.view(1, 1, *x.shape)] * 3)[0],
        lambda x, w: fspmd.nn.ring_attention(*[x.view(1, 1, *x.shape)] * 3, "x", mask=fspmd.nn.Causal())[0, 0],
    ):
        _, state = drawn(body, P(("x", "y")))
        assert torch.equal(state, before)


def test_a_varying_draw_advances_the_generator_once() -> None:
    """However much it draws, however many ranks."""
    torch.manual_seed(3)
    draw_seed()
    assert torch.equal(drawn(VARYING["dropout"], P(("x", "y")))[1], torch.get_rng_state())


def test_a_given_generator_is_honoured() -> None:
    """It gives the seed; the ordinary generator stays where it is."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    values, state = drawn(VARYING["in a given generator"], P(("x", "y")))
    assert torch.equal(state, before)
    torch.manual_seed(99)
    again, _ = drawn(VARYING["in a given generator"], P(("x", "y")))
    assert torch.equal(values, again)
    later, _ = drawn(VARYING["a given generator goes on"], P(("x", "y")))
    assert not torch.equal(values, later)


def test_dropout_keeps_the_right_share_on_every_rank() -> None:
    mesh = make_mesh((4,), ("x",), transport="simulation")
    f = shard_map(lambda x: F.dropout(x, 0.25), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    torch.manual_seed(0)
    out = device_get(f(torch.ones(4, 40000)))
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    for row in out:
        share = (row == 0).double().mean().item()
        assert abs(share - 0.25) < 5 * (0.25 * 0.75 / 40000) ** 0.5
    kept = (out != 0).double()
    together = (kept[0] * kept[1]).mean().item()  # streams of two ranks are independent
    assert abs(together - 0.75**2) < 5 * (0.75**2 * (1 - 0.75**2) / 40000) ** 0.5


@pytest.mark.parametrize("checked", [True, False])
def test_tangents_of_zeros_in_a_function_that_may_draw(checked: bool) -> None:
    """Weights that do not move have tangents without memory; no rank draws those."""
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(4, 2).double()
    mesh = make_mesh((4,), ("x",), transport="simulation")
    x = torch.randn(12, 3, 4, dtype=torch.float64)

    def slope(x: Tensor) -> Tensor:
        tangent: Tensor = torch.func.jvp(lambda x: attention(x, x, x)[0], (x,), (x * 1,))[1]
        return tangent

    f = shard_map(slope, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=checked)
    torch.testing.assert_close(device_get(f(x)), torch.cat([slope(block) for block in x.chunk(4)]))


Layer = Callable[[Tensor], Tensor]
RECOMPUTED: dict[str, Callable[[Layer], Layer]] = {
    "kept": lambda f: f,
    "checkpoint": fspmd.checkpoint,
    "checkpoint in checkpoint": lambda f: fspmd.checkpoint(fspmd.checkpoint(f)),
    "torch's": lambda f: lambda x: torch_checkpoint(f, x, use_reentrant=False),
    "torch's in torch's": lambda f: RECOMPUTED["torch's"](RECOMPUTED["torch's"](f)),
}


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("name", RECOMPUTED)
def test_gradients_see_the_mask_that_forward_drew(name: str, checked: bool) -> None:
    mesh = make_mesh((4,), ("x",), transport="simulation")
    layer = RECOMPUTED[name](lambda x: F.dropout(x * psum(x, "x").sign() * x, 0.5))
    f = shard_map(layer, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=checked)
    x = torch.arange(1.0, 401.0, dtype=torch.float64)
    out, pull = fspmd.vjp(f, x)
    (grad,) = pull(torch.ones(400, dtype=torch.float64))
    torch.testing.assert_close(grad, torch.where(device_get(out) != 0, 4 * x, 0.0))


def test_unchecked_bodies_draw_what_each_process_would() -> None:
    """Without types nothing varies: every rank draws from its own copy of one generator."""
    blocks, state = drawn(lambda x, w: F.dropout(torch.ones_like(x), 0.5), P(("x", "y")), check_vma=False)
    torch.manual_seed(3)
    expected = F.dropout(torch.ones(8, 8, dtype=torch.float64), 0.5)
    for block in blocks:
        assert torch.equal(block, expected)
    assert torch.equal(state, torch.get_rng_state())


def unchecked_on_gloo() -> tuple[Tensor, Tensor]:
    return drawn(lambda x, w: F.dropout(torch.ones_like(x), 0.5), P(("x", "y")), check_vma=False)


def test_unchecked_processes_draw_the_same(gloo: Processes) -> None:
    values, state = unchecked_on_gloo()
    for found, left in gloo.run(unchecked_on_gloo):
        assert torch.equal(found, values)
        assert torch.equal(left, state)


# --- streams --------------------------------------------------------------------------------------------------------


def test_seeds_of_streams_are_spread_and_stable() -> None:
    seeds = {fold_in(seed, index) for seed in range(100) for index in range(100)}
    assert len(seeds) == 10000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert fold_in(0, 0) == 0xE220A8397B1DCDAF & (2**63 - 1)  # the first output of splitmix64 from 0


def test_one_stream_leaves_the_generator_as_it_was() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with one_stream(5, 2):
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with one_stream(5, 2):
        assert torch.equal(torch.rand(3), first)
    with one_stream(5, 3):
        assert not torch.equal(torch.rand(3), first)


def test_streams_of_a_frame_repeat_along_the_axes_of_a_wider_one() -> None:
    mesh = make_mesh((2, 3), ("x", "y"), transport="simulation")
    narrow, wide = frame_over(mesh, ("x",)), frame_over(mesh, ("x", "y"))
    found = []
    with streams(narrow, 5), per_rank_generators(wide) as switch:
        for i in range(wide.volume):
            switch(i)
            found.append(torch.rand(2))
    for i, (x, _) in enumerate(wide.coordinates()):
        with one_stream(5, x):
            assert torch.equal(torch.rand(2), found[i])


def test_a_stream_goes_on_within_one_torch_call() -> None:
    mesh = make_mesh((2,), ("x",), transport="simulation")
    held = frame_over(mesh, ("x",))
    rows: list[list[Tensor]] = []
    with streams(held, 5):
        for _ in range(2):
            with per_rank_generators(held) as switch:
                rows.append([(switch(i), torch.rand(2))[1] for i in range(2)])
    for i in range(2):
        with one_stream(5, i):
            assert torch.equal(torch.rand(4), torch.cat([rows[0][i], rows[1][i]]))
