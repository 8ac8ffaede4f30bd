"""A model cut into stages along an axis of the mesh: loss and gradients by a schedule."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Real
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd import tracing
from fspmd.autodiff.engine import gradients
from fspmd.body import check_outside
from fspmd.cache import Cache, forgettable
from fspmd.errors import ArgumentError, AxisError
from fspmd.meshes.mesh import Mesh, set_mesh
from fspmd.messages import described, quoted
from fspmd.nn.arguments import checked
from fspmd.nn.boundaries import Stage, boundary_of, check_one_aux, result_of, without_pending
from fspmd.nn.parameters import Precision, cast_terms, check_dtypes, dtype_of_sum, gathered, settled
from fspmd.nn.places import Places
from fspmd.nn.schedules import Action, Schedule
from fspmd.nn.sequences import Axes, names_of
from fspmd.placement.creation import full, zeros
from fspmd.placement.device_put import device_get
from fspmd.placement.reshard import reshard
from fspmd.sharded import is_sharded
from fspmd.spec import P, TensorSpec


@checked
def pipeline(
    stages: Stage | Sequence[Stage],
    schedule: Schedule,
    *,
    loss: Callable[[Any, Any], Any],
    count: Callable[[Any], Any] | None = None,
    mesh: Mesh,
    axis: str = "pp",
    over: Axes = (),
    precision: Precision | None = None,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """A function of parameters, inputs and targets that returns the loss and its gradients, by a schedule.

    Its last argument, ``scale=None``, is a factor of the loss in backward alone: gradients are of the loss times it.

    Stages are functions ``stage(params, x)`` of `Sharded` values, in the global view. They run on the part of the mesh
    that has their position along ``axis``, so other axes may cut batches and parameters. A stage in the local view
    calls `shard_map`, which takes the mesh of the stage by itself.

    The layout of a parameter says whose it is. A leaf ``[stages, ...]`` with ``P(axis, ...)`` has a row for each stage,
    in the order of ``schedule.order``. A leaf on ``mesh.split(axis, [1] * ranks)[r]`` belongs to the stages of rank
    ``r``, and other stages see None in its place: so each stage may have a tree of its own. Any other leaf belongs to
    all stages, such as an embedding that the first and the last share: its gradients are summed over stages, once.

    Args:
        stages: One function for all stages, or a list with one for each.
        loss: ``loss(y, target)`` returns the sum of the losses of a microbatch, a scalar.
        count: ``count(target)`` returns the number of items of a microbatch. The loss is divided by the number of items
            of all microbatches before backward. Without it that number is the number of microbatches.
        axis: The mesh axis of the stages.
        over: The mesh axes over which gradients stay pending until the last microbatch, as in `accumulate`: parameters
            are `gathered` over them before the first one, and gradients are summed once. Over other axes they are
            summed in each microbatch.
        precision: The dtypes of the computation and of sums, as in `accumulate`.
        has_aux: Stages return ``(y, part, aux)`` instead of ``y``. The scalar ``part`` is added to the loss of the
            microbatch, such as a loss of the balance of experts. ``aux`` is a tree of values, such as counts of tokens,
            that are added up over microbatches, as in `accumulate`. The result is ``((loss, aux), gradients)``, where
            leaves of ``aux`` are stacked: [stages, ...] with ``P(axis, ...)``, in the order of ``schedule.order``.

    Inputs and targets are lists with one entry for each microbatch, not cut over ``axis``. What stages pass on of a
    microbatch has one shape, dtype and layout. With ``schedule.forwards()`` nothing is kept for backward, and the
    gradients are None. The loss is float32, or float64 if that is what stages pass on.

    Communication: that of the stages; after each tick one permute along ``axis`` over the edges of ``schedule.moves``,
    which all ranks join, or one for each shape if microbatches have several; at the end an all-reduce of the loss, one
    for each shared leaf, and one or a reduce-scatter for each leaf over the axes ``over``.

    Raises:
        ArgumentError: the schedule does not fit the mesh or the microbatches; or values are not `Sharded`.
        AxisError: the mesh has no such axis.
        MeshError: a value lies on another mesh.
        SpecError: the layout of a value does not say whose it is.
        VarianceError: a value is a pending sum over the axis of the stages.
        ShapeError: a stage returns another shape, dtype or layout than the stage before.
        TreeError: with ``has_aux``, a stage returns no such triple, or ``aux`` of another structure, shape, dtype or
            layout than another stage, or than of another microbatch.

    >>> from fspmd import device_put, make_mesh
    >>> from fspmd.nn import one_f_one_b
    >>> mesh = make_mesh((4,), ("pp",), transport="simulation")
    >>> step = pipeline(
    ...     lambda w, x: x * w, one_f_one_b(4, 2), loss=lambda y, t: ((y - t) ** 2).sum(), mesh=mesh, axis="pp"
    ... )
    >>> w = device_put(torch.tensor([1.0, 2.0, 3.0, 4.0]), P("pp"), mesh=mesh)
    >>> x, t = device_put(([torch.ones(1)] * 2, [torch.zeros(1)] * 2), P(), mesh=mesh)
    >>> value, gradient = step(w, x, t)
    >>> value, device_get(gradient)
    (tensor(576.), tensor([1152.,  576.,  384.,  288.]))
    """
    given_axes = names_of(over)
    functions = _stage_functions(stages, schedule, loss, mesh, axis, given_axes)
    places = Places(mesh, axis)
    boundaries: Cache[Any, tuple[Any, Any]] = forgettable(Cache())  # by the layouts of parameters and input

    def step(params: Any, inputs: Sequence[Any], targets: Sequence[Any], scale: Any = None) -> tuple[Any, Any]:
        check_outside("pipeline")
        _check_microbatches(inputs, targets, schedule)
        if schedule.ranks > 1:
            tracing.note_unlike(f"each rank runs the actions of its stages in the schedule {schedule.name}")
        places.check((params, inputs, targets), schedule.stages)
        if precision is not None:
            check_dtypes(params, (precision.param,), "pipeline")
        whole = gathered(params, over, dtype=precision) if given_axes or precision is not None else params
        wide, reduce = (None, None) if precision is None else (precision.accumulate, precision.reduce)
        run = _PipelineCall(places, schedule, functions, loss, whole, inputs, targets, wide, _factor(scale), has_aux)
        layouts = run.treedef, tuple(x.spec for x in run.leaves)
        beside: list[Any] = []
        for x in inputs:
            key = layouts, x.spec
            if key not in boundaries:
                boundaries[key] = boundary_of(places, schedule, functions, run.leaves, run.treedef, x.spec, has_aux)
            boundary, aux = boundaries[key]
            run.boundaries.append(boundary)
            beside.append(aux)
        check_one_aux(beside, "microbatch")
        run.aux = beside[0]
        run.count = schedule.microbatches if count is None else _total([count(target) for target in targets])
        ranks = {r: _Rank(run, r) for r in places.mine}
        run.act(ranks)
        value: Any = device_get(places.summed({r: rank.value for r, rank in ranks.items()}, P()))
        value = (value, run.aux_of(ranks)) if has_aux else value
        if not run.trains:
            return value, None
        grads = run.gradients(ranks)
        return value, grads if whole is params else settled(grads, params, over, None, None, reduce)

    return step


def _stage_functions(
    stages: Any, schedule: Schedule, loss: Any, mesh: Mesh, axis: str, over: tuple[str, ...]
) -> list[Stage]:
    """A function for each stage, after checks of all arguments of `pipeline`."""
    if unknown := [name for name in (axis, *over) if name not in mesh.shape]:
        raise AxisError(f"pipeline got the axis {quoted(unknown)}, but {mesh!r} has only {quoted(mesh.axis_names)}")
    if axis in over:
        raise ArgumentError(
            f"pipeline got over={over!r}, with the axis of the stages; name the axes that cut batches, such as 'dp'"
        )
    if mesh.shape[axis] != schedule.ranks:
        raise ArgumentError(
            f"pipeline: the schedule {schedule.name} is for {schedule.ranks} ranks, but the axis {axis!r} has "
            f"{mesh.shape[axis]}"
        )
    schedule.validate()
    functions = [stages] * schedule.stages if callable(stages) else [*stages] if isinstance(stages, Iterable) else []
    if not functions or not all(map(callable, (*functions, loss))):
        raise ArgumentError(
            f"pipeline got {described(stages)} for stages and {described(loss)} for loss; give it a function for all "
            "stages or a list of one for each, and a function loss(y, target)"
        )
    if len(functions) != schedule.stages:
        raise ArgumentError(f"pipeline got {len(functions)} stages, but the schedule has {schedule.stages}")
    return functions


def _check_microbatches(inputs: Any, targets: Any, schedule: Schedule) -> None:
    for name, given in (("inputs", inputs), ("targets", targets)):
        if not isinstance(given, (list, tuple)):
            raise ArgumentError(
                f"pipeline got {described(given)} for {name}; give it a list with one entry for each microbatch"
            )
    if not len(inputs) == len(targets) == schedule.microbatches:
        raise ArgumentError(
            f"pipeline got {len(inputs)} inputs and {len(targets)} targets, but the schedule has "
            f"{schedule.microbatches} microbatches"
        )


def _total(counts: list[Any]) -> Any:
    """The number of items of all microbatches."""
    for x in counts:
        _check_number("count returned", x)
    total = functools.reduce(operator.add, counts)
    return device_get(total) if is_sharded(total) else total


def _factor(scale: Any) -> Any:
    """The factor of the loss in backward, which all ranks have, if there is one."""
    if scale is not None:
        _check_number("scale is", scale)
    return device_get(scale) if is_sharded(scale) else scale


def _check_number(what: str, x: Any) -> None:
    if not isinstance(x, (Tensor, Real)) or (isinstance(x, Tensor) and x.ndim):
        raise ArgumentError(f"pipeline: {what} {described(x)}; expected a number, or a 0-d tensor")


def _key(action: Action) -> tuple[bool, int, int]:
    return action.kind == "F", action.stage, action.microbatch


class _PipelineCall:
    """One call: the values of all ranks, and what stages pass on."""

    def __init__(
        self,
        places: Places,
        schedule: Schedule,
        functions: list[Stage],
        loss: Callable[[Any, Any], Any],
        params: Any,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        wide: torch.dtype | None,
        scale: Any,
        has_aux: bool,
    ) -> None:
        self.wide = wide  # the dtype in which gradients are summed; None for their own
        self.places, self.schedule, self.functions, self.loss = places, schedule, functions, loss
        self.scale, self.has_aux = scale, has_aux
        self.leaves, self.treedef = optree.tree_flatten(params, is_leaf=is_sharded)
        self.inputs, self.targets, self.trains = inputs, targets, schedule.trains
        self.count: Any = 1
        self.boundaries: list[Any] = []  # of each microbatch
        self.aux: Any = None  # how what a stage returns beside lies

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the loss. All ranks know it, and the last stage alone computes one."""
        given, passed_on = [x.dtype for x in self.leaves], [x.dtype for x in self.boundaries if x is not None]
        first = next((dtype for dtype in given if dtype.is_floating_point), torch.float32)
        floating = [dtype.to_real() for dtype in passed_on if dtype.is_floating_point or dtype.is_complex]
        return functools.reduce(torch.promote_types, floating or [first], torch.float32)

    def act(self, ranks: dict[int, _Rank]) -> None:
        """Run the actions of all ticks, and pass values on between them. ``ranks``: those of this process."""
        schedule, blank = self.schedule, functools.cache(self.places.blank)
        for row, rounds in zip(schedule.ticks, schedule.moves(), strict=True):
            now = {r: action for r in ranks if (action := row[r]) is not None}
            sent = {r: ranks[r].act(action) for r, action in now.items()}
            for r, value in sent.items():
                to = schedule.successor(now[r])
                if to is not None and schedule.ranks_of_stages[to.stage] == r:
                    ranks[r].inbox[_key(to)] = value
            for edges, boundary in self.by_boundary(rounds):
                sources = {source for source, _, _ in edges}
                given = {r: sent[r] if r in sources else blank(boundary, r) for r in ranks}
                received = self.places.permuted(edges, given, boundary)
                for _, r, action in edges:
                    after = schedule.successor(action)
                    if r in ranks and after is not None:
                        ranks[r].inbox[_key(after)] = received[r]

    def gradients(self, ranks: dict[int, _Rank]) -> Any:
        """The gradients of the parameters, after all actions."""
        grads: list[Any] = []
        for i, leaf in enumerate(self.leaves):
            if (owner := self.places.owner(leaf)) is not None:
                grads.append(ranks[owner].gradient(i) if owner in ranks else leaf)  # elsewhere it is empty
            elif self.places.is_stacked(leaf):
                rows = {r: [rank.grads[s][i] for s in rank.stages] for r, rank in ranks.items()}
                grads.append(self.places.stacked(rows, leaf.spec.dual))
            else:
                own = {r: rank.gradient(i) for r, rank in ranks.items()}
                grads.append(self.places.summed(own, leaf.spec.dual.partition))
        return self.treedef.unflatten(grads)

    def aux_of(self, ranks: dict[int, _Rank]) -> Any:
        """What stages returned beside, stacked in the order of stages."""
        specs, treedef = optree.tree_flatten(self.aux)
        leaves = {r: [treedef.flatten_up_to(rank.aux[s]) for s in rank.stages] for r, rank in ranks.items()}
        stacks = []
        for i, spec in enumerate(specs):
            rows = {r: [row[i] for row in of_stages] for r, of_stages in leaves.items()}
            cut = P(self.places.axis, *spec.partition)
            whole = TensorSpec(self.places.mesh, cut, (self.schedule.stages, *spec.shape), spec.dtype)
            stack = self.places.stacked(rows, whole)
            stacks.append(stack if stack.dtype is torch.int64 else cast_terms(stack, spec.dtype))
        return treedef.unflatten(stacks)

    def by_boundary(self, rounds: Any) -> Iterator[tuple[list[tuple[int, int, Action]], TensorSpec]]:
        """Yield the edges of each permute. What travels in it has one shape."""
        for edges in rounds:
            for boundary in dict.fromkeys(self.boundaries[action.microbatch] for *_, action in edges):
                yield [edge for edge in edges if self.boundaries[edge[2].microbatch] is boundary], boundary


