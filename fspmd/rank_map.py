"""Arbitrary Python, run once per rank on that rank's blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd import world
from fspmd.body import Body, bound_body, state, within
from fspmd.transport.frame import Frame, frame
from fspmd.transport.local_tensor import LocalTensor, resolved, shards_of
from fspmd.variance import Variance, set_variance


def rank_map(fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(*args)`` on every rank, with ordinary Python control flow on that rank's values; no collectives inside.

    Results vary over all bound axes; numbers become 0-d tensors, and shapes may differ from rank to rank.
    Differentiable with respect to tensor arguments.

    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> collatz = lambda n: n * 3 + 1 if n % 2 else n // 2
    >>> mesh = make_mesh((4,), ("x",))
    >>> device_get(shard_map(lambda n: rank_map(collatz, n), mesh=mesh, in_specs=P("x"), out_specs=P("x"))(torch.arange(4)))
    tensor([ 0,  4,  1, 10])
    """
    body = bound_body("rank_map", "rank_map(fn, x)")
    axes = tuple(axis for axis in body.mesh.axis_names if axis in body.axes)
    leaves, treedef = optree.tree_flatten(args, none_is_leaf=True)
    if body.checked and state.tracker is not None:
        varying = Variance(varying=axes)
        leaves = [state.tracker.cast(x, varying) if isinstance(x, Tensor) else x for x in leaves]
    body.uneven = True
    run = _simulated if body.mesh.transport == "simulation" else _here
    with torch._C.DisableTorchFunction(), within(None, None):
        out_leaves, out_treedef = run(fn, leaves, treedef, body, axes)
    if body.checked:
        for x in out_leaves:
            if isinstance(x, Tensor):
                set_variance(x, Variance(varying=axes))
    return optree.tree_unflatten(out_treedef, out_leaves)


def _tensor_leaves(out: Any, device: torch.device) -> tuple[list[Any], Any]:
    leaves, treedef = optree.tree_flatten(out)
    return [torch.tensor(x, device=device) if isinstance(x, (int, float, complex)) else x for x in leaves], treedef


def _here(fn: Callable[..., Any], leaves: list[Any], treedef: Any, body: Body, axes: tuple[str, ...]) -> Any:
    return _tensor_leaves(fn(*treedef.unflatten(leaves)), body.mesh.device)


def _simulated(fn: Callable[..., Any], leaves: list[Any], treedef: Any, body: Body, axes: tuple[str, ...]) -> Any:
    mesh = body.mesh
    held = frame(mesh, axes)
    columns = [_Unbind.apply(x, held) if type(x) is LocalTensor else [x] * held.volume for x in leaves]
    rows = []
    for i, at in enumerate(held.coordinates()):
        full = dict.fromkeys(mesh.axis_names, 0) | dict(zip(held.axes, at, strict=True))
        with world.simulated_rank(mesh.rank_at(tuple(full.values()))):
            rows.append(_tensor_leaves(fn(*treedef.unflatten([column[i] for column in columns])), mesh.device))
    out_treedef = rows[0][1]
    outs = zip(*(row for row, _ in rows), strict=True)
    return [_Bind.apply(held, *column) if isinstance(column[0], Tensor) else column[0] for column in outs], out_treedef


class _Unbind(torch.autograd.Function):
    """A simulated value to the tensors of its ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Frame) -> tuple[Tensor, ...]:
        ctx.held = held
        return tuple(shard.view_as(shard) for shard in shards_of(x, held))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Bind.apply(ctx.held, *grads), None


class _Bind(torch.autograd.Function):
    """The tensors of all ranks to one simulated value."""

    @staticmethod
    def forward(ctx: Any, held: Frame, *shards: Tensor) -> Tensor:
        ctx.held = held
        return LocalTensor([resolved(shard) for shard in shards], held)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return None, *_Unbind.apply(g, ctx.held)
