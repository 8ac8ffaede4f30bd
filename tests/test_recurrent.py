"""Recurrent layers beside themselves unsharded: a batch that is cut stays so, and what else is cut is right."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from full import FULL
from processes import Processes
from torch import nn
from torch._higher_order_ops.map import map as hop_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fspmd import (
    FspmdError,
    NoRuleError,
    P,
    communication_log,
    device_get,
    device_put,
    functional_call,
    jit,
    make_mesh,
    rank_map,
    shard_map,
)

F64 = torch.float64
LAYERS: tuple[Any, ...] = (nn.LSTM, nn.GRU, nn.RNN)


def check(layer: Any, mesh: Any, batch: int, first: bool, spec: P, weights: P, around: Any = lambda f: f) -> None:
    torch.manual_seed(0)
    module = layer(3, 6, 2, batch_first=first, bidirectional=True, dtype=F64)
    x = torch.randn(*((batch, 5) if first else (5, batch)), 3, dtype=F64, requires_grad=True)
    expected, *states = module(x)
    weight = torch.randn_like(expected)
    grads = torch.autograd.grad((expected * weight).sum(), [x, *module.parameters()])
    names = dict(module.named_parameters())
    params = {n: device_put(p.detach(), weights, mesh=mesh).requires_grad_() for n, p in names.items()}
    given = device_put(x.detach(), spec, mesh=mesh).requires_grad_()
    with communication_log() as log:
        out, *last = around(lambda params, given: functional_call(module, params, given))(params, given)
    torch.testing.assert_close(device_get(out), expected)
    found = last[0] if isinstance(last[0], tuple) else last
    wanted = states[0] if isinstance(states[0], tuple) else states
    for one, state in zip(found, wanted, strict=True):
        torch.testing.assert_close(device_get(one), state)
    dim = 0 if first else 1
    if not weights.axes and given.spec.partition[dim]:
        assert (list(log), out.spec.partition[dim]) == ([], "x"), str(log)
    (out * weight).sum().backward()
    for leaf, grad in zip((given, *params.values()), grads, strict=True):
        torch.testing.assert_close(device_get(leaf.grad), grad)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("sizes", [(3,), (2, 2)], ids=str)
def test_layers(sizes: tuple[int, ...], layer: Any) -> None:
    mesh = make_mesh(sizes, ("x", "y")[: len(sizes)], transport="simulation")
    for batch, first in ((6, True), (4, False), (2, True)):
        for spec, weights in itertools.product((P("x"), P(None, "x"), P(None, None, "x")), (P(), P("x"))):
            check(layer, mesh, batch, first, spec if mesh.shape["x"] <= batch else P(), weights)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()], ids=repr)
def test_packed_sequences(spec: P, layer: Any) -> None:
    """Every rank runs all of them, of batches and weights that are cut or whole."""
    mesh = make_mesh((4,), ("x",), transport="simulation")
    torch.manual_seed(0)
    module = layer(3, 6, 2, bidirectional=True, dtype=F64)
    x = torch.randn(5, 3, 3, dtype=F64)

    def run(params: Any, x: Any) -> Any:
        packed = pack_padded_sequence(x, torch.tensor([2, 5, 3]), enforce_sorted=False)
        out, states = functional_call(module, params, packed)
        last = states[0] if isinstance(states, tuple) else states
        return pad_packed_sequence(out)[0].sin().sum() + last.cos().sum()

    names = {name: p.detach() for name, p in module.named_parameters()}
    whole = {"x": x, **names}
    for weights in (P("x"), P(), None):
        params = names if weights is None else {n: device_put(p, weights, mesh=mesh) for n, p in names.items()}
        found, want = {"x": device_put(x, spec, mesh=mesh), **params}, whole
        leaves = [{n: p.clone().requires_grad_() for n, p in one.items()} for one in (found, want)]
        for one in leaves:
            run({n: p for n, p in one.items() if n != "x"}, one["x"]).backward()
        for name, p in leaves[1].items():
            torch.testing.assert_close(device_get(leaves[0][name].grad), p.grad)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_is_after_a_call_what_it_was(layer: Any) -> None:
    mesh, module = make_mesh((4,), ("x",), transport="simulation"), layer(3, 6)
    module(torch.ones(5, 4, 3))
    before = dict(vars(module))
    params = device_put({name: p.detach() for name, p in module.named_parameters()}, P(), mesh=mesh)
    functional_call(module, params, device_put(torch.ones(5, 4, 3), P(None, "x"), mesh=mesh))
    assert vars(module).keys() == before.keys()
    assert all(vars(module)[name] is x for name, x in before.items())


def test_dropout_between_layers_has_a_way_too() -> None:
    mesh = make_mesh((4,), ("x",), transport="simulation")
    module = nn.GRU(3, 6, 2, dropout=0.5, batch_first=True)
    params = {n: device_put(p.detach(), P(), mesh=mesh) for n, p in module.named_parameters()}
    x = torch.randn(8, 5, 3)
    module.eval()
    torch.testing.assert_close(
        device_get(functional_call(module, params, device_put(x, P("x"), mesh=mesh))[0]), module(x)[0]
    )
    module.train()
    assert functional_call(module, params, device_put(x, P("x"), mesh=mesh))[0].shape == (8, 5, 6)


def on_processes() -> None:
    mesh = make_mesh((2,), ("x",))
    for layer, batch in [*itertools.product(LAYERS[:2], (3, 1))][:: 1 if FULL else 3]:
        check(layer, mesh, batch, True, P("x"), P())
    check(nn.GRU, mesh, 4, True, P("x"), P(), jit)


def test_on_processes() -> None:
    with Processes(2) as pool:
        pool.run(on_processes)


def test_flex_attention_says_what_to_write_and_that_works() -> None:
    mesh = make_mesh((2,), ("x",), transport="simulation")
    q = device_put(torch.randn(2, 2, 16, 8), P("x"), mesh=mesh)
    with pytest.raises(NoRuleError, match=r"^flex_attention\(\) runs functions .*rank_map\(flex_attention, q, k, v\)"):
        flex_attention(q, q, q)
    body = shard_map(lambda *qkv: rank_map(flex_attention, *qkv), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    torch.testing.assert_close(device_get(body(q, q, q)), F.scaled_dot_product_attention(*[device_get(q)] * 3))


def test_operators_that_run_functions_say_what_to_write() -> None:
    """Also where torch compiles them to call them at once, which fails in Dynamo's words."""
    x = device_put(torch.randn(4, 3), P("x"), mesh=make_mesh((2,), ("x",), transport="simulation"))
    ops: Any = torch.ops.higher_order
    calls: dict[str, Callable[[], Any]] = {
        "while_loop": lambda: ops.while_loop(lambda a: a.sum() < 5, lambda a: (a + 1,), (x,), ()),
        "cond": lambda: ops.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
        "cond ": lambda: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
        "while_loop ": lambda: while_loop(lambda a: a.sum() < 5, lambda a: (a + 1,), (x,)),
        "scan ": lambda: scan(lambda c, a: (c + a, c + a), x[0], x),
        "map_impl ": lambda: hop_map(lambda a: a + 1, x),
        "scan": lambda: ops.scan(lambda c, a: (c + a, c + a), [x[0]], [x], []),
        "associative_scan": lambda: ops.associative_scan(lambda a, b: a + b, [x], []),
        "map_impl": lambda: ops.map_impl(lambda a: (a + 1,), [x], []),
        "flex_attention": lambda: ops.flex_attention(x, x, x, None, (), 1.0, {}),
    }
    for name, call in calls.items():
        with pytest.raises(
            FspmdError, match=rf"^{name.strip()}\(\) runs functions .* write Python's own while, if and for"
        ):
            call()


def test_in_bodies_too() -> None:
    """Where nothing is known of the types of what torch compiles; `rank_map` runs them as they are."""
    x = device_put(torch.randn(4, 3), P("x"), mesh=make_mesh((2,), ("x",), transport="simulation"))
    calls: tuple[Callable[[Any], Any], ...] = (
        lambda x: while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x))[1],
        lambda x: hop_map(lambda row: row * 8, x),
    )
    for f in calls:
        with pytest.raises(FspmdError, match=r"\(\) in a body runs functions that torch compiles. .*rank_map"):
            shard_map(f, mesh=x.spec.mesh, in_specs=P("x"), out_specs=P("x"))(x)
        ranks = shard_map(lambda x: rank_map(f, x), mesh=x.spec.mesh, in_specs=P("x"), out_specs=P("x"))  # noqa: B023
        torch.testing.assert_close(device_get(ranks(x)), device_get(x) * 8)
