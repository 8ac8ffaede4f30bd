"""Times and memory on a mesh of one device, beside plain torch: ``python benchmarks/one_gpu.py PART [DEVICE]``.

Prints the rows of a table, one JSON list a line. `gpu.py` runs each part in a process of its own.
"""

from __future__ import annotations

import functools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as processes
import torch.nn.functional as F
from torch import Tensor

import fspmd
from fspmd import P, jit, make_mesh
from fspmd.nn import attend_block, grouped_matmul
from fspmd.nn.attention import OneBlock
from fspmd.nn.attention import attention as attend

Weights = dict[str, Any]

# --- a decoder ------------------------------------------------------------------------------------------------------

#: width, layers, heads, vocabulary, batch, sequence
SIZES = {
    "layer": (2048, 1, 16, 0, 8, 1024),
    "1B": (2048, 18, 16, 32000, 8, 1024),
    "small": (32, 2, 2, 64, 2, 8),
}


def weights_of(size: str, device: str, dtype: torch.dtype) -> Weights:
    width, layers, _, vocabulary, _, _ = SIZES[size]
    shapes: dict[str, tuple[int, ...]] = {"table": (vocabulary, width)} if vocabulary else {}
    for i in range(layers):
        shapes |= {f"{i}.norm1": (width,), f"{i}.norm2": (width,), f"{i}.qkv": (3 * width, width)}
        shapes |= {f"{i}.out": (width, width), f"{i}.up": (4 * width, width), f"{i}.down": (width, 4 * width)}
    return {name: torch.randn(shape, device=device, dtype=dtype).mul_(0.02) for name, shape in shapes.items()}


def batch_of(size: str, device: str, dtype: torch.dtype) -> Tensor:
    width, _, _, vocabulary, batch, sequence = SIZES[size]
    if vocabulary:
        return torch.randint(0, vocabulary, (batch, sequence), device=device)
    return torch.randn(batch, sequence, width, device=device, dtype=dtype)


