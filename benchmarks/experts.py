"""A layer of experts, forward and backward, beside one by hand: ``python benchmarks/experts.py``.

Each of four processes with Gloo has so many tokens and two of eight experts, and each token has two experts. The layer
by hand is what one writes with c10d: it sorts tokens, exchanges counts, sends rows by ``all_to_all_single``, and sorts
what has arrived by expert. It adds up the gradients of the router, which all ranks have. Both use ``F.grouped_mm``.
With small layers the time is the overhead of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from ranks import HEADER, RANKS, on_processes, rows_of_steps
from timing import Table
from torch import Tensor
from torch.nn import functional as F

from fspmd import Mesh, P, device_put, jit, psum, shard_map, value_and_grad
from fspmd.nn import experts, grouped_matmul, route

EXPERTS, CHOSEN = 8, 2
SIZES: Final = {"64 tokens, width 32": (64, 32, 20), "512 tokens, width 256": (512, 256, 5)}  # with so many samples
TYPES = (P(), P("x"), P("x"), P("x"))  # of the router, both weights of experts, and tokens
Step = Callable[[], tuple[Any, Any]]  # the loss, and the gradients of the router and the experts


def ours(mesh: Mesh, values: list[Tensor], record: bool, **limits: int) -> Step:
    """A step of fspmd."""

    def body(params: list[Tensor], x: Tensor) -> Tensor:
        router, up, down = params
        routing = route(x @ router, CHOSEN, axes="x")
        out, _ = experts(x, routing, partial(_both, up, down), axis="x", **limits)
        return psum(out.square().sum(), "x") + routing.balance_loss

    loss = shard_map(body, mesh=mesh, in_specs=([*TYPES[:3]], TYPES[3]), out_specs=P())
    step = jit(value_and_grad(loss)) if record else value_and_grad(loss)
    *params, x = (device_put(v, spec, mesh=mesh) for v, spec in zip(values, TYPES, strict=True))
    return lambda: step(params, x)


def _both(up: Tensor, down: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    return grouped_matmul(grouped_matmul(rows, up, counts).relu(), down, counts)


class _Exchange(torch.autograd.Function):
    """``all_to_all_single`` of rows, and in backward the exchange the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sends: list[int], gets: list[int]) -> Tensor:
        ctx.sizes = gets, sends
        return _exchanged(x, sends, gets)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _exchanged(g.contiguous(), *ctx.sizes), None, None


def _exchanged(x: Tensor, sends: list[int], gets: list[int]) -> Tensor:
    out = x.new_empty(sum(gets), *x.shape[1:])
    dist.all_to_all_single(out, x, gets, sends)
    return out


def by_hand(values: list[Tensor]) -> Step:
    """A step with c10d."""
    rank, here = dist.get_rank(), EXPERTS // RANKS
    own = [values[0], *(v.chunk(RANKS)[rank].clone() for v in values[1:])]
    router, up, down = (v.clone().requires_grad_() for v in own[:3])
    x = own[3]

    def step() -> tuple[Tensor, list[Tensor]]:
        logits = x @ router
        shares = logits.softmax(1)
        weights, chosen = shares.topk(CHOSEN, 1)
        weights = weights / weights.sum(1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts)
        table = coming.view(RANKS, here)
        sends, gets = counts.view(RANKS, here).sum(1).tolist(), table.sum(1).tolist()
        rows = _Exchange.apply(x[order // CHOSEN], sends, gets)
        expert = torch.arange(here).repeat(RANKS).repeat_interleave(coming)
        by_expert = expert.argsort(stable=True)
        ends = table.sum(0).cumsum(0).to(torch.int32)
        y = F.grouped_mm(F.grouped_mm(rows[by_expert], up, offs=ends).relu(), down, offs=ends)
        back = _Exchange.apply(y[by_expert.argsort()], gets, sends)
        out = (back[order.argsort()].view(*chosen.shape, -1) * weights[..., None]).sum(1)
        figures = torch.stack([counts.float(), shares.detach().sum(0)])
        dist.all_reduce(figures)
        tokens = RANKS * len(x)
        part = figures[0] * EXPERTS / (tokens * CHOSEN) / tokens  # the balance loss by the sum of shares
        loss = out.square().sum()
        grads = list(torch.autograd.grad(loss + (part * shares.sum(0)).sum(), (router, up, down)))
        dist.all_reduce(grads[0])
        value = loss.detach()
        dist.all_reduce(value)
        return value + (part * figures[1]).sum(), grads

    return step


def wrong(step: Step, values: list[Tensor]) -> float:
    """The largest error of a gradient, beside float64 on one device, as a part of the gradient's largest number."""
    router, up, down, x = (v.double() for v in values)
    leaves = [v.requires_grad_() for v in (router, up, down)]
    shares = (x @ router).softmax(1)
    weights, chosen = shares.topk(CHOSEN, 1)
    weights = weights / weights.sum(1, keepdim=True)
    of_all = torch.stack([(x @ a).relu() @ b for a, b in zip(up, down, strict=True)], 1)
    out = (of_all.gather(1, chosen[..., None].expand(-1, -1, x.shape[1])) * weights[..., None]).sum(1)
    share = chosen.flatten().bincount(minlength=EXPERTS) / chosen.numel()
    loss = out.square().sum() + EXPERTS * (share * shares.mean(0)).sum()
    right = list(torch.autograd.grad(loss, leaves))
    right = [right[0], *(g.chunk(RANKS)[dist.get_rank()] for g in right[1:])]
    got = [getattr(g, "local", g) for g in step()[1]]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, right, strict=True))


def measured(mesh: Mesh) -> Table:
    """The rows, as text in the notes of a table."""
    lines = [*HEADER]
    for label, (tokens, width, repeats) in SIZES.items():
        torch.manual_seed(0)
        shapes = (width, EXPERTS), (EXPERTS, width, 2 * width), (EXPERTS, 2 * width, width), (RANKS * tokens, width)
        values = [torch.randn(shape) / shape[-2] ** 0.5 for shape in shapes[:3]] + [torch.randn(shapes[3])]
        rows, capacity = 2 * tokens * CHOSEN, 2 * tokens * CHOSEN // EXPERTS
        steps = {
            "fspmd, jit": ours(mesh, values, True, rows=rows),
            "fspmd": ours(mesh, values, False),
            "by hand": by_hand(values),
            "fspmd with a capacity, jit": ours(mesh, values, True, capacity=capacity),
        }
        for name, step in steps.items():
            if "capacity" not in name and (error := wrong(step, values)) > 1e-5:
                raise AssertionError(f"{name} is off by {error:.1e}")
        lines += rows_of_steps(label, steps, repeats)
    return Table(f"A layer of experts on {RANKS} processes with Gloo", [], "\n".join(lines))


if __name__ == "__main__":
    print(on_processes(measured).notes)
