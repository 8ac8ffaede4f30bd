"""What one psum of a small tensor costs above the backend: in a body, beside raw c10d and torch's own functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from bodies import fake_world, inside, sharded
from timing import Goal, Row, Table, calls, side_by_side
from torch import Tensor
from torch.distributed.nn.functional import all_reduce as nn_all_reduce

from fspmd import make_mesh, psum


def measure() -> Table:
    """A psum of 16 numbers among 8 ranks of the fake backend."""
    warnings.simplefilter("ignore", FutureWarning)  # torch.distributed.nn.functional
    fake_world()
    mesh, group = make_mesh((8,), ("x",), device="cpu"), dist.group.WORLD
    assert group is not None
    x, ones = torch.randn(16), torch.ones(16)
    leaf = x.clone().requires_grad_()
    blocks = sharded(mesh, 16)

    def gradient(block: Tensor) -> Callable[[], object]:
        w = block.detach().requires_grad_()
        return lambda: torch.autograd.grad(psum(w, "x"), w, ones)

    def forward(block: Tensor) -> Callable[[], object]:
        w = block.detach().requires_grad_()
        return lambda: psum(w, "x")

    def without_grad(block: Tensor) -> Callable[[], object]:
        return lambda: psum(block, "x")

    def functional_sum(of: Tensor) -> Tensor:
        total: Tensor = functional.wait_tensor(functional.all_reduce(of, "sum", group))
        return total

    times = side_by_side(
        {
            "raw": calls(lambda: group.allreduce([x.clone()]).wait()),
            "checked": inside(mesh, blocks, forward, check_vma=True),
            "unchecked": inside(mesh, blocks, forward, check_vma=False),
            "no grad": inside(mesh, blocks, without_grad, check_vma=True),
            "nn": calls(lambda: nn_all_reduce(leaf)),
            "functional": calls(lambda: functional_sum(leaf)),
            "functional, no grad": calls(lambda: functional_sum(x)),
        }
    )
    both = side_by_side(
        {
            "checked": inside(mesh, blocks, gradient, check_vma=True),
            "unchecked": inside(mesh, blocks, gradient, check_vma=False),
            "clone": calls(lambda: torch.autograd.grad(leaf.clone(), leaf, ones)),
            "nn": calls(lambda: torch.autograd.grad(nn_all_reduce(leaf), leaf, ones)),
            "functional": calls(lambda: torch.autograd.grad(functional_sum(leaf), leaf, ones)),
        }
    )
    raw, nn, fun = "c10d allreduce of a clone", "torch.distributed.nn all_reduce", "functional collectives"
    goal = Goal(8e-6)
    rows = [
        Row("differentiable psum", times["checked"], raw, times["raw"], goal),
        Row("differentiable psum, check_vma=False", times["unchecked"], raw, times["raw"], goal),
        Row("psum, no gradient", times["no grad"], raw, times["raw"], goal),
        Row("differentiable psum", times["checked"], nn, times["nn"]),
        Row("differentiable psum", times["checked"], fun, times["functional"]),
        Row("psum, no gradient", times["no grad"], fun, times["functional, no grad"]),
        Row("psum and gradient", both["checked"], "clone and gradient", both["clone"]),
        Row("psum and gradient, check_vma=False", both["unchecked"], "clone and gradient", both["clone"]),
        Row("psum and gradient, check_vma=False", both["unchecked"], f"{nn} and gradient", both["nn"]),
        Row("psum and gradient, check_vma=False", both["unchecked"], f"{fun} and gradient", both["functional"]),
    ]
    return Table(
        "One psum of 16 numbers, 8 ranks of the fake backend",
        rows,
        "Raw c10d has no gradient. The gradient of a checked psum moves nothing; without types it is another psum, as "
        "in torch's two.",
    )
