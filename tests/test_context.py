"""Attention over a sequence that is cut over ranks, beside dense attention in float64."""

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fspmd import P, device_get, make_mesh, shard_map
from fspmd.errors import ShapeError
from fspmd.nn import (
    Causal,
    Documents,
    Full,
    Mask,
    Part,
    Prefix,
    SequenceLayout,
    SlidingWindow,
    attend_block,
    balanced,
    contiguous,
    gathered_attention,
    merge,
    nothing,
    ring_attention,
    striped,
    ulysses_attention,
    zigzag,
)

F64 = torch.float64
IDS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 5, 5])

#: each mask, and what it allows by its definition, one pair of positions at a time
MASKS: dict[str, tuple[Mask, Callable[[int, int], bool]]] = {
    "full": (Full(), lambda q, k: True),
    "causal": (Causal(), lambda q, k: k <= q),
    "window": (Causal() & SlidingWindow(3), lambda q, k: q - 3 < k <= q),
    "both sides": (SlidingWindow(2), lambda q, k: abs(q - k) < 2),
    "prefix": (Causal() | Prefix(4), lambda q, k: k <= q or k < 4),
    "documents": (Causal() & Documents(IDS), lambda q, k: k <= q and int(IDS[q]) == int(IDS[k])),
    "none": (Prefix(0), lambda q, k: False),
    "first keys": (Prefix(2), lambda q, k: k < 2),
}
LAYOUTS: dict[str, Callable[[int, int], SequenceLayout]] = {
    "contiguous": contiguous,
    "striped": striped,
    "zigzag": zigzag,
}
RING, BOTH = "ring", ("outer", "inner")


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """The definition, with a softmax over the keys that a query sees and the sink."""
    group = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    weights = ((q @ k.mT) * scale).exp() * seen
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return weights @ v / total.where(total != 0, 1)


def seen_by(mask: str, length: int) -> Tensor:
    allows = MASKS[mask][1]
    return torch.tensor([[allows(q, k) for k in range(length)] for q in range(length)], dtype=F64).view(length, length)


def operands(draw: random.Random, length: int) -> tuple[list[Tensor], int]:
    kv_heads, group, width, value_width = draw.choice([1, 2]), draw.choice([1, 2, 4]), 4, draw.choice([4, 6])
    batch = draw.choice([(), (2,), (2, 1)])
    heads = kv_heads * group
    shapes = (heads, length, width), (kv_heads, length, width), (kv_heads, length, value_width)
    return [torch.randn(*batch, *shape, dtype=F64) for shape in shapes], heads


CASES = [
    (way, n, length, mask, layout)
    for way in ("ring", "gathered", "ulysses", "both")
    for n in (1, 2, 3, 4)
    for length in (8, 11, 22, 2)
    for mask in MASKS
    for layout in LAYOUTS
]


