"""Attention over a sequence that is cut over ranks: values, gradients, layouts, masks, errors."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from context_programs import F64, LAYOUTS, MASKS, Case, compute, dense, seen_by, worst
from full import FULL, sample
from processes import Processes
from torch import Tensor

from fspmd import P, TensorSpec, communication_log, device_get, device_put, jit, make_mesh, shard_map, value_and_grad
from fspmd.errors import ShapeError
from fspmd.nn import (
    Causal,
    Documents,
    Full,
    Mask,
    PartialAttention,
    Prefix,
    SlidingWindow,
    attend_block,
    balanced,
    contiguous,
    empty_part,
    gathered_attention,
    merge,
    ring,
    ring_attention,
    striped,
    tiles,
    ulysses_attention,
    zigzag,
)
from fspmd.nn.masks import AllOf

CASES = [
    (way, n, length, mask, layout)
    for way in ("ring", "gathered", "ulysses", "both")
    for n in (1, 2, 3, 4)
    for length in (8, 11, 22, 2)
    for mask in MASKS
    for layout in LAYOUTS
]

#: a block of 22 positions in parts of 11, whose tiles would need padding
_PARTED: list[Case] = [] if FULL else [(way, 2, 22, "window", "zigzag") for way in ("ulysses", "both")]


@pytest.mark.parametrize("case", sample(CASES, 10), ids=lambda case: "-".join(map(str, case)))
def test_every_way_is_dense_attention(case: Case) -> None:
    for mine, right in compute(case):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("way", [ring_attention, gathered_attention, ulysses_attention])
@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
@pytest.mark.parametrize("length", [3, 12, 13, 25])
def test_several_axes_cut_a_sequence_of_any_length(way: Any, sizes: tuple[int, int], length: int) -> None:
    mesh, rows = make_mesh(sizes, ("a", "b"), transport="simulation"), P(None, ("a", "b"))
    torch.manual_seed(length)
    for make in LAYOUTS.values():
        lies = make(length, sizes)
        attend = functools.partial(way, axis=("a", "b"), mask=Causal(), layout=lies)
        call = shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows)
        leaves = [torch.randn(6, length, 4, dtype=F64, requires_grad=True) for _ in range(3)]
        out = lies.restore(device_get(call(*(lies.store(x, 1) for x in leaves))), 1)
        want = dense(*leaves, seen_by("causal", length), 0.5, None)
        cotangent = torch.randn_like(want)
        grads = (torch.autograd.grad(x, leaves, cotangent) for x in (out, want))
        for mine, right in zip((out, *next(grads)), (want, *next(grads)), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-11)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cut the short sequences of tests into tiles too."""
    ring.turns_of.cache_clear()
    monkeypatch.setattr(tiles, "LEAST_LENGTH", 1)
    monkeypatch.setattr(tiles, "MOST_TILES", 4)
    yield
    ring.turns_of.cache_clear()


@pytest.mark.parametrize("case", [*sample(CASES, 10, "tiles"), *_PARTED], ids=lambda case: "-".join(map(str, case)))
@pytest.mark.usefixtures("small_tiles")
def test_tiles_are_dense_attention(case: Case) -> None:
    for mine, right in compute(case):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-11)


