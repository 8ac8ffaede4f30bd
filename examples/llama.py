"""A Llama, with experts by option, as functions of one rank's blocks on a mesh of six axes of any sizes.

    pp    stages of layers             fsdp  the batch, and parameters at rest     cp  the sequence
    dp    the batch                    ep    the batch, and experts                tp  heads, hidden units, vocabulary

Parameters are gathered over fsdp where they are used, inside `checkpoint`, so backward gathers them again. Shapes in
comments are those of one rank's block:

    b, s  sequences and positions of this rank    V  the vocabulary     F  width of the MLP, or of an expert
    D     width of the model                      K  width of a head    H, G  heads of queries, of keys and values
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

import fspmd
from fspmd import P
from fspmd.nn import Causal, Precision, SequenceLayout, experts, gathered, grouped_matmul, route

Params = dict[str, Any]
ATTENTION = {name: getattr(fspmd.nn, f"{name}_attention") for name in ("ring", "gathered", "ulysses")}
BATCH = ("dp", "fsdp", "ep")  # the axes that cut the batch
TOKENS = (*BATCH, "cp")  # and those that cut tokens
WAIT = ("dp", "cp")  # no parameter is cut over these: gradients wait for the last microbatch, and are summed once
IDS, HIDDEN, LOGITS = P(BATCH, "cp"), P(BATCH, "cp", None), P(BATCH, "cp", "tp")
EPSILON = 1e-6


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
    attention: str = "ring"  # the way of ATTENTION over cp
    precision: Precision | None = None  # the dtypes of the computation, and of sums of gradients; None: of parameters

    @property
    def K(self) -> int:
        return self.D // self.H

    def parameters(self) -> int:
        """The number of parameters."""
        return sum(math.prod(leaf.shape) for leaf in optree.tree_leaves(leaves(self)))

    def flops(self) -> float:
        """FLOPs of the model for a token, forward and backward. A token sees half of the sequence, on average."""
        mlp = 3 * self.D * self.F * (self.chosen if self.experts else 1) + self.D * self.experts
        attention = 2 * self.D * (self.H + self.G) * self.K + self.S * self.H * self.K
        return 6.0 * (self.layers * (mlp + attention) + self.D * self.V)


# ---------------------------------------------------------------- parameters: shapes, and how they lie


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
        "norm1": layer((c.D,), "fsdp"),
        "wq": layer((c.D, c.H, c.K), "fsdp", "tp", scale=up),
        "wk": layer((c.D, c.G, c.K), "fsdp", "tp", scale=up),
        "wv": layer((c.D, c.G, c.K), "fsdp", "tp", scale=up),
        "wo": layer((c.H, c.K, c.D), "tp", None, "fsdp", scale=up * down),
        "norm2": layer((c.D,), "fsdp"),
        "gate": layer((*many, c.D, c.F), *over, "fsdp", "tp", scale=up),
        "up": layer((*many, c.D, c.F), *over, "fsdp", "tp", scale=up),
        "down": layer((*many, c.F, c.D), *over, "tp", "fsdp", scale=c.F**-0.5 * down),
    }
    if c.experts:
        stack["router"] = layer((c.D, c.experts), "fsdp", scale=up)
    return {
        "embedding": Leaf((c.V, c.D), P("tp", "fsdp"), 0.5),
        "layers": stack,
        "norm": Leaf((c.D,), P("fsdp")),
        "head": Leaf((c.D, c.V), P("fsdp", "tp"), 0.02),
    }


def stage_specs(c: Config) -> Any:
    """The layouts of the parameters in a stage, where gradients over some axes are pending sums."""
    return optree.tree_map(lambda leaf: P(*leaf.spec.entries, reduced=WAIT), leaves(c))


def param_specs(c: Config, mesh: fspmd.Mesh) -> Params:
    """The layouts of all parameters: layers are cut over pp as well."""
    specs, over = optree.tree_map(lambda leaf: leaf.spec, leaves(c)), "pp" if mesh.shape["pp"] > 1 else None
    return {**specs, "layers": {name: P(over, *spec.entries[1:]) for name, spec in specs["layers"].items()}}


# ---------------------------------------------------------------- the model: what one rank does with its blocks


def use(c: Config, params: Params, specs: Params) -> Params:
    """Parameters as a computation needs them: no longer cut by fsdp. Experts see the tokens of all ranks of ep."""
    axes = {name: tuple(a for a in TOKENS if a != "ep" or "ep" not in specs[name].axes) for name in params}
    return {name: gathered(w, axes[name], specs[name], dtype=c.precision) for name, w in params.items()}


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + K / 2]) of [b, heads, s, K] by the angle of its position."""
    half = x.shape[-1] // 2
    angle = positions.double()[:, None] * 10000.0 ** (-torch.arange(half, device=x.device).double() / half)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def mlp(c: Config, p: Params, x: Tensor) -> Tensor:
    """x [b, s, D] -> [b, s, D], to be summed over tp."""
    if not c.experts:
        y: Tensor = (F.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]
        return y

    def of_rows(rows: Tensor, counts: Tensor) -> Tensor:
        gate, up = (grouped_matmul(rows, p[name], counts) for name in ("gate", "up"))
        return grouped_matmul(F.silu(gate) * up, p["down"], counts)

    rows = x.flatten(0, 1)
    return experts(rows, route(rows @ p["router"], c.chosen), of_rows, axis="ep", capacity=c.capacity)[0].view_as(x)


