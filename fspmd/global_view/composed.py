"""The parts of calls: what a call consists of, found without running it, and whether it runs in its parts.

`Calls` tells the parts to the search for layouts, too. A composed function of operands with fewer rows than ranks runs
part by part, or on whole operands. Each part is planned by itself and leaves operands in place where they lie right. If
some ranks have no rows, sharding saves nothing, and the collectives of the parts may take longer than gathering the
operands. The cheaper one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import optree
import torch
from torch import Tensor

from fspmd.copies import refuse_copy
from fspmd.global_view.call_keys import hashable
from fspmd.global_view.interceptors import intercept_dispatch
from fspmd.global_view.kernels import GlobalCall
from fspmd.global_view.op_plan import OpPlan, opaque_plan
from fspmd.global_view.planning import plan_call
from fspmd.global_view.question import Question, ask, places_of, spec_of
from fspmd.global_view.refusals import refuse_shared_memory, shown
from fspmd.global_view.result_types import joined, on_meta
from fspmd.global_view.strategies import PASSES, Strategy, best_strategy, working
from fspmd.global_view.unruled import Run, gathered
from fspmd.meshes.mesh import Mesh
from fspmd.ops.signatures import Place, at
from fspmd.ops.traits import name_of, writes
from fspmd.redistribution.cost import topology
from fspmd.redistribution.moves import moves
from fspmd.redistribution.redistribute import redistribute
from fspmd.remembered import wrote
from fspmd.rules.draws import DRAWS, DROPOUTS
from fspmd.rules.like_functions import LIKES
from fspmd.sharded import Sharded, alike, call_torch
from fspmd.spec import P, TensorSpec, is_float
from fspmd.torch_internals import transforms_active
from fspmd.tracing import hidden
from fspmd.transport.randomness import kept

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
        replicated = [as_replicated(x) if isinstance(x, Sharded) else x for x in leaves]
        key = (func, treedef, tuple(map(hashable, replicated)))
        if key not in self._known:
            plain: Any = treedef.unflatten(replicated)
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
    return [at(given, place) for place in question.places]


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


def cheaper(plan: OpPlan, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpPlan:
    """Return the plan of a call. If it runs in parts and ranks have no rows, the new plan may gather the operands."""
    if plan.in_parts and plan.whole is not None:
        tree: Any = (args, kwargs)
        specs = [x.spec for x in optree.tree_leaves(tree) if isinstance(x, Sharded)]
        if any(spec.thinnest == 0 and 0 not in spec.shape for spec in specs):  # some ranks, but not all, have no rows
            return opaque_plan(_Either(func, plan.whole))
    return plan


class _Unknown(Exception):
    """The cost of a part is unknown: it depends on values, or the part communicates by itself."""


class _Either:
    """A call in parts or on whole operands. The operands that will have a gradient decide which."""

    def __init__(self, func: Any, parts: Run) -> None:
        self.func, self.parts = func, parts
        self.gathers: dict[tuple[bool, ...], tuple[int, ...] | None] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tree: Any = (args, kwargs)
        leaves, treedef = optree.tree_flatten(tree, none_is_leaf=True)
        followed = tuple([isinstance(x, Tensor) and _is_followed(x) for x in leaves])
        if followed not in self.gathers:
            self.gathers[followed] = _writes_if_gathered(self.parts, leaves, treedef, followed)
        written = self.gathers[followed]
        return self.parts(args, kwargs) if written is None else self._run_replicated(leaves, treedef, written)

    def _run_replicated(self, leaves: Sequence[Any], treedef: Any, written: Sequence[int]) -> Any:
        """Run on gathered operands; ``written`` are the places of operands that the function writes into."""
        for i in written:
            refuse_copy(leaves[i].local, shown(self.func))
            refuse_shared_memory(self.func, leaves[i], at_once=False)
        given, whole = list(leaves), dict[int, Sharded]()
        for i, x in enumerate(leaves):
            if isinstance(x, Sharded) and x.spec.partition.mentioned:
                whole[i] = given[i] = _replicated(x)
        args, kwargs = treedef.unflatten(given)
        out: Any = self.parts(args, kwargs)
        for i in {*written} & whole.keys():
            leaves[i].local.copy_(redistribute(whole[i].local, whole[i].spec, leaves[i].spec))
            wrote(leaves[i].local)
        originals = {id(gathered): leaves[i] for i, gathered in whole.items()}
        return optree.tree_map(lambda x: originals.get(id(x), x), out, none_is_leaf=True)


def _is_followed(x: Sharded | Tensor) -> bool:
    """Whether a value will have a gradient."""
    transformed = transforms_active()
    return is_float(x.dtype) and (transformed or (torch.is_grad_enabled() and bool(x.requires_grad)))


def _replicated(x: Sharded) -> Sharded:
    spec = x.spec.with_partition(P())
    return alike(redistribute(x.local, x.spec, spec), x, spec)


@hidden
def _writes_if_gathered(
    parts: Run, leaves: Sequence[Any], treedef: Any, followed: Sequence[bool]
) -> tuple[int, ...] | None:
    """Return the places of operands that the function writes into, or None if the parts cost no more than a gather.

    None also if the function fails: the call itself then raises.
    """
    values = [x for x in leaves if isinstance(x, Sharded)]
    reckoner = _Reckoner(values[0].spec.mesh)
    given = [
        reckoner.stand_in(x.spec if isinstance(x, Sharded) else x, flag) if isinstance(x, Tensor) else x
        for x, flag in zip(leaves, followed, strict=True)
    ]
    args, kwargs = treedef.unflatten(given)
    try:
        with intercept_dispatch(lambda _: reckoner.dispatch), kept():
            parts(args, kwargs)
    except Exception:
        return None
    gathering = reckoner.alone
    for x, flag in zip(leaves, followed, strict=True):
        if isinstance(x, Sharded):
            gathering += moves(x.spec, x.spec.with_partition(P()), (), topology(), flag).time
    written = tuple([i for i, x in enumerate(given) if isinstance(x, Sharded) and id(x) in reckoner.written])
    return None if reckoner.time <= gathering + _ROUNDING or any(followed[i] for i in written) else written


_ROUNDING = 1e-6  # µs


class _Reckoner:
    """Runs a function on values without data, and adds up the time of its parts: as planned, and on whole operands."""

    def __init__(self, mesh: Mesh) -> None:
        self.time = self.alone = 0.0  # µs: as planned, and of the computation on whole operands
        self.written = set[int]()
        self._calls = Calls(mesh)
        self._mesh = mesh
        self._made: list[Any] = []  # keeps the values alive, so that each `id` stays theirs
        self._followed = set[int]()
        self._views = set[int]()
        self._cast = set[Any]()

    def stand_in(self, like: TensorSpec | Tensor, followed: bool) -> Any:
        """Return a value without data, of a layout, or of the shape of a plain tensor."""
        if isinstance(like, TensorSpec):
            made: Any = Sharded(torch.empty(like.block_shape, dtype=like.dtype, device="meta"), like)
        else:
            made = torch.empty(like.shape, dtype=like.dtype, device="meta")
        self._made.append(made)
        if followed:
            self._followed.add(id(made))
        return made

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Reckon a call, in place of `fspmd.global_view.dispatch.dispatch`."""
        kwargs = kwargs or {}
        answer = self._calls.ask(func, args, kwargs)
        if answer.run is not None and answer.in_parts:
            return answer.run(args, kwargs)
        if answer.question is not None:
            return self._row(func, answer.question, args, kwargs)
        if answer.run is not None or answer.gathers or writes(func):
            raise _Unknown
        return self._like(func, args, kwargs)

    def _row(self, func: Any, question: Question, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = operands_of(question, args, kwargs)
        specs = [spec_of(x, self._mesh) for x in values]
        follows = torch.is_grad_enabled() and name_of(func) != "detach"
        followed = frozenset([i for i, x in enumerate(values) if follows and id(x) in self._followed])
        laid = question.at(specs)._replace(gradients=followed)
        best = best_strategy(laid)
        if best is None:
            raise _Unknown
        self._add(laid, best, values)
        if question.fixed:
            if id(args[0]) in self._views:
                raise _Unknown
            self.written.add(id(args[0]))
            return args[0]
        made = [self.stand_in(spec, bool(followed) and is_float(spec.dtype)) for spec in best.results]
        if question.viewed is not None:
            self._views.update(map(id, made))
        return joined(question.kind, made)

    def _add(self, question: Question, best: Strategy, values: Sequence[Any]) -> None:
        """Add the moves, forward and backward, and the computation. Uses of a value share the sum of its gradient."""
        followed, passes = question.gradients, PASSES if question.gradients else 1
        for i, (x, spec) in enumerate(zip(values, question.operands, strict=True)):
            need, axes = best.operands[i], best.casts[i]
            cost = moves(spec, need, axes, topology(), i in followed)
            self.time += cost.forward
            if spec is not need or (id(x), axes) not in self._cast:
                self.time += cost.backward + cost.casting
            self._cast.add((id(x), axes if spec is need else None))
        self.time += best.body + (best.back if followed else 0.0)
        self.time += passes * working(question.factors, best.operands, best.results)
        uncut = [[spec.with_partition(P()) for spec in specs] for specs in (best.operands, best.results)]
        self.alone += passes * working(question.factors, uncut[0], uncut[1])

    def _like(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results of a draw, or new values: laid out as the first operand if they have its shape."""
        operands = places_of(args, kwargs, self._mesh)
        outcome = on_meta(GlobalCall(func, args, kwargs, operands))
        if outcome is None:
            raise _Unknown
        first = operands[0][1]
        followed = torch.is_grad_enabled() and bool(args) and id(args[0]) in self._followed
        made = [
            self.stand_in(
                TensorSpec(self._mesh, P(*first.partition) if shape == first.shape else P(), shape, dtype), followed
            )
            for shape, dtype in outcome.results
        ]
        return joined(outcome.kind, made)
