"""What a user's type checker makes of the public functions; `mypy` reads it, nothing runs it."""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch import Tensor

from fspmd import (
    Handle,
    Jitted,
    Lowered,
    Mesh,
    P,
    Sharded,
    all_gather,
    all_gather_into,
    all_to_all,
    axis_index,
    axis_size,
    checkpoint,
    from_callback,
    from_local,
    grad,
    jit,
    make_mesh,
    pcast,
    pmax,
    pmean,
    ppermute,
    psum,
    psum_scatter,
    set_mesh,
    shard_map,
    stop_gradient,
    value_and_grad,
    vmap,
)

mesh = assert_type(make_mesh((2, 4), ("dp", "tp")), Mesh)
assert_type(mesh["tp"], Mesh)
assert_type(mesh.coordinate(), tuple[int, ...] | None)


@shard_map(mesh=mesh, in_specs=(P("dp"), P(None, "tp")), out_specs=P())
def loss(x: Tensor, w: Tensor) -> Tensor:
    """A body returns what its collectives return."""
    return psum(layer(x, w).square().sum(), ("dp", "tp"))


@checkpoint
def layer(x: Tensor, w: Tensor) -> Tensor:
    return pcast(x, "tp", to="varying") @ w


def collectives(x: Tensor, params: dict[str, Tensor]) -> Tensor:
    assert_type(pmean(params, "dp"), dict[str, Tensor])
    assert_type(psum(1, "dp"), int)
    assert_type(axis_size("dp"), int)
    assert_type(axis_index(("dp", "tp")), Tensor)
    assert_type(stop_gradient(params), dict[str, Tensor])
    assert_type(all_gather(x, "dp", axis=1, tiled=True, to="invarying"), Tensor)
    handle = assert_type(psum_scatter(x, "dp", tiled=True, wait=False), Handle[Tensor])
    assert_type(all_gather_into(x, handle.wait(), "dp", wait=False), Handle[Tensor])
    assert_type(ppermute([x, x], "dp", [(0, 1)], wait=False).wait(), list[Tensor])
    return all_to_all(pmax(x, "dp"), "dp", 0, 1, tiled=True)


def outside(block: Tensor) -> tuple[Sharded, Sharded]:
    with set_mesh(mesh):
        assert_type(loss(block, w=block), Tensor)
    assert_type(value_and_grad(loss, argnums=(0, 1))(block, w=block), tuple[Tensor, Any])
    assert_type(grad(lambda x: (loss(x, x), 1.0), has_aux=True)(block), tuple[Any, float])
    assert_type(vmap(layer)(block, block), Tensor)
    return from_local(block, P("dp")), from_callback((8, 4), P("dp"), lambda index: block[index])


def as_tensors(x: Sharded, w: Sharded, module: torch.nn.Module) -> Tensor:
    """A `Sharded` is a tensor to type checkers, too: operators, methods, torch's functions and optimizers."""
    y = (2 * x + 1 - x / 3) @ w.T
    y += x.sum(0, keepdim=True).relu().masked_fill(x[:1] > 0, 0.0)
    optimizer = torch.optim.AdamW([w, x.requires_grad_()], lr=1e-3)
    optimizer.step()
    torch.nn.utils.clip_grad_norm_([w, x], 1.0)
    assert_type(x.local, Tensor)
    assert_type(x.spec.mesh, Mesh)
    assert_type(x.shape, torch.Size)
    assert_type(x.detach(), Sharded)
    assert_type(2 - x @ w / 3, Sharded)
    assert_type(-(x**2) > 1, Sharded)
    x += 1
    x = x * w.float()
    print(float(y.mean()), f"{y.sum():.3f}", len(x), [row.shape for row in x])
    numbers: dict[str, Tensor] = {"x": x, "y": torch.nn.functional.layer_norm(torch.cat([y, x]), x.shape[1:])}
    return -(numbers["y"] ** 2).mean() if x.dtype.is_floating_point else torch.einsum("ij,kj->ik", x, w)


@jit
def step(w: Tensor, rate: float = 0.1) -> Tensor:
    gradient: Tensor = grad(loss)(w, w)
    return w - rate * gradient


class Model:
    @jit(static_argnums=0, passes=["equal_steps"])
    def forward(self, x: Tensor, times: int) -> list[Tensor]:
        return [x] * times


def recorded(block: Tensor) -> int:
    """`jit` keeps the signature, and gives what has `lower`."""
    assert_type(step(block, rate=0.5), Tensor)
    assert_type(step.lower(block), Lowered)
    assert_type(step.cache_info().hits, int)
    assert_type(Model().forward(block, times=2), list[Tensor])
    a_function: Jitted[[Tensor], Tensor] = jit(torch.relu)
    step(block, scale=0.5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    loss(block)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    return len(a_function.lower(block).collectives())
