"""How long layouts take to be found, and what they are predicted to gain on those that are written by hand.

A step of a GPT (loss and gradients): 16 heads, 1024 wide, a vocabulary of 32,000, 4 sequences of 512, float32; links
and ranks as `fspmd.topology` has them.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.nn import functional as F

from fspmd import Layouts, Mesh, P, auto_spec, make_mesh, value_and_grad

D, HEADS, VOCABULARY, BATCH, LENGTH = 1024, 16, 32_000, 4, 512


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def block(p: Any, x: Any) -> Any:
    """One layer."""
    b, t, d = x.shape
    h = F.rms_norm(x, (d,), p["norm1"])
    q, k, v = ((h @ p[name]).view(b, t, HEADS, d // HEADS).transpose(1, 2) for name in ("q", "k", "v"))
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + a.transpose(1, 2).reshape(b, t, d) @ p["o"]
    return x + F.gelu(F.rms_norm(x, (d,), p["norm2"]) @ p["up"]) @ p["down"]


def loss(p: Any, tokens: Any, targets: Any) -> Any:
    """The cross entropy of the next tokens."""
    x = F.embedding(tokens, p["table"])
    for layer in p["layers"]:
        x = block(layer, x)
    return F.cross_entropy((x @ p["head"]).flatten(0, 1), targets.flatten())


def arguments(layers: int) -> tuple[Any, ...]:
    """Parameters, tokens and targets."""
    square = {name: meta(D, D) for name in "qkvo"}
    layer = {"norm1": meta(D), "norm2": meta(D), **square, "up": meta(D, 4 * D), "down": meta(4 * D, D)}
    places = meta(BATCH, LENGTH, dtype=torch.long)
    params = {"table": meta(VOCABULARY, D), "layers": [dict(layer) for _ in range(layers)], "head": meta(D, VOCABULARY)}
    return params, places, places


def megatron(batch: str | None, model: str) -> dict[str, P]:
    """Columns then rows over one axis, the batch over the other; embedding and head over the vocabulary."""
    layer = {name: P(None, model) for name in ("q", "k", "v", "up")} | {"o": P(model), "down": P(model)}
    return {
        **{f"p.layers.*.{name}": spec for name, spec in layer.items()},
        **{"p.layers.*.norm*": P(), "p.table": P(model), "p.head": P(None, model)},
        **{"tokens": P(batch), "targets": P(batch)},
    }


def solved(mesh: Mesh, layers: int, **options: Any) -> tuple[Layouts, float]:
    """What is found, with three runners-up, and the seconds it takes."""
    begun = time.perf_counter()
    found = auto_spec(value_and_grad(loss), mesh, *arguments(layers), **options)
    return found, time.perf_counter() - begun


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    solved(make_mesh((2,), ("x",)), 1)  # what torch imports when it is first asked
    print("| mesh | layers | solved in | predicted | by hand | predicted by hand | ours / theirs |")
    print("|------|--------|-----------|-----------|---------|-------------------|---------------|")
    line, grid = make_mesh((8,), ("tp",)), make_mesh((2, 4), ("dp", "tp"))
    batch = {"p.**": P(), "tokens": P("tp"), "targets": P("tp")}
    rows = [(line, n, "Megatron", megatron(None, "tp")) for n in (1, 32)]
    rows += [(make_mesh((4,), ("tp",)), 32, "data parallel", batch)]
    rows += [(grid, n, "Megatron and data parallel", megatron("dp", "tp")) for n in (1, 32)]
    cube, pod = (make_mesh(sizes, ("dp", "sp", "tp"), transport="abstract") for sizes in ((2, 2, 2), (4, 8, 8)))
    rows += [(mesh, n, "Megatron and data parallel", megatron("dp", "tp")) for mesh in (cube, pod) for n in (1, 32)]
    for mesh, layers, name, fixed in rows:
        found, seconds = solved(mesh, layers)
        hand, _ = solved(mesh, layers, fixed=fixed)
        ours, theirs = found.time / 1e3, hand.time / 1e3
        row = f"{seconds:.1f} s | {ours:.2f} ms | {name} | {theirs:.2f} ms | {ours / theirs:.2f}x"
        print(f"| {mesh!r} | {layers} | {row} |")
    print()
    print("| mesh | layers | memory_limit | solved in | predicted | holds at most | above what can be, at most |")
    print("|------|--------|--------------|-----------|-----------|---------------|----------------------------|")
    for mesh in (line, grid, cube):
        for limit in (2e9, 1.5e9):
            found, seconds = solved(mesh, 32, memory_limit=limit)
            held, gap = (found.peak or 0) / 1e9, 100 * (found.time / found.bound - 1)
            row = f"{limit / 1e9:.1f} GB | {seconds:.1f} s | {found.time / 1e3:.2f} ms | {held:.2f} GB | {gap:.1f} %"
            print(f"| {mesh!r} | 32 | {row} |")


if __name__ == "__main__":
    main()
