"""A collective matmul: the all-gather of x and the product with w run at the same time.

`all_gather(x) @ w` waits for all of x before it multiplies. Here the blocks of x go round a ring. While one block is
multiplied, the next one travels (`wait=False`), and no rank ever holds all of x.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fspmd
from fspmd import P

RANKS = 4
RING = [(i, (i + 1) % RANKS) for i in range(RANKS)]
IN_SPECS, OUT_SPECS = (P("tp"), P(None, "tp")), P(None, "tp")
mesh = fspmd.make_mesh((RANKS,), ("tp",), device="cpu")
first = not any(mesh.coordinate() or ())


@fspmd.shard_map(mesh=mesh, in_specs=IN_SPECS, out_specs=OUT_SPECS)
def gather_then_multiply(x: Tensor, w: Tensor) -> Tensor:
    """Blocks x [M / tp, K] and w [K, N / tp] -> [M, N / tp]."""
    return fspmd.all_gather(x, "tp", tiled=True) @ w


@fspmd.shard_map(mesh=mesh, in_specs=IN_SPECS, out_specs=OUT_SPECS)
def ring_matmul(x: Tensor, w: Tensor) -> Tensor:
    """The same: after t hops, rank r holds the block of rank r - t."""
    products = []
    for hop in range(RANKS):
        following = fspmd.ppermute(x, "tp", RING, wait=False) if hop < RANKS - 1 else None
        products.append(x @ w)  # [M / tp, N / tp], while the next block travels
        if following is not None:
            x = following.wait()
    hops = (fspmd.axis_index("tp") - torch.arange(RANKS)) % RANKS  # in how many hops the block of rank 0, 1, ... came
    return torch.stack(products).index_select(0, hops).flatten(0, 1)


def main() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(8, 6, dtype=torch.float64), torch.randn(6, 12, dtype=torch.float64)
    expected, pull, *_ = torch.func.vjp(torch.matmul, x, w)
    expected_gradients = pull(torch.sin(expected))
    for matmul in (gather_then_multiply, ring_matmul):
        y, pull = fspmd.vjp(matmul, x, w)
        torch.testing.assert_close(fspmd.device_get(y), expected)
        torch.testing.assert_close(fspmd.device_get(pull(torch.sin(expected))), expected_gradients)
        if first:
            print(f"{matmul.__name__:>20}: {y!r}, value and gradients as in x @ w")


if __name__ == "__main__":
    main()
