"""A transformer of 70 billion parameters, planned for a cluster that does not exist.

    python examples/plan_70b.py                      # 4,096 ranks, on a laptop
    python examples/plan_70b.py --ranks 1024 --layers 8

The training step below is written on global shapes, for a mesh with axes dp, fsdp and tp. It is lowered for meshes
without ranks: recorded as each rank would run it, on shapes alone. The output is read from the record: the layouts of
parameters, the peak memory of a rank, the bytes that it sends, and the time of a step on hosts of 8 accelerators, by
ring formulas (`fspmd.Topology`). MFU is the FLOPs of the model, without recomputation, divided by the possible FLOPs.

    B  sequences in a batch    S  tokens in a sequence    V  the vocabulary
    D  width of the model      F  width of the MLP        H  heads of queries, G  heads of keys and values, K = D / H

Parameters, and the states of Adam, are cut over fsdp and tp. A layer gathers its own over fsdp before it runs, in
bfloat16. Backward gathers again, and scatters the sums of the gradients, which are then added up over dp. The heads and
the MLP are cut over tp, and so is the sequence between them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import optree
import torch
import torch.nn.functional as F

import fspmd
from fspmd import Lowered, Mesh, P, TensorSpec, make_mesh, value_and_grad, with_spec

Params = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """Sizes of the model, as above."""

    layers: int = 80
    D: int = 8192
    F: int = 28672
    H: int = 64
    G: int = 8
    V: int = 128256
    B: int = 2048
    S: int = 4096

    @property
    def K(self) -> int:
        """Width of a head."""
        return self.D // self.H


# ---------------------------------------------------------------- parameters: shapes, and how they lie

BATCH = ("dp", "fsdp")


def at_work(*entries: str | None) -> P:
    """Whole over fsdp while the layer runs; the sum of the gradient over the batch is pending."""
    return P(*entries, reduced=BATCH)


#: at rest, and at work
SPECS: dict[str, tuple[P, P]] = {
    "wq": (P("fsdp", "tp"), at_work(None, "tp")),
    "wkv": (P(None, "fsdp", "tp"), at_work(None, None, "tp")),
    "wo": (P("tp", None, "fsdp"), at_work("tp")),
    "gate": (P("fsdp", "tp"), at_work(None, "tp")),
    "up": (P("fsdp", "tp"), at_work(None, "tp")),
    "down": (P("tp", "fsdp"), at_work("tp")),
    "norm1": (P("fsdp"), at_work()),
    "norm2": (P("fsdp"), at_work()),
    "norm": (P("fsdp"), at_work()),
    "embedding": (P("tp", "fsdp"), at_work("tp")),
    "head": (P("fsdp", "tp"), at_work(None, "tp")),
}


def parameters(c: Config, mesh: Mesh) -> Params:
    """A `TensorSpec` for each, of float32."""

    def leaf(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(mesh, SPECS[name][0], shape, torch.float32)

    def layer() -> Params:
        return {
            "wq": leaf("wq", c.D, c.H, c.K),
            "wkv": leaf("wkv", 2, c.D, c.G, c.K),
            "wo": leaf("wo", c.H, c.K, c.D),
            "gate": leaf("gate", c.D, c.F),
            "up": leaf("up", c.D, c.F),
            "down": leaf("down", c.F, c.D),
            "norm1": leaf("norm1", c.D),
            "norm2": leaf("norm2", c.D),
        }

    return {
        "embedding": leaf("embedding", c.V, c.D),
        "layers": [layer() for _ in range(c.layers)],
        "norm": leaf("norm", c.D),
        "head": leaf("head", c.D, c.V),
    }


# ---------------------------------------------------------------- the step, on global shapes

CUT = P(BATCH, "tp", None)  # values [B, S, D] between the parts of a layer: over batch and sequence
WHOLE = P(BATCH, None, None, reduced={"tp"})  # and within one, where the gradient is a pending sum over tp


def gathered(params: Params) -> Params:
    """The parameters of a layer, as its computation needs them."""
    return {name: with_spec(w.to(torch.bfloat16), SPECS[name][1]) for name, w in params.items()}


def layer(c: Config, params: Params, x: Any) -> Any:
    """x [B, S, D] -> [B, S, D]."""
    p = gathered(params)
    h = with_spec(F.rms_norm(x, (c.D,), p["norm1"]), WHOLE)
    q = torch.einsum("bsd,dhk->bhsk", h, p["wq"])
    k, v = torch.einsum("bsd,cdgk->cbgsk", h, p["wkv"]).unbind(0)
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + with_spec(torch.einsum("bhsk,hkd->bsd", heads, p["wo"]), CUT)
    h = with_spec(F.rms_norm(x, (c.D,), p["norm2"]), WHOLE)
    return x + with_spec((F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], CUT)


def loss(c: Config, params: Params, tokens: Any, targets: Any) -> Any:
    """tokens, targets [B, S] -> the mean cross entropy."""
    ends = gathered({name: params[name] for name in ("embedding", "norm", "head")})
    x = with_spec(F.embedding(tokens, ends["embedding"]), CUT)
    for p in params["layers"]:
        x = fspmd.checkpoint(layer)(c, p, x)
    h = with_spec(F.rms_norm(x, (c.D,), ends["norm"]), WHOLE)
    logits = h @ ends["head"]  # [B, S, V], the vocabulary cut over tp
    return F.cross_entropy(logits.permute(0, 2, 1), targets)


def step(c: Config, params: Params, first: Params, second: Params, tokens: Any, targets: Any) -> tuple[Any, ...]:
    """One step of Adam."""
    value, gradients = value_and_grad(loss, argnums=1)(c, params, tokens, targets)
    first = optree.tree_map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
    second = optree.tree_map(lambda v, g: 0.95 * v + 0.05 * g * g, second, gradients)
    params = optree.tree_map(lambda p, m, v: p - 3e-4 * m / (v.sqrt() + 1e-8), params, first, second)
    return params, first, second, value


# ---------------------------------------------------------------- what the record says


def lower(c: Config, mesh: Mesh) -> Lowered:
    """The step, lowered as each rank of a mesh would run it."""
    params = parameters(c, mesh)
    tokens = TensorSpec(mesh, P(BATCH), (c.B, c.S), torch.int64)
    jitted: Any = fspmd.jit(step, static_argnums=0, donate_argnums=(1, 2, 3))
    program: Lowered = jitted.lower(c, params, params, params, tokens, tokens)
    return program


def meshes(ranks: int, c: Config) -> Iterator[Mesh]:
    """The meshes to choose from."""
    for tp, fsdp in itertools.product((4, 8), (16, 64)):
        if ranks % (tp * fsdp) == 0 and c.B % (ranks // tp) == 0:
            yield make_mesh((ranks // (tp * fsdp), fsdp, tp), ("dp", "fsdp", "tp"), transport="abstract")


def main(arguments: list[str] | None = None) -> None:
    """Lower the step for each mesh, and print what the records say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=Config.layers)
    parser.add_argument("--batch", type=int, default=Config.B, help="sequences of 4,096 tokens")
    parser.add_argument("--memory", type=float, default=80.0, help="GB that a rank has")
    args = parser.parse_args(arguments)
    c = Config(layers=args.layers, B=args.batch)
    tokens = c.B * c.S
    plans: list[tuple[float, Mesh, Lowered]] = []
    print(
        f"{'mesh':<32}{'holds':>10}{'computes':>12}{'exposed':>12}{'step':>12}{'tokens/s':>14}{'MFU':>8}   lowered in"
    )
    for mesh in meshes(args.ranks, c):
        begun = time.perf_counter()
        program = lower(c, mesh)
        cost, memory = program.cost(), program.memory()
        took = time.perf_counter() - begun
        fits = memory.peak <= args.memory * 1e9
        figures = (
            f"{memory.peak / 1e9:.1f} GB",
            *(f"{micros / 1e6:.2f} s" for micros in (cost.computation, cost.exposed, cost.time)),
            f"{tokens / cost.time * 1e6:,.0f}",
            f"{cost.utilisation():.1%}",
            f"{took:.1f} s",
        )
        print(f"{mesh!r:<32}{''.join(f'{figure:>12}' for figure in figures)}{'' if fits else '   does not fit'}")
        if fits:
            plans.append((cost.time, mesh, program))
    if not plans:
        print(f"nothing fits into {args.memory:g} GB: take more ranks")
        return
    _, mesh, program = min(plans, key=lambda plan: plan[0])
    print(f"\nThe quickest that fits is {mesh!r}. Its first layer, embedding and head lie so:")
    shown = parameters(dataclasses.replace(c, layers=1), mesh)
    for path, spec in zip(optree.tree_paths(shown), optree.tree_leaves(shown), strict=True):
        held = math.prod(spec.block_shape) * spec.dtype.itemsize
        name, layout = ".".join(map(str, path)), str(spec).partition(" on ")[0]
        print(f"  {name:<16} {layout:<36}{held:>14,} B a rank")
    print(f"\n{program.cost()}\n\nMemory: {program.memory()}\n\nWhat it sends, by kind and axes:")
    sent: dict[tuple[str, str], list[float]] = {}
    for one in program.collectives():
        of = sent.setdefault((one.kind, ", ".join(one.axes)), [0, 0.0, 0.0])
        of[:] = [of[0] + 1, of[1] + one.price.moved, of[2] + one.price.time]
    for (kind, axes), (times, moved, micros) in sorted(sent.items(), key=lambda item: -item[1][2]):
        print(f"  {kind:<24} over {axes:<8} {times:>6,} times {moved / 1e9:>10,.2f} GB {micros / 1e6:>8.2f} s")


if __name__ == "__main__":
    main()
