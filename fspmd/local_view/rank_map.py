"""`rank_map`: arbitrary Python, run once per rank on the blocks of that rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.body import bound_body, state
from fspmd.errors import ArgumentError, TreeError
from fspmd.local_view.modes import run_in
from fspmd.local_view.python_step import as_step, unaliased
from fspmd.local_view.unbind import bind, unbind
from fspmd.meshes import world
from fspmd.meshes.mesh import Mesh
from fspmd.messages import described
from fspmd.torch_internals import DisableTorchFunction
from fspmd.tracing import recorder
from fspmd.transport import transport_named
from fspmd.transport.frame import Frame, frame
from fspmd.transport.randomness import draw_seed, one_stream
from fspmd.trees import tree_text
from fspmd.variance import Variance, set_variance


def rank_map(fn: Callable[..., Any], *args: Any) -> Any:
    """Run ``fn(*args)`` on every rank, with ordinary Python control flow on the values of that rank.

    ``fn`` calls no collectives. Results vary over all bound axes. Numbers become 0-d tensors, and shapes may differ
    from rank to rank. A result that would share memory with an argument or another result is a copy. The call is
    differentiable with respect to tensor arguments. Random numbers drawn inside differ from rank to rank.

    Within `jit` the function is one step, which runs as Python in every replay. Its results must always have the shapes
    that they had in the recording. The function must not write into its arguments, has derivatives in reverse mode
    only, and may use tensors that the jitted function has computed only as arguments.

    Raises:
        RecordError: Within `jit`, the function breaks one of these rules.
        TreeError, ShapeError, ArgumentError: In a simulation, ranks return different trees, dtypes or objects.

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
    axes = body.mesh.ordered(body.axes)
    leaves, treedef = optree.tree_flatten(args, none_is_leaf=True)
    if body.checked and state.tracker is not None:
        varying = Variance(varying=axes)
        leaves = [state.tracker.cast(x, varying) if isinstance(x, Tensor) else x for x in leaves]
    body.mark_uneven()
    run = _simulated if body.simulated else _here

    def on_ranks(leaves: list[Any], seed: int) -> Any:
        with DisableTorchFunction():
            return run(fn, leaves, treedef, body.mesh, axes, seed)

    def mapped(leaves: list[Any], seed: int) -> Any:
        state.rank_mapped = True
        try:
            return run_in(None, None, on_ranks, leaves, seed)
        finally:
            state.rank_mapped = False

    mode = recorder()
    if mode is not None:
        mode.check_opaque_step(fn)
    out_leaves, out_treedef = (mapped if mode is None else as_step(mapped))(leaves, draw_seed())
    if body.checked:
        for x in out_leaves:
            if isinstance(x, Tensor):
                set_variance(x, Variance(varying=axes))
    return optree.tree_unflatten(out_treedef, out_leaves)


def _called(fn: Callable[..., Any], leaves: list[Any], treedef: Any, device: torch.device) -> tuple[list[Any], Any]:
    out, tree = optree.tree_flatten(fn(*treedef.unflatten(leaves)))
    results = [torch.tensor(x, device=device) if isinstance(x, (int, float, complex)) else x for x in out]
    return unaliased(results, leaves), tree


def _here(fn: Callable[..., Any], leaves: list[Any], treedef: Any, mesh: Mesh, axes: tuple[str, ...], seed: int) -> Any:
    with one_stream(seed, int(transport_named(mesh.transport).index(mesh, axes))):
        return _called(fn, leaves, treedef, mesh.device)


def _simulated(
    fn: Callable[..., Any], leaves: list[Any], treedef: Any, mesh: Mesh, axes: tuple[str, ...], seed: int
) -> Any:
    held = frame(mesh, axes)
    columns = [unbind(x, held) if isinstance(x, Tensor) else (x,) * held.volume for x in leaves]
    rows, outer = [], world.SIMULATED.get()
    try:
        for i, at in enumerate(held.mesh_coordinates()):
            world.SIMULATED.set(mesh.rank_at(at))
            with one_stream(seed, i):
                rows.append(_called(fn, [column[i] for column in columns], treedef, mesh.device))
    finally:  # by one call of C, as an interrupt may end a function of Python at its start
        world.SIMULATED.set(outer)
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
