"""Plans a call that is not in the cache. It has several plans if facts that are in no key decide, such as gradients.

A call runs by a handler, a composite, a gather, a rule, or the graph of its function: the first of these that applies.
"""

from __future__ import annotations

import functools
from cmath import isfinite
from collections.abc import Sequence
from typing import Any, Final

import optree
import torch
from torch import Tensor
from torch.nn import functional as F

from fspmd.copies import refuse_copy
from fspmd.errors import ArgumentError, MeshError, VarianceError
from fspmd.foreign import refuse_misfit
from fspmd.global_view.op_plan import OpPlan, opaque_plan, plan_of
from fspmd.global_view.origins import noting_origin
from fspmd.global_view.question import Question, ask, places_of, sharded_values, tensors_of
from fspmd.global_view.refusals import refuse_higher_order, refuse_shared_memory, refuse_write, shown
from fspmd.global_view.results import outs_of, written_into
from fspmd.global_view.spellings import (
    INDEXING,
    as_composite,
    in_place,
    is_index,
    respelled,
    says_inplace,
    to_kind_of,
    tried,
    with_numbers,
)
from fspmd.global_view.strategies import Strategy, best_strategy
from fspmd.global_view.unruled import gathered, unruled
from fspmd.ops.operators import BINARY, REFLECTED
from fspmd.ops.signatures import Place, at
from fspmd.ops.traits import name_of
from fspmd.pairs import is_transformed
from fspmd.redistribution.redistribute import ended, redistribute
from fspmd.remembered import has_moves
from fspmd.rules import ENGINE, composite_of, handler_of, is_gathered, is_registered, is_ruled
from fspmd.sharded import Sharded, call_torch, is_sharded
from fspmd.spec import P, TensorSpec, is_float
from fspmd.torch_internals import HigherOrderOperator, transforms_active
from fspmd.tracing import hidden
from fspmd.transport.local_tensor import is_simulated

_NONE: Final = frozenset[int]()


@hidden
def plan_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpPlan:
    """Decide how a call with `Sharded` values runs.

    This leaves inference mode too, in which torch does not say which results are views.

    Raises:
        ArgumentError: The call cannot run, or it fails on the global tensors too.
        MeshError: The values lie on several meshes.
    """
    if isinstance(func, HigherOrderOperator):
        refuse_higher_order(func, [x.spec for x in sharded_values(args, kwargs)])
    leaves = optree.tree_leaves((*args, *kwargs.values()), none_is_leaf=True)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if kwargs or len(tensors) < len(leaves) or func in INDEXING:
        run = respelled(func, args, kwargs, leaves)
        if run is not None:
            return opaque_plan(run)
    try:
        return _plan(func, args, kwargs, tensors)
    except ArgumentError:
        if any(map(is_index, tensors_of(args[1:], kwargs))):
            return opaque_plan(functools.partial(with_numbers, func))
        raise
    except VarianceError:
        if is_sharded(args[0]):  # if the operand is a copy in place of a view, this error says more
            refuse_copy(args[0].local, shown(func))
        raise


