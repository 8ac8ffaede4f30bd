"""The training job of train_lm.py in the global view: functions on global shapes, and styles that lay values out.

    python examples/global_view.py                                        # 8 simulated ranks, 2 (dp) x 4 (tp)
    torchrun --nproc-per-node 4 examples/global_view.py --mesh 2x2        # 4 processes

Below, the model of train_lm.py is written as for one device. `STYLES` says how its parameters lie over tp, and how
values lie before and after the functions that use them. In between nothing moves. The job makes the collectives that
train_lm.py writes out, and has the same losses. Only the logits of 256 bytes are gathered: one gather is quicker than
three sums. Then an unmodified nn.Transformer is trained on the same mesh.

    B  windows in a batch    S  bytes in a window    V  the vocabulary: 256 bytes
    D  width of the model    F  width of the MLP     H  heads, each of width K = D / H
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import optree
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_lm import Batch, Job, Params, init_params, norm, parse, rotary_table, rotate, run

import fspmd
from fspmd import ColwiseParallel, P, ParallelPlan, RowwiseParallel, Style, VocabParallel

# Around the functions named here, values [B, S, D] are cut along the sequence, dim 1. A "reduced" input is whole on
# every rank, and its gradient is a pending sum. One collective gathers the input; its transpose scatters that sum.
STYLES: dict[str, Style] = {
    "embedding": VocabParallel(output=1),  # [V, D]
    "layers.*.wqkv": ColwiseParallel(weight=2, input="reduced", output=2),  # [3, D, H, K] -> [3, B, H, S, K], by heads
    "layers.*.wo": RowwiseParallel(weight=0, input=1, output=1),  # [H, K, D]
    "layers.*.up": ColwiseParallel(weight=1, input="reduced"),  # [D, F]
    "layers.*.down": RowwiseParallel(weight=0, output=1),  # [F, D]
    "head": ColwiseParallel(weight=1, input="reduced"),  # [D, V]
}


# ---------------------------------------------------------------- the model, on global shapes


def project(x: Tensor, w: Tensor) -> Tensor:
    """x [B, S, D], w [3, D, H, K] -> queries, keys and values [3, B, H, S, K]."""
    return torch.einsum("bsd,cdhk->cbhsk", x, w)


def merge(x: Tensor, w: Tensor) -> Tensor:
    """x [B, H, S, K], w [H, K, D] -> [B, S, D]."""
    return torch.einsum("bhsk,hkd->bsd", x, w)


def model(plan: ParallelPlan, params: Params, tokens: Tensor) -> Tensor:
    """tokens [B, S] -> logits [B, S, V]."""
    x = plan["embedding"](F.embedding)(tokens, params["embedding"])  # [B, S, D]
    rotary = rotary_table(tokens.shape[1], params["layers"][0]["wqkv"].shape[-1], like=x)

    def layer(path: str, p: Params, x: Tensor) -> Tensor:
        qkv, wo, up, down = (plan[f"{path}.{name}"] for name in ("wqkv", "wo", "up", "down"))
        q, k, v = qkv(project)(norm(x, p["norm1"]), p["wqkv"])
        heads = F.scaled_dot_product_attention(rotate(q, *rotary), rotate(k, *rotary), v, is_causal=True)
        x = x + wo(merge)(heads, p["wo"])
        hidden = F.gelu(up(torch.matmul)(norm(x, p["norm2"]), p["up"]))
        x = x + down(torch.matmul)(hidden, p["down"])
        return x

    for i, p in enumerate(params["layers"]):
        x = fspmd.checkpoint(layer)(f"layers.{i}", p, x)  # backward keeps only x, and computes the layer again
    logits: Tensor = plan["head"](torch.matmul)(norm(x, params["norm"]), params["head"])
    return logits


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over the batch of logits [B, S, V] and targets [B, S]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def global_job(mesh: fspmd.Mesh, plan: ParallelPlan) -> Job:
    """Trained, validated and sampled by the code of train_lm.py."""

    def loss(params: Params, batch: Batch) -> Tensor:
        tokens, targets = batch
        return cross_entropy(model(plan, params, tokens), targets)

    return Job(mesh, loss, lambda params, tokens: model(plan, params, tokens), fspmd.global_norm)


# ---------------------------------------------------------------- a module of torch, as it is


def train_transformer(args: argparse.Namespace, mesh: fspmd.Mesh, steps: int = 5) -> list[float]:
    """An nn.Transformer learns to give back its source in reverse; the losses of ``steps`` steps."""
    styles = {"*.layers.*.linear1": ColwiseParallel(), "*.layers.*.linear2": RowwiseParallel()}
    dtype, shape = getattr(torch, args.dtype), (args.batch, args.length, args.width)

    def make() -> nn.Module:
        return nn.Transformer(args.width, args.heads, 1, 1, 4 * args.width, batch_first=True, dtype=dtype)

    torch.manual_seed(args.seed)
    module, params, _ = fspmd.init_sharded(make, styles, mesh=mesh, axis="tp")  # each rank makes its blocks
    params, plan = fspmd.parallelize(params, styles, mesh, axis="tp")  # moves nothing
    optimizer = torch.optim.Adam(optree.tree_leaves(params), lr=1e-3)
    losses: list[float] = []
    for _ in range(steps):
        source = fspmd.randn(shape, spec=P("dp"), mesh=mesh, dtype=dtype)  # the same on any mesh, and so is dropout
        out = fspmd.functional_call(module, params, source, source, styles=plan)
        loss = F.mse_loss(out, source.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(argv: list[str] | None = None) -> None:
    args = parse(argv, __doc__)
    mesh = fspmd.make_mesh(args.mesh, ("dp", "tp"), device=args.device)
    if (here := mesh.coordinate()) is None:  # more processes than the mesh has ranks
        return
    say: Callable = print if not any(here) else lambda *_: None
    values = init_params(args.seed, args.layers, args.width, args.heads, getattr(torch, args.dtype))
    params, plan = fspmd.parallelize(values, STYLES, mesh, axis="tp")
    say(plan)
    run(args, global_job(mesh, plan), params, "global_view")
    say("nn.Transformer:", *(f"{x:.3f}" for x in train_transformer(args, mesh)))


if __name__ == "__main__":
    main()