class _Rank:
    """What one position along the axis holds between ticks."""

    def __init__(self, run: _PipelineCall, r: int) -> None:
        places, schedule = run.places, run.schedule
        self.run_of, self.mesh = run, places.parts[r]
        self.stages = [s for s in schedule.order if schedule.ranks_of_stages[s] == r]
        self.params = {s: [places.of_stage(x, r, i) for x in run.leaves] for i, s in enumerate(self.stages)}
        self.grads: dict[int, list[Any]] = {}
        self.aux: dict[int, Any] = {}
        self.inbox: dict[tuple[bool, int, int], Any] = {}
        self.kept: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.inputs = [places.on_part(x, r) for x in run.inputs] if 0 in self.stages else []
        self.targets = [places.on_part(x, r) for x in run.targets] if schedule.stages - 1 in self.stages else []
        self.pending = P(unreduced=self.mesh.axis_names)
        self.value: Any = zeros((), spec=self.pending, dtype=run.dtype, mesh=self.mesh)

    def act(self, action: Action) -> Any:
        """Run an action, and return what it passes on."""
        with set_mesh(self.mesh):
            if action.kind == "F":
                return self._forward(action.stage, action.microbatch)
            return self._backward(*action)

    def gradient(self, i: int) -> Any:
        """The gradient of a leaf, summed over the stages of this rank."""
        return functools.reduce(operator.add, [grads[i] for grads in self.grads.values()])

    def _forward(self, stage: int, m: int) -> Any:
        run = self.run_of
        x = self.inbox.pop((True, stage, m)) if stage else self.inputs[m]
        with torch.set_grad_enabled(run.trains):
            params = [_leaf(p) for p in self.params[stage]]
            x = _leaf(x) if stage else x
            y, part, aux = result_of(run.functions[stage](run.treedef.unflatten(params), x), run.has_aux, stage)
            is_last = stage == run.schedule.stages - 1
            roots = [] if is_last else [reshard(y, run.boundaries[m].partition)]
            for term in (self._loss(y, m), part) if is_last else (part,):
                if is_sharded(term) or term:
                    roots.append(self._added(term))
        if run.has_aux:
            aux = optree.tree_map(_summand, aux, is_leaf=is_sharded)
            old = self.aux.get(stage)
            self.aux[stage] = aux if old is None else optree.tree_map(operator.add, old, aux, is_leaf=is_sharded)
        if run.trains:
            self.kept[stage, m] = (params, x, roots)
        return None if is_last else roots[0].detach()

    def _added(self, part: Any) -> Any:
        """Add a part of the loss, a scalar or a number, to the value. Return it as backward begins from it."""
        run = self.run_of
        given = part if is_sharded(part) else full((), part, spec=P(), dtype=run.dtype, mesh=self.mesh)
        mean = given / run.count
        self.value = self.value + reshard(mean.detach().to(run.dtype), self.pending)  # summed over ranks once
        return mean if run.scale is None else mean * run.scale

    def _loss(self, y: Any, m: int) -> Any:
        total = self.run_of.loss(y, self.targets[m])
        if not is_sharded(total) or total.ndim or not total.is_floating_point():
            raise ArgumentError(
                f"pipeline: the loss returned {described(total)}; it returns the sum of the losses of a microbatch, a "
                "0-d Sharded of floats"
            )
        return total

    def _backward(self, kind: str, stage: int, m: int) -> Any:
        params, x, roots, *cotangents = self.kept[stage, m]
        if kind in "BI" and stage < self.run_of.schedule.stages - 1:
            cotangents = [self.inbox.pop((False, stage, m))]
        to_x = [x] if kind in "BI" and stage else []
        to_params = params if kind in "BW" else []
        if kind == "I":
            self.kept[stage, m] = (params, x, roots, *cotangents)
        else:
            del self.kept[stage, m]
        wanted = [t for t in (*to_x, *to_params) if t is not None and t.requires_grad]
        values: Iterator[Any] = itertools.repeat(None)
        pairs = [pair for pair in itertools.zip_longest(roots, cotangents) if pair[0].requires_grad]
        if wanted and pairs:
            outs, seeds = zip(*pairs, strict=True)
            values = iter(gradients(outs, wanted, seeds, retain_graph=kind == "I", allow_unused=True))
        new_gradients = [_gradient(t, values) for t in (*to_x, *to_params)]
        if to_params:
            new, old = new_gradients[len(to_x) :], self.grads.get(stage)
            if self.run_of.wide is not None:
                new = [a if a is None else cast_terms(a, self.run_of.wide) for a in new]
            if self.run_of.schedule.microbatches == 1:  # what autograd gives may share memory; sums do not
                new = [a if a is None else a.clone() for a in new]
            self.grads[stage] = (
                new if old is None else [a if a is None else a + b for a, b in zip(old, new, strict=True)]
            )
        return new_gradients[0] if to_x else None


def _summand(x: Any) -> Any:
    """A value that a stage returns beside, as it is added up over microbatches."""
    return without_pending(cast_terms(x.detach(), dtype_of_sum(x.dtype)))


def _leaf(x: Any) -> Any:
    """A value from which autograd begins. None stays, in the place of a leaf of other stages."""
    return None if x is None else x.detach().requires_grad_(x.is_floating_point() or x.is_complex())


def _gradient(x: Any, values: Iterator[Any]) -> Any:
    """The gradient of a leaf, in its layout: the next of ``values`` if autograd follows the leaf."""
    if x is None:
        return None
    g = next(values) if x.requires_grad else None
    layout = x.spec.dual.partition
    return zeros(*x.spec.shape, spec=layout, dtype=x.dtype, mesh=x.spec.mesh) if g is None else reshard(g, layout)