def _plan(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> OpPlan:
    specs = [x.spec for x in tensors if type(x) is Sharded]
    mesh = specs[0].mesh
    if len(specs) < len(tensors):
        _check_beside(func, tensors)
    for spec in specs:
        if spec.mesh is not mesh and spec.mesh != mesh and not _takes_meshes(func):
            raise MeshError(
                f"{shown(func)} got values on two meshes, {mesh!r} and {spec.mesh!r}; move one with device_put"
            )
    if kwargs and func is not F.normalize and outs_of(func, kwargs):
        return opaque_plan(functools.partial(written_into, func))
    if kwargs or _is_not_defined(func, args) or not is_ruled(func):
        plan = _aside(func, args, kwargs, len(tensors))
        if plan is not None:
            return plan
    operands = places_of(args, kwargs, mesh)
    question = ask(func, args, kwargs, operands) if len(operands) == len(tensors) else None
    plan = None if question is None else _by_rule(question, args, kwargs)
    if plan is not None:
        return plan
    run, in_parts = unruled(func, specs, args, kwargs)
    return opaque_plan(run, in_parts=in_parts)


def _check_beside(func: Any, tensors: list[Tensor]) -> None:
    """Raise unless the plain tensors beside a `Sharded` are global values."""
    for x in tensors:
        refuse_misfit(x, f"{shown(func)} got, beside a Sharded,")
    if any(map(is_simulated, tensors)):
        raise ArgumentError(
            f"{shown(func)} got the blocks of all simulated ranks beside a Sharded (x.local, or what a body "
            "computed); pass the Sharded itself, or a global tensor"
        )


def _aside(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: int) -> OpPlan | None:
    """Return the plan of a call if something other than a row decides it; ``tensors`` is the number of tensors."""
    _check_device(func, args, kwargs)
    if _is_not_defined(func, args):
        return opaque_plan(lambda args, kwargs: NotImplemented)
    registered = is_registered(func)
    if not registered and (handler := handler_of(func)) is not None:
        return opaque_plan(functools.partial(tried, func, handler))
    if args and type(args[0]) is Sharded and says_inplace(func, args, kwargs):
        return opaque_plan(functools.partial(in_place, func))
    if registered:
        return None
    if name_of(func) in ("to", "type_as") and isinstance(args[1] if len(args) > 1 else kwargs.get("other"), Tensor):
        return opaque_plan(to_kind_of)
    if (composite := composite_of(func, args, kwargs)) is not None:
        return opaque_plan(as_composite(func, composite, kwargs), in_parts=True)
    if is_gathered(func, tensors, args):
        by_tensor = name_of(func) == "narrow" and any(map(is_index, tensors_of(args[1:], kwargs)))
        return opaque_plan(functools.partial(with_numbers if by_tensor else gathered, func))
    return None


def _takes_meshes(func: Any) -> bool:
    """Whether operands may lie on several meshes, since the function treats each by itself."""
    return func in ENGINE or name_of(func).startswith("_foreach_")


def _is_not_defined(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a tensor leaves an operator to its other operand: ``x == "a"`` is False, ``x + "a"`` fails."""
    if len(args) != 2 or isinstance(args[1], (Tensor, int, float, complex)):
        return False
    name = name_of(func)
    operator = name.startswith("__") and name.strip("_") in (*BINARY, *REFLECTED)
    return operator and getattr(torch.empty((), device="meta"), name)(args[1]) is NotImplemented


def _check_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for a move of a sharded value to another device: its mesh communicates on one device."""
    name = name_of(func)
    if name not in ("to", "cpu", "cuda", "_to_copy") or not is_sharded(args[0]) or not args[0].spec.partition.mentioned:
        return
    given = [name] if name in ("cpu", "cuda") else [kwargs.get("device"), *args[1:2]]
    try:
        device = next((torch.device(x) for x in given if isinstance(x, (str, torch.device))), None)
    except RuntimeError as error:
        raise ArgumentError(f"{shown(func)} of {args[0]!r} got {given}: {error}") from error
    home = args[0].spec.mesh.device
    if device is None:
        return
    if device.type != home.type or (None not in (device.index, home.index) and device.index != home.index):
        raise ArgumentError(
            f"{shown(func)} would take {args[0]!r} to {str(device)!r}, but its mesh communicates on {str(home)!r}; "
            f"write device_get(x).to({str(device)!r})"
        )


# --- the plan, or the plans, of a call that a rule decides ------------------------------------------------------------


def _by_rule(question: Question, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpPlan | None:
    """Plan a call by its question, or return None if the graph of the function decides it."""
    must_move = question.fixed and best_strategy(question) is None  # no strategy leaves the operand in place
    if must_move and question.operands[0].partition.unreduced:
        return opaque_plan(functools.partial(_write_sum, question.func))
    numbers = _scales(question, (*args, *kwargs.values())) if question.linear else []
    if question.fixed and question.row.sets and (must_move or numbers):
        return None  # the graph computes the new value, which is then written in any layout
    if numbers:
        by_numbers = _PlansByNumbers(question._replace(made=_NONE), numbers)
        return _chosen(by_numbers.of_terms, by_numbers.plan)
    return _of_question(question)


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


def _of_question(question: Question) -> OpPlan:
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
    if plan.needs_redistribute or best.by_body or question.kind is not None or question.viewed_call:
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
        self.of_terms = _of_question(question)
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
        sums_first = factors._replace(summed=frozenset(), whole=factors.whole | factors.summed, alternatives=())
        ended = question._replace(linear="", factors=sums_first).at(question.operands)
        return _of_question(ended)
