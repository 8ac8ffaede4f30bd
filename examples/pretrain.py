"""Train a Llama on a mesh of six axes, of any sizes, with experts by option; or plan the run for a mesh of no ranks.

    python examples/pretrain.py                                                      # 8 simulated ranks
    python examples/pretrain.py --mesh cp=2,ep=2,tp=2 --experts 4
    torchrun --nproc-per-node 8 examples/pretrain.py --mesh pp=2,fsdp=2,tp=2 --checkpoint steps --resume
    python examples/pretrain.py --plan --mesh dp=64,fsdp=16,tp=8 --layers 32 --width 4096 --heads 32 --kv-heads 8 \
        --hidden 14336 --length 8192 --batch 4096 --dtype bfloat16 --accelerator 989

The model, and what the axes cut, is in llama.py. Axes that --mesh does not name have size 1. Losses do not depend on
the mesh: in float64 they are equal to 1e-10, unless experts have a capacity. With --checkpoint the state is saved every
few steps. With --resume a run goes on from the latest step, on any mesh and with any schedule.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import llama
import optree
import report
import text_data
import torch
from llama import HIDDEN, IDS, LOGITS, Config, Params
from torch import Tensor

import fspmd
from fspmd import Mesh, P, TensorSpec, shard_map
from fspmd.nn import (
    LossScale,
    Precision,
    accumulate,
    adafactor,
    adamw,
    dual_pipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    pipeline,
    selected,
    zbv,
    zero_bubble,
    zigzag,
)

AXES = ("pp", "dp", "fsdp", "ep", "cp", "tp")
SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
    "zbv": zbv,
    "dual-pipe-v": dual_pipe_v,
}
OPTIMIZERS: dict[str, Callable] = {"adamw": functools.partial(adamw, betas=(0.9, 0.95)), "adafactor": adafactor}
CLIP, DECAY, WARMUP = 1.0, 0.1, 20
Batches = list[tuple[Any, Any]]  # of each microbatch the ids and the targets, each [B, S]


# ---------------------------------------------------------------- a step, for any mesh


def losses_of(c: Config, mesh: Mesh, name: str, microbatches: int) -> tuple[Callable, Callable]:
    """Two functions of parameters and microbatches: of the mean loss with its gradients, and of the mean loss alone.

    With one stage the first takes a number by which the loss is multiplied before it is differentiated.
    """
    specs, layout = llama.stage_specs(c), zigzag(c.S, mesh.shape["cp"])
    schedule = SCHEDULES[name](mesh.shape["pp"], microbatches) if mesh.shape["pp"] > 1 else None
    p = c.precision  # a stage computes in its dtype; sums of gradients over microbatches have dtypes as well
    sums = p and Precision(p.param, p.param, p.reduce, torch.promote_types(p.param, torch.float32))
    if schedule is None:
        model = llama.stage(c, layout, first=True, last=True)

        def loss(params: Params, ids: Tensor, targets: Tensor) -> Tensor:
            return llama.cross_entropy(model(params, ids), targets)

        mapped = shard_map(loss, mesh=mesh, in_specs=(specs, IDS, IDS), out_specs=P())

        def scaled(params: Params, batches: Batches, scale: Any = 1.0) -> tuple[Any, Params]:
            def total(params: Params, batch: Any) -> tuple[Any, Any]:
                return mapped(params, *batch) * scale, batch[1].numel()

            mean, grads = accumulate(total, llama.WAIT, precision=sums)(params, batches)
            return mean / scale, grads

        def alone(params: Params, batches: Batches) -> Any:
            return sum(mapped(params, *batch) for batch in batches) / sum(targets.numel() for _, targets in batches)

        return scaled, alone

    def part(i: int) -> Callable:
        first, last = i == 0, i == schedule.stages - 1
        entering, leaving = IDS if first else HIDDEN, LOGITS if last else HIDDEN
        return shard_map(llama.stage(c, layout, first, last), in_specs=(specs, entering), out_specs=leaving)

    run, forward = (
        pipeline(
            [part(i) for i in range(schedule.stages)],
            table,
            loss=shard_map(llama.cross_entropy, in_specs=(LOGITS, IDS), out_specs=P()),
            count=lambda targets: targets.numel(),
            mesh=mesh,
            over=llama.WAIT,
            precision=sums,
        )
        for table in (schedule, schedule.forwards())
    )

    def of_layers(params: Params, f: Callable) -> Params:
        return {**params, "layers": {name: f(w) for name, w in params["layers"].items()}}

    def given(params: Params, batches: Batches) -> tuple:
        rows = of_layers(params, lambda w: w.unflatten(0, (schedule.stages, -1)))  # of each stage its layers
        return rows, *map(list, zip(*batches, strict=True))

    def scheduled(params: Params, batches: Batches) -> tuple[Any, Params]:
        loss, grads = run(*given(params, batches))
        return loss, of_layers(grads, lambda g: g.flatten(0, 1))

    return scheduled, lambda params, batches: forward(*given(params, batches))[0]


def init_params(c: Config, mesh: fspmd.Mesh, seed: int, dtype: torch.dtype) -> Any:
    """First values, which do not depend on the mesh. No rank makes more than its blocks."""
    key = fspmd.random.key(seed)

    def first(path: tuple[Any, ...], leaf: llama.Leaf, spec: P) -> Any:
        if leaf.scale is None:
            return fspmd.ones(*leaf.shape, spec=spec, dtype=dtype, mesh=mesh)
        own = fspmd.random.fold_in(key, zlib.crc32(repr(path).encode()))
        return fspmd.random.normal(own, leaf.shape, spec=spec, dtype=dtype, mesh=mesh) * leaf.scale

    return optree.tree_map_with_path(first, llama.leaves(c), llama.param_specs(c, mesh))


def stored_order(c: Config, stages: int, name: str) -> Tensor | None:
    """The layers in the order in which the ranks of ``stages`` have them by a schedule; None if it is that of layers.

    Checkpoints have the layers in their own order, so that another mesh or schedule can go on with them.
    """
    schedule = SCHEDULES[name](stages, 1)
    order = torch.arange(c.layers).view(schedule.stages, -1)[list(schedule.order)].flatten()
    return None if stages == 1 or torch.equal(order, torch.arange(c.layers)) else order


def with_layers_in(order: Tensor | None, tree: Any) -> Any:
    """Parameters, or trees like them, with their layers in another order."""
    if order is None:
        return tree

    def moved(path: tuple[Any, ...], x: Any) -> Any:
        return fspmd.reshard(x[order], x.spec.partition) if "layers" in path else x

    return optree.tree_map_with_path(moved, tree)


def optimizer(c: Config, name: str, peak: float, steps: int) -> fspmd.nn.Optimizer:
    """A warm-up, then a straight line down to zero; weight decay for matrices alone."""

    def rate(step: Tensor) -> Tensor:
        return peak * torch.minimum(step / min(WARMUP, steps), (steps + 1 - step) / steps).clamp(0, 1)

    decay = optree.tree_map(lambda leaf: DECAY if leaf.scale else 0.0, llama.leaves(c))
    made: fspmd.nn.Optimizer = OPTIMIZERS[name](rate, decay=decay)
    return made


def make_step(both: Callable, update: Callable, scaled: bool = False) -> Callable:
    """A step of training, from the loss with its gradients and the update of an optimizer.

    ``scaled``: the loss is multiplied by the scale in the state. A step whose gradients are not finite changes nothing
    but the scale.
    """

    def step(params: Params, state: Any, batches: Batches) -> tuple[Any, Params, Any]:
        loss, grads = both(params, batches)
        grads, _ = fspmd.clip_by_global_norm(grads, CLIP)
        return loss, *update(grads, state, params)

    def scaled_step(params: Params, state: Any, batches: Batches) -> tuple[Any, Params, Any]:
        inner, scale = {name: tree for name, tree in state.items() if name != "scale"}, state["scale"]
        loss, grads = both(params, batches, scale.scale)
        grads, finite = scale.unscaled(grads)
        grads, _ = fspmd.clip_by_global_norm(grads, CLIP)
        params, inner = selected(finite, update(grads, inner, params), (params, inner))
        return loss, params, {**inner, "scale": scale.after(finite)}

    return scaled_step if scaled else step


# ---------------------------------------------------------------- training


def put(c: Config, mesh: Mesh, batch: tuple[Tensor, Tensor], microbatches: int) -> Batches:
    """A batch of the whole job, [B, S], as microbatches on the mesh."""
    layout = zigzag(c.S, mesh.shape["cp"])
    parts = (layout.store(x, 1).chunk(microbatches) for x in batch)
    return [fspmd.device_put(pair, IDS, mesh=mesh) for pair in zip(*parts, strict=True)]


def is_first(mesh: Mesh) -> bool:
    """Whether this process prints."""
    return not any(mesh.coordinate() or ())


def peak_flops(dtype: torch.dtype, device: torch.device) -> float:
    """The FLOP/s of a large product of matrices here, the best of a few."""
    x = torch.ones(768, 768, dtype=dtype, device=device)
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        (x @ x)[0, 0].item()
        times.append(time.perf_counter() - begun)
    return float(2 * 768**3 / min(times))


def train(
    c: Config, mesh: Mesh, args: argparse.Namespace, both: Callable, batches: Iterator, say: Callable
) -> tuple[list, Params]:
    """The losses of all steps, and the parameters after them. ``both`` gives the loss and its gradients."""
    dtype = getattr(torch, args.dtype)
    order = stored_order(c, mesh.shape["pp"], args.schedule)
    back = None if order is None else order.argsort()
    params = with_layers_in(order, init_params(c, mesh, args.seed, dtype))
    init, update = optimizer(c, args.optimizer, args.lr, args.steps)
    step = make_step(both, update, scaled=bool(args.loss_scale))
    step = fspmd.jit(step, donate_argnums=(0, 1)) if args.jit else step
    state, losses = init(params), [math.nan] * args.steps
    if args.loss_scale:
        state["scale"] = LossScale.of(args.loss_scale, mesh.device)
    begin = (fspmd.latest_step(args.checkpoint) or 0) if args.resume else 0
    if begin:
        like = {"params": params, "state": state, "losses": losses}
        saved = fspmd.load(args.checkpoint, like, step=begin, mesh=mesh)
        params, state = (with_layers_in(order, saved[name]) for name in ("params", "state"))
        losses = saved["losses"]
        say(f"resumed at step {begin}/{args.steps} of {args.checkpoint}")
    ranks = 1 if mesh.transport == "simulation" else math.prod(mesh.shape.values())  # a simulation is one process
    peak = ranks * (args.accelerator * 1e12 if args.accelerator else peak_flops(dtype, mesh.device))
    tokens, started = args.batch * c.S, time.perf_counter()
    for i, batch in enumerate(itertools.islice(batches, begin, args.steps), begin):
        loss, params, state = step(params, state, put(c, mesh, batch, args.microbatches))
        losses[i] = float(loss)
        speed = (i + 1 - begin) * tokens / (time.perf_counter() - started)
        text = f"loss {losses[i]:.4f}  {speed:,.0f} tokens/s  MFU {speed * c.flops() / peak:.1%}"
        say(report.progress(i + 1, args.steps, text), end="", flush=True)
        if args.log and is_first(mesh):
            with Path(args.log).open("a") as file:
                file.write(f"step {i + 1} {text}\n")
        if args.checkpoint and ((i + 1) % args.every == 0 or i + 1 == args.steps):
            tree = {"params": with_layers_in(back, params), "state": with_layers_in(back, state), "losses": losses}
            fspmd.save(args.checkpoint, tree, step=i + 1, keep=2, mesh=mesh)
    return losses, params


def validate(c: Config, mesh: Mesh, args: argparse.Namespace, alone: Callable, params: Params, batches: list) -> float:
    return sum(float(alone(params, put(c, mesh, batch, args.microbatches))) for batch in batches) / len(batches)


# ---------------------------------------------------------------- a plan for ranks that do not exist


class Predicted(NamedTuple):
    """Time and memory of a step. Layers are alike, so each beyond the second adds the same time and the same bytes."""

    time: float  # µs
    exposed: float  # µs that wait for communication
    held: dict[str, list[int]]  # for each line of the program, the bytes of a rank at each of its steps

    def with_layers(self, count: int, following: Predicted) -> Predicted:
        """The prediction for ``count`` layers more. ``following``: that for one layer more."""
        time, exposed = (now + count * (then - now) for now, then in zip(self[:2], following[:2], strict=True))
        held = {}
        for line in following.held:
            now, then = self.held[line], following.held[line]
            if len(now) < len(then):  # a line of each layer: the first or the last layer holds most
                now, then = [max(now)], [max(then)]
            held[line] = [x + count * (y - x) for x, y in zip(now, then, strict=True)]
        return Predicted(time, exposed, held)


def laid(c: Config, mesh: Mesh, dtype: torch.dtype) -> Any:
    """The layouts of the parameters of a stage."""
    return optree.tree_map(lambda leaf: TensorSpec(mesh, leaf.spec, leaf.shape, dtype), llama.leaves(c))


def recorded(c: Config, mesh: Mesh, args: argparse.Namespace, microbatches: int = 1) -> Predicted:
    """What the record of a step says, for one stage and a few microbatches."""
    params = laid(c, mesh, getattr(torch, args.dtype))
    state = {"step": torch.zeros((), dtype=torch.float64), "mean": params, "square": params}
    ids = TensorSpec(mesh, IDS, (args.batch // args.microbatches, c.S), torch.int64)
    step = make_step(losses_of(c, mesh, "gpipe", 1)[0], optimizer(c, "adamw", args.lr, args.steps).update)
    program = fspmd.jit(step, donate_argnums=(0, 1)).lower(params, state, [(ids, ids)] * microbatches)
    cost = program.cost()
    return Predicted(cost.time, cost.exposed, program.memory().by_line)


def plan(c: Config, sizes: dict[str, int], args: argparse.Namespace) -> None:
    """What records of a step say: of one stage, and of one or two microbatches; the schedule says the rest."""
    stages, microbatches = sizes["pp"], args.microbatches
    mesh = fspmd.make_mesh(tuple({**sizes, "pp": 1}.values()), AXES, transport="abstract")
    rows = args.batch // microbatches * c.S // math.prod(sizes[axis] for axis in llama.TOKENS)  # tokens of a rank
    part = dataclasses.replace(c, layers=c.layers // stages)
    params = laid(part, mesh, getattr(torch, args.dtype))
    begun = time.perf_counter()
    few, more = (dataclasses.replace(part, layers=n) for n in (min(part.layers, 2), 3))
    costs = []
    for count in (1, min(microbatches, 2)):
        cost = recorded(few, mesh, args, count)
        if part.layers > 2:
            cost = cost.with_layers(part.layers - 2, recorded(more, mesh, args, count))
        costs.append(cost)
    one, two = costs  # microbatches. Each beyond the first adds the same time
    each, exposed = (b - a if microbatches > 1 else a for a, b in zip(one[:2], two[:2], strict=True))
    took = time.perf_counter() - begun
    bubble, live, deep = 0.0, 1, part.layers
    if stages > 1:
        schedule = SCHEDULES[args.schedule](stages, microbatches)
        bubble, live = schedule.bubble(), max(schedule.peaks())  # of activations of a stage
        deep //= schedule.stages // stages
    kept = (live - 1) * deep * rows * c.D * getattr(torch, args.dtype).itemsize
    once = one.time - each
    seconds = (microbatches * each / (1 - bubble) + once) / 1e6
    tokens, ranks = args.batch * c.S, math.prod(sizes.values())
    print(f"{ranks:,} ranks: {', '.join(f'{axis}={size}' for axis, size in sizes.items() if size > 1)}")
    print(f"{c.parameters() / 1e9:,.2f} billion parameters; one stage has {part.layers} layers, and lies so:")
    for path, spec in zip(optree.tree_paths(params), optree.tree_leaves(params), strict=True):
        name, layout = ".".join(map(str, path)), str(spec).partition(" on ")[0]
        print(f"  {name:<16} {layout:<44}{math.prod(spec.block_shape) * spec.dtype.itemsize:>14,} B a rank")
    peak = max(map(max, two.held.values())) + kept
    print(f"\nMemory of a rank: {peak / 1e9:.2f} GB at the peak, {kept / 1e9:.2f} of it for microbatches")
    print(f"A microbatch: {each / 1e3:,.1f} ms, of which {exposed / 1e3:,.1f} wait for communication")
    print(f"Sums of gradients and the update: {once / 1e3:,.1f} ms, of which {(one.exposed - exposed) / 1e3:,.1f} wait")
    print(f"A step of {microbatches} microbatches: {seconds:,.2f} s; stages are idle {bubble:.1%} of the microbatches")
    speed = tokens / seconds
    utilization = speed * c.flops() / (ranks * fspmd.topology().flops * 1e6)
    print(f"{speed:,.0f} tokens/s, MFU {utilization:.1%}; recorded in {took:.1f} s. Predicted, not measured.")


# ---------------------------------------------------------------- the program around it


def mesh_sizes(text: str) -> dict[str, int]:
    given = dict(part.split("=") for part in text.split(","))
    if unknown := set(given) - set(AXES):
        raise argparse.ArgumentTypeError(f"no axis is named {', '.join(sorted(unknown))}; there are {', '.join(AXES)}")
    return {axis: int(given.get(axis, 1)) for axis in AXES}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = mesh_sizes("pp=2,fsdp=2,tp=2")
    parser.add_argument("--mesh", type=mesh_sizes, default=default, metavar="AXIS=SIZE,...", help="as above")
    parser.add_argument("--plan", action="store_true", help="print what a step would need, and train nothing")
    parser.add_argument("--device", help="cpu or cuda (default: under torchrun the GPUs, if any, else the CPU)")
    parser.add_argument("--text", metavar="FILE", help="train on this file instead of the standard library's source")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32, help="sequences in a step (default 32)")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of stages, where pp > 1")
    for name, size in (("length", "S"), ("layers", "layers"), ("width", "D"), ("hidden", "F"), ("heads", "H")):
        parser.add_argument(f"--{name}", type=int, default=getattr(Config, size))
    parser.add_argument("--kv-heads", type=int, default=Config.G)
    parser.add_argument("--vocabulary", type=int, default=Config.V)
    parser.add_argument("--experts", type=int, default=0, help="experts in each layer (default: one MLP)")
    parser.add_argument("--chosen", type=int, default=Config.chosen, help="experts of a token")
    parser.add_argument("--capacity", type=int, help="tokens for each rank and expert (default: none is dropped)")
    parser.add_argument("--attention", choices=llama.ATTENTION, default=Config.attention, help="its way over cp")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--lr", type=float, default=6e-3, help="peak learning rate (default 6e-3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    dtypes = ["float32", "float64", "bfloat16", "float16"]
    parser.add_argument(
        "--compute", choices=dtypes, help="cast parameters to it where they are used (default: --dtype)"
    )
    parser.add_argument("--reduce", choices=dtypes, help="sum gradients over ranks in it (default: --dtype)")
    parser.add_argument("--loss-scale", type=float, help="multiply the loss by it, or less where gradients overflow")
    parser.add_argument("--jit", action="store_true", help="record a step once, and replay it")
    parser.add_argument("--accelerator", type=float, help="TFLOP/s of a rank at most, for MFU (default: measured)")
    parser.add_argument("--checkpoint", metavar="DIR", help="save the state to this folder")
    parser.add_argument("--every", type=int, default=50, help="save every so many steps (default 50)")
    parser.add_argument("--resume", action="store_true", help="go on from the latest step in --checkpoint, if any")
    parser.add_argument("--log", metavar="FILE", help="append a line for each step")
    parser.add_argument("--losses", metavar="FILE", help="write all losses to this file as JSON")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture (default out)")
    args = parser.parse_args(argv)
    mesh, batch = args.mesh, math.prod(args.mesh[axis] for axis in llama.BATCH)
    stages = SCHEDULES[args.schedule](mesh["pp"], 1).stages if mesh["pp"] > 1 else 1
    heads = mesh["tp"] * (mesh["cp"] if args.attention == "ulysses" else 1)
    cuts = [
        ("layers", args.layers, "stages on pp", stages),
        ("batch", args.batch, f"{args.microbatches} microbatches, dp, fsdp and ep", args.microbatches * batch),
        ("length", args.length, "cp", mesh["cp"]),
        ("kv-heads", args.kv_heads, "tp", mesh["tp"]),
        ("heads", args.heads, "kv-heads", args.kv_heads),
        ("heads", args.heads, "tp, and cp in ulysses", heads),
        ("hidden", args.hidden, "tp and fsdp", mesh["tp"]),
        ("vocabulary", args.vocabulary, "tp", mesh["tp"]),
        ("width", args.width, "fsdp, and heads of even width", math.lcm(mesh["fsdp"], 2 * args.heads)),
        ("experts", args.experts, "ep", mesh["ep"] if args.experts else 1),
    ]
    for name, size, over, parts in cuts:
        if parts < 1 or size % parts:
            parser.error(f"--{name} {size} is to be cut over {over}, into {parts} equal parts; give a multiple")
    if args.loss_scale and mesh["pp"] > 1:
        parser.error("--loss-scale scales the loss of one stage; leave it out, or take pp=1")
    if args.jit and args.experts and args.capacity is None and not args.plan:
        parser.error(
            "--jit records shapes that no choice changes; give --experts a --capacity, such as --batch * --length"
        )
    if args.plan and args.optimizer != "adamw":
        parser.error("--plan knows the state of adamw; leave --optimizer out")
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint, the folder that the state is saved to")
    return args


def config(args: argparse.Namespace) -> Config:
    sizes = {"D": args.width, "F": args.hidden, "H": args.heads, "G": args.kv_heads, "V": args.vocabulary}
    mixture = {"experts": args.experts, "chosen": args.chosen, "capacity": args.capacity, "attention": args.attention}
    param, compute, reduce = (getattr(torch, name or args.dtype) for name in (args.dtype, args.compute, args.reduce))
    precision = Precision(param, compute, reduce) if args.compute or args.reduce else None
    return Config(layers=args.layers, S=args.length, precision=precision, **sizes, **mixture)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    c = config(args)
    if args.accelerator:
        fspmd.set_topology(dataclasses.replace(fspmd.topology(), flops=args.accelerator * 1e6))
    if args.plan:
        return plan(c, args.mesh, args)
    mesh = fspmd.make_mesh(tuple(args.mesh.values()), AXES, device=args.device)
    if mesh.coordinate() is None:  # more processes than the mesh has ranks
        return None
    say: Callable = print if is_first(mesh) else lambda *_, **__: None
    text, held_out = text_data.load_text(args.text)
    batches = text_data.even_batches(held_out, args.batch, c.S, count=2)
    bigram = text_data.bigram_loss(text, batches)
    say(f"{mesh}: {c.parameters():,} parameters, {len(text):,} bytes to train on, {len(held_out):,} held out")
    data = text_data.random_batches(text, args.batch, c.S, args.seed)
    both, alone = losses_of(c, mesh, args.schedule, args.microbatches)
    losses, params = train(c, mesh, args, both, data, say)
    validation = validate(c, mesh, args, alone, params, batches)
    say(f"validation loss {validation:.3f} nats per byte; a byte bigram model has {bigram:.3f}")
    if is_first(mesh):
        say(report.picture(args.out / "pretrain.png", losses, validation, bigram))
        if args.losses:
            Path(args.losses).write_text(json.dumps({"losses": losses, "validation": validation, "bigram": bigram}))
    return None


if __name__ == "__main__":
    main()
