"""Decoding with a cache that is cut over ranks: tokens, slots, memory, communication, errors."""

import math
import re
from typing import Any

import pytest
import torch
from decoding_programs import (
    CASES,
    F64,
    Case,
    completed,
    refusals,
    refused,
    right,
    run,
    served,
    weights,
    wrong,
)
from full import FULL, sample
from processes import Processes
from sampling_programs import all_drawn
from torch import Tensor
from torch.nn import functional as F

from fspmd import P, Sharded, communication_log, device_get, device_put, jit, make_mesh, shard_map
from fspmd.errors import ArgumentError, ShapeError, VarianceError
from fspmd.nn import Causal, KVCache, Mask, Prefix, SlidingWindow, cached_attention, merge_over, own_heads
from fspmd.nn.parts import PartialAttention

BOTH = P(None, "tp", "cp")


@pytest.mark.parametrize(("case", "chunk"), [(c, n) for n in (1, 3) for c in sample(CASES, 4, str(n))], ids=str)
def test_tokens_are_those_of_one_device(case: Case, chunk: int) -> None:
    assert run(case, "simulation", False, chunk) == right(case)


@pytest.mark.parametrize(("case", "chunk"), [(c, n) for n in (1, 3) for c in sample(CASES, 3, f"r{n}")], ids=str)
def test_a_record_gives_the_tokens_of_one_device(case: Case, chunk: int) -> None:
    assert run(case, "simulation", True, chunk) == right(case)


@pytest.mark.parametrize("case", [Case((1, 1, 1), 4, 2), Case((1, 2, 2), 4, 1), Case((1, 4, 1), 8, 2)], ids=str)
def test_sequences_come_and_go_without_a_new_record(case: Case) -> None:
    w = weights(case)
    prompts = [[1, 5, 2, 7, 3], [4], [2, 2, 8], [6, 0, 9, 8, 1, 3, 2], [3], [7, 7]]
    found, records = served(case, "simulation", prompts, slots=2)
    assert found == [completed(w, case, prompt, 3) for prompt in prompts]
    assert records == (1, 1)


def test_processes_give_the_tokens_of_one_device() -> None:
    of_four = [case for case in CASES if math.prod(case.sizes) == 4]
    with Processes(4) as pool:
        for jitted in (False, True):
            for found in pool.run(wrong, sample(of_four, 1, str(jitted)), jitted, seconds=3000 if FULL else 300):
                assert not found
        drawn = pool.run(all_drawn, (2, 2), "process_group", torch.float32)
        assert drawn == [all_drawn((1, 1), "simulation", torch.float32)] * 4
        first, *others = pool.run(refusals, "process_group")
        assert all(other == first for other in others)
        check_refusals(first)


# --- what moves, and what is written ----------------------------------------------------------------------------------


def attend(mesh: Any, cache: KVCache, axis: Any = "cp", **options: Any) -> Any:
    """``step(q, k, v, cache, sinks=None)`` gives the attention and the cache."""
    heads = P(None, "tp")

    def body(q: Tensor, k: Tensor, v: Tensor, cache: KVCache, sinks: Tensor | None) -> Any:
        cache = cache.append(k, v, axis=axis)
        return cached_attention(q, cache, axis=axis, sinks=sinks, **options), cache

    given = heads, heads, heads, cache.specs, P("tp")
    mapped = shard_map(body, mesh=mesh, in_specs=given, out_specs=(heads, cache.specs))
    return lambda q, k, v, cache, sinks=None: mapped(q, k, v, cache, sinks)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)])
