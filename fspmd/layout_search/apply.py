"""The layouts that `auto_spec` found, and runs of a function with them: operands are moved before each call.

Every run makes the same moves. A call that was not recorded moves its operands as it does without `auto_spec`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import optree
import torch

from fspmd.global_view.composed import Calls, operands_of, replaced
from fspmd.global_view.interceptors import Dispatch, intercept_dispatch
from fspmd.global_view.refusals import shown
from fspmd.meshes.mesh import Mesh
from fspmd.pairs import apply
from fspmd.redistribution.cost import topology
from fspmd.redistribution.moves import moves
from fspmd.redistribution.redistribute import redistribute
from fspmd.sharded import Sharded, alike
from fspmd.spec import P, TensorSpec
from fspmd.tracing import RecomputeContext, recomputed_in
from fspmd.wrappers import wraps

_AHEAD = 4  # the most steps to search: a run may leave out steps that were recorded on replicated values


@dataclass(frozen=True, slots=True)
class PlannedOp:
    """An op with its layouts.

    Attributes:
        name: the name of its function.
        before: the layouts of its operands.
        needs: the layouts that it needs.
        casts: for each operand, the axes over which backward sums its gradient.
        results: the layouts of its results.
        computing: µs of its computation, forward and backward.
        within: µs of the collectives of a sharded body, forward and backward.
    """

    name: str
    before: tuple[TensorSpec, ...]
    needs: tuple[TensorSpec, ...]
    casts: tuple[tuple[str, ...], ...]
    results: tuple[TensorSpec, ...]
    computing: float
    within: float

    def __str__(self) -> str:
        parts = [
            f"{spec.text} -> {need.text}"
            for spec, need in zip(self.before, self.needs, strict=True)
            if spec is not need
        ]
        rows = zip(self.needs, self.casts, strict=True)
        parts += [f"gradient of {need.text} summed over {', '.join(axes)}" for need, axes in rows if axes]
        return f"{self.name}: {'; '.join(parts)}" if parts else ""


def applied(
    f: Callable[..., Any], mesh: Mesh, steps: Sequence[PlannedOp], results: Sequence[P | None]
) -> Callable[..., Any]:
    """``f`` with calls that follow the steps in order. ``results``: layouts to which results are moved, or None."""
    calls = Calls(mesh)

    @wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _guided(calls, steps):
            out = f(*args, **kwargs)
        leaves, treedef = optree.tree_flatten(out, none_is_leaf=True)
        ends = iter(results)
        return treedef.unflatten([_settled(x, next(ends, None)) if isinstance(x, Sharded) else x for x in leaves])

    return run


def _settled(x: Sharded, partition: P | None) -> Sharded:
    """A result, moved to a partition; by default with its pending sums settled."""
    target = x.spec.with_partition(P(*x.spec.partition) if partition is None else partition)
    return alike(redistribute(x.local, x.spec, target), x, target)


@contextmanager
def _guided(calls: Calls, steps: Sequence[PlannedOp], at: int = 0, under: Dispatch | None = None) -> Iterator[None]:
    """Within, calls follow the steps from place ``at`` on. Calls that `checkpoint` repeats follow the same steps."""
    guides: list[_Guide] = []

    def over(below: Dispatch) -> Dispatch:
        guides.append(_Guide(calls, steps, under or below, at))
        return guides[0].dispatch

    with intercept_dispatch(over), recomputed_in(guides[0].recompute_context):
        yield


class _Guide:
    """The guide of one run, which knows the next step."""

    def __init__(self, calls: Calls, steps: Sequence[PlannedOp], below: Dispatch, at: int) -> None:
        self.calls, self.steps, self.below, self.at = calls, steps, below, at
        self.within = False  # whether a call runs, which may make other calls

    def recompute_context(self) -> RecomputeContext:
        """A context in which repeated calls follow the steps from the current one on."""
        return functools.partial(_guided, self.calls, self.steps, self.at, self.below)

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Move operands as the next step says, and run the call."""
        kwargs = kwargs or {}
        if self.within:
            return self.below(func, types, args, kwargs)
        asked = self.calls.ask(func, args, kwargs)
        if asked.run is not None:
            return asked.run(args, kwargs)
        if asked.question is None:
            self._next(shown(func), None)
            return self._run(func, types, args, kwargs)
        operands = operands_of(asked.question, args, kwargs)
        step = self._next(shown(func), [tuple(x.shape) for x in operands])
        if step is not None:
            rows = zip(asked.question.places, operands, step.needs, step.casts, strict=True)
            moved = {place: _moved(x, need, axes) for place, x, need, axes in rows if isinstance(x, Sharded)}
            args, kwargs = replaced(args, kwargs, moved)
        return self._run(func, types, args, kwargs)

    def _run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.within = True
        try:
            return self.below(func, types, args, kwargs)
        finally:
            self.within = False

    def _next(self, name: str, shapes: list[tuple[int, ...]] | None) -> PlannedOp | None:
        """The step of a call, if one of the next steps has its name and the shapes of its operands."""
        for at in range(self.at, min(self.at + _AHEAD, len(self.steps))):
            step = self.steps[at]
            if step.name == name and (shapes is None or [spec.shape for spec in step.needs] == shapes):
                self.at = at + 1
                return step
        return None


