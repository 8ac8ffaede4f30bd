"""Attention over a sequence that is cut over ranks, beside its definition in float64: what `test_context` runs."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fspmd import P, communication_log, device_get, jit, make_mesh, shard_map
from fspmd.errors import ArgumentError, FspmdError, ShapeError
from fspmd.nn import (
    Causal,
    Documents,
    Full,
    Mask,
    Prefix,
    SequenceLayout,
    SlidingWindow,
    contiguous,
    gathered_attention,
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
AXES = ("outer", "inner")


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


Case = tuple[str, int, int, str, str]  # the way, ranks of the ring, length, mask, layout


def compute(case: Case, transport: str = "simulation", jitted: bool = False) -> list[tuple[Tensor, Tensor]]:
    """What a way gives, and what the definition gives: the result, and the gradients of all operands."""
    way, n, length, mask, layout = case
    draw = random.Random(str(case))
    torch.manual_seed(draw.randrange(1 << 30))
    (q, k, v), heads = operands(draw, length)
    size = 4 if transport == "process_group" else None
    inner = draw.choice([m for m in (1, 2, 4) if heads % m == 0 and (size is None or size % m == 0)])
    if way == "ulysses":
        n, inner = 1, n if heads % n == 0 else inner
    sizes = {"ring": (n,), "gathered": (n,), "ulysses": (1, inner), "both": (n, inner)}[way]
    if size is not None:
        sizes = {"ring": (4,), "gathered": (4,), "both": (4 // inner, inner), "ulysses": (4 // inner, inner)}[way]
        n = 1 if way == "ulysses" else sizes[0]
    sinks = torch.randn(heads, dtype=F64) if draw.random() < 0.5 else None
    mesh = make_mesh(sizes, AXES[: len(sizes)], transport=transport, device="cpu")
    lies = LAYOUTS[layout](length, sizes[way == "ulysses" :] if draw.random() < 0.5 else n)
    options: dict[str, Any] = {"mask": MASKS[mask][0], "layout": lies, "scale": draw.choice([None, 0.3])}

    def body(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        if way in ("both", "ulysses"):
            ring = "outer" if way == "both" else None
            return ulysses_attention(q, k, v, "inner", ring=ring, sinks=sinks, **options)
        call = {"ring": ring_attention, "gathered": gathered_attention}[way]
        return call(q, k, v, "outer", sinks=sinks, **options)

    cut: Any = {"ring": "outer", "gathered": "outer", "ulysses": "inner", "both": AXES}[way]
    rows = P(*[None] * (q.dim() - 2), cut)
    call = shard_map(body, mesh=mesh, in_specs=(rows, rows, rows, P()), out_specs=rows)
    call = jit(call) if jitted else call
    leaves = [x.requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
    stored = [lies.store(x, q.dim() - 2) for x in leaves[:3]]
    if jitted:
        call(*stored, sinks)  # the next call replays the record
    out = lies.restore(device_get(call(*stored, sinks)), q.dim() - 2)
    expected = dense(q, k, v, seen_by(mask, length), options["scale"] or 0.5, sinks)
    cotangent = torch.randn_like(expected)
    grads, right = (torch.autograd.grad(y, leaves, cotangent) for y in (out, expected))
    return [(out.detach(), expected.detach()), *zip(grads, right, strict=True)]


def worst(cases: list[Case], jitted: bool) -> list[tuple[Case, float]]:
    """The largest error of each case on the processes of this world."""
    return [
        (case, max(float((x - y).abs().max()) for x, y in compute(case, "process_group", jitted) if x.numel()))
        for case in cases
    ]


Refused = tuple[type[Exception], str, list[Tensor], dict[str, Any]]  # the error, its words, the operands, the options


def refused(way: Callable[..., Tensor], ranks: int) -> list[Refused]:
    """Calls on so many ranks that do not fit."""
    n = heads = ranks
    q, k, v = (torch.randn(h, 3 * ranks, 3, dtype=F64) for h in (2 * heads, heads, heads))
    length = 3 * ranks
    short, fewer = k[:, : 2 * ranks], length - 1
    return [
        (ShapeError, "make the layout for", [q, k, v], {"layout": contiguous(length + n, n)}),
        (ShapeError, "make the layout for", [q, k, v], {"layout": contiguous(length - n, n)}),
        (ShapeError, "make the layout for", [q, k, v], {"layout": contiguous(length - 1, n)}),
        (ShapeError, rf"contiguous\({length}, {n}\)", [q, k, v], {"layout": contiguous(length, 7)}),
        (ShapeError, "one of 2 keys", [q, short, short], {}),
        (ShapeError, "one of", [q[:, :fewer], k, v], {"layout": contiguous(length, n)}),
        (ShapeError, "no layout", [x[:, :fewer] for x in (q, k, v)], {}),
        (ShapeError, f"ids of {fewer} positions", [q, k, v], {"mask": Causal() & Documents(torch.arange(fewer))}),
        (ShapeError, "heads a multiple", [q[1:], k, v], {}),
        (ShapeError, "sinks of shape", [q, k, v], {"sinks": torch.ones(1)}),
        (ArgumentError, "Causal", [q, k, v], {"mask": Causal}),
        (ArgumentError, "for layout", [q, k, v], {"layout": 2}),
        (ArgumentError, "one floating dtype", [q.long(), k.long(), v.long()], {}),
        (ArgumentError, "one floating dtype", [q, k.float(), v.float()], {}),
        (ArgumentError, "for scale", [q, k, v], {"scale": torch.tensor(0.1)}),
    ]


def refusals(way: Callable[..., Tensor], ranks: int, transport: str = "simulation") -> list[tuple[str, str, int]]:
    """The error that each of these calls raises, its words, and the number of collectives before it."""
    mesh, rows = make_mesh((ranks,), ("cp",), transport=transport, device="cpu"), P(None, "cp")
    found = []
    for _, _, operands, options in refused(way, ranks):
        call = shard_map(lambda *x, options=options: way(*x, "cp", **options), mesh=mesh, in_specs=rows, out_specs=rows)
        with communication_log() as log:
            try:
                call(*operands)
                found.append(("none", "", len(list(log))))
            except FspmdError as error:
                found.append((type(error).__name__, str(error), len(list(log))))
    return found
