"""The memory that a step takes on processes, by torch's profiler, beside what its program says."""

from functools import partial
from typing import Any

import optree
import torch
import torch.nn.functional as F
from full import FULL
from measured_peaks import bytes_of, peak, peak_and_result

from fspmd import P, checkpoint, device_put, jit, make_mesh, psum, shard_map, value_and_grad
from fspmd.nn import KVCache, accumulate, adamw, cached_attention, experts, gathered, grouped_matmul, route

HEADS = 4


def mlp(params: Any, x: Any) -> Any:
    for one in params:
        full = gathered(one, "s")
        x = torch.tanh(x @ full["up"]) @ full["down"]
    return x.square().sum(), len(x)


def transformer(params: Any, x: Any) -> Any:
    """Layers of attention and an MLP, each gathered within a checkpoint: backward gathers again."""
    for one in params:
        x = checkpoint(transformer_layer)(one, x)
    return x.square().sum(), x.shape[0] * x.shape[1]


def transformer_layer(params: Any, x: Any) -> Any:
    full = gathered(params, "s")
    y = F.rms_norm(x, x.shape[-1:], full["scale"])
    q, k, v = ((y @ full[name]).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in ("q", "k", "v"))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = x + y @ full["o"]
    return x + F.gelu(x @ full["up"]) @ full["down"]


def models(width: int, layers: int) -> dict[str, Any]:
    shapes = {"up": (width, 4 * width), "down": (4 * width, width)}
    more = {**dict.fromkeys("qkvo", (width, width)), "scale": (width,)}
    return {
        "mlp": (mlp, [dict(shapes) for _ in range(layers)], (256, width)),
        "transformer": (transformer, [{**shapes, **more} for _ in range(layers)], (8, 64, width)),
    }


def compare(name: str, way: str, passes: Any, donate: bool, microbatches: int) -> tuple[int, int, int]:
    """The peak that the program says, the least of three that were measured, and the bytes of the arguments."""
    torch.manual_seed(0)
    mesh = make_mesh((4,), ("s",), device="cpu")
    loss, shapes, rows = models(128, 3 if FULL else 2)[name]
    values = optree.tree_map(lambda shape: torch.randn(shape) / 16, shapes, is_leaf=lambda x: isinstance(x, tuple))
    params = device_put(values, P("s"), mesh=mesh)
    batches = [device_put(torch.randn(rows), P("s"), mesh=mesh) for _ in range(microbatches)]
    init, update = adamw(0.1)
    state = init(params)

    def step(params: Any, state: Any, batches: Any) -> Any:
        mean, grads = accumulate(loss, "s" if way == "waits" else ())(params, batches)
        return mean, update(grads, state, params)

    options: Any = {} if passes is None else {"passes": passes}
    lowered = jit(step, donate_argnums=(0, 1) if donate else (), **options).lower(params, state, batches)
    run, memory = lowered.compile(), lowered.memory()
    peaks = []
    for _ in range(4):
        given = bytes_of((params, state, batches))
        found, (_, new) = peak_and_result(run, params, state, batches)
        peaks.append(given + found)
        if donate:
            params, state = new
        del new
    return memory.peak, min(peaks[1:]), given  # the first has what libraries allocate once


def of_experts(tokens: int, width: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """As `compare`, of a layer of experts with a capacity and its gradients."""
    torch.manual_seed(0)
    mesh = make_mesh((4,), ("x",), device="cpu")
    shapes = (width, 8), (8, width, 2 * width), (8, 2 * width, width), (4 * tokens, width)
    types = P(), P("x"), P("x"), P("x")
    values = [(torch.randn(shape) / width**0.5).to(dtype) for shape in shapes]
    *params, x = (device_put(v, spec, mesh=mesh) for v, spec in zip(values, types, strict=True))

    def both(up: Any, down: Any, rows: Any, counts: Any) -> Any:
        return grouped_matmul(grouped_matmul(rows, up, counts).relu(), down, counts)

    def body(params: Any, x: Any) -> Any:
        router, up, down = params
        routing = route(x @ router, 2, axes="x")
        out, _ = experts(x, routing, partial(both, up, down), axis="x", capacity=tokens // 2)
        return psum(out.square().sum(), "x") + routing.balance_loss

    loss = shard_map(body, mesh=mesh, in_specs=([*types[:3]], types[3]), out_specs=P())
    return beside(value_and_grad(loss), params, x)


def of_decoding(slots: int, capacity: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """As `compare`, of a step of decoding with heads cut."""
    mesh, heads = make_mesh((4,), ("tp",), device="cpu"), P(None, "tp")
    cache = KVCache.zeros(1, slots, 4, capacity, 64, spec=heads, mesh=mesh, dtype=dtype)

    def body(q: Any, k: Any, cache: Any) -> Any:
        grown = cache.append(k, k)
        return cached_attention(q, grown), grown

    step = shard_map(body, mesh=mesh, in_specs=(heads, heads, cache.specs), out_specs=(heads, cache.specs))
    q, k = (device_put(torch.randn(slots, n, 1, 64, dtype=dtype), heads, mesh=mesh) for n in (16, 4))
    return beside(step, q, k, cache)


def beside(step: Any, *args: Any) -> tuple[int, int, int]:
    """The predicted peak, the measured peak, and the bytes of the arguments."""
    lowered = jit(step).lower(*args)
    given = bytes_of(args)
    return lowered.memory().peak, given + peak(lowered.compile(), *args), given
