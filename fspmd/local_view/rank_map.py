"""Arbitrary Python, run once per rank on that rank's blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.body import Body, bound_body, state, within
from fspmd.errors import ArgumentError, RecordError, TreeError
from fspmd.local_view.unbind import bind, unbind
from fspmd.meshes import world
from fspmd.messages import described
from fspmd.tracing import recorder
from fspmd.transport.frame import Frame, frame
from fspmd.transport.randomness import draw_seed, one_stream
from fspmd.trees import tree_text
from fspmd.variance import Variance, set_variance


def rank_map(fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(*args)`` on every rank, with ordinary Python control flow on that rank's values; no collectives inside.

    Results vary over all bound axes; numbers become 0-d tensors, and shapes may differ from rank to rank.
    Differentiable with respect to tensor arguments. Random numbers drawn inside differ from rank to rank.

    Raises:
        RecordError: within `jit`.
        TreeError, ShapeError, ArgumentError: in a simulation, where ranks return different trees, dtypes or objects.

    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> collatz = lambda n: n * 3 + 1 if n % 2 else n // 2
    >>> mesh = make_mesh((4,), ("x",))
    >>> f = shard_map(lambda n: rank_map(collatz, n), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    >>> device_get(f(torch.arange(4)))
    tensor([ 0,  4,  1, 10])
    """
    body = bound_body("rank_map")
    if not callable(fn):
        raise ArgumentError(f"rank_map got {described(fn)} for fn; give it a function: rank_map(fn, x)")
    if recorder() is not None:
        raise RecordError(
            "jit cannot record rank_map, which runs Python that may branch on each rank's values; jit the parts before "
            "and after it"
        )
    axes = body.mesh.ordered(body.axes)
    leaves, treedef = optree.tree_flatten(args, none_is_leaf=True)
    if body.checked and state.tracker is not None:
        varying = Variance(varying=axes)
        leaves = [state.tracker.cast(x, varying) if isinstance(x, Tensor) else x for x in leaves]
    body.uneven = True
    run = _simulated if body.mesh.transport == "simulation" else _here
    state.rank_mapped = True
    try:
        with torch._C.DisableTorchFunction(), within(None, None):
            out_leaves, out_treedef = run(fn, leaves, treedef, body, axes)
    finally:
        state.rank_mapped = False
    if body.checked:
        for x in out_leaves:
            if isinstance(x, Tensor):
                set_variance(x, Variance(varying=axes))
    return optree.tree_unflatten(out_treedef, out_leaves)


def _tensor_leaves(out: Any, device: torch.device) -> tuple[list[Any], Any]:
    leaves, treedef = optree.tree_flatten(out)
    return [torch.tensor(x, device=device) if isinstance(x, (int, float, complex)) else x for x in leaves], treedef


def _here(fn: Callable[..., Any], leaves: list[Any], treedef: Any, body: Body, axes: tuple[str, ...]) -> Any:
    with one_stream(draw_seed(), int(body.transport.index(body.mesh, axes))):
        return _tensor_leaves(fn(*treedef.unflatten(leaves)), body.mesh.device)


def _simulated(fn: Callable[..., Any], leaves: list[Any], treedef: Any, body: Body, axes: tuple[str, ...]) -> Any:
    mesh, seed = body.mesh, draw_seed()
    held = frame(mesh, axes)
    columns = [unbind(x, held) if isinstance(x, Tensor) else (x,) * held.volume for x in leaves]
    rows = []
    for i, at in enumerate(held.coordinates()):
        full = dict.fromkeys(mesh.axis_names, 0) | dict(zip(held.axes, at, strict=True))
        with world.simulated_rank(mesh.rank_at(tuple(full.values()))), one_stream(seed, i):
            rows.append(_tensor_leaves(fn(*treedef.unflatten([column[i] for column in columns])), mesh.device))
    trees = [tree for _, tree in rows]
    if any(tree != trees[0] for tree in trees):
        other = next(i for i, tree in enumerate(trees) if tree != trees[0])
        raise TreeError(
            f"rank_map: the function returned the tree {tree_text(trees[0])} on the first rank, but "
            f"{tree_text(trees[other])} on rank {other}; return the same structure on all ranks"
        )
    outs = zip(*(row for row, _ in rows), strict=True)
    return [_bound(column, held) for column in outs], trees[0]


def _bound(column: tuple[Any, ...], held: Frame) -> Any:
    if all(isinstance(x, Tensor) for x in column):
        if other := next((i for i, x in enumerate(column) if x.dtype is not column[0].dtype), 0):
            raise ArgumentError(
                f"rank_map: the function returned {column[0].dtype} on the first rank, but {column[other].dtype} on "
                f"rank {other}; return one dtype on all ranks"
            )
        return bind(column, held)
    if all(type(x) is type(column[0]) and x == column[0] for x in column):
        return column[0]
    raise ArgumentError(
        f"rank_map: the function returned {described(column[0])} on the first rank, and something else on "
        "others; results that differ from rank to rank must be tensors or numbers"
    )
