"""Multi-head attention: values and gradients are torch's under any layout, and nothing moves over batch and heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated import layouts
from torch import Tensor, nn
from torch.nn import functional as F

from fspmd import (
    ArgumentError,
    ColwiseParallel,
    Flat,
    P,
    RowwiseParallel,
    communication_log,
    device_get,
    device_put,
    functional_call,
    make_mesh,
    parallelize,
    reshard,
)

F64 = torch.float64
LINE = make_mesh((4,), ("x",), transport="simulation")
GRID = make_mesh((2, 3), ("a", "b"), transport="simulation")
L, S, B, E, H = 5, 7, 3, 8, 4
LATER = torch.ones(L, S, dtype=torch.bool).triu(2)
SHORT = torch.tensor([[n >= length for n in range(S)] for length in (7, 4, 5)])


def waves(*shape: int) -> Tensor:
    return torch.linspace(-2, 3, torch.Size(shape).numel(), dtype=F64).view(shape).sin()


def called(q: Any, kv: Any, weights: Any, **options: Any) -> tuple[Any, Any]:
    w, b, out_w, out_b = weights
    own = {"bias_k": None, "bias_v": None, "zero": False} | {
        k: options.pop(k) for k in ("bias_k", "bias_v", "zero") if k in options
    }
    given = (own["bias_k"], own["bias_v"], own["zero"], 0.0)
    return F.multi_head_attention_forward(q, kv, kv, E, H, w, b, *given, out_w, out_b, **options)


WEIGHTS = (waves(3 * E, E), waves(3 * E), waves(E, E).cos(), waves(E))
OPTIONS: dict[str, dict[str, Any]] = {
    "weights": {},
    "no weights": {"need_weights": False},
    "weights of each head": {"average_attn_weights": False},
    "bool mask": {"attn_mask": LATER, "need_weights": False},
    "number mask and padding": {"attn_mask": waves(L, S), "key_padding_mask": waves(B, S)},
    "masks of each head": {"attn_mask": waves(B * H, L, S) > 0.95, "key_padding_mask": SHORT, "need_weights": False},
    "causal": {"attn_mask": torch.ones(L, S, dtype=torch.bool).triu(1), "is_causal": True, "need_weights": False},
    "more keys": {"bias_k": waves(1, 1, E), "bias_v": waves(1, 1, E), "zero": True, "attn_mask": LATER},
    "given keys": {"static_k": waves(B * H, S, E // H), "static_v": waves(B * H, S, E // H), "need_weights": False},
    "separate": {
        "use_separate_proj_weight": True,
        "q_proj_weight": waves(E, E),
        "k_proj_weight": waves(E, E).cos(),
        "v_proj_weight": waves(E, E).exp(),
    },
}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_under_every_layout(name: str) -> None:
    options = OPTIONS[name]
    x, y = waves(L, B, E).requires_grad_(), waves(S, B, E).cos().requires_grad_()
    expected = called(x, y, WEIGHTS, **options)
    slope = torch.autograd.grad((expected[0] * waves(L, B, E)).sum(), (x, y), allow_unused=True)
    for mesh, spec in [*((LINE, spec) for spec in layouts(LINE, 3)), (GRID, P("a", "b")), (GRID, P(None, ("b", "a")))]:
        x_, y_ = (device_put(one.detach(), spec, mesh=mesh).requires_grad_() for one in (x, y))
        found = called(x_, y_, WEIGHTS, **options)
        torch.testing.assert_close(device_get(found[0]), expected[0], msg=f"{spec}")
        assert (found[1] is None) == (expected[1] is None)
        if expected[1] is not None:
            torch.testing.assert_close(device_get(found[1]), expected[1], msg=f"{spec}")
        reshard((found[0] * waves(L, B, E)).sum(), P()).backward()
        for one, want in zip((x_, y_), slope, strict=True):
            if want is not None:
                torch.testing.assert_close(device_get(one.grad), want, msg=f"{spec}")


def test_unbatched_and_as_a_module() -> None:
    module = nn.MultiheadAttention(E, H, dtype=F64)
    x = waves(L, E)
    expected = module(x, x, x)
    for spec in layouts(LINE, 2):
        x_ = device_put(x, spec, mesh=LINE)
        for found, want in zip(module(x_, x_, x_), expected, strict=True):
            torch.testing.assert_close(device_get(found), want)


@pytest.mark.parametrize("need_weights", [False, True])
def test_nothing_moves_where_batch_and_heads_are_sharded(need_weights: bool) -> None:
    mesh = make_mesh((2, 4), ("dp", "tp"), transport="simulation")
    x = device_put(waves(L, 4, E), P(None, "dp"), mesh=mesh)
    rows, columns = (device_put(waves(E, E), spec, mesh=mesh) for spec in (P("tp"), P(None, "tp")))
    options = OPTIONS["separate"] | dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), rows)
    with communication_log() as log:
        out, _ = called(
            x, x, (None, None, columns, None), need_weights=need_weights, average_attn_weights=False, **options
        )
        assert not log
    assert out.spec.partition == P(None, "dp", None, unreduced={"tp"})


def test_a_packed_projection_cut_along_all_three_is_exchanged_once() -> None:
    x = device_put(waves(L, B, E), P(), mesh=LINE)
    rows, columns = (
        device_put(waves(*shape), spec, mesh=LINE) for shape, spec in (((3 * E, E), P("x")), ((E, E), P(None, "x")))
    )
    with communication_log() as log:
        called(x, x, (rows, None, columns, None), need_weights=False)
    assert [one.kind for one in log] == ["ragged_all_to_all"]


def test_a_packed_projection_of_which_each_part_is_cut_moves_nothing() -> None:
    each = ColwiseParallel(specs={"in_proj_*": P(Flat((3, None), (E, "x")))}, output=None)
    module = nn.MultiheadAttention(E, H, dtype=F64)
    styles = {"": each, "out_proj": RowwiseParallel(output=None)}
    params, plan = parallelize(dict(module.named_parameters()), styles, LINE)
    q, k = waves(L, B, E), waves(S, B, E).cos()
    q_, k_ = (device_put(one, P(), mesh=LINE) for one in (q, k))
    for given, whole in (((q_, q_, q_), (q, q, q)), ((q_, k_, k_), (q, k, k))):
        with communication_log() as log:
            out, _ = functional_call(module, params, *given, need_weights=False, styles=plan)
            assert not log
        assert out.spec.partition == P(None, None, None, unreduced={"x"})
        torch.testing.assert_close(device_get(out), module(*whole, need_weights=False)[0])


def test_what_torch_refuses_is_refused() -> None:
    x = device_put(waves(L, B, E), P("x"), mesh=LINE)
    with pytest.raises(ArgumentError, match="fails on the global tensors: Need attn_mask"):
        called(x, x, WEIGHTS, is_causal=True)
    with pytest.raises(ArgumentError, match="bias_k is set but bias_v is None"):
        called(x, x, WEIGHTS, bias_k=waves(1, 1, E))
    with pytest.raises(ArgumentError, match="was expecting embedding dimension of 6"):
        F.multi_head_attention_forward(x, x, x, 6, 2, WEIGHTS[0], None, None, None, False, 0.0, WEIGHTS[2], None)
