"""What processes do together, each with values of its own: meet, compare, gather, lay out what each has loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fspmd.errors import ArgumentError, RecordError, ShapeError, TreeError, VarianceError
from fspmd.local_view.exit import spec_of_layouts, where_is
from fspmd.meshes import world
from fspmd.meshes.mesh import Mesh, current_mesh, make_mesh
from fspmd.messages import described, quoted
from fspmd.outside import the_mesh
from fspmd.placement.device_put import device_get, put
from fspmd.placement.scatter import check_leaves
from fspmd.placement.source_rank import hear_all
from fspmd.sharded import Sharded
from fspmd.spec import P
from fspmd.torch_internals import DisableTorchFunction
from fspmd.tracing import is_recording
from fspmd.transport import Options, transport_of
from fspmd.transport.frame import frame
from fspmd.transport.local_tensor import blocks_of
from fspmd.trees import broadcast_prefix, flatten_values, leaf_paths, tree_text


def barrier(name: str = "barrier", *, mesh: Mesh | None = None) -> None:
    """Wait until every process has come here, with this ``name``: JAX's ``sync_global_devices``.

    The processes are those of ``mesh``, by default that of `set_mesh`, or else all. In a simulation there is one.

    Communication: one all-gather of the names.

    Raises:
        ArgumentError: on all ranks alike, of a rank that waits elsewhere.

    >>> barrier("checkpoint written")
    """
    mesh = _processes(mesh, "barrier")
    names = _hear("barrier", lambda: str(name), mesh)
    for at, other in zip(_places(mesh), names, strict=True):
        if other != names[0]:
            raise ArgumentError(
                f"barrier: {where_is(mesh, at)} waits at {other!r}, but the first rank at {names[0]!r}; all ranks must "
                "call the same barriers in the same order"
            )


def assert_equal(tree: Any, message: str = "", *, mesh: Mesh | None = None) -> None:
    """Raise unless every process has this tree with the same values, to the bit.

    A `Sharded` is compared where its spec says that blocks are equal: on ranks that differ in the other axes only.
    Leaves that are no tensors are compared by their repr. The processes are those of ``mesh``, by default that of
    `set_mesh`, or else all. A simulation has one process, which is equal to itself.

    Communication: one all-gather of a number per leaf.

    Raises:
        VarianceError: on all ranks alike, naming the first rank that differs, and the leaf; it begins with ``message``.

    >>> assert_equal({"step": 3, "w": torch.ones(2)}, "after loading")
    """
    mesh = _processes(mesh, "assert_equal")
    heard = _hear("assert_equal", lambda: _facts(tree), mesh)
    for at, (text, rows) in zip(_places(mesh), heard, strict=True):
        differs = f"has the tree {text}" if text != heard[0][0] else ""
        for i, row in enumerate(() if differs else rows):
            first = heard[0][1][i]
            same = next(others[i] for _, others in heard if others[i].place == row.place)
            if row.what != first.what or row.digest != same.digest:
                differs = f"has {row.label}: {row.what}{', with other values' if row.what == first.what else ''}"
                break
        if differs:
            raise VarianceError(
                f"{message or 'assert_equal'}: {where_is(mesh, at)} {differs}, unlike ranks before it; what all ranks "
                "should have, one can give to the others: broadcast(tree, src=0)"
            )


def process_allgather(tree: Any, *, tiled: bool = False, mesh: Mesh | None = None) -> Any:
    """Every process's tensors, on all of them: stacked in a new dim 0, or joined along dim 0 where ``tiled``.

    Numbers become tensors. The whole of a `Sharded` is the same on all, so it is gathered as `device_get` does.
    The processes are those of ``mesh``, by default that of `set_mesh`, or else all; in a simulation there is one, so
    each tensor gets a dim of size 1. Joined tensors may differ in their size of dim 0. Not differentiable.

    Communication: one all-gather of what there is to know of the trees, then one per tensor.

    Raises:
        TreeError, ShapeError: on all ranks alike, naming the first rank whose tree, shape or dtype differs.
        ArgumentError: a leaf is no tensor and no number.

    >>> process_allgather({"loss": 0.5, "seen": torch.tensor([1, 2])})
    {'loss': tensor([0.5000]), 'seen': tensor([[1, 2]])}
    >>> process_allgather(torch.tensor([1, 2]), tiled=True)
    tensor([1, 2])
    """
    mesh = _processes(mesh, "process_allgather")
    leaves, treedef = flatten_values(tree, none_is_leaf=False)
    labels = leaf_paths(tree, "tree", none_is_leaf=False)

    def facts() -> Any:
        tensors = [_tensor(*pair, tiled) for pair in zip(leaves, labels, strict=True)]
        kept = [leaf.spec if isinstance(leaf, Sharded) else None for leaf in leaves]
        return tree_text(treedef), [(x.dtype, tuple(x.shape), repr(k)) for x, k in zip(tensors, kept, strict=True)]

    heard = _hear("process_allgather", facts, mesh)
    _check_gathered(heard, labels, mesh, tiled)

    def gathered(i: int, leaf: Any) -> Any:
        if isinstance(leaf, Sharded):
            return device_get(leaf.detach())
        x = _tensor(leaf, labels[i], tiled).detach()
        block = x if tiled else x.unsqueeze(0)
        if mesh.transport != "process_group":
            return block.clone()
        sizes = tuple(layouts[i][1][0] for _, layouts in heard) if tiled else None
        options = Options(sizes=None if sizes is None or len({*sizes}) == 1 else sizes)
        return transport_of(mesh).gather(block.to(mesh.device), mesh, mesh.axis_names, options).wait().to(x.device)

    return treedef.unflatten([gathered(i, leaf) for i, leaf in enumerate(leaves)])


def from_process_local(tree: Any, specs: Any, *, mesh: Mesh | None = None, check: bool = True) -> Any:
    """Lay out what each process has loaded: a DataLoader's batch becomes `Sharded` values, in one call.

    It is JAX's ``make_array_from_process_local_data``, for whole trees. ``specs`` is a pytree prefix of ``tree``. A
    process holds its block of each tensor: where a spec leaves an axis out, ranks along it must pass equal tensors.
    Along an unreduced axis each passes its own term: the global tensor is their sum, and they need not be equal. A
    simulation is one process, which passes the whole tensors, as to `device_put`: of a pending sum the sum. A leaf
    whose spec is None stays as it is; arrays of NumPy are taken as tensors. Blocks share the memory of what was passed,
    if it is on the device.

    With ``check`` the processes compare trees, shapes, dtypes and, where blocks must be equal, values: one all-gather
    of numbers for the whole tree, which the host waits for. Without it nothing is sent, and blocks are taken to be as
    large everywhere as here. Blocks may be uneven, as ``torch.chunk`` cuts, with ``check`` only.

    Raises:
        SpecError, TreeError, ShapeError, ArgumentError: on all ranks alike, naming the rank and the leaf that differ.
        VarianceError: on all ranks alike: tensors that should be equal are not.

    >>> mesh = make_mesh((4,), ("dp",))
    >>> loader = torch.utils.data.DataLoader([(torch.ones(3), i) for i in range(16)], batch_size=8)
    >>> for batch in loader:
    ...     x, y = from_process_local(batch, P("dp"), mesh=mesh)
    >>> x.spec, y.spec
    (f32[8@dp, 3] on mesh(dp=4), i64[8@dp] on mesh(dp=4))
    """
    what = "from_process_local"
    mesh = the_mesh(mesh, what)
    leaves, treedef = flatten_values(tree)
    labels = leaf_paths(tree, "tree")
    if mesh.transport != "process_group":
        return put(treedef.unflatten(map(_of_array, leaves, labels)), specs, mesh, None, what)
    _refuse_record(what)
    partitions: list[Any] = []

    def facts() -> Any:
        leaves[:] = map(_of_array, leaves, labels)
        partitions[:] = broadcast_prefix(specs, tree, "specs", "tree", f"{what}: specs does not match the tree")
        check_leaves(leaves, partitions, labels, [mesh] * len(leaves), what)
        rows: list[_LeafReport | None] = []
        for x, partition, label in zip(leaves, partitions, labels, strict=True):
            if x is None or partition is None:
                rows.append(None)
            elif isinstance(x, Sharded):
                raise ArgumentError(f"{what}: {label} is {x!r} already; move it: reshard(x, {partition!r})")
            else:
                place = _place(partition, mesh)
                compared = check and len(place) < len(mesh.axis_names)
                rows.append(
                    _LeafReport(label, repr(partition), place, _digest(x) if compared else (), (x.dtype, (*x.shape,)))
                )
        return tree_text(treedef), rows

    heard = _hear(what, facts, mesh) if check else [facts()] * mesh.size
    if check:
        _check_parts(heard, mesh)
    found = []
    for i, (x, partition) in enumerate(zip(leaves, partitions, strict=True)):
        if x is not None and partition is not None:
            layouts = [rows[i].layout for _, rows in heard]
            spec = spec_of_layouts(layouts, partition, mesh, f"{what}: {labels[i]}")
            found.append(Sharded(x.to(mesh.device), spec))
        else:
            found.append(x)
    return treedef.unflatten(found)


# --- what processes tell each other of a tree -----------------------------------------------------------------------


def _hear(what: str, facts: Callable[[], Any], mesh: Mesh) -> list[Any]:
    """The facts of every process, which all must be at the same call."""
    heard = hear_all(lambda: (what, facts()), mesh)
    for at, (other, _) in zip(_places(mesh), heard, strict=True):
        if other != heard[0][0]:
            raise ArgumentError(
                f"{what}: {where_is(mesh, at)} calls {other}, but the first rank {heard[0][0]}; all ranks must make "
                "the same calls in the same order"
            )
    return [found for _, found in heard]


class _LeafReport(NamedTuple):
    """What the other processes hear of one leaf."""

    label: str
    what: str  # in words
    place: tuple[tuple[str, int], ...] = ()  # where the process is along axes that values differ over
    digest: tuple[int, ...] = ()  # of the values
    layout: tuple[torch.dtype, tuple[int, ...]] | None = None


def _facts(tree: Any) -> tuple[str, list[_LeafReport]]:
    leaves, treedef = flatten_values(tree)
    rows = []
    for leaf, label in zip(leaves, leaf_paths(tree, "tree"), strict=True):
        if isinstance(leaf, Sharded):
            rows.append(
                _LeafReport(label, repr(leaf), _place(leaf.spec.partition, leaf.spec.mesh), _digest(leaf.local))
            )
        elif isinstance(leaf, Tensor) or type(leaf).__name__ == "ndarray":
            x = _of_array(leaf, label)
            rows.append(_LeafReport(label, f"{x.dtype} {described(x)}", digest=_digest(x)))
        else:
            rows.append(_LeafReport(label, repr(leaf)))
    return tree_text(treedef), rows


def _place(partition: P, mesh: Mesh) -> tuple[tuple[str, int], ...]:
    """Where this process is along the axes over which the blocks of a layout differ."""
    here = zip(mesh.axis_names, mesh.coordinate() or (), strict=False)
    return tuple((axis, i) for axis, i in here if axis in partition.axes or axis in partition.unreduced)


def _check_parts(heard: list[tuple[str, list[_LeafReport | None]]], mesh: Mesh) -> None:
    """The same tree and specs on all ranks, and equal values where blocks must be equal."""
    text, first = heard[0]
    for at, (other, rows) in zip(_places(mesh), heard, strict=True):
        here = f"from_process_local: {where_is(mesh, at)}"
        specs, wanted = ([None if row is None else row.what for row in side] for side in (rows, first))
        if other != text or specs != wanted:
            raise TreeError(
                f"{here} has the tree {other} with the specs {specs}, but the first rank {text} with {wanted}; pass "
                "trees of one structure, and the same specs, on all ranks"
            )
        for i, row in enumerate(rows):
            if row is None:
                continue
            same = next(found for _, others in heard if (found := others[i]) is not None and found.place == row.place)
            if row.layout == same.layout and row.digest != same.digest:
                raise VarianceError(
                    f"{here} has other values for {row.label} than a rank before it that should have the same: its "
                    f"spec {row.what} names {quoted(axis for axis, _ in row.place) or 'no axis'} alone; load the same "
                    "part on ranks along the other axes, or name these in the spec"
                )


def _check_gathered(heard: list[tuple[str, list[Any]]], labels: list[str], mesh: Mesh, tiled: bool) -> None:
    """The same tree on all ranks; then the same dtypes and shapes."""
    text, wanted = heard[0]
    for at, (other, _) in zip(_places(mesh), heard, strict=True):
        if other != text:
            raise TreeError(
                f"process_allgather: {where_is(mesh, at)} has the tree {other}, but the first rank {text}; pass trees "
                "of one structure"
            )
    for at, (_, layouts) in zip(_places(mesh), heard, strict=True):
        for label, (dtype, shape, spec), (kind, first, like) in zip(labels, layouts, wanted, strict=True):
            here = f"process_allgather: {where_is(mesh, at)} has {label}"
            if spec != like:
                lies, should = ("a tensor of its own" if x == "None" else f"the Sharded {x}" for x in (spec, like))
                raise ShapeError(f"{here}, {lies}, but the first rank {should}; give them one layout")
            rest, others = (shape[1:], first[1:]) if tiled else (shape, first)
            if dtype is not kind or rest != others:
                raise ShapeError(
                    f"{here} of shape {shape} and {dtype}, but the first rank {first} and {kind}; "
                    f"{'only dim 0 may differ' if tiled else 'give them one shape, or tiled=True to join dim 0'}"
                )


def _tensor(leaf: Any, label: str, tiled: bool) -> Tensor:
    """A leaf to be gathered; of a `Sharded` its block stands for it."""
    if isinstance(leaf, Sharded):
        return torch.empty((0,) if tiled else (), dtype=leaf.dtype)
    if not isinstance(leaf, (Tensor, bool, int, float, complex)) and type(leaf).__name__ != "ndarray":
        raise ArgumentError(f"process_allgather: {label} is {described(leaf)}; it takes tensors and numbers")
    array = _of_array(leaf, label)
    try:
        x = torch.as_tensor(array)
    except (OverflowError, ValueError) as error:
        raise ArgumentError(f"process_allgather: {label} is {described(leaf)}, which no tensor holds") from error
    if tiled and not x.dim():
        raise ShapeError(f"process_allgather: {label} has no dim 0 to be joined along; leave out tiled=True")
    return x


def _of_array(leaf: Any, label: str) -> Any:
    """An array of NumPy as a tensor, and whatever else as it is."""
    if type(leaf).__name__ != "ndarray":
        return leaf
    try:
        return torch.as_tensor(leaf)
    except TypeError as error:
        raise ArgumentError(f"{label} is an array that is no tensor: {error}") from error


_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_FACTORS: Final = (-0x61C8864680B583EB, -0x4B47D1B3A1E0D4A5)  # odd, as in splitmix64


def _digest(x: Tensor) -> tuple[int, ...]:
    """Of each block 64 bits, which differ where values or their order do."""
    with torch.no_grad(), DisableTorchFunction():
        return tuple(map(_sum_by_place, blocks_of(x)))


def _sum_by_place(x: Tensor) -> int:
    """Each value times a number of its place, summed modulo 2⁶⁴."""
    flat = x.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    numbers = flat.view(_INTEGERS[flat.element_size()]).to(torch.int64)
    place = torch.arange(1, len(numbers) + 1, device=x.device).mul_(_FACTORS[0])
    place = place.bitwise_xor_(place >> 29).mul_(_FACTORS[1]).bitwise_or_(1)
    return int((numbers * place).sum())


# --- which processes ------------------------------------------------------------------------------------------------


def _processes(mesh: Mesh | None, what: str) -> Mesh:
    """The mesh of a call; by default all processes."""
    _refuse_record(what)
    if mesh is None and current_mesh() is None:
        mesh = make_mesh((world.world_size(),), ("process",))
    return the_mesh(mesh, what)


def _places(mesh: Mesh) -> list[tuple[int, ...]]:
    """Where each process is on a mesh, row-major; in a simulation there is one."""
    coordinates = list(frame(mesh, mesh.axis_names).coordinates())
    return coordinates if mesh.transport == "process_group" else coordinates[:1]


def _refuse_record(what: str) -> None:
    if is_recording():
        raise RecordError(
            f"{what} was called within jit, where values are not known; call it before or after the jitted function"
        )
