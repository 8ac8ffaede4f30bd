"""Putting values that one rank holds on a mesh: each rank is sent its own blocks, and its gradients are sent back."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.errors import ArgumentError, FspmdError, MeshError, SpecError, TreeError
from fspmd.mesh import Mesh
from fspmd.messages import Failure, described, refuse
from fspmd.sharded import Sharded, is_sharded
from fspmd.spec import TensorSpec, complain
from fspmd.transport import transport_of
from fspmd.transport.local_tensor import LocalTensor
from fspmd.trees import broadcast_prefix, leaf_paths
from fspmd.watch import announce


@dataclass(frozen=True, slots=True)
class Route:
    """How the blocks of one tensor go from the source to every rank, and their gradients back."""

    spec: TensorSpec
    source: int  # position of the source among the ranks of the mesh
    place: int  # position of this rank
    device: torch.device  # of the source's tensor

    @property
    def at_source(self) -> bool:
        """True on the rank that holds the whole tensor."""
        return self.place == self.source

    def coordinate(self, position: int) -> tuple[int, ...]:
        """The mesh coordinate of a position."""
        found = []
        for size in reversed(tuple(self.spec.mesh.shape.values())):
            position, index = divmod(position, size)
            found.append(index)
        return tuple(reversed(found))

    def window(self, position: int) -> tuple[slice, ...]:
        """Where the block of a position lies in the whole tensor."""
        at = self.coordinate(position)
        spans = zip(self.spec.offset(at), self.spec.local_shape(at), strict=True)
        return tuple(slice(start, start + length) for start, length in spans)

    def shape(self, position: int) -> tuple[int, ...]:
        """The shape of a position's block."""
        return self.spec.local_shape(self.coordinate(position))

    def holds(self, position: int) -> bool:
        """False where an unreduced value's pending sum has zero: everywhere but at the first rank."""
        return self._first(position, self.spec.partition.unreduced)

    def answers(self, position: int) -> bool:
        """Whether the position's gradient is wanted: of equal ones the first, of a pending sum every term."""
        partition = self.spec.partition
        return self._first(position, frozenset(self.spec.mesh.axis_names) - partition.axes - partition.reduced)

    def _first(self, position: int, axes: frozenset[str]) -> bool:
        return all(
            index == 0
            for axis, index in zip(self.spec.mesh.axis_names, self.coordinate(position), strict=True)
            if axis in axes
        )


def check_leaves(
    leaves: list[Any], partitions: list[Any], labels: list[str], meshes: Sequence[Mesh | None], what: str
) -> None:
    """Every leaf a tensor, every spec fitting it and its mesh, where it has one; all failures in one message."""
    failures = []
    for leaf, partition, label, mesh in zip(leaves, partitions, labels, meshes, strict=True):
        if leaf is None or partition is None:
            continue
        if not isinstance(leaf, (Tensor, Sharded)):
            failures.append(Failure(f"{label} is {described(leaf)}; {_as_tensor(leaf)}", ArgumentError))
        elif type(leaf) is LocalTensor:
            text = f"{label} holds the blocks of all simulated ranks: it is x.local of a Sharded, or comes from a body"
            failures.append(Failure(text, ArgumentError, "pass the Sharded itself, or a global tensor"))
        elif mesh is not None and (wrong := complain(partition, mesh, leaf.ndim)):
            failures.append(Failure(f"{label} of shape {tuple(leaf.shape)}: {wrong}", SpecError))
    if failures:
        refuse(f"{what}: the tree does not fit its specs", failures)


def _as_tensor(leaf: Any) -> str:
    if isinstance(leaf, (int, float, complex)):
        return f"write torch.tensor({leaf!r}), or give it None in specs to leave it as it is"
    if type(leaf).__name__ == "ndarray":
        return "write torch.from_numpy(array)"
    if isinstance(leaf, torch.nn.Module):
        return "write dict(module.named_parameters())"
    if isinstance(leaf, Iterator):
        return "write list(...)"
    return "give it None in specs to leave it as it is"


def sends_from(src: Any, tree: Any, mesh: Mesh) -> bool:
    """Whether blocks must be sent from the global rank ``src``: in a simulation the tensors are cut.

    Raises:
        MeshError, ArgumentError: ``src`` is no rank of the mesh, or holds no tensors.
    """
    position_of(mesh, src, "device_put")
    if mesh.transport == "simulation":
        _check_held(tree, src)
        return False
    return True


def scatter_from(tree: Any, specs: Any, mesh: Mesh, src: int) -> Any:
    """`device_put` of what the global rank ``src`` alone holds; the trees that other ranks pass are not looked at.

    The structure, shapes and dtypes are broadcast, then each rank is sent its own blocks: no rank but ``src`` ever
    holds a whole tensor. Backward sends the blocks' gradients back to ``src``.

    Raises:
        SpecError, TreeError, ArgumentError: of the tree and specs that ``src`` passed, on all ranks alike.
    """
    position = position_of(mesh, src, "device_put")
    here = mesh.coordinate()
    assert here is not None  # device_put is for members
    place = _row_major(mesh, here)
    leaves: list[Any] = []
    message = b""
    if place == position:
        try:
            leaves, content = _describe(tree, specs, mesh, src)
        except FspmdError as error:
            content = error
        message = pickle.dumps(content)
    told = pickle.loads(transport_of(mesh).tell(message, mesh, position))
    if isinstance(told, FspmdError):
        raise told
    treedef, rows = told
    placed = [
        _place(row, leaves[i] if place == position else None, mesh, position, place) for i, row in enumerate(rows)
    ]
    return treedef.unflatten(placed)


