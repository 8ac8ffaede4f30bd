"""Values from one layout to another: `reshard`, `with_spec`, and `explain`, which gives the price."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fspmd.body import check_outside, state, the_mesh
from fspmd.cache import cached
from fspmd.collectives.steps import Handle
from fspmd.errors import ArgumentError, MeshError
from fspmd.meshes.mesh import Mesh, current_mesh, mesh_advice
from fspmd.messages import described
from fspmd.placement.scatter import check_leaves
from fspmd.redistribution.cost import FREE, Price, topology
from fspmd.redistribution.moves import moves
from fspmd.redistribution.redistribute import begun, redistribute, to_blocks
from fspmd.redistribution.routes import Route
from fspmd.sharded import Sharded, alike, is_plain
from fspmd.spec import P, TensorSpec, complain
from fspmd.trees import broadcast_prefix, labels, leaf_paths


def reshard(
    tree: Any,
    specs: Any,
    mesh: Mesh | None = None,
    *,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    wait: bool = True,
) -> Any:
    """Move a pytree of `Sharded` values to other layouts: from any spec to any spec, on their mesh or on another.

    The cheapest sequence of collectives is found once for each pair of layouts; `explain` prints it. Each rank receives
    only elements that it lacks. A plain tensor is a global value that every process has; it is cut without
    communication. Results may share memory with their operands.

    Communication: forward, the collectives of the route; backward, their transposes: gather ↔ slice, all-reduce ↔
    nothing, reduce-scatter ↔ gather, all-to-all ↔ all-to-all.

    Args:
        tree: A pytree of `Sharded` values and plain tensors.
        specs: A pytree prefix of ``tree``. A leaf whose spec is None stays as it is.
        mesh: Another mesh for the values. It may have other axes, another order of ranks, or other ranks. The members
            of both meshes call `reshard` together. A process outside one of them has an empty block there.
        forward_dtype: Floating values are cast to this dtype before they move. The result has it.
        backward_dtype: Gradients are cast to this dtype before they move, by default the operand's. They arrive in the
            operand's dtype. For example float32 weights are gathered in bfloat16 while their gradients are summed in
            float32. As in ``DTensor.redistribute``.
        wait: False returns a handle while the last collective runs; ``handle.wait()`` returns the result.

    Raises:
        SpecError, TreeError, ArgumentError, MeshError: a leaf does not fit; the error names all of them. Or the call is
            inside a body, or the two dtypes differ between meshes.

    >>> from fspmd import device_put, make_mesh
    >>> line, grid = make_mesh((4,), ("x",)), make_mesh((2, 2), ("a", "b"))
    >>> x = device_put(torch.arange(8.0), P("x"), mesh=line)
    >>> reshard(x, P()), reshard(x, P(("a", "b")), grid)
    (Sharded f32[8] on mesh(x=4), Sharded f32[8@(a,b)] on mesh(a=2, b=2))
    """
    if wait is True and forward_dtype is None and backward_dtype is None:
        return _laid_out(tree, specs, mesh, "reshard")
    treedef, pending = _begin(tree, specs, mesh, "reshard", _options(forward_dtype, backward_dtype, wait))
    operands = [leaf.local if isinstance(leaf, Sharded) else leaf for leaf in optree.tree_leaves(tree, _is_value)]

    def finish() -> Any:
        return treedef.unflatten(landed() for landed in pending)

    return finish() if wait else Handle(finish, operands)


class _MoveOptions(NamedTuple):
    """The dtypes of values and gradients while they move (None: their own), and whether the call waits."""

    forward: torch.dtype | None
    backward: torch.dtype | None
    wait: bool


def _options(forward: Any, backward: Any, wait: Any) -> _MoveOptions:
    for name, dtype in (("forward_dtype", forward), ("backward_dtype", backward)):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ArgumentError(
                f"reshard got {described(dtype)} for {name}; expected a floating dtype such as torch.bfloat16"
            )
    if wait is not True and wait is not False:
        raise ArgumentError(f"reshard got {described(wait)} for wait; expected True, or False for a handle")
    return _MoveOptions(forward, backward, wait)


def with_spec(tree: Any, specs: Any) -> Any:
    """Set the layouts of intermediate values of a function, like ``jax.lax.with_sharding_constraint``.

    `Sharded` leaves are moved as by `reshard`. A plain tensor is cut for the mesh of `set_mesh`. Without a mesh it
    stays as it is, so that a function written for a mesh also runs on plain tensors.

    Communication: that of `reshard`.

    Raises:
        SpecError, TreeError, ArgumentError, MeshError: as `reshard`.

    >>> from fspmd import device_put, make_mesh
    >>> def layer(x, w):
    ...     return with_spec(x @ w, P("x"))
    >>> layer(device_put(torch.ones(8, 4), P("x"), mesh=make_mesh((4,), ("x",))), torch.ones(4, 2))
    Sharded f32[8@x, 2] on mesh(x=4)
    >>> layer(torch.ones(8, 4), torch.ones(4, 2)).shape
    torch.Size([8, 2])
    """
    return _laid_out(tree, specs, None, "with_spec")


def _laid_out(tree: Any, specs: Any, mesh: Mesh | None, what: str) -> Any:
    """The tree in other layouts, with a fast path for one `Sharded` and one spec."""
    if type(tree) is Sharded and type(specs) is P and mesh is None and state.body is None and _replacement is None:
        target = _target(tree.spec, specs)
        if target is not None and target.mesh.coordinate() is not None:
            return alike(redistribute(tree.local, tree.spec, target), tree, target)
    treedef, pending = _begin(tree, specs, mesh, what, None)
    return treedef.unflatten(landed() for landed in pending)


def _begin(
    tree: Any, specs: Any, mesh: Mesh | None, what: str, options: _MoveOptions | None
) -> tuple[optree.PyTreeSpec, list[Callable[[], Any]]]:
    """Begin to move all leaves. Return the treedef, and for each leaf a function that returns it when it has landed."""
    leaves, treedef = optree.tree_flatten(tree, is_leaf=_is_value, none_is_leaf=True)
    partitions, meshes = _checked(tree, leaves, specs, mesh, what)
    pending = [
        functools.partial(_same, leaf)
        if leaf is None or partition is None or leaf_mesh is None
        else _begun(leaf, partition, leaf_mesh, options)
        for leaf, partition, leaf_mesh in zip(leaves, partitions, meshes, strict=True)
    ]
    return treedef, pending


def _same(x: Any) -> Any:
    return x


def _begun(leaf: Tensor | Sharded, partition: P, mesh: Mesh, options: _MoveOptions | None) -> Callable[[], Sharded]:
    """Begin to move a leaf. Without options, and if it is no floating `Sharded`, it is moved at once."""
    if options is not None and type(leaf) is not Sharded and options.forward is not None and leaf.is_floating_point():
        leaf = leaf.to(options.forward)
    if (
        options is None
        or _replacement is not None
        or type(leaf) is not Sharded
        or not leaf.spec.dtype.is_floating_point
    ):
        return functools.partial(_same, _moved(leaf, partition, mesh))
    source = leaf.spec
    forward = options.forward or source.dtype
    backward = options.backward or source.dtype
    if source.mesh != mesh and backward != forward:
        raise ArgumentError(
            f"reshard to another mesh got forward_dtype={forward} and backward_dtype={backward}, which must be equal "
            "there; give the same backward_dtype, or move the value first, and reshard it on its new mesh"
        )
    target = TensorSpec(mesh, partition, source.shape, forward)
    landed = begun(leaf.local, source, target, forward, backward, options.wait)
    return lambda: alike(landed(), leaf, target)


_replacement: Callable[[Sharded, TensorSpec], Sharded] | None = None


@contextmanager
def with_reshard_as(move: Callable[[Sharded, TensorSpec], Sharded]) -> Iterator[None]:
    """Within the context ``move(x, target)`` moves the `Sharded` leaves of `reshard` and `with_spec`."""
    global _replacement
    _replacement = move
    try:
        yield
    finally:
        _replacement = None


@cached(maxsize=8192)
def _target(source: TensorSpec, partition: P) -> TensorSpec | None:
    """The layout of the same tensor with another partition; None where this does not fit."""
    return None if complain(partition, source.mesh, source.ndim) else source.with_partition(partition)


def _moved(leaf: Tensor | Sharded, partition: P, mesh: Mesh) -> Sharded:
    target = TensorSpec(mesh, partition, tuple(leaf.shape), leaf.dtype)
    if isinstance(leaf, Sharded):
        if _replacement is not None:
            return _replacement(leaf, target)
        return alike(redistribute(leaf.local, leaf.spec, target), leaf, target)
    return Sharded(to_blocks(leaf.to(mesh.device), target), target)


def _checked(tree: Any, leaves: list[Any], specs: Any, mesh: Mesh | None, what: str) -> tuple[list[Any], list[Any]]:
    """The partition and the mesh of each leaf, checked. Without a mesh a plain tensor stays as it is."""
    check_outside(what)
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ArgumentError(f"{what} got {described(mesh)} for mesh; make one: {mesh_advice(mesh)}")
    partitions = broadcast_prefix(specs, tree, "specs", "tree", f"{what}: specs does not match the tree")
    meshes = [_mesh_of(leaf, partition, mesh, what) for leaf, partition in zip(leaves, partitions, strict=True)]
    names = labels(optree.tree_structure(tree, none_is_leaf=True), "tree")
    check_leaves(leaves, partitions, names, meshes, what)
    for leaf, target in zip(leaves, meshes, strict=True):
        if target is None:
            continue
        source = leaf.spec.mesh if isinstance(leaf, Sharded) else target
        if target.coordinate() is None and source.coordinate() is None:
            raise MeshError(
                f"{what}: this process is a member neither of {source!r} nor of {target!r}; call it on members only: "
                "if mesh.coordinate() is not None: ..."
            )
    return partitions, meshes


def _mesh_of(leaf: Any, partition: P | None, mesh: Mesh | None, what: str) -> Mesh | None:
    """The mesh that a leaf moves to; None where it stays as it is."""
    if partition is None or mesh is not None:
        return mesh
    if isinstance(leaf, Sharded):
        return leaf.spec.mesh
    if not is_plain(leaf) or (what == "with_spec" and current_mesh() is None):
        return None
    return the_mesh(None, what)


def _is_value(x: Any) -> bool:
    return isinstance(x, (Sharded, TensorSpec))


@dataclass(frozen=True, slots=True)
class Explanation:
    """The routes of a redistribution: for each leaf its name and `Route`. Printed, it shows the steps."""

    routes: tuple[tuple[str, Route], ...]

    @property
    def price(self) -> Price:
        """The price of all leaves, moved one after the other."""
        return sum((route.price for _, route in self.routes), FREE)

    def __str__(self) -> str:
        if len(self.routes) == 1:
            return str(self.routes[0][1])
        return "\n".join([*(f"{label}: {route}" for label, route in self.routes), f"all: {self.price}"])

    __repr__ = __str__


def explain(tree: Any, specs: Any, mesh: Mesh | None = None) -> Explanation:
    """The steps in which `reshard` would move a pytree of `Sharded` or `TensorSpec` leaves. Nothing moves.

    Each step has the bytes that a rank sends, its time in µs, and the bytes that a rank holds, by the figures of
    `set_topology`. ``price`` and ``routes`` of the result have them as numbers.

    Raises:
        SpecError, TreeError, ArgumentError, MeshError: as `reshard`. A plain tensor is an error, since it has no
            layout.

    >>> from fspmd import device_put, make_mesh
    >>> x = device_put(torch.zeros(512, 512), P("x"), mesh=make_mesh((4,), ("x",)))
    >>> explain(x, P(None, "x"))
    f32[512@x, 512] -> f32[512, 512@x] on mesh(x=4)
      1. all_to_all over 'x' -> f32[512, 512@x]: 196,608 B, 13.6 µs, holds 524,288 B
    each rank sends 196,608 B in 13.6 µs and holds 524,288 B at most
    """
    leaves, _ = optree.tree_flatten(tree, is_leaf=_is_value, none_is_leaf=True)
    paths = leaf_paths(tree, "tree")
    values = [Sharded(_EMPTY, leaf) if isinstance(leaf, TensorSpec) else leaf for leaf in leaves]
    for label, leaf in zip(paths, values, strict=True):
        if leaf is not None and not isinstance(leaf, Sharded):
            raise ArgumentError(f"explain: {label} is {described(leaf)}; give it a Sharded, or a TensorSpec")
    partitions, meshes = _checked(tree, values, specs, mesh, "explain")
    routes = []
    for label, x, partition, target_mesh in zip(paths, values, partitions, meshes, strict=True):
        if x is not None and partition is not None:
            target = TensorSpec(target_mesh, partition, x.shape, x.dtype)
            has_gradient = x.requires_grad and torch.is_grad_enabled()
            routes.append((label, moves(x.spec, target, (), topology(), has_gradient).route))
    return Explanation(tuple(routes))


_EMPTY = torch.empty(0)
