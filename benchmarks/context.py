"""Attention over a cut sequence on four Gloo processes: forward and backward, beside a ring by hand.

    python benchmarks/context.py

The time is that of the processor, all threads of a rank: the least of some steps, on the rank that has the most. Bytes
are those that a rank sends in a step. The ring by hand has consecutive positions, and leaves out what a mask hides.

`torch.distributed.tensor.experimental.context_parallel` has rings of three kernels, all of GPUs. On a CPU it leaves the
kernel to DTensor, which takes it apart, and plans for long (torch 2.13). So it does not stand here.
"""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable
from datetime import date
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from ranks import RANKS, on_processes
from torch import Tensor
from torch.nn import functional as F

import fspmd
from fspmd import P, communication_log, device_put, shard_map
from fspmd.nn import Causal, Full, gathered_attention, ring_attention, ulysses_attention, zigzag

aten: Final[Any] = torch.ops.aten
WIDTH: Final = 64
HEADS: Final = 8
KINDS: Final = {"short": (64, 8), "long": (1024, 3)}  # the length of the whole sequence, and steps
Step = Callable[[], tuple[Tensor, ...]]  # the result and the gradients of q, k and v, each this rank's block


class Measured(NamedTuple):
    what: str
    milliseconds: float
    sent: float  # MiB
    error: float | None  # beside dense attention in float64


def measure() -> list[tuple[str, list[Measured]]]:
    """The rows of the first of four processes."""
    return on_processes(_rows, seconds=280)  # type: ignore[return-value, arg-type]


def _rows(mesh: fspmd.Mesh) -> list[tuple[str, list[Measured]]]:
    found = []
    for length, steps in KINDS.values():
        for causal in (False, True):
            title = f"{length} positions, {'causal' if causal else 'all see all'}"
            found.append((title, [_row(name, make, mesh, length, causal, steps) for name, make in WAYS.items()]))
    return found


def _row(name: str, make: Callable[..., Any], mesh: fspmd.Mesh, length: int, causal: bool, steps: int) -> Measured:
    torch.manual_seed(0)
    whole = list(torch.randn(4, 1, HEADS, length, WIDTH))
    order, step, sent = make(mesh, whole, causal)
    results = step()
    places = order.view(RANKS, -1)[dist.get_rank()]
    error = None
    if length == KINDS["short"][0]:
        right = _dense(length, causal)
        error = max(float((x - y[:, :, places]).abs().max()) for x, y in zip(results, right, strict=True))
    del results
    times = []
    for _ in range(steps):
        dist.barrier()
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    least = torch.tensor(min(times))
    dist.all_reduce(least, dist.ReduceOp.MAX)
    return Measured(name, float(least) * 1e3, sent(), error)


@functools.cache
def _dense(length: int, causal: bool) -> list[Tensor]:
    torch.manual_seed(0)
    *operands, cotangent = torch.randn(4, 1, HEADS, length, WIDTH).double()
    leaves = [x.requires_grad_() for x in operands]
    out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


# --- ours -----------------------------------------------------------------------------------------------------------


def _ours(way: Callable[..., Tensor], mesh: fspmd.Mesh, whole: list[Tensor], causal: bool) -> Any:
    length, rows = whole[0].shape[2], P(None, None, "x")
    layout = zigzag(length, 1 if way is ulysses_attention else RANKS)
    options = {"mask": Causal() if causal else Full(), "layout": layout}
    attend = shard_map(lambda *x: way(*x, "x", **options), mesh=mesh, in_specs=rows, out_specs=rows)
    *leaves, cotangent = (device_put(layout.store(x, 2), rows, mesh=mesh) for x in whole)
    leaves = [x.requires_grad_() for x in leaves]

    def step() -> tuple[Tensor, ...]:
        out = attend(*leaves)
        return tuple(x.local.detach() for x in (out, *torch.autograd.grad(out, leaves, cotangent)))

    def sent() -> float:
        with communication_log() as log:
            step()
        return sum(event.price.moved for event in log) / 2**20

    return layout.order, step, sent


# --- a ring by hand -------------------------------------------------------------------------------------------------


class _Ring(torch.autograd.Function):
    """Blocks of consecutive positions. With a causal mask a rank leaves out what it does not see, and waits."""

    sent = 0

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
    _Ring.sent += x.nbytes
    sends = dist.P2POp(dist.isend, x, (rank + 1) % RANKS), dist.P2POp(dist.irecv, coming, (rank - 1) % RANKS)
    return coming, dist.batch_isend_irecv(list(sends))


def _by_hand(mesh: fspmd.Mesh, whole: list[Tensor], causal: bool) -> Any:
    *leaves, cotangent = (x.chunk(RANKS, 2)[dist.get_rank()].clone() for x in whole)
    leaves = [x.requires_grad_() for x in leaves]

    def step() -> tuple[Tensor, ...]:
        out = _Ring.apply(*leaves, causal)
        return (out.detach(), *torch.autograd.grad(out, leaves, cotangent))

    def sent() -> float:
        _Ring.sent = 0
        step()
        return _Ring.sent / 2**20

    return torch.arange(whole[0].shape[2]), step, sent


WAYS: Final[dict[str, Callable[..., Any]]] = {
    "ring_attention": functools.partial(_ours, ring_attention),
    "gathered_attention": functools.partial(_ours, gathered_attention),
    "ulysses_attention": functools.partial(_ours, ulysses_attention),
    "a ring by hand": _by_hand,
}


def main() -> None:
    print(f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}\n")
    for title, rows in measure():
        print(f"| {title} | processor time | sent | error |\n|---|---|---|---|")
        for row in rows:
            error = "" if row.error is None else f"{row.error:.1e}"
            print(f"| {row.what} | {row.milliseconds:.3g} ms | {row.sent:.3g} MiB | {error} |")
        print()


if __name__ == "__main__":
    main()