@pytest.mark.one_of(6)
@pytest.mark.parametrize(("way", "n", "length", "mask", "layout"), CASES)
def test_every_way_is_dense_attention(way: str, n: int, length: int, mask: str, layout: str) -> None:
    draw = random.Random(f"{way} {n} {length} {mask} {layout}")
    torch.manual_seed(draw.randrange(1 << 30))
    (q, k, v), heads = operands(draw, length)
    inner = draw.choice([m for m in (1, 2, 4) if heads % m == 0])
    n = next(m for m in (n, 2, 1) if heads % m == 0) if way == "ulysses" else n
    sinks = torch.randn(heads, dtype=F64) if draw.random() < 0.5 else None
    scale = draw.choice([None, 0.3])
    sizes = (n, inner) if way == "both" else (n,)
    mesh = make_mesh(sizes, BOTH[: len(sizes)], transport="simulation")
    cut: Any = BOTH[: len(sizes)]
    lies = LAYOUTS[layout](length, 1 if way == "ulysses" else n)
    kind = MASKS[mask][0]
    options: dict[str, Any] = {"mask": kind, "layout": lies, "scale": scale}

    def body(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        if way == "both":
            return ulysses_attention(q, k, v, "inner", ring="outer", sinks=sinks, **options)
        call = {"ring": ring_attention, "gathered": gathered_attention, "ulysses": ulysses_attention}[way]
        return call(q, k, v, "outer", sinks=sinks, **options)

    rows = P(*[None] * (q.dim() - 2), cut)
    call = shard_map(body, mesh=mesh, in_specs=(rows, rows, rows, P()), out_specs=rows)
    leaves = [x.requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
    dims = [q.dim() - 2] * 3
    stored = [lies.store(x, dim) for x, dim in zip(leaves, dims, strict=False)]
    out = lies.restore(device_get(call(*stored, sinks)), q.dim() - 2)
    expected = dense(q, k, v, seen_by(mask, length), scale or 0.5, sinks)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(out)
    grads, right = (torch.autograd.grad(y, leaves, cotangent) for y in (out, expected))
    torch.testing.assert_close(grads, right, rtol=1e-11, atol=1e-11)


def test_parts_are_a_monoid() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 9, 4, dtype=F64)
    seen = torch.rand(9, 9) < 0.4
    seen[3] = False
    cuts = [slice(0, 2), slice(2, 2), slice(2, 7), slice(7, 9)]
    parts = [attend_block(q, k[:, c], v[:, c], seen[:, c]) for c in cuts]
    whole = attend_block(q, k, v, seen)
    for order in itertools.permutations(range(4)):
        total = nothing(q, 4)
        for i in order:
            total = merge(total, parts[i])
        torch.testing.assert_close(total, whole, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(merge(merge(*parts[:2]), merge(*parts[2:])), whole, rtol=1e-13, atol=1e-13)
    assert (whole.lse[:, 3] == -math.inf).all() and (whole.out[:, 3] == 0).all()


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
    whole = merge(Part(*a), Part(*b)).out
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
    assert known or mask == "documents"
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
    found = shard_map(
        lambda x: lies.positions("cp", x.shape[0]), mesh=mesh, in_specs=spec, out_specs=spec
    )(torch.arange(length))
    assert torch.equal(device_get(found), lies.order)
    x = torch.randn(2, length)
    assert torch.equal(lies.restore(lies.store(x, 1), 1), x)


def test_work_is_even_where_a_layout_says_so() -> None:
    documents = Causal() & Documents(torch.arange(512) // 37)
    for lies, mask in (
        (zigzag(512, 4), Causal()),
        (striped(512, 4), Causal()),
        (balanced(512, 4, documents), documents),
        (balanced(512, 8, Causal() | Prefix(100), 8), Causal() | Prefix(100)),
    ):
        work = lies.work(mask)
        assert max(work) <= 1.05 * sum(work) / len(work)
    assert max(contiguous(512, 4).work(Causal())) > 1.7 * sum(contiguous(512, 4).work(Causal())) / 4


def test_wrong_shapes_are_told() -> None:
    mesh = make_mesh((2,), ("cp",), transport="simulation")
    q, k = torch.randn(4, 8, 4), torch.randn(3, 8, 4)
    run = shard_map(lambda q, k: ring_attention(q, k, k, "cp"), mesh=mesh, in_specs=P(None, "cp"), out_specs=P(None, "cp"))
    with pytest.raises(ShapeError, match="heads a multiple of kv_heads"):
        run(q, k)
    run = shard_map(
        lambda q: ring_attention(q, q, q, "cp", layout=contiguous(8, 4)),
        mesh=mesh,
        in_specs=P(None, "cp"),
        out_specs=P(None, "cp"),
    )
    with pytest.raises(ShapeError, match=r"contiguous\(8, 2\)"):
        run(q)
    run = shard_map(lambda q: ulysses_attention(q, q, q, "cp"), mesh=mesh, in_specs=P(None, "cp"), out_specs=P(None, "cp"))
    with pytest.raises(ShapeError, match="3 heads for the 2 ranks"):
        run(k)
