"""The origin of a value that is larger than its operands: an embedding, or an expanded or repeated tensor.

If such a value is equal on all ranks and is cut later, each rank makes its part anew, from cast or cut operands.
Backward then sums gradients of the operands and gathers nothing. For a table ``[2, D]``, looked up at ``[B, S]`` places
and then cut along B, it all-reduces ``[2, D]`` in place of a gather of ``[B, S, D]``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fspmd.entries import entry_axes
from fspmd.global_view.layouts import Choice, LayoutProblem, layouts_of, working
from fspmd.global_view.op_plan import OpPlan, cast_operands, move_operands, plan_of
from fspmd.global_view.question import Question
from fspmd.global_view.strategies import PASSES
from fspmd.ops.signatures import at
from fspmd.pairs import is_transformed
from fspmd.redistribution.cost import topology
from fspmd.redistribution.moves import Leg, moves
from fspmd.redistribution.redistribute import cut_dims, keep, part_of_equal
from fspmd.remembered import Stamp, is_unwritten, remember_origin, stamp
from fspmd.rules.views import repeated
from fspmd.spec import TensorSpec, is_float


def noting_origin(func: Any, positional: int, question: Question, plan: OpPlan, result: TensorSpec) -> OpPlan:
    """Return the plan of a call that enlarges its operands. It notes the origin of the result."""
    return replace(plan, local=functools.partial(_noted, plan.local, _Again(func, positional, question, result)))


def _noted(local: Callable[..., Tensor], again: _Again, *args: Any, **kwargs: Any) -> Tensor:
    out = local(*args, **kwargs)
    if out.requires_grad and not is_transformed():
        remember_origin(out, _Origin(again, out, (*args, *kwargs.values())))
    return out


class _Again:
    """A call that is planned again, for a cut result."""

    def __init__(self, func: Any, positional: int, question: Question, result: TensorSpec) -> None:
        self.func, self.positional, self.question, self.result = func, positional, question, result
        self.plans: dict[Any, OpPlan | None] = {}
        self.equal = _equal_dims(question, result)

    def run(self, given: list[Any], need: TensorSpec) -> Tensor | None:
        """Return this rank's block in another layout of the result, or None if a gather of the gradient is cheaper."""
        followed = frozenset(
            [i for i, (place, spec) in enumerate(self.question.operands) if _is_followed(at(given, place), spec)]
        )
        key = need, followed, topology()
        if key not in self.plans:
            self.plans[key] = self._plan(need, followed)
        plan = self.plans[key]
        if plan is None:
            return None
        casts = move_operands(plan, given)
        casts += cast_operands(plan, given)
        n, names = (len(given), ()) if plan.in_order else (self.positional, self.question.names)
        out: Tensor = plan.local(*given[:n], **dict(zip(names, given[n:], strict=True)))
        keep(casts, out)
        return out

    def _plan(self, need: TensorSpec, followed: frozenset[int]) -> OpPlan | None:
        question = self.question._replace(gradients=followed)
        specs, factors = [spec for _, spec in question.operands], question.factors
        of_result = {
            axis: factor for factor, e in zip(factors.results[0], need.partition, strict=True) for axis in entry_axes(e)
        }
        choices: dict[str, Choice] = dict.fromkeys(need.mesh.axis_names, "I" * len(specs))
        choices |= {axis: factor for axis, factor in of_result.items() if factor is not None}
        if not factors.whole.isdisjoint(of_result.values()):
            return None
        problem = LayoutProblem(factors, "", specs, question.results, empty=question.row.empty)
        laid = layouts_of(problem, factors, choices)
        # from empty blocks torch computes no gradient of a table
        if laid is None or laid.results[0] is not need or need.thinnest == 0:
            return None
        rows = enumerate(zip(specs, laid.operands, laid.casts, strict=True))
        time = sum([moves(spec, to, axes, topology(), i in followed).time for i, (spec, to, axes) in rows])
        time += PASSES * working(factors, laid.operands, laid.results)
        if time >= moves(self.result, need, (), topology(), True).time:
            return None
        return plan_of(self.func, self.positional, question, laid)


def _equal_dims(question: Question, result: TensorSpec) -> frozenset[int]:
    """Return the dims of a result along which all elements are equal, since ``repeat`` makes them of one."""
    if question.row.rule is not repeated:
        return frozenset()
    before = question.operands[0][1].shape
    sizes = (*(1,) * (result.ndim - len(before)), *before)
    return frozenset([d for d, size in enumerate(sizes) if size == 1])


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
        return [] if self.again is None else [at(self.blocks, place) for place, _ in self.again.question.operands]

    def __call__(self, out: Tensor, leg: Leg) -> Tensor | None:
        """Make the value ``out`` anew, cut as at the end of a leg, or return None."""
        operands = self._operands()
        if self.again is None or not all(map(is_unwritten, (out, *operands), self.stamps)):
            return None
        if any(x.grad_fn is not node for x, node in zip(operands, self.nodes, strict=True)):
            return None
        if cut_dims(leg) <= self.again.equal:
            return part_of_equal(out, leg)
        return self.again.run(list(self.blocks), leg.reached)

    def __reduce__(self) -> Any:
        return _Origin, ()

    def __deepcopy__(self, memo: Any) -> _Origin:
        return _Origin()
