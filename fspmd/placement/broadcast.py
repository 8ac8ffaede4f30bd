"""`broadcast` of the tensors of one rank, and the source rank of other functions; `pad_to_blocks` and `unpad`.

All other ranks get the values of the source rank. It describes them to all ranks, which agree before data moves.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from numbers import Integral
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor

from fspmd.body import the_mesh
from fspmd.entries import entry_axes
from fspmd.errors import ArgumentError, FspmdError, MeshError, ShapeError, SpecError
from fspmd.foreign import refuse_foreign, refuse_misfit
from fspmd.inspection.replays import compare_replays, replay_hashes
from fspmd.meshes.axes import row_major
from fspmd.meshes.mesh import Mesh
from fspmd.messages import described
from fspmd.pairs import apply, call
from fspmd.sharded import Sharded, is_plain
from fspmd.spec import P, complain, describe
from fspmd.transport import Options, arrived, transport_named
from fspmd.transport.local_tensor import is_simulated
from fspmd.trees import leaf_paths, tree_text


@dataclass(frozen=True, slots=True)
class Source:
    """The source rank of a call. The first rank of the mesh decides it."""

    what: str  # the function that is called
    mesh: Mesh
    rank: int  # the global rank
    position: int  # its position among the ranks of the mesh, row-major
    place: int  # the position of this process
    differs: str  # the error if this process named another source; else ""

    @property
    def here(self) -> bool:
        """Whether this process has the values. In a simulation one process is every rank and has them."""
        return self.place == self.position or self.mesh.transport == "simulation"

    def tell(self, make: Callable[[], Any]) -> Any:
        """Call ``make`` on the source and return its result on all ranks. Its `FspmdError` is raised on all ranks."""
        return _told(make, self.mesh, self.position)

    def agree(self, differs: Callable[[], str]) -> None:
        """Compare all ranks with the source.

        ``differs`` returns the difference of this rank, or "" for none.

        Raises:
            ShapeError: on all ranks, with the difference of the first rank that has one.
        """
        if self.mesh.transport == "simulation":
            return
        difference = self.differs
        if not difference and not self.here:
            try:
                difference = differs()
            except FspmdError as error:
                difference = str(error)
        text = difference and f"rank {self.mesh.ranks[self.place]} passes {difference}"
        if first := transport_named(self.mesh.transport).agree(text, self.mesh):
            raise ShapeError(f"{self.what}: {first}; pass the same src on all ranks, and trees and specs that agree")

    def against(self, mine: str, theirs: str) -> str:
        """The text of a difference between this rank and the source."""
        return f"{mine}, but rank {self.rank} {theirs}"


def source_of(src: Any, mesh: Mesh, what: str) -> Source:
    """The source of a call on all ranks of a mesh.

    Raises:
        ArgumentError, MeshError: on all ranks alike, the first rank names no rank of the mesh.
    """
    position = _told(lambda: _position(mesh, src, what), mesh, 0)
    rank, place = mesh.ranks[position], row_major(mesh.coordinate() or (), mesh.shape.values())
    differs = "" if src == rank and not isinstance(src, bool) else f"src={src!r}, but rank {mesh.ranks[0]} src={rank}"
    return Source(what, mesh, rank, position, place, differs)


def hear_all(make: Callable[[], Any], mesh: Mesh) -> list[Any]:
    """Call ``make`` on each rank and return the results of all, row-major. The first `FspmdError` is raised on all.

    The replays of recorded programs are compared on the way. A simulation is one process, so its list has one result.

    Raises:
        LockstepError: on all ranks, ranks have replayed different records.
    """
    if mesh.transport != "process_group":
        return [make()]
    failure: Exception | None = None
    replays = replay_hashes(mesh)
    try:
        message = pickle.dumps((replays, make()))
    except Exception as error:  # the other ranks wait for this message
        failure = error
        told = error if isinstance(error, FspmdError) else ArgumentError(f"a rank failed: {error!r}")
        message = pickle.dumps((replays, told))
    transport = transport_named(mesh.transport)
    block = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(mesh.device)
    sizes = tuple(layout[1][0] for (layout,) in transport.layouts([block], mesh) if layout is not None)
    messages = arrived(transport.gather(block, mesh, mesh.axis_names, Options(sizes=sizes)))
    heard = [pickle.loads(bytes(part.tolist())) for part in messages.cpu().split(sizes)]
    compare_replays([row for row, _ in heard], mesh)
    if failure is not None:
        raise failure
    results = [result for _, result in heard]
    for result in results:
        if isinstance(result, FspmdError):
            raise result
    return results


def _told(make: Callable[[], Any], mesh: Mesh, position: int) -> Any:
    """Call ``make`` on the rank at a position, and return its result or raise its error on all ranks."""
    if mesh.transport == "simulation":
        return make()
    message = b""
    if row_major(mesh.coordinate() or (), mesh.shape.values()) == position:
        try:
            message = pickle.dumps(make())
        except FspmdError as error:
            message = pickle.dumps(error)
    result = pickle.loads(transport_named(mesh.transport).tell(message, mesh, position))
    if isinstance(result, FspmdError):
        raise result
    return result


def _position(mesh: Mesh, src: Any, what: str) -> int:
    """The position of a global rank on the mesh, row-major.

    Raises:
        ArgumentError, MeshError: ``src`` is no rank of the mesh.
    """
    if isinstance(src, bool) or not hasattr(src, "__index__"):
        raise ArgumentError(f"{what} got src={src!r} of type {type(src).__name__}; expected a global rank")
    rank = operator.index(src)
    coordinate = mesh.coordinate(rank) if rank >= 0 else None
    if coordinate is None:
        raise MeshError(f"{what} got src={rank}, which is no rank of {mesh!r}; its ranks are {mesh.ranks!r}")
    return row_major(coordinate, mesh.shape.values())


T = TypeVar("T", Tensor, Sharded)


def broadcast(tree: Any, *, src: int, mesh: Mesh | None = None) -> Any:
    """The tensors of the global rank ``src`` on every rank of a mesh, as new plain tensors.

    Every rank passes a tree of the same structure, shapes and dtypes. They are compared before data moves. If the other
    ranks have no tensors, or need only their blocks, use `scatter`.

    Communication: the description of the tree, one all-reduce of a number, then a broadcast per tensor. Backward sends
    nothing, because outside bodies the gradient of a plain tensor is equal on all ranks. ``src`` keeps it, and the
    other ranks get zeros.

    Raises:
        ShapeError: on all ranks alike, a tree differs. The error names the first rank that differs, and the leaf.
        ArgumentError, MeshError: on all ranks alike, a leaf of ``src`` is no plain tensor, or ``src`` is no rank of the
            mesh.

    >>> from fspmd import make_mesh
    >>> broadcast({"w": torch.ones(2)}, src=3, mesh=make_mesh((4,), ("x",)))
    {'w': tensor([1., 1.])}
    """
    mesh = the_mesh(mesh, "broadcast")
    source = source_of(src, mesh, "broadcast")
    leaves, treedef = optree.tree_flatten(tree, none_is_leaf=True)
    labels = leaf_paths(tree, "tree")
    mine = [tree_text(treedef), *map(_metadata, labels, leaves)]
    theirs, followed = source.tell(lambda: (mine, [_is_followed(*leaf) for leaf in zip(labels, leaves, strict=True)]))
    source.agree(
        lambda: next((source.against(*pair) for pair in zip(mine, theirs, strict=False) if len({*pair}) > 1), "")
    )
    if mesh.transport == "simulation":
        return treedef.unflatten(leaf.to(mesh.device, copy=True) for leaf in leaves)
    collective = call("broadcast_invariant", mesh, mesh.axis_names, Options(root=source.position))
    return treedef.unflatten(
        apply(_with_grad(leaf, requires_grad).to(mesh.device), collective)
        for leaf, requires_grad in zip(leaves, followed, strict=True)
    )


def _metadata(label: str, leaf: Any) -> str:
    return f"{label} as {describe(leaf.dtype, leaf.shape) if type(leaf) is Tensor else described(leaf)}"


def _is_followed(label: str, leaf: Any) -> bool:
    """Whether autograd follows a leaf of the source.

    Raises:
        ArgumentError: the leaf is no plain tensor.
    """
    refuse_misfit(leaf, f"broadcast: {label} is")
    if not is_plain(leaf) or is_simulated(leaf):
        raise ArgumentError(
            f"broadcast: {label} is {described(leaf)}; pass plain tensors, of which each rank has its own, and move a "
            "Sharded with reshard"
        )
    return leaf.requires_grad and torch.is_grad_enabled()


def _with_grad(leaf: Tensor, requires_grad: bool) -> Tensor:
    """A leaf that autograd follows if it follows the source's, so that backward is alike on all ranks."""
    return leaf if leaf.requires_grad and requires_grad else leaf.detach().requires_grad_(requires_grad)