def position_of(mesh: Mesh, src: Any, what: str) -> int:
    """The place of a global rank on the mesh, row-major; raises `MeshError` where it has none."""
    try:
        rank = operator.index(src)
    except TypeError:
        raise ArgumentError(f"{what} got src={src!r} of type {type(src).__name__}; expected a global rank") from None
    at = mesh.coordinate(rank) if rank >= 0 else None
    if at is None:
        raise MeshError(f"{what} got src={rank}, which is no rank of {mesh!r}: its ranks are {mesh.ranks!r}")
    return _row_major(mesh, at)


def _row_major(mesh: Mesh, at: tuple[int, ...]) -> int:
    position = 0
    for index, size in zip(at, mesh.shape.values(), strict=True):
        position = position * size + index
    return position


def _check_held(tree: Any, src: int) -> None:
    if tree is None:
        raise ArgumentError(
            f"device_put got src={src} and the tree None on that rank; rank {src} passes the tensors, the others None"
        )


def _describe(tree: Any, specs: Any, mesh: Mesh, src: int) -> tuple[list[Any], Any]:
    """The leaves on the source, and all that the other ranks need to know of them."""
    _check_held(tree, src)
    leaves, treedef = optree.tree_flatten(tree, is_leaf=is_sharded, none_is_leaf=True)
    partitions = broadcast_prefix(specs, tree, "specs", "tree", "device_put: specs does not match the tree")
    if any(isinstance(leaf, Sharded) for leaf in leaves):
        raise ArgumentError(f"device_put got src={src} and a Sharded, which all ranks hold already; leave out src")
    check_leaves(leaves, partitions, leaf_paths(tree, "tree", is_sharded), [mesh] * len(leaves), "device_put")
    rows: list[Any] = []
    for leaf, partition in zip(leaves, partitions, strict=True):
        if leaf is None or partition is None:
            rows.append(("static", leaf))
        else:
            follow = leaf.requires_grad and torch.is_grad_enabled()
            rows.append(("tensor", partition, tuple(leaf.shape), leaf.dtype, follow))
    content = (treedef, rows)
    try:
        pickle.loads(pickle.dumps(content))
    except Exception as error:
        raise TreeError(
            f"device_put with src={src} tells the other ranks the structure of the tree and its static leaves, which "
            f"cannot be pickled: {error}; use containers and static leaves that can"
        ) from None
    return leaves, content


def _place(row: Any, leaf: Any, mesh: Mesh, position: int, place: int) -> Any:
    if row[0] == "static":
        return row[1] if leaf is None else leaf
    _, partition, shape, dtype, follow = row
    spec = TensorSpec(mesh, partition, shape, dtype)
    route = Route(spec, position, place, leaf.device if isinstance(leaf, Tensor) else mesh.device)
    whole = leaf if isinstance(leaf, Tensor) else torch.empty(0, dtype=dtype, device=mesh.device)
    if not isinstance(leaf, Tensor):
        whole.requires_grad_(follow)
    return Sharded(_Scatter.apply(whole, route), spec)


def scatter(whole: Tensor, route: Route) -> Tensor:
    """This rank's block of what the source holds; ``whole`` is looked at on the source only."""
    mesh, dtype = route.spec.mesh, route.spec.dtype
    sends: list[tuple[int, Tensor]] = []
    receives: list[tuple[int, Tensor]] = []
    if route.at_source:
        others = (i for i in range(mesh.size) if i != route.place and route.holds(i))
        sends = [(i, whole[route.window(i)].to(mesh.device).contiguous()) for i in others]
    if not route.holds(route.place):
        mine = torch.zeros(route.shape(route.place), dtype=dtype, device=mesh.device)
    elif route.at_source:
        mine = whole[route.window(route.place)].to(mesh.device, copy=True, memory_format=torch.contiguous_format)
    else:
        mine = torch.empty(route.shape(route.place), dtype=dtype, device=mesh.device)
        receives = [(route.source, mine)]
    messages = [*sends, *receives]
    announce("scatter", mesh, mine, len(messages), sum(part.nbytes for _, part in messages))
    transport_of(mesh).transfer(sends, receives, mesh).wait()
    return mine


def collect(block: Tensor, route: Route) -> Tensor:
    """The transpose of `scatter`: the whole tensor on the source, of size zero elsewhere."""
    spec, count = route.spec, route.spec.mesh.size
    if not route.at_source:
        sends = [(route.source, block.contiguous())] if route.answers(route.place) else []
        announce("collect", spec.mesh, block, len(sends), sum(part.nbytes for _, part in sends))
        transport_of(spec.mesh).transfer(sends, [], spec.mesh).wait()
        return block.new_empty(0)
    senders = [i for i in range(count) if i != route.place and route.answers(i)]
    received = [(i, block.new_empty(route.shape(i))) for i in senders]
    announce("collect", spec.mesh, block, len(received), sum(part.nbytes for _, part in received))
    transport_of(spec.mesh).transfer([], received, spec.mesh).wait()
    whole = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.mesh.device)
    mine = [(route.place, block)] if route.answers(route.place) else []
    for position, part in sorted([*mine, *received], key=lambda pair: pair[0]):
        whole[route.window(position)] += part
    return whole.to(route.device)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return scatter(whole, route)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _Collect.apply(g, ctx.route), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return collect(block, route)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _Scatter.apply(g, ctx.route), None
