"""Random torch functions on `Sharded` values: the same global tensor under every layout, and gradients through it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from full import FULL
from processes import Processes
from simulated import layouts
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fspmd
from fspmd import Mesh, P, Sharded, device_get, device_put, make_mesh

F64 = torch.float64
ONE, LINE, GRID, CUBE = (
    make_mesh(shape, ("x", "y", "z")[: len(shape)], transport="simulation") for shape in ((1,), (4,), (2, 3), (2, 2, 2))
)
MESHES = (LINE, GRID, CUBE)
SHAPE = (5, 3)
WHOLE = P()

#: of a positive tensor of the shape, and its layout
CASES: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "torch.dropout": lambda x: torch.dropout(x, 0.4, True),
    "dropout of all": lambda x: F.dropout(x, 1.0),
    "dropout of none": lambda x: F.dropout(x, 0.0),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x.unsqueeze(-1), 0.4, training=True),
    "dropout1d": lambda x: F.dropout1d(x.unsqueeze(-1) * 2, 0.4),
    "dropout1d without a batch": lambda x: F.dropout1d(x, 0.4),
    "dropout2d": lambda x: F.dropout2d(x[:, :, None, None], 0.4),
    "dropout3d": lambda x: F.dropout3d(x[:, :, None, None, None], 0.4),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, tau=0.7),
    "gumbel_softmax, hard": lambda x: F.gumbel_softmax(x, hard=True, dim=0),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
    "randint_like": lambda x: torch.randint_like(x, 3, 50),
    "bernoulli": torch.bernoulli,
    "bernoulli of p": lambda x: torch.bernoulli(x, 0.3),
    "normal of means": lambda x: torch.normal(x, 2.0),
    "normal of deviations": lambda x: torch.normal(1.0, x),
    "normal of both": lambda x: torch.normal(x, x),
    "poisson": lambda x: torch.poisson(x * 40),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "multinomial": lambda x: torch.multinomial(x, 2),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 9), x),
    "gamma": lambda x: torch.distributions.Gamma(x, x + 1).rsample(),
    "dirichlet": lambda x: torch.distributions.Dirichlet(x).rsample(),
    "laplace": lambda x: torch.distributions.Laplace(x, x).rsample((2,)),
    "multinomial, counted": lambda x: torch.distributions.Multinomial(5, x).sample(),
    "multinomial with replacement": lambda x: torch.multinomial(x, 7, replacement=True),
}
IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda x: x.normal_(1, 0.5),
    "uniform_": lambda x: x.uniform_(-1, 2),
    "exponential_": lambda x: x.exponential_(2.0),
    "cauchy_": lambda x: x.cauchy_(),
    "log_normal_": lambda x: x.log_normal_(0, 0.25),
    "geometric_": lambda x: x.geometric_(0.3),
    "random_": lambda x: x.random_(),
    "random_ to": lambda x: x.random_(10),
    "random_ from, to": lambda x: x.random_(-3, 10),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "fill_": lambda x: x.fill_(3),
    "zero_": lambda x: x.zero_(),
    "init.normal_": lambda x: nn.init.normal_(x, std=0.1),
    "init.xavier_uniform_": nn.init.xavier_uniform_,
    "init.kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x, a=math.sqrt(5)),
    "init.constant_": lambda x: nn.init.constant_(x, 2.0),
    "init.ones_": nn.init.ones_,
}


def base() -> Tensor:
    return torch.linspace(0.05, 0.95, 15, dtype=F64).reshape(SHAPE)


def outputs(out: Any) -> list[Sharded]:
    return list(out) if isinstance(out, tuple) else [out]


def run(f: Callable[[Any], Any], x: Any) -> list[Sharded]:
    torch.manual_seed(11)
    return outputs(f(x))


def put(mesh: Mesh, spec: P = WHOLE) -> Sharded:
    return device_put(base(), spec, mesh=mesh)


def check_layouts(f: Callable[[Any], Any], mesh: Mesh, specs: list[P]) -> None:
    expected = [out.local for out in run(f, put(ONE))]
    for spec in specs:
        for out, want in zip(run(f, put(mesh, spec)), expected, strict=True):
            assert isinstance(out, Sharded)
            assert (out.shape, out.dtype) == (tuple(want.shape), want.dtype)
            torch.testing.assert_close(device_get(out), want, rtol=1e-12, atol=1e-12, msg=lambda m, s=spec: f"{s}: {m}")


@pytest.mark.one_of(12)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_do_not_depend_on_the_layout(name: str, mesh: Mesh) -> None:
    check_layouts(CASES[name], mesh, layouts(mesh, 2)[:: 7 if mesh is CUBE else 1])


@pytest.mark.one_of(9)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name: str, mesh: Mesh) -> None:
    specs = [s for s in layouts(mesh, 2) if not s.unreduced or name.startswith(("normal", "uniform", "zero"))]
    check_layouts(IN_PLACE[name], mesh, specs[:: 7 if mesh is CUBE else 1])
    x = put(mesh)
    assert IN_PLACE[name](x) is x


@pytest.mark.one_of(6)
@pytest.mark.parametrize("name", [name for name in CASES if "dropout" in name or "rrelu" in name or "gumbel" in name])
def test_gradients(name: str) -> None:
    """Beside a function of plain tensors that draws the same numbers: what one rank does."""
    f = CASES[name]
    weight = torch.arange(1.0, 16, dtype=F64).cos().reshape(SHAPE)

    def loss(x: Sharded) -> Sharded:
        out = run(f, x)[0]
        return (out.reshape(SHAPE) * weight).sum()

    whole = put(ONE).requires_grad_()
    loss(whole).backward()
    for mesh in (LINE, GRID):
        for spec in layouts(mesh, 2):
            x = put(mesh, spec).requires_grad_()
            device_get(loss(x)).backward()
            assert x.grad is not None
            torch.testing.assert_close(device_get(x.grad), whole.local.grad, msg=lambda m, s=spec: f"{s}: {m}")


@pytest.mark.parametrize("drop", [F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout2d])
def test_dropout_of_nothing_is_its_operand(drop: Callable[..., Any]) -> None:
    """As torch has it: nothing is drawn, and a pending sum stays pending."""
    plain = torch.ones(4, 3, 2, 2)
    x = device_put(plain, P(unreduced={"x"}), mesh=LINE)
    state = torch.get_rng_state()
    assert drop(x, 0.0, True) is x
    assert drop(plain, 0.0, True) is plain
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_is_a_product_with_its_mask_and_moves_nothing() -> None:
    for spec in (P("x"), P(None, "x"), P(unreduced={"x"}), P(reduced={"x"}), P()):
        x = put(LINE, spec).requires_grad_()
        y = F.dropout(x, 0.25)
        assert y.spec.partition is x.spec.partition
        mask = (device_get(y.detach()) / base()).round(decimals=12)
        assert set(mask.unique().tolist()) <= {0.0, 1 / 0.75} or torch.allclose(
            mask.unique(), torch.tensor([0, 4 / 3]).double()
        )
        device_get(y).backward(torch.ones(SHAPE, dtype=F64))
        assert x.grad is not None
        torch.testing.assert_close(device_get(x.grad), mask)
        assert F.dropout(x, 0.25, training=False) is x


@pytest.mark.parametrize(
    "remember", [fspmd.checkpoint, lambda f: lambda x: torch_checkpoint(f, x, use_reentrant=False)]
)
def test_recomputation_draws_the_same_mask(remember: Callable[..., Any]) -> None:
    def layer(x: Sharded) -> Sharded:
        return F.dropout((x * x).sin(), 0.5).cos() * F.dropout(x, 0.5)

    grads = []
    for f in (layer, remember(layer)):
        torch.manual_seed(2)
        x = put(GRID, P("x", "y")).requires_grad_()
        device_get(f(x).sum()).backward()
        assert x.grad is not None
        grads.append(device_get(x.grad))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_distributions() -> None:
    """Means and variances of large samples, within four standard deviations."""
    n = 40_000
    torch.manual_seed(5)
    x = fspmd.empty(n, spec=P("x"), mesh=LINE, dtype=F64)
    for name, parameters, mean, variance in (
        ("normal_", (2.0, 3.0), 2.0, 9.0),
        ("uniform_", (-1.0, 3.0), 1.0, 16 / 12),
        ("exponential_", (0.5,), 2.0, 4.0),
        ("geometric_", (0.25,), 4.0, 0.75 / 0.25**2),
        ("bernoulli_", (0.3,), 0.3, 0.21),
        ("log_normal_", (0.0, 0.5), math.exp(0.125), (math.exp(0.25) - 1) * math.exp(0.25)),
        ("random_", (10,), 4.5, 99 / 12),
    ):
        found = device_get(getattr(x, name)(*parameters))
        assert abs(found.mean() - mean) < 4 * math.sqrt(variance / n), name
        assert abs(found.var() / variance - 1) < 0.15, name
    cauchy = device_get(x.cauchy_(1.0, 2.0))
    assert abs(cauchy.median() - 1) < 0.1
    assert abs((cauchy.abs() < 3).double().mean() - (math.atan(1) + math.atan(2)) / math.pi) < 0.02


@pytest.mark.parametrize("rate", [0.0, 0.3, 9.5, 10.5, 700.0])
def test_poisson_counts(rate: float) -> None:
    """Beside the distribution function of the counts: the regularised upper gamma function."""
    n = 40_000
    torch.manual_seed(7)
    found = device_get(torch.poisson(fspmd.full((n,), rate, spec=P("x"), mesh=LINE, dtype=F64)))
    assert abs(found.mean() - rate) <= 4 * math.sqrt(rate / n)
    for count in range(
        max(0, int(rate - 2 * math.sqrt(rate))), int(rate + 2 * math.sqrt(rate)) + 1, 1 + int(rate) // 50
    ):
        p = torch.special.gammaincc(torch.tensor(count + 1.0, dtype=F64), torch.tensor(rate, dtype=F64)).item()
        assert abs((found <= count).double().mean() - p) < 4.5 * math.sqrt(p * (1 - p) / n) + 1e-12


def test_multinomial_follows_its_weights() -> None:
    weights = torch.tensor([0.0, 1.0, 2.0, 5.0])
    x = device_put(weights.expand(5000, 4), P("x"), mesh=LINE)
    for replacement in (False, True):
        found = device_get(torch.multinomial(x, 3, replacement=replacement))
        assert found.shape == (5000, 3)
        counts = torch.bincount(found[:, 0], minlength=4) / 5000
        torch.testing.assert_close(counts, weights / 8, atol=0.03, rtol=0)
        if not replacement:
            assert (found.sort(1).values == torch.tensor([1, 2, 3])).all()


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    torch.manual_seed(1)
    x = fspmd.randn(200_000, spec=P("x"), mesh=LINE)
    y = device_get(F.alpha_dropout(x, 0.3, training=True))
    assert abs(y.mean()) < 0.02
    assert abs(y.var() - 1) < 0.03


def test_likes_lie_as_their_operand() -> None:
    for spec in layouts(GRID, 2):
        x = put(GRID, spec)
        for name, args in (("zeros", ()), ("ones", ()), ("full", (2.5,)), ("empty", ())):
            made = getattr(torch, f"{name}_like")(x, *args, dtype=torch.float32)
            assert made.spec.partition is P(*x.spec.partition)
            assert made.dtype == torch.float32
            if name != "empty":
                assert torch.equal(device_get(made), getattr(torch, f"{name}_like")(base(), *args).float())
            made = getattr(x, f"new_{name}")(SHAPE, *args)
            assert made.spec is x.spec.with_partition(P(*x.spec.partition))
            assert getattr(x, f"new_{name}")((7,), *args, dtype=torch.int64).spec.partition is P(None)
    assert x.new_zeros(2, 4, requires_grad=True).shape == x.new(2, 4).shape == x.new(torch.Size((2, 4))).shape == (2, 4)
    assert x.new().shape == (0,)
    assert torch.ones(3).type_as(x).dtype == F64
    assert device_get(x.new([1, 2])).tolist() == [1.0, 2.0]
    assert device_get(x.new_tensor([1, 2])).tolist() == [1.0, 2.0]
    assert torch.zeros_like(x, requires_grad=True).requires_grad


@pytest.mark.parametrize("draw", [lambda x, g: torch.normal(x, 1.0, generator=g), torch.poisson])
def test_a_plan_draws_nothing(draw: Callable[..., Any]) -> None:
    """Not from a generator either, of which a kernel is asked how its results lie."""
    whole = torch.ones(4, 6)
    found = [
        device_get(draw(x, torch.Generator().manual_seed(7)))
        for x in (device_put(whole, P("x"), mesh=LINE).t(), device_put(whole.t().contiguous(), P("x"), mesh=LINE))
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.int8, torch.bool, torch.float64], ids=str)
def test_ones_of_every_dtype(dtype: torch.dtype) -> None:
    """In blocks whose rows are cut in the middle of a word."""
    found = [
        device_get(device_put(torch.ones(5, 3).to(dtype), spec, mesh=GRID).bernoulli_(0.5, generator=_seeded()))
        for spec in (P(), P(None, "x"), P("y", "x"))
    ]
    assert all(torch.equal(x.float(), found[0].float()) for x in found)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("drop", [F.alpha_dropout, F.feature_alpha_dropout])
def test_dropout_of_integers_is_refused(drop: Callable[..., Any]) -> None:
    with pytest.raises(fspmd.FspmdError):
        drop(device_put(torch.ones(4, 2, dtype=torch.uint8), P("x"), mesh=LINE), 0.5, training=True)


def test_a_generator_of_ones_own() -> None:
    found = [device_get(put(LINE, P("x")).normal_(generator=torch.Generator().manual_seed(3))) for _ in range(2)]
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: F.dropout(x, 1.5), "between 0 and 1"),
        (lambda x: torch.dropout(x, -0.5, True), "between 0 and 1"),
        (lambda x: x.normal_(0, -1), "std=-1; give it a number that is 0 or more"),
        (lambda x: x.uniform_(3, 1), "from=3 or more"),
        (lambda x: x.random_(5, 5), "above from=5"),
        (lambda x: x.geometric_(0.0), "between 0 and 1"),
        (lambda x: x.exponential_(0.0), "above 0"),
        (lambda x: x.bernoulli_(2.0), "between 0 and 1"),
        (lambda x: x.to(torch.int64).normal_(), "got the dtype torch.int64"),
        (lambda x: torch.multinomial(x, 4), "from 1 to 3"),
        (lambda x: torch.dropout(x.sum(), 2.0, True), "between 0 and 1"),
        (lambda x: torch.feature_dropout(x[0], 0.5, True), "two dims or more"),
        (lambda x: F.dropout1d(x[0], 0.5), "give it 3 dims, or 2 without a batch"),
        (lambda x: F.rrelu(x, 0.5, 0.1, training=True), "lower"),
        (lambda x: base().bernoulli_(x), "plain tensor"),
        (lambda x: x.bernoulli_(torch.tensor(1.5)), "p that are out .* are between 0 and 1"),
        (lambda x: torch.bernoulli(put(LINE, P("x")) + 2), "p that are out .* are between 0 and 1"),
        (lambda x: torch.bernoulli(put(LINE, P()) + 2), "p that are out .* are between 0 and 1"),
        (lambda x: torch.normal(x, -1.0), "std that are out .* are 0 or more"),
        (lambda x: torch.normal(x, -torch.ones(3)), "std that are out .* are 0 or more"),
        (lambda x: torch.poisson(put(LINE, P()) * 0 - 1), "rates that are out .* are 0 or more"),
        (lambda x: torch.multinomial(put(LINE, P()) * 0 - 1, 1), "weights that are out .* are finite"),
    ],
)
def test_mistakes(call: Callable[[Any], Any], message: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=message) as caught:
        call(put(LINE, P("x")))
    assert isinstance(caught.value, fspmd.FspmdError)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("bad", [-1.0, torch.inf, torch.nan, 0.0])
def test_weights_that_are_cut_over_ranks_fail_on_all_of_them(bad: float) -> None:
    """One rank has them; what it makes of them is the greatest that all are told of."""
    weights = torch.tensor([[0.0, 0, 0, 0, bad], [1, 2, 3, 4, 5]])
    for call in (lambda x: x.multinomial(2), lambda x: x.multinomial(7, replacement=True)):
        with pytest.raises(fspmd.ArgumentError, match=r"weights that are out .* are finite"):
            call(device_put(weights, P(None, "x"), mesh=LINE))


def test_a_leaf_is_written_only_without_gradients() -> None:
    x = put(LINE, P("x")).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        x.normal_()
    with torch.no_grad():
        x.normal_()


def calls_of_processes() -> list[tuple[Callable[[Any], Any], P]]:
    """Each function with all layouts, or with one of them in turn."""
    specs = P("x"), P("y", "x"), P(None, ("x", "y"))
    calls = [(f, spec) for f in (*CASES.values(), *IN_PLACE.values()) for spec in specs]
    return calls if FULL else [calls[3 * i + i % 3] for i in range(len(calls) // 3)]


def on_processes() -> list[Tensor]:
    mesh = make_mesh((2, 2), ("x", "y"))
    return [device_get(out) for f, spec in calls_of_processes() for out in run(f, put(mesh, spec))]


def test_on_processes() -> None:
    with Processes(4) as pool:
        results = pool.run(on_processes)
    expected = [out.local for f, _ in calls_of_processes() for out in run(f, put(ONE))]
    for rank in results:
        for found, want in zip(rank, expected, strict=True):
            torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spec", layouts(LINE, 3), ids=str)
def test_noise_in_functions_that_become_graphs(spec: P) -> None:
    """What a function without a rule draws does not depend on the layout either."""
    weights = torch.eye(3, dtype=F64)
    found = []
    for mesh, lies in ((ONE, P()), (LINE, spec)):
        x = device_put(base()[:, None], lies, mesh=mesh)
        torch.manual_seed(9)
        out, _ = F.multi_head_attention_forward(
            x, x, x, 3, 1, weights.repeat(3, 1), None, None, None, False, 0.5, weights, None, training=True
        )
        found.append(device_get(out))
    torch.testing.assert_close(*found)


#: torch has no tangents of them
NO_TANGENTS = ("binomial", "gamma", "dirichlet")


@pytest.mark.one_of(6)
@pytest.mark.parametrize("name", [name for name in (*CASES, *IN_PLACE) if name not in NO_TANGENTS])
def test_transforms_see_the_numbers_that_are_drawn_outside_of_them(name: str) -> None:
    """Of even blocks, each of which a transform would wrap."""
    f = CASES[name] if name in CASES else lambda x: IN_PLACE[name](torch.empty_like(x))
    for spec in (P("x"), P(("x", "y"))):
        given = device_put(torch.cat([base(), base()[:1]]), spec, mesh=GRID)
        torch.manual_seed(7)
        expected = f(given)
        torch.manual_seed(7)
        found = fspmd.jvp(f, (given,), (given,))[0]
        for one, other in zip(tensors(found), tensors(expected), strict=True):
            torch.testing.assert_close(device_get(one), device_get(other), rtol=0, atol=0)


def tensors(out: Any) -> list[Any]:
    return list(out) if isinstance(out, tuple) else [out]


#: torch maps none of these over a value
NOT_MAPPED = {"binomial", "gamma", "dirichlet", "laplace", "multinomial, counted"}


@pytest.mark.one_of(6)
@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_MAPPED])
def test_mapped_draws_are_those_of_each_element(name: str) -> None:
    """``torch.vmap`` with ``randomness="same"`` beside calls one by one, with fewer rows than ranks, too."""
    whole = torch.rand(3, 2, 5, dtype=F64, generator=torch.Generator().manual_seed(0))

    def seeded(f: Callable[[Any], Any], x: Any) -> Tensor:
        torch.manual_seed(0)
        out = f(x)
        return device_get(out[0] if isinstance(out, tuple) else out)

    each = [seeded(CASES[name], device_put(x, WHOLE, mesh=ONE)) for x in whole.unbind(1)]
    for mesh, partition in ((LINE, P("x")), (LINE, P(None, None, "x")), (GRID, P("y", None, "x")), (GRID, P("x", "y"))):
        mapped = torch.vmap(CASES[name], in_dims=1, randomness="same")
        found = seeded(mapped, device_put(whole, partition, mesh=mesh))
        torch.testing.assert_close(found, torch.stack(each), msg=lambda text, at=partition: f"{at}: {text}")