def layer(c: Config, params: Params, specs: Params, x: Tensor, layout: SequenceLayout) -> Tensor:
    """x [b, s, D] -> [b, s, D]."""
    p = use(c, params, specs)
    h, at = F.rms_norm(x, (c.D,), p["norm1"], EPSILON), layout.positions("cp")
    q, k, v = (torch.einsum("bsd,dhk->bhsk", h, p[name]) for name in ("wq", "wk", "wv"))
    whole = SequenceLayout(layout.order, 1) if c.attention == "ulysses" else layout  # each rank has all positions
    heads = ATTENTION[c.attention](rotate(q, at), rotate(k, at), v, "cp", mask=Causal(), layout=whole)
    x = x + fspmd.psum(torch.einsum("bhsk,hkd->bsd", heads, p["wo"]), "tp")
    return x + fspmd.psum(mlp(c, p, F.rms_norm(x, (c.D,), p["norm2"], EPSILON)), "tp")


def own_rows(ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The place of each id in this rank's block of the vocabulary, and whether it is there."""
    place = ids - fspmd.axis_index("tp") * rows
    return place.clamp(0, rows - 1), (place >= 0) & (place < rows)


def stage(c: Config, layout: SequenceLayout, first: bool, last: bool) -> Callable[[Params, Tensor], Tensor]:
    """A stage on blocks: ids [b, s] in the first, logits [b, s, V / tp] out of the last, [b, s, D] between."""
    specs = stage_specs(c)
    of_layer = {name: P(*spec.entries[1:]) for name, spec in specs["layers"].items()}

    def run(params: Params, x: Tensor) -> Tensor:
        if first:
            table = use(c, {"embedding": params["embedding"]}, specs)["embedding"]
            place, mine = own_rows(x, table.shape[0])
            x = fspmd.psum(F.embedding(place, table) * mine[..., None], "tp")
        stacks = params["layers"]
        for own in zip(*[w.unbind() for w in stacks.values()], strict=True):  # the gradient is one stack, not a sum
            x = fspmd.checkpoint(layer)(c, dict(zip(stacks, own, strict=True)), of_layer, x, layout)
        if last:
            p = use(c, {name: params[name] for name in ("norm", "head")}, specs)
            x = F.rms_norm(x, (c.D,), p["norm"], EPSILON) @ p["head"]
        return x

    return run


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """logits [b, s, V / tp], targets [b, s] -> the sum over all tokens. No rank sees a whole row of V."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = fspmd.pmax(fspmd.stop_gradient(logits).amax(-1), "tp")
    total = fspmd.psum((logits - top[..., None]).exp().sum(-1), "tp")
    place, mine = own_rows(targets, logits.shape[-1])
    picked = fspmd.psum(logits.gather(-1, place[..., None])[..., 0] * mine, "tp")
    return fspmd.psum((top + total.log() - picked).sum(), TOKENS)