def _moved(x: Sharded, need: TensorSpec, axes: tuple[str, ...]) -> Sharded:
    """The operand in the layout ``need``. If it is gathered and then cast over ``axes``, its gradient is scattered."""
    target = x.spec.with_partition(need.partition)
    if target is x.spec:
        return x
    followed = x.requires_grad and torch.is_grad_enabled()
    move = moves(x.spec, target, axes if followed else (), topology(), followed)
    local = apply(x.local, *move.calls)
    partition = target.partition
    reduced = partition.reduced.union(*(call.axes for call in move.calls if call.pair.name == "all_gather_reduced"))
    target = target.with_partition(P(*partition, unreduced=partition.unreduced, reduced=reduced))
    return alike(local, x, target)


_ROUNDING = 1e-9


@dataclass(frozen=True)
class Layouts:
    """The result of `auto_spec`. Printing it shows a table."""

    mesh: Mesh
    """The mesh."""
    specs: Any
    """A tree like the arguments, with the `P` of each tensor, for ``device_put(args, layouts.specs, mesh=mesh)``."""
    time: float
    """µs of one call: computation, and collectives forward and backward."""
    bound: float
    """µs that no plan can beat. It is less than `time` if a search under a memory limit ended early."""
    memory: int
    """The bytes that a rank holds: arguments, their gradients, results, and values that backward keeps.

    Values that live only while an op runs do not count, such as a weight that is gathered for it. Values that
    `checkpoint` does not keep count. For ``jit(layouts.apply(f)).lower(...).memory()`` it is the other way round.
    """
    leaves: tuple[tuple[str, TensorSpec], ...]
    """The key path and the layout of each tensor among the arguments."""
    steps: tuple[PlannedOp, ...]
    """The ops, with the layouts of their operands and the layouts that they need."""
    results: tuple[P | None, ...]
    """For each result that is an argument of the next call, the layout of this argument; None for other results."""
    alternatives: tuple[Layouts, ...] = ()
    """The runners-up, the quickest first. Each has another layout of some argument than every plan before it."""
    peak: int | None = None
    """The most bytes that a rank holds while the recorded program runs, if `memory_limit` was given."""

    @property
    def communication(self) -> float:
        """µs of `time` that collectives take."""
        return self.time - sum(step.computing for step in self.steps)

    def __str__(self) -> str:
        width = max((len(name) for name, _ in self.leaves), default=0)
        above = self.time / self.bound - 1 if self.bound else 0.0
        gap = f"; at most {100 * above:.2g}% above the optimum" if above > _ROUNDING else ""
        time = f"{self.time:,.1f} µs, of which {self.communication:,.1f} are collectives"
        memory = f"{self.memory:,} B on each rank" if self.peak is None else f"at most {self.peak:,} B on a rank"
        lines = [f"{time}{gap}; {memory}"]
        lines += [f"  {name:{width}}  {spec.text:<32} {spec.partition}" for name, spec in self.leaves]
        moved = [f"  {step}" for step in self.steps if str(step)]
        return "\n".join([*lines, *(["moves:", *moved] if moved else ["no moves"])])

    __repr__ = __str__

    def apply(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """``f`` with intermediate values in the layouts that were found.

        Operands are moved before each call, as by `reshard`. Pending sums of results are settled, or results are moved
        to the layouts of the arguments of the next call. Communication forward and backward is as predicted. Without
        this function, each torch function chooses the cheapest layouts for itself alone. Apply it before `jit`.
        """
        return applied(f, self.mesh, self.steps, self.results)