def loss_of(size: str) -> Callable[[Weights, Any], Any]:
    """The mean loss of a decoder, or the mean square of one layer of it."""
    width, layers, heads, vocabulary, _, _ = SIZES[size]

    def block(x: Any, w: Weights, i: int) -> Any:
        y = F.linear(F.layer_norm(x, (width,), w[f"{i}.norm1"]), w[f"{i}.qkv"]).unflatten(-1, (3, heads, -1))
        q, k, v = (one.transpose(1, 2) for one in y.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.linear(attended, w[f"{i}.out"])
        y = F.gelu(F.linear(F.layer_norm(x, (width,), w[f"{i}.norm2"]), w[f"{i}.up"]))
        return x + F.linear(y, w[f"{i}.down"])

    def loss(w: Weights, batch: Any) -> Any:
        x = F.embedding(batch, w["table"]) if vocabulary else batch
        for i in range(layers):
            x = block(x, w, i)
        if not vocabulary:
            return x.float().square().mean()
        logits = F.linear(x, w["table"]).flatten(0, 1)
        return F.cross_entropy(logits, batch.flatten())

    return loss


# --- clocks ---------------------------------------------------------------------------------------------------------


def synchronise(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


class Taken(NamedTuple):
    """Seconds of a call: on average of calls in a row, and until a call returns, on an idle device."""

    call: float
    host: float


def side_by_side(
    candidates: dict[str, Callable[[], object]], device: str, seconds: float, in_a_row: int = 1
) -> dict[str, Taken]:
    """The medians of each. The device is waited for after ``in_a_row`` calls, as a training loop does.

    Candidates take turns in random order: the clock of a hot device depends on what ran before, so that in a fixed
    order equal kernels differ by 3 %.
    """
    order = random.Random(0)
    samples: dict[str, list[Taken]] = {name: [] for name in candidates}
    for run in candidates.values():
        for _ in range(3):
            run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples[next(iter(samples))]) < 5:
        for name in order.sample(list(candidates), len(candidates)):
            run = candidates[name]
            synchronise(device)
            start = time.perf_counter()
            run()
            host = time.perf_counter() - start
            for _ in range(in_a_row - 1):
                run()
            synchronise(device)
            samples[name].append(Taken((time.perf_counter() - start) / in_a_row, host))
    return {name: Taken(*map(statistics.median, zip(*found, strict=True))) for name, found in samples.items()}


def row(*cells: object) -> None:
    print(json.dumps([str(cell) for cell in cells]), flush=True)


def _world(device: str) -> fspmd.Mesh:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", RANK="0", WORLD_SIZE="1")
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    return make_mesh((1,), ("x",), transport="process_group", device=device)


# --- parts ----------------------------------------------------------------------------------------------------------


def step(size: str, device: str, seconds: float) -> None:
    """A training step: loss, gradients, update, beside the same of plain torch and of DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    mesh, loss = _world(device), loss_of(size)
    plain, batch = weights_of(size, device, dtype), batch_of(size, device, dtype)
    ours = {name: fspmd.from_local(x.clone(), P(), mesh=mesh) for name, x in plain.items()}
    mine = fspmd.from_local(batch, P("x"), mesh=mesh)

    theirs = init_device_mesh(device, (1,), mesh_dim_names=("x",))
    distributed = {name: distribute_tensor(x.clone(), theirs, [Replicate()]) for name, x in plain.items()}

    def torchs(loss: Any, weights: Weights = plain, batch: Tensor = batch) -> Callable[[], None]:
        leaves = [x.requires_grad_() for x in weights.values()]

        def run() -> None:
            found = torch.autograd.grad(loss(weights, batch), leaves)
            with torch.no_grad():
                torch._foreach_sub_(leaves, found, alpha=1e-4)

        return run

    gradient = fspmd.value_and_grad(loss)

    def updated(weights: Weights, batch: Any) -> Any:
        value, found = gradient(weights, batch)
        with torch.no_grad():
            torch._foreach_sub_(list(weights.values()), list(found.values()), alpha=1e-4)
        return value

    beside: dict[str, dict[str, Callable[[], object]]] = {
        "torch": {
            "torch": torchs(loss),
            "fspmd": lambda: updated(ours, mine),
            "DTensor": torchs(loss, distributed, distribute_tensor(batch, theirs, [Shard(0)])),
            "fspmd, replay": functools.partial(jit(updated), ours, mine),
        }
    }
    if device != "cpu":
        beside["torch"]["fspmd, CUDA graphs"] = functools.partial(jit(updated, backend="cudagraphs"), ours, mine)
        inductor = functools.partial(jit(updated, backend="inductor"), ours, mine)
        beside["torch.compile"] = {"torch.compile": torchs(torch.compile(loss)), "fspmd, inductor": inductor}
    for peer, candidates in beside.items():
        compare(peer, candidates, device, seconds / len(beside), in_a_row=20 if size == "layer" else 5)


def compare(peer: str, candidates: dict[str, Callable[[], object]], device: str, seconds: float, in_a_row: int) -> None:
    """Print rows of the times, and of their ratios to that of a peer. One that fails hides no other."""
    kept = {}
    for name, run in candidates.items():
        try:
            run()
            kept[name] = run
        except Exception as error:
            row(name, "fails", f"{type(error).__name__}: {str(error).splitlines()[0][:150]}")
    times = side_by_side(kept, device, seconds, in_a_row)
    for name, taken in times.items():
        ratio = f"{taken.call / times[peer].call:.3f} of {peer}" if peer in times else ""
        row(name, f"{taken.call * 1e3:.3f} ms", ratio, f"{taken.host * 1e3:.3f} ms")


def host(size: str, device: str, seconds: float) -> None:
    """What the host takes per op, beside DTensor: many ops of small blocks, no wait for the device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = _world(device)
    theirs = init_device_mesh(device, (1,), mesh_dim_names=("x",))
    x, w = torch.randn(16, 16, device=device), torch.randn(16, 16, device=device)
    operands = {
        "plain": (x, w),
        "fspmd": tuple(fspmd.from_local(one, p, mesh=mesh) for one, p in ((x, P("x")), (w, P()))),
        "DTensor": tuple(distribute_tensor(one, theirs, [p]) for one, p in ((x, Shard(0)), (w, Replicate()))),
    }
    calls: dict[str, Callable[[Any, Any], Any]] = {
        "x * 0.5": lambda x, w: x * 0.5,
        "x @ w": lambda x, w: x @ w,
        "layer_norm(x)": lambda x, w: F.layer_norm(x, (16,)),
        "linear, forward and backward": lambda x, w: F.linear(x, w).sum().backward(),
    }
    for what, call in calls.items():
        if "backward" in what:
            for _, w in operands.values():
                w.requires_grad_()
        times = {}
        for _ in range(5):
            for name, (a, b) in operands.items():
                for _ in range(20):
                    call(a, b)
                synchronise(device)
                start = time.perf_counter()
                for _ in range(200):
                    call(a, b)
                taken = (time.perf_counter() - start) / 200
                times[name] = min(taken, times.get(name, taken))
                synchronise(device)
        row(what, *(f"{times[name] * 1e6:.1f} µs" for name in ("plain", "fspmd", "DTensor")))


def memory(size: str, device: str, seconds: float) -> None:
    """The peak of a step's loss and gradients, beside what `lower` predicts."""
    dtype = torch.bfloat16
    mesh, loss = _world(device), loss_of(size)
    weights = {k: fspmd.from_local(x, P(), mesh=mesh) for k, x in weights_of(size, device, dtype).items()}
    batch = fspmd.from_local(batch_of(size, device, dtype), P("x"), mesh=mesh)
    run = jit(fspmd.value_and_grad(loss))
    predicted = run.lower(weights, batch).memory().peak
    run(weights, batch)
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run(weights, batch)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        row(size, f"{predicted / 2**30:.3f} GiB", f"{peak / 2**30:.3f} GiB", f"{peak / predicted:.3f}")
    else:
        row(size, f"{predicted / 2**30:.6f} GiB", "not measured on a CPU", "")


def draws(size: str, device: str, seconds: float) -> None:
    """Random numbers beside torch's own, a million of them."""
    n, mesh = 1_000_000, _world(device)
    on: dict[str, Any] = {"mesh": mesh, "spec": P("x")}
    ones, sharded = torch.ones(n, device=device), fspmd.ones(n, **on)
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "rand": (lambda: torch.rand(n, device=device), lambda: fspmd.rand(n, **on)),
        "randn": (lambda: torch.randn(n, device=device), lambda: fspmd.randn(n, **on)),
        "randint": (lambda: torch.randint(0, 1000, (n,), device=device), lambda: fspmd.randint(0, 1000, (n,), **on)),
        "bernoulli": (lambda: torch.bernoulli(ones * 0.3), lambda: torch.bernoulli(sharded * 0.3)),
        "dropout": (lambda: F.dropout(ones, 0.1), lambda: F.dropout(sharded, 0.1)),
    }
    for name, (plain, ours) in pairs.items():
        times = side_by_side({"torch": plain, "fspmd": ours}, device, seconds / len(pairs))
        torchs, mine = times["torch"].call, times["fspmd"].call
        row(name, f"{torchs * 1e3:.3f} ms", f"{mine * 1e3:.3f} ms", f"{mine / torchs:.2f}")


