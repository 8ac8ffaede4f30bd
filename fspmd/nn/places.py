"""The parts of a mesh along an axis, one for each position of a pipeline, and the values on them."""

from __future__ import annotations

import itertools
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.entries import entry_axes
from fspmd.errors import ArgumentError, FspmdError, MeshError, SpecError, VarianceError
from fspmd.local_view.unbind import bind, unbind
from fspmd.meshes.mesh import Mesh, make_mesh
from fspmd.messages import Failure, described, refuse
from fspmd.pairs import apply, call
from fspmd.placement.creation import zeros
from fspmd.placement.reshard import reshard
from fspmd.sharded import Sharded, is_sharded
from fspmd.spec import P, TensorSpec
from fspmd.transport import Options
from fspmd.transport.frame import frame_over
from fspmd.trees import leaf_paths


def without_row(partition: P, cut: bool = True) -> P:
    """The layout of a row of a value that is cut by rows; of the value itself if it is not ``cut``."""
    return P(*partition.entries[cut:], unreduced=partition.unreduced, reduced=partition.reduced)


class Places:
    """The parts of a mesh along an axis, one for each position, and the values on them.

    In a simulation this process holds all of them; otherwise the one of its rank.
    """

    def __init__(self, mesh: Mesh, axis: str) -> None:
        self.mesh, self.axis, self.at = mesh, axis, mesh.axis_names.index(axis)
        self.parts = mesh.split(axis, [1] * mesh.shape[axis])
        self.simulated = mesh.transport == "simulation"
        mine = None if self.simulated else mesh.coordinate()
        self.mine = range(len(self.parts)) if mine is None else (mine[self.at],)

    def stand_in(self, transport: str) -> Mesh:
        """A mesh like that of one position, of another transport."""
        sizes = tuple(1 if name == self.axis else size for name, size in self.mesh.shape.items())
        return make_mesh(sizes, self.mesh.axis_names, transport=transport)

    def owner(self, leaf: Any) -> int | None:
        """The position to whose part a leaf belongs; None if it lies on the whole mesh."""
        if leaf.spec.mesh is self.mesh:
            return None
        return next((r for r, part in enumerate(self.parts) if part is leaf.spec.mesh), None)

    def check(self, call: tuple[Any, Any, Any], stages: int) -> None:
        """Raise one error for all values of a call, (params, inputs, targets), that belong nowhere."""
        failures: list[Failure] = []
        for name, tree in zip(("params", "inputs", "targets"), call, strict=True):
            leaves = optree.tree_leaves(tree, is_leaf=is_sharded)
            wrong = [(i, self._fault(x, stages if name == "params" else None)) for i, x in enumerate(leaves)]
            names = leaf_paths(tree, name) if any(fault for _, fault in wrong) else []
            failures += [
                Failure(f"{names[i]} is {fault[1]}", fault[0], fault[2]) for i, fault in wrong if fault is not None
            ]
        if failures:
            refuse("pipeline: values that no stage can take", failures)

    def _fault(self, x: Any, stages: int | None) -> tuple[type[FspmdError], str, str] | None:
        """Of a value that belongs nowhere: the error, what it is, and what to write. ``stages``: of parameters."""
        if not is_sharded(x):
            return ArgumentError, described(x), "lay values out first: device_put(x, P(), mesh=mesh)"
        shown = repr(x.spec)
        if x.spec.mesh is not self.mesh and (stages is None or self.owner(x) is None):
            where = f"lay values out on {self.mesh!r}" + (", or on its parts" if stages is not None else "")
            return MeshError, shown, where
        if x.spec.mesh is self.mesh and self.axis in x.spec.partition.unreduced:
            return VarianceError, shown, f"settle sums over {self.axis!r} first: reshard(x, P(...))"
        if stages is None and self.axis in x.spec.partition.axes:
            return SpecError, shown, f"inputs and targets are not cut over {self.axis!r}"
        if stages is not None and x.spec.mesh is self.mesh and self.is_stacked(x):
            per_rank = stages // len(self.parts)
            fits = x.spec.shape[0] == stages and stages == per_rank * len(self.parts)
            if entry_axes(x.spec.partition[0]) != (self.axis,) or not fits:
                return SpecError, shown, f"a leaf that {self.axis!r} cuts has a row for each of the {stages} stages"
        return None

    def is_stacked(self, leaf: Any) -> bool:
        return self.owner(leaf) is None and self.axis in leaf.spec.partition.axes

    def of_stage(self, leaf: Any, r: int, i: int) -> Any:
        """What the ``i``-th stage of a position sees of a leaf; None of a leaf of another position."""
        owner = self.owner(leaf)
        if owner is not None:
            return leaf if owner == r else None
        return self.row(leaf, r, i) if self.is_stacked(leaf) else self.on_part(leaf, r)

    def part(self, x: Tensor, partition: P, r: int) -> Tensor:
        """The blocks of a position, of the blocks of a value on the whole mesh."""
        if not self.simulated:
            return x
        axes = self.mesh.ordered(partition.mentioned - {self.axis})
        return bind(self._blocks(x, self.mesh, axes, r), frame_over(self.parts[r], axes))

    def whole(self, blocks: dict[int, Tensor], partition: P) -> Tensor:
        """The blocks of all positions, as those of a value on the whole mesh."""
        if not self.simulated:
            return next(iter(blocks.values()))
        axes = self.mesh.ordered(partition.mentioned - {self.axis})
        columns = {r: iter(self._blocks(x, self.parts[r], axes, 0)) for r, x in blocks.items()}
        frame = frame_over(self.mesh, self.mesh.ordered({*axes, self.axis}))
        at = frame.axes.index(self.axis)
        return bind(tuple(next(columns[place[at]]) for place in itertools.product(*map(range, frame.sizes))), frame)

    def _blocks(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], r: int) -> tuple[Tensor, ...]:
        """The simulated blocks of a position. Along axes that are not named they are equal, and one is enough."""
        frame = frame_over(mesh, mesh.axis_names)
        wanted = [None if name in axes else r if name == self.axis else 0 for name in mesh.axis_names]
        return tuple(
            block
            for block, place in zip(unbind(x, frame), frame.mesh_coordinates(), strict=True)
            if all(want is None or want == i for want, i in zip(wanted, place, strict=True))
        )

    def on_part(self, x: Any, r: int) -> Any:
        """A value of the whole mesh that is not cut over the axis, on the part of a position."""
        return Sharded(
            self.part(x.local, x.spec.partition, r), TensorSpec(self.parts[r], x.spec.partition, x.spec.shape, x.dtype)
        )

    def row(self, x: Any, r: int, i: int) -> Any:
        rest = without_row(x.spec.partition)
        return Sharded(
            self.part(x.local, x.spec.partition, r)[i], TensorSpec(self.parts[r], rest, x.spec.shape[1:], x.dtype)
        )

    def stacked(self, rows: dict[int, list[Any]], spec: TensorSpec) -> Any:
        """All rows of a leaf as one value, laid out by ``spec``, of their own dtype."""
        blocks = {r: torch.stack([x.local for x in row]) if row[1:] else row[0].local[None] for r, row in rows.items()}
        dtype = next(iter(blocks.values())).dtype
        return Sharded(self.whole(blocks, spec.partition), TensorSpec(spec.mesh, spec.partition, spec.shape, dtype))

    def summed(self, values: dict[int, Any], partition: P) -> Any:
        """The sum of the values of all positions, which may be pending sums, in a layout of the whole mesh."""
        x = next(iter(values.values()))
        pending = P(*partition.entries, unreduced=x.spec.partition.unreduced | {self.axis}, reduced=partition.reduced)
        spec = TensorSpec(self.mesh, pending, x.spec.shape, x.dtype)
        return reshard(Sharded(self.whole({r: v.local for r, v in values.items()}, spec.partition), spec), partition)

    def permuted(self, edges: Any, sent: dict[int, Any], spec: TensorSpec) -> dict[int, Any]:
        """What the positions of this process receive along edges (source, destination), of values laid out by spec.

        No body runs: blocks go to the pair table as they lie.
        """
        blocks = {r: sent[r].local for r in self.mine}
        perm = tuple((source, to) for source, to, _ in edges)
        move = call("ppermute", self.mesh, (self.axis,), Options(perm=perm))
        received = apply(self.whole(blocks, spec.partition), move)
        return {
            to: Sharded(
                self.part(received, spec.partition, to),
                TensorSpec(self.parts[to], spec.partition, spec.shape, spec.dtype),
            )
            for _, to, _ in edges
            if to in self.mine
        }

    def blank(self, spec: TensorSpec, r: int) -> Sharded:
        """Zeros, which a position sends that sends nothing."""
        return zeros(*spec.shape, spec=spec.partition, dtype=spec.dtype, mesh=self.parts[r])
