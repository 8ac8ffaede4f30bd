"""What the stages of a pipeline pass on, and return beside it: found by recording each of them alone, and compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import optree

from fspmd import tracing
from fspmd.errors import ArgumentError, FspmdError, MeshError, ShapeError, TreeError
from fspmd.meshes.mesh import set_mesh
from fspmd.messages import described
from fspmd.nn.places import Places, without_row
from fspmd.nn.schedules import Schedule
from fspmd.placement.reshard import reshard
from fspmd.programs.capture import capture_fake
from fspmd.sharded import is_sharded
from fspmd.spec import P, TensorSpec

Stage = Callable[[Any, Any], Any]


def boundary_of(
    places: Places,
    schedule: Schedule,
    functions: Sequence[Stage],
    leaves: Sequence[Any],
    treedef: Any,
    first: TensorSpec,
    has_aux: bool,
) -> tuple[TensorSpec | None, Any]:
    """What stages pass on of an input, and beside it, by recording each of them alone, without values.

    An abstract mesh takes no time for many ranks, but does not tell the lengths of uneven blocks that a body returns.
    Where there are some, the ranks of a simulation do.
    """

    def on(transport: str) -> tuple[TensorSpec | None, Any]:
        mesh = places.stand_in(transport)

        def seen(leaf: Any, r: int) -> TensorSpec | None:
            if places.owner(leaf) not in (None, r):
                return None
            cut = places.is_stacked(leaf)
            return TensorSpec(mesh, without_row(leaf.spec.partition, cut), leaf.spec.shape[cut:], leaf.dtype)

        x = TensorSpec(mesh, first.partition, first.shape, first.dtype)
        boundaries, aux = [], []
        for stage, function in enumerate(functions if has_aux else functions[:-1]):
            r = schedule.ranks_of_stages[stage]
            params = treedef.unflatten([seen(leaf, r) for leaf in leaves])
            x, beside = _specs_of(function, params, x, has_aux, stage)
            boundaries.append(x)
            aux.append(beside)
        between = boundaries[: schedule.stages - 1]
        _check_alike(between, "stage", "", ShapeError, "pass on one shape, dtype and layout")
        check_one_aux(aux, "stage")
        return next(iter(between), None), next(iter(aux), None)

    try:
        return on("abstract")
    except MeshError:
        simulated: Any = on("simulation")
    mesh = places.stand_in("abstract")  # as of other microbatches
    boundary, aux = optree.tree_map(lambda x: TensorSpec(mesh, x.partition, x.shape, x.dtype), simulated)
    return boundary, aux


def check_one_aux(trees: list[Any], of: str) -> None:
    """Raise unless all stages, or all microbatches, return aux alike."""
    _check_alike(trees, of, " as aux", TreeError, "return one tree of one shape, dtype and layout")


def _check_alike(values: list[Any], of: str, what: str, error: type[FspmdError], law: str) -> None:
    for i, (before, after) in enumerate(itertools.pairwise(values), 1):
        if before != after:
            raise error(
                f"pipeline: {of} {i} returns {after!r}{what}, but {of} {i - 1} returns {before!r}; all of them {law}"
            )


@tracing.hidden
def _specs_of(stage: Stage, params: Any, x: TensorSpec, has_aux: bool, place: int) -> tuple[TensorSpec, Any]:
    """The layouts of the results of a stage. The stage is recorded and does not run, also while `jit` records."""

    def settled(params: Any, x: Any) -> Any:
        y, _, aux = result_of(stage(params, x), has_aux, place)
        return optree.tree_map(without_pending, (y, aux), is_leaf=is_sharded)

    with set_mesh(x.mesh):
        out = capture_fake(settled, (params, x), {}).out
    specs: Any = optree.tree_map(lambda y: y.spec, out, is_leaf=is_sharded)
    return specs  # type: ignore[no-any-return]


def result_of(out: Any, has_aux: bool, stage: int) -> tuple[Any, Any, Any]:
    """What a stage passes on, its part of the loss, and what it returns beside."""
    if not has_aux:
        out = out, 0.0, None
    if not isinstance(out, tuple) or len(out) != 3:
        given = f"a tuple of {len(out)}" if isinstance(out, tuple) else described(out)
        raise TreeError(
            f"pipeline: with has_aux=True a stage returns (y, part, aux), but stage {stage} returned {given}"
        )
    if not is_sharded(out[0]):
        raise ArgumentError(f"pipeline: stage {stage} returned {described(out[0])} to pass on; expected one Sharded")
    if out[1].shape != () if is_sharded(out[1]) else not isinstance(out[1], Real):
        raise TreeError(
            f"pipeline: stage {stage} returned {described(out[1])} for its part of the loss; expected a scalar: a "
            "Sharded or a number"
        )
    for leaf in optree.tree_leaves(out[2], is_leaf=is_sharded):
        if not is_sharded(leaf):
            raise TreeError(
                f"pipeline: stage {stage} returned {described(leaf)} in aux; expected Sharded values, on the part of "
                "the mesh that the stage has"
            )
    return out


def without_pending(x: Any) -> Any:
    """A value without pending sums."""
    return reshard(x, P(*x.spec.partition.entries))
