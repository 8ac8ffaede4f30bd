"""Attention over a cut sequence on four Gloo processes: forward and backward, beside a ring by hand.

    python benchmarks/context.py

The ring by hand has consecutive positions, and leaves out what a mask hides.

`torch.distributed.tensor.experimental.context_parallel` has rings of three kernels, all of GPUs. On a CPU it leaves the
kernel to DTensor, which takes it apart, and plans for long (torch 2.13). So it does not stand here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from ranks import HEADER, RANKS, on_processes, rows_of_steps
from timing import Table
from torch import Tensor
from torch.nn import functional as F

import fspmd
from fspmd import P, device_put, jit, shard_map, vjp
from fspmd.nn import Causal, Full, gathered_attention, ring_attention, ulysses_attention, zigzag

aten: Final[Any] = torch.ops.aten
WIDTH: Final = 64
HEADS: Final = 8
KINDS: Final = {"short": (64, 8), "long": (1024, 3)}  # the length of the whole sequence, and samples
Step = Callable[[], tuple[Tensor, ...]]  # the result and the gradients of q, k and v, each this rank's block


def measured(mesh: fspmd.Mesh) -> Table:
    """The rows, as text in the notes of a table."""
    lines = [*HEADER]
    for length, repeats in KINDS.values():
        for causal in (False, True):
            torch.manual_seed(0)
            whole = list(torch.randn(4, 1, HEADS, length, WIDTH))
            made = {name: make(mesh, whole, causal) for name, make in WAYS.items()}
            if length == KINDS["short"][0]:
                for name, (order, step) in made.items():
                    _check(name, order.view(RANKS, -1)[dist.get_rank()], step, _dense(length, causal))
            title = f"{length} positions, {'causal' if causal else 'all see all'}"
            lines += rows_of_steps(title, {name: step for name, (_, step) in made.items()}, repeats)
    return Table(f"Attention on {RANKS} processes with Gloo", [], "\n".join(lines))


def _check(name: str, places: Tensor, step: Step, right: list[Tensor]) -> None:
    error = max(float((x - y[:, :, places]).abs().max()) for x, y in zip(step(), right, strict=True))
    if error > 1e-5:
        raise AssertionError(f"{name} is off by {error:.1e}")


@functools.cache
def _dense(length: int, causal: bool) -> list[Tensor]:
    torch.manual_seed(0)
    *operands, cotangent = torch.randn(4, 1, HEADS, length, WIDTH).double()
    leaves = [x.requires_grad_() for x in operands]
    out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


# --- ours -----------------------------------------------------------------------------------------------------------


def _ours(way: Callable[..., Tensor], record: bool, mesh: fspmd.Mesh, whole: list[Tensor], causal: bool) -> Any:
    length, rows = whole[0].shape[2], P(None, None, "x")
    layout = zigzag(length, 1 if way is ulysses_attention else RANKS)
    options = {"mask": Causal() if causal else Full(), "layout": layout}
    attend = shard_map(lambda *x: way(*x, "x", **options), mesh=mesh, in_specs=rows, out_specs=rows)
    *operands, cotangent = (device_put(layout.store(x, 2), rows, mesh=mesh) for x in whole)

    def gradients(q: Tensor, k: Tensor, v: Tensor, cotangent: Tensor) -> tuple[Tensor, ...]:
        out, backward = vjp(attend, q, k, v)
        return (out, *backward(cotangent))

    run = jit(gradients) if record else gradients

    def step() -> tuple[Tensor, ...]:
        return tuple(x.local for x in run(*operands, cotangent))

    return layout.order, step


# --- a ring by hand -------------------------------------------------------------------------------------------------


class _Ring(torch.autograd.Function):
    """Blocks of consecutive positions. With a causal mask a rank leaves out what it does not see, and waits."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        rank, pair = dist.get_rank(), torch.stack([k, v])
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
        for i in range(RANKS):
            coming, works = _pass(pair) if i < RANKS - 1 else (pair, [])
            if not causal or i <= rank:
                part, of_part = aten._scaled_dot_product_flash_attention_for_cpu(q, *pair, 0.0, causal and i == 0)
                total = torch.logaddexp(lse, of_part)
                out = out * (lse - total).exp()[..., None] + part * (of_part - total).exp()[..., None]
                lse = total
            for work in works:
                work.wait()
            pair = coming
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        rank, pair = dist.get_rank(), torch.stack([k, v])
        q_grad, grads = torch.zeros_like(q), torch.zeros_like(pair)
        for i in range(RANKS):
            coming, works = _pass(pair) if i < RANKS - 1 else (pair, [])
            if not ctx.causal or i <= rank:
                part, *of_pair = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    g, q, *pair, out, lse, 0.0, ctx.causal and i == 0
                )
                q_grad += part
                grads += torch.stack(of_pair)
            grads, home = _pass(grads)
            for work in (*works, *home):
                work.wait()
            pair = coming
        return q_grad, *grads, None


def _pass(x: Tensor) -> tuple[Tensor, list[Any]]:
    rank, coming = dist.get_rank(), torch.empty_like(x)
    sends = dist.P2POp(dist.isend, x, (rank + 1) % RANKS), dist.P2POp(dist.irecv, coming, (rank - 1) % RANKS)
    return coming, dist.batch_isend_irecv(list(sends))


def _by_hand(mesh: fspmd.Mesh, whole: list[Tensor], causal: bool) -> Any:
    *leaves, cotangent = (x.chunk(RANKS, 2)[dist.get_rank()].clone() for x in whole)
    leaves = [x.requires_grad_() for x in leaves]

    def step() -> tuple[Tensor, ...]:
        out = _Ring.apply(*leaves, causal)
        return (out.detach(), *torch.autograd.grad(out, leaves, cotangent))

    return torch.arange(whole[0].shape[2]), step


WAYS: Final[dict[str, Callable[..., Any]]] = {
    **{
        f"{way.__name__}{', jit' * record}": functools.partial(_ours, way, record)
        for way in (ring_attention, gathered_attention, ulysses_attention)
        for record in (True, False)
    },
    "a ring by hand": _by_hand,
}


if __name__ == "__main__":
    print(on_processes(measured, seconds=500).notes)