def test_a_step_moves_what_a_closed_form_says(sizes: tuple[int, int]) -> None:
    """A maximum and a sum over cp of value_width + 2 float64 for each query and head of a rank, and nothing else."""
    mesh, (tp, cp) = make_mesh(sizes, ("tp", "cp"), transport="simulation"), sizes
    cache = KVCache.zeros(1, 3, 2, 12, 4, value_width=6, dtype=F64, spec=BOTH, mesh=mesh)
    q, k, v = (torch.randn(3, heads, 1, width, dtype=F64) for heads, width in ((4, 4), (2, 4), (2, 6)))
    step = attend(mesh, cache)
    for call in (step, jit(step)):
        call(q, k, v, cache)
        with communication_log() as log:
            call(q, k, v, cache)
        assert len([event for event in log if event.price.moved]) == (0 if cp == 1 else 3)
        assert sum(event.price.moved for event in log) == 2 * (cp - 1) / cp * 3 * (4 // tp) * (6 + 2) * 8


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)])
def test_flops_of_a_step_have_a_closed_form(sizes: tuple[int, int]) -> None:
    """Of each query its scores and its products with the values of all rows that the rank has."""
    mesh, (tp, cp) = make_mesh(sizes, ("tp", "cp"), transport="simulation"), sizes
    cache = KVCache.zeros(1, 3, 2, 12, 4, dtype=torch.float32, spec=BOTH, mesh=mesh)
    q, k = (torch.randn(3, heads, 1, 4) for heads in (4, 2))
    program = jit(attend(mesh, cache)).lower(q, k, k, cache)
    assert program.cost().flops == 2 * 3 * (4 // tp) * (12 // cp + 1) * (4 + 4)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2)])
def test_a_donated_cache_is_written_in_place(sizes: tuple[int, int]) -> None:
    mesh = make_mesh(sizes, ("tp", "cp"), transport="simulation")
    cache = KVCache.zeros(2, 3, 2, 12, 4, dtype=F64, spec=BOTH, mesh=mesh)
    heads = P(None, "tp")

    def body(q: Tensor, k: Tensor, v: Tensor, cache: KVCache) -> Any:
        layers = [layer.append(k, v, axis="cp") for layer in cache.layers]
        return [cached_attention(q, layer, axis="cp") for layer in layers], KVCache.of(layers)

    call = shard_map(body, mesh=mesh, in_specs=(heads, heads, heads, cache.specs), out_specs=(heads, cache.specs))
    step = jit(call, donate_argnums=3)
    q, k, v = torch.randn(3, 3, 2, 1, 4, dtype=F64)

    def memory(cache: KVCache) -> list[int]:
        blocks = [getattr(x.local, "shards", [x.local]) for x in (*cache.keys, *cache.values)]  # type: ignore[attr-defined]
        return [block.data_ptr() for row in blocks for block in row]

    _, cache = step(q, k, v, cache)
    before = memory(cache)
    for _ in range(3):
        _, cache = step(q, k, v, cache)
    assert memory(cache) == before
    assert device_get(cache.lengths).tolist() == [4, 4, 4]


def test_a_position_lies_on_one_rank() -> None:
    """Position p on rank p % n, at place p // n."""
    mesh = make_mesh((1, 3), ("tp", "cp"), transport="simulation")
    cache = KVCache.zeros(1, 2, 1, 10, 1, spec=BOTH, mesh=mesh)
    assert cache.capacity == 12
    call = attend(mesh, cache)
    position = torch.arange(1.0, 11).view(1, 1, 10, 1)
    for part in position.split([4, 1, 3, 2], 2):
        x = torch.cat([part, -part])
        _, cache = call(x, x, x, cache)
    rows = device_get(cache.keys[0]).view(2, 3, 5)[:, :, :4]
    assert rows[0, :, :3].tolist() == [[1, 4, 7], [2, 5, 8], [3, 6, 9]]
    assert rows[0, 0, 3] == 10
    assert torch.equal(rows[1], -rows[0])
    assert device_get(cache.lengths).tolist() == [10, 10]


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (2, 2), (1, 3)])
def test_windows_sinks_and_gradients_are_those_of_dense_attention(sizes: tuple[int, int], has_sinks: bool) -> None:
    mesh = make_mesh(sizes, ("tp", "cp"), transport="simulation")
    cache = KVCache.zeros(1, 3, 2, 12, 4, value_width=6, dtype=F64, spec=BOTH, mesh=mesh)
    leaves = [torch.randn(3, h, 7, w, dtype=F64, requires_grad=True) for h, w in ((4, 4), (2, 4), (2, 6))]
    sinks = torch.linspace(-1, 2, 4, dtype=F64).requires_grad_() if has_sinks else None
    call, outs = attend(mesh, cache, mask=SlidingWindow(3), scale=0.3), []
    for parts in zip(*(x.split([2, 1, 4], 2) for x in leaves), strict=True):
        out, cache = call(*parts, cache, sinks)
        outs.append(device_get(out))
    out, place = torch.cat(outs, 2), torch.arange(7)
    near = (place[:, None] >= place) & (place[:, None] - place < 3)
    q, k, v = (x.repeat_interleave(4 // x.shape[1], 1) for x in leaves)
    scores = (q @ k.mT * 0.3).where(near, -torch.inf)
    if sinks is not None:
        leaves.append(sinks)
        scores = torch.cat([scores, sinks[:, None, None].expand(3, 4, 7, 1)], -1)
    expected = scores.softmax(-1)[..., :7] @ v
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    grads, exact = (torch.autograd.grad(y.sin().sum(), leaves, retain_graph=True) for y in (out, expected))
    torch.testing.assert_close(grads, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize(
    ("mask", "needed"),
    [
        (Causal() | Prefix(4), 4),
        (Causal() & SlidingWindow(2) | Prefix(3), 3),
        (SlidingWindow(2) | Prefix(2) | Prefix(4), 4),
        (Causal() & Prefix(4), 0),
        (Prefix(4) & SlidingWindow(3) | Causal() & SlidingWindow(2), 4),
        ((Causal() | Prefix(4)) & SlidingWindow(2), 4),
    ],
)
def test_all_positions_see_a_prefix(mask: Mask, needed: int, sizes: tuple[int, int]) -> None:
    """If it is in the cache; before, results are nan."""
    mesh, place = make_mesh(sizes, ("tp", "cp"), transport="simulation"), torch.arange(7)
    q, k, v = (torch.randn(3, h, 7, 4, dtype=F64) for h in (4, 2, 2))
    seen = mask.allows(place[:, None], place) & ((place[:, None] >= place) | (place < needed))
    for parts in ([7], [4, 1, 2], [2, 3, 1, 1]):
        cache = KVCache.zeros(1, 3, 2, 12, 4, dtype=F64, spec=BOTH, mesh=mesh)
        call, outs = attend(mesh, cache, mask=mask), []
        for each in zip(*(x.split(parts, 2) for x in (q, k, v)), strict=True):
            out, cache = call(*each, cache)
            outs.append(device_get(out))
        out, expected = torch.cat(outs, 2), F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        if parts[0] < needed:
            assert out[:, :, : parts[0]].isnan().all()
            out, expected = out[:, :, parts[0] :], expected[:, :, parts[0] :]
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", [P(None, "tp"), P("tp"), P("dp", "tp")], ids=str)
def test_global_values_give_what_blocks_give(heads: P) -> None:
    mesh = make_mesh((3, 2), ("dp", "tp"), transport="simulation")
    cache = KVCache.zeros(1, 3, 2, 12, 4, dtype=F64, spec=heads, mesh=mesh)
    q, k, v = (device_put(torch.randn(3, h, 5, 4, dtype=F64), heads, mesh=mesh) for h in (4, 2, 2))
    expected = F.scaled_dot_product_attention(*map(device_get, (q, k, v)), is_causal=True, enable_gqa=True)
    with communication_log() as log:
        cache = cache.append(k, v)
        cached_attention(q, cache)
    assert not list(log)
    sinks = device_put(torch.zeros(4, dtype=F64), P("tp"), mesh=mesh)
    scores = F.pad(device_get(q) @ device_get(k).repeat_interleave(2, 1).mT / 2, (0, 1))
    scores = scores.where(torch.cat([torch.ones(5, 5).tril(), torch.ones(5, 1)], 1).bool(), -torch.inf)
    with_sinks = scores.softmax(-1)[..., :5] @ device_get(v).repeat_interleave(2, 1)
    torch.testing.assert_close(device_get(cached_attention(q, cache, sinks=sinks)), with_sinks)
    with pytest.raises(ShapeError, match=r"got sinks of shape \(3,\) for 4 heads; give it one of each head"):
        cached_attention(q, cache, sinks=torch.zeros(3, dtype=F64))
    out: Any = cached_attention(q, cache)
    assert isinstance(out, Sharded)
    assert out.spec.partition.axes == heads.axes
    torch.testing.assert_close(device_get(out), expected)
    assert device_get(cache.lengths).tolist() == [5, 5, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_parts_lose_no_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 64, 8, dtype=dtype)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)

    def error(n: int) -> float:
        mesh = make_mesh((1, n), ("tp", "cp"), transport="simulation")
        cache = KVCache.zeros(1, 2, 4, 64, 8, dtype=dtype, spec=BOTH, mesh=mesh)
        out = device_get(attend(mesh, cache)(q, k, v, cache)[0])
        assert out.dtype is dtype
        return float((out.double() - exact).norm() / exact.norm())

    assert error(8) <= 1.1 * error(1)


def test_parts_of_ranks_without_keys_are_nothing() -> None:
    mesh = make_mesh((3,), ("cp",), transport="simulation")
    out, lse = torch.tensor([[1.0], [0.0], [5.0]]), torch.tensor([0.0, -torch.inf, 0.0])
    for parts, right_out, right_lse in ((lse, 3.0, math.log(2)), (lse - torch.inf, 0.0, -math.inf)):
        call = shard_map(
            lambda o, x: merge_over(PartialAttention(o[None], x[None]), "cp"),
            mesh=mesh,
            in_specs=P("cp"),
            out_specs=P(),
        )
        whole = call(out, parts)
        assert device_get(whole.out).flatten().tolist() == [right_out]
        assert device_get(whole.lse).flatten().tolist() == pytest.approx([right_lse])


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2)])
def test_a_full_slot_keeps_what_it_has_and_is_told(sizes: tuple[int, int]) -> None:
    mesh = make_mesh(sizes, ("tp", "cp"), transport="simulation")
    cache = KVCache.zeros(1, 2, 2, 4, 4, dtype=F64, spec=BOTH, mesh=mesh)
    call = attend(mesh, cache)
    x = torch.randn(2, 2, 3, 4, dtype=F64)
    _, cache = call(x, x, x, cache)
    cache = cache._replace(lengths=device_put(torch.tensor([3, 1]), P(), mesh=mesh))
    cache.check()
    out, after = call(x[:, :, :2], x[:, :, :2], x[:, :, :2], cache)
    lost = device_get(out).isnan().all(-1).all(1)
    assert lost.tolist() == [[False, True], [False, False]]
    assert not device_get(out)[1].isnan().any()
    with pytest.raises(ShapeError, match="slots 0 have up to 5 positions, and the cache has room for 4"):
        after.check()
    rows, old = (device_get(c.keys[0])[0, :, : -sizes[1]] for c in (after, cache))
    n = sizes[1]
    if n == 1:
        assert torch.equal(rows[:, :3], old[:, :3])
        assert torch.equal(rows[:, 3], x[0, :, 0])
    after.reset(torch.tensor([True, False])).check()


