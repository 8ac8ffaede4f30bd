"""Steps of training on cut parameters, beside the same steps on one device in float64: what `test_state` runs."""

import itertools
import random
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from fspmd import P, checkpoint, device_get, device_put, jit, make_mesh, pcast, shard_map
from fspmd.nn import accumulate, gathered
from fspmd.sharded import is_sharded

F64 = torch.float64
#: how the two matrices and the bias lie over the axis "s" (and "r"), by name
LAYOUTS: dict[str, tuple[P, P, P]] = {
    "replicated": (P(), P(), P()),
    "rows": (P("s"), P("s"), P("s")),
    "columns": (P(None, "s"), P(None, "s"), P()),
    "mixed": (P("s"), P(), P("s")),
}
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    **{str(n): ((n,), ("s",)) for n in (1, 2, 3, 4, 6)},
    "2x2": ((2, 2), ("r", "s")),
    "2x3": ((2, 3), ("r", "s")),
}
WIDTHS = {"even": (12, 24), "uneven": (5, 7), "empty": (5, 2)}
#: over which axes gradients wait for the last microbatch, and over which the loss gathers parameters itself
WAYS = ("waits", "gathers", "hybrid")
Case = tuple[str, str, str, str, str]  # mesh, layout, widths, way, view


def cases() -> list[Case]:
    """All cases that differ."""
    every = itertools.product(MESHES, LAYOUTS, WIDTHS, WAYS, ("global", "body"))
    return [case for case in every if case[3] != "hybrid" or "x" in case[0]]


def dense_loss(params: dict[str, Tensor], tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of losses of rows, each with its weight, and the sum of weights."""
    out = F.gelu(tokens @ params["w1"] + params["b"]) @ params["w2"]
    return (out.square().sum(-1) * weights).sum(), weights.sum()


def operands(draw: random.Random, widths: tuple[int, int], ranks: int) -> tuple[dict[str, Tensor], list[Any]]:
    """Parameters, and microbatches of several lengths."""
    d, h = widths
    params = {"w1": torch.randn(d, h, dtype=F64), "w2": torch.randn(h, d, dtype=F64), "b": torch.randn(h, dtype=F64)}
    even = (d, h) == WIDTHS["even"]  # otherwise a batch is cut unevenly as well, or some rank has none of it
    lengths = [ranks * draw.choice([1, 2, 3]) if even else draw.choice([1, ranks + 1, 2 * ranks + 1, 12])]
    lengths += [ranks * draw.choice([1, 2, 3]) for _ in range(draw.choice([0, 1, 3]))]
    return params, [(torch.randn(n, d, dtype=F64), torch.randint(1, 4, (n,)).to(F64)) for n in lengths]


def dense_step(params: dict[str, Tensor], batches: list[Any]) -> list[Tensor]:
    """The mean loss and its gradients, on one device and at once."""
    leaves = {name: x.clone().requires_grad_() for name, x in params.items()}
    total, count = dense_loss(leaves, *(torch.cat(column) for column in zip(*batches, strict=True)))
    mean = total / count
    return [mean.detach(), *torch.autograd.grad(mean, [leaves[name] for name in sorted(leaves)])]


def step_of(case: Case, transport: str, device: str = "cpu") -> tuple[Any, Any, Any, Any, list[Any]]:
    """A step, its cut parameters and microbatches, and the same of one device."""
    mesh_name, layout, widths, way, view = case
    draw = random.Random(str(case))
    torch.manual_seed(draw.randrange(1 << 30))
    sizes, names = MESHES[mesh_name]
    mesh = make_mesh(sizes, names, transport=transport, device=device)
    values, batches = operands(draw, WIDTHS[widths], mesh.size)
    specs: Any = dict(zip(("w1", "w2", "b"), LAYOUTS[layout], strict=True))
    waits: Any = {"waits": names, "gathers": (), "hybrid": ("r",)}[way]
    gathers: Any = {"waits": (), "gathers": names, "hybrid": ("s",)}[way]
    there, sent = optree.tree_map(lambda x: x.to(device), (values, batches))
    params, rows = device_put(there, specs, mesh=mesh), P(names)
    known = optree.tree_map(lambda x: x.spec, params, is_leaf=is_sharded)
    inside: Any = known if view == "body" else None
    body = view == "body"
    #: within the loss of a body, leaves that wait over "r" are reduced over it, which a spec of "s" need not say
    step = accumulate(
        lambda p, batch: loss(p, *batch),
        waits,
        inside,
    )

    def loss(p: Any, tokens: Any, weights: Any) -> tuple[Any, Any]:
        def use(p: Any) -> Any:
            out = dense_loss(gathered(p, gathers, inside) if gathers else p, tokens, weights)
            return pcast(out, names, to="unreduced") if body else out

        return checkpoint(use)(p) if draw.random() < 0.5 else use(p)

    cut = [device_put(batch, rows, mesh=mesh) for batch in sent]
    if body:
        step = shard_map(step, mesh=mesh, in_specs=(specs, rows), out_specs=(P(), specs))
    return step, params, cut, values, batches


def compute(
    case: Case, transport: str = "simulation", jitted: bool = False, device: str = "cpu"
) -> list[tuple[Tensor, Tensor]]:
    """What a step gives, and what one device gives: the mean loss, and the gradients by name."""
    step, params, cut, values, batches = step_of(case, transport, device)
    step = jit(step) if jitted else step
    if jitted:
        step(params, cut)  # the next call replays the record
    mean, grads = step(params, cut)
    for name, x in params.items():
        assert grads[name].spec is x.spec, (name, grads[name].spec, x.spec)
    found = [device_get(x).cpu() for x in (mean, *(grads[name] for name in sorted(grads)))]
    return list(zip(found, dense_step(values, batches), strict=True))


def worst(cases: list[Case], jitted: bool) -> list[tuple[Case, float]]:
    """The largest error of each case on the processes of this world."""
    return [
        (case, max(float((x - y).abs().max()) for x, y in compute(case, "process_group", jitted))) for case in cases
    ]
