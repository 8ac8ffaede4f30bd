"""Values from one layout to another: `reshard`, `with_spec`, and `explain`, which tells what that costs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fspmd.body import state
from fspmd.collectives.steps import Handle
from fspmd.errors import ArgumentError, MeshError
from fspmd.meshes.mesh import Mesh, current_mesh, mesh_advice
from fspmd.messages import described
from fspmd.outside import check_outside, the_mesh
from fspmd.placement.scatter import check_leaves
from fspmd.redistribution.cost import FREE, Price, topology
from fspmd.redistribution.moves import moves
from fspmd.redistribution.redistribute import begun, redistribute, to_blocks
from fspmd.redistribution.routes import Route
from fspmd.sharded import Sharded, alike, is_plain
from fspmd.spec import P, TensorSpec, complain
from fspmd.trees import broadcast_prefix, leaf_paths


def reshard(
    tree: Any,
    specs: Any,
    mesh: Mesh | None = None,
    *,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    wait: bool = True,
) -> Any:
    """Move a pytree of `Sharded` to other layouts: any spec to any spec, on their own mesh or on another.

    ``specs`` is a pytree prefix of ``tree``; where it is None a leaf stays as it is. The cheapest sequence of
    collectives is found once for each pair of layouts (`explain` prints it); each rank receives what it lacks. With
    ``mesh`` values move to a mesh of other axes, another order of ranks, or other ranks: the members of both meshes
    call it together, and a process outside one of them has an empty block there. A plain tensor is a global value
    that every process has, cut without communication. Results may share memory with their operands.

    Communication: forward that of the plan, backward its transpose step by step: gather ↔ slice, all-reduce ↔
    nothing, reduce-scatter ↔ gather, all-to-all ↔ all-to-all.

    Args:
        forward_dtype: What floating values are cast to before they move; the result has that dtype.
        backward_dtype: What gradients are cast to before they go back, by default the operand's; they arrive in the
            operand's. So float32 weights are gathered in bfloat16 and their gradients added up in float32, or the
            other way round. As in ``DTensor.redistribute``.
        wait: False gives a handle while the last collective is under way: ``handle.wait()`` is the result.

    Raises:
        SpecError, TreeError, ArgumentError, MeshError: naming every leaf that fails; or inside a body;
            two dtypes for the two ways from one mesh to another.

    >>> from fspmd import device_put, make_mesh
    >>> line, grid = make_mesh((4,), ("x",)), make_mesh((2, 2), ("a", "b"))
    >>> x = device_put(torch.arange(8.0), P("x"), mesh=line)
    >>> reshard(x, P()), reshard(x, P(("a", "b")), grid)
    (Sharded f32[8] on mesh(x=4), Sharded f32[8@(a,b)] on mesh(a=2, b=2))
    """
    if wait is True and forward_dtype is None and backward_dtype is None:
        return _laid_out(tree, specs, mesh, "reshard")
    treedef, waiting = _each(tree, specs, mesh, "reshard", _how(forward_dtype, backward_dtype, wait))

    def finish() -> Any:
        return treedef.unflatten(landed() for landed in waiting)

    return finish() if wait else Handle(finish)


class _How(NamedTuple):
    """How values move: dtypes on the way forward and back, None for their own, and whether that is waited for."""

    forward: torch.dtype | None
    backward: torch.dtype | None
    wait: bool


def _how(forward: Any, backward: Any, wait: Any) -> _How:
    for name, dtype in (("forward_dtype", forward), ("backward_dtype", backward)):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ArgumentError(f"reshard got {described(dtype)} for {name}; expected one such as torch.bfloat16")
    if wait is not True and wait is not False:
        raise ArgumentError(f"reshard got {described(wait)} for wait; expected True, or False for a handle")
    return _How(forward, backward, wait)


def with_spec(tree: Any, specs: Any) -> Any:
    """Say inside a function how intermediate values lie, like ``jax.lax.with_sharding_constraint``.

    `Sharded` leaves are moved as by `reshard`. A plain tensor is cut for the mesh that `set_mesh` has set; where none
    is, it stays as it is, so that a function written for a mesh runs on plain tensors without one, too.

    Raises:
        As `reshard`.

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
    if type(tree) is Sharded and type(specs) is P and mesh is None and state.body is None and _told is None:
        target = _target(tree.spec, specs)
        if target is not None and target.mesh.coordinate() is not None:
            return alike(redistribute(tree.local, tree.spec, target), tree, target)
    treedef, waiting = _each(tree, specs, mesh, what, None)
    return treedef.unflatten(landed() for landed in waiting)


def _each(
    tree: Any, specs: Any, mesh: Mesh | None, what: str, how: _How | None
) -> tuple[optree.PyTreeSpec, list[Callable[[], Any]]]:
    """For each leaf what gives it as it is to lie; all have begun to move."""
    leaves, treedef = optree.tree_flatten(tree, is_leaf=_is_value, none_is_leaf=True)
    partitions, meshes = _checked(tree, leaves, specs, mesh, what)
    waiting = [
        functools.partial(_same, leaf)
        if leaf is None or partition is None or on is None
        else _begun(leaf, partition, on, how)
        for leaf, partition, on in zip(leaves, partitions, meshes, strict=True)
    ]
    return treedef, waiting


def _same(x: Any) -> Any:
    return x