def test_a_missing_axis_is_an_error() -> None:
    mesh = make_mesh((1, 2), ("tp", "cp"), transport="simulation")
    cache = KVCache.zeros(1, 3, 2, 12, 4, spec=BOTH, mesh=mesh)
    x = torch.randn(3, 2, 1, 4)
    with pytest.raises(VarianceError, match="cp"):
        attend(mesh, cache, axis=())(x, x, x, cache)
    uncut = KVCache.zeros(1, 3, 2, 12, 4, spec=P(None, "tp"), mesh=mesh)
    with pytest.raises(VarianceError, match="cp"):
        attend(mesh, uncut)(x, x, x, uncut)


def check_refusals(found: list[tuple[str, str, int]]) -> None:
    for (error, match, _), (raised, message, communicated) in zip(refused(), found, strict=True):
        assert raised == error.__name__, message
        assert re.search(match, message), message
        assert communicated == 0


def test_what_does_not_fit_is_refused() -> None:
    check_refusals(refusals("simulation"))
    mesh = make_mesh((4,), ("tp",), transport="simulation")
    for wrong_call, match in (
        (lambda: KVCache.zeros(1, 1, 3, 8, 4, spec=P(None, "tp"), mesh=mesh), "3 KV heads for 4 ranks"),
        (
            lambda: shard_map(lambda x: own_heads(x, "tp"), mesh=mesh, in_specs=P(), out_specs=P("tp"))(
                torch.randn(3, 1, 4)
            ),
            "3 KV heads for the 4 ranks",
        ),
    ):
        with pytest.raises(ShapeError, match=match):
            wrong_call()
    plain = KVCache.zeros(2, 2, 1, 8, 4)
    for wrong_call, match in (
        (lambda: KVCache.zeros(1, 1, 3, 0, 4), "the int 0 for capacity; give it an int from 1 on"),
        (lambda: KVCache.zeros(1, 1, 3, 8, 4, dtype=torch.int64), "floating dtype"),
        (lambda: KVCache.zeros(1, 1, 4, 8, 4, spec=P(None, None, None, "tp"), mesh=mesh), "slots, heads and positions"),
        (lambda: KVCache.of([]), "no layers"),
        (lambda: plain.specs, "plain tensors"),
        (lambda: plain.reset(torch.tensor([1, 0])), "a bool for each of the 2 slots"),
        (lambda: plain.append(torch.ones(2, 1, 1, 4), torch.ones(2, 1, 1, 4)), r"cache.layers\[i\]"),
        (lambda: cached_attention(torch.ones(2, 1, 1, 4), plain.layers[0], scale="1"), "for scale"),
        (lambda: cached_attention(torch.ones(2, 1, 1, 4), plain.keys), "give it a KVCache"),
    ):
        with pytest.raises(ArgumentError, match=match):
            wrong_call()


