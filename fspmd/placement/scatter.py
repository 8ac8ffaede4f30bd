"""Values of one rank, laid out on a mesh: each rank is sent its own blocks, and sends their gradients back."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import optree
import torch
from torch import Tensor

from fspmd.errors import ArgumentError, SpecError, TreeError
from fspmd.foreign import misfit
from fspmd.inspection.watch import announce
from fspmd.meshes.axes import place_at
from fspmd.meshes.mesh import Mesh
from fspmd.messages import Failure, described, holds_all_ranks, refuse
from fspmd.placement.broadcast import Source
from fspmd.sharded import Sharded, is_plain
from fspmd.spec import P, TensorSpec, complain, describe
from fspmd.transport import transport_named
from fspmd.transport.local_tensor import is_simulated
from fspmd.trees import broadcast_prefix, flatten_values, leaf_paths, tree_text


@dataclass(frozen=True, slots=True)
class ScatterRoute:
    """The blocks of one tensor on the way from the source to every rank, and their gradients on the way back.

    A position is an index among the ranks of the mesh, row-major.
    """

    spec: TensorSpec
    source: int  # the position of the source
    place: int  # the position of this rank
    device: torch.device  # the device of the source's tensor

    @property
    def at_source(self) -> bool:
        """Whether this rank is the source, which has the global tensor."""
        return self.place == self.source

    def coordinate(self, position: int) -> tuple[int, ...]:
        """The mesh coordinate of a position."""
        return place_at(position, tuple(self.spec.mesh.shape.values()))

    def window(self, position: int) -> tuple[slice, ...]:
        """The slices of the global tensor that are the block of a position."""
        coordinate = self.coordinate(position)
        spans = zip(self.spec.offset(coordinate), self.spec.local_shape(coordinate), strict=True)
        return tuple(slice(start, start + length) for start, length in spans)

    def shape(self, position: int) -> tuple[int, ...]:
        """The shape of a position's block."""
        return self.spec.local_shape(self.coordinate(position))

    def holds(self, position: int) -> bool:
        """Whether the position gets values. Of a pending sum only the first rank does; the others have zeros."""
        return not any(self._along(position, self.spec.partition.unreduced))

    def answers(self, position: int) -> bool:
        """Whether the position sends its gradient. Of equal gradients one is sent, of a pending sum every term."""
        partition = self.spec.partition
        equal = frozenset(self.spec.mesh.axis_names) - partition.axes - partition.reduced
        return self._along(position, equal) == self._along(self.source, equal)

    def _along(self, position: int, axes: frozenset[str]) -> tuple[int, ...]:
        coordinate = zip(self.spec.mesh.axis_names, self.coordinate(position), strict=True)
        return tuple(index for axis, index in coordinate if axis in axes)


def check_leaves(
    leaves: list[Any],
    partitions: list[Any],
    labels: Sequence[object],
    meshes: Sequence[Mesh | None],
    what: str,
    types: tuple[Any, ...] = (Tensor, Sharded),
) -> None:
    """Check that every leaf is a tensor, and that its spec fits it and its mesh, if it has one.

    One error has all failures. A leaf without a spec is not checked.
    """
    failures = []
    for leaf, partition, label, mesh in zip(leaves, partitions, labels, meshes, strict=True):
        if leaf is None or partition is None:
            continue
        if not isinstance(leaf, types):
            failures.append(Failure(f"{label} is {described(leaf)}; {_as_tensor(leaf)}", ArgumentError))
        elif problem := misfit(leaf):
            failures.append(Failure(f"{label} is {problem[0]}", ArgumentError, problem[1]))
        elif lacks_values(leaf, mesh):
            failures.append(Failure(f"{label} is on the meta device, which has no values", ArgumentError, PLANNED))
        elif is_simulated(leaf):
            failures.append(holds_all_ranks(str(label)))
        elif mesh is not None and (wrong := complain(partition, mesh, leaf.ndim)):
            failures.append(Failure(f"{label} of shape {tuple(leaf.shape)}: {wrong}", SpecError))
    if failures:
        refuse(f"{what}: the tree does not fit its specs", failures)


PLANNED: Final = "to plan without memory write make_mesh(..., transport='abstract'); for values, init_sharded"