def _begun(leaf: Tensor | Sharded, partition: P, mesh: Mesh, how: _How | None) -> Callable[[], Sharded]:
    """A leaf on its way, as ``how`` says: None, or of what is no floating `Sharded`, at once."""
    if how is not None and type(leaf) is not Sharded and how.forward is not None and leaf.is_floating_point():
        leaf = leaf.to(how.forward)
    if how is None or _told is not None or type(leaf) is not Sharded or not leaf.spec.dtype.is_floating_point:
        return functools.partial(_same, _moved(leaf, partition, mesh))
    source = leaf.spec
    forward = how.forward or source.dtype
    backward = how.backward or source.dtype
    if source.mesh != mesh and backward != forward:
        raise ArgumentError(
            f"reshard got another mesh, {forward} for the way forward and {backward} for the way back; between meshes "
            "both are one: give the same backward_dtype, or move the value first, and reshard it there"
        )
    target = TensorSpec(mesh, partition, source.shape, forward)
    landed = begun(leaf.local, source, target, forward, backward, how.wait)
    return lambda: alike(landed(), leaf, target)


_told: Callable[[Sharded, TensorSpec], Sharded] | None = None


@contextmanager
def with_reshard_as(told: Callable[[Sharded, TensorSpec], Sharded]) -> Iterator[None]:
    """While the block runs, ``told`` has the `Sharded` that are to lie in some way, and gives what they become."""
    global _told
    _told = told
    try:
        yield
    finally:
        _told = None


@functools.lru_cache(maxsize=8192)
def _target(source: TensorSpec, partition: P) -> TensorSpec | None:
    """The same tensor under another partition, None where it does not fit."""
    return None if complain(partition, source.mesh, source.ndim) else source.with_partition(partition)


def _moved(leaf: Tensor | Sharded, partition: P, mesh: Mesh) -> Sharded:
    target = TensorSpec(mesh, partition, tuple(leaf.shape), leaf.dtype)
    if isinstance(leaf, Sharded):
        return _told(leaf, target) if _told else alike(redistribute(leaf.local, leaf.spec, target), leaf, target)
    return Sharded(to_blocks(leaf.to(mesh.device), target), target)


def _checked(tree: Any, leaves: list[Any], specs: Any, mesh: Mesh | None, what: str) -> tuple[list[Any], list[Any]]:
    """For each leaf where it is to lie: its partition, and its mesh (None: a plain tensor stays as it is)."""
    check_outside(what)
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ArgumentError(f"{what} got {described(mesh)} for mesh; make one: {mesh_advice(mesh)}")
    partitions = broadcast_prefix(specs, tree, "specs", "tree", f"{what}: specs does not match the tree")
    meshes = [_mesh_of(leaf, partition, mesh, what) for leaf, partition in zip(leaves, partitions, strict=True)]
    check_leaves(leaves, partitions, leaf_paths(tree, "tree"), meshes, what)
    for leaf, on in zip(leaves, meshes, strict=True):
        if on is None:
            continue
        held = leaf.spec.mesh if isinstance(leaf, Sharded) else on
        if on.coordinate() is None and held.coordinate() is None:
            raise MeshError(
                f"{what}: this process is a member neither of {held!r} nor of {on!r}; call it on members only: "
                "if mesh.coordinate() is not None: ..."
            )
    return partitions, meshes


def _mesh_of(leaf: Any, partition: P | None, mesh: Mesh | None, what: str) -> Mesh | None:
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
    """What a redistribution does: for each leaf its name and `Route`. Printing it shows the steps."""

    routes: tuple[tuple[str, Route], ...]

    @property
    def price(self) -> Price:
        """Of all leaves, one after the other."""
        return sum((way.price for _, way in self.routes), FREE)

    def __str__(self) -> str:
        if len(self.routes) == 1:
            return str(self.routes[0][1])
        return "\n".join([*(f"{label}: {way}" for label, way in self.routes), f"all: {self.price}"])

    __repr__ = __str__


def explain(tree: Any, specs: Any, mesh: Mesh | None = None) -> Explanation:
    """What `reshard` would do with a pytree of `Sharded` or `TensorSpec`, step by step; nothing moves.

    Each step with the bytes that a rank sends, its time in µs, and the bytes that a rank holds, by the figures of
    `set_topology`. The result's ``price`` and ``routes`` have the same as numbers.

    Raises:
        As `reshard`; of a plain tensor, too, which has no layout.

    >>> from fspmd import device_put, make_mesh
    >>> x = device_put(torch.zeros(512, 512), P("x"), mesh=make_mesh((4,), ("x",)))
    >>> explain(x, P(None, "x"))
    f32[512@x, 512] -> f32[512, 512@x] on mesh(x=4)
      1. all_to_all over 'x' -> f32[512, 512@x]: 196,608 B, 13.6 µs, holds 524,288 B
    each rank sends 196,608 B in 13.6 µs and holds 524,288 B at most
    """
    leaves, _ = optree.tree_flatten(tree, is_leaf=_is_value, none_is_leaf=True)
    labels = leaf_paths(tree, "tree")
    values = [Sharded(_NOTHING, leaf) if isinstance(leaf, TensorSpec) else leaf for leaf in leaves]
    for label, leaf in zip(labels, values, strict=True):
        if leaf is not None and not isinstance(leaf, Sharded):
            raise ArgumentError(f"explain: {label} is {described(leaf)}; give it a Sharded, or a TensorSpec")
    partitions, meshes = _checked(tree, values, specs, mesh, "explain")
    follows = torch.is_grad_enabled()
    return Explanation(
        tuple(
            (label, moves(x.spec, target, (), topology(), x.requires_grad and follows).route)
            for label, x, partition, on in zip(labels, values, partitions, meshes, strict=True)
            if x is not None and partition is not None
            for target in [TensorSpec(on, partition, x.shape, x.dtype)]
        )
    )


_NOTHING = torch.empty(0)
