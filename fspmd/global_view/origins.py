"""The origin of a value that is made of less: an embedding, an expanded or repeated tensor, or a result of these.

If such a value is equal on all ranks and is cut later, each rank makes its part anew, from cast or cut operands.
Backward then sums gradients of the operands and gathers nothing. For a table ``[2, D]``, looked up at ``[B, S]`` places
and then cut along B, it all-reduces ``[2, D]`` in place of a gather of ``[B, S, D]``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspmd.entries import Entry
from fspmd.global_view.flat_dims import regrouped
from fspmd.global_view.op_plan import OpPlan, cast_operands, move_operands, plan_of
from fspmd.global_view.question import Question
from fspmd.global_view.strategies import PASSES, Strategy, best_strategy, working
from fspmd.ops.signatures import at
from fspmd.pairs import is_transformed
from fspmd.redistribution.cost import topology
from fspmd.redistribution.moves import Leg, moves
from fspmd.redistribution.redistribute import keep, repeats_along, time_of_equal
from fspmd.remembered import Stamp, is_unwritten, origin_of, remember_origin, stamp
from fspmd.rules import Row
from fspmd.rules.factors import Factors, elementwise
from fspmd.rules.shifts import repeated
from fspmd.rules.views import reshaped
from fspmd.spec import P, TensorSpec, is_float


def noting_origin(question: Question, plan: OpPlan, result: TensorSpec) -> OpPlan:
    """Return the plan of a call that enlarges its operands. It notes the origin of the result."""
    again = _Again(question, result)
    return replace(plan, made=True, local=functools.partial(_noted, plan.local, again))


def _noted(local: Callable[..., Tensor], again: _Again, *args: Any, **kwargs: Any) -> Tensor:
    out = local(*args, **kwargs)
    if out.requires_grad and not is_transformed():
        blocks = (*args, *kwargs.values())
        if not any(out is x for x in blocks):  # a cast to its own dtype returns its operand
            remember_origin(out, _Origin(again, out, blocks))
    return out


class _Again:
    """A call that is planned again, for a cut result."""

    def __init__(self, question: Question, result: TensorSpec) -> None:
        self.places, self.result = question.places, result
        self.question, self.grown = question, list[tuple[int, int]]()
        if question.row.rule is repeated and prod(result.shape) != prod(question.operands[0].shape):
            self.question, self.grown = _by_places(question, result)
        self.plans: dict[Any, _Remake | None] = {}

    def given(self, blocks: Sequence[Any]) -> list[Any]:
        """Return the arguments of the call that is planned again."""
        if not self.grown:
            return list(blocks)
        x: Tensor = at(blocks, self.places[0])
        return [x, *[torch.arange(after, device=x.device) % before for before, after in self.grown]]

    def run(self, blocks: Sequence[Any], need: TensorSpec) -> Tensor | None:
        """Return this rank's block in another layout of the result, or None if a gather of the gradient is cheaper."""
        given = self.given(blocks)
        remake = self._remake(given, need)
        if remake is None or self._time(remake, given, set()) >= moves(self.result, need, (), topology(), True).time:
            return None
        plan = remake.plan
        casts = move_operands(plan, given)
        casts += cast_operands(plan, given)
        n, names = (len(given), ()) if plan.in_order else (self.question.positional, self.question.names)
        out: Tensor = plan.local(*given[:n], **dict(zip(names, given[n:], strict=True)))
        keep(casts, out)
        return out

    def time(self, blocks: Sequence[Any], need: TensorSpec, counted: set[tuple[int, TensorSpec]]) -> float:
        """Return the µs that `run` takes, infinite if it returns None. Operands may be made anew themselves.

        ``counted``: the operands that were counted, and their layouts. Several calls may share one.
        """
        given = self.given(blocks)
        remake = self._remake(given, need)
        return inf if remake is None else self._time(remake, given, counted)

    def _time(self, remake: _Remake, given: list[Any], counted: set[tuple[int, TensorSpec]]) -> float:
        time = remake.time
        for i, leg in remake.legs.items():
            x = at(given, self.question.places[i])
            if isinstance(origin := origin_of(x), _Origin) and (id(x), leg.reached) not in counted:
                counted.add((id(x), leg.reached))
                time += origin.time(x, leg, counted)
        return time

    def _remake(self, given: list[Any], need: TensorSpec) -> _Remake | None:
        rows = enumerate(zip(self.question.places, self.question.operands, strict=True))
        values = [(i, at(given, place), spec) for i, (place, spec) in rows]
        followed = frozenset([i for i, x, spec in values if _is_followed(x, spec)])
        made = frozenset([i for i, x, _ in values if i in followed and origin_of(x)])
        key = need, followed, made, topology()
        if key not in self.plans:
            self.plans[key] = self._plan(need, followed, made)
        return self.plans[key]

    def _plan(self, need: TensorSpec, followed: frozenset[int], made: frozenset[int]) -> _Remake | None:
        question = self.question._replace(gradients=followed)
        if (laid := _cut_for(question, need)) is None:
            return None
        time, legs = PASSES * working(question.factors, laid.operands, laid.results), {}
        for i, (spec, to, axes) in enumerate(zip(question.operands, laid.operands, laid.casts, strict=True)):
            move = moves(spec, to, axes, topology(), i in followed)
            if i in made and to is not spec and not axes:
                legs[i] = move.leg
            else:
                time += move.time
        if time >= moves(self.result, need, (), topology(), True).time:
            return None
        question = question._replace(viewed_call=question.at(laid.operands).viewed_call)
        return _Remake(plan_of(question, laid), time, legs)


