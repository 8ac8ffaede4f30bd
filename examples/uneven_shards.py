"""Uneven shards: the number of ranks need not divide a dim.

Blocks follow torch.chunk: a dim of 5 on 4 ranks has blocks of 2, 2, 1 and 0. Ordinary torch functions work on them,
also on empty ones. A collective that joins blocks takes the global size.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fspmd
from fspmd import P

M, K, N = 5, 6, 3
mesh = fspmd.make_mesh((4,), ("x",), device="cpu")
first = not any(mesh.coordinate() or ())


@fspmd.shard_map(mesh=mesh, in_specs=(P(None, "x"), P("x")), out_specs=P("x"))
def matmul(a: Tensor, w: Tensor) -> Tensor:
    """Columns of a [5, 2 2 2 0], rows of w [2 2 2 0, 3] -> rows of the product [2 2 1 0, 3]."""
    return fspmd.psum_scatter(a @ w, "x", tiled=True, size=M)


@fspmd.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P("x"))
def similarities(y: Tensor) -> Tensor:
    """[2 2 1 0, 3] -> [2 2 1 0, 5]: each row times all rows. What works row by row asks for nothing."""
    everyone = fspmd.all_gather(y, "x", tiled=True, size=M)  # [5, 3]
    return (y @ everyone.T).softmax(-1)


@fspmd.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P())
def mean_row(y: Tensor) -> Tensor:
    """[2 2 1 0, 5] -> [5]: sum what there is and divide by the global size; a mean of means would be wrong."""
    return fspmd.psum(y.sum(0), "x") / M


def main() -> None:
    torch.manual_seed(0)
    a, w = torch.randn(M, K, dtype=torch.float64), torch.randn(K, N, dtype=torch.float64)
    weights = torch.arange(5.0).double()  # of the result, in the gradients below
    expected, pull_alone, *_ = torch.func.vjp(lambda a, w: ((a @ w) @ (a @ w).T).softmax(-1).mean(0), a, w)
    a_sharded, w_sharded = fspmd.device_put((a, w), (P(None, "x"), P("x")), mesh=mesh)
    product = matmul(a_sharded, w_sharded)
    y, pull = fspmd.vjp(lambda a, w: mean_row(similarities(matmul(a, w))), a_sharded, w_sharded)
    da, dw = pull(weights)  # laid out like a and w
    torch.testing.assert_close(fspmd.device_get((product, y)), (a @ w, expected))
    torch.testing.assert_close(fspmd.device_get((da, dw)), pull_alone(weights))
    if first:
        for name, x in {"a": a_sharded, "a @ w": product, "gradient for w": dw}.items():
            print(f"{name:>14}: {x!r}, blocks", *(x.spec.local_shape((rank,)) for rank in range(4)))
        print("values and gradients agree with unsharded torch")


if __name__ == "__main__":
    main()
