"""The strides of the results of a call that runs as several calls, as torch would give them for one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fspmd.copies import as_copies, share_memory
from fspmd.global_view.operands import places_of, tensors_of
from fspmd.global_view.propagate import OpPlan, opaque_plan
from fspmd.global_view.refusals import shown
from fspmd.global_view.result_types import Outcome, memory_of, on_meta
from fspmd.ops.signatures import at
from fspmd.rules import ENGINE, writes
from fspmd.sharded import Sharded, laid, lies, relay


def with_strides(plan: OpPlan, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpPlan:
    """Return the plan, with results that have the strides of torch."""
    if plan.whole is None or (outcome := _outcome(func, args, kwargs)) is None:
        return plan
    run = plan.whole

    def relaid(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = run(args, kwargs)
        results = [out] if type(out) is Sharded else out
        if isinstance(results, (tuple, list)) and len(results) == len(outcome.results):
            given = (*args, *kwargs.values())
            _mark_copies(results, outcome, given, shown(func))
            _relay(results, outcome, given)
        return out

    return opaque_plan(relaid, in_parts=plan.in_parts)


def _outcome(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome | None:
    """Return the outcome of a call, or None if it is unknown, is an operand, or comes from a function of the user."""
    tensors = tensors_of(args, kwargs)
    if writes(func) or func in ENGINE or kwargs.get("out") is not None or kwargs.get("inplace"):
        return None
    if any(callable(x) for x in (*args, *kwargs.values())):
        return None
    operands = places_of(args, kwargs, next(x for x in tensors if type(x) is Sharded).spec.mesh)
    try:
        return on_meta(func, args, kwargs, operands) if len(operands) == len(tensors) else None
    except Exception:  # the call itself will raise
        return None


def _mark_copies(results: Sequence[Any], outcome: Outcome, given: Sequence[Any], name: str) -> None:
    """Mark results as copies if they would be views of an operand in torch, and are not."""
    for x, place in zip(results, outcome.bases, strict=True):
        base = None if place is None else at(given, place)
        if type(x) is type(base) is Sharded and not share_memory(x.local, base.local):
            x.block = as_copies(x.local, base.local, name)


def _relay(results: Sequence[Any], outcome: Outcome, given: Sequence[Any]) -> None:
    for i, x in enumerate(results):
        if type(x) is not Sharded or x.spec.shape != outcome.results[i][0] or any(x is arg for arg in given):
            continue
        if outcome.memory is None:
            if x.form is not x.spec:
                relay(x, Sharded(x.local, x.spec))
        elif lies(x) != (memory := memory_of(outcome.memory[i], x.dtype, given)):
            relay(x, laid(x.local, x.spec, memory))