@pytest.fixture
def small_masks(small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make masks of a few pairs of queries and keys at once."""
    monkeypatch.setattr(tiles, "MOST_BOOLS", 9)
    monkeypatch.setattr(tiles, "LONGEST_MASKED", 3)


@pytest.mark.parametrize("case", sample(CASES, 10, "masks"), ids=lambda case: "-".join(map(str, case)))
@pytest.mark.usefixtures("small_masks")
def test_small_masks_are_dense_attention(case: Case) -> None:
    for mine, right in compute(case):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-11)


@dataclass(frozen=True, eq=False)
class Counted(Mask):
    """A mask that says nothing of ranges, and notes how many pairs it is asked for at once."""

    asked: list[int]
    whole: bool  # whether it says that queries see no keys after them

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        allowed = key <= query
        self.asked.append(allowed.numel())
        return allowed

    def over(self, queries: range, keys: range) -> bool | None:
        return None if self.whole or keys[0] <= queries[-1] else False


@pytest.mark.parametrize(
    ("way", "whole"), [(ring_attention, False), (ring_attention, True), (gathered_attention, True)]
)
def test_masks_do_not_grow_with_the_square_of_a_block(way: Any, whole: bool) -> None:
    """A block of 16,384 positions would have 268 MB of bools, of which kernels of CPUs make numbers of four bytes."""
    length, mask = 1 << 17, Counted([], whole)
    mesh = make_mesh((8,), ("cp",), transport="abstract")
    rows = TensorSpec(mesh, P(None, "cp"), (8, length, 4), torch.float32)
    attend = shard_map(
        lambda q: way(q, q, q, "cp", mask=mask), mesh=mesh, in_specs=P(None, "cp"), out_specs=P(None, "cp")
    )
    jit(value_and_grad(lambda q: attend(q).sum())).lower(rows)
    assert 1 << 21 < max(mask.asked) <= 1 << 25
    assert tiles.count_of(1 << 20) == (1 << 20) / 4096


@pytest.mark.parametrize("n", [2, 4, 8])
def test_ranks_compute_what_a_closed_form_says(n: int) -> None:
    """Pairs of query and key of each rank: with a zigzag those that are causal, and no others, on each as many."""
    m, length = tiles.MOST_TILES, n * tiles.MOST_TILES * tiles.LEAST_LENGTH

    def computed(found: ring.Turns) -> int:
        groups = [(group, step.queries.shape[2]) for step in found.tiles.values() for group in step.groups]
        sizes = {"all": lambda k: k * k, "triangle": lambda k: k * (k + 1) // 2}
        return sum(group.query.shape[1] * sizes[group.seen](k) for group, k in groups)

    for gathered in (False, True):
        found = ring.turns_of("cp", Causal(), zigzag(length, n), gathered=gathered)
        assert computed(found) == length * (length + 1) // 2 // n
    one = ring.turns_of((), Causal(), contiguous(length, 1), (n,))
    assert one.tiles[0].pairs == 1
    assert computed(one) == length * (length + 1) // 2
    window = ring.turns_of("cp", Causal() & SlidingWindow(tiles.LEAST_LENGTH), contiguous(length, n))
    assert window.steps == [0, 1]
    assert [step.pairs for step in window.tiles.values()] == [2 * m - 1, 1]


def test_what_moves_is_what_a_closed_form_says() -> None:
    """In blocks of keys and values, of n ranks. Queries and results have as many bytes as keys and values together."""
    n, rows = 4, P(None, "cp")
    mesh = make_mesh((n,), ("cp",), transport="simulation")
    leaves = [device_put(torch.randn(heads, 32, 8, dtype=F64), rows, mesh=mesh).requires_grad_() for heads in (8, 4, 4)]
    block = 2 * 4 * 8 * 8 * 8
    window = Causal() & SlidingWindow(3)
    for way, mask, forward, backward in (
        (ring_attention, Full(), n - 1, 2 * n - 1),
        (ring_attention, window, 1, 3),
        (gathered_attention, Full(), n - 1, n - 1),
        (ulysses_attention, Full(), 3 * (n - 1) / n, 3 * (n - 1) / n),
    ):
        call = shard_map(functools.partial(way, axis="cp", mask=mask), mesh=mesh, in_specs=rows, out_specs=rows)
        with communication_log() as there:
            out = call(*leaves)
        total = out.sum()
        with communication_log() as back:
            torch.autograd.grad(total, leaves)
        assert [sum(event.price.moved for event in log) / block for log in (there, back)] == [forward, backward], way


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("way", [ring_attention, gathered_attention, ulysses_attention])
def test_collectives_and_flops_of_a_rank_have_closed_forms(way: Any, n: int) -> None:
    """Scores and products with values: 4 H K FLOPs of a pair forward, 10 backward, whatever the KV heads."""
    heads, kv_heads, width, length = 8, 4, 16, 1024
    mesh, rows = make_mesh((n,), ("cp",), transport="abstract"), P(None, "cp")
    shapes = (heads, length, width), (kv_heads, length, width), (kv_heads, length, width)
    given = [TensorSpec(mesh, rows, shape, torch.float32) for shape in shapes]
    counts = {
        ring_attention: ([("ppermute", n - 1)], [("ppermute", 3 * n - 2)]),
        gathered_attention: ([("all_gather", 2)], [("all_gather", 2), ("psum_scatter", 2)]),
        ulysses_attention: ([("all_to_all", 4)], [("all_to_all", 8)]),
    }[way]
    for mask, pairs in ((Full(), length * length), (Causal(), length * (length + 1) // 2)):
        lies = contiguous(length, n) if way is ulysses_attention else zigzag(length, n)
        attend = functools.partial(way, axis="cp", mask=mask, layout=lies)
        call = shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows)
        steps = call, value_and_grad(lambda q, k, v, call=call: call(q, k, v).sum(), argnums=(0, 1, 2))
        for step, kinds, products in zip(steps, counts, (4, 14), strict=True):
            program = jit(step).lower(*given)
            kernels = [x.flops for x in program.schedule() if x.flops and "attention" in str(x.node.target)]
            assert sum(kernels) == products * heads * width * pairs / n
            if isinstance(mask, Full):  # the tiles of other masks are merged by small products
                assert program.cost().flops == sum(kernels)
            found = Counter(event.kind for event in program.collectives())
            assert found == (Counter(dict(kinds)) if n > 1 else Counter())


@pytest.mark.one_of(6)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kv_heads", [8, 4, 1])
@pytest.mark.parametrize("way", [ring_attention, gathered_attention, ulysses_attention, "both"])
def test_bfloat16_is_as_exact_on_eight_ranks_as_on_one(way: Any, kv_heads: int, seed: int) -> None:
    """Ranks that share a head of keys each have a part of its gradient."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(heads, 512, 32, dtype=torch.bfloat16) for heads in (8, kv_heads, kv_heads))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = dense(*exact, seen_by("causal", 512), 32**-0.5, None)
    cotangent = torch.randn_like(expected)
    right = [expected.detach(), *torch.autograd.grad(expected, exact, cotangent)]

    def errors(n: int) -> list[float]:
        inner = min(n, 4) if way == "both" else 1
        mesh, rows = make_mesh((n // inner, inner), ("cp", "sp"), transport="simulation"), P(None, ("cp", "sp"))
        lies = zigzag(512, n // inner)
        attend = functools.partial(ulysses_attention, axis="sp", ring="cp") if way == "both" else way
        options = {"mask": Causal(), "layout": lies} | ({} if way == "both" else {"axis": "cp"})
        call = shard_map(functools.partial(attend, **options), mesh=mesh, in_specs=rows, out_specs=rows)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = lies.restore(device_get(call(*(lies.store(x, 1) for x in leaves))), 1)
        found = [out.detach(), *torch.autograd.grad(out, leaves, cotangent.bfloat16())]
        return [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, right, strict=True)]

    for alone, shared in zip(errors(1), errors(8), strict=True):
        assert shared <= 1.1 * alone


def test_memory_of_a_freed_temporary_is_no_copy_of_a_view() -> None:
    """A record took the scores for the memory of positions that were freed before."""
    compute(("gathered", 1, 11, "full", "contiguous"), jitted=True)


@pytest.mark.parametrize("case", sample(CASES, 8, "recorded"), ids=lambda case: "-".join(map(str, case)))
def test_a_record_is_dense_attention(case: Case) -> None:
    for mine, right in compute(case, jitted=True):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-11)


def test_processes_compute_dense_attention() -> None:
    with Processes(4) as pool:
        for jitted in (False, True):
            for found in pool.run(worst, sample(CASES, 2, str(jitted)), jitted, seconds=3000 if FULL else 300):
                assert not [row for row in found if not row[1] < 1e-11]


def test_parts_are_a_monoid() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 9, 4, dtype=F64)
    seen = torch.rand(9, 9) < 0.4
    seen[3] = False
    cuts = [slice(0, 2), slice(2, 2), slice(2, 7), slice(7, 9)]
    parts = [attend_block(q, k[:, c], v[:, c], seen[:, c]) for c in cuts]
    whole = attend_block(q, k, v, seen)
    for order in itertools.permutations(range(4)):
        total = empty_part(q, 4)
        for i in order:
            total = merge(total, parts[i])
        torch.testing.assert_close(total, whole, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(merge(merge(*parts[:2]), merge(*parts[2:])), whole, rtol=1e-13, atol=1e-13)
    assert (whole.lse[:, 3] == -math.inf).all()
    assert (whole.out[:, 3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
def test_operands_and_cotangents_may_have_any_strides(order: tuple[int, ...], dtype: torch.dtype) -> None:
    """The kernel for CPUs takes rows for dense, whatever their stride."""
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(2, 4, 5, 6, dtype=dtype) for _ in range(4))
    right = [x.double().requires_grad_() for x in (q, k, v)]
    out = (right[0] @ right[1].mT * 6**-0.5).softmax(-1) @ right[2]
    back = [order.index(d) for d in range(4)]
    mine = [x.permute(order).contiguous().permute(back).requires_grad_() for x in (q, k, v)]
    found = attend_block(*mine).out
    wide = g.to(found.dtype).permute(order).contiguous().permute(back)
    grads = torch.autograd.grad(found, mine, wide), torch.autograd.grad(out, right, g.double())
    for a, b in zip((found, *grads[0]), (out, *grads[1]), strict=True):
        torch.testing.assert_close(a, b.to(a.dtype))


def test_uneven_blocks_may_have_any_strides() -> None:
    q, k, v, ct = torch.randn(4, 3, 17, 4, dtype=F64)
    ids = torch.arange(17) // 9
    layout = contiguous(17, 5)

    def body(*blocks: Tensor) -> tuple[Tensor, ...]:
        *leaves, ct = (x.detach().mT.contiguous().mT.requires_grad_() for x in blocks)
        out = ring_attention(*leaves, axis="s", mask=Documents(ids), layout=layout)
        return out.detach(), *torch.autograd.grad(out, leaves, ct)

    spec = P(None, "s")
    found = shard_map(body, mesh=make_mesh((5,), ("s",)), in_specs=spec, out_specs=(spec,) * 4)(q, k, v, ct)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    scores = (q @ k.mT / 2).masked_fill(ids[:, None] != ids, -torch.inf)
    right = scores.softmax(-1) @ v
    for mine, expected in zip(found, (right, *torch.autograd.grad(right, leaves, ct)), strict=True):
        torch.testing.assert_close(device_get(mine), expected.detach(), rtol=1e-11, atol=1e-11)


def test_gradients_of_parts_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 3, dtype=F64, requires_grad=True) for n in (4, 5, 5))
    seen = torch.rand(4, 5) < 0.7
    seen[1] = False
    seen[0, 0] = True

    def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        part = attend_block(q, k, v, seen)
        return part.out.sum() + part.lse.where(part.lse != -math.inf, 0).sin().sum()

    assert torch.autograd.gradcheck(both, (q, k, v))
    a, b = (attend_block(q, k[:, c], v[:, c], seen[:, c]) for c in (slice(0, 2), slice(2, 5)))
    whole = merge(PartialAttention(*a), PartialAttention(*b)).out
    expected = attend_block(q, k, v, seen).out
    cotangent = torch.randn_like(whole)
    for mine, right in zip(*(torch.autograd.grad(y, (q, k, v), cotangent) for y in (whole, expected)), strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("mask", MASKS)
def test_what_masks_know_of_ranges_is_true(mask: str) -> None:
    kind, allows = MASKS[mask]
    known = 0
    for a, b, c, d in itertools.product(range(0, 12, 2), range(1, 6, 2), range(0, 12, 2), range(1, 6, 2)):
        q, k = range(a, a + b), range(c, c + d)
        pairs = {allows(i, j) for i in q for j in k}
        said = kind.over(q, k)
        assert said is None or pairs == {said}
        known += said is not None
    assert known
    i = torch.arange(22)
    assert torch.equal(kind.allows(i[:, None], i), seen_by(mask, 22).bool())


@pytest.mark.parametrize("length", [16, 13, 3, 1, 0])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_permutations_cut_as_fspmd_cuts(layout: str, ranks: int, length: int) -> None:
    lies = LAYOUTS[layout](length, ranks)
    assert sorted(lies.order.tolist()) == list(range(length))
    mesh = make_mesh((ranks,), ("cp",), transport="simulation")
    spec = P("cp")
    found = shard_map(lambda x: lies.positions("cp"), mesh=mesh, in_specs=spec, out_specs=spec)(torch.arange(length))
    assert torch.equal(device_get(found), lies.order)
    x = torch.randn(2, length)
    assert torch.equal(lies.restore(lies.store(x, 1), 1), x)


Q, K = torch.arange(1024)[:, None], torch.arange(1024)
PACKED = torch.arange(1024) // 37
BALANCED = {
    "causal": (Causal(), Q >= K),
    "window": (Causal() & SlidingWindow(100), (Q >= K) & (Q - K < 100)),
    "both sides": (SlidingWindow(50), (Q - K).abs() < 50),
    "documents": (Documents(PACKED), PACKED[Q] == PACKED[K]),
    "causal documents": (Causal() & Documents(PACKED), (Q >= K) & (PACKED[Q] == PACKED[K])),
    "window in documents": (
        Causal() & SlidingWindow(20) & Documents(PACKED),
        (Q >= K) & (Q - K < 20) & (PACKED[Q] == PACKED[K]),
    ),
    "prefix": (Causal() | Prefix(200), (Q >= K) | (K < 200)),
    "prefix in documents": (
        (Causal() | Prefix(200)) & Documents(PACKED),
        ((Q >= K) | (K < 200)) & (PACKED[Q] == PACKED[K]),
    ),
    "prefix and window": ((Causal() & SlidingWindow(64)) | Prefix(30), ((Q >= K) & (Q - K < 64)) | (K < 30)),
    "full": (Full(), (Q >= 0) & (K >= 0)),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", BALANCED)
def test_work_is_even_where_a_layout_says_so(name: str, ranks: int) -> None:
    mask, seen = BALANCED[name]
    layouts = [balanced(1024, ranks, mask)]
    layouts += [zigzag(1024, ranks), striped(1024, ranks)] if name == "causal" else []
    for lies in [*layouts, contiguous(1024, ranks)]:
        work = seen.sum(1)[lies.order].view(ranks, -1).sum(1)
        assert lies.work(mask) == work.tolist()
        assert lies not in layouts or work.max() <= 1.05 * work.double().mean()


@pytest.mark.parametrize("name", MASKS)
def test_a_balanced_layout_of_nothing_is_empty(name: str) -> None:
    layout = balanced(0, 3, MASKS[name][0])
    assert layout.table.shape == (3, 0)
    assert layout.work(MASKS[name][0]) == [0, 0, 0]


def test_balancing_looks_at_few_pairs() -> None:
    """All pairs of 65,536 positions are 2 ** 32. It looked at each of them, in 42 seconds."""

    @dataclass(frozen=True)
    class Counted(AllOf):
        def allows(self, query: Tensor, key: Tensor) -> Tensor:
            looked.append(query.numel() * key.numel())
            return super().allows(query, key)

    looked: list[int] = []
    ids = torch.randint(40, (1 << 16,), generator=torch.Generator().manual_seed(0)).sort().values
    mask = Counted(Causal(), Documents(ids))
    lies = balanced(1 << 16, 8, mask)
    assert sum(looked) < 1 << 26
    lengths = ids.bincount()
    work = torch.zeros(8, dtype=torch.int64)
    first = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])[:-1]
    for rank, row in enumerate(lies.table):
        work[rank] = (row - first[ids[row]] + 1).sum()  # a query sees the keys of its document up to itself
    assert work.sum() == (lengths * (lengths + 1) // 2).sum()
    assert work.max() <= 1.05 * work.double().mean()


def test_wrong_shapes_are_told() -> None:
    mesh = make_mesh((2,), ("cp",), transport="simulation")
    q, k, rows = torch.randn(4, 8, 4), torch.randn(3, 8, 4), P(None, "cp")
    run = shard_map(lambda q, k: ring_attention(q, k, k, "cp"), mesh=mesh, in_specs=rows, out_specs=rows)
    with pytest.raises(ShapeError, match="heads a multiple"):
        run(q, k)
    longer = contiguous(8, 4)
    run = shard_map(lambda q: ring_attention(q, q, q, "cp", layout=longer), mesh=mesh, in_specs=rows, out_specs=rows)
    with pytest.raises(ShapeError, match=r"contiguous\(8, 2\)"):
        run(q)
    run = shard_map(
        lambda q: ulysses_attention(q, q, q, "cp"), mesh=mesh, in_specs=P(None, "cp"), out_specs=P(None, "cp")
    )
    with pytest.raises(ShapeError, match="3 heads for the 2 ranks"):
        run(k)


def test_repeats_by_a_number_leave_blocks_even() -> None:
    mesh, rows = make_mesh((4,), ("cp",), transport="abstract"), P(None, "cp")
    spec = TensorSpec(mesh, rows, (2, 8, 4), F64)
    call = shard_map(lambda x: x.repeat_interleave(3, 0), mesh=mesh, in_specs=rows, out_specs=rows)
    assert jit(call).lower(spec).cost().moved == 0
