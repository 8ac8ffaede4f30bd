"""Train a byte-level transformer with data, tensor and sequence parallelism, as pure functions over a pytree.

    python examples/train_lm.py                                           # 8 simulated ranks, 2 (dp) x 4 (tp)
    torchrun --nproc-per-node 4 examples/train_lm.py --mesh 2x2           # 4 processes
    torchrun --nproc-per-node 4 --max-restarts 3 examples/train_lm.py --mesh 2x2 --checkpoint steps --resume

With --checkpoint the state is saved every few steps, and on SIGTERM, which ends the program. With --resume it goes
on from the latest step, on any mesh, with the losses of an undisturbed run.

On the mesh ("dp", "tp") the batch is sharded over dp. The heads of attention, the hidden units of the MLP and the 256
bytes of the vocabulary are sharded over tp (column-parallel in, row-parallel out). Between those, the residual stream
and the norms are sharded over tp along the sequence. Shapes in the comments are those of one rank's block:

    B  windows in a batch    S  bytes in a window    V  the vocabulary: 256 bytes
    D  width of the model    F  width of the MLP     H  heads, each of width K = D / H
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optree
import report
import text_data
import torch
import torch.nn.functional as F
from text_data import VOCAB
from torch import Tensor

import fspmd
from fspmd import P, Sharded

Params = dict[str, Any]  # a pytree of tensors
Batch = tuple[Tensor, Tensor]  # inputs and targets, each [B, S]

EPSILON, CLIP, WEIGHT_DECAY, BETAS, WARMUP, TEMPERATURE = 1e-6, 1.0, 0.1, (0.9, 0.95), 20, 0.7


# ---------------------------------------------------------------- parameters: global values, and how they are laid out


def init_params(seed: int, layers: int, width: int, heads: int, dtype: torch.dtype) -> Params:
    """Global values from one seed, so that they do not depend on the mesh."""
    generator = torch.Generator().manual_seed(seed)
    head_width, hidden, into_stream = width // heads, 4 * width, 1 / math.sqrt(2 * layers)

    def normal(*shape: int, std: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * std).to(dtype)

    def layer() -> Params:
        return {
            "norm1": torch.ones(width, dtype=dtype),
            "wqkv": normal(3, width, heads, head_width, std=width**-0.5),
            "wo": normal(heads, head_width, width, std=width**-0.5 * into_stream),
            "norm2": torch.ones(width, dtype=dtype),
            "up": normal(width, hidden, std=width**-0.5),
            "down": normal(hidden, width, std=hidden**-0.5 * into_stream),
        }

    return {
        "embedding": normal(VOCAB, width, std=0.5),
        "layers": [layer() for _ in range(layers)],
        "norm": torch.ones(width, dtype=dtype),
        "head": normal(width, VOCAB, std=0.02),
    }


def param_specs(layers: int) -> Params:
    """The layout of each parameter: a tree like the one of `init_params`. An axis that is not named holds copies."""
    layer = {
        "norm1": P(),  # [D]
        "wqkv": P(None, None, "tp"),  # [3, D, H / tp, K]   column parallel: each rank has its own heads
        "wo": P("tp"),  # [H / tp, K, D]      row parallel: the ranks' results add up
        "norm2": P(),  # [D]
        "up": P(None, "tp"),  # [D, F / tp]         column parallel
        "down": P("tp"),  # [F / tp, D]         row parallel
    }
    return {
        "embedding": P("tp"),  # [V / tp, D]
        "layers": [layer] * layers,
        "norm": P(),  # [D]
        "head": P(None, "tp"),  # [D, V / tp]
    }


# ---------------------------------------------------------------- the model: what one rank does with its blocks


def gather_sequence(x: Tensor) -> Tensor:
    """[B / dp, S / tp, D] -> [B / dp, S, D]. Backward: the ranks' gradients are summed and scattered at once."""
    return fspmd.all_gather(x, "tp", axis=1, tiled=True, to="reduced")


def scatter_sequence(x: Tensor) -> Tensor:
    """[B / dp, S, D], to be summed over tp -> [B / dp, S / tp, D]. Backward: an all-gather."""
    return fspmd.psum_scatter(x, "tp", scatter_dimension=1, tiled=True)


