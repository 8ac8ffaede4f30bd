"""Helpers for processes, each with its own values: `barrier`, `assert_equal`, `process_allgather` and
`from_process_local`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspmd.body import refuse_recorded, the_mesh
from fspmd.collectives.checks import where
from fspmd.collectives.measured_layouts import spec_of_layouts
from fspmd.digests import digests
from fspmd.errors import ArgumentError, ShapeError, TreeError, VarianceError
from fspmd.foreign import refuse_foreign
from fspmd.meshes import world
from fspmd.meshes.mesh import Mesh, current_mesh, make_mesh
from fspmd.messages import described, quoted
from fspmd.placement.broadcast import hear_all
from fspmd.placement.device_put import device_get, put
from fspmd.placement.scatter import check_leaves
from fspmd.sharded import Sharded
from fspmd.spec import P
from fspmd.transport import Options, arrived, transport_named
from fspmd.transport.frame import frame_over
from fspmd.transport.local_tensor import blocks_of
from fspmd.trees import broadcast_prefix, flatten_values, leaf_paths, tree_text


def barrier(name: str = "barrier", *, mesh: Mesh | None = None) -> None:
    """Wait until every process has called this with the same ``name``: JAX's ``sync_global_devices``.

    The processes are those of ``mesh``, by default that of `set_mesh`, or else all. A simulation has one.

    Communication: one all-gather of the names.

    Raises:
        ArgumentError: on all ranks alike, a rank waits at another barrier.
        LockstepError: on all ranks alike, ranks have replayed different records of `jit`.

    >>> barrier("checkpoint written")
    """
    mesh = _processes(mesh, "barrier")
    names = _hear("barrier", lambda: str(name), mesh)
    for coordinate, other in zip(_coordinates(mesh), names, strict=True):
        if other != names[0]:
            raise ArgumentError(
                f"barrier: {where(mesh, coordinate)} waits at {other!r}, but the first rank at {names[0]!r}; all "
                "ranks must call the same barriers in the same order"
            )


def assert_equal(tree: Any, message: str = "", *, mesh: Mesh | None = None) -> None:
    """Raise an error unless every process has this tree with the same values, to the bit.

    The blocks of a `Sharded` are compared between ranks for which its spec promises equal blocks. Leaves that are no
    tensors are compared by their repr. The processes are those of ``mesh``, by default that of `set_mesh`, or else all.
    A simulation has one process, which is equal to itself.

    Communication: one all-gather of a number per leaf.

    Raises:
        VarianceError: on all ranks alike, a rank differs. The error begins with ``message``, and names the first rank
            that differs and the leaf.

    >>> assert_equal({"step": 3, "w": torch.ones(2)}, "after loading")
    """
    mesh = _processes(mesh, "assert_equal")
    reports = _hear("assert_equal", lambda: _reports(tree), mesh)
    for coordinate, (text, rows) in zip(_coordinates(mesh), reports, strict=True):
        difference = f"has the tree {text}" if text != reports[0][0] else ""
        for i, row in enumerate(() if difference else rows):
            first = reports[0][1][i]
            same = next(others[i] for _, others in reports if others[i].place == row.place)
            if row.what != first.what or row.digest != same.digest:
                difference = f"has {row.label}: {row.what}{', with other values' if row.what == first.what else ''}"
                break
        if difference:
            raise VarianceError(
                f"{message or 'assert_equal'}: {where(mesh, coordinate)} {difference}, unlike ranks before it; to "
                "give the values of one rank to all, write broadcast(tree, src=0)"
            )


def process_allgather(tree: Any, *, tiled: bool = False, mesh: Mesh | None = None) -> Any:
    """The tensors of every process, on all processes: stacked in a new dim 0, or joined along dim 0 if ``tiled``.

    Numbers become tensors. A `Sharded` becomes its global tensor, as with `device_get`. The processes are those of
    ``mesh``, by default that of `set_mesh`, or else all. A simulation has one process, so a stacked tensor gets a dim
    of size 1. Joined tensors may differ in the size of dim 0. The function is not differentiable.

    Communication: one all-gather of the descriptions of the trees, then one all-gather per tensor.

    Raises:
        TreeError, ShapeError: on all ranks alike, a tree, shape or dtype differs. The error names the first rank.
        ArgumentError: a leaf is neither a tensor nor a number.

    >>> process_allgather({"loss": 0.5, "seen": torch.tensor([1, 2])})
    {'loss': tensor([0.5000]), 'seen': tensor([[1, 2]])}
    >>> process_allgather(torch.tensor([1, 2]), tiled=True)
    tensor([1, 2])
    """
    mesh = _processes(mesh, "process_allgather")
    leaves, treedef = flatten_values(tree, none_is_leaf=False)
    labels = leaf_paths(tree, "tree", none_is_leaf=False)

    def layouts() -> Any:
        tensors = [_tensor(*pair, tiled) for pair in zip(leaves, labels, strict=True)]
        specs = [leaf.spec if isinstance(leaf, Sharded) else None for leaf in leaves]
        return tree_text(treedef), [
            (x.dtype, tuple(x.shape), repr(spec)) for x, spec in zip(tensors, specs, strict=True)
        ]

    reports = _hear("process_allgather", layouts, mesh)
    _check_gathered(reports, labels, mesh, tiled)

    def gathered(i: int, leaf: Any) -> Any:
        if isinstance(leaf, Sharded):
            return device_get(leaf.detach())
        x = _tensor(leaf, labels[i], tiled).detach()
        block = x if tiled else x.unsqueeze(0)
        if mesh.transport != "process_group":
            return block.clone()
        sizes = tuple(rows[i][1][0] for _, rows in reports) if tiled else None
        options = Options(sizes=None if sizes is None or len({*sizes}) == 1 else sizes)
        transport, block = transport_named(mesh.transport), block.to(mesh.device)
        return arrived(transport.gather(block, mesh, mesh.axis_names, options)).to(x.device)

    return treedef.unflatten([gathered(i, leaf) for i, leaf in enumerate(leaves)])


def from_process_local(tree: Any, specs: Any, *, mesh: Mesh | None = None, check: bool = True) -> Any:
    """Lay out the tensors that each process has loaded, such as a DataLoader's batch, as `Sharded` values.

    It is JAX's ``make_array_from_process_local_data`` for whole trees. Each process passes its block of each tensor.
    Ranks along an axis that a spec leaves out must pass equal tensors. Along an unreduced axis each rank passes its own
    term, and the global tensor is the sum. A simulation is one process, which passes global tensors, as to
    `device_put`; for a pending sum it passes the sum.

    Blocks share the memory of the tensors passed, if these are on the device.

    Args:
        tree: A pytree of tensors and NumPy arrays.
        specs: A pytree prefix of ``tree``. A leaf whose spec is None stays as it is.
        mesh: By default that of `set_mesh`.
        check: The processes compare trees, shapes and dtypes, and the values of blocks that must be equal. Without it
            nothing is sent, and all blocks are assumed to have the shape of this process's block. Blocks may be uneven,
            as ``torch.chunk`` cuts, only with ``check``.

    Communication: with ``check`` one all-gather of numbers for the whole tree, which the host waits for.

    Raises:
        SpecError, TreeError, ShapeError, ArgumentError: on all ranks alike, a rank differs. The error names the rank
            and the leaf.
        VarianceError: on all ranks alike, tensors that must be equal are not.

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
    refuse_recorded(what)
    partitions: list[Any] = []

    def reports_of_leaves() -> Any:
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

    reports = _hear(what, reports_of_leaves, mesh) if check else [reports_of_leaves()] * mesh.size
    if check:
        _check_parts(reports, mesh)
    results = []
    for i, (x, partition) in enumerate(zip(leaves, partitions, strict=True)):
        if x is not None and partition is not None:
            layouts = [rows[i].layout for _, rows in reports]
            spec = spec_of_layouts(layouts, partition, mesh, f"{what}: {labels[i]}")
            results.append(Sharded(x.to(mesh.device), spec))
        else:
            results.append(x)
    return treedef.unflatten(results)