def attention(size: str, device: str, seconds: float) -> None:
    """One block of queries and keys, with gradients, beside torch's kernel: alone, and as a part for `merge`."""
    alone = OneBlock(None, alone=True)
    shapes = [(1, 16, 4096, 128), (4, 16, 1024, 64)] if device != "cpu" else [(1, 2, 128, 64)]
    for shape in shapes:
        for dtype in (torch.bfloat16, torch.float32):
            leaves = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
            cotangent = torch.randn(shape, device=device, dtype=dtype)

            def step(f: Callable[..., Tensor], leaves: Any = leaves, cotangent: Any = cotangent) -> object:
                return torch.autograd.grad(f(*leaves), leaves, cotangent)

            candidates: dict[str, Callable[[], object]] = {
                "torch": lambda step=step: step(F.scaled_dot_product_attention),
                "alone": lambda step=step, dtype=dtype: step(lambda *x: attend(alone, *x).out.to(dtype)),
                "part": lambda step=step, dtype=dtype: step(lambda *x: attend_block(*x).out.to(dtype)),
            }
            times = {name: t.call for name, t in side_by_side(candidates, device, seconds / 4).items()}
            torchs = times.pop("torch")
            what = f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
            row(what, f"{torchs * 1e3:.3f} ms", *(f"{t * 1e3:.3f} ms ({t / torchs:.2f})" for t in times.values()))


