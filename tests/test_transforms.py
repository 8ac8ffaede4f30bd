"""Every transform on trees of plain and `Sharded` leaves, outside and inside a body, alone and of each other, twice.

`transform_programs` writes chains of transforms. A sample runs always, far more with FSPMD_FULL=1.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from functools import cache
from typing import Any

import optree
import pytest
import torch
from full import FULL
from processes import Processes
from simulated import MESH, layouts
from torch import Tensor, func
from transform_programs import (
    F64,
    KINDS,
    LAYOUTS,
    STEPS,
    Chain,
    Layout,
    chains,
    close,
    expected,
    expected_alone,
    found_alone,
    found_inside,
    found_outside,
    same_layout,
)

import fspmd
from fspmd import Mesh, P, Sharded, device_get, device_put, make_mesh, pcast, psum, shard_map

# --- chains of transforms -------------------------------------------------------------------------------------------

Case = tuple[str, Chain, str, bool]  # where it runs, the chain, how the leaves are given, check_vma
PLACES = [("outside", kind, checked) for kind in KINDS for checked in (True, False)]
PLACES += [("inside", "plain", True), ("alone", "plain", True), ("alone", "plain", False)]


@cache
def mesh_of(axes: tuple[tuple[str, int], ...], transport: str = "simulation") -> Mesh:
    return make_mesh(tuple(size for _, size in axes), tuple(name for name, _ in axes), transport=transport)


def found(at: Layout, mesh: Mesh, case: Case) -> Any:
    where, chain, kind, checked = case
    if where == "inside":
        return found_inside(at, mesh, chain)
    if where == "alone":
        return found_alone(at, mesh, chain, checked)
    value, gradient, given = found_outside(at, mesh, kind, chain, checked)
    same_layout(gradient, given)
    return value, device_get(gradient)


def check(name: str, case: Case) -> None:
    at = LAYOUTS[name]
    judge = expected_alone(at, case[1]) if case[0] == "alone" else expected(at, case[1], at.tree())
    close(found(at, mesh_of(at.mesh), case), judge, (name, case))


@pytest.mark.one_of(20)
@pytest.mark.parametrize("step", ["", *STEPS])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_transform_wherever_it_may_run(name: str, step: str) -> None:
    for where, kind, checked in PLACES:
        check(name, (where, (step,) if step else (), kind, checked))


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_transforms_of_transforms(name: str) -> None:
    """All pairs and a sample of threes, each somewhere."""
    rng = random.Random(name)
    threes = rng.sample(list(chains(3)), 300 if FULL else 3)
    pairs = list(chains(2)) * len(PLACES) if FULL else rng.sample(list(chains(2)), 8)
    for i, chain in enumerate([*pairs, *threes]):
        where, kind, checked = PLACES[i // len(STEPS) ** 2] if FULL and i < len(pairs) else rng.choice(PLACES)
        check(name, (where, chain, kind, checked))


def _derived(api: Any, chain: tuple[str, ...], dim: int, x: Any) -> Any:
    """A derivative of a function of matrices, with one `vmap` over a dim of ``x`` somewhere in the chain."""

    def f(v: Any) -> Any:
        return v.sin() * (v.t() if v.dim() == 2 else v)

    for step in chain:
        if step == "jvp":
            f = functools.partial(lambda f, v: api.jvp(f, (v,), (v.cos(),))[1], f)
        else:
            f = api.vmap(f, in_dims=dim) if step == "vmap" else api.grad(functools.partial(lambda f, v: f(v).sum(), f))
    return f(x)


MAPPED = [chain for chain in itertools.product(("jvp", "vmap", "grad"), repeat=3) if chain.count("vmap") == 1]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("chain", MAPPED, ids="-".join)
def test_derivatives_of_mapped_derivatives_on_uneven_blocks(chain: tuple[str, ...], dim: int) -> None:
    x = torch.linspace(-1, 2, 5 * 5 * 5, dtype=F64).view(5, 5, 5)
    given = device_put(x, P(*("x" if d == (dim + 1) % 3 else None for d in range(3))), mesh=MESH)
    torch.testing.assert_close(device_get(_derived(fspmd, chain, dim, given)), _derived(func, chain, dim, x))


def _on_processes(cases: list[tuple[str, Case]]) -> list[Any]:
    return [found(LAYOUTS[name], mesh_of(LAYOUTS[name].mesh, "process_group"), case) for name, case in cases]


def test_on_processes() -> None:
    rng = random.Random(0)
    names = [name for name, at in LAYOUTS.items() if mesh_of(at.mesh).size == 4]
    longer = [chain for n in (2, 3) for chain in rng.sample(list(chains(n)), 100 if FULL else 2)]
    cases = [
        (rng.choice(names), (w, chain, k, c)) for chain in [*chains(1), *longer] for w, k, c in [rng.choice(PLACES)]
    ]
    simulated = [found(LAYOUTS[name], mesh_of(LAYOUTS[name].mesh), case) for name, case in cases]
    with Processes(4) as pool:
        for on_rank in pool.run(_on_processes, cases):
            for case, there, here in zip(cases, on_rank, simulated, strict=True):
                close(there, here, case)


# --- arguments, aux, cotangents -------------------------------------------------------------------------------------

X, W = torch.linspace(-1, 2, 21, dtype=F64).view(7, 3), torch.tensor([0.3, -0.7, 1.1], dtype=F64)
COUNTS = torch.arange(7) % 3
ON_X = device_put(X, P("x"), mesh=MESH)


def body_loss(tree: Any, counts: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    y = (tree["x"] @ tree["w"]).sin() * counts * scale
    return psum(y.square().sum(), "x"), y


SPECS = ({"x": P("x"), "w": P(), "none": P()}, P("x"), P())
mapped_loss = shard_map(body_loss, mesh=MESH, in_specs=SPECS, out_specs=(P(), P("x")))
unchecked_loss = shard_map(body_loss, mesh=MESH, in_specs=SPECS, out_specs=(P(), P("x")), check_vma=False)


def whole_loss(tree: Any, counts: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    y = (tree["x"] @ tree["w"]).sin() * counts * scale
    return y.square().sum(), y


@pytest.mark.parametrize("f", [mapped_loss, unchecked_loss])
@pytest.mark.parametrize("argnums", [0, (0,), -1, (2, 0), (-1, -3), [0, 2]])
def test_argnums_and_aux(argnums: Any, f: Any) -> None:
    """Integer tensors and None may stand among the arguments, and anything in aux."""
    scale = torch.tensor(1.5, dtype=F64)
    given = ({"x": ON_X, "w": W, "none": None}, COUNTS, scale)

    def with_aux(*args: Any) -> Any:
        value, y = f(*args)
        return value, {"y": y, "text": "text", "nothing": None, "f": f, "numbers": (1, 2.5)}

    (value, aux), gradient = fspmd.value_and_grad(with_aux, argnums, has_aux=True)(*given)
    order = [i % 3 for i in ((argnums,) if isinstance(argnums, int) else argnums)]
    expected, expected_value = func.grad_and_value(lambda *a: whole_loss(*a)[0], tuple(order))(
        {"x": X, "w": W}, COUNTS, scale
    )
    close((value, gradient), (expected_value, expected))
    close(aux["y"], whole_loss({"x": X, "w": W}, COUNTS, scale)[1])
    assert (aux["text"], aux["nothing"], aux["f"], aux["numbers"]) == ("text", None, f, (1, 2.5))
    assert not aux["y"].requires_grad
    same_layout(gradient, given[argnums] if isinstance(argnums, int) else tuple(given[i] for i in argnums))
    again, aux = fspmd.grad(with_aux, argnums, has_aux=True)(*given)
    close(again, expected)
    assert isinstance(aux["y"], Sharded)


@pytest.mark.parametrize("names", [*itertools.permutations("abc"), (2, 0, 1), ("b", 0, "a")])
@pytest.mark.parametrize("on_mesh", [True, False])
def test_a_dict_of_weights_keeps_its_keys_in_order(names: Any, on_mesh: bool) -> None:
    plain = {name: (W * (i + 1)).sin().requires_grad_() for i, name in enumerate(names)}
    powers = {name: i for i, name in enumerate(reversed(names), 2)}
    loss = lambda weights: sum((weights[name] ** powers[name]).sum() for name in names)  # noqa: E731
    weights = {name: device_put(w.detach(), P(), mesh=MESH) if on_mesh else w.detach() for name, w in plain.items()}
    expected = dict(zip(plain, torch.autograd.grad(loss(plain), [*plain.values()]), strict=True))
    for found in (fspmd.grad(loss)(weights), fspmd.vjp(loss, weights)[1](torch.ones((), dtype=F64))[0]):
        assert list(found) == list(names)
        for name in names:
            close(found[name], expected[name])
        same_layout(found, weights)
    with pytest.raises(fspmd.ArgumentError, match=re.escape(f"weights[{names[1]!r}] is i64")):
        fspmd.grad(loss)({**weights, names[1]: COUNTS})


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap", "vjp"])
def test_aux_within_another_transform_is_differentiable(transform: str) -> None:
    def ours(w: Tensor) -> Tensor:
        def with_aux(w: Tensor) -> Any:
            value, y = mapped_loss({"x": ON_X, "w": w, "none": None}, COUNTS, W[0])
            return value, {"y": y, "text": "text"}

        gradient, aux = fspmd.grad(with_aux, has_aux=True)(w)
        assert aux["text"] == "text"
        return gradient.sum() * device_get(aux["y"]).sum()

    def whole(w: Tensor) -> Tensor:
        value = lambda w: whole_loss({"x": X, "w": w}, COUNTS, W[0])  # noqa: E731
        return func.grad(lambda w: value(w)[0])(w).sum() * value(w)[1].sum()

    by: dict[str, Any] = {
        "grad": lambda api, f: api.grad(f)(W),
        "jvp": lambda api, f: api.jvp(f, (W,), (W.cos(),)),
        "vmap": lambda api, f: api.vmap(f)(torch.stack([W, W.sin()])),
        "vjp": lambda api, f: api.vjp(lambda w: (f(w), w.sin()), W, has_aux=True)[1](torch.tensor(2.0, dtype=F64)),
    }
    close(by[transform](fspmd, ours), by[transform](func, whole))


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()])
def test_cotangents_sharded_and_plain(spec: P, checked: bool) -> None:
    f = shard_map(lambda x, w: (x * w).sin(), mesh=MESH, in_specs=(spec, P()), out_specs=spec, check_vma=checked)
    w = torch.tensor(0.7, dtype=F64)
    out, pull = fspmd.vjp(f, device_put(X, spec, mesh=MESH), w)
    expected = func.vjp(lambda x, w: (x * w).sin(), X, w)[1](X.cos())
    for cotangent in (X.cos(), device_put(X.cos(), spec, mesh=MESH)):
        close(pull(cotangent), expected)
        gradients = pull(cotangent)
        same_layout(gradients, (out, w))
        second = fspmd.grad(lambda c: (device_get(fspmd.vjp(f, X, w)[1](c)[0]) * X).sum())(cotangent)
        same_layout(second, cotangent)
        close(second, X * w * (X * w).cos())


def test_gradients_of_pending_sums_change_places() -> None:
    """A value that is reduced has a gradient that is unreduced, and the other way round."""
    f = shard_map(lambda x, r: (x @ r).sin(), mesh=MESH, in_specs=(P("x"), P(reduced={"x"})), out_specs=P("x"))
    r = device_put(W, P(reduced={"x"}), mesh=MESH)
    _, pull = fspmd.vjp(f, X, r)
    _, gradient = pull(torch.ones(7, dtype=F64))
    assert gradient.spec.partition == P(None, unreduced={"x"})
    close(gradient, func.grad(lambda w: (X @ w).sin().sum())(W))
    _, pull = fspmd.vjp(
        shard_map(lambda g: g * 2, mesh=MESH, in_specs=P(unreduced={"x"}), out_specs=P(unreduced={"x"})), gradient
    )
    assert pull(r)[0].spec is r.spec
    close(pull(W)[0], 2 * W)


@pytest.mark.parametrize("checked", [True, False])
def test_backward_of_a_loss_on_plain_leaves(checked: bool) -> None:
    f = mapped_loss if checked else unchecked_loss
    leaves = {"x": X.clone().requires_grad_(), "w": W.clone().requires_grad_(), "none": None}
    scale = device_put(W[1], P(), mesh=MESH).requires_grad_()
    for times in (1, 2):
        f(leaves, COUNTS, scale)[0].backward()
        expected = func.grad(lambda *a: whole_loss(*a)[0], (0, 2))({"x": X, "w": W}, COUNTS, W[1])
        found = ({"x": leaves["x"].grad, "w": leaves["w"].grad}, scale.grad)
        close(found, optree.tree_map(lambda g, times=times: times * g, expected))
    assert scale.grad.spec is scale.spec


# --- torch's own calls in a body ------------------------------------------------------------------------------------


def _backward(loss: Tensor, leaves: list[Tensor]) -> Any:
    loss.backward(inputs=leaves)
    return [leaf.grad for leaf in leaves]


def _autograd_backward(loss: Tensor, leaves: list[Tensor]) -> Any:
    torch.autograd.backward([loss], [torch.ones_like(loss)], inputs=leaves)
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("by", [torch.autograd.grad, _backward, _autograd_backward])
def test_inputs_of_a_backward_pass_are_the_leaves_themselves(by: Any, rows: int, checked: bool) -> None:
    x = torch.linspace(-1, 2, 3 * rows, dtype=F64).view(rows, 3)

    def body(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
        by_x, by_w = by((leaves[0] @ leaves[1]).sin().sum(), leaves)
        return by_x, by_w if checked else psum(by_w, "x")

    f = shard_map(body, mesh=MESH, in_specs=(P("x"), P()), out_specs=(P("x"), P()), check_vma=checked)
    close(f(x, W), func.grad(lambda x, w: (x @ w).sin().sum(), (0, 1))(x, W))


@pytest.mark.parametrize("positional", [True, False])
def test_an_invariant_cotangent_of_a_varying_output_gets_a_summed_gradient(positional: bool) -> None:
    def body(x: Tensor, c: Tensor) -> Tensor:
        leaf, c = x.detach().requires_grad_(), c.detach().requires_grad_()
        out = leaf.sin().sum(0)
        more = (c,) if positional else ()
        kwargs = {} if positional else {"grad_outputs": [c]}
        (gradient,) = torch.autograd.grad([out], [leaf], *more, **kwargs, create_graph=True)
        return torch.autograd.grad(gradient.sum(), c)[0]

    f = shard_map(body, mesh=MESH, in_specs=(P("x"), P()), out_specs=P())
    close(f(X, W), X.cos().sum(0))


def test_a_cast_made_within_a_transform_ends_with_it() -> None:
    """The same constant beside varying values at one level of derivatives after another."""
    two, ws = torch.tensor(2.0, dtype=F64), torch.stack([W, W.cos()])

    def nested(f: Any, api: Any, ws: Tensor) -> Any:
        def twice(w: Tensor) -> Tensor:
            _, pull = api.vjp(f, w)
            return (pull(two)[0] + pull(two * 3)[0]).sin().sum()

        return api.vmap(api.grad(lambda w: api.grad(twice)(w).sum()))(ws)

    def body(x: Tensor) -> Any:
        w = pcast(ws, "x", to="varying")
        nested(lambda w: (x @ w).sin().sum(), fspmd, w)
        return fspmd.grad(lambda w: nested(lambda w: (x @ w).sin().sum(), fspmd, w).sum())(w)[None]

    f = shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    whole = [func.grad(lambda w, x=x: nested(lambda w: (x @ w).sin(), func, w).sum())(ws) for x in X[:4]]
    close(f(X[:4]), torch.stack(whole))


@pytest.mark.parametrize("mesh", [MESH, make_mesh((2, 3), ("x", "y"), transport="simulation")], ids=repr)
def test_a_loss_that_is_reduced_has_the_gradient_of_one_loss(mesh: Mesh) -> None:
    """Weights that are reduced make a loss that is: its cotangent counts once, not once per rank."""
    x, w = torch.randn(8, 3, dtype=F64), torch.randn(6, 3, dtype=F64)

    def loss(w: Any, x: Any) -> Any:
        return torch.tanh(x @ w.T).pow(2).mean()

    gradient, tangent = func.jvp(func.grad(lambda w: loss(w, x)), (w,), (x[:6],))
    for spec in layouts(mesh, 2):
        leaf, laid = device_put(w, spec, mesh=mesh).requires_grad_(), device_put(x, P("x"), mesh=mesh)
        loss(leaf, laid).backward()
        assert leaf.grad is not None
        close(leaf.grad, gradient)
        along = device_put(x[:6], spec, mesh=mesh)
        for given in (laid, device_put(x, P(), mesh=mesh)):
            close(fspmd.grad(loss)(leaf, given), gradient)
            close(fspmd.jvp(fspmd.grad(lambda w, x=given: loss(w, x)), (leaf.detach(),), (along,))[1], tangent)
