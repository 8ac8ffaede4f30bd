"""Data parallelism: every rank has a copy of the parameters and a part of the batch.

The parameters are equal on all ranks (`P()`), and the loss is a mean over ranks. The gradient of a value that is equal
on all ranks is the sum of the ranks' contributions. So no all-reduce of gradients is written here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import fspmd
from fspmd import P

Params = dict[str, Tensor]
mesh = fspmd.make_mesh((4,), ("dp",), device="cpu")
first = not any(mesh.coordinate() or ())


def squared_error(params: Params, x: Tensor, y: Tensor) -> Tensor:
    """x [B, 3], y [B, 1] -> a number; ordinary torch."""
    hidden = torch.tanh(x @ params["w1"] + params["b1"])
    return F.mse_loss(hidden @ params["w2"], y)


@fspmd.shard_map(mesh=mesh, in_specs=(P(), P("dp"), P("dp")), out_specs=P())
def parallel_loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
    """x [B / dp, 3], y [B / dp, 1] -> the mean over the whole batch."""
    return fspmd.pmean(squared_error(params, x, y), "dp")


def descend(params: Params, grads: Params) -> Params:
    return {name: p - 0.05 * grads[name] for name, p in params.items()}


def main() -> None:
    torch.manual_seed(0)
    x = torch.rand(64, 3, dtype=torch.float64) * 4 - 2
    y = (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:]
    shapes = {"w1": (3, 32), "b1": (32,), "w2": (32, 1)}
    alone = {name: torch.randn(shape, dtype=torch.float64) / 2 for name, shape in shapes.items()}
    params = fspmd.device_put(alone, P(), mesh=mesh)
    loss_and_grads = fspmd.value_and_grad(parallel_loss)
    parallel_descend = fspmd.shard_map(descend, mesh=mesh, in_specs=(P(), P()), out_specs=P())
    for step in range(100):
        loss, grads = loss_and_grads(params, x, y)
        params = parallel_descend(params, grads)
        grads_alone, loss_alone = torch.func.grad_and_value(squared_error)(alone, x, y)
        alone = descend(alone, grads_alone)
        torch.testing.assert_close(fspmd.device_get(loss), loss_alone)
        if first and step % 20 == 0:
            print(f"step {step:3}   4 ranks: {fspmd.device_get(loss).item():.6f}   alone: {loss_alone.item():.6f}")
    torch.testing.assert_close(fspmd.device_get(params), alone)


if __name__ == "__main__":
    main()