# --- reports on trees, which processes exchange -----------------------------------------------------------------------


def _hear(what: str, report: Callable[[], Any], mesh: Mesh) -> list[Any]:
    """The reports of all processes, which must make the same call ``what``."""
    reports = hear_all(lambda: (what, report()), mesh)
    for coordinate, (other, _) in zip(_coordinates(mesh), reports, strict=True):
        if other != reports[0][0]:
            raise ArgumentError(
                f"{what}: {where(mesh, coordinate)} calls {other}, but the first rank {reports[0][0]}; all ranks "
                "must make the same calls in the same order"
            )
    return [text for _, text in reports]


class _LeafReport(NamedTuple):
    """The report of a process on one leaf."""

    label: str
    what: str  # a description, or the spec
    place: tuple[tuple[str, int], ...] = ()  # the coordinate of the process along axes over which blocks differ
    digest: tuple[int, ...] = ()  # digests of the values
    layout: tuple[torch.dtype, tuple[int, ...]] | None = None


def _reports(tree: Any) -> tuple[str, list[_LeafReport]]:
    """The report of this process on a tree."""
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
    """The coordinate of this process along the axes over which the blocks of a layout differ."""
    here = zip(mesh.axis_names, mesh.coordinate() or (), strict=False)
    return tuple((axis, i) for axis, i in here if axis in partition.axes or axis in partition.unreduced)


