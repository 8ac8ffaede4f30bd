"""Values put on a mesh and taken off: `device_put`, `device_get`, `scatter`, `from_local`, `from_callback`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.body import check_outside, the_mesh
from fspmd.collectives.measured_layouts import spec_of_blocks
from fspmd.errors import ArgumentError, ShapeError, SpecError
from fspmd.foreign import misfit, refuse_foreign, refuse_misfit
from fspmd.meshes.mesh import Mesh
from fspmd.messages import described
from fspmd.placement.broadcast import source_of
from fspmd.placement.scatter import check_leaves, description, scatter_from
from fspmd.redistribution.redistribute import borrowed_blocks, from_blocks, redistribute
from fspmd.sharded import Sharded, alike, is_plain
from fspmd.spec import P, TensorSpec, complain, short_dtype
from fspmd.transport import known_values, transport_named
from fspmd.transport.frame import frame_over
from fspmd.transport.local_tensor import local_tensor
from fspmd.trees import adopt, broadcast_prefix, check_keys, flatten_values, labels, leaf_paths


def device_put(tree: Any, specs: Any, *, mesh: Mesh | None = None, src: int | None = None) -> Any:
    """Lay a pytree of tensors out on a mesh.

    To plan without memory, pass a `TensorSpec` leaf, which becomes a `TensorSpec` of the new layout. On a mesh of
    transport "abstract" a meta tensor becomes a `Sharded`.

    Args:
        tree: A pytree of tensors. Without ``src`` every process passes the global tensors and keeps its blocks. A
            `Sharded` leaf is moved as by `reshard`.
        specs: A pytree prefix of ``tree``. A leaf whose spec is None stays as it is.
        mesh: By default that of `set_mesh`.
        src: The only global rank that has the tensors, as in `scatter`.

    The result tells the strides of a new tensor, since a process may hold one that lies in another order.

    Communication: forward, none for plain tensors without ``src``; backward, an all-gather of the gradient.

    Raises:
        SpecError, TreeError, MeshError: a leaf does not fit. The error names all leaves that fail.
        ArgumentError: a leaf is no tensor, or is a meta tensor where the ranks need values.

    >>> from fspmd import make_mesh
    >>> device_put({"w": torch.zeros(4, 3)}, P("x"), mesh=make_mesh((2,), ("x",)))
    {'w': Sharded f32[4@x, 3] on mesh(x=2)}
    """
    if mesh is None and isinstance(specs, (Mesh, torch.device)):
        raise SpecError(
            f"device_put got {described(specs)} for specs; write device_put(tree, P('x'), mesh=mesh), where specs are "
            "the axes that cut each dim, and mesh has the devices"
        )
    return put(tree, specs, the_mesh(mesh, "device_put"), src, "device_put")


def put(tree: Any, specs: Any, mesh: Mesh, src: int | None, what: str) -> Any:
    """`device_put`; errors name the function ``what``."""
    return _put_tree(tree, specs, mesh, what) if src is None else _put_from(tree, specs, mesh, src, what)


def scatter(tree: Any, specs: Any, *, src: int, mesh: Mesh | None = None) -> Any:
    """Lay out on a mesh a tree that only the global rank ``src`` has. Each rank receives only its own blocks.

    The other ranks pass None, or a tree of the same structure, whose values are ignored. All ranks pass ``specs``, a
    pytree prefix of the tree. Structure, shapes, dtypes and layouts are compared before data moves.

    Communication: the description of the tree, one all-reduce of a number, then each block from ``src`` to its rank.
    Backward sends the blocks of the gradient to ``src``. No other rank has a gradient.

    Raises:
        SpecError, TreeError, ArgumentError, MeshError: on all ranks alike, a leaf of ``src`` does not fit. The error
            names all leaves that fail.
        ShapeError: on all ranks alike, a rank differs from ``src``. The error names the first such rank and the
            difference.

    >>> from fspmd import make_mesh
    >>> scatter({"w": torch.zeros(5, 3)}, P("x"), src=1, mesh=make_mesh((2,), ("x",)))
    {'w': Sharded f32[5@x, 3] on mesh(x=2)}
    """
    return _put_from(tree, specs, the_mesh(mesh, "scatter"), src, "scatter")


def _put_from(tree: Any, specs: Any, mesh: Mesh, src: int, what: str) -> Any:
    source = source_of(src, mesh, what)
    if mesh.transport != "simulation":
        return scatter_from(tree, specs, source)
    description(tree, specs, source)  # checks the arguments; the one process has the values of all ranks
    return _put_tree(tree, specs, mesh, what)


def _put_tree(tree: Any, specs: Any, mesh: Mesh, what: str) -> Any:
    leaves, treedef = flatten_values(tree)
    partitions = broadcast_prefix(specs, tree, "specs", "tree", f"{what}: specs does not match the tree")
    check_leaves(leaves, partitions, labels(treedef, "tree"), [mesh] * len(leaves), what, (Tensor, TensorSpec))
    if known_values.hear is not None:
        given = zip(leaf_paths(tree, "tree"), leaves, partitions, strict=True)
        _tell_values([row for row in given if row[2] is not None], mesh, what, known_values.hear)
    placed = [
        leaf if leaf is None or partition is None else _put(leaf, partition, mesh)
        for leaf, partition in zip(leaves, partitions, strict=True)
    ]
    return treedef.unflatten(placed)


def _tell_values(
    given: list[tuple[str, Any, P]], mesh: Mesh, what: str, hear: Callable[[Mesh, str, Any], None]
) -> None:
    """Let `known_values.hear` hear of leaves and specs, which must be alike on all processes.

    A `Sharded` that stays as it is does not count: a rank may put these in another order, one by one.
    """
    layouts = [
        known_values.layout_row(label, what, leaf.spec if type(leaf) is Sharded else None, partition)
        for label, leaf, partition in given
        if not (type(leaf) is Sharded and leaf.spec.mesh is mesh and leaf.spec.partition == partition)
    ]
    if layouts:
        known_values.hear_layouts(mesh, what, tuple(layouts))
    for label, leaf, _ in given:
        if type(leaf) is not Sharded:
            hear(mesh, f"{label} of {what}", leaf)


def _put(leaf: Tensor | Sharded | TensorSpec, partition: P, mesh: Mesh) -> Sharded | TensorSpec:
    if isinstance(leaf, TensorSpec):
        return TensorSpec(mesh, partition, leaf.shape, leaf.dtype)
    if isinstance(leaf, Sharded):
        target = TensorSpec(mesh, partition, leaf.shape, leaf.dtype)
        return alike(redistribute(leaf.local, leaf.spec, target), leaf, target)
    spec = TensorSpec(mesh, partition, tuple(leaf.shape), leaf.dtype)
    x = borrowed_blocks(leaf if leaf.is_meta or leaf.device == mesh.device else leaf.to(mesh.device), spec)
    # The block gets its own memory, since an optimizer may write into the global tensor. Empty blocks are copied, too,
    # since they have other strides.
    order = torch.contiguous_format if x.is_contiguous() or not spec.even else torch.preserve_format
    return Sharded(x.clone(memory_format=order), spec)


def device_get(tree: Any) -> Any:
    """The global tensors of a pytree of `Sharded` values, on every rank.

    Plain tensors and other leaves stay as they are. A result shares no memory with its operand.

    Communication: forward, an all-gather per sharded dim, and an all-reduce for a pending sum; backward, none.

    Raises:
        ArgumentError: the call is inside a body.

    >>> from fspmd import make_mesh
    >>> x = device_put(torch.arange(5), P("x"), mesh=make_mesh((4,), ("x",)))
    >>> device_get(x)
    tensor([0, 1, 2, 3, 4])
    """
    check_outside("device_get")
    adopt()
    if not isinstance(tree, Sharded):
        check_keys(optree.tree_structure(tree, none_is_leaf=True))
    return optree.tree_map(_got, tree, none_is_leaf=True)


def _got(x: Any) -> Any:
    if isinstance(x, Sharded):
        return _get(x.local, x.spec)
    refuse_foreign(x, "device_get got")
    return x


def _get(local: Tensor, spec: TensorSpec) -> Tensor:
    x_full = from_blocks(local, spec)
    axes = spec.partition.axes | spec.partition.unreduced
    return x_full if any(spec.mesh.shape[axis] > 1 for axis in axes) else x_full.clone()  # never a view of the block


def from_local(local: Tensor, spec: TensorSpec | P, *, mesh: Mesh | None = None) -> Sharded:
    """Make a `Sharded` from this rank's block. Shapes and dtypes are compared across ranks.

    With a ``P`` the global shape is inferred from all blocks.

    Raises:
        SpecError: the spec does not fit the mesh.
        ArgumentError: ``local`` is no plain tensor.
        ShapeError: on all ranks alike, a block does not fit. The error names the rank.

    >>> from fspmd import make_mesh
    >>> from_local(torch.zeros(2, 3), P(), mesh=make_mesh((4,), ("x",)))
    Sharded f32[2, 3] on mesh(x=4)
    """
    if isinstance(spec, TensorSpec):
        mesh, partition = the_mesh(spec.mesh, "from_local"), spec.partition
    else:
        mesh, partition = the_mesh(mesh, "from_local"), spec
    if wrong := complain(partition, mesh, None):
        raise SpecError(f"from_local: {wrong}")
    if not is_plain(local) or misfit(local):
        if mesh.transport != "simulation":  # the other ranks wait for this rank's shape
            transport_named(mesh.transport).layouts([None], mesh)
        refuse_misfit(local, "from_local got for local")
        raise ArgumentError(f"from_local got {described(local)} for local; expected this rank's block, a tensor")
    inferred = spec_of_blocks(local, partition, mesh, "from_local")
    if isinstance(spec, TensorSpec) and inferred is not spec:
        raise ShapeError(
            f"from_local got the spec {spec!r}, but the blocks of all ranks make {inferred!r}; "
            "pass blocks of its shape, or a P to have the global shape inferred"
        )
    return Sharded(local, inferred)


def from_callback(
    shape: tuple[int, ...], spec: P, fn: Callable[[tuple[slice, ...]], Tensor], *, mesh: Mesh | None = None
) -> Sharded:
    """Make a `Sharded` whose blocks each rank computes: ``fn(index)`` returns the block at a tuple of slices.

    Raises:
        SpecError: the spec does not fit.
        ArgumentError: an argument is wrong, or a block requires grad.
        ShapeError: on all ranks alike, a block has a wrong shape or dtype.

    >>> from fspmd import make_mesh
    >>> whole = torch.arange(6.0)
    >>> device_get(from_callback((6,), P("x"), lambda index: whole[index], mesh=make_mesh((4,), ("x",))))
    tensor([0., 1., 2., 3., 4., 5.])
    """
    mesh = the_mesh(mesh, "from_callback")
    if not callable(fn):
        raise ArgumentError(f"from_callback got {described(fn)} for fn; give it a function of a tuple of slices")
    if not isinstance(shape, (tuple, list)) or not all(type(n) is int and n >= 0 for n in shape):
        raise ArgumentError(f"from_callback got {described(shape)} for shape; give it the global shape, such as (8, 4)")
    if wrong := complain(spec, mesh, len(shape)):
        raise SpecError(f"from_callback: a tensor of shape {tuple(shape)}: {wrong}")
    layout = TensorSpec(mesh, spec, shape, torch.float32)
    simulated = mesh.transport == "simulation"
    block_frame = frame_over(mesh, layout.partition.axes | layout.partition.unreduced if simulated else mesh.axis_names)
    coordinates = list(block_frame.mesh_coordinates())
    if simulated:
        results = [_call_for_block(fn, layout, coordinate) for coordinate in coordinates]
        layouts = [(x.dtype, tuple(x.shape)) if is_plain(x) else None for x in results]
    else:
        results, failure = [None], None
        try:
            results = [_call_for_block(fn, layout, mesh.coordinate() or ())]
        except Exception as error:  # the other ranks wait for the layout of this block
            failure = error
        gathered = transport_named(mesh.transport).layouts([x if is_plain(x) else None for x in results], mesh)
        if failure is not None:
            raise failure
        layouts = [block for (block,) in gathered]
    _check_results(layout, coordinates, layouts)
    blocks = [x.to(mesh.device) for x in results if is_plain(x)]
    local = local_tensor(blocks, block_frame) if simulated else blocks[0]
    return Sharded(local, TensorSpec(mesh, spec, shape, local.dtype))


def _call_for_block(fn: Callable[[tuple[slice, ...]], Tensor], layout: TensorSpec, coordinate: tuple[int, ...]) -> Any:
    spans = zip(layout.offset(coordinate), layout.local_shape(coordinate), strict=True)
    block = fn(tuple(slice(start, start + length) for start, length in spans))
    refuse_misfit(block, "from_callback: the callback returned")
    if is_plain(block) and block.requires_grad:
        raise ArgumentError(
            "from_callback: the callback returned a tensor that requires grad, but no gradient goes back through "
            "from_callback; return block.detach(), or use device_put, which is differentiable"
        )
    return block


def _check_results(
    layout: TensorSpec,
    coordinates: list[tuple[int, ...]],
    blocks: list[tuple[torch.dtype, tuple[int, ...]] | None],
) -> None:
    """Check that every block is a tensor of its shape, and that all have one dtype."""
    for coordinate, block in zip(coordinates, blocks, strict=True):
        expected = layout.local_shape(coordinate)
        if block is None or block[1] != expected:
            given = "no tensor" if block is None else f"a tensor of shape {block[1]}"
            raise ShapeError(
                f"from_callback: at {_shown(layout, coordinate)} the callback returned {given}, but the block of "
                f"{layout!r} has shape {expected} there; of a global tensor return x[index]"
            )
        if blocks[0] is not None and block[0] != blocks[0][0]:
            raise ShapeError(
                f"from_callback: the callback returned {short_dtype(blocks[0][0])} at "
                f"{_shown(layout, coordinates[0])}, but {short_dtype(block[0])} at {_shown(layout, coordinate)}; "
                "return blocks of one dtype"
            )


def _shown(layout: TensorSpec, coordinate: tuple[int, ...]) -> str:
    """A coordinate in an error, ``x=1, y=0``."""
    return ", ".join(f"{axis}={i}" for axis, i in zip(layout.mesh.axis_names, coordinate, strict=True))
