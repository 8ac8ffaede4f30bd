"""A Llama, with experts by option, as functions of one rank's blocks on a mesh of six axes of any sizes.

    pp    stages of layers             fsdp  the batch, and parameters at rest     cp  the sequence
    dp    the batch                    ep    the batch, and experts                tp  heads, hidden units, vocabulary

Parameters are gathered over fsdp where they are used, inside `checkpoint`, so backward gathers them again. Over the
axes ONCE the caller gathers them, so their gradients are summed once a step. Shapes in comments are of one block:

    b, s  sequences and positions of this rank    V  the vocabulary     F  width of the MLP, or of an expert
    D     width of the model                      K  width of a head    H, G  heads of queries, of keys and values
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

import fspmd
from fspmd import P, nn

Params = dict[str, Any]
BATCH = ("dp", "fsdp", "ep")  # the axes that cut the batch
TOKENS, ONCE = (*BATCH, "cp"), ("dp", "cp")  # the axes that cut tokens; and those of them that cut no parameter
IDS, HIDDEN, LOGITS = P(BATCH, "cp"), P(BATCH, "cp", None), P(BATCH, "cp", "tp")
BESIDE = {"balance": P(), "counts": P()}  # what layers with experts return beside: losses of balance, and counts
ATTENTION = {"ring": nn.ring_attention, "gathered": nn.gathered_attention, "ulysses": nn.ulysses_attention}
CAUSAL, EPSILON = nn.Causal(), 1e-6


@dataclass(frozen=True)
class Config:
    """Sizes of the whole model, as above. Without ``experts`` each layer has one MLP."""

    layers: int = 4
    D: int = 64
    F: int = 176
    H: int = 4
    G: int = 2
    V: int = 256
    S: int = 128  # the length of a sequence
    experts: int = 0
    chosen: int = 2  # experts of a token
    capacity: int | None = None  # tokens for each rank and expert; the default drops none
    precision: nn.Precision | None = None  # of the computation and of sums of gradients; the default is the parameters'
    mask: nn.Mask = CAUSAL  # which tokens a token sees
    attention: str = "ring"  # how the ranks of cp share it: a key of ATTENTION
    sinks: bool = False  # whether each head has an attention sink, a score that is learned

    @property
    def K(self) -> int:
        return self.D // self.H


@dataclass(frozen=True)
class Leaf:
    """A parameter."""

    shape: tuple[int, ...]
    spec: P  # its layout within a stage
    scale: float | None = None  # of its first values; without one they are 1


def leaves(c: Config) -> Params:
    """All parameters. Those of layers have the layers as dim 0."""
    up, down, many, over = c.D**-0.5, (2 * c.layers) ** -0.5, (c.experts,) * bool(c.experts), ("ep",) * bool(c.experts)

    def layer(shape: tuple[int, ...], *entries: Any, scale: float | None = None) -> Leaf:
        return Leaf((c.layers, *shape), P(None, *entries), scale)

    stack = {
        **dict.fromkeys(("norm1", "norm2"), layer((c.D,), "fsdp")),
        "wq": layer((c.D, c.H * c.K), "fsdp", "tp", scale=up),
        **dict.fromkeys(("wk", "wv"), layer((c.D, c.G * c.K), "fsdp", "tp", scale=up)),
        "wo": layer((c.H * c.K, c.D), "tp", "fsdp", scale=up * down),
        **dict.fromkeys(("gate", "up"), layer((*many, c.D, c.F), *over, "fsdp", "tp", scale=up)),
        "down": layer((*many, c.F, c.D), *over, "tp", "fsdp", scale=c.F**-0.5 * down),
    }
    if c.sinks:
        stack["sinks"] = layer((c.H,), "tp", scale=1.0)
    if c.experts:
        stack["router"] = layer((c.D, c.experts), "fsdp", scale=up)
        stack["bias"] = layer((c.experts,), scale=0.0)  # of the choice: no gradient changes it
    return {
        "embedding": Leaf((c.V, c.D), P("tp", "fsdp"), 0.5),
        "layers": stack,
        "norm": Leaf((c.D,), P("fsdp")),
        "head": Leaf((c.D, c.V), P("fsdp", "tp"), 0.02),
    }


@functools.cache
def param_specs(c: Config, pp: int = 1) -> Any:
    """The layouts of the parameters: of one stage, or of all of them on so many ranks of pp."""
    specs, over = optree.tree_map(lambda leaf: leaf.spec, leaves(c)), "pp" if pp > 1 else None
    return {**specs, "layers": {name: P(over, *spec.entries[1:]) for name, spec in specs["layers"].items()}}


def use(c: Config, params: Params, specs: Params) -> Params:
    """Parameters as a computation needs them: no longer cut by fsdp. Experts see the tokens of all ranks of ep."""

    def one(w: Tensor, spec: P) -> Any:
        return nn.gathered(w, ("fsdp",) if "ep" in spec.axes else ("fsdp", "ep"), spec, dtype=c.precision)

    return {name: w if name == "bias" else one(w, specs[name]) for name, w in params.items()}


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + K / 2]) of [b, heads, s, K] by the angle of its position, [s] or [b, 1, s]."""
    half = x.shape[-1] // 2
    angle = positions.double()[..., None] * 10000.0 ** (-torch.arange(half, device=x.device).double() / half)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x.split(half, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def mlp(c: Config, p: Params, x: Tensor, axes: tuple[str, ...]) -> tuple[Tensor, Params]:
    """x [b, s, D] -> [b, s, D], to be summed over tp; and `BESIDE` of this layer, over ``axes``, which cut tokens."""
    if not c.experts:
        return (F.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"], {}

    def of_rows(rows: Tensor, counts: Tensor) -> Tensor:
        gate, up = (nn.grouped_matmul(rows, p[name], counts) for name in ("gate", "up"))
        return nn.grouped_matmul(F.silu(gate) * up, p["down"], counts)

    rows = x.flatten(0, 1)
    choice = nn.route(rows @ p["router"], c.chosen, bias=p["bias"], axes=axes)
    y = nn.experts(rows, choice, of_rows, axis="ep", capacity=c.capacity)[0]
    return y.view_as(x), {"balance": choice.balance_loss, "counts": choice.counts}


def layer(c: Config, params: Params, x: Tensor, at: Tensor, attend: Callable, axes: Any = TOKENS) -> Any:
    """x [b, s, D] at positions ``at`` -> [b, s, D], and `BESIDE` of this layer. ``attend`` gets q, k, v and sinks."""
    p = use(c, params, {name: P(*spec.entries[1:]) for name, spec in param_specs(c)["layers"].items()})
    h = F.rms_norm(x, (c.D,), p["norm1"], EPSILON)
    q, k, v = ((h @ p[name]).unflatten(-1, (-1, c.K)).transpose(1, 2) for name in ("wq", "wk", "wv"))
    heads = attend(rotate(q, at), rotate(k, at), v, sinks=p.get("sinks"))
    x = x + fspmd.psum(heads.transpose(1, 2).flatten(2) @ p["wo"], "tp")
    y, beside = mlp(c, p, F.rms_norm(x, (c.D,), p["norm2"], EPSILON), axes)
    return x + fspmd.psum(y, "tp"), beside


def own_rows(ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The place of each id in this rank's block of the vocabulary, and whether it is there."""
    place = ids - fspmd.axis_index("tp") * rows
    return place.clamp(0, rows - 1), (place >= 0) & (place < rows)


def embedded(c: Config, params: Params, ids: Tensor) -> Tensor:
    """ids [b, s] -> [b, s, D]."""
    table = use(c, {"embedding": params["embedding"]}, param_specs(c))["embedding"]
    place, mine = own_rows(ids, table.shape[0])
    return fspmd.psum(F.embedding(place, table) * mine[..., None], "tp")


def logits(c: Config, params: Params, x: Tensor) -> Tensor:
    """x [..., D] -> [..., V / tp]."""
    p = use(c, {name: params[name] for name in ("norm", "head")}, param_specs(c))
    return torch.matmul(F.rms_norm(x, (c.D,), p["norm"], EPSILON), p["head"])


def of_layers(params: Params) -> list[Params]:
    """The parameters of each layer. The gradient of all is one stack, not a sum."""
    stacks = params["layers"]
    return [dict(zip(stacks, own, strict=True)) for own in zip(*[w.unbind() for w in stacks.values()], strict=True)]


def stage(c: Config, layout: nn.SequenceLayout, first: bool, last: bool) -> Callable[..., tuple[Tensor, Params]]:
    """A stage on blocks: ids [b, s] in the first, logits [b, s, V / tp] out of the last, [b, s, D] between.

    It returns `BESIDE` too, stacked over layers.
    """
    attend = functools.partial(ATTENTION[c.attention], axis="cp", mask=c.mask, layout=layout)

    def run(params: Params, x: Tensor) -> tuple[Tensor, Params]:
        x, at, beside = embedded(c, params, x) if first else x, layout.positions("cp"), []
        for own in of_layers(params):
            x, more = fspmd.checkpoint(layer)(c, own, x, at, attend)
            beside.append(more)
        x = logits(c, params, x) if last else x
        return x, {name: torch.stack([more[name] for more in beside]) for name in beside[0]}

    return run


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """logits [b, s, V / tp], targets [b, s] -> the sum over tokens; those below 0 have none. No rank sees all of V."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = fspmd.pmax(fspmd.stop_gradient(logits).amax(-1), "tp")
    total = fspmd.psum((logits - top[..., None]).exp().sum(-1), "tp")
    place, mine = own_rows(targets, logits.shape[-1])
    picked = fspmd.psum(logits.gather(-1, place[..., None])[..., 0] * mine, "tp")
    return fspmd.psum((top + total.log() - picked).where(targets >= 0, 0).sum(), TOKENS)