def _check_parts(reports: list[tuple[str, list[_LeafReport | None]]], mesh: Mesh) -> None:
    """Check that all ranks have one tree with the same specs, and equal values where blocks must be equal."""
    first_text, first_rows = reports[0]
    first_specs = [None if row is None else row.what for row in first_rows]
    for coordinate, (text, rows) in zip(_coordinates(mesh), reports, strict=True):
        here = f"from_process_local: {where(mesh, coordinate)}"
        specs = [None if row is None else row.what for row in rows]
        if text != first_text or specs != first_specs:
            raise TreeError(
                f"{here} has the tree {text} with the specs {specs}, but the first rank {first_text} with "
                f"{first_specs}; pass trees of one structure, and the same specs, on all ranks"
            )
        for i, row in enumerate(rows):
            if row is None:
                continue
            same = next(other for _, others in reports if (other := others[i]) is not None and other.place == row.place)
            if row.layout == same.layout and row.digest != same.digest:
                raise VarianceError(
                    f"{here} has other values for {row.label} than a rank before it that should have the same: its "
                    f"spec {row.what} names {quoted(axis for axis, _ in row.place) or 'no axis'} alone; load the same "
                    "part on ranks along the other axes, or name these in the spec"
                )


def _check_gathered(reports: list[tuple[str, list[Any]]], labels: list[str], mesh: Mesh, tiled: bool) -> None:
    """Check that all ranks have one tree, and then the same layouts, dtypes and shapes."""
    first_text, first_rows = reports[0]
    for coordinate, (text, _) in zip(_coordinates(mesh), reports, strict=True):
        if text != first_text:
            raise TreeError(
                f"process_allgather: {where(mesh, coordinate)} has the tree {text}, but the first rank "
                f"{first_text}; pass trees of one structure"
            )
    for coordinate, (_, rows) in zip(_coordinates(mesh), reports, strict=True):
        for label, row, first_row in zip(labels, rows, first_rows, strict=True):
            (dtype, shape, spec), (first_dtype, first_shape, first_spec) = row, first_row
            here = f"process_allgather: {where(mesh, coordinate)} has {label}"
            if spec != first_spec:
                kind, first_kind = (
                    "a tensor of its own" if text == "None" else f"the Sharded {text}" for text in (spec, first_spec)
                )
                raise ShapeError(f"{here}, {kind}, but the first rank {first_kind}; give them one layout")
            compared, expected = (shape[1:], first_shape[1:]) if tiled else (shape, first_shape)
            if dtype is not first_dtype or compared != expected:
                raise ShapeError(
                    f"{here} of shape {shape} and {dtype}, but the first rank {first_shape} and {first_dtype}; "
                    f"{'only dim 0 may differ' if tiled else 'give them one shape, or tiled=True to join dim 0'}"
                )


def _tensor(leaf: Any, label: str, tiled: bool) -> Tensor:
    """A leaf as a tensor to be gathered. An empty tensor stands for a `Sharded`."""
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
    """A NumPy array as a tensor; any other leaf as it is, unless it is a DTensor."""
    if type(leaf).__name__ != "ndarray":
        refuse_foreign(leaf, f"{label} is")
        return leaf
    try:
        return torch.as_tensor(leaf)
    except TypeError as error:
        raise ArgumentError(f"{label} is an array that is no tensor: {error}") from error


def _digest(x: Tensor) -> tuple[int, ...]:
    """64 bits for each block. They differ where values or their order differ, up to chance."""
    return tuple(digests(blocks_of(x)))


# --- the processes of a call ------------------------------------------------------------------------------------------


def _processes(mesh: Mesh | None, what: str) -> Mesh:
    """The mesh of a call. By default its ranks are all processes."""
    refuse_recorded(what)
    if mesh is None and current_mesh() is None:
        mesh = make_mesh((world.world_size(),), ("process",))
    return the_mesh(mesh, what)


def _coordinates(mesh: Mesh) -> list[tuple[int, ...]]:
    """The coordinate of each process on a mesh, row-major. A simulation has one process."""
    coordinates = list(frame_over(mesh, mesh.axis_names).coordinates())
    return coordinates if mesh.transport == "process_group" else coordinates[:1]
