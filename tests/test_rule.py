"""Rules that users write: Python functions, ops of torch.library, bodies; and what `explain_rule` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dispatch_cases import check_case
from full import FULL
from torch import Tensor
from torch.nn import functional as F

import fspmd
from fspmd import ArgumentError, P, device_get, device_put, make_mesh, pmax, psum, rule
from fspmd.global_view.dispatch import forget_plans
from fspmd.redistribution.cost import Link, Topology, set_topology, topology
from fspmd.rules import table

LINE = make_mesh((4,), ("x",), transport="simulation")
WIDE = make_mesh((2, 3), ("x", "y"), transport="simulation")


@pytest.fixture(autouse=True)
def _only_bytes_cost() -> Iterator[None]:
    before = topology()
    set_topology(Topology(Link(0.0, 1e3), Link(0.0, 1e3), launch=0.0))
    yield
    set_topology(before)


@torch.library.custom_op("fspmd_tests::mul", mutates_args=())
def contract(x: Tensor, y: Tensor) -> Tensor:
    """A product of matrices under the name of another function."""
    return x @ y


@contract.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], y.shape[1])


def _saved(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, ct: Tensor) -> tuple[Tensor, Tensor]:
    x, y = ctx.saved_tensors
    return ct @ y.mT, x.mT @ ct


contract.register_autograd(_backward, setup_context=_saved)


def test_an_op_of_a_library_needs_a_rule_whatever_its_name() -> None:
    x = device_put(torch.ones(4, 6), P("x"), mesh=LINE)
    with pytest.raises(ArgumentError, match=r"mul\(\) has no rule for"):
        contract(x, torch.ones(6, 3))
    rule(contract, "m k, k n -> m n", linear="product")
    for mesh in (LINE, WIDE):
        check_case("op", (contract, ((4, 6), (6, 3))), mesh, 80 if FULL else 24)


def test_an_op_is_linear_in_bodies_as_in_the_global_view() -> None:
    op = torch.library.custom_op(
        "fspmd_tests::mul_in_bodies", lambda x, y: x @ y, mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor"
    )
    op.register_fake(lambda x, y: x @ y)
    terms, y = torch.randn(4, 5, 6), torch.randn(6, 3)
    specs: Any = P(unreduced={"x"}), P()
    f = fspmd.shard_map(op, mesh=LINE, in_specs=specs, out_specs=specs[0])
    for linear in ("product", "first", "", "product"):
        rule(op, "m k, k n -> m n", linear=linear)
        x: Any = device_put(terms, P("x"), mesh=LINE).sum(0)  # a pending sum
        if linear:
            for out in (f(x, y), op(x, y)):
                assert out.spec.partition.unreduced == {"x"}
                torch.testing.assert_close(device_get(out), terms.sum(0) @ y)
        else:
            assert not op(x, y).spec.partition.unreduced
            with pytest.raises(fspmd.VarianceError, match="only linear ops keep"):
                f(x, y)


def test_a_python_function() -> None:
    calls = []

    def scores(q: Tensor, k: Tensor, *, scale: float = 1.0) -> Tensor:
        calls.append(q.shape)
        return torch.tanh(q @ k.mT * scale)

    ruled = rule(scores, "... q [d], ... k [d] -> ... q k")
    assert torch.equal(ruled(torch.eye(2), torch.eye(2)), scores(torch.eye(2), torch.eye(2)))
    for mesh in (LINE, WIDE):
        check_case("scores", (lambda q, k: ruled(q, k, scale=0.5), ((3, 5, 2), (3, 4, 2))), mesh, 80 if FULL else 24)
    calls.clear()
    ruled(device_put(torch.ones(4, 8, 2), P("x"), mesh=LINE), torch.ones(4, 6, 2))
    assert calls[-1] == (1, 8, 2)


def test_a_body() -> None:
    def spread(site: Any, x: Tensor) -> Tensor:
        axes = site.axes["d"]
        top = pmax(torch.cat([x, torch.full_like(x[..., :1].sum(-1, keepdim=True), -9.0)], -1).detach().amax(-1), axes)
        e = (x - top[..., None]).exp()
        return e / psum(e.sum(-1), axes)[..., None]

    ruled = rule(lambda x: F.softmax(x, -1), "... [d] -> ... [d]", body=spread)
    for mesh in (LINE, WIDE):
        check_case("body", (ruled, ((3, 8),)), mesh, 80 if FULL else 24)
    assert ruled(device_put(torch.ones(3, 64), P(None, "x"), mesh=LINE)).spec.partition == P(None, "x")


@pytest.mark.parametrize(
    ("price", "is_by_body"),
    [
        (0, True),
        (0.5, True),
        (1e6, False),
        (lambda layout: 0.0, True),
        (lambda layout: 1e9, False),
        (lambda layout: layout.price("reduce", layout.row_bytes(), layout.row_bytes()), True),
        (lambda layout: layout.price("gather", 1 << 30, 1 << 32), False),
    ],
)
def test_a_body_runs_where_its_price_is_below_that_of_the_gather(price: Any, is_by_body: bool) -> None:
    ran = []

    def largest(site: Any, x: Tensor) -> Tensor:
        ran.append(site)
        return pmax(x.amax(-1), site.axes["d"])

    x = torch.randn(4, 64, dtype=torch.float64)
    ruled = rule(lambda x: x.amax(-1), "m [d] -> m", body=largest, price=price)
    out = ruled(device_put(x, P(None, "x"), mesh=LINE))
    assert torch.equal(fspmd.device_get(out), x.amax(-1))
    assert bool(ran) is is_by_body


@pytest.mark.parametrize("price", ["cheap", -1, float("nan"), True, None])
def test_a_price_that_is_none_is_told(price: Any) -> None:
    with pytest.raises(ArgumentError, match=r"rule got .* for price; give it a number of all-reduces"):
        rule(lambda x: x, "[d] -> [d]", body=lambda site, x: x, price=price)


@pytest.mark.parametrize("price", [lambda layout: "cheap", lambda layout: None, lambda layout: float("nan")])
def test_a_price_that_is_no_time_is_told(price: Any) -> None:
    ruled = rule(lambda x: x.amax(-1), "m [d] -> m", body=lambda site, x: pmax(x.amax(-1), site.axes["d"]), price=price)
    with pytest.raises(ArgumentError, match=r"^the price of a body gave .*; return µs, 0 or more"):
        ruled(device_put(torch.ones(4, 64), P(None, "x"), mesh=LINE))


def test_dims_that_only_some_results_have() -> None:
    """Of a sharded one a result may be a sum, a part of it, or independent of it; the rule does not tell."""

    def scores(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = q @ k
        return s, s.sum(0), q.amax(1)

    ruled = rule(scores, "q [d], [d] k -> q k, k, q")
    both = rule(lambda q, k: (q @ k, k * 2), "q d, [d] k -> q k, [d] k")
    for mesh in (LINE, WIDE):
        check_case("scores", (ruled, ((5, 3), (3, 6))), mesh, 60)
        check_case("both", (both, ((5, 3), (3, 6))), mesh, 60)
    q = device_put(torch.ones(8, 2), P(), mesh=LINE)
    assert both(q, device_put(torch.ones(2, 8), P(None, "x"), mesh=LINE))[1].spec.partition == P(None, "x")


@pytest.mark.parametrize("function", [F.dropout, F.normalize])
def test_a_rule_goes_before_what_is_known_of_a_function_that_is_no_row(function: Any) -> None:
    ran = []
    rule(function, "a [b] -> a [b]", body=lambda site, x, *_, **__: ran.append(site) or x)
    try:
        function(device_put(torch.ones(8, 64), P(None, "x"), mesh=LINE), 0.5)
    finally:
        table._ROWS.pop(function)
        forget_plans()
    assert ran


def test_a_rule_of_a_function_that_is_told_to_write_into_its_operand() -> None:
    x = device_put(torch.tensor([[-1.0, 2.0]] * 8), P("x"), mesh=LINE)
    rule(F.relu, "[a] b -> [a] b")
    try:
        assert F.relu(x, inplace=True) is x
    finally:
        table._ROWS.pop(F.relu)
        forget_plans()
    assert fspmd.device_get(x).tolist() == [[0.0, 2.0]] * 8


def test_a_rule_of_a_function_that_hands_on_to_another() -> None:
    x = device_put(torch.rand(4, 8), P(None, "x"), mesh=LINE)
    rule(F.log_softmax, "m [n] -> m [n]", body=lambda site, x, *_, **__: x * 0 + 7)
    try:
        assert fspmd.device_get(F.log_softmax(x, dim=1)).eq(7).all()
    finally:
        table._ROWS.pop(F.log_softmax)
        table.IN_C[F.log_softmax] = torch.log_softmax
        forget_plans()


def _twice(x: Any) -> Any:
    return x, x


@pytest.mark.parametrize(
    ("function", "pattern", "message"),
    [
        (lambda x: x @ x.mT, "m n -> m n", r"of shapes \(5, 3\) it made \(5, 5\), and 'n' would be both 3 and 5"),
        (lambda x: x.sum(0), "m n -> m", "'m' would be both 5 and 3"),
        (lambda x: x[None], "m n -> m n", "result 0 has 2 dims in the rule"),
        (lambda x: x, "m -> m", "operand 0 has 1 dim in the rule"),
        (_twice, "m n -> m n", "the rule has 1 result"),
        (lambda x: x, "m n -> m n, m n", "the rule has 2 results"),
        (lambda x: torch.cat([x, x]), "[m] n -> [m] n", "'m' would be both 5 and 10"),
        (lambda x: x * x[:, 0], "... -> ...", "fails on the global tensors"),
    ],
)
def test_a_rule_that_is_not_so_is_told(function: Any, pattern: str, message: str) -> None:
    x = device_put(torch.ones(5, 3), P("x"), mesh=LINE)
    with pytest.raises(ArgumentError, match=message):
        rule(function, pattern)(x)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda site, x: x[:, :1], r"gave a tensor of shape \(8, 1\), but a block of .* has shape \(8, 16\)"),
        (lambda site, x: (x, x), r"gave a tensor of shape \(8, 16\), a tensor .*, but its rule has 1 result"),
        (lambda site, x: None, r"the body of <lambda>\(\) gave None, but its rule has 1 result"),
    ],
)
def test_a_body_that_gives_other_blocks_is_told(body: Any, message: str) -> None:
    softmax = rule(lambda x: F.softmax(x, -1), "a [d] -> a [d]", body=body)
    with pytest.raises(ArgumentError, match=message):
        softmax(device_put(torch.ones(8, 64), P(None, "x"), mesh=LINE))


def test_operands_that_a_rule_does_not_have_are_told() -> None:
    x = device_put(torch.ones(5), P("x"), mesh=LINE)
    scaled = rule(lambda x, y=2: x * y, "m, m -> m")
    assert scaled(x).spec is scaled(x, 3.0).spec is scaled(x, x).spec is x.spec
    with pytest.raises(ArgumentError, match="the rule has 2 operands"):
        rule(lambda x, y, z: x + y + z, "m, m -> m")(x, x, x)


def test_explanations() -> None:
    assert fspmd.explain_rule(torch.add, torch.ones(4, 6), torch.ones(6)).splitlines() == [
        "add(f32[4, 6], f32[6]): a b, b -> a b",
        "  a sharded      P('x'), P() -> P('x')",
        "  b sharded      P(None, 'x'), P('x') -> P(None, 'x')",
        "  unreduced      P(unreduced={'x'}), P(unreduced={'x'}) -> P(unreduced={'x'})",
        "  reduced        P(reduced={'x'}), P(reduced={'x'}) -> P(reduced={'x'})",
        "  whole          P(), P() -> P()",
    ]
    assert fspmd.explain_rule(torch.softmax, torch.ones(4, 6), -1).splitlines() == [
        "softmax(f32[4, 6]): a [b] -> a [b]",
        "  a sharded      P('x') -> P('x')",
        "  b sharded      P(None, 'x') -> P(None, 'x') by a body",
        "  reduced        P(reduced={'x'}) -> P(reduced={'x'})",
        "  whole          P() -> P()",
    ]
    before = torch.get_rng_state()
    assert fspmd.explain_rule(F.mse_loss, torch.ones(4), torch.ones(4)).splitlines() == [
        "mse_loss(f32[4], f32[4]) is made of",
        "mse_loss(f32[4], f32[4]): a, a -> a",
        "  a sharded      P('x'), P('x') -> P('x')",
        "  reduced        P(reduced={'x'}), P(reduced={'x'}) -> P(reduced={'x'})",
        "  whole          P(), P() -> P()",
        "mean(f32[4]): a -> ",
        "  a sharded      P('x') -> P(unreduced={'x'})",
        "  unreduced      P(unreduced={'x'}) -> P(unreduced={'x'})",
        "  reduced        P(reduced={'x'}) -> P(reduced={'x'})",
        "  whole          P() -> P()",
    ]
    assert "  2 sharded      P(None, None, 'x'), P() -> P(None, None, 'x') by a body" in fspmd.explain_rule(
        F.conv1d, torch.ones(2, 4, 6), torch.ones(3, 4, 3)
    )
    assert "\n*(f32[3], f32[3]): a, a -> a" in fspmd.explain_rule(F.dropout, torch.ones(3))
    assert torch.equal(torch.get_rng_state(), before)
    assert fspmd.explain_rule(torch.nonzero, torch.ones(4)).splitlines() == [
        "nonzero(f32[4]) has no rule; calls of it give",
        "  dim 0 sharded      P('x') -> P() [all_gather_invariant]",
        "  whole              P() -> P()",
    ]
    assert fspmd.explain_rule(torch.zeros_like, torch.empty(4, 4, device="meta")).splitlines()[1:] == [
        "  dim 0 sharded      P('x') -> P('x')",
        "  dim 1 sharded      P(None, 'x') -> P(None, 'x')",
        "  whole              P() -> P()",
    ]
    assert "  dim 0 sharded      P('x') -> P('x')" in fspmd.explain_rule(F.one_hot)
    rows = "cross_entropy(f32[4, 3], i64[4]) is made of\nof_labels(f32[4, 3], i64[4]): a [b], a -> a\n"
    assert fspmd.explain_rule(F.cross_entropy, torch.ones(4, 3), torch.ones(4).long()).startswith(rows)


@pytest.mark.parametrize(
    ("func", "line"),
    [
        (torch.mm, "mm(f32[4, 4], f32[4, 4]): m k, k n -> m n"),
        (torch.bmm, "bmm(f32[4, 4, 4], f32[4, 4, 4]): b m k, b k n -> b m n"),
        (torch.add, "add(f32[4, 4], f32[4, 4]): a b, a b -> a b"),
        (torch.cat, "cat(f32[4, 4], f32[4, 4]): [a] b, [a] b -> [a] b"),
        (torch.where, "where(bool[4, 4], f32[4, 4], f32[4, 4]): a b, a b, a b -> a b"),
        (F.softmax, "softmax(f32[4, 4]): a [b] -> a [b]"),
        (F.layer_norm, "layer_norm(f32[4, 4]): a [b] -> a [b]"),
        (F.embedding, "embedding(i64[4, 4], f32[4, 4]): a b, [v] d -> a b d"),
        (F.conv2d, "conv2d(f32[4, 4, 4, 4], f32[4, 4, 4, 4]) is made of"),
        (
            rule(lambda q, k: q @ k.mT, "... q [d], ... k [d] -> ... q k"),
            "<lambda>(f32[4, 4], f32[4, 4]): q [d], k [d]",
        ),
    ],
)
def test_explanations_without_an_example(func: Callable[..., Any], line: str) -> None:
    assert fspmd.explain_rule(func).startswith(line)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("func", [torch.einsum, print, 3, Tensor.__eq__, Tensor.__lshift__])
def test_explanations_that_need_an_example(func: Any) -> None:
    with pytest.raises(ArgumentError, match="give it an example, explain_rule"):
        fspmd.explain_rule(func)


def test_explanations_of_calls_that_fail() -> None:
    for args, message in (
        ((F.mse_loss, torch.ones(4)), r"explain_rule calls mse_loss\(\), which fails: mse_loss\(\) missing 1 required"),
        (
            (F.mse_loss, torch.ones(4), torch.ones(3)),
            r"explain_rule calls mse_loss\(\), which fails: .* must match the size",
        ),
    ):
        with pytest.raises(ArgumentError, match=message):
            fspmd.explain_rule(*args)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.mm, "m k, k n"), r"the rule 'm k, k n' has no '->'"),
        ((torch.neg, "[m -> m"), r"has '\[m'; write a name for a dim"),
        ((torch.neg, "m -> n"), r"a result with 'n', which no operand has"),
        ((3, "m -> m"), r"rule got the int 3 for func"),
        ((torch.mm, None), r"rule got None for pattern"),
    ],
)
def test_what_is_no_rule(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        rule(*arguments)
    with pytest.raises(ArgumentError, match="linear='yes'"):
        rule(torch.mm, "m k, k n -> m n", linear="yes")
    with pytest.raises(ArgumentError, match="has no rule"):
        fspmd.explain_rule(print, torch.ones(3))


def test_a_float_is_in_no_key_unless_it_may_bear_on_sizes() -> None:
    scaled = rule(lambda x, v: x * v, "... n -> ... n")
    cut = rule(lambda x, v: x[:, : int(v)], "m n -> m 1")
    whole = torch.arange(24.0).reshape(4, 6)
    x, misses = device_put(whole, P("x"), mesh=LINE), []
    for v in (2.0, 3.0, 4.0):
        assert torch.equal(device_get(scaled(x, v)), whole * v)
        misses.append(fspmd.propagation_cache_info().misses)
        assert torch.equal(device_get(cut(x, v)), whole[:, : int(v)])
    assert misses[2] - misses[1] == misses[1] - misses[0] == 1  # of `cut`
