"""A step of decoding beside one written by hand: ``python benchmarks/decoding.py``.

Layers as those of Llama decode one token of each sequence: norms, rotary embeddings, grouped queries, a cache that
grows, a gated MLP, and the most probable token. By hand they are plain torch: it writes into its caches, makes its mask
once a step, and calls c10d for sums over ranks. Widths are small, so that the time is that of the host. The ranks of
the first table are those of torch's fake backend: calls cost what they cost, and move nothing. The second is of four
processes with Gloo, whose tokens must be equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import optree
import torch
import torch.distributed as dist
from bodies import RANKS, fake_world
from ranks import HEADER, on_processes, rows_of_steps
from report import report
from timing import Goal, Row, Table, calls, side_by_side
from torch import Tensor
from torch.nn import functional as F

from fspmd import Mesh, P, Sharded, device_put, jit, make_mesh, psum, shard_map
from fspmd.nn import KVCache, cached_attention, greedy

SLOTS: Final = 4
HEADS, KV_HEADS, WIDTH = 16, 8, 16
LAYERS, HIDDEN, VOCABULARY, CAPACITY = 4, 64, 512, 127
SIZES: Final = {
    "q": (HIDDEN, HEADS * WIDTH),
    "k": (HIDDEN, KV_HEADS * WIDTH),
    "v": (HIDDEN, KV_HEADS * WIDTH),
    "gate": (HIDDEN, 4 * HIDDEN),
    "up": (HIDDEN, 4 * HIDDEN),
    "o": (HEADS * WIDTH, HIDDEN),
    "down": (4 * HIDDEN, HIDDEN),
}
LAYER: Final = {name: P("tp") if name in ("o", "down") else P(None, "tp") for name in SIZES} | {"n1": P(), "n2": P()}
SPECS: Final = {"layers": [LAYER] * LAYERS, "out": P(None, "tp"), "tokens": P(), "cos": P(), "sin": P()}
Weights = dict[str, Any]


def measure() -> Table:
    """On one rank, and on one of eight."""
    fake_world()
    rows = []
    for n in (1, RANKS):
        mesh = make_mesh((RANKS // n, n), ("dp", "tp"), device="cpu")
        w = device_put(weights(), SPECS, mesh=mesh)
        steps = {"jit": ours(w, mesh, True), "by hand": by_hand(w, mesh), "without jit": ours(w, mesh, False)}
        with torch.no_grad():
            times = side_by_side({name: calls(step) for name, step in steps.items()}, seconds=0.05)
        what = f"{LAYERS} layers, {n} rank{'s' * (n > 1)}"
        rows += [
            Row(what, times["jit"], "by hand", times["by hand"], Goal(1.0, "ratio")),
            Row(what, times["jit"], "without jit", times["without jit"]),
        ]
    return Table("A step of decoding", rows, (__doc__ or "").split("\n\n", 1)[1].replace("\n", " ").strip())


def weights() -> Weights:
    """Those of all ranks."""
    torch.manual_seed(0)
    layers = [{name: torch.randn(size) / size[0] ** 0.5 for name, size in SIZES.items()} for _ in range(LAYERS)]
    norms = {"n1": torch.ones(HIDDEN), "n2": torch.ones(HIDDEN)}
    angles = torch.arange(CAPACITY + 1)[:, None] * 10_000.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH)
    cos, sin = (torch.cat([x, x], 1) for x in (angles.cos(), angles.sin()))
    out, tokens = torch.randn(HIDDEN, VOCABULARY), torch.randn(VOCABULARY, HIDDEN)
    return {"layers": [layer | norms for layer in layers], "out": out, "tokens": tokens, "cos": cos, "sin": sin}


def projected(x: Tensor, w: Tensor) -> Tensor:
    """[slots, 1, hidden] as heads [slots, heads, 1, width]."""
    return (x @ w).view(SLOTS, 1, -1, WIDTH).transpose(1, 2)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """With rotary embeddings."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def ours(w: Weights, mesh: Mesh, record: bool, **options: Any) -> Callable[[], Tensor]:
    """A step of fspmd, with options of `jit`. A sequence begins anew before it is too long."""

    def body(w: Weights, cache: KVCache, tokens: Tensor) -> tuple[Tensor, KVCache]:
        places = cache.lengths[:, None, None]
        cos, sin = w["cos"][places], w["sin"][places]
        x, layers = w["tokens"][tokens][:, None], []
        for layer, past in zip(w["layers"], cache.layers, strict=True):
            h = F.rms_norm(x, (HIDDEN,), layer["n1"])
            q, k, v = (projected(h, layer[name]) for name in "qkv")
            grown = past.append(rotated(k, cos, sin), v)
            heads = cached_attention(rotated(q, cos, sin), grown)
            x = x + psum(heads.transpose(1, 2).flatten(2) @ layer["o"], "tp")
            h = F.rms_norm(x, (HIDDEN,), layer["n2"])
            x = x + psum(F.silu(h @ layer["gate"]) * (h @ layer["up"]) @ layer["down"], "tp")
            layers.append(grown)
        return greedy(x[:, 0] @ w["out"], "tp"), KVCache.of(layers)

    cache = KVCache.zeros(LAYERS, SLOTS, KV_HEADS, CAPACITY, WIDTH, spec=P(None, "tp"), mesh=mesh)
    call: Any = shard_map(body, mesh=mesh, in_specs=(SPECS, cache.specs, P()), out_specs=(P(), cache.specs))
    call = jit(call, donate_argnums=1, **options) if record else call
    tokens, begin = (device_put(torch.zeros(SLOTS, dtype=torch.int64), P(), mesh=mesh) for _ in range(2))
    steps = 0

    def step() -> Tensor:
        nonlocal cache, tokens, steps
        if (steps := steps + 1) % CAPACITY == 0:
            cache = cache._replace(lengths=begin.clone())
        tokens, cache = call(w, cache, tokens)
        return tokens.local

    return step