def pad_to_blocks(x: T, spec: P, mesh: Mesh | None = None) -> T:
    """``x`` with zeros after the end of each dim that ``spec`` cuts, so that blocks are even.

    Raises:
        ArgumentError: ``x`` is no tensor.
        SpecError: ``spec`` does not fit.

    >>> from fspmd import make_mesh
    >>> pad_to_blocks(torch.ones(5, 3), P("x"), make_mesh((4,), ("x",))).shape
    torch.Size([8, 3])
    """
    _check_is_tensor("pad_to_blocks", x)
    mesh = x.spec.mesh if isinstance(x, Sharded) and mesh is None else the_mesh(mesh, "pad_to_blocks")
    if wrong := complain(spec, mesh, x.ndim):
        raise SpecError(f"pad_to_blocks: a tensor of shape {tuple(x.shape)}: {wrong}")
    missing = [0] * x.ndim
    for dim, entry in enumerate(spec):
        missing[dim] = -x.shape[dim] % prod(mesh.shape[axis] for axis in entry_axes(entry))
    if not any(missing):
        return x
    padding = [n for count in reversed(missing) for n in (0, count)]
    padded: Any = torch.nn.functional.pad(x, padding)
    return padded  # type: ignore[no-any-return]


def _check_is_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise ArgumentError(f"{name} got {described(x)}; expected a tensor, or a Sharded")
    refuse_foreign(x, f"{name} got")


def unpad(x: T, shape: tuple[int, ...]) -> T:
    """The first elements of each dim: the inverse of `pad_to_blocks`, whose argument had this shape.

    Raises:
        ArgumentError: ``x`` is no tensor.
        ShapeError: ``shape`` has another number of dims, or a larger dim.

    >>> unpad(torch.ones(8, 3), (5, 3)).shape
    torch.Size([5, 3])
    """
    _check_is_tensor("unpad", x)
    sizes = tuple(shape) if isinstance(shape, (tuple, list)) else None
    fits = sizes is not None and len(sizes) == x.ndim and all(isinstance(n, Integral) for n in sizes)
    if not fits or any(not 0 <= new <= old for new, old in zip(shape, x.shape, strict=True)):
        given = described(shape) if sizes is None else f"the shape {sizes}"
        raise ShapeError(
            f"unpad got {given} for a tensor of shape {tuple(x.shape)}; give it the shape before pad_to_blocks"
        )
    return x[tuple(slice(0, n) for n in shape)]  # type: ignore[no-any-return]