def lacks_values(leaf: Any, mesh: Mesh | None) -> bool:
    """Whether a leaf is on the meta device, and the ranks of its mesh need values."""
    if mesh is None or mesh.transport == "abstract" or isinstance(leaf, Sharded):
        return False
    return is_plain(leaf) and leaf.is_meta


def _as_tensor(leaf: Any) -> str:
    """Advice for a leaf that is no tensor."""
    if isinstance(leaf, (int, float, complex)):
        return f"write torch.tensor({leaf!r}), or give it None in specs to leave it as it is"
    if type(leaf).__name__ == "ndarray":
        return "write torch.from_numpy(array)"
    if isinstance(leaf, torch.nn.Module):
        return "write dict(module.named_parameters())"
    if isinstance(leaf, Iterator):
        return "write list(...)"
    return "give it None in specs to leave it as it is"


class AnnouncedLeaf(NamedTuple):
    """The source's description of one leaf for the other ranks."""

    label: str
    partition: P | None
    value: Any = None  # the value of a leaf that stays as it is
    shape: tuple[int, ...] | None = None  # the shape of a tensor that is sent
    dtype: torch.dtype = torch.float32
    has_gradient: bool = False

    def differs(self, leaf: Any, partition: P | None, source: Source) -> str:
        """The difference between a rank's spec, and its leaf if it is a tensor, and those of the source; "" if none."""
        if self._layout(partition, source.mesh) != self._layout(self.partition, source.mesh):
            return source.against(f"the spec {partition!r} for {self.label}", f"{self.partition!r}")
        if self.shape is None or not isinstance(leaf, Tensor):
            return ""
        mine, theirs = described(leaf), describe(self.dtype, self.shape)
        if is_plain(leaf):
            mine = describe(leaf.dtype, leaf.shape)
        return "" if mine == theirs else source.against(f"{self.label} as {mine}", f"as {theirs}")

    def _layout(self, partition: P | None, mesh: Mesh) -> Any:
        if partition is None or self.shape is None or complain(partition, mesh, len(self.shape)):
            return partition
        return TensorSpec(mesh, partition, self.shape, self.dtype)


def scatter_from(tree: Any, specs: Any, source: Source) -> Any:
    """The source's tree, laid out. The other ranks pass None, or a tree of the same structure.

    The source describes structure, shapes, dtypes and specs, and the other ranks compare. Then each rank is sent its
    own blocks, so that no rank but the source has a whole tensor. Backward sends the gradients of the blocks back.

    Raises:
        SpecError, TreeError, ArgumentError: on all ranks alike, the tree and specs of the source do not fit.
        ShapeError: on all ranks alike, another rank differs. The error names it.
    """
    treedef, rows = source.tell(lambda: description(tree, specs, source))
    source.agree(lambda: _difference(tree, specs, treedef, rows, source))
    leaves = _flat(tree)[0] if source.here else [None] * len(rows)
    return treedef.unflatten([_scattered(row, leaf, source) for row, leaf in zip(rows, leaves, strict=True)])