def decoding(size: str, device: str, seconds: float) -> None:
    """A step of decoding of `decoding.py`, whose sizes are small: the time is that of the host."""
    import decoding as program

    torch.set_default_device(device)
    _world(device)
    mesh = make_mesh((1, 1), ("dp", "tp"), transport="process_group", device=device)
    w = fspmd.device_put(program.weights(), program.SPECS, mesh=mesh)
    candidates = {"by hand": program.by_hand(w, mesh), "fspmd, replay": program.ours(w, mesh, True)}
    if device != "cpu":
        candidates["fspmd, CUDA graphs"] = program.ours(w, mesh, True, backend="cudagraphs")
    candidates["fspmd, without jit"] = program.ours(w, mesh, False)
    with torch.no_grad():
        compare("by hand", candidates, device, seconds, in_a_row=20)


def groups(size: str, device: str, seconds: float) -> None:
    """Products of groups of rows, with gradients, beside torch's function, which leaves unused rows as they were."""
    rows, width, hidden, count = (8192, 2048, 4096, 16) if device != "cpu" else (64, 16, 32, 4)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
        w = torch.randn(count, width, hidden, device=device, dtype=dtype, requires_grad=True)
        counts = torch.full((count,), rows // count, device=device)
        ends, cotangent = counts.cumsum(0).to(torch.int32), torch.randn(rows, hidden, device=device, dtype=dtype)

        def step(product: Callable[..., Tensor], x: Tensor = x, w: Tensor = w, cotangent: Tensor = cotangent) -> object:
            return torch.autograd.grad(product(x, w), (x, w), cotangent)

        candidates: dict[str, Callable[[], object]] = {
            "torch": lambda step=step, ends=ends: step(functools.partial(F.grouped_mm, offs=ends)),
            "fspmd": lambda step=step, counts=counts: step(functools.partial(grouped_matmul, counts=counts)),
        }
        times = side_by_side(candidates, device, seconds / 2)
        torchs, mine = times["torch"].call, times["fspmd"].call
        what = f"{rows} rows, {count} of {width}x{hidden}, {str(dtype).removeprefix('torch.')}"
        row(what, f"{torchs * 1e3:.3f} ms", f"{mine * 1e3:.3f} ms", f"{mine / torchs:.2f}")


def checkpoints(size: str, device: str, seconds: float) -> None:
    """A checkpoint in a folder for temporary files, beside torch.save; and until training may go on."""
    count, shape = (16, (4096, 4096)) if device != "cpu" else (4, (64, 64))
    mesh = _world(device)
    tree = {f"w{i}": fspmd.randn(*shape, spec=P("x"), mesh=mesh, dtype=torch.bfloat16) for i in range(count)}
    plain = {name: x.local for name, x in tree.items()}
    size_of_all = sum(x.numel() * x.element_size() for x in plain.values())

    with tempfile.TemporaryDirectory() as folder:
        steps = iter(range(10**6))

        def save_plain() -> None:
            with open(f"{folder}/plain", "wb") as file:
                torch.save(plain, file)
                os.fsync(file.fileno())

        def save_at_once() -> None:
            waiting.append(fspmd.save(f"{folder}/ours", tree, step=next(steps), asynchronous=True))

        waiting: list[Any] = []
        calls: dict[str, Callable[[], object]] = {
            "torch.save": save_plain,
            "fspmd.save": lambda: fspmd.save(f"{folder}/ours", tree, step=next(steps)),
            "fspmd.save, asynchronous": save_at_once,
            "torch.load": lambda: torch.load(f"{folder}/plain", map_location=device),
            "fspmd.load": lambda: fspmd.load(f"{folder}/ours", tree),
        }
        for name, call in calls.items():
            samples = []
            for _ in range(3):
                synchronise(device)
                start = time.perf_counter()
                call()
                synchronise(device)
                samples.append(time.perf_counter() - start)
                for handle in waiting:
                    handle.wait()
                waiting.clear()
            taken = statistics.median(samples)
            row(name, f"{taken * 1e3:.1f} ms", f"{size_of_all / taken / 1e9:.2f} GB/s")


def overlap(size: str, device: str, seconds: float) -> None:
    """Layers whose weights are gathered, on two processes that share the device. Gloo moves them through the host."""
    processes.spawn(_overlapping, (device, seconds), 2)


def _overlapping(rank: int, device: str, seconds: float) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29534", RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")  # both on one device
    torch.distributed.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:gloo")
    width, layers, rows, dtype = (2048, 4, 65536, torch.bfloat16) if device != "cpu" else (64, 2, 64, torch.float32)
    mesh = make_mesh((2,), ("x",), transport="process_group", device=device)
    torch.manual_seed(0)
    w = [fspmd.device_put(torch.randn(width, width, device=device, dtype=dtype) / width**0.5, P("x"), mesh=mesh)]
    w, x = w * layers, torch.randn(rows, width, device=device, dtype=dtype)
    wholes = [fspmd.device_get(one) for one in w]

    def moved(w: list[Tensor], x: Tensor) -> Tensor:
        return torch.stack(
            [fspmd.all_gather(one + i, "x", axis=0, tiled=True, to="invarying")[0, 0] for i, one in enumerate(w)]
        )

    def trained(w: list[Tensor], x: Tensor) -> Tensor:
        for i, one in enumerate(w):
            x = torch.tanh(torch.tanh(x @ fspmd.all_gather(one + i, "x", axis=0, tiled=True, to="invarying")))
        return x

    def computed(w: list[Tensor], x: Tensor) -> Tensor:
        for i, one in enumerate(w):
            x = torch.tanh(torch.tanh(x @ (one + i)))
        return x

    def made(f: Any, given: Any, spec: Any, *passes: str) -> Callable[[], object]:
        call = jit(fspmd.shard_map(f, mesh=mesh, in_specs=(spec, P()), out_specs=P()), passes=passes)
        return functools.partial(call, given, x)

    candidates: dict[str, Callable[[], object]] = {
        "computation alone": made(computed, wholes, P()),
        "communication alone": made(moved, w, P("x")),
        "one after the other": made(trained, w, P("x")),
        "with the overlap pass": made(trained, w, P("x"), "overlap"),
    }
    taken = dict.fromkeys(candidates, float("inf"))
    with torch.no_grad():
        for turn in range(8):
            for name, run in candidates.items():
                torch.distributed.barrier()
                start = time.perf_counter()
                run()
                synchronise(device)
                taken[name] = min(taken[name], time.perf_counter() - start) if turn else taken[name]
    if rank == 0:
        alone, moving, serial, hidden = taken.values()
        for name, one in taken.items():
            row(name, f"{one * 1e3:.1f} ms", f"{one / serial:.2f} of one after the other")
        row("hidden", f"{(serial - hidden) * 1e3:.1f} ms", f"{(serial - hidden) / min(alone, moving):.2f} of the most")
    torch.distributed.destroy_process_group()


PARTS: dict[str, tuple[Callable[[str, str, float], None], str]] = {
    "host": (host, ""),
    "draws": (draws, ""),
    "attention": (attention, ""),
    "groups": (groups, ""),
    "decoding": (decoding, ""),
    "checkpoints": (checkpoints, ""),
    "overlap": (overlap, ""),
    "memory": (memory, "1B"),
    "layer": (step, "layer"),
    "1B": (step, "1B"),
}

if __name__ == "__main__":
    part, device = sys.argv[1], (sys.argv[2] if len(sys.argv) > 2 else "cuda")
    function, size = PARTS[part]
    function("small" if device == "cpu" and size else size, device, 1.0 if device == "cpu" else 20.0 if size else 5.0)