def test_layers_are_the_parts_of_a_cache() -> None:
    cache = KVCache.zeros(3, 2, 1, 8, 4, value_width=2)
    again = KVCache.of(cache.layers)
    assert [len(layer.keys) for layer in cache.layers] == [1, 1, 1]
    assert all(x is y for x, y in zip((*again.keys, *again.values), (*cache.keys, *cache.values), strict=True))
    assert cache.values[0].shape == (2, 1, 9, 2)
    assert cache.capacity == 8


def _layers(cache: KVCache, x: Any, counts: Any = None) -> tuple[Any, KVCache]:
    """Layers of attention alone: what a layer gives is what the next one keeps."""
    layers = []
    for layer in cache.layers:
        layers.append(layer.append(x, x, counts=counts))
        x = cached_attention(x, layers[-1], counts=counts)
    return x, KVCache.of(layers)


def test_what_nobody_sees_reaches_no_result() -> None:
    """Padding past the capacity is nan from the second layer on, and a sequence may have held infinities."""
    start, more, other = (torch.randn(1, 1, n, 4, dtype=torch.float64) for n in (5, 4, 1))
    _, cache = _layers(KVCache.zeros(2, 1, 1, 8, 4, dtype=torch.float64), start)
    padded, full = _layers(cache, more, torch.tensor([2]))
    exact, _ = _layers(cache, more[:, :, :2])
    torch.testing.assert_close(padded[:, :, :2], exact)
    _, full = _layers(full, torch.full_like(more[:, :, :1], torch.inf))
    anew, _ = _layers(full.reset(torch.tensor([True])), other)
    torch.testing.assert_close(anew, other)
