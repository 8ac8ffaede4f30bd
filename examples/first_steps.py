"""First steps: a mesh, a function over local blocks, one collective, and a gradient.

python examples/first_steps.py                                # 4 simulated ranks
torchrun --nproc-per-node 4 examples/first_steps.py           # 4 processes
"""

from __future__ import annotations

import torch
from torch import Tensor

import fspmd
from fspmd import P

mesh = fspmd.make_mesh((2, 2), ("x", "y"), device="cpu")  # without device: under torchrun the GPUs, if there are any
first = not any(mesh.coordinate() or ())  # one process prints


@fspmd.shard_map(mesh=mesh, in_specs=(P("x", "y"), P("y"), None), out_specs=P("x"))
def matmul(a: Tensor, b: Tensor, talk: bool) -> Tensor:
    """Blocks a [M / x, N / y] and b [N / y, K]; the sum over N is a sum over the ranks of y as well."""
    partial = a @ b  # [M / x, K]
    total = fspmd.psum(partial, "y")
    if talk:
        print("a on each rank     ", fspmd.typeof(a))
        print("before the psum    ", fspmd.typeof(partial))
        print("after the psum     ", fspmd.typeof(total))
    return total


def loss(a: Tensor, b: Tensor) -> Tensor:
    return mean_square(matmul(a, b, False))


@fspmd.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P())
def mean_square(c: Tensor) -> Tensor:
    return fspmd.pmean((c * c).mean(), "x")


def main() -> None:
    torch.manual_seed(0)  # the same global values in every process
    a, b = torch.randn(8, 6), torch.randn(6, 4)
    c = matmul(a, b, first)
    da, db = fspmd.grad(loss, argnums=(0, 1))(a, b)  # plain in, plain out: da is global, like a

    reference = torch.func.grad(lambda a, b: (a @ b).square().mean(), argnums=(0, 1))(a, b)
    torch.testing.assert_close(fspmd.device_get(c), a @ b)
    torch.testing.assert_close(fspmd.device_get((da, db)), reference)
    if first:
        print("the result         ", repr(c))
        print("values and gradients agree with unsharded torch")


if __name__ == "__main__":
    main()