def _flat(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    leaves, treedef = flatten_values(tree)
    return leaves, treedef


def description(tree: Any, specs: Any, source: Source) -> tuple[optree.PyTreeSpec, list[AnnouncedLeaf]]:
    """The treedef and the description of each leaf, on the source."""
    what, mesh = source.what, source.mesh
    if tree is None:
        raise ArgumentError(
            f"{what} got src={source.rank} and the tree None on that rank; rank {source.rank} passes the tensors, the "
            "others None"
        )
    leaves, treedef = _flat(tree)
    partitions = broadcast_prefix(specs, tree, "specs", "tree", f"{what}: specs does not match the tree")
    if any(isinstance(leaf, Sharded) for leaf in leaves):
        raise ArgumentError(
            f"{what} got src={source.rank} and a Sharded, which all ranks hold already; write reshard(tree, specs)"
        )
    labels = leaf_paths(tree, "tree")
    check_leaves(leaves, partitions, labels, [mesh] * len(leaves), what)
    rows = [
        AnnouncedLeaf(label, partition, leaf)
        if leaf is None or partition is None
        else AnnouncedLeaf(
            label, partition, None, tuple(leaf.shape), leaf.dtype, leaf.requires_grad and torch.is_grad_enabled()
        )
        for label, leaf, partition in zip(labels, leaves, partitions, strict=True)
    ]
    try:
        pickle.loads(pickle.dumps((treedef, rows)))
    except Exception as error:
        raise TreeError(
            f"{what} with src={source.rank} sends the other ranks the structure of the tree and its static leaves, "
            f"which cannot be pickled: {error}; use containers and static leaves that can"
        ) from None
    return treedef, rows


def _difference(tree: Any, specs: Any, treedef: optree.PyTreeSpec, rows: list[AnnouncedLeaf], source: Source) -> str:
    """The difference between the arguments of this rank and those of the source; "" if there is none."""
    leaves: list[Any] = [None] * len(rows)
    if tree is not None:
        leaves, mine = _flat(tree)
        if mine != treedef:
            return source.against(tree_text(mine), tree_text(treedef))
    skeleton = treedef.unflatten(range(len(rows)))
    partitions = broadcast_prefix(specs, skeleton, "specs", "tree", "specs that do not match the tree")
    given = zip(rows, leaves, partitions, strict=True)
    differences = (row.differs(leaf, partition, source) for row, leaf, partition in given)
    return next(filter(None, differences), "")


def _scattered(row: AnnouncedLeaf, leaf: Any, source: Source) -> Any:
    """One leaf, laid out. Ranks other than the source pass None."""
    if row.shape is None or row.partition is None:
        return row.value if leaf is None else leaf
    mesh = source.mesh
    spec = TensorSpec(mesh, row.partition, row.shape, row.dtype)
    route = ScatterRoute(spec, source.position, source.place, leaf.device if is_plain(leaf) else mesh.device)
    x_full = leaf
    if leaf is None:
        x_full = torch.empty(0, dtype=row.dtype, device=mesh.device, requires_grad=row.has_gradient)
    return Sharded(_Scatter.apply(x_full, route, False), spec)


def scatter(x_full: Tensor, route: ScatterRoute) -> Tensor:
    """This rank's block of the source's tensor. Ranks other than the source do not read ``x_full``."""
    mesh, dtype = route.spec.mesh, route.spec.dtype
    sends: list[tuple[int, Tensor]] = []
    receives: list[tuple[int, Tensor]] = []
    if route.at_source:
        others = (i for i in range(mesh.size) if i != route.place and route.holds(i))
        sends = [(i, x_full[route.window(i)].to(mesh.device).contiguous()) for i in others]
    if not route.holds(route.place):
        block = torch.zeros(route.shape(route.place), dtype=dtype, device=mesh.device)
    elif route.at_source:
        block = x_full[route.window(route.place)].to(mesh.device, copy=True, memory_format=torch.contiguous_format)
    else:
        block = torch.empty(route.shape(route.place), dtype=dtype, device=mesh.device)
        receives = [(route.source, block)]
    messages = [*sends, *receives]
    announce("scatter", mesh, block, len(messages), sum(part.nbytes for _, part in messages))
    transport_named(mesh.transport).transfer(sends, receives, mesh).wait()
    return block


def collect(block: Tensor, route: ScatterRoute) -> Tensor:
    """The transpose of `scatter`: the global tensor on the source, an empty tensor on the other ranks."""
    spec, count = route.spec, route.spec.mesh.size
    if not route.at_source:
        sends = [(route.source, block.contiguous())] if route.answers(route.place) else []
        announce("collect", spec.mesh, block, len(sends), sum(part.nbytes for _, part in sends))
        transport_named(spec.mesh.transport).transfer(sends, [], spec.mesh).wait()
        return block.new_empty(0)
    senders = [i for i in range(count) if i != route.place and route.answers(i)]
    received = [(i, block.new_empty(route.shape(i))) for i in senders]
    announce("collect", spec.mesh, block, len(received), sum(part.nbytes for _, part in received))
    transport_named(spec.mesh.transport).transfer([], received, spec.mesh).wait()
    x_full = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.mesh.device)
    parts = [(route.place, block), *received] if route.answers(route.place) else received
    for position, part in sorted(parts, key=lambda pair: pair[0]):
        x_full[route.window(position)] += part
    return x_full.to(route.device)


class _Scatter(torch.autograd.Function):
    """`scatter`, or `collect` if ``back``. Each is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: ScatterRoute, back: bool) -> Tensor:
        ctx.route, ctx.back = route, back
        return (collect if back else scatter)(x, route)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return _Scatter.apply(g, ctx.route, not ctx.back), None, None
