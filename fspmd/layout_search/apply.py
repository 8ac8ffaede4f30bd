"""A function run with its intermediate values laid out as was found: operands are moved before each call.

What is moved where is so in any run; a call that was not recorded moves what it must by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import optree
import torch

from fspmd.global_view.calls import Calls, operands_of, replaced
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
from fspmd.wrapping import wraps

_AHEAD = 4  # steps that may be left out: what is recorded of whole values may be less of such that are no sums yet


@dataclass(frozen=True, slots=True)
class PlannedOp:
    """One op: how its operands lie, how they must, and the axes over which backward sums their gradients."""

    name: str
    before: tuple[TensorSpec, ...]
    needs: tuple[TensorSpec, ...]
    casts: tuple[tuple[str, ...], ...]
    results: tuple[TensorSpec, ...]
    computing: float  # µs, backward as well
    within: float  # µs of the collectives of a sharded body

    def __str__(self) -> str:
        parts = [
            f"{short(spec)} -> {short(need)}"
            for spec, need in zip(self.before, self.needs, strict=True)
            if spec is not need
        ]
        rows = zip(self.needs, self.casts, strict=True)
        parts += [f"gradient of {short(need)} summed over {', '.join(axes)}" for need, axes in rows if axes]
        return f"{self.name}: {'; '.join(parts)}" if parts else ""


def short(spec: TensorSpec) -> str:
    """A spec without its mesh."""
    return repr(spec).partition(" on ")[0]


def applied(
    f: Callable[..., Any], mesh: Mesh, steps: Sequence[PlannedOp], results: Sequence[P | None]
) -> Callable[..., Any]:
    """``f``, whose calls follow the steps in their order; where its results must lie, if they must."""
    calls = Calls(mesh)

    @wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _guided(calls, steps):
            out = f(*args, **kwargs)
        leaves, treedef = optree.tree_flatten(out, none_is_leaf=True)
        ends = iter(results)
        return treedef.unflatten([_ended(x, next(ends, None)) if isinstance(x, Sharded) else x for x in leaves])

    return run


def _ended(x: Sharded, partition: P | None) -> Sharded:
    target = x.spec.with_partition(P(*x.spec.partition) if partition is None else partition)
    return alike(redistribute(x.local, x.spec, target), x, target)


@contextmanager
def _guided(calls: Calls, steps: Sequence[PlannedOp], at: int = 0, under: Dispatch | None = None) -> Iterator[None]:
    """Calls follow the steps from one on; what `checkpoint` computes again those that it followed at first."""
    guides: list[_Guide] = []

    def over(below: Dispatch) -> Dispatch:
        guides.append(_Guide(calls, steps, under or below, at))
        return guides[0].dispatch

    with intercept_dispatch(over), recomputed_in(guides[0].recompute_context):
        yield


class _Guide:
    """The next step of one run."""

    def __init__(self, calls: Calls, steps: Sequence[PlannedOp], below: Dispatch, at: int) -> None:
        self.calls, self.steps, self.below, self.at = calls, steps, below, at
        self.within = False  # a call, which may make others

    def recompute_context(self) -> RecomputeContext:
        """Of what follows."""
        return functools.partial(_guided, self.calls, self.steps, self.at, self.below)

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """In place of the one that moves what it must."""
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
            places = [place for place, _ in asked.question.operands]
            rows = zip(places, operands, step.needs, step.casts, strict=True)
            moved = {at: _moved(x, need, axes) for at, x, need, axes in rows if isinstance(x, Sharded)}
            args, kwargs = replaced(args, kwargs, moved)
        return self._run(func, types, args, kwargs)

    def _run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.within = True
        try:
            return self.below(func, types, args, kwargs)
        finally:
            self.within = False

    def _next(self, name: str, shapes: list[tuple[int, ...]] | None) -> PlannedOp | None:
        """The step of a call, if one of the next is of that name and of operands of those shapes."""
        for at in range(self.at, min(self.at + _AHEAD, len(self.steps))):
            step = self.steps[at]
            if step.name == name and (shapes is None or [spec.shape for spec in step.needs] == shapes):
                self.at = at + 1
                return step
        return None


def _moved(x: Sharded, need: TensorSpec, axes: tuple[str, ...]) -> Sharded:
    """Where it must lie; of a gather that is then cast the gradient is scattered."""
    target = x.spec.with_partition(need.partition)
    if target is x.spec:
        return x
    followed = x.requires_grad and torch.is_grad_enabled()
    way, local = moves(x.spec, target, axes if followed else (), topology(), followed), x.local
    for one in way.calls:
        local = apply(local, one)
    partition = target.partition
    reduced = partition.reduced.union(*(one.axes for one in way.calls if one.pair.name == "all_gather_reduced"))
    target = target.with_partition(P(*partition, unreduced=partition.unreduced, reduced=reduced))
    return alike(local, x, target)