def by_hand(w: Weights, mesh: Mesh) -> Callable[[], Tensor]:
    """The same step in plain torch."""
    n, group = mesh.shape["tp"], dist.new_group(list(range(RANKS))[: mesh.shape["tp"]])
    w = optree.tree_map(lambda x: x.local, w, is_leaf=lambda x: isinstance(x, Sharded))
    keys, values = torch.zeros(2, LAYERS, SLOTS, KV_HEADS // n, CAPACITY + 1, WIDTH).unbind()
    caches = list(zip(keys.unbind(), values.unbind(), strict=True))
    lengths, tokens, steps = torch.zeros(SLOTS, dtype=torch.int64), torch.zeros(SLOTS, dtype=torch.int64), 0
    sequences, places = torch.arange(SLOTS), torch.arange(CAPACITY + 1)

    def summed(x: Tensor) -> Tensor:
        if n > 1:
            dist.all_reduce(x, group=group)
        return x

    def best(logits: Tensor) -> Tensor:
        if n == 1:
            return logits.argmax(1)
        value, token = logits.max(1)
        both = torch.stack([value.double(), (token + dist.get_rank() * logits.shape[1]).double()])
        gathered = torch.empty(2 * n, SLOTS, dtype=torch.float64)
        dist.all_gather_into_tensor(gathered, both, group=group)
        of_ranks = gathered.view(n, 2, SLOTS)
        return of_ranks[:, 1].gather(0, of_ranks[:, 0].argmax(0, keepdim=True))[0].long()

    def step() -> Tensor:
        nonlocal tokens, steps
        if (steps := steps + 1) % CAPACITY == 0:
            lengths.zero_()
        mask = torch.where(places <= lengths[:, None], 0.0, -torch.inf)[:, None, None]
        cos, sin = (w[name][lengths][:, None, None] for name in ("cos", "sin"))
        x = w["tokens"][tokens][:, None]
        for layer, (keys, values) in zip(w["layers"], caches, strict=True):
            h = F.rms_norm(x, (HIDDEN,), layer["n1"])
            q, k, v = (projected(h, layer[name]) for name in "qkv")
            keys[sequences, :, lengths] = rotated(k, cos, sin)[:, :, 0]
            values[sequences, :, lengths] = v[:, :, 0]
            heads = F.scaled_dot_product_attention(rotated(q, cos, sin), keys, values, mask, enable_gqa=True)
            x = x + summed(heads.transpose(1, 2).flatten(2) @ layer["o"])
            h = F.rms_norm(x, (HIDDEN,), layer["n2"])
            x = x + summed(F.silu(h @ layer["gate"]) * (h @ layer["up"]) @ layer["down"])
        lengths.add_(1)
        tokens = best(x[:, 0] @ w["out"])
        return tokens

    return step


def measured(_: Mesh) -> Table:
    """Time, memory and bytes on processes, as text in the notes of a table."""
    mesh = make_mesh((1, dist.get_world_size()), ("dp", "tp"), device="cpu")
    w = device_put(weights(), SPECS, mesh=mesh)
    steps = {"fspmd, jit": ours(w, mesh, True), "fspmd": ours(w, mesh, False), "by hand": by_hand(w, mesh)}
    with torch.no_grad():
        for _ in range(5):
            first, *others = (step() for step in steps.values())
            if not all(torch.equal(first, other) for other in others):
                raise AssertionError(f"steps choose other tokens: {first} and {others}")
        lines = [*HEADER, *rows_of_steps(f"{LAYERS} layers", steps, 20)]
    return Table("A step of decoding on processes with Gloo", [], "\n".join(lines))


if __name__ == "__main__":
    report(__doc__, ("decoding",))
    print(on_processes(measured).notes)