def _cut_for(question: Question, need: TensorSpec) -> Strategy | None:
    """Return the strategy that cuts the operands so that the call gives its result as needed, or None."""
    factors, specs = question.factors, question.operands
    if question.row.rule is reshaped:
        back = regrouped(need, specs[0])
        if back is None or back.regrouped is None:
            return None
        partitions = [back.regrouped]
    else:
        cut: dict[int | None, Entry] = dict(zip(factors.results[0], need.partition, strict=True))
        cut[None] = None
        if not factors.whole.isdisjoint([factor for factor, entry in cut.items() if entry is not None]):
            return None
        partitions = [P(*map(cut.get, dims)) for dims in factors.operands]
    lie = [spec.with_partition(partition) for spec, partition in zip(specs, partitions, strict=True)]
    laid = best_strategy(question.at(lie)._replace(gradients=frozenset()))
    if laid is None or laid.by_body or laid.results[0] is not need or list(laid.operands) != lie:
        return None
    return laid


def _by_places(question: Question, result: TensorSpec) -> tuple[Question, list[tuple[int, int]]]:
    """Return ``repeat`` as a look-up along the dims that grow, and their sizes before and after.

    The places along each of them are one more operand. A rank looks up its own, wherever its block begins.
    """
    (spec,) = question.operands
    new = result.ndim - spec.ndim
    sizes = [*zip((*(1,) * new, *spec.shape), result.shape, strict=True)]
    grown = [d for d, (before, after) in enumerate(sizes) if before != after]
    kept = tuple([None if d in grown else d for d in range(result.ndim)])
    places = [TensorSpec(spec.mesh, P(None), (result.shape[d],), torch.int64) for d in grown]
    looked_up = question._replace(
        row=Row(elementwise, local=functools.partial(_look_up, new, grown)),
        places=range(1 + len(grown)),
        operands=[spec, *places],
        factors=Factors((kept[new:], *[(d,) for d in grown]), (tuple(range(result.ndim)),)),
        names=(),
        plain=frozenset(range(1, 1 + len(grown))),
    )
    return looked_up, [sizes[d] for d in grown]


def _look_up(new: int, dims: Sequence[int], _: tuple[int, ...], x: Tensor, *places: Tensor) -> Tensor:
    x = x[(None,) * new]
    for d, at_dim in zip(dims, places, strict=True):
        x = x.index_select(d, at_dim)
    return x


class _Remake(NamedTuple):
    """How a cut result is made anew."""

    plan: OpPlan
    time: float  # in µs, without the operands below
    legs: dict[int, Leg]  # of operands that are made of less themselves


def _is_followed(x: Any, spec: TensorSpec) -> bool:
    return is_float(spec.dtype) and bool(x.requires_grad)


class _Origin:
    """The call and the operands that a value was made of.

    It is void once one of them is written into or detached. Copies and pickles do not have it.
    """

    __slots__ = ("again", "blocks", "nodes", "stamps")

    def __init__(self, again: _Again | None = None, out: Tensor | None = None, blocks: Sequence[Any] = ()) -> None:
        self.again, self.blocks = again, blocks
        operands = self._operands()
        self.stamps: list[Stamp] = [] if out is None else [stamp(x) for x in (out, *operands)]
        self.nodes = [x.grad_fn for x in operands]

    def _operands(self) -> list[Tensor]:
        return [] if self.again is None else [at(self.blocks, place) for place in self.again.places]

    def __call__(self, out: Tensor, leg: Leg) -> Tensor | None:
        """Make the value ``out`` anew, cut as at the end of a leg, or return None."""
        operands = self._operands()
        if self.again is None or not all(map(is_unwritten, (out, *operands), self.stamps)):
            return None
        if any(x.grad_fn is not node for x, node in zip(operands, self.nodes, strict=True)):
            return None
        return self.again.run(self.blocks, leg.reached)

    def time(self, out: Tensor, leg: Leg, counted: set[tuple[int, TensorSpec]]) -> float:
        """Return the µs in which ``out`` is cut: made anew, or sliced, with a gather of its gradient."""
        gather = moves(leg.source, leg.reached, (), topology(), True).time
        if self.again is None:
            return gather
        if repeats_along(out, leg):
            gather = min(time_of_equal(leg), gather)
        return min(self.again.time(self.blocks, leg.reached, counted), gather)

    def __reduce__(self) -> Any:
        return _Origin, ()

    def __deepcopy__(self, memo: Any) -> _Origin:
        return _Origin()
