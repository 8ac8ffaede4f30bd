"""The memory that a step takes on processes, by torch's profiler, beside what its program says."""

from itertools import accumulate as running_sums
from typing import Any

import optree
import torch
import torch.nn.functional as F
from full import FULL

from fspmd import P, checkpoint, device_put, jit, make_mesh
from fspmd.nn import accumulate, adamw, gathered
from fspmd.sharded import is_sharded

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
        tree = optree.tree_leaves((params, state, batches), is_leaf=is_sharded)
        leaves = [x.local if is_sharded(x) else x for x in tree]
        given = sum(x.untyped_storage().nbytes() for x in leaves if isinstance(x, torch.Tensor))
        del tree, leaves
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            mean, new = run(params, state, batches)
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        events.sort(key=lambda e: e.start_ns())
        peaks.append(given + max(running_sums((e.nbytes() for e in events), initial=0)))
        if donate:
            params, state = new
        del mean, new
    return memory.peak, min(peaks[1:]), given  # the first has what libraries allocate once
