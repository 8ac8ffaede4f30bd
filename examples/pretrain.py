"""Train a Llama on a mesh of six axes, of any sizes, with experts by option; or plan the run for a mesh of no ranks.

    python examples/pretrain.py                                                      # 8 simulated ranks
    python examples/pretrain.py --mesh cp=2,ep=2,tp=2 --experts 4
    torchrun --nproc-per-node 8 examples/pretrain.py --mesh pp=2,fsdp=2,tp=2 --checkpoint steps --resume
    python examples/pretrain.py --plan --mesh dp=64,fsdp=16,tp=8 --layers 32 --width 4096 --heads 32 --kv-heads 8 \
        --hidden 14336 --length 8192 --batch 4096 --dtype bfloat16 --accelerator 989

The model, and what the axes cut, is in llama.py. Axes that --mesh does not name have size 1. Losses do not depend on
the mesh: in float64 they are equal to 1e-10, unless experts have a capacity. With --checkpoint the state is saved every
few steps. With --resume a run goes on from the latest step, on any mesh, with any schedule. With --sample the model
writes text at the end, as llama_decoding.py says.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from llama_decoding import generate
from torch import Tensor

import fspmd
from fspmd import Mesh, P, TensorSpec, nn, shard_map
from fspmd.nn import (
    Causal,
    LossScale,
    Optimizer,
    Precision,
    SequenceLayout,
    SlidingWindow,
    accumulate,
    pipeline,
    selected,
)

AXES = ("pp", "dp", "fsdp", "ep", "cp", "tp")
SCHEDULES = {
    "gpipe": nn.gpipe,
    "1f1b": nn.one_f_one_b,
    "interleaved": nn.interleaved,
    "zero-bubble": nn.zero_bubble,
    "zbv": nn.zbv,
    "dual-pipe-v": nn.dual_pipe_v,
}
LAYOUTS: dict[str, Callable[[int, int, nn.Mask], SequenceLayout]] = {
    "contiguous": lambda length, ranks, mask: nn.contiguous(length, ranks),
    "striped": lambda length, ranks, mask: nn.striped(length, ranks),
    "zigzag": lambda length, ranks, mask: nn.zigzag(length, ranks),
    # up to 16 parts for each rank
    "balanced": lambda length, ranks, mask: nn.balanced(length, ranks, mask, math.gcd(length // ranks, 16)),
}
MATRICES = ("wq", "wk", "wv", "wo", "gate", "up", "down")  # of a layer
FROM_ZERO = ("lr", "experts", "balance", "balance_loss", "sample", "temperature")  # numbers that may be 0
CLIP, DECAY, BETAS, WARMUP = 1.0, 0.1, (0.9, 0.95), 20
Batches = list[tuple[Any, Any]]  # of each microbatch the ids and the targets, each [B, S]


def parameters(c: Config) -> int:
    """The number of parameters."""
    return sum(math.prod(leaf.shape) for leaf in optree.tree_leaves(llama.leaves(c)))


def flops(c: Config) -> float:
    """FLOPs of the model for a token, forward and backward."""
    mlp = 3 * c.D * c.F * (c.chosen if c.experts else 1) + c.D * c.experts
    seen = nn.contiguous(c.S, 1).work(c.mask)[0] / c.S
    attention = 2 * c.D * (c.H + c.G) * c.K + 2 * seen * c.H * c.K
    return 6.0 * (c.layers * (mlp + attention) + c.D * c.V)


# ---------------------------------------------------------------- a step, for any mesh


def stages_in_order(schedule: str, ranks: int) -> tuple[int, ...]:
    """The stages, as they lie on the ranks of pp: equally many on each, in rank order."""
    return SCHEDULES[schedule](ranks, 1).order if ranks > 1 else (0,)


def layout_of(c: Config, mesh: Mesh, args: argparse.Namespace) -> SequenceLayout:
    """Which positions the ranks of cp have. By Ulysses each has all of them for its heads, so none has more work."""
    name = args.layout or ("contiguous" if c.attention == "ulysses" else "zigzag")
    return LAYOUTS[name](c.S, mesh.shape["cp"], c.mask)


def shown(args: argparse.Namespace) -> int:
    """How many of the next tokens of a sequence the prefix shows."""
    return (args.prefix or 1) - 1


def predicted(tokens: Any, args: argparse.Namespace) -> int:
    """How many of the next tokens, [B, S], are to be predicted."""
    return int(tokens.shape[0] * (tokens.shape[1] - shown(args)))


def losses_of(c: Config, mesh: Mesh, args: argparse.Namespace, microbatches: int) -> tuple[Callable, Callable]:
    """Two functions of parameters and microbatches: one for training, and one of the mean loss alone.

    The first takes a factor of the loss too, and returns ``((loss, beside), gradients)``. If there are experts, the
    loss has that of their balance, and ``beside`` the counts of each layer.
    """
    specs = optree.tree_map(lambda spec: P(*spec, reduced=set(llama.ONCE)), llama.param_specs(c))
    layout = layout_of(c, mesh, args)
    beside, dtype = llama.BESIDE if c.experts else {}, getattr(torch, args.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    # stages cast by themselves; gradients are summed over microbatches in a wide dtype, and then over replicas
    sums: Precision | None = Precision(dtype, dtype, c.precision.reduce if c.precision else dtype, wide)
    if c.experts and dtype is not wide:
        sums = None  # parameters have two dtypes: the bias of experts is wide

    def added(more: Params, rows: int) -> tuple[Any, Params]:
        """What the balance of experts adds to the loss of a microbatch of so many tokens, and the rest."""
        rest = {name: x for name, x in more.items() if name != "balance"}
        return more["balance"].sum() * (rows * args.balance_loss) if more and args.balance_loss else 0.0, rest

    if mesh.shape["pp"] == 1:
        model = llama.stage(c, layout, first=True, last=True)

        def total(params: Params, ids: Tensor, targets: Tensor) -> tuple[Tensor, Params]:
            logits, more = model(params, ids)
            return llama.cross_entropy(logits, targets), more

        mapped = shard_map(total, mesh=mesh, in_specs=(specs, IDS, IDS), out_specs=(P(), beside))

        def scaled(params: Params, batches: Batches, scale: Any = 1.0) -> tuple[Any, Params]:
            def one(params: Params, batch: tuple[Any, Any]) -> Any:
                value, more = mapped(params, *batch)
                count = predicted(batch[1], args)
                part, more = added(more, count)
                return ((value + part) * scale, count), more

            (mean, more), grads = accumulate(one, llama.ONCE, precision=sums, has_aux=True)(params, batches)
            return (mean / scale, more), grads

        def alone(params: Params, batches: Batches) -> Any:
            params = nn.gathered(params, llama.ONCE)
            losses = sum(mapped(params, *batch)[0] for batch in batches)
            return losses / sum(predicted(targets, args) for _, targets in batches)

        return scaled, alone

    schedule = SCHEDULES[args.schedule](mesh.shape["pp"], microbatches)
    stages = schedule.stages

    def part(i: int, alone: bool) -> Callable:
        first, last = i == 0, i == stages - 1
        entering, leaving = IDS if first else HIDDEN, LOGITS if last else HIDDEN
        run = shard_map(llama.stage(c, layout, first, last), in_specs=(specs, entering), out_specs=(leaving, beside))

        def whole(params: Params, x: Any) -> Any:
            y, more = run(params, x)
            return y if alone else (y, *added(more, predicted(x, args)))

        return whole

    run, forward = (
        pipeline(
            [part(i, alone) for i in range(stages)],
            schedule.forwards() if alone else schedule,
            loss=shard_map(llama.cross_entropy, in_specs=(LOGITS, IDS), out_specs=P()),
            count=lambda targets: predicted(targets, args),
            mesh=mesh,
            over=llama.ONCE,
            precision=sums,
            has_aux=not alone,
        )
        for alone in (False, True)
    )

    def of_layers(params: Params, f: Callable) -> Params:
        return {**params, "layers": {name: f(w) for name, w in params["layers"].items()}}

    def given(params: Params, batches: Batches) -> tuple:
        rows = of_layers(params, lambda w: w.unflatten(0, (stages, -1)))  # of each stage its layers
        return rows, *map(list, zip(*batches, strict=True))

    def scheduled(params: Params, batches: Batches, scale: Any = None) -> tuple[Any, Params]:
        (loss, more), grads = run(*given(params, batches), scale)
        more = {name: x.flatten(0, 1) for name, x in more.items()}
        return (loss, more), of_layers(grads, lambda g: g.flatten(0, 1))

    return scheduled, lambda params, batches: forward(*given(params, batches))[0]


def init_params(c: Config, mesh: fspmd.Mesh, seed: int, dtype: torch.dtype) -> Any:
    """First values, which do not depend on the mesh. No rank makes more than its blocks."""
    key = fspmd.random.key(seed)

    def first(path: tuple[Any, ...], leaf: llama.Leaf, spec: P) -> Any:
        if leaf.scale is None:
            return fspmd.ones(*leaf.shape, spec=spec, dtype=dtype, mesh=mesh)
        own = fspmd.random.fold_in(key, zlib.crc32(repr(path).encode()))
        return fspmd.random.normal(own, leaf.shape, spec=spec, dtype=dtype_of(path, dtype), mesh=mesh) * leaf.scale

    return optree.tree_map_with_path(first, llama.leaves(c), llama.param_specs(c, mesh.shape["pp"]))


def dtype_of(path: tuple[Any, ...], dtype: torch.dtype) -> torch.dtype:
    """The dtype of a parameter. That of the bias of experts is wide, because its changes are small."""
    return torch.promote_types(dtype, torch.float32) if path[-1] == "bias" else dtype


def in_rows(tree: Any, rows: Tensor) -> Any:
    """Parameters or a state of the optimizer with layer ``rows[i]`` in row i of the stacks of layers."""
    if rows.equal(torch.arange(len(rows))):
        return tree

    def one(path: tuple[Any, ...], x: Any) -> Any:
        return fspmd.reshard(x[rows], x.spec.partition) if "layers" in path and len(x) == len(rows) else x

    return optree.tree_map_with_path(one, tree, is_leaf=lambda x: isinstance(x, fspmd.Sharded))


def optimizer(c: Config, args: argparse.Namespace) -> Optimizer:
    """An optimizer with a warm-up, then a straight line down to zero; weight decay for matrices alone."""
    steps, stored = args.steps, None

    def rate(step: Tensor) -> Any:
        return args.lr * torch.minimum(step / min(WARMUP, steps), (steps + 1 - step) / steps).clamp(0, 1)

    if args.zero1:  # the state is cut over dp as well
        whole = learned(llama.param_specs(c, args.mesh["pp"]))
        stored = optree.tree_map(lambda spec: P(*(("fsdp", "dp") if axis == "fsdp" else axis for axis in spec)), whole)
    decay = optree.tree_map(lambda leaf: DECAY if leaf.scale else 0.0, learned(llama.leaves(c)))
    if args.optimizer == "adamw":
        made = nn.adamw(rate, BETAS, decay=decay, specs=stored)
    elif args.optimizer == "adafactor":
        made = nn.adafactor(rate, decay=decay, specs=stored)
    else:
        (_, decay), (cut, rest) = apart(decay), apart(stored) if stored else (None, None)
        matrices = nn.muon(rate, decay=DECAY, adjustment="match_rms_adamw", dtype=None, specs=cut)
        made = both_of(matrices, nn.adamw(rate, BETAS, decay=decay, specs=rest))
    wide = torch.promote_types(getattr(torch, args.dtype), torch.float32)
    return nn.with_master(made, wide, specs=stored) if args.with_master else made


def learned(tree: Params) -> Params:
    """The parameters that have gradients."""
    return {**tree, "layers": {name: w for name, w in tree["layers"].items() if name != "bias"}}


def apart(tree: Params) -> tuple[Params, Params]:
    """The matrices of layers, and all other parameters."""
    layers = tree["layers"]
    others = {name: w for name, w in layers.items() if name not in MATRICES}
    return {"layers": {name: layers[name] for name in MATRICES}}, {**tree, "layers": others}


def both_of(matrices: Optimizer, others: Optimizer) -> Optimizer:
    """One optimizer for the matrices of layers, and another for all other parameters."""

    def init(params: Params) -> Any:
        first, second = apart(params)
        return {"matrices": matrices.init(first), "others": others.init(second)}

    def update(grads: Params, state: Any, params: Params) -> tuple[Params, Any]:
        (g, other_g), (w, other_w) = apart(grads), apart(params)
        w, first = matrices.update(g, state["matrices"], w)
        other_w, second = others.update(other_g, state["others"], other_w)
        return {**other_w, "layers": other_w["layers"] | w["layers"]}, {"matrices": first, "others": second}

    return Optimizer(init, update)


def make_step(both: Callable, update: Callable, args: argparse.Namespace) -> Callable:
    """A step of training, from the first of `losses_of` and the update of an optimizer.

    With a scale of the loss, which is in the state, a step whose gradients are not finite changes that scale alone.
    """

    def updated(grads: Params, state: Any, params: Params, beside: Params) -> tuple[Params, Any]:
        grads, _ = fspmd.clip_by_global_norm(learned(grads), CLIP)
        after, state = update(grads, state, learned(params))
        if args.experts:
            after["layers"]["bias"] = nn.balance(params["layers"]["bias"], beside["counts"], args.balance)
        return after, state

    def step(params: Params, state: Any, batches: Batches) -> tuple[Any, Params, Any]:
        (loss, beside), grads = both(params, batches)
        return loss, *updated(grads, state, params, beside)

    def scaled_step(params: Params, state: Any, batches: Batches) -> tuple[Any, Params, Any]:
        inner, scale = {name: tree for name, tree in state.items() if name != "scale"}, state["scale"]
        (loss, beside), grads = both(params, batches, scale.scale)
        grads, finite = scale.unscaled(grads)
        params, inner = selected(finite, updated(grads, inner, params, beside), (params, inner))
        return loss, params, {**inner, "scale": scale.after(finite)}

    return scaled_step if args.loss_scale else step


# ---------------------------------------------------------------- training


def put(c: Config, mesh: Mesh, args: argparse.Namespace, batch: tuple[Tensor, Tensor]) -> Batches:
    """A batch of the whole job, [B, S], as microbatches on the mesh."""
    layout = layout_of(c, mesh, args)
    ids, targets = batch[0], batch[1].clone()
    targets[:, : shown(args)] = -1  # no losses
    parts = (layout.store(x, 1).chunk(args.microbatches) for x in (ids, targets))
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
) -> tuple[list, Params, Tensor]:
    """The losses of all steps, the parameters after them, and the layers in the order in which they lie.

    ``both`` gives the loss and its gradients.
    """
    dtype = getattr(torch, args.dtype)
    order = SCHEDULES[args.schedule](mesh.shape["pp"], 1).order
    rows = (
        torch.arange(c.layers).view(len(order), -1)[list(order)].flatten()
    )  # the layers, as the ranks of pp have them
    params = in_rows(init_params(c, mesh, args.seed, dtype), rows)
    init, update = optimizer(c, args)
    step = make_step(both, update, args)
    step = fspmd.jit(step, donate_argnums=(0, 1)) if args.jit else step
    state, losses = init(learned(params)), []
    if args.loss_scale:
        state["scale"] = LossScale.of(args.loss_scale, mesh.device)
    begin = (fspmd.latest_step(args.checkpoint) or 0) if args.resume else 0
    if begin:
        like = {"params": params, "state": state, "losses": [0.0] * begin}
        saved = in_rows(fspmd.load(args.checkpoint, like, step=begin, mesh=mesh), rows)
        params, state, losses = (saved[name] for name in ("params", "state", "losses"))
        say(f"resumed at step {begin}/{args.steps} of {args.checkpoint}")
    ranks = 1 if mesh.transport == "simulation" else math.prod(mesh.shape.values())  # a simulation is one process
    peak = ranks * (args.accelerator * 1e12 if args.accelerator else peak_flops(dtype, mesh.device))
    tokens, started = args.batch * c.S, time.perf_counter()
    for i, batch in enumerate(itertools.islice(batches, begin, args.steps), begin):
        loss, params, state = step(params, state, put(c, mesh, args, batch))
        losses.append(float(loss))
        speed = (i + 1 - begin) * tokens / (time.perf_counter() - started)
        text = f"loss {losses[i]:.4f}  {speed:,.0f} tokens/s  MFU {speed * flops(c) / peak:.1%}"
        say(report.progress(i + 1, args.steps, text), end="", flush=True)
        if args.text_log and is_first(mesh):
            with Path(args.text_log).open("a") as file:
                file.write(f"step {i + 1} {text}\n")
        if args.checkpoint and ((i + 1) % args.every == 0 or i + 1 == args.steps):
            tree = in_rows({"params": params, "state": state, "losses": losses}, rows.argsort())
            fspmd.save(args.checkpoint, tree, step=i + 1, keep=2, mesh=mesh)
    return losses, params, rows


def validate(c: Config, mesh: Mesh, args: argparse.Namespace, alone: Callable, params: Params, batches: list) -> float:
    return sum(float(alone(params, put(c, mesh, args, batch))) for batch in batches) / len(batches)


def continued(c: Config, mesh: Mesh, args: argparse.Namespace, params: Params, text: Tensor) -> list[list[int]]:
    """Prompts of a text and what the model writes after them, one for each rank that cuts the batch."""
    slots, length = math.prod(mesh.shape[axis] for axis in llama.BATCH), c.S // 2
    prompts = text[: slots * length].view(slots, length).tolist()
    whole = fspmd.reshard(params, llama.param_specs(c))  # all ranks of pp do the same
    drawn = generate(c, mesh, whole, prompts, args.sample, args.temperature, args.seed)
    return [prompt + tokens for prompt, tokens in zip(prompts, drawn, strict=True)]


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
            # a line of each layer, of which the first or the last holds most; or larger values move in other steps
            if len(now) != len(then):
                now, then = [max(now)], [max(then)]
            held[line] = [x + count * (y - x) for x, y in zip(now, then, strict=True)]
        return Predicted(time, exposed, held)


def laid(c: Config, mesh: Mesh, dtype: torch.dtype) -> Any:
    """The layouts of the parameters of a stage."""

    def one(path: tuple[Any, ...], leaf: llama.Leaf) -> TensorSpec:
        return TensorSpec(mesh, leaf.spec, leaf.shape, dtype_of(path, dtype))

    return optree.tree_map_with_path(one, llama.leaves(c))


def recorded(c: Config, mesh: Mesh, args: argparse.Namespace, microbatches: int = 1) -> Predicted:
    """What the record of a step says, for one stage and a few microbatches."""
    init, update = optimizer(c, args)
    params = laid(c, mesh, getattr(torch, args.dtype))
    state = optree.tree_map(
        lambda x: x if isinstance(x, TensorSpec) else torch.zeros_like(x, device="cpu"),
        fspmd.jit(init).lower(learned(params)).out_info,
    )
    ids = TensorSpec(mesh, IDS, (args.batch // args.microbatches, c.S), torch.int64)
    if args.loss_scale:
        state["scale"] = LossScale.of(args.loss_scale)
    step = make_step(losses_of(c, mesh, args, microbatches)[0], update, args)
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
    one, two = costs
    # each microbatch beyond the first adds the same time; sums over replicas and the update come once
    each, waits = (b - a if microbatches > 1 else a for a, b in zip(one[:2], two[:2], strict=True))
    took = time.perf_counter() - begun
    bubble, live = 0.0, 1
    if stages > 1:
        schedule = SCHEDULES[args.schedule](stages, microbatches)
        bubble, live = schedule.bubble(), max(schedule.peaks())
    chunks = len(stages_in_order(args.schedule, stages)) // stages
    kept = max(live - chunks, 0) * part.layers // chunks * rows * c.D * getattr(torch, args.dtype).itemsize
    seconds = (microbatches * each / (1 - bubble) + one.time - each) / 1e6
    tokens, ranks = args.batch * c.S, math.prod(sizes.values())
    print(f"{ranks:,} ranks: {', '.join(f'{axis}={size}' for axis, size in sizes.items() if size > 1)}")
    print(f"{parameters(c) / 1e9:,.2f} billion parameters; one stage has {part.layers} layers, and lies so:")
    for path, spec in zip(optree.tree_paths(params), optree.tree_leaves(params), strict=True):
        name, layout = ".".join(map(str, path)), str(spec).partition(" on ")[0]
        print(f"  {name:<16} {layout:<44}{math.prod(spec.block_shape) * spec.dtype.itemsize:>14,} B a rank")
    peak = max(map(max, two.held.values())) + kept
    print(f"\nMemory of a rank: {peak / 1e9:.2f} GB at the peak, {kept / 1e9:.2f} of it for microbatches")
    print(f"A microbatch: {each / 1e3:,.1f} ms, of which {waits / 1e3:,.1f} wait for communication")
    print(
        f"Sums over replicas and the update: {(one.time - each) / 1e3:,.1f} ms, {(one.exposed - waits) / 1e3:,.1f} wait"
    )
    print(f"A step of {microbatches} microbatches: {seconds:,.2f} s; the bubble is {bubble:.1%} of the microbatches")
    speed = tokens / seconds
    utilization = speed * flops(c) / (ranks * fspmd.topology().flops * 1e6)
    print(f"{speed:,.0f} tokens/s, MFU {utilization:.1%}; recorded in {took:.1f} s. Predicted, not measured.")


# ---------------------------------------------------------------- the program around it


def mesh_sizes(text: str) -> dict[str, int]:
    parts = [part.partition("=")[::2] for part in text.split(",")]
    given = dict(parts)
    if len(given) < len(parts):
        raise argparse.ArgumentTypeError(f"{text} names an axis twice; give each axis one size")
    if unknown := set(given) - set(AXES):
        raise argparse.ArgumentTypeError(f"no axis is named {', '.join(sorted(unknown))}; there are {', '.join(AXES)}")
    sizes = {axis: given.get(axis, "1") for axis in AXES}
    if wrong := [f"{axis}={size}" for axis, size in sizes.items() if not size.isdecimal() or not int(size)]:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)} is to be a size from 1 on, as in pp=2,fsdp=2")
    return {axis: int(size) for axis, size in sizes.items()}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    usage = "%(prog)s [--mesh AXIS=SIZE,...] [--plan] [options]; all options: %(prog)s --help"
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(usage=usage, description=__doc__, formatter_class=kind)
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
    parser.add_argument("--attention", choices=llama.ATTENTION, default="ring", help="over a sequence that cp cuts")
    parser.add_argument(
        "--layout", choices=LAYOUTS, help="of the sequence over cp (default: zigzag; for ulysses contiguous)"
    )
    parser.add_argument("--window", type=int, help="a token sees so many tokens up to itself (default: all)")
    parser.add_argument("--documents", type=int, metavar="LENGTH", help="a token sees its document, one of this length")
    parser.add_argument("--prefix", type=int, help="all tokens see the first so many, which have no loss")
    parser.add_argument("--sinks", action="store_true", help="learn an attention sink for each head")
    parser.add_argument("--kv-heads", type=int, default=Config.G)
    parser.add_argument("--vocabulary", type=int, default=Config.V)
    parser.add_argument("--experts", type=int, default=0, help="experts in each layer (default: one MLP)")
    parser.add_argument("--chosen", type=int, default=Config.chosen, help="experts of a token")
    parser.add_argument("--capacity", type=int, help="tokens for each rank and expert (default: none is dropped)")
    parser.add_argument("--balance", type=float, default=0.0, help="change the bias of experts by it in each step")
    parser.add_argument("--balance-loss", type=float, default=0.0, help="the factor of the loss of their balance")
    parser.add_argument("--optimizer", choices=["adamw", "adafactor", "muon"], default="adamw")
    parser.add_argument(
        "--zero1", action="store_true", help="cut the state of the optimizer over dp, not over fsdp alone"
    )
    parser.add_argument("--with-master", action="store_true", help="update a copy of the parameters in float32")
    parser.add_argument("--lr", type=float, default=6e-3, help="peak learning rate (default 6e-3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    dtypes = ["float32", "float64", "bfloat16", "float16"]
    parser.add_argument(
        "--compute", choices=dtypes, help="cast parameters to it where they are used (default: --dtype)"
    )
    parser.add_argument("--reduce", choices=dtypes, help="sum gradients over ranks in it (default: --dtype)")
    parser.add_argument("--loss-scale", type=float, help="multiply the loss by it, or less where gradients overflow")
    parser.add_argument("--sample", type=int, default=0, help="tokens to draw at the end, after bytes held out")
    parser.add_argument("--temperature", type=float, default=0.8, help="of --sample (default 0.8); 0 draws the best")
    parser.add_argument("--jit", action="store_true", help="record a step once, and replay it")
    parser.add_argument("--accelerator", type=float, help="TFLOP/s of a rank at most, for MFU (default: measured)")
    parser.add_argument("--checkpoint", metavar="DIR", help="save the state to this folder")
    parser.add_argument("--every", type=int, default=50, help="save every so many steps (default 50)")
    parser.add_argument("--resume", action="store_true", help="go on from the latest step in --checkpoint, if any")
    parser.add_argument("--text-log", metavar="FILE", help="append a line for each step")
    parser.add_argument("--losses", metavar="FILE", help="write all losses to this file as JSON")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture (default out)")
    args = parser.parse_args(argv)
    for name, given in vars(args).items():
        if type(given) in (int, float) and name != "seed":
            least = 0 if name in FROM_ZERO else math.ulp(0)
            if not least <= given < math.inf:
                words = "from 0 on" if name in FROM_ZERO else "above 0"
                parser.error(f"--{name.replace('_', '-')} {given} is to be {words}")
    mesh, batch = args.mesh, math.prod(args.mesh[axis] for axis in llama.BATCH)
    stages = len(stages_in_order(args.schedule, mesh["pp"]))
    cuts = [
        ("layers", args.layers, "the stages of --schedule on pp", stages),
        ("batch", args.batch, f"{args.microbatches} microbatches, dp, fsdp and ep", args.microbatches * batch),
        ("length", args.length, "cp", mesh["cp"]),
        ("kv-heads", args.kv_heads, "tp", mesh["tp"]),
        ("heads", args.heads, "kv-heads", args.kv_heads),
        (
            "heads",
            args.heads,
            "tp and, by ulysses, cp",
            mesh["tp"] * (mesh["cp"] if args.attention == "ulysses" else 1),
        ),
        ("hidden", args.hidden, "tp and fsdp", mesh["tp"]),
        ("vocabulary", args.vocabulary, "tp", mesh["tp"]),
        ("width", args.width, "fsdp, and heads of even width", math.lcm(mesh["fsdp"], 2 * args.heads)),
        ("experts", args.experts, "ep", mesh["ep"] if args.experts else 1),
    ]
    for name, size, over, parts in cuts:
        if parts < 1 or size % parts:
            parser.error(f"--{name} {size} is to be cut over {over}, into {parts} equal parts; give a multiple")
    if args.experts and args.chosen > args.experts:
        parser.error(f"--chosen {args.chosen} is to be at most --experts {args.experts}")
    if args.vocabulary < text_data.VOCAB and not args.plan:
        parser.error(f"--vocabulary {args.vocabulary} is to be {text_data.VOCAB} or more: the text is bytes")
    if args.jit and args.experts and args.capacity is None:
        parser.error("--jit records shapes, and those of experts depend on the choice; give --capacity")
    if args.prefix is not None and args.prefix > args.length // (2 if args.sample else 1):
        parser.error(
            f"--prefix {args.prefix} is to be at most --length {args.length}, and half of it with --sample: a prompt"
        )
    if (args.balance or args.balance_loss) and not args.experts:
        parser.error("--balance and --balance-loss are of experts; give --experts too")
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint, the folder that the state is saved to")
    return args


def config(args: argparse.Namespace) -> Config:
    sizes = {"D": args.width, "F": args.hidden, "H": args.heads, "G": args.kv_heads, "V": args.vocabulary}
    mixture = {"experts": args.experts, "chosen": args.chosen, "capacity": args.capacity}
    param, compute, reduce = (getattr(torch, name or args.dtype) for name in (args.dtype, args.compute, args.reduce))
    precision = Precision(param, compute, reduce) if args.compute or args.reduce else None
    mask: nn.Mask = Causal()
    if args.window is not None:
        mask &= SlidingWindow(args.window)
    if args.documents is not None:
        mask &= nn.Documents(torch.arange(args.length + args.sample) // args.documents)
    if args.prefix:
        mask |= nn.Prefix(args.prefix)
    attention = {"attention": args.attention, "mask": mask, "sinks": args.sinks}
    return Config(layers=args.layers, S=args.length, precision=precision, **sizes, **mixture, **attention)


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
    say(f"{mesh}: {parameters(c):,} parameters, {len(text):,} bytes to train on, {len(held_out):,} held out")
    data = text_data.random_batches(text, args.batch, c.S, args.seed)
    both, alone = losses_of(c, mesh, args, args.microbatches)
    losses, params, rows = train(c, mesh, args, both, data, say)
    validation = validate(c, mesh, args, alone, params, batches)
    say(f"validation loss {validation:.3f} nats per byte; a byte bigram model has {bigram:.3f}")
    if args.sample:
        for tokens in continued(c, mesh, args, in_rows(params, rows.argsort()), held_out):
            say(f"--- a sample ---\n{text_data.printable(tokens)}")
    if is_first(mesh):
        say(report.picture(args.out / "pretrain.png", losses, validation, bigram))
        if args.losses:
            Path(args.losses).write_text(json.dumps({"losses": losses, "validation": validation, "bigram": bigram}))
    return None


if __name__ == "__main__":
    main()
