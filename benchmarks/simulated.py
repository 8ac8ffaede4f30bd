"""Eight simulated ranks in one process, beside a Python loop over eight tensors and torch's LocalTensorMode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from bodies import RANKS, fake_world, inside, sharded
from timing import Goal, Row, Sampler, Table, Timing, calls, side_by_side
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

import fspmd
from fspmd import make_mesh, psum

WIDTHS = (32, 64, 32)  # of the network; 8 rows per rank


def measure() -> Table:
    """An add, a psum, and a small network with its gradients."""
    fake_world()  # LocalTensorMode wants one
    mesh = make_mesh((RANKS,), ("x",), device="cpu", transport="simulation")
    return Table(
        "Eight simulated ranks in one process",
        [*_add(mesh), *_psum(mesh), *_network(mesh)],
        "Blocks of 16 numbers; the network is a matmul, a tanh and a matmul "
        f"({' → '.join(map(str, WIDTHS))}, 8 rows per rank), with the gradients of its weights.",
    )


def _rows(what: str, times: dict[str, Timing], loop_of: str, bound: float | None) -> list[Row]:
    goal = Goal(bound, "ratio") if bound is not None else None
    rows = [Row(what, times["checked"], loop_of, times["loop"], goal)]
    rows.append(Row(f"{what}, check_vma=False", times["unchecked"], loop_of, times["loop"], goal))
    if "torch" in times:
        rows.append(Row(what, times["checked"], "LocalTensorMode", times["torch"]))
    return rows


def _local_tensor_mode(statement: Callable[[LocalTensor], object]) -> Sampler:
    with LocalTensorMode(RANKS) as mode:
        x = LocalTensor({i: torch.randn(16) for i in range(RANKS)})

    def sample(number: int) -> float:
        with mode:
            return calls(lambda: statement(x))(number)

    return sample


def _add(mesh: fspmd.Mesh) -> list[Row]:
    xs, blocks = [torch.randn(16) for _ in range(RANKS)], sharded(mesh, 16)
    times = side_by_side(
        {
            "loop": calls(lambda: [x + x for x in xs]),
            "checked": inside(mesh, blocks, lambda x: lambda: x + x, check_vma=True),
            "unchecked": inside(mesh, blocks, lambda x: lambda: x + x, check_vma=False),
            "torch": _local_tensor_mode(lambda x: x + x),
        }
    )
    return _rows("x + x", times, "a loop over 8 tensors", 7)


def _psum(mesh: fspmd.Mesh) -> list[Row]:
    xs, blocks, group = [torch.randn(16) for _ in range(RANKS)], sharded(mesh, 16), dist.group.WORLD
    assert group is not None

    def total() -> Tensor:
        found = xs[0]
        for x in xs[1:]:
            found = found + x
        return found

    times = side_by_side(
        {
            "loop": calls(total),
            "checked": inside(mesh, blocks, lambda x: lambda: psum(x, "x"), check_vma=True),
            "unchecked": inside(mesh, blocks, lambda x: lambda: psum(x, "x"), check_vma=False),
            "torch": _local_tensor_mode(lambda x: functional.wait_tensor(functional.all_reduce(x, "sum", group))),
        }
    )
    return _rows('psum(x, "x")', times, "a loop that adds 8 tensors", 10)


def _network(mesh: fspmd.Mesh) -> list[Row]:
    weights = [torch.randn(n, m, requires_grad=True) for n, m in itertools.pairwise(WIDTHS)]
    xs, blocks = [torch.randn(8, WIDTHS[0]) for _ in range(RANKS)], sharded(mesh, 8, WIDTHS[0])

    def network(x: Tensor) -> Tensor:
        w1, w2 = weights
        return (torch.tanh(x @ w1) @ w2).square().mean()

    def looped() -> Sequence[Tensor]:
        total = torch.stack([network(x) for x in xs]).sum()
        return torch.autograd.grad(total, weights)

    def step(x: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(psum(network(x), "x"), weights)

    times = side_by_side(
        {
            "loop": calls(looped),
            "checked": inside(mesh, blocks, step, check_vma=True),
            "unchecked": inside(mesh, blocks, step, check_vma=False),
        },
        seconds=0.02,
    )
    return _rows("the network and its gradients", times, "a loop over 8 batches", None)
