"""The parts of a call, found without running it: a question for a rule, or a function that makes other calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import optree
import torch
from torch import Tensor

from fspmd.global_view.call_keys import hashable
from fspmd.global_view.op_plan import places_of
from fspmd.global_view.planning import plan_call
from fspmd.global_view.question import Question, ask
from fspmd.global_view.unruled import gathered
from fspmd.meshes.mesh import Mesh
from fspmd.ops.signatures import Place, at
from fspmd.ops.traits import name_of
from fspmd.rules.draws import DRAWS, DROPOUTS
from fspmd.rules.like_functions import LIKES
from fspmd.sharded import Sharded, call_torch
from fspmd.spec import P
from fspmd.tracing import hidden

#: functions that draw or make values of an operand's shape; results lie as that operand does
_LIKE: Final = frozenset((*LIKES, *DRAWS, *DROPOUTS))


class CallParts(NamedTuple):
    """The answer of `Calls.ask`. Without a question, ``run`` or ``gathers``, the result lies as its operand does."""

    question: Question | None = None  # a rule decides the call
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None  # runs in place of the function
    gathers: bool = False  # the function takes whole operands
    in_parts: bool = False  # ``run`` only calls other functions


class Calls:
    """The parts of calls on one mesh. Layouts do not bear on them, so each kind of call is asked once."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._known: dict[Any, CallParts] = {}

    def ask(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallParts:
        """Return the parts of a call."""
        leaves, treedef = optree.tree_flatten((args, kwargs), none_is_leaf=True)
        whole = [as_replicated(x) if isinstance(x, Sharded) else x for x in leaves]
        key = (func, treedef, tuple(map(hashable, whole)))
        if key not in self._known:
            plain: Any = treedef.unflatten(whole)
            self._known[key] = self._ask(func, *plain)
        return self._known[key]

    @hidden
    def _ask(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallParts:
        if func is Tensor.__radd__ and type(args[1]) is int and not args[1] and args[0].dtype is not torch.bool:
            return CallParts(run=_copied, in_parts=True)  # 0 + x, as Python's sum starts, settles no pending sum
        if name_of(func).removesuffix("_") in _LIKE or name_of(func) in _LIKE:
            return CallParts()
        plan = plan_call(func, args, kwargs)
        if plan.whole is not None:
            gathers = getattr(plan.whole, "func", None) is gathered
            return CallParts(gathers=True) if gathers else CallParts(run=plan.whole, in_parts=plan.in_parts)
        return CallParts(ask(func, args, kwargs, places_of(args, kwargs, self._mesh)))


def _copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call_torch(Tensor.clone, args[:1], {})


def as_replicated(x: Sharded) -> Sharded:
    """Return a stand-in that lies replicated; its block is not gathered."""
    return Sharded(x.local, x.spec.with_partition(P())) if x.spec.partition.mentioned else x


def operands_of(question: Question, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors of a call in the order of its rule."""
    given = (*args, *kwargs.values())
    return [at(given, place) for place, _ in question.operands]


def replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], moved: dict[Place, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with other values at some places."""
    values: list[Any] = [*args, *kwargs.values()]
    for place, x in moved.items():
        if isinstance(place, int):
            values[place] = x
        else:
            i, k = place
            items = values[i]
            values[i] = type(items)([*items[:k], x, *items[k + 1 :]])
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))
