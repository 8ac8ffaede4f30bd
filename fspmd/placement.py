"""Putting values on a mesh and taking them off: `device_put`, `device_get`, `from_local`, `from_callback`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.errors import ArgumentError, MeshError, ShapeError, SpecError, join_failures
from fspmd.exit import spec_of_blocks
from fspmd.mesh import Mesh, current_mesh
from fspmd.redistribute import from_blocks, redistribute, to_blocks
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec, complain
from fspmd.transport import transport_of
from fspmd.transport.frame import frame
from fspmd.transport.local_tensor import local_tensor
from fspmd.trees import broadcast_prefix, key_path


def _the_mesh(mesh: Mesh | None, what: str) -> Mesh:
    found = mesh or current_mesh()
    if found is None:
        raise MeshError(f"{what} has no mesh; pass mesh=make_mesh(...), or set one with set_mesh(mesh)")
    _check_member(found, what)
    return found


def _check_member(mesh: Mesh, what: str) -> None:
    if mesh.coordinate() is None:
        raise MeshError(
            f"{what}: this process is not a member of {mesh!r}; call it on members only: "
            "if mesh.coordinate() is not None: ..."
        )


def device_put(tree: Any, specs: Any, *, mesh: Mesh | None = None, src: int | None = None) -> Any:
    """Lay a pytree of tensors out on a mesh.

    ``specs`` is a pytree prefix of ``tree``. Without ``src`` every process holds the global tensors and keeps its
    blocks: nothing moves. With ``src`` only that global rank holds them (the others pass None) and sends each rank
    its block. A `Sharded` leaf is redistributed. Backward gathers the gradient (with ``src``: sends it back).

    Raises:
        SpecError, TreeError, MeshError: naming every leaf that fails.

    >>> from fspmd import make_mesh
    >>> device_put({"w": torch.zeros(4, 3)}, P("x"), mesh=make_mesh((2,), ("x",)))
    {'w': Sharded f32[4@x, 3] on mesh(x=2)}
    """
    mesh = _the_mesh(mesh, "device_put")
    if src is not None:
        from fspmd.scatter import scatter_from

        return scatter_from(tree, specs, mesh, src)
    leaves, treedef = optree.tree_flatten(tree, is_leaf=_is_sharded, none_is_leaf=True)
    partitions = broadcast_prefix(specs, tree, "specs", "the tree", "device_put: specs does not match the tree")
    check_leaves(leaves, partitions, treedef, mesh, "device_put")
    placed = [
        leaf if leaf is None or partition is None else _put(leaf, partition, mesh)
        for leaf, partition in zip(leaves, partitions, strict=True)
    ]
    return treedef.unflatten(placed)


def _is_sharded(x: Any) -> bool:
    return isinstance(x, Sharded)


def check_leaves(leaves: list[Any], partitions: list[Any], treedef: Any, mesh: Mesh, what: str) -> None:
    """Every leaf a tensor, every spec fitting it; all failures in one message."""
    failures = []
    for path, leaf, partition in zip(treedef.paths(), leaves, partitions, strict=True):
        if leaf is None or partition is None:
            continue
        if not isinstance(leaf, (Tensor, Sharded)):
            failures.append(f"tree{key_path(path)} is a {type(leaf).__name__}; expected a torch.Tensor or a Sharded")
        elif wrong := complain(partition, mesh, leaf.ndim):
            failures.append(f"tree{key_path(path)} of shape {tuple(leaf.shape)}: {wrong}")
    if failures:
        raise SpecError(join_failures(f"{what}: the specs do not fit the tree", failures))


def _put(leaf: Tensor | Sharded, partition: P, mesh: Mesh) -> Sharded:
    if isinstance(leaf, Sharded):
        target = TensorSpec(mesh, partition, leaf.shape, leaf.dtype)
        return Sharded(redistribute(leaf.local, leaf.spec, target), target)
    spec = TensorSpec(mesh, partition, tuple(leaf.shape), leaf.dtype)
    x = to_blocks(leaf.to(mesh.device) if leaf.device != mesh.device else leaf, spec)
    return Sharded(own(x, leaf), spec)


def own(block: Tensor, source: Tensor) -> Tensor:
    """A block in memory of its own, not a view of the global tensor."""
    if block.requires_grad:
        return block if block is not source else block.view_as(block)
    return block.clone()


def device_get(tree: Any) -> Any:
    """The global tensors of a pytree of `Sharded`, on every rank: an all-gather per sharded dim. Backward: a slice.

    >>> from fspmd import make_mesh
    >>> x = device_put(torch.arange(5), P("x"), mesh=make_mesh((4,), ("x",)))
    >>> device_get(x)
    tensor([0, 1, 2, 3, 4])
    """
    return optree.tree_map(
        lambda x: from_blocks(x.local, x.spec) if isinstance(x, Sharded) else x,
        tree,
        is_leaf=_is_sharded,
        none_is_leaf=True,
    )


def from_local(local: Tensor, spec: TensorSpec | P, *, mesh: Mesh | None = None) -> Sharded:
    """A `Sharded` from this rank's block; shapes and dtypes are compared across ranks.

    With a ``P`` the global shape is inferred from all blocks.

    Raises:
        ShapeError: on all ranks alike, naming the rank whose block does not fit.

    >>> from fspmd import make_mesh
    >>> from_local(torch.zeros(2, 3), P(), mesh=make_mesh((4,), ("x",)))
    Sharded f32[2, 3] on mesh(x=4)
    """
    if isinstance(spec, TensorSpec):
        mesh, partition = _the_mesh(spec.mesh, "from_local"), spec.partition
    else:
        mesh, partition = _the_mesh(mesh, "from_local"), spec
    if wrong := complain(partition, mesh, None):
        raise SpecError(f"from_local: {wrong}")
    if not isinstance(local, Tensor):
        if mesh.transport != "simulation":  # the others wait for this rank's shape
            transport_of(mesh).layouts([None], mesh)
        raise ArgumentError(f"from_local got local of type {type(local).__name__}; expected a torch.Tensor")
    found = spec_of_blocks(local, partition, mesh, "from_local")
    if isinstance(spec, TensorSpec) and found is not spec:
        raise ShapeError(f"from_local: the blocks of all ranks make {found!r}, but the spec given is {spec!r}")
    return Sharded(local, found)


def from_callback(
    shape: tuple[int, ...], spec: P, fn: Callable[[tuple[slice, ...]], Tensor], *, mesh: Mesh | None = None
) -> Sharded:
    """A `Sharded` whose blocks are computed where they lie: ``fn(index)`` gives the block at a tuple of slices.

    Raises:
        ShapeError: on all ranks alike, of a block with another shape or dtype than it should have.

    >>> from fspmd import make_mesh
    >>> whole = torch.arange(6.0)
    >>> device_get(from_callback((6,), P("x"), lambda index: whole[index], mesh=make_mesh((4,), ("x",))))
    tensor([0., 1., 2., 3., 4., 5.])
    """
    mesh = _the_mesh(mesh, "from_callback")
    layout = TensorSpec(mesh, spec, shape, torch.float32)
    simulated = mesh.transport == "simulation"
    held = frame(mesh, layout.partition.axes | layout.partition.unreduced if simulated else mesh.axis_names)
    where = [_coordinate(mesh, held.axes, at) for at in held.coordinates()]
    if simulated:
        made = [_call_for_block(fn, layout, at) for at in where]
        found = [(x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else None for x in made]
    else:
        made, failure = [None], None
        try:
            made = [_call_for_block(fn, layout, mesh.coordinate() or ())]
        except Exception as error:  # the other ranks wait to hear of this one's block
            failure = error
        told = transport_of(mesh).layouts([x if isinstance(x, Tensor) else None for x in made], mesh)
        if failure is not None:
            raise failure
        found = [block for (block,) in told]
    _check_made(layout, where, found)
    blocks = [x.to(mesh.device) for x in made if isinstance(x, Tensor)]
    local = local_tensor(blocks, held) if simulated else blocks[0]
    return Sharded(local, TensorSpec(mesh, spec, shape, local.dtype))


def _coordinate(mesh: Mesh, axes: tuple[str, ...], at: tuple[int, ...]) -> tuple[int, ...]:
    full = dict.fromkeys(mesh.axis_names, 0) | dict(zip(axes, at, strict=True))
    return tuple(full.values())


def _call_for_block(fn: Callable[[tuple[slice, ...]], Tensor], layout: TensorSpec, at: tuple[int, ...]) -> Any:
    spans = zip(layout.offset(at), layout.local_shape(at), strict=True)
    return fn(tuple(slice(start, start + length) for start, length in spans))


def _check_made(
    layout: TensorSpec, where: list[tuple[int, ...]], found: list[tuple[torch.dtype, tuple[int, ...]] | None]
) -> None:
    """Every block a tensor of its shape, and of one dtype."""
    for at, block in zip(where, found, strict=True):
        expected = layout.local_shape(at)
        if block is None or block[1] != expected:
            given = "no tensor" if block is None else f"one of shape {block[1]}"
            raise ShapeError(
                f"from_callback: the block at {at} of a tensor {layout.shape} under {layout.partition!r} is "
                f"{expected}, but the callback returned {given}"
            )
        if found[0] is not None and block[0] != found[0][0]:
            raise ShapeError(
                f"from_callback: the callback returned a block of {found[0][0]} at {where[0]}, but one of {block[0]} "
                f"at {at}; all blocks must have one dtype"
            )