def own_rows(ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The place of each id in this rank's block of the vocabulary, of ``rows`` rows, and whether it is there."""
    place = ids - fspmd.axis_index("tp") * rows
    return place.clamp(0, rows - 1), (place >= 0) & (place < rows)


def embed(table: Tensor, tokens: Tensor) -> Tensor:
    """table [V / tp, D], tokens [B / dp, S] -> [B / dp, S / tp, D]. Every rank adds the rows that it has."""
    place, mine = own_rows(tokens, table.shape[0])
    return scatter_sequence(F.embedding(place, table) * mine[..., None])


def rotary_table(length: int, head_width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines, each [S, K], of the angles by which positions turn queries and keys."""
    frequency = 10000.0 ** (-torch.arange(0, head_width, 2, device=like.device).double() / head_width)
    angle = torch.arange(length, device=like.device).double()[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1).to(like.dtype), torch.cat([-sin, sin], -1).to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + K / 2]) of [..., S, K] by the angle of its position."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def attention(p: Params, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """x [B / dp, S, D] -> [B / dp, S, D], to be summed over tp: every rank attends with its own heads."""
    q, k, v = torch.einsum("bsd,cdhk->cbhsk", x, p["wqkv"])  # each [B / dp, H / tp, S, K]
    heads = F.scaled_dot_product_attention(rotate(q, *rotary), rotate(k, *rotary), v, is_causal=True)
    return torch.einsum("bhsk,hkd->bsd", heads, p["wo"])


def mlp(p: Params, x: Tensor) -> Tensor:
    """x [B / dp, S, D] -> [B / dp, S, D], to be summed over tp: every rank has its own hidden units."""
    up, down = p["up"], p["down"]
    y: Tensor = F.gelu(x @ up) @ down
    return y


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPSILON)


def layer(p: Params, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """x [B / dp, S / tp, D] -> the same shape."""
    x = x + scatter_sequence(attention(p, gather_sequence(norm(x, p["norm1"])), rotary))
    return x + scatter_sequence(mlp(p, gather_sequence(norm(x, p["norm2"]))))


def model(params: Params, tokens: Tensor) -> Tensor:
    """tokens [B / dp, S] -> logits [B / dp, S, V / tp]."""
    x = embed(params["embedding"], tokens)  # [B / dp, S / tp, D]
    rotary = rotary_table(tokens.shape[1], params["layers"][0]["wqkv"].shape[-1], like=x)
    for p in params["layers"]:
        x = fspmd.checkpoint(layer)(p, x, rotary)  # backward keeps only x, and computes the layer again
    head: Tensor = params["head"]
    return gather_sequence(norm(x, params["norm"])) @ head


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """logits [B / dp, S, V / tp], targets [B / dp, S] -> losses [B / dp, S]; no rank ever sees a whole row of V."""
    top = fspmd.pmax(fspmd.stop_gradient(logits).amax(-1), "tp")
    total = fspmd.psum((logits - top[..., None]).exp().sum(-1), "tp")
    place, mine = own_rows(targets, logits.shape[-1])
    picked = fspmd.psum(logits.gather(-1, place[..., None])[..., 0] * mine, "tp")
    return top + total.log() - picked


def local_loss(params: Params, batch: Batch) -> Tensor:
    """The mean loss over the whole batch: the same number on every rank."""
    tokens, targets = batch
    return fspmd.pmean(cross_entropy(model(params, tokens), targets).mean(), "dp")


def local_norm(grads: Params, specs: Params) -> Tensor:
    """The global norm: the squares of sharded gradients add up over tp, those of copies count once."""
    squares: dict[bool, list[Tensor]] = {True: [], False: []}
    for g, spec in zip(optree.tree_leaves(grads), optree.tree_leaves(specs), strict=True):
        squares["tp" in spec].append(g.square().sum())
    sharded, whole = (torch.stack(squares[is_sharded]).sum() for is_sharded in (True, False))
    return (fspmd.psum(sharded, "tp") + whole).sqrt()


# ---------------------------------------------------------------- training


@dataclass(frozen=True)
class Job:
    """What is trained: functions of global values, each `Sharded` over the mesh."""

    mesh: fspmd.Mesh
    loss: Callable[[Params, Batch], Any]
    logits: Callable[[Params, Any], Any]
    norm: Callable[[Params], Any]  # of all gradients together


def local_job(mesh: fspmd.Mesh, specs: Params) -> Job:
    """The functions above, each on the blocks of one rank, mapped over the mesh."""
    return Job(
        mesh,
        fspmd.shard_map(local_loss, mesh=mesh, in_specs=(specs, P("dp")), out_specs=P()),
        fspmd.shard_map(model, mesh=mesh, in_specs=(specs, P("dp")), out_specs=P("dp", None, "tp")),
        fspmd.shard_map(lambda grads: local_norm(grads, specs), mesh=mesh, in_specs=(specs,), out_specs=P()),
    )


def learning_rate(step: int, steps: int, peak: float) -> float:
    """A warm-up, a plateau, and from 40 % on a straight line down to zero."""
    return peak * min(1.0, (step + 1) / WARMUP, (steps - step) / (0.6 * steps))


def make_optimizer(params: Params) -> torch.optim.Optimizer:
    """AdamW with weight decay for matrices alone. ``fused`` makes it a few calls for all parameters."""
    leaves = optree.tree_leaves(params)
    decayed = {"params": [x for x in leaves if x.ndim > 1], "weight_decay": WEIGHT_DECAY}
    others = {"params": [x for x in leaves if x.ndim == 1], "weight_decay": 0}
    return torch.optim.AdamW([decayed, others], betas=BETAS, fused=True)


def number(x: Sharded) -> float:
    return float(fspmd.device_get(x))


def training_state(params: Params, optimizer: torch.optim.Optimizer, losses: list) -> Params:
    """All that a later run needs. The data's position is the number of losses; nothing else is drawn in a step."""
    state = optimizer.state_dict()
    if not losses:  # AdamW makes its tensors in its first step
        leaves = [x for group in optimizer.param_groups for x in group["params"]]
        state["state"] = {i: {"step": torch.tensor(0.0), "exp_avg": x, "exp_avg_sq": x} for i, x in enumerate(leaves)}
    return {"params": params, "optimizer": state, "losses": torch.tensor(losses, dtype=torch.float64)}


@torch.no_grad()
def resume(
    args: argparse.Namespace, mesh: fspmd.Mesh, params: Params, optimizer: torch.optim.Optimizer, say: Callable
) -> list[float]:
    """Set the parameters and the optimizer to the latest step that is saved; the losses up to there."""
    step = fspmd.latest_step(args.checkpoint)
    if not step:
        return []
    like = {**training_state(params, optimizer, []), "losses": torch.zeros(step, dtype=torch.float64)}
    state = fspmd.load(args.checkpoint, like, step=step, mesh=mesh)
    for x, saved in zip(optree.tree_leaves(params), optree.tree_leaves(state["params"]), strict=True):
        x.copy_(saved)
    optimizer.load_state_dict(state["optimizer"])
    say(f"resumed at step {step}/{args.steps} of {args.checkpoint}")
    losses: list[float] = state["losses"].tolist()
    return losses


def is_told_to_stop(told: list[int], mesh: fspmd.Mesh) -> bool:
    """Whether any process was: all of them stop after the same step."""
    return bool(fspmd.process_allgather(len(told), mesh=mesh).any())


def train(args: argparse.Namespace, job: Job, params: Params, text: Tensor, say: Callable) -> list[float]:
    """Update the blocks of ``params`` in place; the losses of all steps, or of those before SIGTERM."""
    loss_and_grads = fspmd.value_and_grad(job.loss)
    if args.jit:
        loss_and_grads = fspmd.jit(loss_and_grads)
    optimizer = make_optimizer(params)
    told: list[int] = []  # signals
    if args.checkpoint:
        signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    losses = resume(args, job.mesh, params, optimizer, say) if args.resume else []
    start, first = time.perf_counter(), len(losses)
    batches = itertools.islice(text_data.random_batches(text, args.batch, args.length, args.seed), first, None)
    for step in range(first, args.steps):
        batch = fspmd.device_put(next(batches), P("dp"), mesh=job.mesh)
        loss, grads = loss_and_grads(params, batch)  # grads: a tree like params, each leaf laid out like its primal
        scale = min(1.0, CLIP / number(job.norm(grads)))
        for x, g in zip(optree.tree_leaves(params), optree.tree_leaves(grads), strict=True):
            x.grad = g * scale
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        optimizer.step()
        losses.append(number(loss))
        speed = (step + 1 - first) * args.batch * args.length / (time.perf_counter() - start)
        say(report.progress(step + 1, args.steps, f"loss {losses[-1]:.3f}  {speed:,.0f} tokens/s"), end="", flush=True)
        if args.checkpoint:
            stop = is_told_to_stop(told, job.mesh)
            if stop or (step + 1) % args.every == 0 or step + 1 == args.steps:
                state = training_state(params, optimizer, losses)
                fspmd.save(args.checkpoint, state, step=step + 1, keep=2, mesh=job.mesh)
            if stop:
                say(f"stopped after step {step + 1}; --resume goes on from there")
                break
    return losses


@torch.no_grad()
def validate(job: Job, params: Params, batches: list[Batch]) -> float:
    losses = [number(job.loss(params, fspmd.device_put(batch, P("dp"), mesh=job.mesh))) for batch in batches]
    return sum(losses) / len(losses)


@torch.no_grad()
def generate(args: argparse.Namespace, job: Job, params: Params, prompt: bytes) -> list[list[int]]:
    """One sample per rank of dp. The logits come back as a global tensor, so all processes draw the same bytes."""
    generator = torch.Generator().manual_seed(args.seed)
    rows = torch.tensor([list(prompt)] * job.mesh.shape["dp"])  # [dp, bytes so far]
    for _ in range(args.sample):
        window = rows[:, -args.length :]  # a causal model does not look at the padding on the right
        padded = fspmd.device_put(F.pad(window, (0, args.length - window.shape[1])), P("dp"), mesh=job.mesh)
        logits = fspmd.device_get(job.logits(params, padded))[:, window.shape[1] - 1]  # [dp, V]
        drawn = torch.multinomial((logits.cpu().float() / TEMPERATURE).softmax(-1), 1, generator=generator)
        rows = torch.cat([rows, drawn], 1)
    return rows.tolist()


# ---------------------------------------------------------------- the program around it


def sizes(text: str) -> tuple[int, int]:
    dp, tp = text.split("x")
    return int(dp), int(tp)


def parse(argv: list[str] | None = None, description: str | None = __doc__) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mesh", type=sizes, default=(2, 4), metavar="AxB", help="ranks of dp x ranks of tp (default 2x4)"
    )
    parser.add_argument("--device", help="cpu or cuda (default: under torchrun the GPUs, if any, else the CPU)")
    parser.add_argument("--text", metavar="FILE", help="train on this file instead of the standard library's source")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch", type=int, default=32, help="B, windows in a batch (default 32)")
    parser.add_argument("--length", type=int, default=128, help="S, bytes in a window (default 128)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128, help="D (default 128)")
    parser.add_argument("--heads", type=int, default=4, help="H, a multiple of tp (default 4)")
    parser.add_argument("--lr", type=float, default=6e-3, help="peak learning rate (default 6e-3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    parser.add_argument("--jit", action="store_true", help="record loss and gradients once, and replay them")
    parser.add_argument("--checkpoint", metavar="DIR", help="save the state to this folder")
    parser.add_argument("--every", type=int, default=50, help="save every so many steps (default 50)")
    parser.add_argument("--resume", action="store_true", help="go on from the latest step in --checkpoint, if any")
    parser.add_argument("--sample", type=int, default=200, help="bytes to generate at the end (default 200)")
    parser.add_argument("--losses", metavar="FILE", help="write all losses to this file as JSON")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture (default out)")
    args = parser.parse_args(argv)
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint, the folder that the state is saved to")
    if args.every < 1:
        parser.error(f"--every {args.every} must be at least 1, the number of steps between two saves")
    dp, tp = args.mesh
    cuts = {"batch": (args.batch, dp), "length": (args.length, tp), "heads": (args.heads, tp), "bytes": (VOCAB, tp)}
    for what, (size, ranks) in cuts.items():
        if ranks < 1 or size % ranks:
            parser.error(f"--mesh {dp}x{tp} would cut {size} {what} into {ranks} parts, which must be equal")
    return args


def run(args: argparse.Namespace, job: Job, params: Params, name: str) -> None:
    """Train, validate, draw a sample and the loss curve."""
    first = not any(job.mesh.coordinate() or ())  # one process prints
    say: Callable = print if first else lambda *_, **__: None
    train_text, held_out = text_data.load_text(args.text)
    batches = text_data.even_batches(held_out, args.batch, args.length, count=16)
    bigram = text_data.bigram_loss(train_text, batches)
    size = sum(x.numel() for x in optree.tree_leaves(params, is_leaf=lambda x: isinstance(x, Sharded)))
    say(f"{job.mesh}: {size:,} parameters, {len(train_text):,} bytes to train on, {len(held_out):,} held out")

    losses = train(args, job, params, train_text, say)
    if len(losses) < args.steps:
        return
    validation = validate(job, params, batches)
    say(f"validation loss {validation:.3f} nats per byte; a byte bigram model has {bigram:.3f}")
    if args.sample:
        for row in generate(args, job, params, b"    def "):
            say(f"--- a sample ---\n{text_data.printable(row)}")
    if first:
        say(report.picture(args.out / f"{name}.png", losses, validation, bigram))
        if args.losses:
            Path(args.losses).write_text(json.dumps({"losses": losses, "validation": validation, "bigram": bigram}))


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    mesh = fspmd.make_mesh(args.mesh, ("dp", "tp"), device=args.device)
    if mesh.coordinate() is None:  # more processes than the mesh has ranks
        return
    specs = param_specs(args.layers)
    values = init_params(args.seed, args.layers, args.width, args.heads, getattr(torch, args.dtype))
    run(args, local_job(mesh, specs), fspmd.device_put(values, specs, mesh=mesh), "train_lm")


if __name__ == "__main__":
    main()
