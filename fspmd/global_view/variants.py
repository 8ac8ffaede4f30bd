"""The plan of a call that a rule decides, or its plans, where facts that no key holds choose: gradients and numbers."""

from __future__ import annotations

import functools
from cmath import isfinite
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.copies import refuse_copy
from fspmd.global_view.op_plan import OpPlan, opaque_plan, plan_of
from fspmd.global_view.origins import noting_origin
from fspmd.global_view.question import Question
from fspmd.global_view.refusals import refuse_shared_memory, refuse_write, shown
from fspmd.global_view.strategies import Strategy, best_strategy
from fspmd.ops.signatures import Place, at
from fspmd.pairs import is_transformed
from fspmd.redistribution.redistribute import ended, redistribute
from fspmd.remembered import has_moves
from fspmd.sharded import Sharded, call_torch
from fspmd.spec import P, TensorSpec, is_float
from fspmd.torch_internals import transforms_active

_NONE: Final = frozenset[int]()


def propagate(question: Question, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpPlan | None:
    """Plan a call by its question, or return None if the graph of the function decides it."""
    must_move = (
        question.fixed and best_strategy(question) is None
    )  # the write has no strategy that leaves its operand in place
    if must_move and question.operands[0].partition.unreduced:
        return opaque_plan(functools.partial(_write_sum, question.func))
    numbers = _scales(question, (*args, *kwargs.values())) if question.linear else []
    if question.fixed and question.row.sets and (must_move or numbers):
        return None  # the graph computes the new value, which is then written in any layout
    if numbers:
        by_numbers = _PlansByNumbers(question._replace(made=_NONE), numbers)
        return _chosen(by_numbers.of_terms, by_numbers.plan)
    return _propagate(question)


def _write_sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write a value that is not a sum of terms into a pending sum: as the term of one rank, with zeros on the others.

    The operand keeps its layout, and its views see the write.
    """
    x: Sharded = args[0]
    refuse_copy(x.local, shown(func))
    refuse_shared_memory(func, x, at_once=False)
    lies = x.spec.partition
    value = x.spec.with_partition(P(*lies, reduced=lies.reduced))
    new = call_torch(func, (Sharded(redistribute(x.local, x.spec, value), value), *args[1:]), kwargs)
    return call_torch(Tensor.copy_, (x, new))


def _propagate(question: Question) -> OpPlan:
    known: list[Any] = []
    best = best_strategy(question, known)
    if best is None:
        refuse_write(question.func, question.operands)
    plan = plan_of(question, best)
    empty = True in [0 in spec.shape for spec in question.operands]
    floating = frozenset([i for i, spec in enumerate(question.operands) if is_float(spec.dtype)])
    pends = _pending(question)
    pending = () if question.viewed is not None or question.fixed else tuple(pends)
    followed = question._replace(gradients=floating)
    ends = bool(pends) and followed.passes_on != question.passes_on
    weighed = plan.needs_redistribute or best.by_body or empty or (bool(plan.casts) and question.weighs) or ends
    if weighed and not (plan.needs_redistribute or ends):
        weighed = bool(floating) and not _same(best, best_strategy(followed, known))
    if not (pending or (weighed and floating)):
        return _with_origin(question, best, plan)
    return _chosen(plan, _ByBlocks(question, plan, weighed, pending).plan)


def _with_origin(question: Question, best: Strategy, plan: OpPlan) -> OpPlan:
    """Return the plan. If the call enlarges its operands, the returned plan notes the origin of the result.

    Operands that are ``made`` of less themselves do not count, if the result is not much smaller. Other operands that
    are as large as the result do: if it is cut, their gradients are gathered.
    """
    if plan.needs_redistribute or best.by_body or question.kind is not None or question.products:
        return plan
    result, specs, made = plan.results, question.operands, question.made
    if any(casts and is_float(spec.dtype) for spec, casts in zip(specs, best.casts, strict=True)):
        return plan
    floating = [spec for spec in specs if is_float(spec.dtype)]
    assert isinstance(result, TensorSpec)
    if question.fixed or not floating or not is_float(result.dtype):
        return plan
    others = [spec for i, spec in enumerate(specs) if is_float(spec.dtype) and i not in made]
    if sum(spec.block_bytes for spec in others) >= result.block_bytes:
        return plan
    if made and 2 * result.block_bytes < max(specs[i].block_bytes for i in made):
        return plan
    if question.func in (Tensor.clone, torch.clone):  # its gradient is gathered, for those who ask for it
        return plan
    if any(spec.partition.unreduced or spec.partition.reduced for spec in (*specs, result)):
        return plan
    if all(n == 1 or axis in result.partition.mentioned for axis, n in result.mesh.shape.items()):
        return plan
    return noting_origin(question, plan, result)


def _pending(question: Question) -> list[tuple[int, Place, TensorSpec]]:
    rows = enumerate(zip(question.places, question.operands, strict=True))
    return [(i, place, spec) for i, (place, spec) in rows if spec.partition.unreduced]


def _chosen(plan: OpPlan, choose: Any) -> OpPlan:
    return OpPlan(plan.results, True, plan.moves, plan.casts, plan.local, choose=choose)


def _same(strategy: Strategy, other: Strategy | None) -> bool:
    alike = ("operands", "results", "by_body")
    return other is not None and all(getattr(strategy, name) == getattr(other, name) for name in alike)


class _ByBlocks:
    """The plans of a call whose cheapest strategy depends on the blocks of its operands.

    Args:
        weighed: It depends on which operands will have a gradient.
        pending: Operands that are pending sums. It depends on the layouts in which other calls have settled them.
    """

    def __init__(
        self,
        question: Question,
        plan: OpPlan,
        weighed: bool,
        pending: Sequence[tuple[int, Place, TensorSpec]],
    ) -> None:
        self.question, self.weighed, self.pending = question, weighed, pending
        rows = enumerate(zip(question.places, question.operands, strict=True))
        self.floating = [(i, place) for i, (place, spec) in rows if is_float(spec.dtype)]
        self.first = plan
        self.plans: dict[Any, OpPlan] = {(_NONE, ()): plan}

    def plan(self, blocks: list[Any]) -> OpPlan:
        """Return the plan of a call on these blocks."""
        settled: tuple[tuple[int, TensorSpec], ...] = ()
        for _, place, _ in self.pending:
            if has_moves(blocks[place] if type(place) is int else at(blocks, place)):
                settled = self._settled(blocks)
                break
        if not (settled or self.weighed):
            return self.first
        followed = _NONE
        if transforms_active():
            followed = frozenset([i for i, _ in self.floating])
        elif torch.is_grad_enabled():
            followed = frozenset([i for i, place in self.floating if at(blocks, place).requires_grad])
        plan = self.plans.get((followed, settled))
        if plan is None:
            plan = self.plans[followed, settled] = self._plan(followed, dict(settled))
        return plan

    def _settled(self, blocks: list[Any]) -> tuple[tuple[int, TensorSpec], ...]:
        """Return the operands whose sums were settled before, with the layouts of the sums."""
        if is_transformed():
            return ()
        specs = [(i, ended(at(blocks, place), spec)) for i, place, spec in self.pending]
        return tuple([(i, spec) for i, spec in specs if spec is not None])

    def _plan(self, followed: frozenset[int], settled: dict[int, TensorSpec]) -> OpPlan:
        question = self.question._replace(gradients=followed)
        lie = [settled.get(i, spec) for i, spec in enumerate(question.operands)]
        best = best_strategy(question.at(lie) if settled else question)
        if best is None:
            refuse_write(question.func, question.operands)
        return plan_of(question, best, lie)


# --- numbers that multiply a pending sum: infinity times a term is not a term of the result ---------------------------


def _scales(question: Question, arguments: Sequence[Any]) -> list[int]:
    """Return the places of numbers that would multiply or divide each term of a pending sum."""
    pends = question.factors.summed or True in [bool(spec.partition.unreduced) for spec in question.operands]
    if not pends:
        return []
    kinds = (int, float, complex) if question.row.divides else (float, complex)
    return [i for i, arg in enumerate(arguments) if isinstance(arg, kinds) and not isinstance(arg, bool)]


class _PlansByNumbers:
    """Two plans: one multiplies the terms of a pending sum. The other, for infinity and nan, settles the sum first."""

    def __init__(self, question: Question, numbers: Sequence[int]) -> None:
        self.question, self.numbers = question, numbers
        self.of_terms = _propagate(question)
        self.of_sum: OpPlan | None = None

    def plan(self, blocks: list[Any]) -> OpPlan:
        """Return the plan of a call on these blocks and numbers."""
        plan = self.of_terms
        for i in self.numbers:
            if not isfinite(blocks[i]) or (self.question.row.divides and blocks[i] == 0):
                plan = self.of_sum = self.of_sum or self._of_sum()
        return plan if plan.choose is None else plan.choose(blocks)

    def _of_sum(self) -> OpPlan:
        question, factors = self.question, self.question.factors
        whole = factors._replace(summed=frozenset(), whole=factors.whole | factors.summed, others=())
        ended = question._replace(linear="", factors=whole).at(question.operands)
        return _propagate(ended)
